"""Model families, one per file. Other modules get architecture details from a model's `Family`."""

from __future__ import annotations

from typing import Any

from mcore_rl.errors import UserError
from mcore_rl.models.megatron.families.base import Family, has_reward_head
from mcore_rl.models.megatron.families.dense import Gemma3, Llama, Mistral, Olmo2, Phi3, Qwen2, Qwen3
from mcore_rl.models.megatron.families.mixtures import Glm4MoE, Mixtral, Qwen2MoE, Qwen3MoE
from mcore_rl.models.megatron.families.qwen_next import (
    Qwen3Next,
    Qwen35,
    Qwen35MoE,
    Qwen35MoEText,
    Qwen35Text,
)

ALL = (
    *(Llama, Mistral, Qwen2, Qwen3, Phi3, Olmo2, Gemma3, Mixtral, Qwen2MoE, Qwen3MoE, Glm4MoE),
    *(Qwen3Next, Qwen35Text, Qwen35MoEText, Qwen35, Qwen35MoE),
)
FAMILIES: dict[str, type[Family]] = {family.model_type: family for family in ALL}

REFUSED = {"deepseek_v3": "its latent attention needs a cache and projections of their own, which are not built"}


def family_of(hf: Any) -> Family:
    """Return the family of a transformers configuration.

    Raises:
        UserError: the model type is not supported.
    """
    if hf.model_type in REFUSED:
        raise UserError(f"model.path: model type {hf.model_type!r} is not supported: {REFUSED[hf.model_type]}")
    if hf.model_type not in FAMILIES:
        raise UserError(
            f"model.path: model type {hf.model_type!r} is not supported; supported are {', '.join(FAMILIES)}"
        )
    return FAMILIES[hf.model_type](hf)


__all__ = ["FAMILIES", "Family", "family_of", "has_reward_head"]
