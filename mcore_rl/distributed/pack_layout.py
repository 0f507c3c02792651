"""The position of every token in a pack. Packing, labels, log-probabilities and losses all index through it.

A pack is one row of T tokens holding N sequences, each right-padded to a multiple that the parallel
layout asks for; what is left at the end is a segment of its own, never a longer last sequence. An
unpacked microbatch is the special case of N sequences padded to one common length.

Under context parallelism each segment is cut into 2·CP chunks and rank r holds chunks r and
2·CP − 1 − r (zigzag), in this order, segment after segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from mcore_rl import platform


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `n`."""
    return -(-n // multiple) * multiple


@dataclass(frozen=True)
class PackLayout:
    """Lengths of a pack and the index tensors that follow from them (all on the CPU, int64).

    Args:
        lengths: true lengths of the N sequences, in tokens.
        padded_lengths: their lengths in the pack; multiples of 2·cp_size when cp_size > 1.
        total: T, the width of the pack; at least the sum of `padded_lengths`.
        cp_size: number of context-parallel ranks.
    """

    lengths: tuple[int, ...]
    padded_lengths: tuple[int, ...]
    total: int
    cp_size: int = 1

    def __post_init__(self) -> None:
        if len(self.lengths) != len(self.padded_lengths):
            raise ValueError(f"{len(self.lengths)} lengths but {len(self.padded_lengths)} padded lengths")
        for true, padded in zip(self.lengths, self.padded_lengths, strict=True):
            if not 0 <= true <= padded:
                raise ValueError(f"sequence of {true} tokens does not fit its padded length {padded}")
        multiple = 2 * self.cp_size if self.cp_size > 1 else 1
        if any(n % multiple for n in self.segment_lengths):
            raise ValueError(
                f"padded lengths {self.segment_lengths} must be multiples of {multiple} "
                f"for context_parallel_size={self.cp_size}"
            )

    @classmethod
    def pack(cls, lengths: Sequence[int], cp_size: int = 1, multiple: int = 1, total: int | None = None) -> PackLayout:
        """Sequences behind one another, each padded to `multiple`; the pack to `total` if given."""
        padded = tuple(round_up(n, multiple) for n in lengths)
        return cls(tuple(lengths), padded, sum(padded) if total is None else total, cp_size)

    @classmethod
    def rows(cls, lengths: Sequence[int], width: int, cp_size: int = 1) -> PackLayout:
        """Unpacked rows [N, width], seen as one pack of N·width tokens."""
        return cls(tuple(lengths), (width,) * len(lengths), width * len(lengths), cp_size)

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_seqlens: Int[Tensor, " boundaries"],
        cu_seqlens_padded: Int[Tensor, " boundaries"] | None,
        total: int,
        cp_size: int = 1,
    ) -> PackLayout:
        """From cumulative lengths [N + 1]; copies them to the host once.

        `cu_seqlens` may equal `cu_seqlens_padded`, and its last entry may include the pack's tail.
        """
        true = cu_seqlens.diff().tolist()
        padded = true if cu_seqlens_padded is None else cu_seqlens_padded.diff().tolist()
        return cls(tuple(min(t, p) for t, p in zip(true, padded, strict=True)), tuple(padded), total, cp_size)

    @cached_property
    def segment_lengths(self) -> tuple[int, ...]:
        """Lengths of all segments: the padded sequences and, if there is one, the tail."""
        tail = self.total - sum(self.padded_lengths)
        if tail < 0:
            raise ValueError(f"{sum(self.padded_lengths)} padded tokens do not fit a pack of {self.total}")
        return self.padded_lengths + ((tail,) if tail else ())

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @property
    def row_lengths(self) -> tuple[int, ...]:
        """True lengths of the rows, whole."""
        return self.lengths

    @cached_property
    def starts(self) -> Int[Tensor, " rows"]:
        """First pack position of each sequence, [N]."""
        return _exclusive_cumsum(self.padded_lengths)

    @cached_property
    def cu_seqlens(self) -> Int[Tensor, " boundaries"]:
        """Cumulative true lengths, int32 [N + 1]."""
        return torch.tensor((0, *self.lengths)).cumsum(0).int()

    @cached_property
    def cu_seqlens_padded(self) -> Int[Tensor, " boundaries"]:
        """Cumulative lengths of all segments, the tail included, int32; the last is T."""
        return torch.tensor((0, *self.segment_lengths)).cumsum(0).int()

    @cached_property
    def _segment_of(self) -> Tensor:
        lengths = torch.tensor(self.segment_lengths, dtype=torch.long)
        return torch.repeat_interleave(torch.arange(len(lengths)), lengths)

    @cached_property
    def offsets(self) -> Int[Tensor, " tokens"]:
        """Place of each token in its own segment, [T]."""
        return torch.arange(self.total) - _exclusive_cumsum(self.segment_lengths)[self._segment_of]

    @property
    def position_ids(self) -> Int[Tensor, " tokens"]:
        """Position of each token in its row, [T]."""
        return self.offsets

    def local_positions(self, cp_rank: int) -> Int[Tensor, " local_tokens"]:
        """Pack positions that context-parallel rank `cp_rank` holds, in its order, [T / CP]."""
        if self.cp_size == 1:
            return torch.arange(self.total)
        lengths = torch.tensor(self.segment_lengths, dtype=torch.long)[self._segment_of]
        chunk = self.offsets * (2 * self.cp_size) // lengths
        owner = torch.minimum(chunk, 2 * self.cp_size - 1 - chunk)
        return torch.nonzero(owner == cp_rank).flatten()

    @cached_property
    def gather_order(self) -> Int[Tensor, " tokens"]:
        """Index [T] that puts the ranks' concatenated local tokens back in pack order."""
        return torch.argsort(torch.cat([self.local_positions(r) for r in range(self.cp_size)]))

    @cached_property
    def predictor(self) -> Int[Tensor, " tokens"]:
        """Pack position whose hidden state predicts the token here; −1 for first tokens and padding, [T]."""
        return torch.where(self._is_token & (self.offsets > 0), torch.arange(self.total) - 1, -1)

    def token_table(self, width: int) -> tuple[Int[Tensor, "rows seq"], Bool[Tensor, "rows seq"]]:
        """Pack position of token (row, column), 0 where there is none; and where there is one."""
        column = torch.arange(width)
        valid = column[None] < torch.tensor(self.lengths, dtype=torch.long)[:, None]
        return torch.where(valid, self.starts[:, None] + column[None], 0), valid

    def visible_keys(self, cp_rank: int) -> tuple[tuple[int, ...], tuple[int, ...], Int[Tensor, " keys"]]:
        """Return the keys that the queries of context-parallel rank `cp_rank` see, once for all layers.

        Returns:
            lengths of its chunks of queries, in its order; of the keys that each may see, whose last ones are as
            many as the queries and theirs; the pack positions of all these keys, one chunk after the other.
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
        """Pack positions of the tokens that a segment continues."""
        return torch.zeros(0, dtype=torch.long)

    def pack_rows(self, rows: Shaped[Tensor, "rows seq"], fill: float | int = 0) -> Shaped[Tensor, " tokens"]:
        """[N, S] right-padded rows → [T]; `fill` where the pack holds padding."""
        row, column = self._row_and_column
        columns = column.clamp(max=rows.shape[1] - 1)
        values = rows[platform.sent(row, rows.device), platform.sent(columns, rows.device)]
        return torch.where(platform.sent(self._is_token, rows.device), values, torch.as_tensor(fill, dtype=rows.dtype))

    @cached_property
    def _row_and_column(self) -> tuple[Tensor, Tensor]:
        return self._segment_of.clamp(max=max(self.num_sequences - 1, 0)), self.offsets

    @cached_property
    def _is_token(self) -> Tensor:
        """True where the pack holds a real token, [T]."""
        lengths = torch.tensor((*self.lengths, 0), dtype=torch.long)
        return self.offsets < lengths[self._segment_of]

    @cached_property
    def has_target(self) -> Bool[Tensor, " tokens"]:
        """True at pack positions that predict a real token of their own sequence, [T]."""
        lengths = torch.tensor((*self.lengths, 0), dtype=torch.long)
        return self.offsets + 1 < lengths[self._segment_of]

    def next_of(self, packed: Shaped[Tensor, " tokens"]) -> Shaped[Tensor, " tokens"]:
        """`packed` [T] shifted left inside each sequence: entry p belongs to the token that p predicts.

        Positions without a target hold the value of position 0; see `has_target`.
        """
        index = torch.where(self.has_target, torch.arange(self.total) + 1, 0)
        return packed[platform.sent(index, packed.device)]

    def next_token_index(self, width: int) -> tuple[Int[Tensor, "rows predicted"], Bool[Tensor, "rows predicted"]]:
        """Return the positions of the predictions of each row's tokens 1 … width − 1.

        Returns:
            index [N, width − 1]: pack position that predicts token (row, column + 1), 0 if there is none.
            valid [N, width − 1]: True where the row has that token.
        """
        column = torch.arange(max(width - 1, 0))
        valid = column[None] + 1 < torch.tensor(self.lengths, dtype=torch.long)[:, None]
        return torch.where(valid, self.starts[:, None] + column[None], 0), valid

    def unpack_next_token(
        self, packed: Shaped[Tensor, " tokens"], width: int, fill: float | int = 0.0
    ) -> Shaped[Tensor, "rows predicted"]:
        """Per-position values [T] (entry p scores the token after p) → [N, width − 1] rows."""
        index, valid = self.next_token_index(width)
        rows = packed[platform.sent(index, packed.device)]
        return torch.where(platform.sent(valid, packed.device), rows, torch.as_tensor(fill, dtype=packed.dtype))


def _exclusive_cumsum(lengths: Sequence[int]) -> Tensor:
    values = torch.tensor(lengths, dtype=torch.long)
    return values.cumsum(0) - values
