"""Exchange between data-parallel replicas: between their first ranks, then within each replica."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from mcore_rl import platform
from mcore_rl.distributed.collectives import gather_along
from mcore_rl.distributed.topology import ParallelDimension, Topology

T = TypeVar("T")


def share_in_replica(value: Any, topology: Topology) -> Any:
    """The `value` (picklable) of a replica's first rank, on all of the replica's ranks. Collective."""
    return _first_to_all(value, topology, _broadcast_object)


def broadcast_in_replica(values: Tensor, topology: Topology) -> Tensor:
    """Broadcast a replica's first rank's values to all of the replica's ranks, in place. Collective.

    Args:
        values: of the same shape and precision on all of them; other ranks' are written over.
    """
    if not values.numel():
        return values
    return _first_to_all(values.to(platform.device()), topology, _broadcast).to(values.device)


def share_numbers(lists: Sequence[Sequence[int]], count: int, topology: Topology) -> list[list[int]]:
    """`count` lists of whole numbers, those of a replica's first rank, on all of the replica's ranks. Collective.

    Args:
        lists: not looked at on other ranks.
    """
    sizes = torch.zeros(count, dtype=torch.long)
    if topology.leads_replica:
        sizes = torch.tensor([len(some) for some in lists], dtype=torch.long)
    sizes = broadcast_in_replica(sizes, topology)
    numbers = torch.zeros(int(sizes.sum()), dtype=torch.long)
    if topology.leads_replica:
        numbers = torch.tensor([number for some in lists for number in some], dtype=torch.long)
    return [part.tolist() for part in broadcast_in_replica(numbers, topology).split(sizes.tolist())]


def gather_from_replicas(value: T, topology: Topology) -> list[T]:
    """Each replica's `value` (small, picklable), that of its first rank, on every rank. Collective."""
    found = gather_along(value, topology.data) if topology.leads_replica else None
    gathered: list[T] = share_in_replica(found, topology)
    return gathered


def gather_on_first(own: Mapping[int, T], wanted: Sequence[int], topology: Topology) -> list[T]:
    """The items of these numbers, in this order, on the very first rank; [] on the others. Collective.

    Args:
        own: by number, what the first rank of each replica has.
    """
    if not topology.leads_replica:
        return []
    parts = [{number: own[number] for number in wanted if number in own}]
    if topology.data.size > 1:
        received: list[Any] = [None] * topology.data.size if topology.data.rank == 0 else []
        first = torch.distributed.get_global_rank(topology.data.group, 0)  # type: ignore[arg-type]
        torch.distributed.gather_object(parts[0], received or None, dst=first, group=topology.data.group)
        parts = received
    found = {number: item for part in parts for number, item in part.items()}
    return [found[number] for number in wanted] if parts else []


def _first_to_all(value: T, topology: Topology, broadcast: Callable[[T, ParallelDimension], T]) -> T:
    """`broadcast` from the first rank of a dimension to the others, along each dimension in a replica."""
    pipeline, context, tensor = topology.pipeline, topology.context, topology.tensor
    if tensor.rank == context.rank == 0:
        value = broadcast(value, pipeline)
    if tensor.rank == 0:
        value = broadcast(value, context)
    return broadcast(value, tensor)


def _broadcast(values: Tensor, dimension: ParallelDimension) -> Tensor:
    if dimension.size > 1:
        torch.distributed.broadcast(values, group=dimension.group, group_src=0)
    return values


def _broadcast_object(value: Any, dimension: ParallelDimension) -> Any:
    if dimension.size == 1:
        return value
    box = [value]
    first = torch.distributed.get_global_rank(dimension.group, 0)  # type: ignore[arg-type]
    torch.distributed.broadcast_object_list(box, src=first, group=dimension.group)
    return box[0]
