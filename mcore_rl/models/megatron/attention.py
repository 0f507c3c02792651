"""Core attention over packs, for Megatron's layer specs where Transformer Engine is not used.

A pack [T / CP, heads, head_dim] attends causally inside each of its segments. Under context parallelism each rank
gathers the keys and values of its pack and attends with its own queries. The keys of a gathered pack are ordered by
context-parallel rank: rank p holds two zigzag chunks of each segment. `AttentionTiles` cuts the pack into ranges of
queries with the ranges of keys that they see; the kernels below compute one tile, or the whole pack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Shaped
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from mcore_rl import platform
from mcore_rl.distributed.collectives import all_gather_forward_reduce_scatter_backward
from mcore_rl.distributed.packs import PackLayout, PrefixLayout
from mcore_rl.models.megatron.parallel_state import ProcessGroupCollection

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

WORTH_A_TILE = 512
"""Keys. Ranges of fewer are copied together: a kernel's call and a merge cost more than that."""
QUERIES_OF_A_BLOCK = 256
"""Queries of a block under a window: they see this many more keys than the window; a mask has a row for each."""


@dataclass(frozen=True)
class Rows:
    """`count` ranges of `length` rows, whose starts are `stride` rows apart."""

    start: int
    length: int
    count: int = 1
    stride: int = 0

    @property
    def total(self) -> int:
        return self.count * self.length

    def of(self, x: Shaped[Tensor, "rows heads dim"]) -> Shaped[Tensor, "count heads length dim"]:
        """A view of `x`."""
        rows, heads, dim = x.stride()
        size = (self.count, x.shape[1], self.length, x.shape[2])
        return x.as_strided(size, (self.stride * rows, heads, rows, dim), x.storage_offset() + self.start * rows)


@dataclass(frozen=True)
class Tile:
    """Queries, and keys that all of them see, one range after the other; or less of them:

    causal: as many keys as queries, the first query sees the first key alone, and so on.
    window: the last query sees so many keys, the last ones, the one before it those that lie one further ahead, …
    is_first: every query is in one such tile, which comes before the others that it is in.
    """

    queries: Rows
    keys: tuple[Rows, ...]
    causal: bool = False
    window: int | None = None
    is_first: bool = False


