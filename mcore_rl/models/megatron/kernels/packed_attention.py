"""Kernels of causal attention over packs, and the keys that the queries see.

Attention in a pack [T / CP, heads, head_dim] is causal inside each segment. The gathered keys of all context-parallel
ranks are ordered by rank; each rank has two zigzag chunks of each segment. `tiles_of` divides the queries of a pack
into ranges, and lists for each of them the ranges of keys that its queries see. A kernel below computes one such tile,
or the whole pack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Shaped
from torch import Tensor

from mcore_rl import platform
from mcore_rl.distributed.collectives import RowExchange
from mcore_rl.distributed.packs import PackLayout, PrefixLayout

WORTH_A_TILE = 512
"""Minimum number of keys for a tile. Shorter ranges are copied together: this costs less than one kernel call for each
range."""
QUERIES_OF_A_BLOCK = 256
"""Number of queries in a block, for attention with a window. A block sees fewer than window + this number of keys."""


@dataclass(frozen=True)
class Rows:
    """Row numbers: `count` ranges of `length` rows each; consecutive ranges begin `stride` rows apart."""

    start: int
    length: int
    count: int = 1
    stride: int = 0

    @property
    def total(self) -> int:
        return self.count * self.length

    def of(self, x: Shaped[Tensor, "rows heads dim"]) -> Shaped[Tensor, "count heads length dim"]:
        """Return those rows of `x` whose numbers this object contains, as a view."""
        rows, heads, dim = x.stride()
        size = (self.count, x.shape[1], self.length, x.shape[2])
        return x.as_strided(size, (self.stride * rows, heads, rows, dim), x.storage_offset() + self.start * rows)


@dataclass(frozen=True)
class Tile:
    """Ranges of queries, and for each of these ranges the keys that its queries see.

    queries: the ranges of queries.
    keys: one or more `Rows`, each with as many ranges as `queries`. The queries in range i see the keys in range i of
        each of these `Rows`: all of them, unless `causal` or `window` is set.
    causal: if True, there are as many keys as queries, and query i sees only the first i + 1 keys.
    window: if set, the last query sees the last `window` keys. For each earlier query the window is one key further
        back.
    is_first: whether this is the first tile that contains its queries. Every query has exactly one such tile.
    """

    queries: Rows
    keys: tuple[Rows, ...]
    causal: bool = False
    window: int | None = None
    is_first: bool = False


def tiles_of(layout: PackLayout, cp_rank: int, window: int | None) -> tuple[Tile, ...]:
    """Return the tiles for the queries of context-parallel rank `cp_rank`.

    Tiles with `is_first` come first, in the order of their queries.

    Args:
        window: maximum number of tokens that a token sees, including itself; None for all previous tokens.
    """
    pack = _Pack(layout)
    if window is not None:
        return tuple(tile for chunk in pack.chunks(cp_rank) for tile in _blocks(pack, chunk, window))
    own, before = [], []
    for chunk in pack.chunks(cp_rank):
        own.append(Tile(chunk.queries, (chunk.keys(chunk.number),), causal=True, is_first=True))
        earlier = _joined(chunk.keys(number) for number in range(chunk.number))
        before += [Tile(chunk.queries, keys) for keys in _worth_a_tile(earlier)]
    for segment, queries in pack.descendants():
        before += [Tile(queries, keys) for keys in _worth_a_tile(_joined(pack.true_keys(segment)))]
    return (*own, *before)


@dataclass(frozen=True)
class _Chunk:
    """A zigzag chunk of one segment, or the same chunk of several successive segments that are equally long.

    segment: the first of these segments. count: number of segments. Several segments are taken together only if none
        of them continues another segment.
    number: number of the chunk in its segment.
    queries: row numbers of the chunk's queries in each of these segments, counted in this rank's rows.
    """

    pack: _Pack
    segment: int
    count: int
    number: int
    queries: Rows

    def keys(self, number: int) -> Rows:
        """Return the row numbers of the keys in chunk `number` of each segment, counted in the rows of all ranks."""
        return replace(self.queries, start=self.pack.start(self.segment, number))


class _Pack:
    """Computes the positions of a pack's segments, and of the chunks of each segment."""

    def __init__(self, layout: PackLayout) -> None:
        self.layout, self.cp_size = layout, layout.cp_size
        self.tree = layout.tree if isinstance(layout, PrefixLayout) else None
        self.number_of_chunks = 2 * self.cp_size if self.cp_size > 1 else 1
        self.lengths = layout.segment_lengths
        self.local = [start // self.cp_size for start in layout.cu_seqlens_padded.tolist()]

    def size(self, segment: int) -> int:
        """Return the number of tokens in one chunk of a segment."""
        return self.lengths[segment] // self.number_of_chunks

    def start(self, segment: int, number: int) -> int:
        """Return the index of the first row of chunk `number` of `segment`. Rows are indexed rank after rank."""
        is_late = number >= self.cp_size > 1
        owner = self.number_of_chunks - 1 - number if is_late else number
        return owner * self.local[-1] + self.local[segment] + (self.size(segment) if is_late else 0)

    def parent(self, segment: int) -> int:
        """Return the segment that `segment` continues; −1 if there is no such segment."""
        return self.tree.parents[segment] if self.tree is not None and segment < len(self.tree.parents) else -1

    def chunks(self, cp_rank: int) -> Iterator[_Chunk]:
        """Yield a rank's chunks of all segments.

        Consecutive segments that are equally long and continue no other segment are yielded as one `_Chunk`.
        """
        segments = [segment for segment, length in enumerate(self.lengths) if length]
        # A segment that continues another segment always gets its own chunk.
        alike = groupby(segments, key=lambda s: (self.lengths[s], s if self.parent(s) >= 0 else -1))
        for _, group in alike:
            first, *others = group
            for number in (cp_rank, self.number_of_chunks - 1 - cp_rank) if self.cp_size > 1 else (0,):
                start = self.start(first, number) - cp_rank * self.local[-1]
                stride = self.lengths[first] // self.cp_size if others else 0
                queries = Rows(start, self.size(first), 1 + len(others), stride)
                yield _Chunk(self, first, 1 + len(others), number, queries)

    def true_keys(self, segment: int) -> Iterator[Rows]:
        """Yield the rows of the segment's tokens without padding, in the order of the tokens."""
        size = self.size(segment)
        for number in range(self.number_of_chunks):
            if (left := min(size, self.layout.lengths[segment] - number * size)) > 0:
                yield Rows(self.start(segment, number), left)

    def descendants(self) -> Iterator[tuple[int, Rows]]:
        """Yield each segment that has descendants on this rank, with the rows of all its descendants.

        The descendants of a segment are the segments that continue it, and their descendants. Their rows, counted in
        this rank's rows, are a single range, because the tree of segments is stored depth first.
        """
        parents = self.tree.parents if self.tree is not None else ()
        for segment in range(len(parents)):
            end = segment + 1
            while end < len(parents) and parents[end] >= segment:
                end += 1
            if rows := self.local[end] - self.local[segment + 1]:
                yield segment, Rows(self.local[segment + 1], rows)

    def ancestors(self, segment: int) -> list[int]:
        return self.tree.path(segment)[:-1] if self.parent(segment) >= 0 and self.tree is not None else []


def _blocks(pack: _Pack, chunk: _Chunk, window: int) -> Iterator[Tile]:
    """Divide a chunk's queries into blocks; yield each as a tile. A tile contains only keys that its queries see."""
    numbers = range(chunk.number + 1)
    keys = [rows for ancestor in pack.ancestors(chunk.segment) for rows in pack.true_keys(ancestor)]
    keys += [chunk.keys(number) for number in numbers]
    before = sum(rows.length for rows in keys) - chunk.queries.length
    for start in range(0, chunk.queries.length, QUERIES_OF_A_BLOCK):
        length = min(QUERIES_OF_A_BLOCK, chunk.queries.length - start)
        end = before + start + length
        seen = tuple(_joined(_between(keys, max(0, end - length + 1 - window), end), in_order=True))
        queries = replace(chunk.queries, start=chunk.queries.start + start, length=length)
        if end <= min(length, window):
            yield Tile(queries, seen, causal=True, is_first=True)
        else:
            yield Tile(queries, seen, window=window, is_first=True)


def _between(ranges: Iterable[Rows], first: int, end: int) -> Iterator[Rows]:
    """Concatenate `ranges`; yield the rows at the positions `first` … `end` − 1 of the result, as ranges."""
    position = 0
    for rows in ranges:
        low, high = max(first - position, 0), min(end - position, rows.length)
        if low < high:
            yield replace(rows, start=rows.start + low, length=high - low)
        position += rows.length


def _joined(ranges: Iterable[Rows], in_order: bool = False) -> list[Rows]:
    """Merge adjacent ranges. The ranges are sorted first unless `in_order` is set."""
    found: list[Rows] = []
    for rows in ranges if in_order else sorted(ranges, key=lambda rows: rows.start):
        if found and found[-1].start + found[-1].length == rows.start and found[-1].count == rows.count:
            found[-1] = replace(found[-1], length=found[-1].length + rows.length)
        else:
            found.append(rows)
    return found


def _worth_a_tile(ranges: Sequence[Rows]) -> list[tuple[Rows, ...]]:
    """Group ranges of keys into tiles: each long range has a tile of its own, all short ranges share one tile."""
    short = tuple(rows for rows in ranges if rows.total < WORTH_A_TILE)
    return [(rows,) for rows in ranges if rows.total >= WORTH_A_TILE] + ([short] if short else [])


class AttentionPattern:
    """Describes which keys of a pack the queries of context-parallel rank `cp_rank` see.

    All layers and passes use the same object.

    query_lengths: number of queries in each of the rank's zigzag chunks.
    key_lengths: for each chunk, the number of keys that it sees. The last of these keys belong to the chunk's own
        tokens.
    is_apart: whether the keys that the chunks see must be selected from the gathered rows by `index`. False without
        context parallelism and shared prefixes: the chunks then see all rows, in their order.
    """

    def __init__(self, layout: PackLayout, cp_rank: int) -> None:
        self.layout, self.cp_rank = layout, cp_rank
        self.query_lengths, self.key_lengths, self._order = layout.visible_keys(cp_rank)
        self.is_apart = layout.cp_size > 1 or isinstance(layout, PrefixLayout)
        self._tiles: dict[int | None, tuple[Tile, ...]] = {}
        self._exchanges: dict[int | None, RowExchange | None] = {}
        self._masks: dict[tuple[Any, ...], Tensor] = {}
        self._on_device: tuple[Tensor, Tensor, Tensor] | None = None
        self._key_rows: Tensor | None = None
        self._key_ranges: Tensor | None = None

    def on_host(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the pattern's tensors for the kernel, on the host. Kernels with `reads_in_place` do not need them.

        Returns:
            Cumulative lengths of the chunks' queries and of their keys (int32), and `index` (int64). `index` is empty
            if no rows must be selected.
        """
        lengths = self.query_lengths, self.key_lengths
        queries, keys = (torch.tensor((0, *each)).cumsum(0, dtype=torch.int32) for each in lengths)
        return queries, keys, self.layout.gather_order[self._order] if self.is_apart else self._order[:0]

    def put(self, cu_queries: Tensor, cu_keys: Tensor, index: Tensor) -> None:
        """Store the device's copies of the three tensors that `on_host` returns; the kernel reads these copies."""
        self._on_device = cu_queries, cu_keys, index

    def ensure_on_device(self) -> None:
        """Copy to the device the tensors that `on_host` returns.

        Do nothing if the device has these tensors already, or if its kernel does not need them (`reads_in_place`).
        """
        device = platform.device()
        if self._on_device is None and not KERNELS[device.type].reads_in_place:
            self.put(*platform.sent_together(self.on_host(), device))

    @property
    def on_device(self) -> tuple[Tensor, Tensor, Tensor]:
        assert self._on_device is not None, "the pack's index tensors are on the host"
        return self._on_device

    @property
    def cu_seqlens(self) -> tuple[Tensor, Tensor]:
        """Cumulative lengths of the chunks' queries and of their keys, int32 on the device."""
        return self.on_device[:2]

    @property
    def index(self) -> Tensor | None:
        """Row numbers of the keys that each chunk of queries sees, chunk after chunk, on the device.

        None if the chunks see all rows in their order.
        """
        return self.on_device[2] if self.is_apart else None

    def key_rows(self, device: torch.device) -> Tensor | None:
        """Return row numbers, in the rows of all ranks, of the keys that each chunk sees, chunk after chunk.

        It is `index`, but exists for kernels with `reads_in_place` too. The keys of a chunk are in the order of their
        positions in the row. None if the chunks see all rows in their order.
        """
        if self.is_apart and self._key_rows is None:
            there = None if self._on_device is None else self.index
            self._key_rows = platform.sent(self.on_host()[2], device) if there is None else there
        return self._key_rows

    def key_ranges(self, device: torch.device) -> Tensor:
        """Return two numbers for each query, int32 [2, queries]: its first key, in `key_rows`, and how many it sees."""
        if self._key_ranges is None:
            first, ends, keys = [], [], 0
            for count, seen in zip(self.query_lengths, self.key_lengths, strict=True):
                first.append(torch.full((count,), keys, dtype=torch.int32))
                ends.append(torch.arange(seen - count + 1, seen + 1, dtype=torch.int32))
                keys += seen
            self._key_ranges = platform.sent(torch.stack((torch.cat(first), torch.cat(ends))), device)
        return self._key_ranges

    def tiles(self, window: int | None) -> tuple[Tile, ...]:
        """Return the tiles for layers whose window is `window`."""
        if window not in self._tiles:
            self._tiles[window] = tiles_of(self.layout, self.cp_rank, window)
        return self._tiles[window]

    def exchange(self, window: int | None) -> RowExchange | None:
        """Return which rows the ranks exchange for layers whose window is `window`.

        None if all ranks gather all rows, because the windows would leave out less than half of them.
        """
        if window not in self._exchanges:
            self._exchanges[window] = None if window is None else exchange_of(self.layout, self.cp_rank, window)
        return self._exchanges[window]

    def mask(self, queries: int, keys: int, window: int | None, like: Tensor) -> Tensor:
        """Return a mask [queries, keys] that is added to scores, with dtype and device of `like`.

        The last query sees the last `window` keys. For each earlier query the window is one key further back. If
        `window` is None, the last query sees all keys, the query before it all but the last key, and so on.
        """
        key = (queries, keys, window, like.dtype, like.device)
        if key not in self._masks:
            seen = torch.ones(queries, keys, dtype=torch.bool, device=like.device).tril(keys - queries)
            seen = seen if window is None else seen.triu(keys - queries - window + 1)
            mask = torch.zeros(queries, keys, dtype=like.dtype, device=like.device)
            self._masks[key] = mask.masked_fill_(~seen, -torch.inf)
        return self._masks[key]


LEAST_SAVING = 0.5
"""Share of the other ranks' rows that windows must leave out, so that ranks exchange rows and do not gather all."""


def exchange_of(layout: PackLayout, cp_rank: int, window: int) -> RowExchange | None:
    """Return which rows of keys and values the ranks exchange for a window; None if they gather all rows.

    A window reaches back `window` − 1 tokens from the first query of a chunk.
    """
    size = layout.cp_size
    if size == 1:
        return None
    own = layout.total // size
    wanted = [_rows_in_window(layout, rank, window) for rank in range(size)]
    from_others = sum(int((rows // own != rank).sum()) for rank, rows in enumerate(wanted))
    if from_others > (1 - LEAST_SAVING) * size * (size - 1) * own:
        return None
    sent = [rows[rows // own == cp_rank] - cp_rank * own for rows in wanted]
    received = wanted[cp_rank]
    indices = platform.sent_together((torch.cat(sent), received), platform.device())
    counts = [len(rows) for rows in sent], torch.bincount(received // own, minlength=size).tolist()
    return RowExchange(layout.total, indices[0], counts[0], indices[1], counts[1])


def _rows_in_window(layout: PackLayout, cp_rank: int, window: int) -> Tensor:
    """Return the numbers of the rows, in rank order, that the windows of a rank's queries reach; sorted."""
    queries, keys, order = layout.visible_keys(cp_rank)
    reached = [
        seen[max(0, len(seen) - count - window + 1) :]
        for seen, count in zip(order.split(keys), queries, strict=True)
        if count
    ]
    return layout.gather_order[torch.cat(reached)].unique() if reached else order[:0]


def visible_keys(
    layout: PackLayout, cp_rank: int, *others: Tensor, sends_index: bool = True
) -> tuple[AttentionPattern, list[Tensor]]:
    """Return a pack's attention pattern, and copies of `others` on the device.

    Args:
        others: further tensors. They are copied to the device together with the pattern's tensors.
        sends_index: whether the pattern's index tensors, which the local attention needs, are copied as well.
    """
    visible, device = AttentionPattern(layout, cp_rank), platform.device()
    if KERNELS[device.type].reads_in_place or not sends_index:
        return visible, platform.sent_together(others, device)
    *there, cu_queries, cu_keys, index = platform.sent_together((*others, *visible.on_host()), device)
    visible.put(cu_queries, cu_keys, index)
    return visible, there


@dataclass(frozen=True)
class Kernel:
    """An implementation of causal attention inside each segment of a pack.

    attend: function of queries [Q, heads, d], keys and values [K, groups, d], the attention pattern, the scale of
        scores (1/√d if None), the window and the sinks [heads]. It returns [Q, heads, d]. A sink is the score of an
        additional key. The value of this key is 0.
    reads_in_place: if True, `attend` takes the keys and values of all ranks, in rank order. If False, it takes those
        that the chunks of queries see, chunk after chunk.
    """

    attend: Callable[[Tensor, Tensor, Tensor, AttentionPattern, float | None, int | None, Tensor | None], Tensor]
    reads_in_place: bool = False


LARGEST_FLASH_HEAD = 256
"""Largest head_dim of flash attention on CUDA, that of PyTorch and that of Transformer Engine."""


def kernel_of(query: Tensor) -> Kernel:
    """Return the kernel for tensors with the device, dtype and head_dim of `query`."""
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    if query.device.type == "cuda" and not (is_half and query.shape[-1] <= LARGEST_FLASH_HEAD):
        return Kernel(sdpa_by_segment if query.dtype == torch.float64 else efficient_varlen)
    return KERNELS[query.device.type]


def sdpa_by_segment(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: AttentionPattern,
    scale: float | None,
    window: int | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention with PyTorch's SDPA, one chunk of queries after the other.

    This works on any device and in any precision.
    """
    repeats = query.shape[1] // key.shape[1]  # with equal numbers of heads, a memory-efficient kernel is available
    query, key, value = (
        x.repeat_interleave(n, dim=1).transpose(0, 1).unsqueeze(0)
        for x, n in ((query, 1), (key, repeats), (value, repeats))
    )
    outs = []
    for q, k, v in zip(
        query.split(visible.query_lengths, dim=2),
        key.split(visible.key_lengths, dim=2),
        value.split(visible.key_lengths, dim=2),
        strict=True,
    ):
        plain = q.shape[2] == k.shape[2] and window is None and sinks is None
        mask = None if plain else visible.mask(q.shape[2], k.shape[2], window, q)
        if sinks is not None and mask is not None:
            k, v, mask = with_sink_key(k, v, mask, sinks)
        outs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=plain, scale=scale))
    return torch.cat(outs, dim=2).squeeze(0).transpose(0, 1)


def with_sink_key(key: Tensor, value: Tensor, mask: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys, values and mask with K + 1 keys; the additional key represents the attention sinks.

    Its key and value are zeros. Its score is therefore only what the mask adds: the head's sink.

    Args:
        key, value: […, heads or groups, K, d].
        mask: […, Q, K], which is added to the scores.
        sinks: [heads], or […, heads, Q] with one sink for each row of the mask.
    """
    rows = sinks.unsqueeze(-1) if sinks.ndim > 1 else sinks[:, None, None].expand(-1, mask.shape[-2], -1)
    key, value = F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1))
    mask = mask.expand(*rows.shape[:-1], mask.shape[-1])
    return key, value, torch.cat((mask, rows.to(mask.dtype)), dim=-1)


def flash_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: AttentionPattern,
    scale: float | None,
    window: int | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention with PyTorch's flash kernel for packs (CUDA, half precision).

    In its causal mask the last query sees all keys, as is needed here. The operator is called directly: its wrapper
    `torch.nn.attention.varlen` exists only since PyTorch 2.10, and supports windows, scale and shared heads only since
    2.12. The operator has no sinks; `_SinkFlash` adds them.
    """
    if sinks is not None:
        with_sinks: Tensor = _SinkFlash.apply(query, key, value, sinks, visible, scale, window)
        return with_sinks
    out: Tensor = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        *visible.cu_seqlens,
        max(visible.query_lengths),
        max(visible.key_lengths),
        0.0,
        True,
        False,
        scale=scale,
        window_size_left=None if window is None else window - 1,
        window_size_right=0,
    )[0]
    return out


class _SinkFlash(torch.autograd.Function):
    """PyTorch's flash kernel for packs, extended by sinks.

    The kernel returns the output and lse, the log-sum-exp of the scores. With lse' = logaddexp(lse, sink) the output
    with sinks is output · exp(lse − lse'). The kernel's backward pass, called with this output and lse', returns the
    right gradients, because a key's probability is exp(score − lse').
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor,
        visible: AttentionPattern,
        scale: float | None,
        window: int | None,
    ) -> Tensor:
        ctx.arguments = (
            *visible.cu_seqlens,
            max(visible.query_lengths),
            max(visible.key_lengths),
            0.0,
            True,
        )
        ctx.options = {
            "scale": scale,
            "window_size_left": None if window is None else window - 1,
            "window_size_right": 0,
        }
        out, logsumexp, *ctx.random, _ = torch.ops.aten._flash_attention_forward(
            query, key, value, *ctx.arguments, False, **ctx.options
        )
        of_all = torch.logaddexp(logsumexp, sinks.to(logsumexp)[:, None])  # [heads, Q]
        out = out * (logsumexp - of_all).exp().T[..., None].to(out.dtype)
        ctx.save_for_backward(query, key, value, out, of_all, sinks)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, logsumexp, sinks = ctx.saved_tensors
        gradients = torch.ops.aten._flash_attention_backward(
            grad.contiguous(), query, key, value, out, logsumexp, *ctx.arguments, *ctx.random, **ctx.options
        )
        share = (sinks.to(logsumexp)[:, None] - logsumexp).exp()
        return *gradients, gradient_of_sinks(share.T, grad, out, sinks), None, None, None


def gradient_of_sinks(share: Tensor, grad: Tensor, out: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient [heads] of the sinks.

    Args:
        share: probability of each sink in the softmax of each query, [Q, heads].
        grad: gradient of the attention's output `out`.
    """
    return -(share * (grad.to(share) * out.to(share)).sum(-1)).sum(0).to(sinks.dtype)


CAUSAL_FROM_LOWER_RIGHT = 2
"""The operator's `custom_mask_type`: the last query sees all keys, each earlier query one key less at the end."""


def efficient_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: AttentionPattern,
    scale: float | None,
    window: int | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention with PyTorch's memory-efficient kernel for packs (CUDA, fp32 or large heads).

    The kernel needs as many key heads as query heads, so key heads are repeated. It does not support sinks, and its
    backward pass ignores windows; in these cases `sdpa_by_segment` is called instead.
    """
    if window is not None or sinks is not None:
        return sdpa_by_segment(query, key, value, visible, scale, window, sinks)
    repeats = query.shape[1] // key.shape[1]
    out: Tensor = torch.ops.aten._efficient_attention_forward(
        query[None],
        key.repeat_interleave(repeats, dim=1)[None],
        value.repeat_interleave(repeats, dim=1)[None],
        None,
        *visible.cu_seqlens,
        max(visible.query_lengths),
        max(visible.key_lengths),
        0.0,
        CAUSAL_FROM_LOWER_RIGHT,
        True,
        scale=scale,
    )[0]
    return out[0]


def tiled(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: AttentionPattern,
    scale: float | None,
    window: int | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention with PyTorch's flash kernel for the CPU, tile by tile; see `tiles_of`.

    The kernel reads queries and keys in place; only short ranges of keys are copied. Queries, keys, values, the output
    and its log-sum-exp are kept for the backward pass.
    """
    out: Tensor = _TiledAttention.apply(query, key, value, visible, visible.tiles(window), scale, sinks)
    return out


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        visible: AttentionPattern,
        tiles: tuple[Tile, ...],
        scale: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        tile_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        # The results of several tiles are merged in at least fp32.
        out = torch.empty(query.shape, dtype=_exact(query.dtype))
        logsumexp = torch.empty(*query.shape[:2], 1, dtype=out.dtype)
        for tile in tiles:
            tensors = tile.queries.of(query), *(_keys(x, tile, query) for x in (key, value))
            mask = _mask(tile, visible, query)
            part, part_lse = tile_attention(*tensors, 0.0, tile.causal, attn_mask=mask, scale=scale)
            so_far, so_far_lse, part_lse = tile.queries.of(out), tile.queries.of(logsumexp), part_lse.unsqueeze(-1)
            if tile.is_first:
                so_far.copy_(part)
                so_far_lse.copy_(part_lse)
            else:
                both = torch.logaddexp(so_far_lse, part_lse)
                so_far.mul_((so_far_lse - both).exp_()).addcmul_(part, (part_lse - both).exp_())
                so_far_lse.copy_(both)
        if sinks is not None:
            of_all = torch.logaddexp(logsumexp, sinks.to(logsumexp)[None, :, None])
            out.mul_((logsumexp - of_all).exp_())
            logsumexp = of_all
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, logsumexp, sinks)
        ctx.visible, ctx.tiles, ctx.scale = visible, tiles, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, logsumexp, sinks = ctx.saved_tensors
        tile_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        # Each tile's probabilities are exp(score − log-sum-exp of all tiles), so tiles' gradients add up.
        gradients = [torch.zeros(x.shape, dtype=_exact(x.dtype)) for x in (query, key, value)]
        for tile in ctx.tiles:
            q, g, o, lse = (tile.queries.of(x) for x in (query, grad, out, logsumexp))
            k, v = (_keys(x, tile, query) for x in (key, value))
            mask = _mask(tile, ctx.visible, query)
            d_query, *d_keys = tile_backward(
                g, q, k, v, o, lse.squeeze(-1), 0.0, tile.causal, attn_mask=mask, scale=ctx.scale
            )
            tile.queries.of(gradients[0]).add_(d_query)
            for gradient, parts in zip(gradients[1:], d_keys, strict=True):
                if parts.shape[1] != gradient.shape[1]:
                    parts = parts.unflatten(1, (gradient.shape[1], -1)).sum(2, dtype=gradient.dtype)
                for rows, part in zip(tile.keys, parts.split([r.length for r in tile.keys], dim=2), strict=True):
                    rows.of(gradient).add_(part)
        of_sinks = None
        if sinks is not None:
            share = (sinks.to(logsumexp)[None] - logsumexp.squeeze(-1)).exp_()
            of_sinks = gradient_of_sinks(share, grad, out, sinks)
        return *(gradient.to(query.dtype) for gradient in gradients), None, None, None, of_sinks


def _keys(x: Tensor, tile: Tile, query: Tensor) -> Tensor:
    """Select a tile's keys (or values) from all keys (or values) `x`; return [count, heads or groups, keys, d]."""
    ranges = [rows.of(x) for rows in tile.keys]
    keys = ranges[0] if len(ranges) == 1 else torch.cat(ranges, dim=2)
    repeats = query.shape[1] // x.shape[1]
    return keys if repeats == 1 or _shares_heads(x.dtype) else keys.repeat_interleave(repeats, dim=1)


def _shares_heads(dtype: torch.dtype) -> bool:
    """Return whether the CPU kernel can be called with fewer key heads than query heads.

    It accepts them since PyTorch 2.10. But in half precision, it rounds their gradients after adding each query head.
    """
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return version >= (2, 10) and dtype.itemsize >= 4


def _mask(tile: Tile, visible: AttentionPattern, like: Tensor) -> Tensor | None:
    if tile.window is None:
        return None
    return visible.mask(tile.queries.length, sum(rows.length for rows in tile.keys), tile.window, like)


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


KERNELS = {"cpu": Kernel(tiled, reads_in_place=True), "cuda": Kernel(flash_varlen)}
"""Kernels by device type."""


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: AttentionPattern,
    scale: float | None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute causal attention inside each segment of a pack; return [Q, heads, d].

    Args:
        query: [Q, heads, d].
        key, value: [K, groups, d], in the order that the kernel needs; see `Kernel.reads_in_place`. The queries of a
            segment and the segment's last keys belong to the same tokens.
        window: maximum number of keys that a query sees; None for all.
        sinks: sink of each head, [heads]; None if there are none.
    """
    if window is not None and window >= max(visible.key_lengths):
        window = None
    return kernel_of(query).attend(query, key, value, visible, scale, window, sinks)
