"""A training step on this rank: microbatches, optimizer, weight updates."""