def tiles_of(layout: PackLayout, cp_rank: int, window: int | None) -> tuple[Tile, ...]:
    """The tiles of the queries of context-parallel rank `cp_rank`, in the order of their rows, first ones first.

    Args:
        window: tokens that a token sees at most, itself included; all before it if None.
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
    """The chunk `number` of `count` segments from `segment` on, which are equally long and continue nothing, or of one.

    queries: where its rows are among a rank's own.
    """

    pack: _Pack
    segment: int
    count: int
    number: int
    queries: Rows

    def keys(self, number: int) -> Rows:
        """Return the rows of another chunk of the same segments."""
        return replace(self.queries, start=self.pack.start(self.segment, number))


class _Pack:
    """The rows of a pack's segments and of their chunks, on one rank and on all ranks in order."""

    def __init__(self, layout: PackLayout) -> None:
        self.layout, self.cp_size = layout, layout.cp_size
        self.tree = layout.tree if isinstance(layout, PrefixLayout) else None
        self.number_of_chunks = 2 * self.cp_size if self.cp_size > 1 else 1
        self.lengths = layout.segment_lengths
        self.local = [start // self.cp_size for start in layout.cu_seqlens_padded.tolist()]

    def size(self, segment: int) -> int:
        """Tokens of one of its chunks."""
        return self.lengths[segment] // self.number_of_chunks

    def start(self, segment: int, number: int) -> int:
        """The first row of a chunk, among those of all ranks."""
        is_late = number >= self.cp_size > 1
        owner = self.number_of_chunks - 1 - number if is_late else number
        return owner * self.local[-1] + self.local[segment] + (self.size(segment) if is_late else 0)

    def parent(self, segment: int) -> int:
        """The segment that it continues; −1 for none."""
        return self.tree.parents[segment] if self.tree is not None and segment < len(self.tree.parents) else -1

    def chunks(self, cp_rank: int) -> Iterator[_Chunk]:
        """What a rank has of each segment; of neighbours that are alike, together."""
        segments = [segment for segment, length in enumerate(self.lengths) if length]
        # One that continues another is like no other: it is on its own.
        alike = groupby(segments, key=lambda s: (self.lengths[s], s if self.parent(s) >= 0 else -1))
        for _, group in alike:
            first, *others = group
            for number in (cp_rank, self.number_of_chunks - 1 - cp_rank) if self.cp_size > 1 else (0,):
                start = self.start(first, number) - cp_rank * self.local[-1]
                stride = self.lengths[first] // self.cp_size if others else 0
                queries = Rows(start, self.size(first), 1 + len(others), stride)
                yield _Chunk(self, first, 1 + len(others), number, queries)

    def true_keys(self, segment: int) -> Iterator[Rows]:
        """Return the rows of the segment's real tokens, in their order."""
        size = self.size(segment)
        for number in range(self.number_of_chunks):
            if (left := min(size, self.layout.lengths[segment] - number * size)) > 0:
                yield Rows(self.start(segment, number), left)

    def descendants(self) -> Iterator[tuple[int, Rows]]:
        """Segments that others continue, and a rank's rows of all of these: a tree's nodes stand depth first."""
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
    """A chunk's queries some at a time, each with the keys in their windows alone."""
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
    """Return the parts of consecutive ranges from `first` to before `end`."""
    position = 0
    for rows in ranges:
        low, high = max(first - position, 0), min(end - position, rows.length)
        if low < high:
            yield replace(rows, start=rows.start + low, length=high - low)
        position += rows.length


def _joined(ranges: Iterable[Rows], in_order: bool = False) -> list[Rows]:
    """Neighbours as one range; in any order unless it matters."""
    found: list[Rows] = []
    for rows in ranges if in_order else sorted(ranges, key=lambda rows: rows.start):
        if found and found[-1].start + found[-1].length == rows.start and found[-1].count == rows.count:
            found[-1] = replace(found[-1], length=found[-1].length + rows.length)
        else:
            found.append(rows)
    return found


def _worth_a_tile(ranges: Sequence[Rows]) -> list[tuple[Rows, ...]]:
    """Long ranges by themselves, the others together."""
    short = tuple(rows for rows in ranges if rows.total < WORTH_A_TILE)
    return [(rows,) for rows in ranges if rows.total >= WORTH_A_TILE] + ([short] if short else [])


@contextmanager
def recompute_in_backward(tensor: Shaped[Tensor, "..."], make: Callable[[], Tensor]) -> Iterator[None]:
    """Inside, autograd keeps nothing of `tensor` or of its views: a backward pass gets their like from `make()`.

    `make` gives a tensor of the same shape, strides and numbers, and is called once for each backward pass that needs
    it, where this is first asked for: the same place on all ranks, so it may be a collective. What it gave is let go
    when all that was kept has been asked for.
    """
    remade = _Remade(make)
    storage = platform.storage_id(tensor)

    def keep(saved: Tensor) -> Any:
        if platform.storage_id(saved) == storage:
            return remade.part(saved)
        return saved.detach()  # a node that kept its own output as it is would keep itself

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


class AttentionPattern:
    """The keys that the queries of context-parallel rank `cp_rank` see in a pack, made once for all layers and passes.

    query_lengths, key_lengths: of the rank's chunks of queries, and of the keys that each may see, whose last ones are
        as many as the queries and theirs.
    is_apart: whether the rows of all ranks, one after the other, are not the visible ones, one chunk's after the other.
    """

    def __init__(self, layout: PackLayout, cp_rank: int) -> None:
        self.layout, self.cp_rank = layout, cp_rank
        self.query_lengths, self.key_lengths, self._order = layout.visible_keys(cp_rank)
        self.is_apart = layout.cp_size > 1 or isinstance(layout, PrefixLayout)
        self._tiles: dict[int | None, tuple[Tile, ...]] = {}
        self._masks: dict[tuple[Any, ...], Tensor] = {}
        self._on_device: tuple[Tensor, Tensor, Tensor] | None = None

    def on_host(self) -> tuple[Tensor, Tensor, Tensor]:
        """What a kernel that does not read in place needs on the device: cumulative lengths of queries and of keys,
        int32, and `index`, int64, which is empty where there is none."""
        lengths = self.query_lengths, self.key_lengths
        queries, keys = (torch.tensor((0, *each)).cumsum(0, dtype=torch.int32) for each in lengths)
        return queries, keys, self.layout.gather_order[self._order] if self.is_apart else self._order[:0]

    def put(self, cu_queries: Tensor, cu_keys: Tensor, index: Tensor) -> None:
        """Take `on_host()` as it is on the device."""
        self._on_device = cu_queries, cu_keys, index

    @property
    def on_device(self) -> tuple[Tensor, Tensor, Tensor]:
        assert self._on_device is not None, "the pack's index tensors are on the host"
        return self._on_device

    @property
    def cu_seqlens(self) -> tuple[Tensor, Tensor]:
        """Cumulative lengths of queries and of keys, int32 on the device."""
        return self.on_device[:2]

    @property
    def index(self) -> Tensor | None:
        """The rows that each chunk of queries sees, one chunk's after the other, on the device; None where these are
        all rows in their order."""
        return self.on_device[2] if self.is_apart else None

    def tiles(self, window: int | None) -> tuple[Tile, ...]:
        """The attention of layers that have this window."""
        if window not in self._tiles:
            self._tiles[window] = tiles_of(self.layout, self.cp_rank, window)
        return self._tiles[window]

    def mask(self, queries: int, keys: int, window: int | None, like: Tensor) -> Tensor:
        """To be added to scores [queries, keys]: the last query sees the last `window` keys, or all before it if None,
        the one before it one less far, …; of `like`'s dtype and device."""
        key = (queries, keys, window, like.dtype, like.device)
        if key not in self._masks:
            seen = torch.ones(queries, keys, dtype=torch.bool, device=like.device).tril(keys - queries)
            seen = seen if window is None else seen.triu(keys - queries - window + 1)
            mask = torch.zeros(queries, keys, dtype=like.dtype, device=like.device)
            self._masks[key] = mask.masked_fill_(~seen, -torch.inf)
        return self._masks[key]


def visible_keys(layout: PackLayout, cp_rank: int, *others: Tensor) -> tuple[AttentionPattern, list[Tensor]]:
    """Return a pack's visible keys for the kernels of `platform.device()`, and `others` there, by one copy."""
    visible, device = AttentionPattern(layout, cp_rank), platform.device()
    if KERNELS[device.type].reads_in_place:
        return visible, platform.sent_together(others, device)
    *there, cu_queries, cu_keys, index = platform.sent_together((*others, *visible.on_host()), device)
    visible.put(cu_queries, cu_keys, index)
    return visible, there


@dataclass(frozen=True)
class Kernel:
    """Causal attention inside each segment of a pack.

    attend: queries [Q, heads, d], keys and values [K, groups, d], what is seen of them, the scale of scores (1/√d if
        None), the window → [Q, heads, d].
    reads_in_place: keys and values are the rows of all ranks, one after the other; else those that each chunk of
        queries sees, one chunk's after the other.
    """

    attend: Callable[[Tensor, Tensor, Tensor, AttentionPattern, float | None, int | None], Tensor]
    reads_in_place: bool = False


def kernel_of(query: Tensor) -> Kernel:
    """For tensors like this one."""
    if query.device.type == "cuda" and query.dtype not in (torch.float16, torch.bfloat16):
        return Kernel(sdpa_by_segment)
    return KERNELS[query.device.type]


def sdpa_by_segment(
    query: Tensor, key: Tensor, value: Tensor, visible: AttentionPattern, scale: float | None, window: int | None
) -> Tensor:
    """Torch's SDPA chunk by chunk, on any device; for GPUs in fp32, for which there is no flash kernel."""
    repeats = query.shape[1] // key.shape[1]  # with as many heads a memory-efficient kernel is there
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
        plain = q.shape[2] == k.shape[2] and window is None
        mask = None if plain else visible.mask(q.shape[2], k.shape[2], window, q)
        outs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=plain, scale=scale))
    return torch.cat(outs, dim=2).squeeze(0).transpose(0, 1)


