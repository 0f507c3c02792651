"""Turn records into padded rows, distribute rows over replicas with equal work, and split them into microbatches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mcore_rl import platform
from mcore_rl.config import TrainingConfig
from mcore_rl.data.choices import CHOICES
from mcore_rl.data.images import IMAGES
from mcore_rl.data.prefix_plan import PrefixForest, pieces_of, token_identities
from mcore_rl.data.token_store import SequenceGroup, TokenStore, images_column
from mcore_rl.distributed.batched_data_dict import BatchedDataDict, BatchShare, LocalBatch, batch_share
from mcore_rl.distributed.bin_packing import assign, pack, split_until_divisible
from mcore_rl.distributed.collectives import all_gather
from mcore_rl.distributed.packs import PackLayout, PrefixLayout, PrefixTree, round_up
from mcore_rl.distributed.topology import ParallelDimension


def collate(units: Sequence[SequenceGroup], pad_token_id: int) -> BatchedDataDict[Any]:
    """Return a batch with a right-padded row for each sequence of the records `units` (a pair has two sequences).

    The batch has `input_ids`, `token_mask` [B, S], `input_lengths`, `sample_mask` [B]; and the list `images`, if any
    row has images.
    """
    sequences = [sequence for unit in units for sequence in unit]
    rows = padded_rows([sequence.input_ids for sequence in sequences], pad_token_id)
    token_mask = torch.zeros(rows["input_ids"].shape)
    for row, sequence in enumerate(sequences):
        token_mask[row, : len(sequence)] = torch.tensor(sequence.token_mask, dtype=torch.float32)
    of_images = images_column([sequence.images for sequence in sequences])
    return BatchedDataDict(**rows, token_mask=token_mask, sample_mask=torch.ones(len(sequences)), **of_images)


def padded_rows(sequences: Sequence[Sequence[int] | np.ndarray[Any, Any]], pad_token_id: int = 0) -> dict[str, Tensor]:
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


WHOLE_BATCH = 1 << 62
"""`rows_per_group` if any rows of a batch may have common prefixes."""
CAPACITY_STEPS = 8
"""Number of capacities between a pack's and the longest row's that are tried for even work (`capacities`)."""


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

    def choices(self, name: str, own: Callable[[Tensor], Tensor]) -> Tensor | None:
        """Return the recorded choices of a rank's tokens, [t, layers, size]; −1 for padding. None if there are none.

        Args:
            name: one of `CHOICES`.
            own: function from a value for each token of the pack [T] to those of the rank's t tokens.
        """
        if name not in self.data:
            return None
        rows, width = self.data["input_ids"].shape
        place = own(self.layout.pack_rows(torch.arange(rows * width).view(rows, width), fill=-1))
        return torch.where((place < 0)[:, None, None], -1, self.data[name].flatten(0, 1)[place.clamp(min=0)])


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
        pack_multiple: each microbatch is padded to a multiple of this number of tokens
            (`TrainingConfig.pack_multiple`).
        one_width: pad all microbatches of a step to the same number of tokens, so that pipeline stages need not
            exchange shapes.
        attention_length: sequence length at which attention costs as much as all other operations.
        count_multiple: the number of microbatches on every rank is a multiple of this.
        rows_per_group: number of neighbouring rows that may have a common prefix, or `WHOLE_BATCH`. A pack contains a
            shared prefix once. 0: prefixes are never shared.
        min_shared: number of tokens that an additional segment must save, over all rows that continue it.
    """

    packing: bool
    tokens_per_pack: int
    micro_batch_size: int
    rows_per_unit: int
    dp_size: int = 1
    cp_size: int = 1
    multiple: int = 1
    pack_multiple: int = 1
    one_width: bool = False
    attention_length: float = math.inf
    count_multiple: int = 1
    rows_per_group: int = 0
    min_shared: int = 32

    def plan(self, lengths: Sequence[int], identities: Tensor | None = None) -> list[list[list[int]]]:
        """Return the row numbers of each microbatch of each data-parallel rank, as plan[rank][microbatch].

        Every rank gets the same number of microbatches; an empty microbatch is a filler. Every rank gets an even share
        of the work. The work for a sequence is the sum of two terms: one is proportional to its length, the other to
        its length squared.

        Args:
            lengths: number of tokens of each row.
            identities: [B, S] numbers of the tokens (`token_identities`), needed to find shared prefixes.

        Raises:
            ValueError: the rows do not make whole units, or a unit is longer than a pack.
        """
        units = self.unit_sizes(lengths, identities)
        shards = self._shards(units)
        return [[[row for unit in sorted(box) for row in units[unit].rows] for box in boxes] for boxes in shards]

    def _units(self, lengths: Sequence[int], identities: Tensor | None, indices: Sequence[int]) -> list[PackUnit]:
        """Divide rows into units; the rows of a unit stay in one pack.

        A unit is a pair or a single row. With shared prefixes, it has rows with common prefixes that fit a pack.

        Args:
            identities: [b, S] numbers of the tokens (see `token_identities`).
            indices: index of each row in the global batch. It determines the row's group.
        """
        step = self._whole_units(lengths)
        if self.rows_per_group and identities is not None:
            return self._unit_choices(self._groups(lengths, identities, indices), [self.tokens_per_pack])[0]
        return [self._apart(list(range(start, start + step)), lengths) for start in range(0, len(lengths), step)]

    def _even_units(self, lengths: Sequence[int], identities: Tensor | None) -> list[PackUnit]:
        """Divide all rows of a global batch into units, with even work for the data-parallel ranks."""
        indices = range(len(lengths))
        if not self.rows_per_group or identities is None:
            return self._units(lengths, identities, indices)
        choices = self._unit_choices(self._groups(lengths, identities, indices), self.capacities(lengths))
        return choices[self._most_even([list(map(self._size, units)) for units in choices])]

    @property
    def group_size(self) -> int:
        """Number of neighbouring rows that may have common prefixes; they are whole units."""
        return math.lcm(self.rows_per_group, self.rows_per_unit)

    def _groups(self, lengths: Sequence[int], identities: Tensor, indices: Sequence[int]) -> list[RowGroup]:
        self._whole_units(lengths)
        groups = []
        for _, members in groupby(range(len(lengths)), key=lambda row: indices[row] // self.group_size):
            rows = list(members)
            forest = PrefixForest(identities[rows], [lengths[row] for row in rows])
            groups.append(RowGroup(rows, forest, forest.cheapest(range(len(rows)), self._segment_cost)))
        return groups

    def _unit_choices(self, groups: Sequence[RowGroup], capacities: Sequence[int]) -> list[list[PackUnit]]:
        """Divide the rows of the groups into units of at most each of the `capacities`, which must be descending.

        A pair or row that is longer than a capacity is a unit of its own. The units of each choice are ordered by their
        first rows.
        """
        choices: list[list[PackUnit]] = []
        for capacity in capacities:
            if choices and all(unit.tree.padded_size(self.multiple) <= capacity for unit in choices[-1]):
                choices.append(choices[-1])
            else:
                units = [unit for group in groups for unit in self._cut(group, capacity)]
                choices.append(sorted(units, key=lambda unit: unit.rows[0]))
        return choices

    def _cut(self, group: RowGroup, capacity: int) -> Iterator[PackUnit]:
        for piece in pieces_of(group.tree, self.multiple, capacity, self.rows_per_unit):
            rows = [group.rows[row] for row in piece]
            if len(piece) == 1:
                yield PackUnit(rows, PrefixTree((group.forest.lengths[piece[0]],), (-1,), (0,)))
                continue
            tree = group.forest.cheapest(piece, self._segment_cost)
            if tree.padded_size(self.multiple) > self.tokens_per_pack:
                tree = group.forest.cheapest(piece, self._padded_tokens)
            yield PackUnit(rows, tree)

    def _segment_cost(self, before: int, length: int) -> float:
        return self._work(before, length) + self.min_shared

    def _padded_tokens(self, before: int, length: int) -> float:
        """Return the number of padded tokens of a segment, and a little more: of two equal trees, take the simpler."""
        return round_up(length, self.multiple) + 1e-6

    def capacities(self, lengths: Sequence[int]) -> list[int]:
        """Return the capacities of units that are tried, descending, to give all data-parallel ranks even work.

        Smaller units repeat a prefix more often, but can be divided more evenly. The first capacity is that of a pack.
        With the last one, each row (or pair) is a unit of its own.

        Args:
            lengths: number of tokens of each row of the global batch.
        """
        if not self.rows_per_group or self.dp_size == 1 or not lengths:
            return [self.tokens_per_pack]
        padded = [round_up(length, self.multiple) for length in lengths]
        least = max(*padded, 1)
        most = max(min(self.tokens_per_pack, sum(padded)), least)
        steps = [int(most * (least / most) ** (step / CAPACITY_STEPS)) for step in range(CAPACITY_STEPS)]
        return list(dict.fromkeys([self.tokens_per_pack, *steps, least, 0]))

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
        units = self._even_units(data["input_lengths"].tolist(), self._identities(data))
        shards = self._assign(units)
        width = max(self._width(box) for boxes in shards for box in boxes)
        return self._microbatches(data, shards[dp_rank], units, width)

    def _own_microbatches(self, data: LocalBatch[Any]) -> list[Microbatch]:
        key = self._plan_key(data)
        if key not in data.plans:
            boxes, units, width = self.plan_of_replica(data)
            count, width = data.share.most_packs(self, len(boxes), width)
            data.plans[key] = [*boxes, *[[]] * (count - len(boxes))], units, width
        boxes, units, width = data.plans[key]
        if units:
            return self._microbatches(data, boxes, units, width)
        blank = _blank(data, self.rows_per_unit)
        units = [self._apart(list(range(self.rows_per_unit)), [1] * self.rows_per_unit)]
        return self._microbatches(blank, boxes, units, width)

    def _plan_key(self, data: BatchedDataDict[Any]) -> tuple[MicrobatchPlanner, bool]:
        """Return the key of a batch's plan.

        A reference model scores the rows without recorded choices. Its packs may share more tokens than the policy's.
        """
        return self, bool(self.rows_per_group) and any(name in data for name in CHOICES)

    def _identities(self, data: BatchedDataDict[Any]) -> Tensor | None:
        return token_identities(data) if self.rows_per_group else None

    def plan_of_replica(self, data: LocalBatch[Any]) -> tuple[list[list[PackUnit]], list[PackUnit], int]:
        """Plan this replica's packs, without regard to other replicas.

        Returns:
            The units of each pack, all units, and the width of the widest pack. A unit consists of rows that stay
            together.
        """
        units = self._units(data["input_lengths"].tolist(), self._identities(data), data.share.indices)
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
            selected.pop(IMAGES, None)  # nothing reads its results
        layout: PackLayout
        if self.packing and shared:
            layout = PrefixLayout.of(tree, self.cp_size, self.multiple, common or self._width(units))
        elif self.packing:
            layout = PackLayout.pack(tree.lengths, self.cp_size, self.multiple, common or self._width(units))
        else:
            width = round_up(longest, self.multiple)
            layout = PackLayout(tree.lengths, (width,) * len(rows), common or self._width(units), self.cp_size)
        own = tuple(selected["input_lengths"].tolist())
        assert layout.row_lengths == own, "the layout has the rows in another order than the data"
        return Microbatch(rows, selected, layout, self.packing, counts)

    def _width(self, units: list[PackUnit]) -> int:
        """Return the number of tokens, with padding, of a microbatch of these `units`; 0 without units."""
        if self.packing:
            return round_up(sum(unit.tree.padded_size(self.multiple) for unit in units), self.pack_multiple)
        padded = [round_up(n, self.multiple) for unit in units for n in unit.tree.lengths]
        return round_up(max(padded, default=0) * len(padded), self.pack_multiple)

    def unit_sizes(self, lengths: Sequence[int], identities: Tensor | None) -> list[PackUnitSize]:
        """Divide all rows of a global batch into units, and return the units' sizes. Each unit stays in one pack.

        Args:
            lengths: [B] lengths of the rows.
            identities: [B, S] numbers of the tokens (see `token_identities`); not read unless prefixes are shared.
        """
        rows = range(len(lengths))
        return self.most_even(self.size_choices(lengths, identities, rows, self.capacities(lengths)))

    def size_choices(
        self, lengths: Sequence[int], identities: Tensor | None, indices: Sequence[int], capacities: Sequence[int]
    ) -> list[list[PackUnitSize]]:
        """Return, for each of the `capacities`, the sizes of the units of b rows of a global batch.

        Args:
            lengths: [b] lengths of the rows.
            identities: [b, S] numbers of the tokens; not read unless prefixes are shared.
            indices: [b] indices of the rows in the global batch.
        """
        if not self.rows_per_group or identities is None:
            return [self._sizes_apart(lengths, indices)]
        choices = self._unit_choices(self._groups(lengths, identities, indices), capacities)
        sizes = [list(map(self._size, units)) for units in choices]
        return [[replace(size, rows=[indices[row] for row in size.rows]) for size in of_choice] for of_choice in sizes]

    def most_even(self, choices: Sequence[list[PackUnitSize]]) -> list[PackUnitSize]:
        """Return the sizes with which the data-parallel rank with the most work has the least work."""
        return choices[self._most_even(choices)]

    def _most_even(self, choices: Sequence[Sequence[PackUnitSize]]) -> int:
        if len(choices) == 1:
            return 0
        most = [max(self._work_of_ranks(units)) for units in choices]
        return most.index(min(most))

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
        work = self._work_of_ranks(units)
        return [own * len(work) / sum(work) for own in work]

    def _work_of_ranks(self, units: Sequence[PackUnitSize]) -> list[float]:
        return [sum(units[unit].cost for box in boxes for unit in box) for boxes in self._shards(units)]

    def pieces(self, data: BatchedDataDict[Any]) -> tuple[list[int], list[int]]:
        """Divide a batch into the segments that the model computes: rows, or shared prefixes and continuations.

        Returns:
            Two lists with one entry per segment: the segment's number of tokens, and the number of tokens that precede
            the segment in its row.
        """
        key = self._plan_key(data)
        if isinstance(data, LocalBatch) and key in data.plans:
            _, units, _ = data.plans[key]
        elif isinstance(data, LocalBatch):
            units = self._units(data["input_lengths"].tolist(), self._identities(data), data.share.indices)
        else:
            units = self._even_units(data["input_lengths"].tolist(), self._identities(data))
        return [n for unit in units for n in unit.tree.lengths], [n for unit in units for n in unit.tree.before]


@dataclass(frozen=True)
class PackUnit:
    """Rows of a batch that go into one pack, and their shared prefixes."""

    rows: list[int]
    tree: PrefixTree


@dataclass(frozen=True)
class RowGroup:
    """Rows that may have common prefixes.

    rows: indices of the rows in the batch.
    forest: the common prefixes of these rows.
    tree: the tree of these rows that costs least.
    """

    rows: list[int]
    forest: PrefixForest
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

    `data` itself has no rows. Each new row has one token. Its length is 1, its recorded choices are unknown (−1), and
    its values in all other columns are 0.
    """
    blank: BatchedDataDict[Any] = BatchedDataDict()
    for name, value in data.items():
        if isinstance(value, torch.Tensor) and value.ndim:
            blank[name] = value.new_zeros(rows, *value.shape[1:])
        else:
            blank[name] = [None] * rows if isinstance(value, list) else value
    blank["input_lengths"] = torch.ones(rows, dtype=torch.long)
    for name in CHOICES:
        if name in blank:
            blank[name] -= 1
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
        pack_multiple=config.pack_multiple,
        one_width=parallel.pipeline_model_parallel_size > 1,
        count_multiple=parallel.microbatch_multiple,
        rows_per_group=WHOLE_BATCH if config.batch.share_prefixes else 0,
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

    Collective over the replicas. With shared prefixes, each replica divides a part of the rows into units: rows with
    common prefixes that stay in one pack. Then the sizes of all units are gathered.

    Args:
        lengths: lengths of all rows.
        tokens_of: function of b row numbers; returns the numbers of these rows' tokens, [b, S], right-padded (see
            `token_identities`). Called only if prefixes are shared.
        known: numbers of the rows whose tokens this replica has; exactly one replica must have the tokens of each row.
            Rows that different replicas have do not share prefixes. None: every replica has all tokens.
    """
    if not batching.rows_per_group:
        return batching.divide(batching.unit_sizes(lengths, None))
    if known is None and (replicas.size == 1 or platform.simulates()):  # no other replica contributes sizes
        return batching.divide(batching.unit_sizes(lengths, tokens_of(range(len(lengths)))))
    if known is None:
        size = batching.group_size
        known = [row for row in range(len(lengths)) if row // size % replicas.size == replicas.rank]
    capacities = batching.capacities(lengths)
    own: list[list[PackUnitSize]] = [[] for _ in capacities]
    if known:
        own = batching.size_choices([lengths[row] for row in known], tokens_of(known), known, capacities)
    return batching.divide(batching.most_even(_all_gather_units(own, replicas)))


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
        sequences = [sequence for place in places_of(rows) for sequence in units[indices[place]]]
        read = padded_rows([sequence.input_ids for sequence in sequences])
        return token_identities({**read, **images_column([sequence.images for sequence in sequences])})

    rows = [length for unit in lengths for length in unit]
    share = BatchShare(divide(rows, tokens_of)[replicas.rank], len(rows), replicas)
    return share, places_of(share.indices)


def _all_gather_units(own: Sequence[Sequence[PackUnitSize]], replicas: ParallelDimension) -> list[list[PackUnitSize]]:
    """Gather unit sizes from all replicas, for each of several choices of units; `own` are this replica's sizes.

    The units of a choice are ordered by their first rows.
    """
    numbered = [(choice, number, unit) for choice, units in enumerate(own) for number, unit in enumerate(units)]
    rows = [[choice, number, unit.tokens, unit.cost, row] for choice, number, unit in numbered for row in unit.rows]
    (most,) = BatchShare((), 0, replicas).max(len(rows))
    padded = torch.full((int(most), 5), -1.0, dtype=torch.float64)
    padded[: len(rows)] = torch.tensor(rows, dtype=torch.float64).view(-1, 5)
    found: list[dict[tuple[int, float], PackUnitSize]] = [{} for _ in own]
    for replica, sent in enumerate(all_gather(padded.to(platform.device()), replicas.group).tolist()):
        for choice, number, tokens, cost, row in sent:
            if row >= 0:
                units = found[int(choice)]
                rows_so_far = units[replica, number].rows if (replica, number) in units else ()
                units[replica, number] = PackUnitSize([*rows_so_far, int(row)], int(tokens), cost)
    return [sorted(units.values(), key=lambda unit: unit.rows[0]) for units in found]
