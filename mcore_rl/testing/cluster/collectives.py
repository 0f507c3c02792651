"""Collectives between all ranks: their values, and their bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_rl import platform

SMALL_BYTES = 64 * 2**10
LARGE_BYTES = {"cuda": 256 * 2**20, "cpu": 16 * 2**20}
WARM_UP, REPETITIONS = 2, 5


class Collective(NamedTuple):
    """A collective of all ranks, whose tensors have n numbers, or n / ranks if they are shares.

    call: function of (input, output) that runs the collective. The input of a rank is its `pattern`.
    expected: function of (rank, ranks, n) that returns the output of a rank.
    traffic: function of (ranks) that returns the bytes which a rank's link must carry in one direction, relative to
        the size of the n numbers.
    is_in_place: whether the output must contain the input before the call.
    takes_share: whether the input is a share.
    """

    call: Callable[[Tensor, Tensor], Any]
    expected: Callable[[int, int, int], Tensor]
    traffic: Callable[[int], float]
    is_in_place: bool = False
    takes_share: bool = False


def pattern(rank: int, count: int) -> Tensor:
    """Return `count` float32 numbers [count] that depend on the rank, and whose sums over ranks have no rounding."""
    return (torch.arange(count) % 251 + 3 * rank).float()


def _total(rank: int, ranks: int, count: int) -> Tensor:
    """Return the sum of the patterns of all ranks, [count]."""
    return ranks * pattern(0, count) + 3 * (ranks * (ranks - 1) // 2)


def _pass_on(x: Tensor, y: Tensor) -> None:
    """Send `x` to the next rank, and receive `y` from the previous one."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks == 1:
        y.copy_(x)
        return
    operations = [dist.P2POp(dist.isend, x, (rank + 1) % ranks), dist.P2POp(dist.irecv, y, (rank - 1) % ranks)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _of_all(ranks: int) -> float:
    return (ranks - 1) / ranks


def _of_one(ranks: int) -> float:
    return float(ranks > 1)


COLLECTIVES = {
    "all-reduce": Collective(lambda x, y: dist.all_reduce(y), _total, lambda n: 2 * _of_all(n), is_in_place=True),
    "all-gather": Collective(
        lambda x, y: dist.all_gather_into_tensor(y, x),
        lambda rank, ranks, n: torch.cat([pattern(source, n // ranks) for source in range(ranks)]),
        _of_all,
        takes_share=True,
    ),
    "reduce-scatter": Collective(
        lambda x, y: dist.reduce_scatter_tensor(y, x),
        lambda rank, ranks, n: _total(rank, ranks, n).chunk(ranks)[rank],
        _of_all,
    ),
    "all-to-all": Collective(
        lambda x, y: dist.all_to_all_single(y, x),
        lambda rank, ranks, n: torch.cat([pattern(source, n).chunk(ranks)[rank] for source in range(ranks)]),
        _of_all,
    ),
    "broadcast": Collective(
        lambda x, y: dist.broadcast(y, 0), lambda rank, ranks, n: pattern(0, n), _of_one, is_in_place=True
    ),
    "send and receive": Collective(_pass_on, lambda rank, ranks, n: pattern((rank - 1) % ranks, n), _of_one),
}


def check_collective(name: str, size: int) -> tuple[bool, float]:
    """Run a collective of the default group on `size` bytes of float32 numbers.

    Returns:
        Whether the output of every call has the right values on all ranks, and the median seconds of a call on the
        slowest rank.
    """
    collective, rank, ranks = COLLECTIVES[name], dist.get_rank(), dist.get_world_size()
    share = max(size // 4 // ranks, 1)
    x = pattern(rank, share if collective.takes_share else share * ranks).to(platform.device())
    expected = collective.expected(rank, ranks, share * ranks).to(platform.device())
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

    A row has `collective`, `bytes`, `right`, `seconds` and `gb_per_second`, a link's bandwidth as in nccl-tests.
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
