"""Checkpoints in Megatron's distributed format: what they hold, saving, loading, conversion."""
