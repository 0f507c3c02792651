"""Attention that reads only the keys that each query chose, by torch operations or by a Triton kernel.

The query heads of a group share its keys, so a query's chosen keys are gathered once for all heads of the group. The
products of a query are then those of a small matrix, [heads of the group, dim] × [dim, chosen keys].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int, Int32
from torch import Tensor

from mcore_rl import platform
from mcore_rl.models.megatron.kernels.packed_attention import AttentionPattern

GATHERED_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}
"""Largest number of elements of keys and values that torch gathers at a time, by device type. The keys of one query are
always gathered together."""
COST_OF_A_GATHERED_KEY = {"cpu": 50, "cuda": 16}
"""Time to gather a key, divided by the time of its products with one query head, by device type. For a CPU, it follows
from the ratios that bench_sparse_attention.py measures; for a GPU, it is an estimate."""
LEAST_HEADS = {"cpu": 1, "cuda": 16}
"""Smallest number of query heads that a product computes, by device type. Fewer heads take as long."""
QUERIES_OF_A_PART = 1024
"""Number of queries whose gradients and outputs are converted to fp32 at a time."""
WORTH_A_PRODUCT = 16
"""Smallest number of keys in a block for which a CPU computes the products of the block with all queries that chose it.
Such products need no gathered keys, and their matrices are large."""
SCORES_AT_A_TIME = 2**24
"""Largest number of scores of blocks that exist at a time. The scores of one query always exist together."""


class Choice(NamedTuple):
    """The keys that queries see, as the kernels read them.

    chosen: numbers of blocks of keys in the query's row, [queries, 1 or groups, topk], contiguous; −1 for none. A query
        must not have a number twice: its keys would count twice.
    first: where the query's row begins in `order`, [queries].
    ends: number of keys that the query sees, from the first of its row on, [queries].
    order: row numbers of the keys; None if they are 0, 1, ….
    size: number of keys in a block.
    """

    chosen: Int32[Tensor, "queries sets topk"]
    first: Int32[Tensor, " queries"]
    ends: Int32[Tensor, " queries"]
    order: Int[Tensor, " seen"] | None
    size: int

    @property
    def most(self) -> int:
        """Number of keys in the blocks of a query."""
        return self.chosen.shape[-1] * self.size

    def rows(self, queries: slice) -> tuple[Tensor, Tensor]:
        """Return the row numbers of the keys of `queries`, int64 [queries, sets, count], and which of them are seen."""
        places, seen = places_in_row(self.chosen[queries], self.size, self.ends[queries, None, None])
        rows = (torch.where(seen, places, 0) + self.first[queries, None, None]).long()
        return rows if self.order is None else self.order[rows], seen


def places_in_row(chosen: Tensor, size: int, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Return the places of chosen keys in their row, [… topk · size], and which of them a query sees.

    Args:
        chosen: numbers of blocks of `size` keys, [… topk]; −1 for none. The places of −1 are negative.
        ends: number of keys of the row that the query sees, of a shape that fits the result's.
    """
    inner = torch.arange(size, dtype=chosen.dtype, device=chosen.device)
    places = (chosen[..., None] * size + inner).flatten(-2)
    return places, (places >= 0) & (places < ends)


def pays(visible: AttentionPattern, heads: int, groups: int, keys: int, size: int, device: torch.device) -> bool:
    """Return whether it is faster to read `keys` keys for each query than to compute all earlier keys.

    Args:
        size: number of keys in a block.
    """
    if device.type == "cuda" and torch.are_deterministic_algorithms_enabled():
        return False  # the kernel adds the gradients of a key in any order
    pairs = sum(q * (k - (q - 1) / 2) for q, k in zip(visible.query_lengths, visible.key_lengths, strict=True))
    repeats = heads // groups
    cost = max(1, LEAST_HEADS[device.type] / repeats)
    by_blocks = device.type == "cpu" and size >= WORTH_A_PRODUCT
    cost += 0.8 if by_blocks else COST_OF_A_GATHERED_KEY[device.type] / repeats
    return pairs > cost * keys * sum(visible.query_lengths)


