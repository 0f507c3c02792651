"""Turn records into padded rows, distribute rows over replicas with equal work, and split them into microbatches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from mcore_rl import platform
from mcore_rl.config import TrainingConfig
from mcore_rl.data.token_store import SequenceGroup, TokenStore
from mcore_rl.distributed.batched_data_dict import BatchedDataDict, BatchShare, LocalBatch, batch_share
from mcore_rl.distributed.bin_packing import assign, pack, split_until_divisible
from mcore_rl.distributed.collectives import all_gather
from mcore_rl.distributed.packs import PackLayout, PrefixLayout, PrefixTree, round_up
from mcore_rl.distributed.topology import ParallelDimension


def collate(units: Sequence[SequenceGroup], pad_token_id: int) -> BatchedDataDict[Any]:
    """Return a batch with a right-padded row for each sequence of the records `units` (a pair has two sequences).

    The batch has `input_ids`, `token_mask` [B, S], `input_lengths`, `sample_mask` [B].
    """
    sequences = [sequence for unit in units for sequence in unit]
    rows = padded_rows([sequence.input_ids for sequence in sequences], pad_token_id)
    token_mask = torch.zeros(rows["input_ids"].shape)
    for row, sequence in enumerate(sequences):
        token_mask[row, : len(sequence)] = torch.tensor(sequence.token_mask, dtype=torch.float32)
    return BatchedDataDict(**rows, token_mask=token_mask, sample_mask=torch.ones(len(sequences)))


def padded_rows(sequences: Sequence[Sequence[int]], pad_token_id: int = 0) -> dict[str, Tensor]:
    """Pad `sequences` on the right; return them as `input_ids` [B, S], with `input_lengths` [B]. B may be 0."""
    input_ids = torch.full((len(sequences), max(map(len, sequences), default=1)), pad_token_id, dtype=torch.long)
    for row, sequence in enumerate(sequences):
        input_ids[row, : len(sequence)] = torch.tensor(sequence)
    return {"input_ids": input_ids, "input_lengths": torch.tensor([len(s) for s in sequences], dtype=torch.long)}


def global_valid_counts(data: BatchedDataDict[Any]) -> tuple[Tensor, Tensor]:
    """Return global_valid_seqs and global_valid_toks: the numbers of unmasked samples and tokens in a global batch.

    They are fp32 scalars. Rows count as their `sample_weights`, if there is such a column, and otherwise as 1.
    Collective if `data` is a `LocalBatch`.
    """
    sample_mask = data["sample_mask"].double()
    samples = sample_mask * data["sample_weights"].double() if "sample_weights" in data else sample_mask
    tokens = data["token_mask"][:, 1:].double() * sample_mask[:, None]
    sequences, total = torch.tensor(batch_share(data).sum(float(samples.sum()), float(tokens.sum())))
    return sequences, total


@dataclass(frozen=True, eq=False)
class Microbatch:
    """Rows that go through the model together. A microbatch is equal only to itself.

    rows: indices of the rows in the batch that was divided: the global batch, or a replica's `LocalBatch`.
    data: the data of these rows, cut to the length of the longest row.
    layout: positions of the rows' tokens in the pack.
    packed: whether the rows are packed; otherwise, all rows are padded to one length.
    counts: False for a filler. Fillers give all data-parallel ranks the same number of microbatches; their samples are
        masked.
    """

    rows: list[int]
    data: BatchedDataDict[Any]
    layout: PackLayout
    packed: bool = True
    counts: bool = True


@dataclass(frozen=True)
class MicrobatchPlanner:
    """Divides global batches into microbatches.

    Args:
        packing: pack sequences instead of padding them to one length.
        tokens_per_pack: capacity of a pack, in padded tokens.
        micro_batch_size: number of units in a microbatch without packing.
        rows_per_unit: number of rows that stay together in a microbatch: 2 for pairs.
        dp_size, cp_size: sizes of data and context parallelism.
        multiple: each sequence is padded to a multiple of this length (`ParallelConfig.sequence_multiple`).
        one_width: pad all microbatches of a step to the same number of tokens, so that pipeline stages need not
            exchange shapes.
        attention_length: sequence length at which attention costs as much as all other operations.
        count_multiple: the number of microbatches on every rank is a multiple of this.
        rows_per_group: number of neighbouring rows that may have a common prefix. A pack contains a shared
            prefix once. 0: prefixes are never shared.
        min_shared: minimum number of tokens in a shared prefix.
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
    rows_per_group: int = 0
    min_shared: int = 32

    def plan(self, lengths: Sequence[int], input_ids: torch.Tensor | None = None) -> list[list[list[int]]]:
        """Return the row numbers of each microbatch of each data-parallel rank, as plan[rank][microbatch].

        Every rank gets the same number of microbatches; an empty microbatch is a filler. Every rank gets an even share
        of the work. The work for a sequence is the sum of two terms: one is proportional to its length, the other to
        its length squared.

        Args:
            lengths: number of tokens of each row.
            input_ids: [B, S] tokens, needed to find shared prefixes (`rows_per_group`).

        Raises:
            ValueError: the rows do not make whole units, or a unit is longer than a pack.
        """
        units = self.unit_sizes(lengths, input_ids, range(len(lengths)))
        shards = self._shards(units)
        return [[[row for unit in sorted(box) for row in units[unit].rows] for box in boxes] for boxes in shards]

    def _units(
        self, lengths: Sequence[int], input_ids: torch.Tensor | None, indices: Sequence[int] | None = None
    ) -> list[PackUnit]:
        """Divide rows into units; the rows of a unit stay in one pack.

        A unit is a pair or a single row. With shared prefixes, it consists of as many rows of a group as fit a pack.

        Args:
            indices: index of each row in the global batch. It determines the row's group.
        """
        step = self._whole_units(lengths)
        if not self.rows_per_group or input_ids is None:
            starts = range(0, len(lengths), step)
            return [self._apart(list(range(start, start + step)), lengths) for start in starts]
        indices = range(len(lengths)) if indices is None else indices
        groups = groupby(range(len(lengths)), key=lambda row: indices[row] // self.rows_per_group)
        return [unit for _, rows in groups for unit in self._sharing(list(rows), lengths, input_ids)]

    def _whole_units(self, lengths: Sequence[int]) -> int:
        """Return `rows_per_unit`; raise ValueError if it does not divide the number of rows."""
        if len(lengths) % self.rows_per_unit:
            raise ValueError(f"{len(lengths)} rows cannot be divided into units of {self.rows_per_unit} rows")
        return self.rows_per_unit

    def _work(self, before: int, length: int) -> float:
        """Return the model's work for `length` tokens that follow `before` tokens of the same row.

        The unit is the work that one token causes outside of attention.
        """
        padded = round_up(length, self.multiple)
        return padded + padded * (2 * before + padded) / self.attention_length

    def _apart(self, rows: list[int], lengths: Sequence[int]) -> PackUnit:
        own = tuple(lengths[row] for row in rows)
        return PackUnit(rows, PrefixTree(own, (-1,) * len(own), tuple(range(len(own)))))

    def _sharing(self, rows: list[int], lengths: Sequence[int], input_ids: torch.Tensor) -> list[PackUnit]:
        """Return one unit with all `rows` if it fits a pack; otherwise, treat each half of the rows in the same way."""
        # Segments are padded separately, so sharing must save more tokens than the additional padding.
        min_shared = max(self.min_shared, self.multiple + 1)
        tree = PrefixTree.of_rows(input_ids[rows], [lengths[row] for row in rows], min_shared)
        half = len(rows) // 2 // self.rows_per_unit * self.rows_per_unit
        if tree.padded_size(self.multiple) <= self.tokens_per_pack or not half:
            return [PackUnit(rows, tree)]
        return [u for part in (rows[:half], rows[half:]) for u in self._sharing(part, lengths, input_ids)]

    def _assign(self, units: Sequence[PackUnit]) -> list[list[list[PackUnit]]]:
        shards = self._shards([self._size(unit) for unit in units])
        return [[[units[index] for index in sorted(box)] for box in boxes] for boxes in shards]

    def _size(self, unit: PackUnit) -> PackUnitSize:
        tree = unit.tree
        work = sum(self._work(before, length) for before, length in zip(tree.before, tree.lengths, strict=True))
        return PackUnitSize(unit.rows, tree.padded_size(self.multiple), work)

    def _shards(self, units: Sequence[PackUnitSize]) -> list[list[list[int]]]:
        """Return the indices of the units in each microbatch of each data-parallel rank: shards[rank][microbatch]."""
        size, cost = [unit.tokens for unit in units], [unit.cost for unit in units]
        if self.packing:
            return pack(size, cost, self.tokens_per_pack, self.dp_size, self.count_multiple)
        bins = self._in_order(len(units))
        split_until_divisible(bins, cost, self.dp_size * self.count_multiple)
        return assign(bins, cost, self.dp_size)

    def _in_order(self, count: int) -> list[list[int]]:
        return [list(range(i, min(i + self.micro_batch_size, count))) for i in range(0, count, self.micro_batch_size)]

    def microbatches(self, data: BatchedDataDict[Any], dp_rank: int) -> list[Microbatch]:
        """Return the microbatches of data-parallel rank `dp_rank` for the global batch `data`.

        `data` must have `input_lengths`.

        If `data` is a `LocalBatch`, it has only this replica's rows, and all of them are divided into microbatches.
        With a `LocalBatch` the call is collective, because every rank must have the same number of microbatches.
        """
        if isinstance(data, LocalBatch):
            return self._own_microbatches(data)
        units = self._units(data["input_lengths"].tolist(), data["input_ids"])
        shards = self._assign(units)
        width = max(self._width(box) for boxes in shards for box in boxes)
        return self._microbatches(data, shards[dp_rank], units, width)

    def _own_microbatches(self, data: LocalBatch[Any]) -> list[Microbatch]:
        if self not in data.plans:
            boxes, units, width = self.plan_of_replica(data)
            count, width = data.share.most_packs(self, len(boxes), width)
            data.plans[self] = [*boxes, *[[]] * (count - len(boxes))], units, width
        boxes, units, width = data.plans[self]
        if units:
            return self._microbatches(data, boxes, units, width)
        blank = _blank(data, self.rows_per_unit)
        units = [self._apart(list(range(self.rows_per_unit)), [1] * self.rows_per_unit)]
        return self._microbatches(blank, boxes, units, width)

    def plan_of_replica(self, data: LocalBatch[Any]) -> tuple[list[list[PackUnit]], list[PackUnit], int]:
        """Plan this replica's packs, without regard to other replicas.

        Returns:
            The units of each pack, all units, and the width of the widest pack. A unit consists of rows that stay
            together.
        """
        units = self._units(data["input_lengths"].tolist(), data["input_ids"], data.share.indices)
        (boxes,) = replace(self, dp_size=1)._assign(units)
        return boxes, units, max(map(self._width, boxes), default=0)

    def _microbatches(
        self, data: BatchedDataDict[Any], boxes: Sequence[list[PackUnit]], units: Sequence[PackUnit], width: int
    ) -> list[Microbatch]:
        """Return a microbatch for each list of units in `boxes`.

        For an empty list, return a filler: a microbatch that contains the smallest unit, masked.

        Args:
            width: largest width of a microbatch on any rank.
        """
        common = width if self.one_width else None
        filler = [min(units, key=lambda unit: unit.tree.padded_size(self.multiple))]
        return [self._microbatch(data, box, filler, common) for box in boxes]

    def _microbatch(
        self, data: BatchedDataDict[Any], units: list[PackUnit], filler: list[PackUnit], common: int | None
    ) -> Microbatch:
        counts, units = bool(units), units or filler
        rows, tree = _rows(units), PrefixTree.forest([unit.tree for unit in units])
        # A tree lists its segments in the order in which rows branch, so a pack without shared prefixes may still
        # have another order than its rows.
        shared = any(parent >= 0 for parent in tree.parents) or tree.ends != tuple(range(len(rows)))
        longest = max(tree.before[end] + tree.lengths[end] for end in tree.ends)
        selected = _cut(data.select_indices(rows), longest, data["input_ids"].shape[1])
        if not counts:
            selected["sample_mask"] = torch.zeros(len(rows))
        layout: PackLayout
        if self.packing and shared:
            layout = PrefixLayout.of(tree, self.cp_size, self.multiple, common)
        elif self.packing:
            layout = PackLayout.pack(tree.lengths, self.cp_size, self.multiple, common)
        else:
            width = round_up(longest, self.multiple)
            layout = PackLayout(tree.lengths, (width,) * len(rows), common or width * len(rows), self.cp_size)
        own = tuple(selected["input_lengths"].tolist())
        assert layout.row_lengths == own, "the layout has the rows in another order than the data"
        return Microbatch(rows, selected, layout, self.packing, counts)

    def _width(self, units: list[PackUnit]) -> int:
        """Return the number of tokens, with padding, of a microbatch of these `units`; 0 without units."""
        if self.packing:
            return sum(unit.tree.padded_size(self.multiple) for unit in units)
        padded = [round_up(n, self.multiple) for unit in units for n in unit.tree.lengths]
        return max(padded, default=0) * len(padded)

    def unit_sizes(
        self, lengths: Sequence[int], input_ids: torch.Tensor | None, indices: Sequence[int]
    ) -> list[PackUnitSize]:
        """Divide b rows of a global batch into units, and return the units' sizes. Each unit stays in one pack.

        Args:
            lengths: [b] lengths of the rows.
            input_ids: [b, S] tokens of the rows; not read unless prefixes are shared.
            indices: [b] indices of the rows in the global batch.
        """
        if not self.rows_per_group or input_ids is None:
            return self._sizes_apart(lengths, indices)
        sizes = map(self._size, self._units(lengths, input_ids, indices))
        return [replace(size, rows=[indices[row] for row in size.rows]) for size in sizes]

    def _sizes_apart(self, lengths: Sequence[int], indices: Sequence[int]) -> list[PackUnitSize]:
        """Return the size of each unit if no prefixes are shared. This is fast, because no `PackUnit` is created."""
        step = self._whole_units(lengths)
        padded = [round_up(length, self.multiple) for length in lengths]
        work = [self._work(0, length) for length in lengths]
        starts = range(0, len(lengths), step)
        return [
            PackUnitSize(
                indices[first : first + step], sum(padded[first : first + step]), sum(work[first : first + step])
            )
            for first in starts
        ]

    def divide(self, units: Sequence[PackUnitSize]) -> list[list[int]]:
        """Return, for each data-parallel rank, the row numbers that `plan` gives to the rank, in ascending order.

        Args:
            units: size of each unit of the global batch.
        """
        shards = self._shards(units)
        return [sorted(row for box in boxes for unit in box for row in units[unit].rows) for boxes in shards]

    def relative_work(self, units: Sequence[PackUnitSize]) -> list[float]:
        """Return each data-parallel rank's work, divided by the mean over all ranks."""
        work = [sum(units[unit].cost for box in boxes for unit in box) for boxes in self._shards(units)]
        return [own * len(work) / sum(work) for own in work]

    def pieces(self, data: BatchedDataDict[Any]) -> tuple[list[int], list[int]]:
        """Divide a batch into the segments that the model computes: rows, or shared prefixes and continuations.

        Returns:
            Two lists with one entry per segment: the segment's number of tokens, and the number of tokens that precede
            the segment in its row.
        """
        if isinstance(data, LocalBatch) and self in data.plans:
            _, units, _ = data.plans[self]
        else:
            units = self._units(data["input_lengths"].tolist(), data["input_ids"], batch_share(data).indices)
        return [n for unit in units for n in unit.tree.lengths], [n for unit in units for n in unit.tree.before]


@dataclass(frozen=True)
class PackUnit:
    """Neighbouring rows of a global batch that go into one pack, and their shared prefixes."""

    rows: list[int]
    tree: PrefixTree


@dataclass(frozen=True)
class PackUnitSize:
    """The size of a `PackUnit`.

    rows: indices of the unit's rows in the global batch.
    tokens: number of padded tokens that the unit takes in a pack.
    cost: the model's work for these rows; 1 is the work that one token causes outside of attention.
    """

    rows: Sequence[int]
    tokens: int
    cost: float


def _blank(data: BatchedDataDict[Any], rows: int) -> BatchedDataDict[Any]:
    """Return a batch with the columns of `data` and with `rows` rows.

    `data` itself has no rows. Each new row has one token; its values in all columns are 0, except its length, 1.
    """
    blank: BatchedDataDict[Any] = BatchedDataDict()
    for name, value in data.items():
        if isinstance(value, torch.Tensor) and value.ndim:
            blank[name] = value.new_zeros(rows, *value.shape[1:])
        else:
            blank[name] = [None] * rows if isinstance(value, list) else value
    blank["input_lengths"] = torch.ones(rows, dtype=torch.long)
    return blank


def _rows(units: Sequence[PackUnit]) -> list[int]:
    return [row for unit in units for row in unit.rows]


def _cut(data: BatchedDataDict[Any], width: int, full_width: int) -> BatchedDataDict[Any]:
    """Cut every entry [B, S, …] of `data`, where S is `full_width`, to its first `width` columns, in place."""
    for key, value in data.items():
        if isinstance(value, torch.Tensor) and value.ndim >= 2 and value.shape[1] == full_width:
            data[key] = value[:, :width]
    return data


def microbatch_planner(config: TrainingConfig, rows_per_unit: int, dp_size: int) -> MicrobatchPlanner:
    """Return the microbatch planner of a configuration.

    Raises:
        UserError: a pack cannot hold the longest record.
    """
    parallel = config.parallel
    return MicrobatchPlanner(
        packing=config.batch.packing,
        tokens_per_pack=config.pack_width(rows_per_unit),
        micro_batch_size=config.batch.micro_batch_size,
        rows_per_unit=rows_per_unit,
        dp_size=dp_size,
        cp_size=parallel.context_parallel_size,
        multiple=parallel.sequence_multiple,
        one_width=parallel.pipeline_model_parallel_size > 1,
        count_multiple=parallel.microbatch_multiple,
        rows_per_group=config.rows_per_group if config.batch.share_prefixes else 0,
        min_shared=config.batch.min_shared_tokens,
    )


def divide(
    batching: MicrobatchPlanner,
    lengths: Sequence[int],
    tokens_of: Callable[[Sequence[int]], Tensor],
    replicas: ParallelDimension,
    known: Sequence[int] | None = None,
) -> list[list[int]]:
    """Divide a global batch among the replicas, with even work; return each replica's row numbers, ascending.

    Collective over the replicas. With shared prefixes, each replica divides a part of the rows into units: neighbouring
    rows that stay in one pack. Then the sizes of all units are gathered.

    Args:
        lengths: lengths of all rows.
        tokens_of: function of b row numbers; returns the tokens of these rows, [b, S], right-padded. Called only if
            prefixes are shared.
        known: numbers of the rows whose tokens this replica has; exactly one replica must have the tokens of each row.
            None: every replica has all tokens.
    """
    if not batching.rows_per_group:
        return batching.divide(batching.unit_sizes(lengths, torch.empty(0), range(len(lengths))))
    if known is None and (replicas.size == 1 or platform.simulates()):  # no other replica contributes sizes
        rows = range(len(lengths))
        return batching.divide(batching.unit_sizes(lengths, tokens_of(rows), rows))
    if known is None:
        size = batching.rows_per_group
        known = [row for row in range(len(lengths)) if row // size % replicas.size == replicas.rank]
    own = batching.unit_sizes([lengths[row] for row in known], tokens_of(known), known) if known else []
    return batching.divide(sorted(_all_gather_units(own, replicas), key=lambda unit: unit.rows[0]))


def assign_records(
    divide: Callable[[Sequence[int], Callable[[Sequence[int]], Tensor]], list[list[int]]],
    replicas: ParallelDimension,
    units: TokenStore,
    indices: Sequence[int],
) -> tuple[BatchShare, list[int]]:
    """Divide the rows of a batch of records among the replicas. Collective.

    Args:
        divide: a model's `divide` method.
        units: the store that contains the records.
        indices: indices of the batch's records in `units`.

    Returns:
        This replica's share of the rows, and the positions of its records in `indices`.
    """
    lengths = [units.lengths_of(index) for index in indices]
    size = len(lengths[0])

    def places_of(rows: Sequence[int]) -> list[int]:
        return list(dict.fromkeys(row // size for row in rows))

    def tokens_of(rows: Sequence[int]) -> Tensor:
        sequences = [sequence.input_ids for place in places_of(rows) for sequence in units[indices[place]]]
        return padded_rows(sequences)["input_ids"]

    rows = [length for unit in lengths for length in unit]
    share = BatchShare(divide(rows, tokens_of)[replicas.rank], len(rows), replicas)
    return share, places_of(share.indices)


def _all_gather_units(own: Sequence[PackUnitSize], replicas: ParallelDimension) -> list[PackUnitSize]:
    """Gather the sizes of the units of all replicas; `own` are the sizes of this replica's units.

    The rows of a unit must be neighbours in the global batch.
    """
    rows = [[unit.rows[0], len(unit.rows), unit.tokens, unit.cost] for unit in own]
    (most,) = BatchShare((), 0, replicas).max(len(rows))
    padded = torch.zeros(int(most), 4, dtype=torch.float64)
    padded[: len(rows)] = torch.tensor(rows, dtype=torch.float64).view(-1, 4)
    everyone = all_gather(padded.to(platform.device()), replicas.group).flatten(0, 1).tolist()
    return [
        PackUnitSize(range(int(first), int(first + count)), int(tokens), cost)
        for first, count, tokens, cost in everyone
        if count
    ]
