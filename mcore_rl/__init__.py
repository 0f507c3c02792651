"""Preference and reinforcement learning of language models on Megatron-Core."""

__version__ = "0.1.0"