def gathered_attention(
    query: Float[Tensor, "queries heads dim"],
    key: Float[Tensor, "keys groups dim"],
    value: Float[Tensor, "keys groups dim"],
    choice: Choice,
    scale: float,
    sinks: Float[Tensor, " heads"] | None = None,
) -> Float[Tensor, "queries heads dim"]:
    """Compute attention over chosen keys and, if there are any, the heads' sinks; only the chosen keys are read.

    For the backward pass, the inputs, the outputs and their log-sum-exps are kept; it gathers the keys again.

    Args:
        key, value: of all context-parallel ranks, in rank order.
    """
    out: Tensor = _GatheredAttention.apply(query, key, value, sinks, choice, scale)
    return out


class _GatheredAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, choice: Choice, scale: float
    ) -> Tensor:
        # The tensors are kept as they came: a layer recognizes the views that its backward pass makes again.
        tensors = query.contiguous(), key.contiguous(), value.contiguous()
        out, logsumexp = kernels(query, choice.size).forward(*tensors, sinks, choice, scale)
        ctx.save_for_backward(query, key, value, sinks, out, logsumexp, *choice[:4])
        ctx.size, ctx.scale = choice.size, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, logsumexp, *of_choice = ctx.saved_tensors
        chosen, first, ends, order = of_choice
        choice, grad = Choice(chosen, first, ends, order, ctx.size), grad.contiguous()
        # Products of the gradients and the outputs, in parts: the wide copies of all of them would be large.
        parts = zip(grad.split(QUERIES_OF_A_PART), out.split(QUERIES_OF_A_PART), strict=True)
        mean = torch.cat([(g.to(logsumexp.dtype) * o).sum(-1) for g, o in parts])
        tensors = query.contiguous(), key.contiguous(), value.contiguous()
        gradients = kernels(query, choice.size).backward(*tensors, choice, ctx.scale, grad, logsumexp, mean)
        of_sinks = None
        if sinks is not None:
            of_sinks = -((sinks.to(logsumexp) - logsumexp).exp_() * mean).sum(0).to(sinks.dtype)
        return *(g.to(query.dtype) for g in gradients), of_sinks, None, None


