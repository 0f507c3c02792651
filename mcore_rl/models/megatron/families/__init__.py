"""Model families, one file each. Whoever needs to know something of a model asks its `Family`."""

from __future__ import annotations

from typing import Any

from mcore_rl.errors import UserError
from mcore_rl.models.megatron.families.base import Family, has_reward_head
from mcore_rl.models.megatron.families.gemma3 import Gemma3
from mcore_rl.models.megatron.families.glm4_moe import Glm4MoE
from mcore_rl.models.megatron.families.llama import Llama
from mcore_rl.models.megatron.families.mistral import Mistral
from mcore_rl.models.megatron.families.mixtral import Mixtral
from mcore_rl.models.megatron.families.olmo2 import Olmo2
from mcore_rl.models.megatron.families.phi3 import Phi3
from mcore_rl.models.megatron.families.qwen2 import Qwen2
from mcore_rl.models.megatron.families.qwen3 import Qwen3
from mcore_rl.models.megatron.families.qwen_moe import Qwen2MoE, Qwen3MoE

FAMILIES: dict[str, type[Family]] = {
    family.model_type: family
    for family in (Llama, Mistral, Qwen2, Qwen3, Phi3, Olmo2, Gemma3, Mixtral, Qwen2MoE, Qwen3MoE, Glm4MoE)
}

REFUSED = {"deepseek_v3": "its latent attention needs a cache and projections of their own, which are not built"}


def family_of(hf: Any) -> Family:
    """The family of a transformers configuration.

    Raises:
        UserError: none that is supported.
    """
    if hf.model_type in REFUSED:
        raise UserError(f"model.path: model type {hf.model_type!r} is not supported: {REFUSED[hf.model_type]}")
    if hf.model_type not in FAMILIES:
        raise UserError(
            f"model.path: model type {hf.model_type!r} is not supported; supported are {', '.join(FAMILIES)}"
        )
    return FAMILIES[hf.model_type](hf)


__all__ = ["FAMILIES", "Family", "family_of", "has_reward_head"]
