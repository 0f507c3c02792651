"""Units of known cost into bins, and bins onto ranks: pure functions of the costs."""

from __future__ import annotations

from collections.abc import Sequence

from mcore_rl.errors import ContractError

Bin = list[int]
"""Indices of the units in it."""


def first_fit_decreasing(cost: Sequence[int], capacity: int) -> list[Bin]:
    """Bins of at most `capacity`, the costliest units first.

    Raises:
        ContractError: a unit that fits no bin.
    """
    bins: list[Bin] = []
    free: list[int] = []
    for unit in sorted(range(len(cost)), key=lambda unit: -cost[unit]):
        if cost[unit] > capacity:
            raise ContractError(f"a record of {cost[unit]} padded tokens does not fit a pack of {capacity}")
        index = next((i for i, room in enumerate(free) if room >= cost[unit]), len(bins))
        if index == len(bins):
            bins.append([])
            free.append(capacity)
        bins[index].append(unit)
        free[index] -= cost[unit]
    return bins


def split_until_divisible(bins: list[Bin], cost: Sequence[int], count: int) -> None:
    """Split the fullest bins until their number divides by `count`; empty ones are the last resort."""
    while len(bins) % count:
        fullest = max((box for box in bins if len(box) > 1), key=lambda box: sum(cost[u] for u in box), default=None)
        if fullest is None:
            bins.append([])
            continue
        bins.remove(fullest)
        halves: tuple[Bin, Bin] = ([], [])
        for unit in sorted(fullest, key=lambda unit: -cost[unit]):
            min(halves, key=lambda half: sum(cost[u] for u in half)).append(unit)
        bins.extend(halves)


def assign(bins: list[Bin], cost: Sequence[int], count: int) -> list[list[Bin]]:
    """Largest first, each to the least loaded rank that still has room for a bin; as many bins on each rank."""
    ranks: list[list[Bin]] = [[] for _ in range(count)]
    loads = [0] * count
    for box in sorted(bins, key=lambda box: -sum(cost[u] for u in box)):
        open_ranks = (rank for rank in range(count) if len(ranks[rank]) < len(bins) // count)
        rank = min(open_ranks, key=lambda rank: loads[rank])
        ranks[rank].append(box)
        loads[rank] += sum(cost[u] for u in box)
    return ranks
