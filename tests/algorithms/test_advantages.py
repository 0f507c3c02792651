"""Tests of advantages against the papers' formulas, number by number, with rewards that are not exact in fp32."""

import itertools
import statistics

import pytest
import torch
from pydantic import ValidationError

from mcore_rl.algorithms.advantages import (
    EstimatorInputs,
    advantages_of,
    gdpo_advantages,
    group_advantages,
    maxrl_advantages,
    optimal_token_baseline_advantages,
    reinforce_plus_plus_advantages,
)
from mcore_rl.config import GRPOAlgorithmConfig, GRPOConfig
from mcore_rl.distributed.batched_data_dict import BatchShare
from mcore_rl.errors import TrainingError
from mcore_rl.rollouts.collector import groups_with_signal
from mcore_rl.rollouts.samples import RolloutSummary, has_signal
from mcore_rl.testing.processes import run_processes

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


# ------------------------------------------------------------------ several rewards, likelihood, token baseline


NAN = float("nan")
BY_NAME = [
    REWARDS,
    [[0.0, 1.0, 1.0, 0.0], [0.7, 0.7, NAN, 0.1], [NAN] * 4, [0.3, NAN, NAN, NAN]],
]


def test_gdpo():
    """A reward that applies to few samples, to one, to none; a group whose sum is equal though its rewards differ."""
    by_name, weights = [[list(group) for group in rewards] for rewards in BY_NAME], [0.3, 2.0]
    by_name[0][1] = [2.0, 2.0, 0.5, 2.0]
    judged = torch.ones(4, 4, dtype=torch.bool)
    judged[0, 2] = judged[1, 0] = False
    total = torch.zeros(4, 4, dtype=torch.float64)
    for weight, rewards in zip(weights, by_name, strict=True):
        for p, group in enumerate(rewards):
            counted = {i: r for i, r in enumerate(group) if judged[p, i] and r == r}
            if len(set(counted.values())) > 1:
                mean, spread = statistics.mean(counted.values()), statistics.stdev(counted.values())
                for i, r in counted.items():
                    total[p, i] += weight * (r - mean) / (spread + 0.01)
    values = total[judged].tolist()
    expected = torch.where(judged, (total - statistics.mean(values)) / (statistics.stdev(values) + 0.01), 0)
    rewards = torch.tensor(by_name, dtype=torch.float64)
    ours = gdpo_advantages(rewards, torch.tensor(weights), 0.01, judged)
    torch.testing.assert_close(ours, expected)
    assert (gdpo_advantages(torch.full((2, 3, 4), 0.7), torch.tensor(weights)) == 0).all()


def test_maxrl():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.1] * 4, [0.0] * 4, [0.7, 0.3, 2.1, 9.0]], dtype=torch.float64)
    judged = torch.ones(4, 4, dtype=torch.bool)
    judged[3, 3] = False
    means = [0.5, 0.1, 0.0, 3.1 / 3]
    expected = torch.stack([(row - m) / (m + 0.01) for row, m in zip(rewards, means, strict=True)])
    expected[1:3], expected[3, 3] = 0.0, 0.0
    torch.testing.assert_close(maxrl_advantages(rewards, 0.01, judged), expected)
    with pytest.raises(TrainingError, match=r"rewards must be at least 0; a sample has -1.7"):
        maxrl_advantages(torch.tensor(REWARDS))


def token_samples():
    """Samples of several turns in 3 groups of 3: rewards and score norms of tokens, one sample that is not judged."""
    generator = torch.Generator().manual_seed(2)
    mask = (torch.rand(9, 12, generator=generator) < 0.6).double()
    mask[:, 3] = 1
    mask[4, 4:] = 0
    mask[7] = 0
    rewards, norms = (torch.rand(9, 12, generator=generator, dtype=torch.float64) for _ in range(2))
    return rewards * 2 - 1, norms * 2, mask


