"""Packs of sequences: the position of every token, shared prefixes, zigzag context parallelism, positions with loss.

A pack is one row of T tokens that contains N sequences. Each sequence is right-padded to a multiple that the parallel
layout requires. Packing, labels, log-probabilities and losses all get their indices from the `PackLayout`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_rl import platform
from mcore_rl.distributed.collectives import (
    all_gather_forward_reduce_scatter_backward,
    all_reduce_forward_all_reduce_backward,
    group_size,
)


def round_up(n: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `n`."""
    return -(-n // multiple) * multiple


@dataclass(frozen=True)
class PackLayout:
    """The lengths of a pack's sequences, and index tensors derived from them (all on the CPU, int64).

    A pack consists of segments: the padded sequences and, if T is larger than their sum, a tail of padding.

    Args:
        lengths: lengths of the N sequences without padding, in tokens.
        padded_lengths: lengths of the sequences in the pack, with padding; multiples of 2·cp_size when cp_size > 1.
        total: T, the width of the pack; at least the sum of `padded_lengths`.
        cp_size: number of context-parallel ranks.
    """

    lengths: tuple[int, ...]
    padded_lengths: tuple[int, ...]
    total: int
    cp_size: int = 1

    def __post_init__(self) -> None:
        if len(self.lengths) != len(self.padded_lengths):
            raise ValueError(f"there are {len(self.lengths)} lengths, but {len(self.padded_lengths)} padded lengths")
        for true, padded in zip(self.lengths, self.padded_lengths, strict=True):
            if not 0 <= true <= padded:
                raise ValueError(f"a sequence has {true} tokens, but its padded length is {padded}")
        multiple = 2 * self.cp_size if self.cp_size > 1 else 1
        if any(n % multiple for n in self.segment_lengths):
            raise ValueError(
                f"padded lengths {self.segment_lengths} must be multiples of {multiple} "
                f"for context_parallel_size={self.cp_size}"
            )

    @classmethod
    def pack(cls, lengths: Sequence[int], cp_size: int = 1, multiple: int = 1, total: int | None = None) -> PackLayout:
        """Return the layout of sequences; pad them to multiples of `multiple`, and the pack to `total` if given."""
        padded = tuple(round_up(n, multiple) for n in lengths)
        return cls(tuple(lengths), padded, sum(padded) if total is None else total, cp_size)

    @classmethod
    def rows(cls, lengths: Sequence[int], width: int, cp_size: int = 1) -> PackLayout:
        """Return the layout of unpacked rows [N, width], treated as one pack of N·width tokens."""
        return cls(tuple(lengths), (width,) * len(lengths), width * len(lengths), cp_size)

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_seqlens: Int[Tensor, " boundaries"],
        cu_seqlens_padded: Int[Tensor, " boundaries"] | None,
        total: int,
        cp_size: int = 1,
    ) -> PackLayout:
        """Return the layout of a pack of `total` tokens with these cumulative lengths [N + 1] of its sequences.

        The lengths are copied to the host once. `cu_seqlens` may equal `cu_seqlens_padded`. The last entry may
        include the padding at the end of the pack.
        """
        true = cu_seqlens.diff().tolist()
        padded = true if cu_seqlens_padded is None else cu_seqlens_padded.diff().tolist()
        return cls(tuple(min(t, p) for t, p in zip(true, padded, strict=True)), tuple(padded), total, cp_size)

    @cached_property
    def segment_lengths(self) -> tuple[int, ...]:
        """Lengths of all segments: the padded sequences and the tail, if there is one."""
        tail = self.total - sum(self.padded_lengths)
        if tail < 0:
            raise ValueError(
                f"the padded sequences have {sum(self.padded_lengths)} tokens, but the pack has only {self.total}"
            )
        return self.padded_lengths + ((tail,) if tail else ())

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @property
    def row_lengths(self) -> tuple[int, ...]:
        """Number of tokens of each row without padding; a prefix that the row shares with other rows is included."""
        return self.lengths

    @cached_property
    def starts(self) -> Int[Tensor, " rows"]:
        """Pack position of the first token of each sequence, [N]."""
        return _exclusive_cumsum(self.padded_lengths)

    @cached_property
    def cu_seqlens(self) -> Int[Tensor, " boundaries"]:
        """Cumulative lengths of the sequences without padding, int32 [N + 1]."""
        return torch.tensor((0, *self.lengths)).cumsum(0).int()

    @cached_property
    def cu_seqlens_padded(self) -> Int[Tensor, " boundaries"]:
        """Cumulative lengths of all segments, including the tail, int32; the last entry is T."""
        return torch.tensor((0, *self.segment_lengths)).cumsum(0).int()

    @cached_property
    def _segment_of(self) -> Tensor:
        lengths = torch.tensor(self.segment_lengths, dtype=torch.long)
        return torch.repeat_interleave(torch.arange(len(lengths)), lengths)

    @cached_property
    def offsets(self) -> Int[Tensor, " tokens"]:
        """Offset of each token in its own segment, [T]."""
        return torch.arange(self.total) - _exclusive_cumsum(self.segment_lengths)[self._segment_of]

    @property
    def position_ids(self) -> Int[Tensor, " tokens"]:
        """Position of each token in its row, [T]."""
        return self.offsets

    @cached_property
    def segment_of_token(self) -> Int[Tensor, " tokens"]:
        """Index of the segment that contains each token, [T]; the number of entries of `lengths` for padding."""
        return torch.where(self.is_token, self._segment_of, len(self.lengths))

    @property
    def passages(self) -> Int[Tensor, "2 passages"]:
        """Pairs of a row and a segment that is part of the row. Only a shared segment is part of several rows."""
        return torch.arange(len(self.lengths)).repeat(2, 1)

    def local_positions(self, cp_rank: int) -> Int[Tensor, " local_tokens"]:
        """Return the pack positions of the tokens on context-parallel rank `cp_rank`, in the rank's order, [T / CP]."""
        if self.cp_size == 1:
            return torch.arange(self.total)
        lengths = torch.tensor(self.segment_lengths, dtype=torch.long)[self._segment_of]
        chunk = self.offsets * (2 * self.cp_size) // lengths
        owner = torch.minimum(chunk, 2 * self.cp_size - 1 - chunk)
        return torch.nonzero(owner == cp_rank).flatten()

    @cached_property
    def gather_order(self) -> Int[Tensor, " tokens"]:
        """Index [T] that sorts the tokens of all context-parallel ranks into pack order.

        Concatenate the ranks' local tokens in rank order, and select with this index.
        """
        return torch.argsort(torch.cat([self.local_positions(r) for r in range(self.cp_size)]))

    @cached_property
    def predictor(self) -> Int[Tensor, " tokens"]:
        """For each token, the pack position whose hidden state predicts it, [T]; −1 for first tokens and padding."""
        return torch.where(self.is_token & (self.offsets > 0), torch.arange(self.total) - 1, -1)

    def token_table(self, width: int) -> tuple[Int[Tensor, "rows seq"], Bool[Tensor, "rows seq"]]:
        """Return [N, width] pack positions of the tokens of all rows, and a mask of the tokens that exist.

        Entry (row, column) is the position of the row's token number `column`; 0 if the row has fewer tokens.
        """
        column = torch.arange(width)
        valid = column[None] < torch.tensor(self.lengths, dtype=torch.long)[:, None]
        return torch.where(valid, self.starts[:, None] + column[None], 0), valid

    def visible_keys(self, cp_rank: int) -> tuple[tuple[int, ...], tuple[int, ...], Int[Tensor, " keys"]]:
        """Return which keys the queries of context-parallel rank `cp_rank` attend to; computed once for all layers.

        Returns:
            Three values: for each chunk of this rank, the number of its queries; for each chunk, the number of keys
            that it attends to; and the pack positions of these keys, chunk after chunk. The last keys of a chunk are
            those of its own tokens.
        """
        made: dict[int, Any] = self.__dict__.setdefault("_visible", {})
        if cp_rank not in made:
            made[cp_rank] = self._visible_keys(cp_rank)
        found: tuple[tuple[int, ...], tuple[int, ...], Tensor] = made[cp_rank]
        return found

    def _visible_keys(self, cp_rank: int) -> tuple[tuple[int, ...], tuple[int, ...], Tensor]:
        chunks = 2 * self.cp_size if self.cp_size > 1 else 1
        queries, keys, index = [], [], []
        for segment, (start, length) in enumerate(
            zip(self.cu_seqlens_padded.tolist(), self.segment_lengths, strict=False)
        ):
            before = self._tokens_before(segment)
            for seen in (cp_rank + 1, chunks - cp_rank) if self.cp_size > 1 else (1,):
                own = seen * (length // chunks)
                queries.append(length // chunks)
                keys.append(len(before) + own)
                index += [before, torch.arange(start, start + own)]
        return tuple(queries), tuple(keys), torch.cat(index)

    def _tokens_before(self, segment: int) -> Tensor:
        """Return the pack positions of the prefix before `segment`; none in a pack without shared prefixes."""
        return torch.zeros(0, dtype=torch.long)

    def pack_rows(self, rows: Shaped[Tensor, "rows seq"], fill: float | int = 0) -> Shaped[Tensor, " tokens"]:
        """Convert right-padded rows [N, S] to a pack [T]. The padding of the pack gets the value `fill`."""
        row, column = self._row_and_column
        columns = column.clamp(max=rows.shape[1] - 1)
        values = rows[platform.sent(row, rows.device), platform.sent(columns, rows.device)]
        return torch.where(platform.sent(self.is_token, rows.device), values, torch.as_tensor(fill, dtype=rows.dtype))

    @cached_property
    def _row_and_column(self) -> tuple[Tensor, Tensor]:
        return self._segment_of.clamp(max=max(self.num_sequences - 1, 0)), self.offsets

    @cached_property
    def is_token(self) -> Bool[Tensor, " tokens"]:
        """Whether each pack position holds a real token, [T]."""
        lengths = torch.tensor((*self.lengths, 0), dtype=torch.long)
        return self.offsets < lengths[self._segment_of]

    @cached_property
    def has_target(self) -> Bool[Tensor, " tokens"]:
        """Whether each pack position predicts a real token of the same sequence, [T]."""
        lengths = torch.tensor((*self.lengths, 0), dtype=torch.long)
        return self.offsets + 1 < lengths[self._segment_of]

    def next_of(self, packed: Shaped[Tensor, " tokens"]) -> Shaped[Tensor, " tokens"]:
        """Return `packed` [T] shifted left by one inside each sequence.

        Entry p of the result is the value of the token that position p predicts. If position p predicts no token (see
        `has_target`), entry p is `packed[0]`.
        """
        index = torch.where(self.has_target, torch.arange(self.total) + 1, 0)
        return packed[platform.sent(index, packed.device)]

    def next_token_index(self, width: int) -> tuple[Int[Tensor, "rows predicted"], Bool[Tensor, "rows predicted"]]:
        """Return the pack positions that predict tokens 1 … width − 1 of each row.

        Returns:
            index [N, width − 1]: pack position that predicts token `column + 1` of the row; 0 if there is no token.
            valid [N, width − 1]: True where the row has this token.
        """
        column = torch.arange(max(width - 1, 0))
        valid = column[None] + 1 < torch.tensor(self.lengths, dtype=torch.long)[:, None]
        return torch.where(valid, self.starts[:, None] + column[None], 0), valid

    def unpack_next_token(
        self, packed: Shaped[Tensor, " tokens"], width: int, fill: float | int = 0.0
    ) -> Shaped[Tensor, "rows predicted"]:
        """Convert next-token values `packed` [T] to rows [N, width − 1].

        Entry p of `packed` scores the token after position p. Entries without a token get the value `fill`.
        """
        index, valid = self.next_token_index(width)
        rows = packed[platform.sent(index, packed.device)]
        return torch.where(platform.sent(valid, packed.device), rows, torch.as_tensor(fill, dtype=packed.dtype))


def _exclusive_cumsum(lengths: Sequence[int]) -> Tensor:
    values = torch.tensor(lengths, dtype=torch.long)
    return values.cumsum(0) - values


@dataclass(frozen=True)
class PrefixTree:
    """Trees of segments of tokens. Each path from a root is a row; rows share the segments of equal prefixes.

    lengths: number of tokens in each segment, depth first: a segment is followed by all its descendants.
    parents: for each segment, the index of the segment before it on the path; −1 for a root.
    ends: for each row, the index of the last segment on its path.
    """

    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    ends: tuple[int, ...]

    @classmethod
    def forest(cls, trees: Sequence[PrefixTree]) -> PrefixTree:
        """Return one object with the segments and rows of all `trees`, one tree after the other."""
        lengths: list[int] = []
        parents: list[int] = []
        ends: list[int] = []
        for tree in trees:
            parents += [parent + len(lengths) if parent >= 0 else -1 for parent in tree.parents]
            ends += [end + len(lengths) for end in tree.ends]
            lengths += tree.lengths
        return cls(tuple(lengths), tuple(parents), tuple(ends))

    def padded_size(self, multiple: int) -> int:
        """Return the number of tokens in a pack whose segments are padded to multiples of `multiple`."""
        return sum(round_up(n, multiple) for n in self.lengths)

    @cached_property
    def before(self) -> tuple[int, ...]:
        """For each segment, the number of tokens that precede it on the path from the root."""
        counts: list[int] = []
        for parent in self.parents:
            counts.append(counts[parent] + self.lengths[parent] if parent >= 0 else 0)
        return tuple(counts)

    def path(self, segment: int) -> list[int]:
        """Return the segments from the root to `segment`."""
        chain = [segment]
        while (segment := self.parents[segment]) >= 0:
            chain.append(segment)
        return chain[::-1]


@dataclass(frozen=True)
class PrefixLayout(PackLayout):
    """Layout of a pack with shared prefixes. Its segments and its N rows are those of `tree`, in the tree's order.

    The pack contains each shared prefix only once.
    """

    tree: PrefixTree = PrefixTree((), (), ())

    @classmethod
    def of(cls, tree: PrefixTree, cp_size: int, multiple: int, total: int | None = None) -> PrefixLayout:
        """Return the layout of `tree`; pad segments to multiples of `multiple`, and the pack to `total` if given."""
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
        """For each token, a row that contains the token, and the token's column.

        If several rows share the token, the row is any of these rows.
        """
        row_of = torch.zeros(len(self.segment_lengths), dtype=torch.long)
        for row, end in enumerate(self.tree.ends):
            row_of[self.tree.path(end)] = row
        return row_of[self._segment_of], self.position_ids

    @cached_property
    def passages(self) -> Int[Tensor, "2 passages"]:
        pairs = [(row, segment) for row, end in enumerate(self.tree.ends) for segment in self.tree.path(end)]
        return torch.tensor(pairs, dtype=torch.long).view(-1, 2).T.contiguous()

    @cached_property
    def predictor(self) -> Int[Tensor, " tokens"]:
        before = torch.where(self.is_token, torch.arange(self.total) - 1, -1)
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
        """Return the pack positions of the tokens of `segments`, without padding, segment after segment."""
        ranges = [torch.arange(self.lengths[s]) + self.starts[s] for s in segments]
        return torch.cat(ranges) if ranges else torch.zeros(0, dtype=torch.long)


def slice_context_parallel(
    packed: Shaped[Tensor, tokens * rest], layout: PackLayout, cp_rank: int
) -> Shaped[Tensor, local_tokens * rest]:
    """Return rank `cp_rank`'s zigzag share [T / CP, …] of `packed` [T, …]; `packed` is in pack order."""
    if layout.cp_size == 1:
        return packed
    return packed[platform.sent(layout.local_positions(cp_rank), packed.device)]


def gather_context_parallel(
    local: Shaped[Tensor, local_tokens * rest], layout: PackLayout, group: ProcessGroup | None
) -> Shaped[Tensor, tokens * rest]:
    """Gather the zigzag shares [T / CP, …] of all ranks; every rank gets [T, …] in pack order.

    The forward pass is an all-gather. The backward pass is a reduce-scatter: every rank computes with a copy of each
    row, so the row's gradients are summed over all ranks. If all ranks compute the same loss from the gathered rows,
    and gradients of parameters are then summed over the ranks, the loss counts CP times: the caller must divide it by
    CP, once. Every public function with a `context_parallel_group` follows this rule.
    """
    if group_size(group) == 1:
        return local
    gathered = all_gather_forward_reduce_scatter_backward(local, group)
    return gathered[platform.sent(layout.gather_order, local.device)]


@dataclass(frozen=True)
class LossPositions:
    """The n positions on one context-parallel rank whose predicted tokens the loss counts (mask 1).

    A rank without such positions has one dummy position, so that all ranks call the same collectives. All tensors are
    on the host until `on` moves them.

    layout: layout of the pack.
    index, counted: [N, S − 1]; the pack position of each row's tokens 1 … S − 1, and whether the loss counts the token.
    tokens: [n], pack positions of the counted tokens that this rank predicts.
    predictors: [n]; `tokens[i]` is predicted by this rank's hidden state number `predictors[i]`.
    is_dummy: whether the only position is a dummy.
    """

    layout: PackLayout
    index: Int[Tensor, "rows predicted"]
    counted: Bool[Tensor, "rows predicted"]
    tokens: Int[Tensor, " n"]
    predictors: Int[Tensor, " n"]
    is_dummy: bool

    @classmethod
    def of(cls, layout: PackLayout, mask: Float[Tensor, "rows predicted"], cp_rank: int) -> LossPositions:
        """Return the positions of rank `cp_rank` that predict a token where `mask` [N, S − 1] is positive."""
        index, there = layout.token_table(mask.shape[1] + 1)
        index, counted = index[:, 1:], there[:, 1:] & (mask > 0)
        wanted = torch.zeros(layout.total, dtype=torch.bool)  # the pack positions of predicted tokens
        wanted[index[counted]] = True
        held = layout.local_positions(cp_rank)
        place = torch.full((layout.total + 1,), -1)  # local index of each pack position; the last entry is for "none"
        place[held] = torch.arange(len(held))
        tokens = (wanted & (place[layout.predictor] >= 0)).nonzero().flatten()
        is_dummy = not len(tokens)
        tokens = torch.zeros(1, dtype=torch.long) if is_dummy else tokens
        return cls(layout, index, counted, tokens, place[layout.predictor[tokens]].clamp(min=0), is_dummy)

    def on(self, device: torch.device, *others: Tensor) -> tuple[LossPositions, list[Tensor]]:
        """Copy this object's tensors and `others` to `device`; return the new object and the copies of `others`.

        All tensors are copied together.
        """
        own = self.index, self.counted, self.tokens, self.predictors
        index, counted, tokens, predictors, *there = platform.sent_together((*own, *others), device)
        return replace(self, index=index, counted=counted, tokens=tokens, predictors=predictors), there

    def pick(self, hidden: Float[Tensor, "local_tokens hidden"]) -> Float[Tensor, "n hidden"]:
        """Return the hidden states that predict the counted tokens; one row of zeros if this rank predicts none."""
        picked = hidden[self.predictors]
        return picked.masked_fill(torch.ones_like(picked, dtype=torch.bool), 0) if self.is_dummy else picked

    def targets(self, input_ids: Int[Tensor, "rows seq"]) -> Int[Tensor, " n"]:
        """Return the ids of the predicted tokens. Call it while all tensors are on the host."""
        return self.layout.pack_rows(input_ids)[self.tokens]

    def inputs(self) -> Int[Tensor, " n"]:
        """For each predicted token, return the index of the token that predicts it, in the flattened rows [N·S].

        Call it while all tensors are on the host.
        """
        return self._in_rows(self.layout.predictor[self.tokens].clamp(min=0))

    def outputs(self) -> Int[Tensor, " n"]:
        """Return the index of each predicted token in the flattened rows [N·S].

        If several rows share a token, the index is that of a row for which the loss counts the token. Call it while
        all tensors are on the host.
        """
        return self._in_rows(self.tokens)

    def _in_rows(self, positions: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
        # On the host, because a mask on the device would make the host wait.
        index, there = self.layout.token_table(self.index.shape[1] + 1)
        place = torch.zeros(self.layout.total, dtype=torch.long)  # index of each pack position in the rows
        counted = F.pad(self.counted, (1, 0))
        for rows in (there, counted):
            place[index[rows]] = rows.flatten().nonzero().flatten()
        return place[positions]

    def spread(
        self, values: Float[Tensor, n * rest], context_parallel_group: ProcessGroup | None
    ) -> Float[Tensor, rows * predicted_and_rest]:
        """Convert values [n, …] of this rank's positions to [N, S − 1, …] with the values of all ranks' positions.

        Tokens that the loss does not count get 0. The forward and the backward pass each do an all-reduce over the
        context-parallel ranks (see `gather_context_parallel` for the consequence for the loss).
        """
        values = values * 0 if self.is_dummy else values
        packed = values.new_zeros(self.layout.total, *values.shape[1:])
        packed = packed.index_copy(0, self.tokens, values)
        packed = all_reduce_forward_all_reduce_backward(packed, context_parallel_group)
        counted = self.counted.view(*self.counted.shape, *(1,) * (values.ndim - 1))
        return torch.where(counted, packed[self.index], 0)
