"""The part of NeMo RL's `BatchedDataDict` that this package does not call: shards, microbatches and their plans."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NotRequired, Self, TypedDict

import torch
import torch.nn.functional as F
from torch.distributed import ProcessGroup

from mcore_rl.distributed.bin_packing import Bin, assign, pack, split_until_divisible
from mcore_rl.distributed.collectives import all_gather, gather_objects, group_size
from mcore_rl.distributed.packs import round_up
from mcore_rl.errors import ContractError


class PortedBatch(UserDict):
    """The methods of a batch that only code written for NeMo RL calls; `BatchedDataDict` inherits them.

    Three attributes are set on a shard that was made with packing or a token budget. Each is a list with an entry for
    each global batch of the shard:

    micro_batch_indices: [start, end) of the rows of each microbatch, counted from the global batch's first row.
    micro_batch_lengths: number of padded tokens of each pack, or width of each padded microbatch.
    elem_counts_per_gb: number of the shard's rows in the global batch.
    """

    micro_batch_indices: list[list[list[int]]] | None = None
    micro_batch_lengths: list[list[int]] | None = None
    elem_counts_per_gb: list[int] | None = None

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of rows."""

    @abstractmethod
    def with_entries(self, entries: Mapping[str, Any]) -> Self:
        """Return a batch of the same kind with these entries."""

    @abstractmethod
    def select_indices(self, indices: Sequence[int] | torch.Tensor) -> Self:
        """Return a copy of some rows."""

    @abstractmethod
    def slice(self, start: int, end: int) -> PortedBatch:
        """Return rows start … end − 1 as views."""

    def get_dict(self) -> dict[str, Any]:
        """Return the entries as an ordinary dictionary."""
        return dict(self.data)

    def truncate_tensors(self, dim: int, truncated_len: int) -> None:
        """Cut dimension `dim` of every tensor to its first `truncated_len` entries, in place.

        Tensors without this dimension stay unchanged.
        """
        for key, value in self.data.items():
            if isinstance(value, torch.Tensor) and value.ndim > dim:
                self.data[key] = value.narrow(dim, 0, min(truncated_len, value.shape[dim]))

    def to(self, device: torch.device | str) -> Self:
        """Move all tensors to `device`, in place; return the batch itself."""
        for key, value in self.data.items():
            if isinstance(value, torch.Tensor):
                self.data[key] = value.to(device)
        return self

    # ------------------------------------------------------------ rows

    def chunk(self, rank: int, chunks: int) -> PortedBatch:
        """Divide the rows, in their order, into `chunks` equal parts; return part number `rank`.

        Raises:
            ContractError: `chunks` does not divide the number of rows, or `rank` is out of range.
        """
        size = self.size
        if size % chunks:
            raise ContractError(f"the batch size ({size}) is not a multiple of the number of chunks ({chunks})")
        if not 0 <= rank < chunks:
            raise ContractError(f"chunk {rank} must be at least 0 and less than the number of chunks ({chunks})")
        return self.slice(rank * size // chunks, (rank + 1) * size // chunks)

    def reorder_data(self, reordered_indices: Sequence[int]) -> None:
        """Change the order of rows, in place: row i becomes row `reordered_indices[i]`.

        Use it for results that were computed by shard and then concatenated: with the indices that
        `shard_by_batch_size` returned, it restores the original order.

        Raises:
            ContractError: the indices are not a permutation of the rows.
        """
        if sorted(reordered_indices) != list(range(self.size)):
            raise ContractError(f"reordered_indices must contain each number from 0 to {self.size - 1} exactly once")
        inverse = torch.empty(len(reordered_indices), dtype=torch.long)
        inverse[torch.tensor(reordered_indices, dtype=torch.long)] = torch.arange(len(reordered_indices))
        self.data = self.select_indices(inverse).data

    def repeat_interleave(self, num_repeats: int) -> Self:
        """Return a batch with each row `num_repeats` times in sequence; items of lists are copied deeply."""
        repeated = self.select_indices([row for row in range(self.size) for _ in range(num_repeats)])
        for key, value in repeated.data.items():
            if isinstance(value, list):
                repeated[key] = [copy.deepcopy(item) for item in value]
        return repeated

    def all_gather(self, group: ProcessGroup | None) -> Self:
        """Return the rows of all ranks of `group`, in rank order; ranks may have different numbers of rows. Collective.

        Raises:
            ContractError: the ranks have different entries, or an entry differs in a dimension other than the first.
                Raised on every rank.
        """
        if group_size(group) == 1:
            return self.with_entries(self.data)
        described = gather_objects({key: _describe(value) for key, value in self.data.items()}, group)
        entries = [{key: kind for key, (kind, _) in one.items()} for one in described]
        if any(one != entries[0] for one in entries):
            raise ContractError(
                f"all_gather: all ranks must have the same entries. The entries of the ranks, in rank order: {entries}"
            )
        gathered: dict[str, Any] = {}
        for key, value in self.data.items():
            if isinstance(value, torch.Tensor) and value.ndim:
                counts = [one[key][1] for one in described]
                padded = F.pad(value, (*(0, 0) * (value.ndim - 1), 0, max(counts) - len(value)))
                everyone = all_gather(padded, group)
                gathered[key] = torch.cat([rows[:count] for rows, count in zip(everyone, counts, strict=True)])
            elif isinstance(value, list):
                gathered[key] = [item for part in gather_objects(value, group) for item in part]
            else:
                gathered[key] = value
        return self.with_entries(gathered)

    # ------------------------------------------------------------ shards

    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        dynamic_batching_args: DynamicBatchingArgs | None = None,
        sequence_packing_args: SequencePackingArgs | None = None,
    ) -> list[PortedBatch] | tuple[list[PortedBatch], list[int]]:
        """Divide the rows into `shards` shards, one for each data-parallel rank.

        Args:
            batch_size: number of rows of a global batch; each global batch is divided among the shards separately.
                None: all rows are one global batch.
            allow_uneven_shards: make shards of ⌈rows / shards⌉ rows; the last shards may be smaller. Otherwise
                `shards` must divide the number of rows.
            dynamic_batching_args: divide each shard into padded microbatches within a token budget, balanced by tokens.
            sequence_packing_args: divide each shard into packs within a token budget, balanced by tokens.

        Returns:
            The shards. With packing or a token budget, also the original index of each row, shard after shard, for
            `reorder_data`; all shards have the same number of microbatches, and no microbatch is empty if there are
            enough rows.

        Raises:
            ContractError: the rows cannot be divided or are fewer than the shards, a sequence is longer than a pack,
                both kinds of arguments are given, or `batch_size` is given with `allow_uneven_shards`.
        """
        total = self.size
        size = total if batch_size is None else batch_size
        if allow_uneven_shards and batch_size is not None:
            raise ContractError("batch_size must be None if allow_uneven_shards is True")
        if dynamic_batching_args is not None and sequence_packing_args is not None:
            raise ContractError("dynamic_batching_args and sequence_packing_args cannot be passed together")
        if size < 1 or total % size:
            raise ContractError(f"Total batch size ({total}) is not a multiple of batch_size ({size})")
        batches = [range(start, start + size) for start in range(0, total, size)]
        arguments = dynamic_batching_args or sequence_packing_args
        if arguments is None:
            if size % shards and not allow_uneven_shards:
                raise ContractError(f"Batch size ({size}) is not a multiple of shards ({shards})")
            parts = [[r for batch in batches for r in even_parts(batch, shards)[i]] for i in range(shards)]
            return [self._shard_of(rows) for rows in parts]
        lengths = torch.as_tensor(self.data[arguments.get("input_lengths_key", "input_lengths")]).tolist()
        plans = [
            plan_microbatches(lengths, batch, shards, dynamic_batching_args, sequence_packing_args) for batch in batches
        ]
        made = [self._planned_shard([plan[i] for plan in plans]) for i in range(shards)]
        order = [row for i in range(shards) for plan in plans for microbatch in plan[i].rows for row in microbatch]
        return made, order

    def _shard_of(self, rows: list[int]) -> PortedBatch:
        return self.select_indices(rows).slice(0, len(rows))

    def _planned_shard(self, batches: list[MicrobatchPlan]) -> PortedBatch:
        rows = [row for batch in batches for microbatch in batch.rows for row in microbatch]
        shard = self._shard_of(rows)
        shard.micro_batch_indices = [batch.boundaries for batch in batches]
        shard.micro_batch_lengths = [batch.lengths for batch in batches]
        shard.elem_counts_per_gb = [sum(map(len, batch.rows)) for batch in batches]
        return shard

    def get_batch(self, batch_idx: int, batch_size: int | None = None) -> PortedBatch:
        """Return global batch `batch_idx` of this shard, with its microbatches.

        Args:
            batch_size: number of rows of a global batch in this shard; not needed for packed shards.

        Raises:
            ContractError: `batch_size` is missing, or the shard has no batch `batch_idx`.
        """
        if self.elem_counts_per_gb is not None:
            count = len(self.elem_counts_per_gb)
            start = sum(self.elem_counts_per_gb[:batch_idx])
            end = start + self.elem_counts_per_gb[batch_idx] if batch_idx < count else start
        elif batch_size is not None:
            count, start = -(-self.size // batch_size), batch_idx * batch_size
            end = start + batch_size
        else:
            raise ContractError("get_batch: needs batch_size, because this shard has no planned batches")
        if not 0 <= batch_idx < count:
            raise ContractError(
                f"get_batch: batch_idx={batch_idx} must be at least 0 and less than the number of batches ({count})"
            )
        batch = self.slice(start, end)
        if self.micro_batch_indices is not None and self.micro_batch_lengths is not None:
            batch.micro_batch_indices = [self.micro_batch_indices[batch_idx]]
            batch.micro_batch_lengths = [self.micro_batch_lengths[batch_idx]]
            batch.elem_counts_per_gb = [end - start]
        return batch

    # ------------------------------------------------------------ microbatches

    def make_microbatch_iterator(self, microbatch_size: int) -> Iterator[PortedBatch]:
        """Yield the rows in microbatches of `microbatch_size`.

        Raises:
            ContractError: `microbatch_size` does not divide the number of rows.
        """
        if self.size % microbatch_size:
            raise ContractError(
                f"Data dict size ({self.size}) is not a multiple of the provided microbatch size ({microbatch_size})"
            )
        return (self.slice(i, i + microbatch_size) for i in range(0, self.size, microbatch_size))

    def make_microbatch_iterator_for_packable_sequences(self) -> Iterator[PortedBatch]:
        """Yield the rows of each pack of a shard made with `sequence_packing_args`.

        Raises:
            ContractError: the shard was made without these arguments.
        """
        return (self.slice(start, end) for start, end, _ in self._planned())

    def get_microbatch_iterator_for_packable_sequences_len(self) -> tuple[int, int]:
        """Return the number of packs, and the number of padded tokens in the longest pack."""
        lengths = [length for _, _, length in self._planned()]
        return len(lengths), max(lengths)

    def make_microbatch_iterator_with_dynamic_shapes(self, sequence_dim: int = 1) -> Iterator[PortedBatch]:
        """Yield each microbatch of a shard made with `dynamic_batching_args`, with its rows cut to its width.

        Args:
            sequence_dim: the dimension of tensors that is cut.

        Raises:
            ContractError: the shard was made without these arguments.
        """
        for start, end, width in self._planned():
            microbatch = self.slice(start, end)
            microbatch.truncate_tensors(sequence_dim, width)
            yield microbatch

    def get_microbatch_iterator_dynamic_shapes_len(self) -> int:
        """Return the number of microbatches."""
        return len(self._planned())

    def _planned(self) -> list[tuple[int, int, int]]:
        """Return (start, end, length) of each microbatch; rows are counted from the first row of this shard."""
        if self.micro_batch_indices is None or self.micro_batch_lengths is None:
            raise ContractError(
                "this shard has no planned microbatches; make it with sequence_packing_args or dynamic_batching_args"
            )
        planned, first = [], 0
        for indices, lengths in zip(self.micro_batch_indices, self.micro_batch_lengths, strict=True):
            planned += [(first + start, first + end, n) for (start, end), n in zip(indices, lengths, strict=True)]
            first += indices[-1][1]
        return planned


def _describe(value: Any) -> tuple[Any, int]:
    """Return the properties of an entry's `value` that all ranks must have in common, and its number of rows."""
    if isinstance(value, torch.Tensor) and value.ndim:
        return (str(value.dtype), tuple(value.shape[1:])), len(value)
    return type(value).__name__, len(value) if isinstance(value, list) else 0


class SequencePackingArgs(TypedDict):
    """Arguments for sharding into packs.

    max_tokens_per_microbatch: capacity of a pack.
    input_lengths_key: the entry with each row's number of tokens, [B].
    sequence_length_pad_multiple: each sequence is padded to a multiple of this in its pack.
    input_key, algorithm: the entry with the tokens, and the name of a packing algorithm. They are accepted for
        compatibility and ignored: `bin_packing.pack` is the only algorithm.
    """

    max_tokens_per_microbatch: int
    input_key: NotRequired[str]
    input_lengths_key: NotRequired[str]
    algorithm: NotRequired[str]
    sequence_length_pad_multiple: NotRequired[int]


class DynamicBatchingArgs(TypedDict):
    """Arguments for sharding into padded microbatches of rows with similar lengths.

    max_tokens_per_microbatch: limit of the number of rows times their common width.
    input_key: the entry with the tokens; accepted for compatibility and ignored.
    input_lengths_key: the entry with each row's number of tokens, [B].
    sequence_length_round: widths are rounded up to a multiple of this.
    """

    max_tokens_per_microbatch: int
    input_key: NotRequired[str]
    input_lengths_key: NotRequired[str]
    sequence_length_round: NotRequired[int]


@dataclass(frozen=True)
class MicrobatchPlan:
    """The microbatches of one shard of one global batch.

    rows: rows of each microbatch, in the shard's order.
    lengths: padded tokens of each pack, or the width of each padded microbatch.
    """

    rows: list[list[int]]
    lengths: list[int]

    @property
    def boundaries(self) -> list[list[int]]:
        """[start, end) of each microbatch in the concatenated `rows` of all microbatches."""
        ends = [0]
        for rows in self.rows:
            ends.append(ends[-1] + len(rows))
        return [[start, end] for start, end in pairwise(ends)]


def even_parts(rows: range, count: int) -> list[range]:
    """Divide `rows` into `count` consecutive parts of ⌈rows / count⌉ rows; the last parts may be smaller or empty."""
    size = -(-len(rows) // count)
    return [rows[i * size : (i + 1) * size] for i in range(count)]


def plan_microbatches(
    lengths: Sequence[int],
    rows: range,
    shards: int,
    dynamic: DynamicBatchingArgs | None,
    packing: SequencePackingArgs | None,
) -> list[MicrobatchPlan]:
    """Return a plan of microbatches for each shard of the global batch `rows`.

    Give either `packing`, to make packs, or `dynamic`, to make padded microbatches.

    Raises:
        ContractError: there are fewer rows than shards, or a row does not fit a microbatch.
    """
    if len(rows) < shards:
        raise ContractError(f"{len(rows)} rows are fewer than the {shards} shards; each shard needs at least one row")
    if packing is not None:
        cost = [round_up(lengths[row], packing.get("sequence_length_pad_multiple", 1)) for row in rows]
        shards_of_bins = pack(cost, cost, packing["max_tokens_per_microbatch"], shards)
    else:
        assert dynamic is not None
        cost = [round_up(lengths[row], dynamic.get("sequence_length_round", 1)) for row in rows]
        bins = _of_like_lengths(cost, dynamic["max_tokens_per_microbatch"])
        split_until_divisible(bins, cost, shards)
        shards_of_bins = assign(bins, cost, shards)
    length_of = sum if packing is not None else max
    plans = []
    for boxes in shards_of_bins:
        filled = [sorted(box) for box in boxes if box]
        lengths_of_boxes = [length_of(cost[unit] for unit in box) for box in filled]
        plans.append(MicrobatchPlan([[rows[unit] for unit in box] for box in filled], lengths_of_boxes))
    return plans


def _of_like_lengths(widths: Sequence[int], capacity: int) -> list[Bin]:
    """Return bins of units of similar widths: number of units · largest width in a bin is at most `capacity`."""
    bins: list[Bin] = []
    for unit in sorted(range(len(widths)), key=lambda unit: -widths[unit]):
        if widths[unit] > capacity:
            raise ContractError(f"a row of {widths[unit]} tokens does not fit a microbatch of {capacity} tokens")
        if bins and widths[bins[-1][0]] * (len(bins[-1]) + 1) <= capacity:
            bins[-1].append(unit)
        else:
            bins.append([unit])
    return bins
