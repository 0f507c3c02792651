"""A batch: a dictionary of tensors (and lists) that share their first dimension."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Generic, NotRequired, TypedDict, TypeVar

import torch
import torch.nn.functional as F

from mcore_rl.distributed.bin_packing import assign, first_fit_decreasing, split_until_divisible
from mcore_rl.distributed.pack_layout import round_up

DictT = TypeVar("DictT")


class SequencePackingArgs(TypedDict):
    """Sharding into packs.

    max_tokens_per_microbatch: capacity of a pack.
    input_lengths_key: the entry that holds each row's tokens, [B].
    sequence_length_pad_multiple: each sequence is padded to a multiple of this in its pack.
    """

    max_tokens_per_microbatch: int
    input_lengths_key: NotRequired[str]
    sequence_length_pad_multiple: NotRequired[int]


class DynamicBatchingArgs(TypedDict):
    """Sharding into padded microbatches of rows of like lengths.

    max_tokens_per_microbatch: rows times their common width, at most.
    input_lengths_key: the entry that holds each row's tokens, [B].
    sequence_length_round: widths are rounded up to a multiple of this.
    """

    max_tokens_per_microbatch: int
    input_lengths_key: NotRequired[str]
    sequence_length_round: NotRequired[int]


class BatchedDataDict(UserDict, Generic[DictT]):
    """Tensors [B, …] and lists of length B under one roof.

    Values that are neither are kept as they are and shared by every slice.
    """

    microbatches: list[list[int]] | None = None
    """Rows of each microbatch, on a shard made by token budget or packing."""

    @property
    def size(self) -> int:
        """B, the number of rows; 0 for an empty dictionary.

        Raises:
            ValueError: entries of different lengths.
        """
        sizes = {key: len(value) for key, value in self.data.items() if _is_batched(value)}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"entries differ in their number of rows: {sizes}")
        return next(iter(sizes.values()), 0)

    def get_dict(self) -> dict[str, Any]:
        """The entries as an ordinary dictionary."""
        return dict(self.data)

    # ------------------------------------------------------------ rows

    def select_indices(self, indices: Sequence[int] | torch.Tensor) -> BatchedDataDict[DictT]:
        """The rows `indices`, in that order."""
        rows = torch.as_tensor(indices, dtype=torch.long)
        order = rows.tolist()
        selected: BatchedDataDict[DictT] = BatchedDataDict()
        for key, value in self.data.items():
            if isinstance(value, torch.Tensor) and value.ndim:
                selected[key] = value[rows.to(value.device)]
            else:
                selected[key] = [value[i] for i in order] if isinstance(value, list) else value
        return selected

    def slice(self, start: int, end: int) -> BatchedDataDict[DictT]:
        """Rows start … end − 1."""
        return self.select_indices(range(start, min(end, self.size)))

    def chunk(self, rank: int, chunks: int) -> BatchedDataDict[DictT]:
        """Part `rank` of `chunks` equal ones, in order; the first parts are a row longer if they must.

        Raises:
            ValueError: no such part.
        """
        if not 0 <= rank < chunks:
            raise ValueError(f"there is no chunk {rank} of {chunks}")
        rows = _part(range(self.size), rank, chunks)
        return self.slice(rows.start, rows.stop)

    def reorder_data(self, reordered_indices: Sequence[int]) -> None:
        """Put the rows back, in place: row i becomes row `reordered_indices[i]`.

        With what `shard_by_batch_size` returned, this restores the order of results that come shard by shard.

        Raises:
            ValueError: not a permutation of the rows.
        """
        if sorted(reordered_indices) != list(range(self.size)):
            raise ValueError(f"reordered_indices must name each of the {self.size} rows once")
        inverse = torch.empty(len(reordered_indices), dtype=torch.long)
        inverse[torch.tensor(reordered_indices, dtype=torch.long)] = torch.arange(len(reordered_indices))
        self.data = self.select_indices(inverse).data

    def repeat_interleave(self, repeats: int) -> BatchedDataDict[DictT]:
        """Each row `repeats` times, next to itself."""
        return self.select_indices([row for row in range(self.size) for _ in range(repeats)])

    # ------------------------------------------------------------ shards

    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        sequence_packing_args: SequencePackingArgs | None = None,
        dynamic_batching_args: DynamicBatchingArgs | None = None,
    ) -> list[BatchedDataDict[DictT]] | tuple[list[BatchedDataDict[DictT]], list[int]]:
        """One dictionary for each of `shards` ranks.

        Args:
            batch_size: rows of a global batch; each batch is shared out over the shards by itself. All rows,
                if left out.
            allow_uneven_shards: let the first shards be a row longer; otherwise the rows must divide.
            sequence_packing_args: make packs, balanced by tokens, equally many on each shard.
            dynamic_batching_args: make padded microbatches within a token budget, likewise.

        Returns:
            the shards; with packing or a token budget also the original row of each row, shard after shard, for
            `reorder_data`.

        Raises:
            ValueError: rows that do not divide, a sequence longer than a pack, or both kinds of arguments.
        """
        size = batch_size or self.size
        if self.size % size:
            raise ValueError(f"{self.size} rows do not make whole batches of {size}")
        batches = [range(start, start + size) for start in range(0, self.size, size)]
        if sequence_packing_args is None and dynamic_batching_args is None:
            if size % shards and not allow_uneven_shards:
                raise ValueError(f"{size} rows do not divide over {shards} shards; set allow_uneven_shards")
            parts = [[r for batch in batches for r in _part(batch, i, shards)] for i in range(shards)]
            return [self.select_indices(rows) for rows in parts]
        if sequence_packing_args is not None and dynamic_batching_args is not None:
            raise ValueError("give sequence_packing_args or dynamic_batching_args, not both")
        plans = [self._plan(batch, shards, sequence_packing_args, dynamic_batching_args) for batch in batches]
        made, order = [], []
        for i in range(shards):
            bins = [box for plan in plans for box in plan[i]]
            rows = [row for box in bins for row in box]
            shard = self.select_indices(rows)
            ends = torch.tensor([0, *map(len, bins)]).cumsum(0).tolist()
            shard.microbatches = [list(range(a, b)) for a, b in pairwise(ends)]
            made.append(shard)
            order += rows
        return made, order

    def _plan(
        self, rows: range, shards: int, packing: SequencePackingArgs | None, dynamic: DynamicBatchingArgs | None
    ) -> list[list[list[int]]]:
        """[shard][microbatch] → rows of one batch; equally many microbatches on each shard, some may be empty."""
        arguments: Any = packing or dynamic
        lengths = self.data[arguments.get("input_lengths_key", "input_lengths")].tolist()
        capacity = arguments["max_tokens_per_microbatch"]
        if packing is not None:
            multiple = packing.get("sequence_length_pad_multiple", 1)
            cost = [round_up(lengths[row], multiple) for row in rows]
            bins = first_fit_decreasing(cost, capacity)
        else:
            cost = [round_up(lengths[row], arguments.get("sequence_length_round", 1)) for row in rows]
            bins = _of_like_lengths(cost, capacity)
        split_until_divisible(bins, cost, shards)
        return [[[rows[unit] for unit in sorted(box)] for box in boxes] for boxes in assign(bins, cost, shards)]

    # ------------------------------------------------------------ microbatches

    def make_microbatch_iterator(self, microbatch_size: int) -> Iterator[BatchedDataDict[DictT]]:
        """The rows, `microbatch_size` at a time.

        Raises:
            ValueError: rows that do not divide.
        """
        if self.size % microbatch_size:
            raise ValueError(f"{self.size} rows do not make whole microbatches of {microbatch_size}")
        return (self.slice(i, i + microbatch_size) for i in range(0, self.size, microbatch_size))

    def make_microbatch_iterator_for_packable_sequences(self) -> Iterator[BatchedDataDict[DictT]]:
        """The rows of each pack of a shard made with `sequence_packing_args`.

        Raises:
            ValueError: the data was not sharded so.
        """
        return (self.select_indices(rows) for rows in self._planned())

    def make_microbatch_iterator_with_dynamic_shapes(
        self, input_lengths_key: str = "input_lengths", sequence_length_round: int = 1, dim: int = 1
    ) -> Iterator[BatchedDataDict[DictT]]:
        """The rows of each microbatch of a shard made with `dynamic_batching_args`, cut to their longest.

        Raises:
            ValueError: the data was not sharded so.
        """
        for rows in self._planned():
            microbatch = self.select_indices(rows)
            longest = int(microbatch[input_lengths_key].max()) if rows else 0
            microbatch.truncate_tensors(dim, round_up(longest, sequence_length_round))
            yield microbatch

    def _planned(self) -> list[list[int]]:
        if self.microbatches is None:
            raise ValueError("shard with sequence_packing_args or dynamic_batching_args first")
        return self.microbatches

    # ------------------------------------------------------------ tensors

    def truncate_tensors(self, dim: int, truncated_len: int) -> None:
        """Cut every tensor that has dimension `dim`, in place, to its first `truncated_len` entries there."""
        for key, value in self.data.items():
            if isinstance(value, torch.Tensor) and value.ndim > dim:
                self.data[key] = value.narrow(dim, 0, min(truncated_len, value.shape[dim]))

    def to(self, device: torch.device | str) -> BatchedDataDict[DictT]:
        """All tensors on `device`."""
        return BatchedDataDict({k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in self.data.items()})

    @classmethod
    def from_batches(
        cls, batches: Sequence[Mapping[str, Any]], pad_value_dict: Mapping[str, float] | None = None
    ) -> BatchedDataDict[Any]:
        """The rows of all batches, one after the other; the shorter tensors padded at the end of dimension 1.

        Args:
            pad_value_dict: what an entry is padded with; 0 if it is not named.

        Raises:
            ValueError: batches of different entries.
        """
        if len({tuple(sorted(batch)) for batch in batches}) > 1:
            raise ValueError(f"batches differ in their entries: {[sorted(batch) for batch in batches]}")
        joined: BatchedDataDict[Any] = cls()
        for key in batches[0] if batches else ():
            values = [batch[key] for batch in batches]
            if isinstance(values[0], torch.Tensor) and values[0].ndim:
                joined[key] = _concatenated(values, (pad_value_dict or {}).get(key, 0))
            else:
                joined[key] = [item for value in values for item in value] if _is_batched(values[0]) else values[0]
        return joined


def _is_batched(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, torch.Tensor) and value.ndim > 0)


def _part(rows: range, index: int, count: int) -> range:
    """The first parts are a row longer if they must."""
    whole, longer = divmod(len(rows), count)
    start = index * whole + min(index, longer)
    return rows[start : start + whole + (index < longer)]


def _of_like_lengths(widths: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of units next to one another in length, whose number times the longest is at most `capacity`."""
    bins: list[list[int]] = []
    for unit in sorted(range(len(widths)), key=lambda unit: -widths[unit]):
        if widths[unit] > capacity:
            raise ValueError(f"a row of {widths[unit]} tokens does not fit a microbatch of {capacity}")
        if bins and widths[bins[-1][0]] * (len(bins[-1]) + 1) <= capacity:
            bins[-1].append(unit)
        else:
            bins.append([unit])
    return bins


def _concatenated(values: Sequence[torch.Tensor], padding: float) -> torch.Tensor:
    if values[0].ndim < 2:
        return torch.cat(list(values))
    width = max(value.shape[1] for value in values)
    after = [0, 0] * (values[0].ndim - 2)  # F.pad counts dimensions from the last
    return torch.cat([F.pad(value, (*after, 0, width - value.shape[1]), value=padding) for value in values])