def flash_varlen(
    query: Tensor, key: Tensor, value: Tensor, visible: AttentionPattern, scale: float | None, window: int | None
) -> Tensor:
    """Torch's flash kernel for packs (CUDA, half precision); its causal mask is lower-right aligned too.

    The operator itself: `torch.nn.attention.varlen`, which wraps it, came late (2.10) and takes windows, scale and
    shared heads since 2.12 only.
    """
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


def tiled(
    query: Tensor, key: Tensor, value: Tensor, visible: AttentionPattern, scale: float | None, window: int | None
) -> Tensor:
    """Torch's flash kernel of the CPU on tiles of queries and keys where they are; see `attention_tiles`.

    Nothing is copied but short ranges of keys, and kept are queries, keys, values, the output and its log-sum-exp.
    """
    out: Tensor = _TiledAttention.apply(query, key, value, visible, visible.tiles(window), scale)
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
    ) -> Tensor:
        tile_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        # Several tiles' results are merged in fp32 at least.
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
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, logsumexp)
        ctx.visible, ctx.tiles, ctx.scale = visible, tiles, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, logsumexp = ctx.saved_tensors
        tile_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        # Each tile's probabilities are exp(score − the log-sum-exp of all tiles): its part of the whole gradient.
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
        return *(gradient.to(query.dtype) for gradient in gradients), None, None, None


