"""Attention to chosen keys: each query sees the keys, or blocks of keys, whose positions it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Int32
from torch import Tensor

from mcore_rl.models.megatron.kernels.gathered_attention import Choice, gathered_attention, pays
from mcore_rl.models.megatron.kernels.packed_attention import AttentionPattern

SCORES_OF_A_BLOCK = {"cpu": 2**22, "cuda": 2**28}
"""Largest number of scores (heads × queries × keys) that exist at a time, by device type."""
MASK_OF_A_BLOCK = {"cpu": 2**24, "cuda": 2**28}
"""Largest number of pairs of a query and a key in a mask that all heads share, by device type. Each block adds to the
gradients of all its keys, so that small blocks cost more than the attention itself."""


class QueryBlock(NamedTuple):
    """Consecutive queries of one chunk of a pack.

    queries: their row numbers among this rank's queries.
    keys: row numbers of the keys that the last of them sees, in the order of the row.
    seen: number of keys that the first of them sees. Each later query sees one key more.
    """

    queries: slice
    keys: slice | Tensor
    seen: int


def blocks_of(
    visible: AttentionPattern, heads: int | None, first: int, end: int, device: torch.device
) -> Iterator[QueryBlock]:
    """Divide the queries `first` … `end` − 1 of a rank into blocks with at most `SCORES_OF_A_BLOCK` scores.

    Args:
        heads: number of scores of a query and a key; None for blocks of which only a mask exists (`MASK_OF_A_BLOCK`).
    """
    limit = MASK_OF_A_BLOCK[device.type] if heads is None else SCORES_OF_A_BLOCK[device.type] // heads
    order = visible.key_rows(device)
    query = key = 0
    for queries, keys in zip(visible.query_lengths, visible.key_lengths, strict=True):
        before, size = keys - queries - query, max(1, limit // max(keys, 1))
        for start in range(max(query, first), min(query + queries, end), size):
            stop = min(start + size, query + queries, end)
            rows = slice(key, key + before + stop)
            yield QueryBlock(slice(start, stop), rows if order is None else order[rows], before + start + 1)
        query, key = query + queries, key + keys


def selected_attention(
    query: Float[Tensor, "queries heads dim"],
    key: Float[Tensor, "keys groups dim"],
    value: Float[Tensor, "keys groups dim"],
    visible: AttentionPattern,
    chosen: Int32[Tensor, "queries *groups_and_topk"],
    scale: float,
    sinks: Float[Tensor, " heads"] | None = None,
    block_size: int = 1,
) -> Float[Tensor, "queries heads dim"]:
    """Compute attention over the chosen keys and, if there are any, the heads' sinks.

    If rows are many times longer than the number of chosen keys, only these are read. Otherwise it is faster to compute
    all pairs of a query and an earlier key, in blocks, and to mask the keys that are not chosen. Deterministic runs do
    so too, because the kernel for GPUs adds the gradients of a key in any order.

    Args:
        key, value: of all context-parallel ranks, in rank order. They may have fewer heads, for groups of query heads.
        chosen: positions; with a `block_size` above 1 numbers of blocks of keys, [queries, groups, topk].
    """
    heads, groups = query.shape[1], key.shape[1]
    if pays(visible, heads, groups, chosen.shape[-1] * block_size, block_size, query.device):
        sets = (chosen if chosen.ndim == 3 else chosen[:, None]).contiguous()
        first, ends = visible.key_ranges(query.device)
        choice = Choice(sets, first, ends, visible.key_rows(query.device), block_size)
        return gathered_attention(query, key, value, choice, scale, sinks)

    def attend(
        chosen: Tensor, seen: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        return _attend(query, key, value, _mask_of(chosen, len(key), seen, block_size), scale, sinks)

    # The kernels keep no scores: what exists for a block is its mask, which all heads share if keys are chosen singly.
    scores = None if block_size == 1 else heads
    weights = () if sinks is None else (sinks,)
    return attention_in_blocks(attend, query, (key, value), weights, visible, chosen, scores)


def attention_in_blocks(
    attend: Callable[..., Tensor],
    query: Float[Tensor, "queries heads dim"],
    keys: tuple[Tensor, ...],
    weights: tuple[Tensor, ...],
    visible: AttentionPattern,
    chosen: Int32[Tensor, "queries *groups_and_topk"] | None,
    scores: int | None,
) -> Float[Tensor, "queries heads dim"]:
    """Compute attention of a rank's queries in blocks.

    Only the tensors are kept for the backward pass, which computes each block again.

    Args:
        attend: function (chosen, seen, query, *keys, *weights) → outputs of a block's queries, [q, heads, dim]. It gets
            the block's rows of `chosen` (or None), `query` and `keys`; `seen` is that of the `QueryBlock`.
        keys: tensors with one row for each key of all context-parallel ranks, in rank order.
        weights: tensors that all blocks use as they are.
        chosen: what each query sees; None if `attend` needs no choice.
        scores: number of elements that `attend` allocates for a query and a key; None if it allocates only a mask.
    """
    out: Tensor = _AttentionInBlocks.apply(attend, visible, chosen, scores, len(keys), query, *keys, *weights)
    return out


class _AttentionInBlocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        attend: Callable[..., Tensor],
        visible: AttentionPattern,
        chosen: Tensor | None,
        scores: int | None,
        keys: int,
        query: Tensor,
        *others: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(chosen, query, *others)
        ctx.attend, ctx.visible, ctx.scores, ctx.keys = attend, visible, scores, keys
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        for own, rows, seen in blocks_of(visible, scores, 0, len(query), query.device):
            parts = query[own], *(x[rows] for x in others[:keys]), *others[keys:]
            out[own] = attend(None if chosen is None else chosen[own], seen, *parts)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        chosen, query, *others = ctx.saved_tensors
        of_query = torch.empty_like(query, memory_format=torch.contiguous_format)
        # Several blocks add to the gradients of keys and weights, so the sums are in at least fp32.
        wide = torch.promote_types(others[0].dtype, torch.float32)
        sums = [torch.zeros(x.shape, dtype=wide, device=x.device) for x in others]
        for own, rows, seen in blocks_of(ctx.visible, ctx.scores, 0, len(query), query.device):
            parts = query[own], *(x[rows] for x in others[: ctx.keys]), *others[ctx.keys :]
            leaves = [x.detach().requires_grad_() for x in parts]
            with torch.enable_grad():
                out = ctx.attend(None if chosen is None else chosen[own], seen, *leaves)
            of_query[own], *of_others = torch.autograd.grad(out, leaves, grad[own], allow_unused=True)
            for number, (total, part) in enumerate(zip(sums, of_others, strict=True)):
                if number >= ctx.keys:
                    if part is not None:  # a block may use no weight
                        total += part
                elif isinstance(rows, slice):
                    total[rows] += part
                else:
                    total.index_add_(0, rows, part.to(wide))
        return (
            None,
            None,
            None,
            None,
            None,
            of_query,
            *(total.to(x.dtype) for total, x in zip(sums, others, strict=True)),
        )


def _mask_of(chosen: Tensor, keys: int, seen: int, block_size: int) -> Tensor:
    """Return the mask of a block of queries, [queries, keys], or [groups, queries, keys] if blocks are chosen."""
    if block_size == 1:
        return chosen_mask(chosen, keys)
    ends = torch.arange(seen, seen + len(chosen), device=chosen.device)
    return block_mask(chosen, keys, ends, block_size).transpose(0, 1)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """Return attention of queries [q, heads, d] over keys [k, groups, d]; `mask` is [q, k] or [groups, q, k]."""
    if (repeats := query.shape[1] // key.shape[1]) > 1:
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    if mask.ndim == 3:  # the fused kernel of the CPU takes masks of two or four dimensions
        mask = mask.repeat_interleave(repeats, dim=0)[None]
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    width = query.shape[-1]
    if sinks is not None:
        query, key, value, mask = _with_sink(query, key, value, mask, sinks / scale)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    return out[0, ..., :width].transpose(0, 1)


def _with_sink(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scores: Tensor) -> tuple[Tensor, ...]:
    """Add a key, whose product with each query of a head is the head's number in `scores` and whose value is 0.

    The heads are extended by an element that is 1 in the queries and 0 in the other keys, and by zeros up to a multiple
    of 8. If the mask had the sinks, as in `with_sink_key`, PyTorch would compute its gradient without a fused kernel.
    """
    width = query.shape[-1]
    more = 8 - width % 8
    sink = F.pad(scores.to(key.dtype)[None, :, None, None], (width, more - 1))
    query = F.pad(torch.cat((query, torch.ones_like(query[..., :1])), -1), (0, more - 1))
    key, value = torch.cat((F.pad(key, (0, more)), sink), 2), F.pad(value, (0, more, 0, 1))
    return query, key, value, F.pad(mask, (0, 1), value=True)


def chosen_mask(chosen: Tensor, keys: int) -> Tensor:
    """Convert a choice [… topk], of positions or of other numbers below `keys`, to a mask [… keys]: True if chosen."""
    mask = torch.zeros(*chosen.shape[:-1], keys + 1, dtype=torch.bool, device=chosen.device)
    mask.scatter_(-1, torch.where(chosen < 0, keys, chosen).long(), True)  # the last column takes the −1
    return mask[..., :keys]


def block_mask(
    chosen: Int32[Tensor, "queries groups topk"], keys: int, ends: Int[Tensor, " queries"], size: int
) -> Bool[Tensor, "queries groups keys"]:
    """Convert numbers of chosen blocks to a mask: True for their keys among the query's first `ends` keys.

    Args:
        size: number of keys in a block.
    """
    mask = chosen_mask(chosen, -(-keys // size))
    seen = torch.arange(keys, device=chosen.device) < ends[:, None]
    return mask.repeat_interleave(size, dim=-1)[..., :keys] & seen[:, None]
