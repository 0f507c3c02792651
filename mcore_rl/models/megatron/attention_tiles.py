"""Attention of a pack as tiles: ranges of queries with ranges of keys, read where they are.

The keys of a pack stand as the context-parallel ranks hold them, one rank after the other: rank p's two zigzag chunks
of each segment. A chunk of queries sees its own keys causally and all that come before, whose order does not matter to
softmax; so these are taken as the ranges they make there, and the tiles' results merged by their log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from jaxtyping import Shaped
from torch import Tensor

from mcore_rl.distributed.pack_layout import PackLayout
from mcore_rl.distributed.prefix_layout import PrefixLayout

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
