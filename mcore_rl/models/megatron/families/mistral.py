"""Mistral: Llama, with a sliding window in its first version."""

from mcore_rl.models.megatron.families.base import Family


class Mistral(Family):
    model_type = "mistral"
