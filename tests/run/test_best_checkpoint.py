"""Tests of the best validation: its choice, its checkpoint, its export, and early stopping."""

import contextlib
import io
import json
import math

import pytest
import torch
from float32 import FORWARD, approx32
from safetensors.torch import load_file
from small_models import make_model

from mcore_rl.config import CheckpointConfig, SFTConfig, build_config
from mcore_rl.errors import UserError, WorkerError
from mcore_rl.run.checkpoints import BestValidation
from mcore_rl.testing.processes import run_processes
from mcore_rl.utils.checkpoint_store import CheckpointStore


def taken(best, *values):
    return [best.is_bettered(step, {"validation_loss": value}) for step, value in enumerate(values, 1)]


def test_what_is_better():
    assert taken(BestValidation("loss", False, "", None), 0.5, 0.5, 0.4, math.nan, 0.3) == [
        True,
        False,
        True,
        False,
        True,
    ]
    assert taken(BestValidation("loss", True, "", None), math.nan, -0.5, -0.4, math.inf) == [False, True, True, True]
    best = BestValidation("loss", False, "", 2)
    assert taken(best, 0.5, math.nan) == [True, False] and not best.patience_is_over
    assert taken(best, 0.6) == [False] and best.patience_is_over
    with pytest.raises(
        UserError,
        match=r"checkpoint\.best_metric=loss: is not a validation metric; choose from reward_mean, reward_positive",
    ):
        best.is_bettered(1, {"validation_reward_mean": 1.0, "validation_reward_positive_fraction": 0.0, "loss": 1.0})


@pytest.mark.parametrize(
    ("metric", "mode", "highest"),
    [
        ("loss", None, False),
        ("policy_kl_error", None, False),
        ("reward_positive_fraction", None, True),
        ("reward_mean", None, True),
        ("reward_positive_fraction", "min", False),
        ("kl", "max", True),
    ],
)
def test_which_way_is_up(metric, mode, highest):
    assert CheckpointConfig(best_metric=metric, best_mode=mode).best_is_highest == highest


def test_a_way_that_the_name_does_not_tell():
    values = {"output_dir": "o", "model": {"path": "m"}, "data": {"train": "x", "validation": "y"}}
    values |= {"trainer": {"validation_interval": 1}, "checkpoint": {"best_metric": "kl"}}
    with pytest.raises(UserError, match=r"checkpoint\.best_mode: must say whether the lowest \(min\) or the highest"):
        build_config(SFTConfig, values, [], "")


def test_none_is_better_than_before_training():
    best = BestValidation("loss", False, "", 2)
    assert best.is_bettered(0, {"validation_loss": 0.5})
    assert taken(best, 0.6, 0.7) == [False, False] and best.patience_is_over
    assert (best.step, str(best)) == (0, "best validation: none has a better loss than 0.5 before the first step")
    best.forget()
    assert taken(best, 0.9) == [True]


def test_what_was_measured_on_other_data_is_forgotten():
    values = {"output_dir": "o", "model": {"path": "m"}, "data": {"train": "x", "validation": "y"}}
    values |= {"trainer": {"validation_interval": 1}, "checkpoint": {"best_metric": "loss"}}
    config, said = build_config(SFTConfig, values, [], ""), []
    best = BestValidation.of(config, {}, "one", said.append)
    assert best.is_bettered(1, {"validation_loss": 0.5})
    state = {"best": best.state()}
    assert BestValidation.of(config, state, "one", said.append).value == 0.5 and not said
    assert BestValidation.of(config, state, "two", said.append).value is None
    assert said == ["data.validation is other data than before: the best validation so far is forgotten"]


def config_of(directory, model, **changes):
    values = {
        "output_dir": str(directory / "out"),
        "model": {"path": str(model)},
        "data": {
            "train": str(directory / "train.jsonl"),
            "validation": str(directory / "validation.jsonl"),
            "max_sequence_length": 48,
        },
        "batch": {"global_batch_size": 4},
        "optimizer": {"lr": 3e-3, "schedule": "constant"},
        "trainer": {"max_steps": 40, "validation_interval": 1, "early_stopping_patience": 3, "log_interval": 100},
        "checkpoint": {"best_metric": "loss", "keep_last": 1, "export_best": True, "asynchronous": False},
    }
    for section, keys in changes.items():
        values[section] = {**values[section], **keys}
    return build_config(SFTConfig, values, [], "test")


