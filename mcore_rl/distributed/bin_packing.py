"""Bin packing of sequences into microbatches, and of microbatches onto ranks, with the same result on every rank.

A unit is a sequence, or a group of sequences that must stay together. It has a size (tokens) and a cost (work). A bin's
capacity limits the sum of its units' sizes. The cost is divided evenly among the ranks.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence

from mcore_rl.errors import ContractError

Bin = list[int]
"""Indices of the units in a bin."""


def pack(size: Sequence[int], cost: Sequence[float], capacity: int, count: int, multiple: int = 1) -> list[list[Bin]]:
    """Pack units into as few bins as possible, and divide the bins among `count` ranks; return each rank's bins.

    Every rank gets the same number of bins, a multiple of `multiple`, and an even share of the cost.

    Where possible, all bins get a similar cost, so that no bin contains only the last few units. Bins are empty only
    if there are fewer units than bins.

    Raises:
        ContractError: a unit does not fit a bin.
    """
    bins = best_fit_decreasing(size, capacity)
    step = count * multiple
    wanted = -(-len(bins) // step) * step
    spread = spread_by_cost(size, cost, capacity, wanted) if wanted <= len(size) else None
    if spread is None:
        split_until_divisible(bins, cost, step)
    return assign(bins if spread is None else spread, cost, count)


def best_fit_decreasing(size: Sequence[int], capacity: int) -> list[Bin]:
    """Return bins of at most `capacity`: place the largest units first, each into the fullest bin that has room.

    Raises:
        ContractError: a unit does not fit a bin.
    """
    bins: list[Bin] = []
    free: list[tuple[int, int]] = []  # (room, bin), ascending
    for unit in sorted(range(len(size)), key=lambda unit: -size[unit]):
        if size[unit] > capacity:
            raise ContractError(f"a record of {size[unit]} padded tokens does not fit a pack of {capacity} tokens")
        place = bisect.bisect_left(free, (size[unit], -1))
        if place == len(free):
            bins.append([])
            room, box = capacity, len(bins) - 1
        else:
            room, box = free.pop(place)
        bins[box].append(unit)
        bisect.insort(free, (room - size[unit], box))
    return bins


def spread_by_cost(size: Sequence[int], cost: Sequence[float], capacity: int, count: int) -> list[Bin] | None:
    """Distribute units over `count` bins: each unit, costliest first, goes into the cheapest bin with room.

    Return None if a unit fits no bin.
    """
    bins: list[Bin] = [[] for _ in range(count)]
    heap = [(0.0, box, capacity) for box in range(count)]
    too_full: list[tuple[int, float, int]] = []  # (room, load, bin), ascending; returned to the heap for smaller units
    for unit in sorted(range(len(size)), key=lambda unit: -cost[unit]):
        while too_full and too_full[-1][0] >= size[unit]:
            room, load, box = too_full.pop()
            heapq.heappush(heap, (load, box, room))
        while heap and heap[0][2] < size[unit]:
            load, box, room = heapq.heappop(heap)
            bisect.insort(too_full, (room, load, box))
        if not heap:
            return None
        load, box, room = heap[0]
        bins[box].append(unit)
        heapq.heapreplace(heap, (load + cost[unit], box, room - size[unit]))
    return bins


def split_until_divisible(bins: list[Bin], cost: Sequence[float], count: int) -> None:
    """Split the costliest bins, in place, until `count` divides the number of bins.

    Empty bins are added only if no bin can be split any more.
    """
    held, number = dict(enumerate(bins)), len(bins)
    heap = [(-sum(cost[u] for u in box), i) for i, box in held.items() if len(box) > 1]
    heapq.heapify(heap)
    while len(held) % count and heap:
        _, costliest = heapq.heappop(heap)
        halves: tuple[Bin, Bin] = ([], [])
        loads: list[float] = [0, 0]
        for unit in sorted(held.pop(costliest), key=lambda unit: -cost[unit]):
            lighter = int(loads[1] < loads[0])
            halves[lighter].append(unit)
            loads[lighter] += cost[unit]
        for half, load in zip(halves, loads, strict=True):
            held[number] = half
            if len(half) > 1:
                heapq.heappush(heap, (-load, number))
            number += 1
    bins[:] = [*held.values(), *([] for _ in range(-len(held) % count))]


def assign(bins: list[Bin], cost: Sequence[float], count: int) -> list[list[Bin]]:
    """Assign the same number of bins to each of `count` ranks, so that all ranks have a similar cost.

    This is balanced largest differencing: Karmarkar–Karp with parts of equal cardinality (Tsai, Asymptotic analysis of
    an algorithm for balanced parallel processor scheduling, 1992). The bins are sorted by cost, costliest first. Every
    group of `count` consecutive bins makes a partial solution of `count` parts, with one bin in each part. Then the two
    most uneven solutions are joined: the heaviest part of one with the lightest part of the other, and so on. Such
    joins are repeated until a single solution remains; each of its parts goes to one rank.
    """
    order = sorted(range(len(bins)), key=lambda i: -sum(cost[u] for u in bins[i]))
    loads = [sum(cost[u] for u in box) for box in bins]
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for number, start in enumerate(range(0, len(order), count)):
        parts = [(loads[i], [i]) for i in order[start : start + count]]
        heapq.heappush(heap, (parts[-1][0] - parts[0][0], number, parts))
    number = len(bins)
    while len(heap) > 1:
        (_, _, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        joined = [(a + b, mine + theirs) for (a, mine), (b, theirs) in zip(one, reversed(other), strict=True)]
        joined.sort(key=lambda part: -part[0])
        number += 1
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], number, joined))
    return [[bins[i] for i in sorted(part)] for _, part in heap[0][2]] if heap else [[] for _ in range(count)]
