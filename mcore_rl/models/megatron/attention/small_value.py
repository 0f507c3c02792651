"""Grouped-query attention whose value heads are smaller than its key heads (MiMo-V2-Flash).

The kernels need values of the size of the keys. So the values are padded with zeros, and the outputs are cut.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from mcore_rl.models.megatron.attention.attention import (
    GroupedQueryAttention,
    LayerModules,
    PackSelfAttention,
    check_value_dim,
)

from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True, kw_only=True)
class SmallValueAttention(GroupedQueryAttention):
    """Grouped-query attention with smaller values.

    value_dim: size of a value head, at most that of a key head. value_scale: factor of the values.
    """

    value_dim: int
    value_scale: float = 1.0

    @property
    def value_size(self) -> int:
        return self.value_dim

    def spec(self, modules: LayerModules) -> ModuleSpec:
        return replace(super().spec(modules), module=SmallValueSelfAttention)

    def check(self) -> None:
        super().check()
        check_value_dim(self.value_dim, self.head_dim)

    def flops_per_token_squared(self) -> float:
        return 3.0 * self.heads * (self.head_dim + self.value_dim)


class SmallValueSelfAttention(PackSelfAttention):
    """The module that computes `SmallValueAttention`. Each tensor-parallel rank has whole groups."""

    mixer: SmallValueAttention

    def __init__(
        self, config: TransformerConfig, submodules: SelfAttentionSubmodules, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(config, submodules, *args, **kwargs)
        mixer, config = self.mixer, self.config
        common = {"config": config, "is_expert": False, "tp_group": self.pg_collection.tp}
        rows = mixer.heads * mixer.head_dim + mixer.groups * (mixer.head_dim + mixer.value_dim)
        self.linear_qkv = submodules.linear_qkv(
            mixer.hidden,
            rows,
            init_method=config.init_method,
            bias=mixer.qkv_bias,
            gather_output=False,
            skip_bias_add=False,
            **common,
        )
        self.linear_proj = submodules.linear_proj(
            mixer.heads * mixer.value_dim,
            mixer.hidden,
            init_method=config.output_layer_init_method,
            bias=mixer.output_bias,
            input_is_parallel=True,
            skip_bias_add=True,
            **common,
        )
        self.linear_qkv.register_forward_hook(self._pad)
        self.linear_proj.register_forward_pre_hook(self._cut)

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        query, key, value, *gate = super().get_query_key_value_tensors(*args, **kwargs)
        return query, key, value * self.mixer.value_scale, *gate

    def _pad(self, module: Any, inputs: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        """Pad the value heads in the projections [T, 1, rows / TP]; a group's value head is its last part."""
        mixer = self.mixer
        rows = (mixer.heads // mixer.groups + 1) * mixer.head_dim + mixer.value_dim
        groups = output[0].unflatten(-1, (-1, rows))
        return F.pad(groups, (0, mixer.head_dim - mixer.value_dim)).flatten(-2), output[1]

    def _cut(self, module: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Cut the padding from the outputs of core attention, [T, 1, heads / TP · head_dim]."""
        attended, *others = inputs
        return attended.unflatten(-1, (-1, self.mixer.head_dim))[..., : self.mixer.value_dim].flatten(-2), *others