class Kernels(NamedTuple):
    """The two passes of the attention.

    forward: (query, key, value, sinks, choice, scale) → outputs [queries, heads, dim], log-sum-exps [queries, heads].
    backward: (query, key, value, choice, scale, gradient of the outputs, log-sum-exps, mean) → gradients of query, key
        and value, the last two in at least fp32. `mean` is [queries, heads], the products of gradients and outputs.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def kernels(query: Tensor, block_size: int) -> Kernels:
    """Return Triton kernels on a GPU if Triton is installed; otherwise torch operations."""
    if platform.compiles(query) and query.dtype != torch.float64:
        return triton_kernels()
    if query.device.type == "cpu" and block_size >= WORTH_A_PRODUCT:
        return Kernels(forward_by_blocks, backward_by_blocks)
    return Kernels(forward_by_queries, backward_by_queries)


def triton_kernels() -> Kernels:
    from mcore_rl.models.megatron.kernels import triton_gathered_attention as module

    return Kernels(module.forward, module.backward)


class _Part(NamedTuple):
    """Some queries, with their gathered keys and values.

    queries: their numbers. rows: which rows of the flattened keys, [keys · groups, dim], were gathered.
    query: [queries · groups, heads of a group, dim]. key, value: [queries · groups, gathered, dim].
    seen: which gathered keys the queries see, [queries · groups, 1, gathered].
    """

    queries: slice
    rows: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    seen: Tensor


def _parts(query: Tensor, key: Tensor, value: Tensor, choice: Choice) -> Iterator[_Part]:
    (count, heads, dim), groups = query.shape, key.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    size = max(1, GATHERED_ELEMENTS[query.device.type] // (2 * groups * choice.most * dim))
    group = torch.arange(groups, device=query.device)[:, None]
    for start in range(0, count, size):
        own = slice(start, min(start + size, count))
        of_sets, seen = choice.rows(own)
        rows = (of_sets * groups + group).flatten()
        seen = seen.expand(-1, groups, -1).flatten(0, 1)[:, None]
        keys, values = (x.flatten(0, 1).index_select(0, rows).view(-1, choice.most, dim).to(wide) for x in (key, value))
        yield _Part(own, rows, query[own].view(-1, heads // groups, dim).to(wide), keys, values, seen)


def _scores(part: _Part, scale: float) -> Tensor:
    return torch.bmm(part.query, part.key.mT).mul_(scale).masked_fill_(~part.seen, -torch.inf)


def forward_by_queries(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, choice: Choice, scale: float
) -> tuple[Tensor, Tensor]:
    """See `Kernels`."""
    out, groups = torch.empty_like(query), key.shape[1]
    logsumexp = query.new_empty(query.shape[:2], dtype=torch.promote_types(query.dtype, torch.float32))
    for part in _parts(query, key, value, choice):
        scores = _scores(part, scale)
        lse = scores.logsumexp(-1, keepdim=True)
        if sinks is not None:
            lse = torch.logaddexp(lse, sinks.to(lse).view(groups, -1, 1).repeat(len(lse) // groups, 1, 1))
        lse.masked_fill_(lse == -torch.inf, 0.0)  # of a query that sees nothing, whose output is 0
        out[part.queries] = torch.bmm(scores.sub_(lse).exp_(), part.value).view_as(out[part.queries])
        logsumexp[part.queries] = lse.view(-1, query.shape[1])
    return out, logsumexp


def backward_by_queries(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    choice: Choice,
    scale: float,
    grad: Tensor,
    logsumexp: Tensor,
    mean: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `Kernels`."""
    of_query = torch.empty_like(query)
    of_key, of_value = (x.new_zeros(x.shape, dtype=logsumexp.dtype) for x in (key, value))
    for part in _parts(query, key, value, choice):
        lse, means = (x[part.queries].view(*part.query.shape[:2], 1) for x in (logsumexp, mean))
        of_out = grad[part.queries].reshape(part.query.shape).to(lse.dtype)
        weights = _scores(part, scale).sub_(lse).exp_()
        of_value.flatten(0, 1).index_add_(0, part.rows, torch.bmm(weights.mT, of_out).flatten(0, 1))
        of_scores = torch.bmm(of_out, part.value.mT).sub_(means).mul_(weights).mul_(scale)
        of_key.flatten(0, 1).index_add_(0, part.rows, torch.bmm(of_scores.mT, part.query).flatten(0, 1))
        of_query[part.queries] = torch.bmm(of_scores, part.key).view_as(of_query[part.queries])
    return of_query, of_key, of_value


class _Block(NamedTuple):
    """A block of keys with the queries of one group that chose it.

    rows: rows of its keys. queries: numbers of its queries, in a part. places: (query, slot) in the choice, flattened.
    outside: True at the keys that a query does not see, [n, 1, size]; None if the queries see all of them.
    """

    rows: slice | Tensor
    queries: Tensor
    places: Tensor
    outside: Tensor | None


