"""Qwen3: Llama with a norm of each query and key head."""

from mcore_rl.models.megatron.families.base import Family


class Qwen3(Family):
    model_type = "qwen3"
    has_qk_norm = True
