"""Attention modules over packs, for Megatron's layer specs.

Under context parallelism each rank gathers the keys and values of its pack and attends with its own queries.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from mcore_rl import platform
from mcore_rl.distributed.collectives import all_gather_forward_reduce_scatter_backward
from mcore_rl.models.megatron.attention_kernels import AttentionPattern, kernel_of, packed_attention
from mcore_rl.models.megatron.layers import rotate
from mcore_rl.models.megatron.parallel_state import ProcessGroupCollection, process_groups

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint


@contextmanager
def recompute_in_backward(tensor: Shaped[Tensor, "..."], make: Callable[[], Tensor]) -> Iterator[None]:
    """Store no values of `tensor` or its views for autograd inside the context; the backward pass calls `make()`.

    `make` returns a tensor of the same shape, strides and values. Each backward pass that needs the tensor calls it
    once, on first use. All ranks reach this at the same place, so `make` may be a collective. The result is released
    after all stored views of it have been used.
    """
    remade = _Remade(make)
    storage = platform.storage_id(tensor)

    def keep(saved: Tensor) -> Any:
        if platform.storage_id(saved) == storage:
            return remade.part(saved)
        return saved.detach()  # an autograd node that stores its own output creates a reference cycle

    with saved_tensors_hooks(keep, lambda kept: kept.cut() if isinstance(kept, _Part) else kept):
        yield


class _Remade:
    def __init__(self, make: Callable[[], Tensor]) -> None:
        self.make, self.parts, self.asked = make, 0, 0
        self.again: Tensor | None = None

    def part(self, saved: Tensor) -> _Part:
        self.parts += 1
        return _Part(self, tuple(saved.shape), saved.stride(), int(saved.storage_offset()))

    def ask(self) -> Tensor:
        again = self.make() if self.again is None else self.again
        self.asked += 1
        self.again = None if self.asked % self.parts == 0 else again
        return again


@dataclass(frozen=True)
class _Part:
    remade: _Remade
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def cut(self) -> Tensor:
        return self.remade.ask().as_strided(self.shape, self.stride, self.offset)


@dataclass
class PackParams(PackedSeqParams):
    """Megatron's parameters of a pack, plus the data that this package's layers need.

    `visible` describes the keys that queries see; `positions` [T / CP] are the local tokens' positions in their rows.
    `cu_seqlens` [segments + 1] are the padded segments' cumulative lengths for Transformer Engine's attention, on the
    device; None if it is not used or segments share a prefix. `routed` is for mixtures of experts.
    """

    visible: AttentionPattern | None = None
    positions: Tensor | None = None
    cu_seqlens: Tensor | None = None
    routed: Any = None  # RoutedTokens, which `moe` defines above this module


class PackSelfAttention(SelfAttention):
    """Megatron's self-attention with options of single layers, for which Megatron asks its configuration, and corrected
    output gates.

    Args:
        output_bias: whether the output projection has a bias; Megatron's option also gives the MLP biases.
        rope_factor: factor on cos and sin of the rotary embedding (YaRN's).
        query_scale: function of the tokens' positions [T] that returns a factor of each query; None for 1.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        output_bias: bool = False,
        rope_factor: float = 1.0,
        query_scale: Callable[[Tensor], Tensor] | None = None,
        **kwargs: Any,
    ) -> None:
        if output_bias:
            config = copy.copy(config)
            config.add_bias_linear = output_bias
        super().__init__(config, *args, **kwargs)
        self.rope_factor, self.query_scale = rope_factor, query_scale
        self._angles: Tensor | None = None
        self._scales: Tensor | None = None

    def forward(
        self,
        *args: Any,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: PackParams | None = None,
        **kwargs: Any,
    ) -> Any:
        self._angles = rotary_pos_emb
        if self.query_scale is not None:
            assert packed_seq_params is not None and packed_seq_params.positions is not None, "attention runs on packs"
            self._scales = self.query_scale(packed_seq_params.positions)
        return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        """Return rotated queries and keys, values and, if there are any, the queries' gates.

        Megatron would rotate later, by many operations, and autograd would keep their factors in each layer.

        If tensor-parallel ranks share a key-value head, each has a part of its queries. Megatron 0.16 divides the
        queries, but not their gates.
        """
        query, key, *others = super().get_query_key_value_tensors(*args, **kwargs)
        if kwargs.get("output_gate"):
            heads, gate = query.shape[2], others[-1]
            first = self.pg_collection.tp.rank() * heads % gate.shape[2]
            others[-1] = gate[:, :, first : first + heads]
        if self._scales is not None:
            query = query * self._scales[:, None, None, None].to(query.dtype)
        if self._angles is not None:
            query, key = (rotate(x, self._angles[:, None], self.rope_factor) for x in (query, key))
        return query, key, *others

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """Multiply outputs by their gates; Megatron's method is compiled for GPUs."""
        return (x * torch.sigmoid(gate.float()).reshape(x.shape)).to(x.dtype)