def _blocks(choice: Choice, part: slice, group: int) -> Iterator[_Block]:
    """Yield the blocks that the queries of `part` chose."""
    chosen, size = choice.chosen[part, min(group, choice.chosen.shape[1] - 1)], choice.size
    starts = torch.where(chosen < 0, -1, chosen * size + choice.first[part, None]).flatten()
    seen = (choice.ends[part, None] - chosen * size).clamp_(max=size).flatten()  # keys of each block that a query sees
    values, places = starts.sort(stable=True)
    found, counts = values.unique_consecutive(return_counts=True)
    for start, of_block in zip(found.tolist(), places.split(counts.tolist()), strict=True):
        if start < 0:
            continue
        seen_by = seen[of_block, None]
        longest = int(seen_by.max())  # the next rows belong to another row of the pack, perhaps with the same keys
        inner = torch.arange(longest)
        outside = (inner >= seen_by)[:, None] if longest > int(seen_by.min()) else None
        rows = slice(start, start + longest)
        at = rows if choice.order is None else choice.order[rows]
        yield _Block(at, of_block // chosen.shape[1], of_block, outside)


def _block_parts(query: Tensor, choice: Choice, groups: int) -> Iterator[tuple[slice, int, slice]]:
    """Yield parts of the queries, with each group and its heads."""
    count, heads = query.shape[:2]
    repeats = heads // groups
    size = max(1, SCORES_AT_A_TIME // (repeats * choice.most))
    for start in range(0, count, size):
        for group in range(groups):
            yield slice(start, min(start + size, count)), group, slice(group * repeats, (group + 1) * repeats)


def _block_scores(query: Tensor, key: Tensor, block: _Block, scale: float) -> Tensor:
    """Return the scores of a block, [n, heads, size]."""
    scores = torch.matmul(query, key.T).mul_(scale)
    return scores if block.outside is None else scores.masked_fill_(block.outside, -torch.inf)


def forward_by_blocks(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, choice: Choice, scale: float
) -> tuple[Tensor, Tensor]:
    """See `Kernels`: the products of each block with all queries that chose it."""
    wide = torch.promote_types(query.dtype, torch.float32)
    out, logsumexp = torch.empty_like(query), query.new_empty(query.shape[:2], dtype=wide)
    for part, group, heads in _block_parts(query, choice, key.shape[1]):
        own, topk = query[part, heads].to(wide), choice.chosen.shape[-1]
        blocks = list(_blocks(choice, part, group))
        scores = [_block_scores(own[block.queries], key[block.rows, group].to(wide), block, scale) for block in blocks]
        of_blocks = own.new_full((len(own) * topk, own.shape[1]), -torch.inf)
        for block, found in zip(blocks, scores, strict=True):
            of_blocks[block.places] = found.logsumexp(-1)
        lse = of_blocks.unflatten(0, (-1, topk)).logsumexp(1)
        if sinks is not None:
            lse = torch.logaddexp(lse, sinks[heads].to(wide))
        total = torch.zeros_like(own)
        for block, found in zip(blocks, scores, strict=True):
            weights = found.sub_(lse[block.queries, :, None]).exp_()
            total.index_add_(0, block.queries, torch.matmul(weights, value[block.rows, group].to(wide)))
        out[part, heads], logsumexp[part, heads] = total.to(out.dtype), lse
    return out, logsumexp


def backward_by_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    choice: Choice,
    scale: float,
    grad: Tensor,
    logsumexp: Tensor,
    mean: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `Kernels`."""
    wide = logsumexp.dtype
    of_query, of_key, of_value = (torch.zeros(x.shape, dtype=wide) for x in (query, key, value))
    for part, group, heads in _block_parts(query, choice, key.shape[1]):
        own, of_out, lse, means = (x[part, heads].to(wide) for x in (query, grad, logsumexp, mean))
        total = torch.zeros_like(own)
        for block in _blocks(choice, part, group):
            keys, values = (x[block.rows, group].to(wide) for x in (key, value))
            queries, gradients = own[block.queries], of_out[block.queries]
            weights = _block_scores(queries, keys, block, scale).sub_(lse[block.queries, :, None]).exp_()
            of_scores = torch.matmul(gradients, values.T).sub_(means[block.queries, :, None]).mul_(weights).mul_(scale)
            of_value[block.rows, group] += weights.flatten(0, 1).T @ gradients.flatten(0, 1)
            of_key[block.rows, group] += of_scores.flatten(0, 1).T @ queries.flatten(0, 1)
            total.index_add_(0, block.queries, torch.matmul(of_scores, keys))
        of_query[part, heads] = total
    return of_query.to(query.dtype), of_key, of_value
