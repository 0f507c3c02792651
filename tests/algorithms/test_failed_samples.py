"""Tests of samples that could not be judged: they are not trained on, and other samples are not compared with them."""

import json
import math
import re

import pytest
import torch
import yaml
from programs import metrics_of, run
from small_models import make_model

from mcore_rl.algorithms.advantages import advantages_of, group_advantages
from mcore_rl.config import GRPOAlgorithmConfig
from mcore_rl.rollouts.collector import RolloutStatistics
from mcore_rl.rollouts.samples import RolloutSummary, has_signal
from mcore_rl.run.checkpoints import BestValidation

JUDGES = """\
def sometimes(log, record):
    if record['answer'] in 'bc' and len(log[-1]['content']) % 2:
        raise ValueError('not this one \\ud83d')
    return sum(c in 'aeiou' for c in log[-1]['content']) / 4 + ord(record['answer']) % 5
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("failed")
    make_model("llama", root / "model", initializer_range=0.05)
    prompts = [{"prompt": f"say {letter}", "answer": letter} for letter in "abc" * 2]
    (root / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    (root / "odd_judges.py").write_text(JUDGES)
    config = {
        "model": {"path": str(root / "model")},
        "data": {"train": str(root / "prompts.jsonl"), "max_sequence_length": 32},
        "optimizer": {"lr": 3e-3, "schedule": "constant"},
        "trainer": {"max_steps": 1},
        "checkpoint": {"export_hf": False},
        "loss": {"reference_policy_kl_penalty": 0.01},
        "environment": {
            "name": "function",
            "function": "odd_judges:sometimes",
            "num_workers": 1,
            "max_failed_fraction": 0.9,
        },
    }
    for name in ("grpo", "ppo"):
        own = {name: {"num_prompts_per_step": 4, "num_generations_per_prompt": 4, "max_new_tokens": 6}}
        own[name]["num_logged_samples"] = 16
        (root / f"{name}.yaml").write_text(yaml.safe_dump({**config, **own, "output_dir": str(root / name)}))
    return root


def change(source, target, reward):
    """A recording in which every failed sample has other tokens and this reward; how many have failed."""
    entry, failed = json.loads(source.read_text()), 0
    for rollout in entry["rollouts"]:
        if rollout["error"] is not None:
            failed += 1
            rollout["reward"], rollout["token_rewards"] = reward, []
            rollout["input_ids"] = [
                7 if own else t for t, own in zip(rollout["input_ids"], rollout["token_mask"], strict=True)
            ]
    target.write_text(json.dumps(entry) + "\n")
    return failed, len(entry["rollouts"])


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_nothing_depends_on_a_sample_that_failed(algorithm, files, monkeypatch):
    """Two replicas train from a recording in which the failed samples have other texts and rewards."""
    monkeypatch.setenv("PYTHONPATH", str(files))
    config, recording, changed = (files / f"{algorithm}{end}" for end in (".yaml", ".jsonl", "_changed.jsonl"))
    first = run(f"train_{algorithm}.py", config, "--record", recording)
    failed, total = change(recording, changed, reward=50.0)
    assert 0 < failed < total
    assert (
        f"{failed} samples could not be judged and count as failed; first: ValueError: not this one \\ud83d"
        in first.stdout_text
    )
    samples = [json.loads(line) for line in (files / algorithm / "samples.jsonl").read_text().splitlines()]
    assert [sample["reward"] is None for sample in samples] == [sample["error"] is not None for sample in samples]
    assert sum(sample["reward"] is None for sample in samples) == failed
    judge_log = (files / algorithm / "judge.log").read_text()
    line = next(i for i, text in enumerate(JUDGES.splitlines(), 1) if "raise ValueError" in text)
    assert f'odd_judges.py", line {line}, in sometimes' in judge_log
    out = files / f"{algorithm}_changed"
    run(f"train_{algorithm}.py", config, f"output_dir={out}", "--replay", changed, processes=2)
    (ours,), (theirs,) = metrics_of(files / algorithm), metrics_of(out)
    for metrics in (ours, theirs):
        assert (metrics["num_failed"], metrics["failed_fraction"]) == (failed, failed / total)
        assert metrics["skipped_update"] == 0
        assert metrics["num_valid_samples"] == total - failed
    rewards = [r for r in json.loads(recording.read_text())["rollouts"] if r["error"] is None]
    assert ours["reward_mean"] == pytest.approx(sum(r["reward"] for r in rewards) / len(rewards))
    names = {"loss", "grad_norm", "kl_penalty", "reward_mean", "reward_std"}
    names |= {"value_loss", "critic_grad_norm", "returns_mean"} if algorithm == "ppo" else set()
    for name in names:
        assert ours[name] == pytest.approx(theirs[name], rel=2e-3, abs=2e-5), name


@pytest.mark.long
def test_a_step_of_which_too_much_failed_makes_no_update(files, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(files))
    """If no step of the run makes one, the run has failed."""
    out = files / "too_many"
    changes = [f"output_dir={out}", "environment.max_failed_fraction=0.01", "trainer.max_steps=2"]
    process = run("train_grpo.py", files / "grpo.yaml", *changes, check=False)
    assert process.returncode == 3
    assert re.fullmatch(
        r"error: step 2: more than environment\.max_failed_fraction=0\.01 of the samples could not be judged in 2 "
        r"consecutive steps; the last error: ValueError: not this one \\ud83d\n",
        process.stderr_text,
    )
    (metrics,) = metrics_of(out)
    told = (
        f"{metrics['num_failed']:.0f} of 16 samples could not be judged, more than environment.max_failed_fraction=0.01"
    )
    assert told in process.stdout_text
    assert metrics["skipped_update"] == 1 and metrics["num_failed"] > 0 and "loss" not in metrics


# ------------------------------------------------------------------ against groups without them

REWARDS = torch.tensor(
    [[1.0, 0.0, 3.0, 9.0], [2.0, 5.0, 5.0, 0.5], [4.0, 1.0, 1.0, 1.0], [0.0, 1.0, 2.0, 5.0]]
).double()
JUDGED = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1], [0, 1, 1, 1], [0, 0, 0, 1]]).bool()


@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("population", [False, True])
def test_advantages_are_those_of_the_judged_alone(leave_one_out, population):
    options = {"leave_one_out": leave_one_out, "population": population}
    ours = group_advantages(REWARDS, **options, judged=JUDGED)
    for row, rewards, judged in zip(ours, REWARDS, JUDGED, strict=True):
        expected = group_advantages(rewards[judged][None], **options)[0]
        torch.testing.assert_close(row[judged], expected, rtol=1e-12, atol=1e-12)
        assert (row[~judged] == 0).all()
    assert has_signal(REWARDS, JUDGED).tolist() == [True, True, False, False]
    assert group_advantages(REWARDS, judged=torch.zeros_like(JUDGED)).abs().max() == 0


@pytest.mark.parametrize("minus_baseline", [False, True])
def test_whitening_is_over_the_judged_alone(minus_baseline):
    config = GRPOAlgorithmConfig(
        num_prompts_per_step=4, num_generations_per_prompt=4, max_new_tokens=4,
        advantage_estimator="reinforce_plus_plus", minus_baseline=minus_baseline,
    )  # fmt: skip
    mask = (torch.arange(5) < torch.arange(16)[:, None] % 5 + 1).double()
    ours = advantages_of(config, REWARDS, mask, judged=JUDGED)
    assert ours[~JUDGED.flatten()].abs().max() == 0
    other = advantages_of(config, torch.where(JUDGED, REWARDS, -70.0), mask, judged=JUDGED)
    assert torch.equal(ours, other)
    spread = ours[mask * JUDGED.view(-1, 1) > 0]
    assert spread.mean().abs() < 1e-9 and spread.std(correction=0) == pytest.approx(1, abs=1e-3)


def test_a_validation_without_a_judged_sample_is_never_the_best():
    """With rewards below 0, a mean of 0 would be."""
    best = BestValidation("reward_mean", highest=True, data="", patience=None)
    for step, (error, bettered) in enumerate([(None, True), ("down", False), (None, True)], start=1):
        sums = RolloutStatistics()
        reward = -1.0 / step
        sums.add([RolloutSummary(n, n, reward, {}, error, False, 1, 9, 5, 5, []) for n in range(4)])
        metrics = sums.metrics(if_none_judged=math.nan)
        named = {f"validation_{name}": value for name, value in metrics.items()}
        assert best.is_bettered(step, named) == bettered
    assert (best.step, best.value) == (3, pytest.approx(-1 / 3))