class PackedCausalAttention(MegatronModule):
    """Scaled dot-product attention that is causal within each segment of a pack.

    Args:
        window: number of tokens that a token sees at most, including itself; None for all previous tokens.
        sinks: number of query heads that have a sink (gpt-oss); the parameter is named as Megatron's.
    """

    softmax_offset: torch.nn.Parameter | None

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        window: int | None = None,
        sinks: int = 0,
    ) -> None:
        super().__init__(config=config)
        self.window = window
        assert pg_collection is not None, "core attention needs its process groups"
        self.softmax_offset = None
        if sinks:
            self.softmax_offset = torch.nn.Parameter(
                torch.zeros(sinks // pg_collection.tp.size(), dtype=config.params_dtype)
            )
        self.cp_group = pg_collection.cp
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackParams | None = None,
    ) -> Tensor:
        """Map queries [T / CP, heads, d] and keys and values [T / CP, groups, d] to [T / CP, heads · d].

        Keys and values of other ranks are not kept: the backward pass gathers them again. A layer therefore keeps only
        1/CP of them. A fully recomputed layer, which runs right before its backward pass, keeps all that it gathered.
        """
        assert packed_seq_params is not None and packed_seq_params.visible is not None, "attention runs on packs"
        visible, kernel = packed_seq_params.visible, kernel_of(query)
        index = None if kernel.reads_in_place else visible.index
        if index is None and visible.layout.cp_size == 1:
            # `value` is a view of the projection of queries, keys and values; without the copy all of it would be kept.
            return self._attend(query, key, value.contiguous(), visible)
        own = torch.cat((key, value), dim=-1)
        seen = self._seen(own, index)
        again = own.detach()
        keeps = self.config.recompute_granularity == "full"
        with nullcontext() if keeps else recompute_in_backward(seen, lambda: self._seen(again, index)):
            keys, values = seen.split(key.shape[-1], dim=-1)
            return self._attend(query, keys, values, visible)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, visible: AttentionPattern) -> Tensor:
        sinks = self.softmax_offset
        return packed_attention(query, key, value, visible, self.softmax_scale, self.window, sinks).flatten(1)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """Return Megatron's description: sinks are sharded over tensor-parallel ranks as the heads are."""
        if self.softmax_offset is None:
            return super().sharded_state_dict(prefix, sharded_offsets, metadata)
        groups, name = process_groups(), "softmax_offset"
        return make_sharded_tensors_for_checkpoint(
            {name: self.softmax_offset},
            prefix,
            {name: 0},
            sharded_offsets,
            tp_group=groups.tp,
            dp_cp_group=groups.dp_cp,
        )

    def _seen(self, own: Tensor, index: Tensor | None) -> Tensor:
        """Return the ranks' [T / CP, groups, …] rows in rank order, or only the rows in `index` if it is given."""
        gathered = all_gather_forward_reduce_scatter_backward(own, self.cp_group)
        return gathered if index is None else gathered[index]
