"""Tests of minibatches of a step's rollouts: whole groups, the same numbers under every layout, exact resume."""

import json
import shutil

import pytest
import torch
import yaml
from float32 import FORMULA, approx32, approx32_after_updates
from hypothesis import given
from hypothesis import strategies as st
from programs import metrics_of, run
from small_models import make_model

from mcore_rl.algorithms.grpo import minibatch_of
from mcore_rl.config import GRPOConfig, build_config
from mcore_rl.distributed.batched_data_dict import BatchShare, LocalBatch
from mcore_rl.errors import UserError

LAYOUTS = {
    "dp2": (2, []),
    "tp2": (2, ["parallel.tensor_model_parallel_size=2"]),
}
MINIBATCHES = "train_global_batch_size=8"  # of 24 responses: three updates a pass


@given(st.sets(st.integers(0, 11)), st.sets(st.integers(0, 11), min_size=1))
def test_minibatch_of_holds_the_rows_that_a_replica_has(own, rows):
    own, rows = sorted(own), sorted(rows)
    values = torch.tensor([float(row) for row in own]).view(-1, 1)
    part = minibatch_of(LocalBatch({"values": values, "routed_experts": values.long()}, BatchShare(own, 12)), rows)
    assert part.share.total == len(rows)
    assert [rows[place] for place in part.share.indices] == [row for row in own if row in rows]
    assert part["values"][:, 0].tolist() == [row for row in own if row in rows]
    assert "routed_experts" in part, "also without rows, so that all replicas have the same columns"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("minibatches")
    make_model("llama", root / "model", initializer_range=0.05)
    prompts = [{"prompt": f"say {letter}", "answer": letter} for letter in "abcdefghij" * 2]
    (root / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    (root / "minibatch_judge.py").write_text(
        "def judge(log, record):\n    return sum(map(ord, log[-1]['content'])) % 7 / 7\n"
    )
    options = {"num_prompts_per_step": 6, "num_generations_per_prompt": 4, "max_new_tokens": 8}
    for name in ("grpo", "ppo"):
        config = {
            "output_dir": "set below",
            "model": {"path": str(root / "model")},
            "data": {"train": str(root / "prompts.jsonl"), "max_sequence_length": 40},
            "optimizer": {"lr": 3e-3, "schedule": "linear", "adam_eps": 1e-4},
            "trainer": {"max_steps": 4, "validate_at_start": False},
            "checkpoint": {"save_interval": 2},
            name: {**options, "num_updates_per_rollout": 2},
            "loss": {"positive_example_nll_weight": 0.1} if name == "grpo" else {},
            "environment": {"name": "function", "function": "minibatch_judge:judge", "num_workers": 1},
        }
        (root / f"{name}.yaml").write_text(yaml.safe_dump(config))
    return root


def train(files, algorithm, name, *arguments, processes=1):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(files))
        script, out = f"train_{algorithm}.py", f"output_dir={files / name}"
        run(script, files / f"{algorithm}.yaml", out, f"{algorithm}.{MINIBATCHES}", *arguments, processes=processes)
    return files / name


@pytest.fixture(scope="module")
def whole(files):
    return train(files, "grpo", "whole", "--record", files / "recording.jsonl")


@pytest.mark.long
def test_metrics_contain_mean_and_value_of_each_update(whole):
    for line in metrics_of(whole):
        updates = [line[f"loss/update_{n}"] for n in range(1, 7)]
        assert f"loss/update_{7}" not in line
        assert line["loss"] == approx32(sum(updates) / 6, FORMULA)
        assert len(set(updates)) == 6
        assert line["grad_norm"] == approx32(sum(line[f"grad_norm/update_{n}"] for n in range(1, 7)) / 6, FORMULA)
    rates = [line["lr"] for line in metrics_of(whole)]
    assert rates == sorted(rates, reverse=True) and rates[-1] < rates[0]


@pytest.mark.long
def test_metrics_of_several_passes_over_the_whole_batch(files):
    """Also without minibatches, all updates of a step count, those of the critic too."""
    out = train(files, "ppo", "passes", "ppo.train_global_batch_size=null", "trainer.max_steps=1")
    (line,) = metrics_of(out)
    for name in ("loss", "grad_norm", "value_loss", "critic_grad_norm"):
        updates = [line[f"{name}/update_{n}"] for n in (1, 2)]
        assert len(set(updates)) == 2 and f"{name}/update_3" not in line
        assert line[name] == approx32(sum(updates) / 2, FORMULA)


@pytest.mark.parametrize(
    "layout", [pytest.param("dp2", marks=pytest.mark.long), pytest.param("tp2", marks=pytest.mark.exhaustive)]
)
def test_updates_are_equal_under_every_layout(layout, files, whole):
    processes, arguments = LAYOUTS[layout]
    out = train(files, "grpo", layout, "--replay", files / "recording.jsonl", *arguments, processes=processes)
    again = train(files, "grpo", "again", "--replay", files / "recording.jsonl")
    for one, other in zip(metrics_of(again), metrics_of(out), strict=True):
        for name in one:
            if name.startswith(("loss/", "grad_norm/")):
                assert other[name] == approx32_after_updates(one[name]), (one["step"], name)
    shutil.rmtree(files / "again")


@pytest.mark.long
def test_resumed_run_makes_bit_equal_updates(files, whole):
    out = files / "resumed"
    shutil.copytree(whole, out)
    shutil.rmtree(out / "checkpoints" / "iter_0000004")
    (out / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("2\n")
    train(files, "grpo", "resumed")
    timed = ("seconds", "per_second")
    ours, theirs = (
        [{k: v for k, v in line.items() if not k.endswith(timed)} for line in metrics_of(d)] for d in (out, whole)
    )
    assert ours == theirs


@pytest.mark.long
def test_ppo_critic_is_equal_under_data_parallelism(files):
    one = train(files, "ppo", "ppo_one", "--record", files / "ppo.jsonl")
    two = train(files, "ppo", "ppo_two", "--replay", files / "ppo.jsonl", processes=2)
    for ours, theirs in zip(metrics_of(one)[:2], metrics_of(two)[:2], strict=True):
        assert theirs["value_loss"] == pytest.approx(ours["value_loss"], rel=1e-3)
        assert theirs["critic_grad_norm"] == pytest.approx(ours["critic_grad_norm"], rel=1e-3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"train_global_batch_size": 6}, r"grpo.train_global_batch_size: 6 must be a multiple of .*\(4\)"),
        ({"train_global_batch_size": 16}, r"divide the number of responses of a step \(24\)"),
    ],
)
def test_config_refuses_minibatch_that_splits_groups(values, message, tmp_path):
    options = {"num_prompts_per_step": 6, "num_generations_per_prompt": 4, "max_new_tokens": 8, **values}
    config = {
        "output_dir": str(tmp_path), "model": {"path": "m"}, "data": {"train": "d", "max_sequence_length": 40},
        "grpo": options, "environment": {"name": "exact_match"},
    }  # fmt: skip
    with pytest.raises(UserError, match=message):
        build_config(GRPOConfig, config, (), "file.yaml")
