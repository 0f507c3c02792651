"""Checkpoints in Megatron's distributed format: contents, saving, loading, conversion."""
