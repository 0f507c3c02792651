"""Batches: dictionaries of tensors and lists with one entry per row.

A batch has all rows of a global batch, or only the rows of one replica.
"""

from __future__ import annotations

import copy
import math
from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Generic, Self, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_rl import platform
from mcore_rl.distributed.bin_packing import (
    DynamicBatchingArgs,
    MicrobatchPlan,
    SequencePackingArgs,
    even_parts,
    plan_microbatches,
)
from mcore_rl.distributed.collectives import (
    all_gather,
    all_reduce,
    gather_objects,
    gather_objects_along,
    gather_rows,
    group_size,
)
from mcore_rl.distributed.topology import ParallelDimension
from mcore_rl.errors import ContractError

DictT = TypeVar("DictT")


class BatchedDataDict(UserDict, Generic[DictT]):
    """A batch of B rows: a dictionary of tensors [B, …] and lists of length B.

    Values of other types do not belong to rows: every slice of the batch has the same value.

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
    def size(self) -> int:
        """Number of rows B; 0 for an empty dictionary.

        Raises:
            ContractError: the entries have different lengths.
        """
        sizes = {key: len(value) for key, value in self.data.items() if _is_batched(value)}
        if len(set(sizes.values())) > 1:
            raise ContractError(f"Batch sizes are not the same across the rollout batch: {sizes}")
        return next(iter(sizes.values()), 0)

    def get_dict(self) -> dict[str, Any]:
        """Return the entries as an ordinary dictionary."""
        return dict(self.data)

    def with_entries(self, entries: Mapping[str, Any]) -> Self:
        """Return a batch of the same kind with these entries instead of its own; the rows stay the same."""
        return type(self)(entries)

    # ------------------------------------------------------------ rows

    def select_indices(self, indices: Sequence[int] | torch.Tensor) -> Self:
        """Return a copy of some rows.

        `indices` are row numbers in the wanted order, or a boolean tensor [B], true for the wanted rows.

        Raises:
            ContractError: a boolean tensor has another length.
        """
        rows = torch.as_tensor(indices)
        if rows.dtype == torch.bool:
            if len(rows) != self.size:
                raise ContractError(
                    f"select_indices: the boolean mask has {len(rows)} entries, but the batch has {self.size} rows"
                )
            rows = rows.nonzero().flatten()
        rows = rows.long()
        order = rows.tolist()
        selected = type(self)()
        for key, value in self.data.items():
            if isinstance(value, torch.Tensor) and value.ndim:
                selected[key] = value[rows.to(value.device)]
            else:
                selected[key] = [value[i] for i in order] if isinstance(value, list) else value
        return selected

    def slice(self, start: int, end: int) -> SlicedDataDict:
        """Return rows start … end − 1, or fewer if the batch ends before; tensors are views of this batch's tensors."""
        return SlicedDataDict({k: v[start:end] if _is_batched(v) else v for k, v in self.data.items()})

    def get_batch(self, batch_idx: int, batch_size: int | None = None) -> SlicedDataDict:
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

    def chunk(self, rank: int, chunks: int) -> SlicedDataDict:
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

    # ------------------------------------------------------------ shards

    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        dynamic_batching_args: DynamicBatchingArgs | None = None,
        sequence_packing_args: SequencePackingArgs | None = None,
    ) -> list[SlicedDataDict] | tuple[list[SlicedDataDict], list[int]]:
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
            return [SlicedDataDict(self.select_indices(rows).data) for rows in parts]
        lengths = torch.as_tensor(self.data[arguments.get("input_lengths_key", "input_lengths")]).tolist()
        plans = [
            plan_microbatches(lengths, batch, shards, dynamic_batching_args, sequence_packing_args) for batch in batches
        ]
        made = [self._planned_shard([plan[i] for plan in plans]) for i in range(shards)]
        order = [row for i in range(shards) for plan in plans for microbatch in plan[i].rows for row in microbatch]
        return made, order

    def _planned_shard(self, batches: list[MicrobatchPlan]) -> SlicedDataDict:
        rows = [row for batch in batches for microbatch in batch.rows for row in microbatch]
        shard = SlicedDataDict(self.select_indices(rows).data)
        shard.micro_batch_indices = [batch.boundaries for batch in batches]
        shard.micro_batch_lengths = [batch.lengths for batch in batches]
        shard.elem_counts_per_gb = [sum(map(len, batch.rows)) for batch in batches]
        return shard

    def all_gather(self, group: ProcessGroup | None) -> Self:
        """Return the rows of all ranks of `group`, in rank order; ranks may have different numbers of rows. Collective.

        Raises:
            ContractError: the ranks have different entries, or an entry differs in a dimension other than the first.
                Raised on every rank.
        """
        if group_size(group) == 1:
            return type(self)(self.data)
        described = gather_objects({key: _describe(value) for key, value in self.data.items()}, group)
        entries = [{key: kind for key, (kind, _) in one.items()} for one in described]
        if any(one != entries[0] for one in entries):
            raise ContractError(
                f"all_gather: all ranks must have the same entries. The entries of the ranks, in rank order: {entries}"
            )
        gathered = type(self)()
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
        return gathered

    # ------------------------------------------------------------ microbatches

    def make_microbatch_iterator(self, microbatch_size: int) -> Iterator[SlicedDataDict]:
        """Yield the rows in microbatches of `microbatch_size`.

        Raises:
            ContractError: `microbatch_size` does not divide the number of rows.
        """
        if self.size % microbatch_size:
            raise ContractError(
                f"Data dict size ({self.size}) is not a multiple of the provided microbatch size ({microbatch_size})"
            )
        return (self.slice(i, i + microbatch_size) for i in range(0, self.size, microbatch_size))

    def make_microbatch_iterator_for_packable_sequences(self) -> Iterator[SlicedDataDict]:
        """Yield the rows of each pack of a shard made with `sequence_packing_args`.

        Raises:
            ContractError: the shard was made without these arguments.
        """
        return (self.slice(start, end) for start, end, _ in self._planned())

    def get_microbatch_iterator_for_packable_sequences_len(self) -> tuple[int, int]:
        """Return the number of packs, and the number of padded tokens in the longest pack."""
        lengths = [length for _, _, length in self._planned()]
        return len(lengths), max(lengths)

    def make_microbatch_iterator_with_dynamic_shapes(self, sequence_dim: int = 1) -> Iterator[SlicedDataDict]:
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

    # ------------------------------------------------------------ tensors

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

    @classmethod
    def from_batches(
        cls, batches: Sequence[Mapping[str, Any]], pad_value_dict: Mapping[str, float] | None = None
    ) -> Self:
        """Concatenate the rows of all batches. Rows of shorter batches are padded at the end of dimension 1.

        Args:
            pad_value_dict: padding value by entry; entries that are not listed are padded with 0.

        Raises:
            ContractError: the batches have different entries.
        """
        if len({tuple(sorted(batch)) for batch in batches}) > 1:
            raise ContractError(
                f"all batches must have the same entries, but they have {[sorted(batch) for batch in batches]}"
            )
        joined = cls()
        for key in batches[0] if batches else ():
            values = [batch[key] for batch in batches]
            if isinstance(values[0], torch.Tensor) and values[0].ndim:
                joined[key] = _concatenated(values, (pad_value_dict or {}).get(key, 0))
            else:
                joined[key] = [item for value in values for item in value] if _is_batched(values[0]) else values[0]
        return joined


