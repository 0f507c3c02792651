"""gpt-oss: attention sinks, windows in every other layer, biases everywhere, clamped gates, experts in one tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from mcore_rl.models.megatron.families.mixtures import Experts, Mixture
from mcore_rl.models.megatron.mixers import TokenMixer
from mcore_rl.models.megatron.weight_mapping import (
    FirstRow,
    InterleavedGateUp,
    Kind,
    Mapping,
    Part,
    Replicated,
    Shape,
    TransposedColumns,
)


@dataclass(frozen=True)
class ScaledSwish:
    """The activation x · sigmoid(alpha · x)."""

    alpha: float

    def __call__(self, x: Tensor) -> Tensor:
        return x * (x * self.alpha).sigmoid()


class GptOss(Mixture):
    model_type = "gpt_oss"
    has_qkv_bias = True
    count_field = "num_local_experts"
    width_field = "intermediate_size"

    @cached_property
    def experts(self) -> Experts:
        hf, sparse = self.hf, (True,) * self.num_layers
        return Experts(hf.num_local_experts, hf.num_experts_per_tok, hf.intermediate_size, sparse, has_biases=True)

    def token_mixer(self, layer: int) -> TokenMixer:
        return self._grouped_query_attention(layer, has_sinks=True, output_bias=True)

    def megatron_fields(self) -> dict[str, Any]:
        return {
            **super().megatron_fields(),
            "activation_func": ScaledSwish(getattr(self.hf, "swiglu_alpha", 1.702)),
            "activation_func_clamp_value": getattr(self.hf, "swiglu_limit", 7.0),
            "glu_linear_offset": 1.0,
        }

    def _sparse(self, ours: str, theirs: str) -> Iterator[Mapping]:
        count, width, hidden = self.experts.count, self.experts.width, self.hidden_size
        yield Mapping(f"{ours}router.weight", (Part(f"{theirs}router.weight", (count, hidden)),), Replicated())
        yield Mapping(f"{ours}router.bias", (Part(f"{theirs}router.bias", (count,)),), Replicated())
        for expert in range(count):
            tensors: list[tuple[str, str, Shape, Kind]] = [
                ("linear_fc1.weight", "gate_up_proj", (1, hidden, 2 * width), InterleavedGateUp()),
                ("linear_fc1.bias", "gate_up_proj_bias", (1, 2 * width), InterleavedGateUp()),
                ("linear_fc2.weight", "down_proj", (1, width, hidden), TransposedColumns()),
                ("linear_fc2.bias", "down_proj_bias", (1, hidden), FirstRow()),
            ]
            for name, hf_name, shape, kind in tensors:
                part = Part(f"{theirs}experts.{hf_name}", shape, expert)
                yield Mapping(f"{ours}experts.{expert}.{name}", (part,), kind, is_expert=True)
