"""Advantages against the formulas, number by number."""

import statistics

import pytest
import torch

from mcore_rl.algorithms.advantages import EPSILON, ESTIMATORS, has_signal

REWARDS = [[1.0, 0.0, 0.5, 2.0], [3.0, 3.0, 3.0, 3.0], [-1.0, 4.0, 0.0, 0.0]]
EVERYTHING = [r for group in REWARDS for r in group]


def others(group, i):
    return statistics.mean(group[:i] + group[i + 1 :])


FORMULAS = {
    "grpo": lambda g, i: (g[i] - statistics.mean(g)) / (statistics.stdev(g) + EPSILON),
    "dr_grpo": lambda g, i: g[i] - statistics.mean(g),
    "rloo": lambda g, i: g[i] - others(g, i),
    "reinforce_plus_plus": lambda g, i: (g[i] - statistics.mean(EVERYTHING)) / (statistics.stdev(EVERYTHING) + EPSILON),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators(name):
    expected = [[FORMULAS[name](group, i) for i in range(4)] for group in REWARDS]
    torch.testing.assert_close(ESTIMATORS[name](torch.tensor(REWARDS)), torch.tensor(expected))


def test_signal():
    assert has_signal(torch.tensor(REWARDS)).tolist() == [True, False, True]
    assert not ESTIMATORS["grpo"](torch.ones(2, 3)).any()
