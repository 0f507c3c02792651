"""Batches: dictionaries of tensors and lists with one entry per row.

A batch has all rows of a global batch, or only the rows of one replica.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Generic, Self, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor

from mcore_rl import platform
from mcore_rl.compat.nemo_rl.batches import DynamicBatchingArgs as DynamicBatchingArgs  # at NeMo RL's import path
from mcore_rl.compat.nemo_rl.batches import PortedBatch
from mcore_rl.compat.nemo_rl.batches import SequencePackingArgs as SequencePackingArgs
from mcore_rl.distributed.collectives import all_reduce, gather_objects_along, gather_rows
from mcore_rl.distributed.topology import ParallelDimension
from mcore_rl.errors import ContractError

DictT = TypeVar("DictT")


class BatchedDataDict(PortedBatch, Generic[DictT]):
    """A batch of B rows: a dictionary of tensors [B, …] and lists of length B.

    Values of other types do not belong to rows: every slice of the batch has the same value. `PortedBatch`
    adds methods that only code written for NeMo RL calls.
    """

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

    def with_entries(self, entries: Mapping[str, Any]) -> Self:
        """Return a batch of the same kind with these entries instead of its own; the rows stay the same."""
        return type(self)(entries)

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
