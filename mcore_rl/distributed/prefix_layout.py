"""Packs in which a common beginning of several rows stands once: a prompt, and the responses that continue it.

The segments of such a pack are the nodes of trees. Each stands behind its ancestors, padded and (under context
parallelism) cut by itself, and its tokens see their true tokens and then its own. A token may then be followed by
several others, but is always preceded by one: values of predictions stand at the token that is predicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from mcore_rl.distributed.pack_layout import PackLayout, round_up


@dataclass(frozen=True)
class PrefixTree:
    """How rows share their beginnings.

    lengths: tokens of each segment, depth first: behind each stand all that continue it, and then others.
    parents: the segment that each continues, −1 for none.
    ends: each row's last segment.
    """

    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    ends: tuple[int, ...]

    @classmethod
    def of_rows(cls, input_ids: Int[Tensor, "rows seq"], lengths: Sequence[int], min_shared: int) -> PrefixTree:
        """Build the tree of rows [N, S] with these true lengths; beginnings below `min_shared` tokens are repeated."""
        tree = _Growing(input_ids, list(lengths), min_shared)
        tree.grow(list(range(len(lengths))), 0, -1)
        return cls(tuple(tree.sizes), tuple(tree.parents), tuple(tree.ends))

    @classmethod
    def forest(cls, trees: Sequence[PrefixTree]) -> PrefixTree:
        """Several trees behind one another, and their rows."""
        lengths: list[int] = []
        parents: list[int] = []
        ends: list[int] = []
        for tree in trees:
            parents += [parent + len(lengths) if parent >= 0 else -1 for parent in tree.parents]
            ends += [end + len(lengths) for end in tree.ends]
            lengths += tree.lengths
        return cls(tuple(lengths), tuple(parents), tuple(ends))

    def padded_size(self, multiple: int) -> int:
        """Tokens in a pack."""
        return sum(round_up(n, multiple) for n in self.lengths)

    @cached_property
    def before(self) -> tuple[int, ...]:
        """Tokens of each segment's ancestors."""
        counts: list[int] = []
        for parent in self.parents:
            counts.append(counts[parent] + self.lengths[parent] if parent >= 0 else 0)
        return tuple(counts)

    def path(self, segment: int) -> list[int]:
        """Segments from the root to this one."""
        chain = [segment]
        while (segment := self.parents[segment]) >= 0:
            chain.append(segment)
        return chain[::-1]


class _Growing:
    """A radix tree of rows, segment by segment."""

    def __init__(self, input_ids: Tensor, lengths: list[int], min_shared: int) -> None:
        self.input_ids, self.row_lengths, self.min_shared = input_ids, lengths, max(min_shared, 1)
        self.sizes: list[int] = []
        self.parents: list[int] = []
        self.ends = [-1] * len(lengths)

    def grow(self, rows: list[int], depth: int, parent: int) -> None:
        """Segments for what `rows`, alike up to `depth`, have beyond it."""
        common = self._common(rows, depth)
        ended = [row for row in rows if self.row_lengths[row] == common]
        branches: dict[int, list[int]] = {}
        for row in rows:
            if self.row_lengths[row] > common:
                branches.setdefault(int(self.input_ids[row, common]), []).append(row)
        if len(rows) > 1 and branches and common - depth < self.min_shared:
            for row in ended:
                self._end([row], self._add(common - depth, parent) if common > depth or parent < 0 else parent)
            for group in branches.values():
                self.grow(group, depth, parent)
            return
        segment = self._add(common - depth, parent) if common > depth or parent < 0 else parent
        self._end(ended, segment)
        for group in branches.values():
            self.grow(group, common, segment)

    def _common(self, rows: list[int], depth: int) -> int:
        """Up to where all are alike."""
        limit = min(self.row_lengths[row] for row in rows)
        same = (self.input_ids[rows, depth:limit] == self.input_ids[rows[0], depth:limit]).all(0)
        return depth + int(same.long().cumprod(0).sum())

    def _add(self, size: int, parent: int) -> int:
        self.sizes.append(size)
        self.parents.append(parent)
        return len(self.sizes) - 1

    def _end(self, rows: list[int], segment: int) -> None:
        for row in rows:
            self.ends[row] = segment


@dataclass(frozen=True)
class PrefixLayout(PackLayout):
    """A pack whose segments are those of `tree`, in its order; its N rows are the tree's."""

    tree: PrefixTree = PrefixTree((), (), ())

    @classmethod
    def of(cls, tree: PrefixTree, cp_size: int, multiple: int, total: int | None = None) -> PrefixLayout:
        """Each segment padded to `multiple`; the pack to `total` if given."""
        padded = tuple(round_up(n, multiple) for n in tree.lengths)
        return cls(tree.lengths, padded, sum(padded) if total is None else total, cp_size, tree)

    @property
    def num_sequences(self) -> int:
        return len(self.tree.ends)

    @cached_property
    def row_lengths(self) -> tuple[int, ...]:
        return tuple(self.tree.before[end] + self.tree.lengths[end] for end in self.tree.ends)

    @property
    def position_ids(self) -> Int[Tensor, " tokens"]:
        return self.offsets + torch.tensor((*self.tree.before, 0))[self._segment_of]

    @cached_property
    def _row_and_column(self) -> tuple[Tensor, Tensor]:
        """A row that passes through each token, and where; any will do, since they are alike there."""
        row_of = torch.zeros(len(self.segment_lengths), dtype=torch.long)
        for row, end in enumerate(self.tree.ends):
            row_of[self.tree.path(end)] = row
        return row_of[self._segment_of], self.position_ids

    @cached_property
    def predictor(self) -> Int[Tensor, " tokens"]:
        before = torch.where(self._is_token, torch.arange(self.total) - 1, -1)
        starts = self.starts.tolist()
        for start, length, parent in zip(starts, self.lengths, self.tree.parents, strict=True):
            if length:
                before[start] = starts[parent] + self.lengths[parent] - 1 if parent >= 0 else -1
        return before

    def token_table(self, width: int) -> tuple[Int[Tensor, "rows seq"], Bool[Tensor, "rows seq"]]:
        index = torch.zeros(self.num_sequences, width, dtype=torch.long)
        for row, end in enumerate(self.tree.ends):
            tokens = self._tokens_of(self.tree.path(end))[:width]
            index[row, : len(tokens)] = tokens
        return index, torch.arange(width)[None] < torch.tensor(self.row_lengths)[:, None]

    def _tokens_before(self, segment: int) -> Tensor:
        return self._tokens_of(self.tree.path(segment)[:-1] if segment < len(self.lengths) else [])

    def _tokens_of(self, segments: Sequence[int]) -> Tensor:
        """Pack positions of the true tokens of segments, one after the other."""
        ranges = [torch.arange(self.lengths[s]) + self.starts[s] for s in segments]
        return torch.cat(ranges) if ranges else torch.zeros(0, dtype=torch.long)
