"""What data-parallel replicas tell each other: their first ranks among themselves, and each then its replica."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch

from mcore_rl import platform
from mcore_rl.distributed.collectives import gather_along
from mcore_rl.distributed.topology import ParallelDimension, Topology

T = TypeVar("T")


def share_in_replica(value: Any, topology: Topology) -> Any:
    """The `value` (picklable) of a replica's first rank, on all of the replica's ranks. Collective."""
    pipeline, context, tensor = topology.pipeline, topology.context, topology.tensor
    if tensor.rank == context.rank == 0:
        value = _broadcast(value, pipeline)
    if tensor.rank == 0:
        value = _broadcast(value, context)
    return _broadcast(value, tensor)


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


def exchange(own: Mapping[int, T], wanted: Sequence[Sequence[int]], topology: Topology) -> list[T]:
    """The items that this replica wants, in its order, from those that have them. Collective over first ranks.

    Args:
        own: by number, what the first rank of each replica has.
        wanted: by replica, the numbers of what it gets; the same on all of them.
    """
    parts = [{number: own[number] for number in numbers if number in own} for numbers in wanted]
    found = {number: item for part in _all_to_all(parts, topology.data) for number, item in part.items()}
    return [found[number] for number in wanted[topology.data.rank]]


def _broadcast(value: Any, dimension: ParallelDimension) -> Any:
    if dimension.size == 1:
        return value
    box = [value]
    first = torch.distributed.get_global_rank(dimension.group, 0)  # type: ignore[arg-type]
    torch.distributed.broadcast_object_list(box, src=first, group=dimension.group)
    return box[0]


def _all_to_all(parts: Sequence[T], dimension: ParallelDimension) -> list[T]:
    """Part r goes to rank r of the dimension; what was meant for this rank, from each of them."""
    if dimension.size == 1:
        return list(parts)
    packed = [pickle.dumps(part, pickle.HIGHEST_PROTOCOL) for part in parts]
    device = platform.device()
    sizes = torch.tensor([len(part) for part in packed], device=device)
    coming = torch.empty_like(sizes)
    torch.distributed.all_to_all_single(coming, sizes, group=dimension.group)
    counts = coming.tolist()
    sent = torch.frombuffer(bytearray(b"".join(packed)), dtype=torch.uint8).to(device)
    received = sent.new_empty(sum(counts))
    torch.distributed.all_to_all_single(
        received, sent, output_split_sizes=counts, input_split_sizes=sizes.tolist(), group=dimension.group
    )
    stream = io.BytesIO(received.cpu().numpy().tobytes())
    return [pickle.loads(stream.read(count)) for count in counts]
