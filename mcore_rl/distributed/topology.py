"""The position of this process in the parallel layout: one frozen object, resolved once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class ParallelDimension:
    """A dimension of parallelism. `group` is None when it was never built (size 1)."""

    rank: int = 0
    size: int = 1
    group: ProcessGroup | None = None

    @classmethod
    def of(cls, group: ProcessGroup) -> ParallelDimension:
        return cls(torch.distributed.get_rank(group), torch.distributed.get_world_size(group), group)

    def part_of(self, items: range) -> range:
        """This rank's of even parts, one a rank, of neighbours; there may be none in it."""
        first, end = (len(items) * rank // self.size for rank in (self.rank, self.rank + 1))
        return items[first:end]


@dataclass(frozen=True)
class Topology:
    """Ranks, sizes and groups of this process."""

    tensor: ParallelDimension = ParallelDimension()
    pipeline: ParallelDimension = ParallelDimension()
    context: ParallelDimension = ParallelDimension()
    data: ParallelDimension = ParallelDimension()
    sequence_parallel: bool = False
    expert: ParallelDimension = ParallelDimension()
    """Ranks that share out the experts of a layer; they are taken from data, context and tensor parallelism."""
    expert_tensor: ParallelDimension = ParallelDimension()
    """Ranks that share out the weights of each expert."""
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
