"""Per-sample rewards and lengths, known to all ranks; the tokens stay on the rank that generated them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from mcore_rl import platform
from mcore_rl.distributed.collectives import Acquainted, all_reduce, gather_from_replicas
from mcore_rl.distributed.topology import Topology


@dataclass(frozen=True)
class Outcome:
    """The part of a conversation that every rank knows: everything except its tokens and texts.

    The fields are those of `Rollout`; the numbers are of tokens.
    """

    prompt: int
    sample_id: int
    reward: float
    rewards: dict[str, float]
    error: str | None
    truncated: bool
    turns: int
    num_tokens: int
    response_length: int
    longest_response: int
    weight_versions: list[tuple[int, int]]

    @property
    def weight_version(self) -> int:
        """The version of the oldest weights that drew one of its tokens."""
        return min((version for version, _ in self.weight_versions), default=0)


def are_judged(outcomes: Sequence[Outcome]) -> Bool[Tensor, " samples"]:
    """False for samples that could not be judged, which have no reward."""
    return torch.tensor([outcome.error is None for outcome in outcomes], dtype=torch.bool)


NUMBERS = ("prompt", "sample_id", "reward", "truncated", "turns", "num_tokens", "response_length", "longest_response")


class Telling:
    """Tells all ranks what came of each replica's conversations, in numbers; texts go along only when there are new
    names of rewards, or errors. Every rank makes one at the same time."""

    def __init__(self, topology: Topology) -> None:
        self.topology, self._names = topology, Acquainted()

    def everyones(self, own: Mapping[int, Outcome], total: int) -> list[Outcome]:
        """All of them, by their places. Collective.

        Args:
            own: by their places, those of this rank's replica, where it is the first rank; that of others is left out.
            total: how many there are in all.
        """
        if not self.topology.leads_replica:
            own = {}
        named = self._names.gather(sorted({name for outcome in own.values() for name in outcome.rewards}))
        names = sorted({name for part in named for name in part})
        columns = [[*_numbers(outcome), *_named(outcome, names)] for outcome in own.values()]
        table = _summed(own, columns, total, len(NUMBERS) + 2 + 2 * len(names))
        versions = self._versions(own, table[:, len(NUMBERS)].long())
        errors = dict[int, str]()
        if bool(table[:, len(NUMBERS) + 1].any()):  # objects, but only where something has failed
            told = {place: outcome.error for place, outcome in own.items() if outcome.error is not None}
            errors = {place: text for part in gather_from_replicas(told, self.topology) for place, text in part.items()}
        return [_outcome(row, names, errors.get(place), versions[place]) for place, row in enumerate(table.tolist())]

    def _versions(self, own: Mapping[int, Outcome], counts: Tensor) -> list[list[tuple[int, int]]]:
        """Return a list for each conversation, which has this number of entries."""
        starts = (counts.cumsum(0) - counts).tolist()
        rows = {
            starts[place] + n: pair for place, outcome in own.items() for n, pair in enumerate(outcome.weight_versions)
        }
        pairs = _summed(rows, list(rows.values()), int(counts.sum()), 2).long()
        return [[(version, tokens) for version, tokens in part.tolist()] for part in pairs.split(counts.tolist())]


def _summed(places: Mapping[int, object], rows: Sequence[object], total: int, width: int) -> Tensor:
    """[total, width] fp64 on the host: these rows at their places, those of other ranks at theirs."""
    table = torch.zeros(total, width, dtype=torch.float64)
    if rows:
        table[list(places)] = torch.tensor(rows, dtype=torch.float64)
    return all_reduce(table.to(platform.device()), torch.distributed.group.WORLD).cpu()


def _numbers(outcome: Outcome) -> list[float]:
    numbers = [float(getattr(outcome, name)) for name in NUMBERS]
    return [*numbers, len(outcome.weight_versions), float(outcome.error is not None)]


def _named(outcome: Outcome, names: list[str]) -> list[float]:
    """Return for each name whether the sample has this reward, and the reward."""
    return [number for name in names for number in (float(name in outcome.rewards), outcome.rewards.get(name, 0.0))]


def _outcome(row: list[float], names: list[str], error: str | None, versions: list[tuple[int, int]]) -> Outcome:
    prompt, sample_id, reward, truncated, *counts = row[: len(NUMBERS)]
    named = row[len(NUMBERS) + 2 :]
    there = zip(names, named[::2], named[1::2], strict=True)
    turns, num_tokens, response_length, longest_response = map(int, counts)
    return Outcome(
        prompt=int(prompt),
        sample_id=int(sample_id),
        reward=reward,
        rewards={name: value for name, is_there, value in there if is_there},
        error=error,
        truncated=bool(truncated),
        turns=turns,
        num_tokens=num_tokens,
        response_length=response_length,
        longest_response=longest_response,
        weight_versions=versions,
    )