def _keys(x: Tensor, tile: Tile, query: Tensor) -> Tensor:
    """[count, heads or groups, keys, d] a tile's keys or values."""
    ranges = [rows.of(x) for rows in tile.keys]
    keys = ranges[0] if len(ranges) == 1 else torch.cat(ranges, dim=2)
    repeats = query.shape[1] // x.shape[1]
    return keys if repeats == 1 or _shares_heads(x.dtype) else keys.repeat_interleave(repeats, dim=1)


def _shares_heads(dtype: torch.dtype) -> bool:
    """Whether the kernel takes fewer heads of keys than of queries, and adds up their gradients exactly: since 2.10,
    but in half precision it rounds them again with each query head."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return version >= (2, 10) and dtype.itemsize >= 4


def _mask(tile: Tile, visible: AttentionPattern, like: Tensor) -> Tensor | None:
    if tile.window is None:
        return None
    return visible.mask(tile.queries.length, sum(rows.length for rows in tile.keys), tile.window, like)


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


KERNELS = {"cpu": Kernel(tiled, reads_in_place=True), "cuda": Kernel(flash_varlen)}
"""Kernels by kind of device."""


@dataclass
class PackParams(PackedSeqParams):
    """Megatron's parameters of a pack, with what its layers need to know of it.

    `visible` is what its queries see, and `positions` [T / CP] are the local tokens' positions in their rows.
    Transformer Engine takes `cu_seqlens_*` instead; then both are None. `routed` is there for mixtures of experts.
    """

    visible: AttentionPattern | None = None
    positions: Tensor | None = None
    routed: Any = None  # RoutedTokens, which `moe` defines above this module


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
        with nullcontext() if keeps else recompute_in_backward(seen, lambda: self._seen(again, index)):
            keys, values = seen.split(key.shape[-1], dim=-1)
            return packed_attention(query, keys, values, visible, self.softmax_scale, self.window).flatten(1)

    def _seen(self, own: Tensor, index: Tensor | None) -> Tensor:
        """The ranks' [T / CP, groups, …] rows one after the other; of them those of `index`."""
        gathered = all_gather_forward_reduce_scatter_backward(own, self.cp_group)
        return gathered if index is None else gathered[index]


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, visible: AttentionPattern, scale: float | None, window: int | None = None
) -> Tensor:
    """Causal attention inside each segment; a segment's queries are the last ones of its keys.

    [Q, heads, d] queries, [K, groups, d] keys and values as the kernel for them takes these → [Q, heads, d]. A query
    sees `window` keys at most.
    """
    if window is not None and window >= max(visible.key_lengths):
        window = None
    return kernel_of(query).attend(query, key, value, visible, scale, window)
