"""Process groups of a layout, without a model."""

from __future__ import annotations

import torch.distributed as dist

from mcore_rl.distributed.topology import ParallelDimension, Topology


def grid(width: int = 1) -> Topology:
    """Return the processes of the run as replicas of `width` tensor-parallel ranks. Collective."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def dimension(members: list[list[int]]) -> ParallelDimension:
        groups = [dist.new_group(ranks) for ranks in members]
        return next(ParallelDimension.of(g) for g, ranks in zip(groups, members, strict=True) if rank in ranks)

    return Topology(
        tensor=dimension([list(range(first, first + width)) for first in range(0, size, width)]),
        data=dimension([list(range(first, size, width)) for first in range(width)]),
    )
