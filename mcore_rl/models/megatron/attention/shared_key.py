"""Grouped-query attention with normed values, in which keys can be values, or those of an earlier layer (Gemma 4)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from mcore_rl.models.megatron.attention.attention import GroupedQueryAttention, LayerModules, PackSelfAttention
from mcore_rl.models.megatron.layers.packs import PackParams
from mcore_rl.models.megatron.layers.transformer_layer import rotate, unit_norm
from mcore_rl.models.megatron.weight_mapping import Grouped, Kind, Rows

from megatron.core.tensor_parallel import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True, kw_only=True)
class SharedKeyAttention(GroupedQueryAttention):
    """Grouped-query attention whose value heads have RMS norms without weights.

    eps: epsilon of these norms.
    keys_are_values: whether the values are the projected keys, before their norm and rotation.
    source: number of the layer whose keys and values this layer uses, after norm and rotation; None if it has its own.
    is_source: whether later layers use this layer's keys and values.
    """

    eps: float
    keys_are_values: bool = False
    source: int | None = None
    is_source: bool = False

    @property
    def projections(self) -> str:
        return "q" if self.source is not None else "qk" if self.keys_are_values else "qkv"

    def spec(self, modules: LayerModules) -> ModuleSpec:
        spec = replace(super().spec(modules), module=SharedKeySelfAttention)
        if self.source is not None:
            spec.submodules = replace(spec.submodules, k_layernorm=IdentityOp)
        return spec

    def _kind_of_qkv(self) -> Kind:
        if self.source is not None:
            return Rows()
        if self.keys_are_values:
            return Grouped(self.groups, (self.heads // self.groups * self.head_dim, self.head_dim))
        return super()._kind_of_qkv()


class SharedKeySelfAttention(PackSelfAttention):
    """The module that computes `SharedKeyAttention`.

    Keys and values for later layers are in `PackParams.shared`, with their gradient.
    """

    mixer: SharedKeyAttention
    _pack: PackParams | None = None

    def __init__(
        self, config: TransformerConfig, submodules: SelfAttentionSubmodules, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(config, submodules, *args, **kwargs)
        mixer, config = self.mixer, self.config
        if len(mixer.projections) < 3:
            self.linear_qkv = submodules.linear_qkv(
                mixer.hidden,
                (mixer.heads + (mixer.groups if mixer.source is None else 0)) * mixer.head_dim,
                config=config,
                init_method=config.init_method,
                bias=False,
                gather_output=False,
                skip_bias_add=False,
                is_expert=False,
                tp_group=self.pg_collection.tp,
            )

    def forward(self, *args: Any, packed_seq_params: PackParams | None = None, **kwargs: Any) -> Any:
        self._pack = packed_seq_params
        out = super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)
        self._pack = None
        return out

    def get_query_key_value_tensors(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        mixer = self.mixer
        if mixer.source is not None:
            projected, _ = self.linear_qkv(hidden_states)
            query = self.q_layernorm(projected.unflatten(-1, (-1, mixer.head_dim)))
            if self._angles is not None:
                query = rotate(query, self._angles[:, None], mixer.rope_factor)
            assert self._pack is not None, "attention runs on packs"
            return query, *self._pack.shared[mixer.source]
        query, key, value = super().get_query_key_value_tensors(hidden_states, *args, **kwargs)
        value = unit_norm(value, mixer.eps)
        if mixer.is_source:
            assert self._pack is not None, "attention runs on packs"
            self._pack.shared[self.layer_number - 1] = key, value
        return query, key, value

    def _projected(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        mixer, tp = self.mixer, self.pg_collection.tp
        if not mixer.keys_are_values:
            return super()._projected(hidden_states, *args, **kwargs)
        projected, _ = self.linear_qkv(hidden_states)
        sharing = max(1, tp.size() // mixer.groups)  # ranks that share a key head and divide its queries
        if sharing > 1:
            whole = all_gather_last_dim_from_tensor_parallel_region(projected, group=tp)
            projected = whole.chunk(mixer.groups, dim=-1)[tp.rank() // sharing]
        heads = projected.unflatten(-1, (-1, mixer.heads // mixer.groups + 1, mixer.head_dim))
        query, key = heads[..., :-1, :].flatten(2, 3), heads[..., -1, :]
        query = query.chunk(sharing, dim=2)[tp.rank() % sharing]
        return self.q_layernorm(query), self.k_layernorm(key), key
