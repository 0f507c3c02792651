"""Qwen2 and 2.5: Llama with biases on query, key and value."""

from mcore_rl.models.megatron.families.base import Family


class Qwen2(Family):
    model_type = "qwen2"
    has_qkv_bias = True
