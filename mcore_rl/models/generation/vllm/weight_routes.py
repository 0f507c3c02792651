"""Routes of weights from the trainer's ranks to the processes of vLLM's servers.

A process reads a bucket from the shared memory of a rank, if it can: on the CPU and for differences, of a rank that has
the same /dev/shm; on GPUs, of the rank on the same GPU. If that rank is not the bucket's sender, the sender passes the
bucket on to it. If a process of a server shares memory with no rank, the server receives buckets from the senders by
collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from mcore_rl.models.refit.transfer import KEPT_BLOCKS


class Route(NamedTuple):
    """The way from a rank to some processes of a server.

    rank: the rank that hands buckets to the processes.
    members: indices of the processes in their server.
    reach: ranks whose memory the processes can read; none if they receive by collectives.
    """

    rank: int
    members: tuple[int, ...]
    reach: frozenset[int] = frozenset()

    @property
    def shares(self) -> bool:
        return bool(self.reach)

    def carries(self, sender: int) -> bool:
        """Return whether buckets of rank `sender` take this route."""
        if sender in self.reach or not self.shares:
            return self.rank == sender
        return self.rank == min(self.reach)


class RankReport(NamedTuple):
    """Report of a rank to the others, before servers are connected.

    probe: see `Probe.told`.
    shipments: numbers of the shipments that the rank sends.
    free: bytes of shared memory that its host has left; None if this does not limit it.
    """

    probe: dict[str, str]
    shipments: list[int]
    free: int | None


def plan_routes(sees: Sequence[Iterable[int]], senders: Sequence[int]) -> list[Route]:
    """Return the routes to the processes of a server.

    Args:
        sees: for each process, the ranks whose memory it can read.
        senders: the ranks that send shipments.
    """
    reaches = [frozenset(ranks) for ranks in sees]
    if not all(reaches):
        return [Route(sender, tuple(range(len(reaches)))) for sender in senders]
    routes = []
    for reach in dict.fromkeys(reaches):
        members = tuple(index for index, other in enumerate(reaches) if other == reach)
        ranks = {sender for sender in senders if sender in reach}
        if len(ranks) < len(senders):
            ranks.add(min(reach))
        routes += [Route(rank, members, reach) for rank in sorted(ranks)]
    return routes


def orders_of(routes: Sequence[Route], sources: Sequence[int], processes: int) -> list[list[int]]:
    """Return, for each process of a server, the index of the route for each bucket, among the routes of the process.

    Args:
        sources: the sender of each bucket.
    """
    orders = []
    for index in range(processes):
        own = [route for route in routes if index in route.members]
        orders.append([next(n for n, route in enumerate(own) if route.carries(source)) for source in sources])
    return orders


def relays_of(routes: Mapping[str, Sequence[Route]], sender: int) -> list[int]:
    """Return the ranks to which rank `sender` passes its buckets on, in ascending order."""
    found = {route.rank for of_server in routes.values() for route in of_server if route.carries(sender)}
    return sorted(found - {sender})


def without_memory(
    sees: Mapping[str, Sequence[Sequence[int]]], reports: Sequence[RankReport], bucket_bytes: int
) -> frozenset[int]:
    """Return the ranks whose host has too little shared memory for the buckets of its routes.

    Args:
        sees: by server, see `plan_routes`.
        bucket_bytes: size of the largest bucket.
    """
    senders = [rank for rank, report in enumerate(reports) if report.shipments]
    routes = [route for of_server in sees.values() for route in plan_routes(of_server, senders) if route.shares]
    lacking = set[int]()
    for reach in {route.reach for route in routes}:
        ranks = {route.rank for route in routes if route.reach == reach}
        free = [reports[rank].free for rank in reach]
        known = [amount for amount in free if amount is not None]
        if len(known) == len(free) and min(known) < len(ranks) * KEPT_BLOCKS * bucket_bytes:
            lacking |= reach
    return frozenset(lacking)
