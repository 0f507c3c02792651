"""The position of this process in the parallel layout, as one frozen object."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class ParallelDimension:
    """A dimension of parallelism, as this process sees it. `group` is None if no process group was created (size 1)."""

    rank: int = 0
    size: int = 1
    group: ProcessGroup | None = None

    @classmethod
    def of(cls, group: ProcessGroup) -> ParallelDimension:
        return cls(torch.distributed.get_rank(group), torch.distributed.get_world_size(group), group)

    def part_of(self, items: range) -> range:
        """Divide `items` evenly among the ranks; return this rank's consecutive items. There may be none."""
        first, end = (len(items) * rank // self.size for rank in (self.rank, self.rank + 1))
        return items[first:end]


@dataclass(frozen=True)
class Topology:
    """This process's rank in each dimension of parallelism, with the dimension's size and process group."""

    tensor: ParallelDimension = ParallelDimension()
    pipeline: ParallelDimension = ParallelDimension()
    context: ParallelDimension = ParallelDimension()
    data: ParallelDimension = ParallelDimension()
    sequence_parallel: bool = False
    expert: ParallelDimension = ParallelDimension()
    """Ranks over which a layer's experts are distributed. Other weights use these ranks for data, context or tensor
    parallelism."""
    expert_tensor: ParallelDimension = ParallelDimension()
    """Ranks over which the weights of each expert are sharded."""
    expert_data: ParallelDimension = ParallelDimension()
    """Ranks that hold the same weights of the same experts."""

    @property
    def is_first_stage(self) -> bool:
        return self.pipeline.rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline.rank == self.pipeline.size - 1

    @property
    def leads_replica(self) -> bool:
        """Whether this is the first rank of its data-parallel replica."""
        return self.tensor.rank == self.pipeline.rank == self.context.rank == 0
