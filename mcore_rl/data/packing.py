"""The schedule of a step's microbatches: a pure function of lengths and layout, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mcore_rl.config import TrainingConfig
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.distributed.bin_packing import assign, pack, split_until_divisible
from mcore_rl.distributed.pack_layout import PackLayout, round_up


@dataclass(frozen=True)
class Microbatch:
    """Rows that go through the model together.

    rows: indices into the global batch.
    data: those rows, cut to the longest of them; whole sequences.
    layout: where they are in the pack.
    packed: False where all rows are padded to one length.
    counts: False for a filler that only keeps the data-parallel ranks in step; its samples are masked.
    """

    rows: list[int]
    data: BatchedDataDict[Any]
    layout: PackLayout
    packed: bool = True
    counts: bool = True


@dataclass(frozen=True)
class Batching:
    """How global batches are cut.

    Args:
        packing: pack sequences, or pad them to one length.
        tokens_per_pack: capacity of a pack in padded tokens.
        micro_batch_size: units per microbatch without packing.
        rows_per_unit: rows that stay together: 2 for pairs.
        dp_size, cp_size: sizes of data and context parallelism.
        multiple: what each sequence is padded to (`ParallelConfig.sequence_multiple`).
        one_width: pad all microbatches of a step to the same number of tokens (pipeline stages then
            know what to expect without asking).
        attention_length: tokens of a sequence at which attention costs as much as all else.
        count_multiple: every rank's number of microbatches is a multiple of this.
    """

    packing: bool
    tokens_per_pack: int
    micro_batch_size: int
    rows_per_unit: int
    dp_size: int = 1
    cp_size: int = 1
    multiple: int = 1
    one_width: bool = False
    attention_length: float = math.inf
    count_multiple: int = 1

    def plan(self, lengths: Sequence[int]) -> list[list[list[int]]]:
        """[data-parallel rank][microbatch] → rows; an empty microbatch is a filler.

        Every rank gets the same number of microbatches, and ranks get even shares of the work, which grows with a
        sequence's length and with its square.

        Raises:
            ValueError: rows that do not make whole units, or a unit longer than a pack.
        """
        if len(lengths) % self.rows_per_unit:
            raise ValueError(f"{len(lengths)} rows do not make whole units of {self.rows_per_unit} rows")
        padded = [round_up(n, self.multiple) for n in lengths]
        starts = range(0, len(lengths), self.rows_per_unit)
        units = [list(range(start, start + self.rows_per_unit)) for start in starts]
        size = [sum(padded[row] for row in unit) for unit in units]
        cost = [sum(padded[row] * (1 + padded[row] / self.attention_length) for row in unit) for unit in units]
        if self.packing:
            shards = pack(size, cost, self.tokens_per_pack, self.dp_size, self.count_multiple)
        else:
            bins = self._in_order(len(units))
            split_until_divisible(bins, cost, self.dp_size * self.count_multiple)
            shards = assign(bins, cost, self.dp_size)
        return [[sorted(row for unit in box for row in units[unit]) for box in boxes] for boxes in shards]

    def _in_order(self, count: int) -> list[list[int]]:
        return [list(range(i, min(i + self.micro_batch_size, count))) for i in range(0, count, self.micro_batch_size)]

    def microbatches(self, data: BatchedDataDict[Any], dp_rank: int) -> list[Microbatch]:
        """This data-parallel rank's microbatches of a global batch with `input_lengths`."""
        lengths = data["input_lengths"].tolist()
        plan = self.plan(lengths)
        width = max(self._width([lengths[r] for r in rows]) for shard in plan for rows in shard)
        common = width if self.one_width else None
        return [self._microbatch(data, rows, lengths, common) for rows in plan[dp_rank]]

    def _microbatch(
        self, data: BatchedDataDict[Any], rows: list[int], lengths: list[int], common: int | None
    ) -> Microbatch:
        filler = not rows
        rows = rows or list(range(self.rows_per_unit))
        own = [lengths[row] for row in rows]
        selected = _cut(data.select_indices(rows), max(own), data["input_ids"].shape[1])
        if filler:
            selected["sample_mask"] = torch.zeros_like(selected["sample_mask"])
        if self.packing:
            layout = PackLayout.pack(own, self.cp_size, self.multiple, common)
        else:
            width = round_up(max(own), self.multiple)
            layout = PackLayout(tuple(own), (width,) * len(own), common or width * len(own), self.cp_size)
        return Microbatch(rows, selected, layout, self.packing, counts=not filler)

    def _width(self, lengths: list[int]) -> int:
        """Tokens that a microbatch of these rows takes; a filler is no wider than what it stands beside."""
        padded = [round_up(n, self.multiple) for n in lengths]
        return sum(padded) if self.packing else max(padded, default=0) * len(padded)


def _cut(data: BatchedDataDict[Any], width: int, full_width: int) -> BatchedDataDict[Any]:
    """The first `width` columns of every [B, S, …] entry."""
    for key, value in data.items():
        if isinstance(value, torch.Tensor) and value.ndim >= 2 and value.shape[1] == full_width:
            data[key] = value[:, :width]
    return data


def batching_of(config: TrainingConfig, rows_per_unit: int, dp_size: int) -> Batching:
    """How a configuration cuts its batches.

    Raises:
        UserError: a pack that cannot hold the longest record.
    """
    parallel = config.parallel
    return Batching(
        packing=config.batch.packing,
        tokens_per_pack=config.pack_width(rows_per_unit),
        micro_batch_size=config.batch.micro_batch_size,
        rows_per_unit=rows_per_unit,
        dp_size=dp_size,
        cp_size=parallel.context_parallel_size,
        multiple=parallel.sequence_multiple,
        one_width=parallel.pipeline_model_parallel_size > 1,
        count_multiple=parallel.microbatch_multiple,
    )