class SlicedDataDict(BatchedDataDict):
    """A batch that is a slice or a shard of a larger batch."""


def _is_batched(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, torch.Tensor) and value.ndim > 0)


def _describe(value: Any) -> tuple[Any, int]:
    """Return the properties of an entry's `value` that all ranks must have in common, and its number of rows."""
    if isinstance(value, torch.Tensor) and value.ndim:
        return (str(value.dtype), tuple(value.shape[1:])), len(value)
    return type(value).__name__, len(value) if isinstance(value, list) else 0


def _concatenated(values: Sequence[torch.Tensor], padding: float) -> torch.Tensor:
    if values[0].ndim < 2:
        return torch.cat(list(values))
    width = max(value.shape[1] for value in values)
    after = [0, 0] * (values[0].ndim - 2)  # F.pad counts dimensions from the last
    return torch.cat([F.pad(value, (*after, 0, width - value.shape[1]), value=padding) for value in values])


ReduceOp = torch.distributed.ReduceOp


@dataclass(frozen=True)
class BatchShare:
    """The rows of a global batch that this replica has. The methods are collective over the replicas.

    indices: for each of the replica's rows, its index in the global batch.
    total: number of rows of the global batch.
    replicas: dimension of parallelism over which the rows are divided. Its size is 1 if every rank has all rows.
    """

    indices: Sequence[int]
    total: int
    replicas: ParallelDimension = field(default_factory=ParallelDimension)

    @classmethod
    def whole(cls, total: int) -> BatchShare:
        """Return this rank's share of a batch if every rank has all `total` rows."""
        return cls(range(total), total)

    @classmethod
    def concatenated(cls, count: int, replicas: ParallelDimension) -> BatchShare:
        """Return this replica's share of a global batch. The global batch is the concatenation of all replicas' rows.

        Args:
            count: number of rows of this replica.
        """
        counts = torch.zeros(replicas.size, dtype=torch.float64)
        counts[replicas.rank] = count
        *before, total = accumulate(map(int, reduced(counts, replicas).tolist()), initial=0)
        first = before[replicas.rank]
        return cls(range(first, first + count), total, replicas)

    def sum(self, *values: float) -> list[float]:
        """Return the sum of each of the `values` over the replicas, computed in fp64."""
        return self._reduce(values, ReduceOp.SUM)

    def max(self, *values: float) -> list[float]:
        """Return the maximum of each of the `values` over the replicas."""
        return self._reduce(values, ReduceOp.MAX)

    def most_packs(self, batching: Any, packs: int, width: int) -> tuple[int, int]:
        """Return the maxima of `packs` (number of packs) and `width` (width of the widest pack) over the replicas."""
        most, widest = self.max(packs, width)
        return int(most), int(widest)

    def min_max(self, values: Shaped[Tensor, "*any"]) -> tuple[float, float]:
        """Return the minimum and the maximum of `values` over all replicas; a replica may have no values."""
        own = (-math.inf, -math.inf) if not values.numel() else (-float(values.amin()), float(values.amax()))
        low, high = self.max(*own)
        return -low, high

    def select(self, values: Shaped[Tensor, total * rest]) -> Shaped[Tensor, own * rest]:
        """Return this replica's rows of `values`; `values` has all rows of the global batch."""
        return values[list(self.indices)]

    def gather(self, own: Float[Tensor, " own"]) -> Float[Tensor, " total"]:
        """Gather a value per row from all replicas; return [total] in the order of the global batch, fp64, on the host.

        Args:
            own: the values of this replica's rows. The values of rows with the same index are added.
        """
        values = torch.zeros(self.total, dtype=torch.float64)
        values.index_add_(0, torch.tensor(list(self.indices), dtype=torch.long), own.double().cpu())
        return reduced(values, self.replicas)

    def _reduce(self, values: Sequence[float], op: Any) -> list[float]:
        values_of_all: list[float] = reduced(torch.tensor(values, dtype=torch.float64), self.replicas, op).tolist()
        return values_of_all


