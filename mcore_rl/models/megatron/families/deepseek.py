"""Families with latent attention: DeepSeek-V3 (also Kimi-K2 and Moonlight), GLM-4.7-Flash, and within the length of
their index DeepSeek-V3.2 and GLM-5."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

from mcore_rl.errors import UserError
from mcore_rl.models.megatron.attention import LatentAttention, TokenMixer
from mcore_rl.models.megatron.families.mixtures import Experts, Glm4MoE
from mcore_rl.models.megatron.layers import rope_parameters

LATENT_NORM_EPS = 1e-6
"""Epsilon of the norms of latent states in transformers, whatever `rms_norm_eps` is."""


class DeepseekV3(Glm4MoE):
    model_type = "deepseek_v3"
    has_qk_norm = False
    has_qkv_bias = False

    def __init__(self, hf: Any) -> None:
        super().__init__(hf)
        self.num_query_groups = self.num_attention_heads
        self.head_dim = hf.qk_nope_head_dim + hf.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """Factor of the products of queries and keys, with YaRN's correction (`mscale_all_dim`)."""
        rope, scale = rope_parameters(self.hf), float(self.head_dim**-0.5)
        if rope["rope_type"] != "default" and rope.get("mscale_all_dim") and rope["factor"] > 1:
            scale *= (0.1 * rope["mscale_all_dim"] * math.log(rope["factor"]) + 1) ** 2
        return scale

    def token_mixer(self, layer: int) -> TokenMixer:
        hf = self.hf
        return LatentAttention(
            hidden=self.hidden_size,
            heads=self.num_attention_heads,
            groups=self.num_attention_heads,
            head_dim=self.head_dim,
            scale=self.softmax_scale,
            query_rank=hf.q_lora_rank,
            key_value_rank=hf.kv_lora_rank,
            rotated=hf.qk_rope_head_dim,
            value_dim=hf.v_head_dim,
            interleaved=bool(getattr(hf, "rope_interleave", True)),
            rope_factor=self.rope_factor(layer),
            eps=LATENT_NORM_EPS,
        )

    def shrink(self, layers: int, tensor_parallel: int, expert_parallel: int) -> None:
        hf = self.hf
        super().shrink(layers, tensor_parallel, expert_parallel)
        hf.num_key_value_heads = hf.num_attention_heads
        hf.qk_nope_head_dim, hf.qk_rope_head_dim, hf.v_head_dim = 12, 8, 14
        hf.kv_lora_rank, hf.q_lora_rank = 20, None if hf.q_lora_rank is None else 28
        hf.qk_head_dim, hf.head_dim = 20, 8


class Glm4MoELite(DeepseekV3):
    model_type = "glm4_moe_lite"

    @cached_property
    def experts(self) -> Experts:
        return self._experts(tuple(kind == "sparse" for kind in self.hf.mlp_layer_types))

    def shrink(self, layers: int, tensor_parallel: int, expert_parallel: int) -> None:
        kinds = list(dict.fromkeys(self.hf.mlp_layer_types))
        super().shrink(layers, tensor_parallel, expert_parallel)
        self.hf.mlp_layer_types = [kinds[min(layer, len(kinds) - 1)] for layer in range(layers)]


class DeepseekV32(Glm4MoELite):
    """DeepSeek-V3.2. An indexer chooses the `index_topk` keys that a token sees: all keys of a short sequence.

    Attention of short sequences is then that of DeepSeek-V3, and the indexer gets no gradient.
    """

    model_type = "deepseek_v32"

    def check(self, max_sequence_length: int) -> None:
        super().check(max_sequence_length)
        if max_sequence_length > self.hf.index_topk:
            raise UserError(
                f"data.max_sequence_length={max_sequence_length}: {self.model_type} sees only index_topk="
                f"{self.hf.index_topk} keys in longer sequences, which is not supported; the limit must not be above it"
            )

    def passes_on(self, name: str) -> bool:
        return super().passes_on(name) or ".self_attn.indexer." in name


class GlmMoEDsa(DeepseekV32):
    model_type = "glm_moe_dsa"

    def shrink(self, layers: int, tensor_parallel: int, expert_parallel: int) -> None:
        super().shrink(layers, tensor_parallel, expert_parallel)
        self.hf.indexer_types = ["full"] * layers
