"""Several tokenized sources as one, of which each has its share of a run's samples."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np

from mcore_rl.data.sample_order import PERIOD, MixedOrder, quotas_of
from mcore_rl.data.token_store import TokenStore
from mcore_rl.data.tokenize import TokenSequence
from mcore_rl.errors import UserError


class MixedStore(TokenStore):
    """The units of several stores, one store after the other.

    Args:
        stores: by the names of their sources.
        weights: of each source's samples, in proportion.

    Raises:
        UserError: a source is empty, or its share of the samples rounds to nothing.
    """

    def __init__(self, stores: Mapping[str, TokenStore], weights: Mapping[str, float]) -> None:
        self._stores: Sequence[TokenStore] = list(stores.values())
        self.quotas = quotas_of([weights[name] for name in stores])
        for (name, store), quota in zip(stores.items(), self.quotas, strict=True):
            if not len(store):
                raise UserError(f"data.train: no record of {name} is left, which has a weight; leave it out")
            if not quota:
                raise UserError(f"data.train: the weight of {name} is less than a sample in {PERIOD:,}; leave it out")
        self._names, self._ends = list(stores), list(accumulate(map(len, self._stores)))
        digest = hashlib.sha256(
            repr([(s.fingerprint, q) for s, q in zip(self._stores, self.quotas, strict=True)]).encode()
        )
        counts: Counter[str] = sum((store.counts for store in self._stores), Counter())
        meta = {"fingerprint": digest.hexdigest(), "counts": dict(counts)}
        super().__init__({}, {**meta, "sequences_per_unit": self._stores[0].meta["sequences_per_unit"]})

    @property
    def num_tokens(self) -> int:
        return sum(store.num_tokens for store in self._stores)

    @property
    def shares(self) -> dict[str, float]:
        return {name: quota / PERIOD for name, quota in zip(self._names, self.quotas, strict=True)}

    def order(self, seed: int) -> MixedOrder:
        return MixedOrder(tuple(map(len, self._stores)), tuple(self.quotas), seed)

    def lengths(self) -> np.ndarray:
        return np.concatenate([store.lengths() for store in self._stores])

    def lengths_of(self, unit: int) -> list[int]:
        store, own = self._place(unit)
        return store.lengths_of(own)

    def extra(self, index: int) -> bytes:
        store, own = self._place(index)
        return store.extra(own)

    def __len__(self) -> int:
        return self._ends[-1]

    def _sequence(self, index: int) -> TokenSequence:
        store, own = self._place(index // self._rows)
        return store._sequence(own * self._rows + index % self._rows)

    def _place(self, index: int) -> tuple[TokenStore, int]:
        """The store that has a unit, and the unit's number there."""
        number = bisect_right(self._ends, index)
        store = self._stores[number]
        return store, index - (self._ends[number] - len(store))