def token_baseline_by_loops():
    rewards, norms, mask = token_samples()
    expected, judged = torch.zeros(9, 12, dtype=torch.float64), [row != 5 for row in range(9)]
    places = [mask[row].nonzero().flatten().tolist() if judged[row] else [] for row in range(9)]
    for row, tokens in enumerate(places):
        for k, t in enumerate(tokens):
            above = below = 0.0
            others = [i for i in range(3 * (row // 3), 3 * (row // 3) + 3) if len(places[i]) > k]
            for i in others:
                weight = sum(norms[i, u] for u in places[i][: k + 1])
                above += weight * sum(rewards[i, u] for u in places[i][k:])
                below += weight
            future = sum(rewards[row, u] for u in tokens[k:])
            expected[row, t] = future - (above / below if len(others) > 1 else 0.0)
    return expected


def test_optimal_token_baseline():
    rewards, norms, mask = token_samples()
    judged = torch.ones(3, 3, dtype=torch.bool)
    judged[1, 2] = False
    config = GRPOAlgorithmConfig(**{**BASE, "num_generations_per_prompt": 3, "advantage_estimator": OTB})
    inputs = EstimatorInputs(token_rewards=rewards, score_norms=norms)
    ours = advantages_of(config, torch.zeros(3, 3), mask, judged=judged, more=inputs)
    torch.testing.assert_close(ours, token_baseline_by_loops().float())


OTB = "optimal_token_baseline"


def token_baseline_of_share():
    from mcore_rl.distributed.topology import ParallelDimension

    rank, replicas = torch.distributed.get_rank(), ParallelDimension.of(torch.distributed.group.WORLD)
    rows = [[0, 4, 5, 8, 2, 7], [1, 3, 6]][rank]
    columns = (column[rows] for column in token_samples())
    share, groups = BatchShare(rows, 9, replicas), torch.tensor(rows) // 3
    rewards, norms, mask = columns
    mask = mask * (torch.tensor(rows) != 5)[:, None]
    return rows, optimal_token_baseline_advantages(rewards, norms, mask, groups, 3, share)


def test_groups_of_the_token_baseline_may_be_on_several_replicas():
    expected = token_baseline_by_loops().float()
    for rows, ours in run_processes(token_baseline_of_share, world_size=2):
        torch.testing.assert_close(ours, expected[rows])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"advantage_estimator": OTB, "advantage_epsilon": 0.1}, "optimal_token_baseline does not divide advantages"),
        ({"advantage_estimator": "gdpo", "overlong_cache_length": 2}, "overlong_cache_length: gdpo does not read the"),
        ({"advantage_estimator": "maxrl", "overlong_cache_length": 2}, "overlong_cache_length: maxrl needs rewards of"),
    ],
)
def test_options_that_an_estimator_does_not_read(options, message):
    with pytest.raises(ValidationError, match=message):
        GRPOAlgorithmConfig(**BASE, **options)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({}, "max_turns=1 conversations have none; raise environment.max_turns"),
        (
            {"environment": {"name": "try_again", "max_turns": 2}, "grpo": {"top_k": 5}},
            "set grpo.keep_sampling_mask=false",
        ),
    ],
)
def test_observations_that_there_are_not(sections, message):
    values = {
        "output_dir": "x",
        "model": {"path": "x"},
        "data": {"train": "x"},
        "loss": {"observation_nll_weight": 0.1},
    }
    with pytest.raises(ValidationError, match=f"loss.observation_nll_weight: .*{message}"):
        GRPOConfig.model_validate({**values, **sections})


def test_gdpo_needs_several_rewards():
    values = {
        "output_dir": "x",
        "model": {"path": "x"},
        "data": {"train": "x"},
        "grpo": {"advantage_estimator": "gdpo"},
    }
    with pytest.raises(ValidationError, match=r"gdpo compares several rewards by name; set environment\.name=weighted"):
        GRPOConfig.model_validate(values)


def test_signal_of_named_rewards():
    """The sums are equal in every group; a single reward differs in the second, and applies once in the third."""
    by_name = [[(1.0, 0.0)] * 2, [(1.0, 0.0), (0.0, 1.0)], [(NAN, 1.0), (1.0, NAN)]]
    outcomes = [
        RolloutSummary(
            p, i, 1.0, {n: r for n, r in zip("ab", both, strict=True) if r == r}, None, False, 1, 2, 1, 1, []
        )
        for p, group in enumerate(by_name)
        for i, both in enumerate(group)
    ]
    assert groups_with_signal(outcomes, 2).tolist() == [False] * 3
    assert groups_with_signal(outcomes, 2, ["a", "b"]).tolist() == [False, True, False]
