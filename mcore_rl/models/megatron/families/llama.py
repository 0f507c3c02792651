"""Llama 2 and 3: the decoder that the others are described against."""

from mcore_rl.models.megatron.families.base import Family


class Llama(Family):
    model_type = "llama"
    has_windows = False
