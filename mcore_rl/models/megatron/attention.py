"""Core attention over packs, for Megatron's layer specs where Transformer Engine is not there.

A pack [T / CP, heads, head_dim] attends causally inside each of its segments. Under context
parallelism keys and values are gathered once per layer (their gradients are reduce-scattered) and
each rank's two zigzag chunks of a segment attend to the keys up to their own end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_rl.distributed.collectives import all_gather_forward_reduce_scatter_backward
from mcore_rl.distributed.pack_layout import PackLayout
from mcore_rl.distributed.prefix_layout import PrefixLayout
from mcore_rl.models.megatron.parallel import ProcessGroupCollection
from mcore_rl.models.megatron.routed_tokens import RoutedTokens

from megatron.core.packed_seq_params import PackedSeqParams  # isort: skip
from megatron.core.transformer.module import MegatronModule  # isort: skip
from megatron.core.transformer.transformer_config import TransformerConfig  # isort: skip


@dataclass
class PackParams(PackedSeqParams):
    """Megatron's parameters of a pack, with the pack's layout.

    `positions` [T / CP] are the local tokens' positions in their segments. Transformer Engine takes
    `cu_seqlens_*` instead; then `positions` is None. `routed` is there for mixtures of experts.
    """

    layout: PackLayout | None = None
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
        """[T / CP, heads, d] queries and [T / CP, groups, d] keys and values → [T / CP, heads · d]."""
        assert packed_seq_params is not None and packed_seq_params.layout is not None, "attention runs on packs"
        layout = packed_seq_params.layout
        query_lengths = key_lengths = layout.segment_lengths
        if layout.cp_size > 1:
            key, value, query_lengths, key_lengths = self._gather_keys(key, value, layout)
        elif isinstance(layout, PrefixLayout):
            query_lengths, key_lengths, index = layout.visible_keys(0)
            index = index.to(key.device)
            key, value = key[index], value[index]
        attended = packed_attention(query, key, value, query_lengths, key_lengths, self.softmax_scale, self.window)
        return attended.flatten(1)

    def _gather_keys(
        self, key: Tensor, value: Tensor, layout: PackLayout
    ) -> tuple[Tensor, Tensor, tuple[int, ...], tuple[int, ...]]:
        """The keys and values that each local query chunk may see, one after the other, and the lengths."""
        gathered = all_gather_forward_reduce_scatter_backward(torch.cat((key, value), dim=-1), self.cp_group)
        query_lengths, key_lengths, index = layout.visible_keys(torch.distributed.get_rank(self.cp_group))
        visible = gathered[layout.gather_order[index].to(key.device)]
        key, value = visible.split(key.shape[-1], dim=-1)
        return key, value, query_lengths, key_lengths


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_lengths: tuple[int, ...],
    key_lengths: tuple[int, ...],
    scale: float | None,
    window: int | None = None,
) -> Tensor:
    """Causal attention inside each segment; a segment's queries are the last ones of its keys.

    [ΣQ, heads, d] queries, [ΣK, groups, d] keys and values → [ΣQ, heads, d]. A query sees `window` keys at most.
    """
    if window is not None and window >= max(key_lengths):
        window = None
    attend = KERNELS[query.device.type]
    if attend is _flash_attention and query.dtype not in (torch.float16, torch.bfloat16):
        attend = _sdpa_by_segment
    return attend(query, key, value, query_lengths, key_lengths, scale, window)


def _sdpa_by_segment(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_lengths: tuple[int, ...],
    key_lengths: tuple[int, ...],
    scale: float | None,
    window: int | None = None,
) -> Tensor:
    """SDPA per segment; segment i's queries are the last ones of its keys.

    Segments of one common size go through a single batched call.
    """
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:  # grouped-query attention: torch's CPU flash kernel wants equal head counts
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    if len(set(query_lengths)) == 1 and query_lengths == key_lengths and window is None:
        q, k, v = (x.unflatten(0, (len(query_lengths), -1)).transpose(1, 2) for x in (query, key, value))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(1, 2).flatten(0, 1)
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    outs = []
    for q, k, v in zip(
        query.split(query_lengths, dim=2),
        key.split(key_lengths, dim=2),
        value.split(key_lengths, dim=2),
        strict=True,
    ):
        plain = q.shape[2] == k.shape[2] and window is None
        mask = None if plain else _lower_right_causal(q.shape[2], k.shape[2], window, q.device)
        outs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=plain, scale=scale))
    return torch.cat(outs, dim=2).squeeze(0).transpose(0, 1)


def _lower_right_causal(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Mask [queries, keys]: the last query sees the last `window` keys (all if None), the one before one less far, …"""
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return seen if window is None else seen.triu(keys - queries - window + 1)


def _flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_lengths: tuple[int, ...],
    key_lengths: tuple[int, ...],
    scale: float | None,
    window: int | None = None,
) -> Tensor:
    """Torch's flash kernel for packs (CUDA, half precision); its causal mask is lower-right aligned too."""
    from torch.nn.attention.varlen import varlen_attn

    cu_queries, cu_keys = (
        torch.tensor((0, *lengths)).cumsum(0).int().to(query.device, non_blocking=True)
        for lengths in (query_lengths, key_lengths)
    )
    out = varlen_attn(
        query,
        key,
        value,
        cu_queries,
        cu_keys,
        max(query_lengths),
        max(key_lengths),
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(out, Tensor)
    return out


KERNELS: dict[str, Callable[..., Tensor]] = {"cpu": _sdpa_by_segment, "cuda": _flash_attention}
"""By kind of device; the flash kernel takes half precision alone."""