@pytest.fixture
def files(tmp_path):
    """Training on one answer makes another, which is the right one of the validation, first likelier, then not."""
    make_model("llama", tmp_path / "model")
    for name, answers in (("train", ["abab"] * 4), ("validation", ["ab", "ba", "abba", "cc"])):
        records = [{"prompt": f"say {i} ", "completion": answer} for i, answer in enumerate(answers)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path


def train(config):
    from mcore_rl.algorithms.sft import train_sft
    from mcore_rl.run import metrics

    with contextlib.redirect_stdout(io.StringIO()) as said:
        metrics.console.file = said
        train_sft(config)
    return said.getvalue()


def losses(config):
    lines = map(json.loads, (config.output_dir / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line}


@pytest.mark.long
def test_training_ends_after_the_best_which_is_kept_and_exported(files):
    config = config_of(files, files / "model", trainer={"validate_at_start": True})
    (said,) = run_processes(train, config, world_size=1)
    found = losses(config)
    assert 0 in found
    del found[0]  # no checkpoint is from before the first step
    best, last = min(found, key=found.get), max(found)
    assert 1 < best == last - 3 < 37, found
    assert f"step {last}: 3 validations without a better loss; training ends here" in said
    assert f"best validation: loss {found[best]:.4g} at step {best}: {config.output_dir}/checkpoints/iter_" in said
    store = CheckpointStore(config.output_dir / "checkpoints")
    assert store.iterations() == [store.iteration(best), store.iteration(last)]

    # Once more: nothing is trained, and the same is exported.
    exported = load_file(config.output_dir / "hf" / "model.safetensors")
    (said,) = run_processes(train, config, world_size=1)
    assert losses(config).keys() == {0, *found}
    again = load_file(config.output_dir / "hf" / "model.safetensors")
    assert all(torch.equal(again[name], exported[name]) for name in exported)

    # A run that ends at the best step exports these very weights.
    short = config_of(files, files / "model", trainer={"max_steps": best, "early_stopping_patience": None})
    short = short.model_copy(update={"output_dir": files / "short"})
    run_processes(train, short, world_size=1)
    theirs = load_file(files / "short" / "hf" / "model.safetensors")
    assert all(torch.equal(theirs[name], exported[name]) for name in exported)


@pytest.mark.long
def test_the_best_of_another_run_is_not_looked_for(files):
    """The run starts from a checkpoint of a run whose best checkpoint is not in this directory."""
    first = config_of(files, files / "model", optimizer={"lr": 3e-2}, trainer={"max_steps": 9})
    run_processes(train, first, world_size=1)
    last = CheckpointStore(first.output_dir / "checkpoints").iterations()[-1]
    second = config_of(
        files,
        files / "model",
        trainer={"max_steps": int(last.name[5:]) + 3, "early_stopping_patience": 50},
        checkpoint={"resume": str(last)},
    )
    second = second.model_copy(update={"output_dir": files / "second"})
    (said,) = run_processes(train, second, world_size=1)
    assert (second.output_dir / "hf" / "model.safetensors").is_file()
    named = [line for line in said.splitlines() if "best validation" in line]
    assert len(named) == 1 and str(second.output_dir) in named[0]


@pytest.mark.long
def test_a_run_that_is_taken_up_again_goes_on_waiting(files):
    whole = config_of(files, files / "model")
    run_processes(train, whole, world_size=1)
    last = max(losses(whole))
    parts = whole.model_copy(update={"output_dir": files / "parts"})
    for steps in (last - 2, last - 1, 40):
        parts = parts.model_copy(update={"trainer": parts.trainer.model_copy(update={"max_steps": steps})})
        run_processes(train, parts, world_size=1)
    assert losses(parts) == approx32(losses(whole), FORWARD)


def test_a_metric_that_is_not_there(files):
    config = config_of(files, files / "model", checkpoint={"best_metric": "lost", "best_mode": "min"})
    with pytest.raises(
        WorkerError, match=r"checkpoint\.best_metric=lost: is not a validation metric; choose from .*loss"
    ):
        run_processes(train, config, world_size=1)
    store = CheckpointStore(config.output_dir / "checkpoints")
    assert store.iterations() == [store.iteration(1)], "what was trained so far is kept"
    early = config_of(
        files,
        files / "model",
        checkpoint={"best_metric": "lost", "best_mode": "min"},
        trainer={"validate_at_start": True},
    )
    early = early.model_copy(update={"output_dir": files / "early"})
    with pytest.raises(
        WorkerError, match=r"checkpoint\.best_metric=lost: is not a validation metric; choose from .*loss"
    ):
        run_processes(train, early, world_size=1)
    assert not CheckpointStore(files / "early" / "checkpoints").iterations()


def test_validation_at_the_end(files):
    config = config_of(
        files,
        files / "model",
        trainer={"max_steps": 3, "validation_interval": 2, "validate_at_end": True, "early_stopping_patience": None},
        checkpoint={"best_metric": None, "export_best": False},
    )
    (said,) = run_processes(train, config, world_size=1)
    assert losses(config).keys() == {2, 3}
    summary = said[said.index("steps 1–3 in 0:00:") :].splitlines()
    found = losses(config)
    shown = [f"{number:.4g}" for number in (found[2], found[3], min(found.values()))]
    step = min(found, key=found.get)
    assert f"  validation_loss: {shown[0]} → {shown[1]}, best {shown[2]} at step {step}" in summary
    assert f"  metrics: {config.output_dir}/metrics.jsonl" in summary
    assert f"  curves and samples: mcore-rl report {config.output_dir}" in summary
    assert summary[-1] == f"Hugging Face model: {config.output_dir}/hf"
