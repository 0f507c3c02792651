"""A run: its directory, its inputs, its loop, its checkpoints, its metrics."""
