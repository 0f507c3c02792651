"""Core attention over packs, for Megatron's layer specs where Transformer Engine is not there.

A pack [T / CP, heads, head_dim] attends causally inside each of its segments. Under context
parallelism keys and values are gathered once per layer and pass (their gradients are reduce-scattered) and
each rank's two zigzag chunks of a segment attend to the keys up to their own end.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcore_rl.distributed.collectives import all_gather_forward_reduce_scatter_backward
from mcore_rl.models.megatron.attention_kernels import VisibleKeys, kernel_of
from mcore_rl.models.megatron.parallel_state import ProcessGroupCollection
from mcore_rl.models.megatron.recompute import remade_in_backward
from mcore_rl.models.megatron.routed_tokens import RoutedTokens

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class PackParams(PackedSeqParams):
    """Megatron's parameters of a pack, with what its layers need to know of it.

    `visible` is what its queries see, and `positions` [T / CP] are the local tokens' positions in their rows.
    Transformer Engine takes `cu_seqlens_*` instead; then both are None. `routed` is there for mixtures of experts.
    """

    visible: VisibleKeys | None = None
    positions: Tensor | None = None
    routed: RoutedTokens | None = None


class PackedCausalAttention(MegatronModule):
    """Scaled dot-product attention, causal within each segment of a pack.

    Args:
        window: tokens that a token sees at most, itself included; all before it if None.
    """

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
    ) -> None:
        super().__init__(config=config)
        self.window = window
        assert pg_collection is not None, "core attention needs its process groups"
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
        """[T / CP, heads, d] queries and [T / CP, groups, d] keys and values → [T / CP, heads · d].

        Of other ranks' keys and values nothing is kept: the backward pass gathers them again. So what a layer keeps is
        a CP-th; a layer that is computed again as a whole, right before its backward pass, keeps what it gathered.
        """
        assert packed_seq_params is not None and packed_seq_params.visible is not None, "attention runs on packs"
        visible, kernel = packed_seq_params.visible, kernel_of(query)
        index = None if kernel.reads_in_place else visible.index
        if index is None and visible.layout.cp_size == 1:
            # Values are a part of what queries and keys were projected with, all of which would be kept.
            attended = packed_attention(query, key, value.contiguous(), visible, self.softmax_scale, self.window)
            return attended.flatten(1)
        own = torch.cat((key, value), dim=-1)
        seen = self._seen(own, index)
        again = own.detach()
        keeps = self.config.recompute_granularity == "full"
        with nullcontext() if keeps else remade_in_backward(seen, lambda: self._seen(again, index)):
            keys, values = seen.split(key.shape[-1], dim=-1)
            return packed_attention(query, keys, values, visible, self.softmax_scale, self.window).flatten(1)

    def _seen(self, own: Tensor, index: Tensor | None) -> Tensor:
        """The ranks' [T / CP, groups, …] rows one after the other; of them those of `index`."""
        gathered = all_gather_forward_reduce_scatter_backward(own, self.cp_group)
        return gathered if index is None else gathered[index]


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, visible: VisibleKeys, scale: float | None, window: int | None = None
) -> Tensor:
    """Causal attention inside each segment; a segment's queries are the last ones of its keys.

    [Q, heads, d] queries, [K, groups, d] keys and values as the kernel for them takes these → [Q, heads, d]. A query
    sees `window` keys at most.
    """
    if window is not None and window >= max(visible.key_lengths):
        window = None
    return kernel_of(query).attend(query, key, value, visible, scale, window)
