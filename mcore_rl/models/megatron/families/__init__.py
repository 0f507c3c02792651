"""Model families. A `Family` contains all that other modules must know about a model's architecture."""

from __future__ import annotations

from typing import Any

from mcore_rl.models.megatron.families.base import Family, has_reward_head
from mcore_rl.models.megatron.families.deepseek_v4 import DeepseekV4
from mcore_rl.models.megatron.families.dense import (
    Gemma3,
    Glm4,
    Llama,
    Ministral3,
    Mistral,
    Olmo2,
    Olmo3,
    Phi3,
    Qwen2,
    Qwen3,
    SeedOss,
    SmolLM3,
)
from mcore_rl.models.megatron.families.gemma4 import Gemma4, Gemma4WithTowers
from mcore_rl.models.megatron.families.hyper_connected import HYV4, Glm5Next
from mcore_rl.models.megatron.families.kimi_linear import KimiLinear
from mcore_rl.models.megatron.families.minimax_m3 import MiniMaxM3
from mcore_rl.models.megatron.families.mixtures import (
    DeepseekV3,
    DeepseekV32,
    Ernie45MoE,
    Glm4MoE,
    Glm4MoELite,
    GlmMoEDsa,
    GptOss,
    MiMoV2Flash,
    MiniMaxM2,
    Mistral4,
    Mixtral,
    Qwen2MoE,
    Qwen3MoE,
)
from mcore_rl.models.megatron.families.nemotron_h import NemotronH
from mcore_rl.models.megatron.families.qwen4 import Qwen4, Qwen4Text
from mcore_rl.models.megatron.families.qwen_next import Qwen3Next, Qwen35, Qwen35MoE, Qwen35MoEText, Qwen35Text
from mcore_rl.models.megatron.families.vision_language import Qwen3VL, Qwen3VLMoE

DENSE = (Llama, Mistral, Qwen2, Qwen3, Phi3, Olmo2, Olmo3, Gemma3, Gemma4, Glm4, SeedOss, SmolLM3, Ministral3)
MIXTURES = (
    Mixtral,
    Qwen2MoE,
    Qwen3MoE,
    Glm4MoE,
    DeepseekV3,
    Mistral4,
    DeepseekV32,
    Glm4MoELite,
    GlmMoEDsa,
    GptOss,
    MiMoV2Flash,
    MiniMaxM2,
    MiniMaxM3,
    Ernie45MoE,
)
HYPER_CONNECTED = (HYV4, Glm5Next, DeepseekV4, Qwen4Text, Qwen4)
WITH_TOWERS = (Gemma4WithTowers,)
HYBRIDS = (Qwen3Next, Qwen35Text, Qwen35MoEText, KimiLinear, NemotronH)
VISION = (Qwen3VL, Qwen3VLMoE, Qwen35, Qwen35MoE)
FAMILIES: dict[str, type[Family]] = {
    family.model_type: family for family in (*DENSE, *MIXTURES, *HYPER_CONNECTED, *HYBRIDS, *WITH_TOWERS, *VISION)
}


CONFIGURED_AS = {"kimi_k2": "deepseek_v3"}
"""Map from model types whose configuration class is only on the hub to equivalent types of transformers."""


def family_of(hf: Any) -> Family:
    """Return the `Family` for a transformers configuration. `check_model_directory` must accept its model type."""
    return FAMILIES[hf.model_type].kind_for(hf)(hf)


__all__ = ["CONFIGURED_AS", "FAMILIES", "Family", "family_of", "has_reward_head"]
