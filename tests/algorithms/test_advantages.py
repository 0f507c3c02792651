"""Tests of advantages against the papers' formulas, number by number, with rewards that are not exact in fp32."""

import itertools
import statistics

import pytest
import torch
from pydantic import ValidationError

from mcore_rl.algorithms.advantages import advantages_of, group_advantages, reinforce_plus_plus_advantages
from mcore_rl.config import GRPOAlgorithmConfig
from mcore_rl.rollouts.samples import has_signal

REWARDS = [[1.1, 0.3, 0.7, 2.3], [0.1, 0.1, 0.1, 0.1], [-1.7, 4.1, 0.3, 0.3], [0.7, 0.7, 0.7, 0.1]]


def others(group, i):
    return group[:i] + group[i + 1 :]


def deviation(values, population):
    return statistics.pstdev(values) if population else statistics.stdev(values)


@pytest.mark.parametrize(
    ("leave_one_out", "normalize", "population"), itertools.product([False, True], [False, True], [False, True])
)
def test_group_advantages(leave_one_out, normalize, population):
    expected = []
    for group in REWARDS:
        row = []
        for i, reward in enumerate(group):
            compared = others(group, i) if leave_one_out else group
            advantage = 0.0 if len(set(group)) == 1 else reward - statistics.mean(compared)
            if normalize and len(set(compared)) > 1:
                advantage /= deviation(compared, population) + 0.01
            row.append(advantage)
        expected.append(row)
    ours = group_advantages(torch.tensor(REWARDS, dtype=torch.float64), leave_one_out, normalize, population, 0.01)
    torch.testing.assert_close(ours, torch.tensor(expected, dtype=torch.float64))
    assert group_advantages(torch.tensor(REWARDS)).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("reward", [0.1, 0.7, 1 / 3, -0.3, 1e-3, 123.456])
def test_equal_rewards_give_exactly_nothing(reward, dtype):
    for size in (2, 3, 5, 6, 7, 8, 10, 16, 31, 33, 64):
        rewards = torch.full((3, size), reward, dtype=dtype)
        rewards[2, 0] += 1  # another group's signal changes nothing for the equal ones
        tokens = torch.ones(3 * size, 4)
        for leave_one_out, normalize in itertools.product([False, True], repeat=2):
            advantages = group_advantages(rewards, leave_one_out, normalize)
            assert (advantages[:2] == 0).all(), (size, leave_one_out, normalize)
            assert (advantages[2] != 0).any()
        of_baseline = reinforce_plus_plus_advantages(rewards[:2], tokens[: 2 * size], minus_baseline=True)
        assert (of_baseline == 0).all()
        assert (reinforce_plus_plus_advantages(rewards[:2], tokens[: 2 * size]) == 0).all()


def test_others_that_are_equal_sharpen_nothing():
    """With leave-one-out and two responses, or one outlier, the deviation of the others is 0."""
    two = group_advantages(torch.tensor([[0.3, 0.7]], dtype=torch.float64), leave_one_out=True)
    torch.testing.assert_close(two, torch.tensor([[-0.4, 0.4]], dtype=torch.float64))
    out = group_advantages(torch.tensor([[0.1, 0.1, 0.9]], dtype=torch.float64), leave_one_out=True, epsilon=0.0)
    assert out[0, 2] == pytest.approx(0.8)


@pytest.mark.parametrize("minus_baseline", [False, True])
@pytest.mark.parametrize("with_penalty", [False, True])
def test_reinforce_plus_plus(minus_baseline, with_penalty):
    generator = torch.Generator().manual_seed(1)
    mask = (torch.rand(16, 6, generator=generator) < 0.6).double()
    mask[:, 2] = 1
    penalty = torch.rand(16, 6, generator=generator, dtype=torch.float64) if with_penalty else None
    returns = {}
    for p, group in enumerate(REWARDS):
        for i, reward in enumerate(group):
            row = 4 * p + i
            base = statistics.mean(group) if minus_baseline else 0.0
            for t in mask[row].nonzero().flatten().tolist():
                future = sum(float(penalty[row, u] * mask[row, u]) for u in range(t, 6)) if with_penalty else 0.0
                returns[row, t] = reward - base - future
    mean, spread = statistics.mean(returns.values()), statistics.pstdev(returns.values())
    expected = torch.zeros(16, 6, dtype=torch.float64)
    for (row, t), value in returns.items():
        expected[row, t] = (value - mean) / (spread + 0.01)
    ours = reinforce_plus_plus_advantages(
        torch.tensor(REWARDS, dtype=torch.float64), mask, penalty, minus_baseline, epsilon=0.01
    )
    torch.testing.assert_close(ours, expected)


BASE = {"num_prompts_per_step": 4, "num_generations_per_prompt": 4, "max_new_tokens": 3}


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ({}, (False, True)),
        ({"advantage_estimator": "dr_grpo"}, (False, False)),
        ({"advantage_estimator": "rloo"}, (True, False)),
        ({"use_leave_one_out_baseline": True}, (True, True)),
        ({"normalize_rewards": False}, (False, False)),
        ({"advantage_deviation": "population", "advantage_epsilon": 0.3}, (False, True, True, 0.3)),
    ],
)
def test_the_configuration_chooses(options, arguments):
    rewards, mask = torch.tensor(REWARDS), torch.ones(16, 5)
    ours = advantages_of(GRPOAlgorithmConfig(**BASE, **options), rewards, mask)
    expected = group_advantages(rewards, *arguments).reshape(16, 1).expand(16, 5)
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"advantage_estimator": "rloo", "normalize_rewards": True}, "normalize_rewards: is an option of .*=grpo"),
        ({"minus_baseline": True}, "minus_baseline: is an option of .*=reinforce_plus_plus"),
        ({"advantage_epsilon": -1}, "greater than or equal to 0"),
    ],
)
def test_contradictory_options(options, message):
    with pytest.raises(ValidationError, match=message):
        GRPOAlgorithmConfig(**BASE, **options)


def test_signal():
    assert has_signal(torch.tensor(REWARDS)).tolist() == [True, False, True, True]