def reduced(values: Tensor, replicas: ParallelDimension, op: Any = ReduceOp.SUM) -> Tensor:
    """Return the sum (or the reduction by `op`) of `values` over the replicas; argument and result are on the host."""
    if replicas.size == 1:
        return values
    return all_reduce(values.to(platform.device()), replicas.group, op).cpu()


class LocalBatch(BatchedDataDict[DictT]):
    """The rows of a global batch that this replica has. All ranks of a replica have the same rows; there may be none.

    If a policy trains on a `LocalBatch`, it learns from the rows of all replicas, as if every rank had the whole global
    batch. If it scores a `LocalBatch`, each replica scores only its own rows.

    plans: the plans of microbatches made so far, by planner. Scoring and training with the same planner use the same
        plan.
    """

    def __init__(self, entries: Mapping[str, Any], share: BatchShare, plans: dict[Any, Any] | None = None) -> None:
        super().__init__(entries)
        self.share, self.plans = share, {} if plans is None else plans
        if self.data and self.size != len(share.indices):
            raise ContractError(f"the batch has {self.size} rows, but `share` has {len(share.indices)} row indices")

    def with_entries(self, entries: Mapping[str, Any]) -> Self:
        return type(self)(entries, self.share, self.plans)

    def all_rows(self, *keys: str, lists: Sequence[str] = ()) -> BatchedDataDict[Any]:
        """Gather the tensors `keys` from all replicas; return all rows in the order of the global batch. Collective.

        Args:
            lists: keys of lists of small, picklable values, which replicas may lack. One that all lack is left out.
        """
        replicas, width = self.share.replicas, int(self.share.max(self["input_ids"].shape[1])[0])
        indices = gather_rows(torch.tensor(list(self.share.indices), dtype=torch.long), replicas)
        whole: BatchedDataDict[Any] = BatchedDataDict()
        order = indices.argsort()
        for key in keys:
            rows = self[key]
            padded = F.pad(rows, (0, width - rows.shape[1])) if rows.ndim > 1 else rows
            whole[key] = gather_rows(padded, replicas)[order]
        for key in lists:
            if int(self.share.max(int(key in self))[0]):
                own = self.get(key, [None] * self.size)
                held = [row for of_replica in gather_objects_along(own, replicas) for row in of_replica]
                whole[key] = [held[place] for place in order.tolist()]
        return whole

    def select_indices(self, indices: Sequence[int] | Tensor) -> Any:
        """Return the rows `indices` as an ordinary `BatchedDataDict`, not as a `LocalBatch`."""
        return BatchedDataDict(self.data).select_indices(indices)


def batch_share(data: BatchedDataDict[Any]) -> BatchShare:
    """Return which rows of a global batch `data` has: a part if it is a `LocalBatch`, otherwise all."""
    return data.share if isinstance(data, LocalBatch) else BatchShare.whole(data.size)
