"""Which samples a step trains on: a function of the run's position alone, the same on every rank."""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Protocol

ROUNDS = 8
PERIOD = 10_000
"""Samples of a mixture in which each source has exactly its share."""


class Order(Protocol):
    """The order in which a run meets the records of its dataset."""

    def indices(self, start: int, count: int) -> list[int]:
        """Dataset indices of samples start … start + count − 1, across the ends of epochs."""
        ...


@dataclass(frozen=True)
class SampleOrder:
    """Sample k of a run, shuffled anew each epoch: a function of (seed, epoch, position) alone, in time O(1).

    A position is enciphered by a Feistel network over the smallest even number of bits that holds the dataset, again
    and again until it is of the dataset (Black and Rogaway, Ciphers with arbitrary finite domains, 2002); at most 4
    times on average.
    """

    num_samples: int
    seed: int
    stream: int = 0
    """Tells orders of the same size and seed apart: those of a mixture's sources."""

    def indices(self, start: int, count: int) -> list[int]:
        """Dataset indices of samples start … start + count − 1, across the ends of epochs."""
        return [self._index(*divmod(k, self.num_samples)) for k in range(start, start + count)]

    def _index(self, epoch: int, position: int) -> int:
        half = max(1, -(-(self.num_samples - 1).bit_length() // 2))
        mask = (1 << half) - 1
        while True:
            left, right = position >> half, position & mask
            for number in range(ROUNDS):
                left, right = right, left ^ self._round(epoch, number, right) & mask
            position = left << half | right
            if position < self.num_samples:
                return position

    def _round(self, epoch: int, number: int, value: int) -> int:
        key = struct.pack("<qqqq", self.seed, epoch, number, value)
        return int.from_bytes(
            hashlib.blake2b(key, digest_size=8, salt=self.stream.to_bytes(8, "little")).digest(), "little"
        )


@dataclass(frozen=True)
class MixedOrder:
    """Sample k of a run on several sources, of which each has its share of the samples.

    Which sources a period's samples are of is shuffled anew each period. The n-th sample of a source is the n-th of an
    order of its own, which is shuffled anew whenever it begins again: so each pass over it ends before the next begins.
    A period's arrangement is computed once, in a fifth of a second.

    Args:
        sizes: of the sources, which follow one another in the dataset.
        quotas: of each in a period's samples; they add up to `PERIOD`.
    """

    sizes: Sequence[int]
    quotas: Sequence[int]
    seed: int

    def indices(self, start: int, count: int) -> list[int]:
        return [self._index(k) for k in range(start, start + count)]

    def _index(self, k: int) -> int:
        period, place = divmod(k, PERIOD)
        sources, earlier = _arrangement(tuple(self.quotas), self.seed, period)
        source = sources[place]
        order = SampleOrder(self.sizes[source], self.seed, stream=source)
        (index,) = order.indices(period * self.quotas[source] + earlier[place], 1)
        return sum(self.sizes[:source]) + index


@lru_cache(maxsize=4)
def _arrangement(quotas: tuple[int, ...], seed: int, period: int) -> tuple[list[int], list[int]]:
    """Return for each sample of a period its source, and the number of earlier samples of that source in the period."""
    ends, counts = list(accumulate(quotas)), [0] * len(quotas)
    sources, earlier = list[int](), list[int]()
    for slot in SampleOrder(PERIOD, seed).indices(period * PERIOD, PERIOD):
        source = bisect_right(ends, slot)
        sources.append(source)
        earlier.append(counts[source])
        counts[source] += 1
    return sources, earlier


def quotas_of(weights: Sequence[float]) -> list[int]:
    """Whole numbers in proportion to `weights` that add up to `PERIOD`: the largest remainders are rounded up."""
    total = sum(weights)
    exact = [weight / total * PERIOD for weight in weights]
    quotas = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: quotas[i] - exact[i])
    for i in by_remainder[: PERIOD - sum(quotas)]:
        quotas[i] += 1
    return quotas
