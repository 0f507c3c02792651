"""Collectives between all ranks: their values, and their bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_rl import platform

SMALL_BYTES = 64 * 2**10
LARGE_BYTES = {"cuda": 256 * 2**20, "cpu": 16 * 2**20}
WARM_UP, REPETITIONS = 2, 5


@dataclass(frozen=True)
class Collective:
    """A collective of all ranks.

    inputs: function of (rank, ranks, n) that returns the input of a rank, as n numbers.
    expected: function of (rank, ranks, n) that returns the output of a rank.
    call: function of (input, output) that runs the collective.
    is_in_place: whether the output must contain the input before the call.
    traffic: function of (ranks) that returns the bytes which a rank's link must carry in one direction, relative to
        the size of the collective. The size is that of the whole tensor: the larger one of input and output.
    """

    inputs: Callable[[int, int, int], Tensor]
    expected: Callable[[int, int, int], Tensor]
    call: Callable[[Tensor, Tensor], Any]
    traffic: Callable[[int], float]
    is_in_place: bool = False


def pattern(rank: int, count: int) -> Tensor:
    """Return `count` float32 numbers [count] that depend on the rank, and whose sums over ranks have no rounding."""
    return (torch.arange(count) % 251 + 3 * rank).float()


def total(ranks: int, count: int) -> Tensor:
    """Return the sum of the patterns of all ranks, [count]."""
    return ranks * (torch.arange(count) % 251).float() + 3 * (ranks * (ranks - 1) // 2)


def _shares(rank: int, ranks: int, count: int) -> Tensor:
    """Return the patterns that a rank receives in an all-to-all: its share of every rank's pattern, [count]."""
    return torch.cat([pattern(source, count).chunk(ranks)[rank] for source in range(ranks)])


def _pass_on(x: Tensor, y: Tensor) -> None:
    """Send `x` to the next rank, and receive `y` from the previous one."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks == 1:
        y.copy_(x)
        return
    operations = [dist.P2POp(dist.isend, x, (rank + 1) % ranks), dist.P2POp(dist.irecv, y, (rank - 1) % ranks)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _part(n: int) -> float:
    return (n - 1) / n


COLLECTIVES = {
    "all-reduce": Collective(
        lambda rank, ranks, n: pattern(rank, n),
        lambda rank, ranks, n: total(ranks, n),
        lambda x, y: dist.all_reduce(y),
        lambda n: 2 * _part(n),
        is_in_place=True,
    ),
    "all-gather": Collective(
        lambda rank, ranks, n: pattern(rank, n // ranks),
        lambda rank, ranks, n: torch.cat([pattern(source, n // ranks) for source in range(ranks)]),
        lambda x, y: dist.all_gather_into_tensor(y, x),
        _part,
    ),
    "reduce-scatter": Collective(
        lambda rank, ranks, n: pattern(rank, n),
        lambda rank, ranks, n: total(ranks, n).chunk(ranks)[rank],
        lambda x, y: dist.reduce_scatter_tensor(y, x),
        _part,
    ),
    "all-to-all": Collective(
        lambda rank, ranks, n: pattern(rank, n), _shares, lambda x, y: dist.all_to_all_single(y, x), _part
    ),
    "broadcast": Collective(
        lambda rank, ranks, n: pattern(rank, n),
        lambda rank, ranks, n: pattern(0, n),
        lambda x, y: dist.broadcast(y, 0),
        lambda n: float(n > 1),
        is_in_place=True,
    ),
    "send and receive": Collective(
        lambda rank, ranks, n: pattern(rank, n),
        lambda rank, ranks, n: pattern((rank - 1) % ranks, n),
        _pass_on,
        lambda n: float(n > 1),
    ),
}


def check_collective(name: str, size: int) -> tuple[bool, float]:
    """Run a collective of the default group on `size` bytes of float32 numbers.

    Returns:
        Whether the output of every call has the right values on all ranks, and the median seconds of a call on the
        slowest rank.
    """
    collective, rank, ranks = COLLECTIVES[name], dist.get_rank(), dist.get_world_size()
    count = max(size // 4 // ranks, 1) * ranks
    x = collective.inputs(rank, ranks, count).to(platform.device())
    expected = collective.expected(rank, ranks, count).to(platform.device())
    y = torch.full_like(expected, -1.0)
    seconds, is_wrong = [], False
    for _ in range(WARM_UP + REPETITIONS):
        if collective.is_in_place:
            y.copy_(x)
        else:
            y.fill_(-1.0)  # an earlier call's right values do not count
        dist.barrier()
        platform.synchronize()
        started = time.perf_counter()
        collective.call(x, y)
        platform.synchronize()
        seconds.append(time.perf_counter() - started)
        is_wrong |= not torch.equal(y, expected)
    median = sorted(seconds[WARM_UP:])[REPETITIONS // 2]
    outcome = torch.tensor([float(is_wrong), median], device=platform.device(), dtype=torch.double)
    dist.all_reduce(outcome, op=dist.ReduceOp.MAX)
    return outcome[0].item() == 0, outcome[1].item()


def check_collectives() -> list[dict[str, Any]]:
    """Run every collective at a small and a large size; return a row for each.

    A row has `collective`, `bytes`, `right`, `seconds` and `gb_per_second`. This bandwidth of the links is, as in
    nccl-tests, the size times 2 (n − 1) / n for an all-reduce of n ranks, times (n − 1) / n for all-gather,
    reduce-scatter and all-to-all, and times 1 for a broadcast and for send and receive, divided by the seconds.
    """
    rows, ranks = [], dist.get_world_size()
    for name, collective in COLLECTIVES.items():
        for size in (SMALL_BYTES, LARGE_BYTES[platform.device().type]):
            right, seconds = check_collective(name, size)
            bandwidth = size * collective.traffic(ranks) / seconds / 1e9
            rows.append(
                {"collective": name, "bytes": size, "right": right, "seconds": seconds, "gb_per_second": bandwidth}
            )
    return rows
