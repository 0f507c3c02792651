"""A replica's own rows of a global batch: what each data-parallel replica has, where no rank has all of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Self, TypeVar

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from mcore_rl import platform
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.distributed.collectives import all_reduce
from mcore_rl.distributed.topology import ParallelDimension
from mcore_rl.errors import ContractError

DictT = TypeVar("DictT")
ReduceOp = torch.distributed.ReduceOp


@dataclass(frozen=True)
class Share:
    """Which rows of a global batch a replica has. Its methods are collective over the replicas.

    indices: of its rows in the global batch, in the order in which it has them.
    total: rows of the global batch.
    replicas: that share the batch out; one, where every rank has all rows.
    """

    indices: Sequence[int]
    total: int
    replicas: ParallelDimension = field(default_factory=ParallelDimension)

    @classmethod
    def whole(cls, total: int) -> Share:
        """All rows, where every rank has them."""
        return cls(range(total), total)

    @classmethod
    def appended(cls, count: int, replicas: ParallelDimension) -> Share:
        """Return the share of a replica with `count` rows of a global batch that concatenates all replicas' rows."""
        counts = torch.zeros(replicas.size, dtype=torch.float64)
        counts[replicas.rank] = count
        *before, total = accumulate(map(int, reduced(counts, replicas).tolist()), initial=0)
        first = before[replicas.rank]
        return cls(range(first, first + count), total, replicas)

    def sum(self, *values: float) -> list[float]:
        """Each value's sum over the replicas, in fp64."""
        return self._reduce(values, ReduceOp.SUM)

    def max(self, *values: float) -> list[float]:
        """Each value's largest over the replicas."""
        return self._reduce(values, ReduceOp.MAX)

    def most_packs(self, batching: Any, packs: int, width: int) -> tuple[int, int]:
        """The largest number of packs, and the largest width, that a `Batching` makes of any replica's rows."""
        most, widest = self.max(packs, width)
        return int(most), int(widest)

    def extent(self, values: Shaped[Tensor, "*any"]) -> tuple[float, float]:
        """The smallest and the largest of all replicas' values, of which a replica may have none."""
        own = (-math.inf, -math.inf) if not values.numel() else (-float(values.amin()), float(values.amax()))
        low, high = self.max(*own)
        return -low, high

    def select(self, values: Shaped[Tensor, total * rest]) -> Shaped[Tensor, own * rest]:
        """The own rows of what every rank knows of all."""
        return values[list(self.indices)]

    def everyone(self, own: Float[Tensor, " own"]) -> Float[Tensor, " total"]:
        """A value of each row of the global batch, from each replica those of its own rows; fp64, on the host."""
        values = torch.zeros(self.total, dtype=torch.float64)
        values[list(self.indices)] = own.double().cpu()
        return reduced(values, self.replicas)

    def _reduce(self, values: Sequence[float], op: Any) -> list[float]:
        values_of_all: list[float] = reduced(torch.tensor(values, dtype=torch.float64), self.replicas, op).tolist()
        return values_of_all


def reduced(values: Tensor, replicas: ParallelDimension, op: Any = ReduceOp.SUM) -> Tensor:
    """`values` on the host, summed over the replicas (or by `op`)."""
    if replicas.size == 1:
        return values
    return all_reduce(values.to(platform.device()), replicas.group, op).cpu()


class OwnRows(BatchedDataDict[DictT]):
    """The rows of a global batch that this replica has; the same on all of the replica's ranks, and there may be none.

    A policy learns from the rows of all replicas together, as if every rank had all of them, and scores each
    replica's own.

    plans: of its microbatches, by how they were cut: scoring and training plan once.
    """

    def __init__(self, entries: Mapping[str, Any], share: Share, plans: dict[Any, Any] | None = None) -> None:
        super().__init__(entries)
        self.share, self.plans = share, {} if plans is None else plans
        if self.data and self.size != len(share.indices):
            raise ContractError(f"{self.size} rows for a share of {len(share.indices)}")

    def with_entries(self, entries: Mapping[str, Any]) -> Self:
        return type(self)(entries, self.share, self.plans)

    def select_indices(self, indices: Sequence[int] | Tensor) -> Any:
        """Select rows as from any batch; the selection is not a share of the global batch."""
        return BatchedDataDict(self.data).select_indices(indices)


def share_of(data: BatchedDataDict[Any]) -> Share:
    """Return the share of a global batch that `data` holds: all of it unless it is `OwnRows`."""
    return data.share if isinstance(data, OwnRows) else Share.whole(data.size)
