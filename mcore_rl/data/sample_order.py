"""The samples that a step trains on: a function of the run's position only, the same on every rank."""

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
"""Number of samples of a mixture after which each source has had exactly its share."""


class Order(Protocol):
    """The order in which a run uses the records of its dataset."""

    def indices(self, start: int, count: int) -> list[int]:
        """Return the dataset indices of samples start … start + count − 1, across epochs."""
        ...


@dataclass(frozen=True)
class SampleOrder:
    """A shuffled order with a new permutation in each epoch: a function of (seed, epoch, position) in time O(1).

    A Feistel network over the smallest even number of bits that holds the dataset enciphers a position, repeatedly
    until the result is in the dataset (Black and Rogaway, Ciphers with arbitrary finite domains, 2002). This takes at
    most 4 encipherments on average.
    """

    num_samples: int
    seed: int
    stream: int = 0
    """Number that distinguishes orders of the same size and seed: the orders of a mixture's sources."""

    def indices(self, start: int, count: int) -> list[int]:
        """Return the dataset indices of samples start … start + count − 1, across epochs."""
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
    """An order of several sources in which each has its share of the samples.

    The sequence of sources is shuffled in each period. The n-th sample of a source is the n-th sample of the source's
    own order, which is shuffled in each pass, so each pass over a source ends before the next one starts. A period's
    arrangement is computed once, in 0.2 seconds.

    Args:
        sizes: sizes of the sources, which are concatenated in the dataset.
        quotas: number of samples of each source in a period; they add up to `PERIOD`.
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
    """Return whole numbers in proportion to `weights` that sum to `PERIOD`; the largest remainders are rounded up."""
    total = sum(weights)
    exact = [weight / total * PERIOD for weight in weights]
    quotas = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: quotas[i] - exact[i])
    for i in by_remainder[: PERIOD - sum(quotas)]:
        quotas[i] += 1
    return quotas
