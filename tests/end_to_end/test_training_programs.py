"""Tests of the scripts as a user starts them: training, resume under another layout, and mistakes."""

import json
import re
import shutil
import time

import pytest
import torch
import yaml
from programs import comparable, metrics_of, run
from safetensors.torch import load_file
from small_models import make_model


def word(index, kind):
    letters = "abcdefgh" if kind == "good" else "stuvwxyz"
    return "".join(letters[(index * k) % 8] for k in range(1, 5 + index % 7))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model, preference and SFT data, and a configuration for each."""
    root = tmp_path_factory.mktemp("training")
    make_model("qwen2", root / "model", initializer_range=0.05)
    pairs = [{"prompt": f"say {i} ", "chosen": word(i, "good"), "rejected": word(i, "bad")} for i in range(40)]
    (root / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (root / "sft.jsonl").write_text(
        "".join(json.dumps({"prompt": p["prompt"], "completion": p["chosen"]}) + "\n" for p in pairs)
    )
    common = {
        "model": {"path": str(root / "model")},
        "batch": {"global_batch_size": 16},
        "optimizer": {"lr": 3e-3, "warmup_steps": 1, "schedule": "cosine", "adam_eps": 1e-6},
        "trainer": {"max_epochs": 2, "validation_interval": 3},
        "checkpoint": {"save_interval": 3},
    }
    for name, data in (("dpo", "pairs"), ("sft", "sft")):
        path = str(root / f"{data}.jsonl")
        config = {**common, "data": {"train": path, "validation": path, "max_sequence_length": 48}}
        config["output_dir"] = str(root / f"out_{name}")
        (root / f"{name}.yaml").write_text(yaml.safe_dump(config))
    return root


def assert_same_run(ours, theirs, start=0):
    timings = ("seconds", "per_second")
    assert [m["step"] for m in ours] == [m["step"] for m in theirs]
    for a, b in zip(ours[start:], theirs[start:], strict=True):
        for name in b:
            if not name.endswith(timings):
                assert a[name] == pytest.approx(b[name], rel=2e-4, abs=2e-5), (a["step"], name)


@pytest.fixture(scope="module")
def dpo_run(files):
    process = run("train_dpo.py", files / "dpo.yaml")
    return process, files / "out_dpo"


def test_dpo_learns_and_writes_everything(dpo_run):
    process, out = dpo_run
    metrics = metrics_of(out)
    assert [m["step"] for m in metrics] == [1, 2, 3, 4, 5]  # two epochs of 40 in batches of 16
    keys = {"loss", "grad_norm", "lr", "num_tokens", "tokens_per_second", "step_seconds", "accuracy", "sft_loss"}
    assert keys <= set(metrics[0])
    assert metrics[0]["loss"] == pytest.approx(0.6931, abs=1e-3)
    assert metrics[-1]["accuracy"] == 1
    assert metrics[2]["validation_num_valid_samples"] == 40  # pairs
    assert (out / "checkpoints" / "latest_checkpointed_iteration.txt").read_text().strip() == "5"
    assert f"Hugging Face model: {out / 'hf'}" in process.stdout_text
    assert "train: 40 records" in process.stdout_text


@pytest.mark.long
def test_resuming_under_another_layout_continues_the_same_run(files, dpo_run):
    """Three steps in one process, the rest at TP2 × CP2; the result is the uninterrupted run's."""
    _, whole = dpo_run
    out = files / "out_resumed"
    run("train_dpo.py", files / "dpo.yaml", f"output_dir={out}", "checkpoint.export_hf=false")
    (out / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("3\n")
    layout = ("parallel.tensor_model_parallel_size=2", "parallel.pipeline_model_parallel_size=2")
    process = run("train_dpo.py", files / "dpo.yaml", f"output_dir={out}", *layout, processes=4)
    assert "resumed from" in process.stdout_text
    assert_same_run(metrics_of(out), metrics_of(whole), start=3)
    ours, theirs = load_file(out / "hf" / "model.safetensors"), load_file(whole / "hf" / "model.safetensors")
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-3, atol=2e-4, msg=name)


@pytest.mark.long
def test_swapping_equals_a_precomputed_reference(files, dpo_run):
    _, precomputed = dpo_run
    (stored,) = (precomputed / "reference_logprobs").glob("*.logprobs")  # train and validation are the same data here
    out, layout = files / "out_swapped", "parallel.context_parallel_size=2"
    run("train_dpo.py", files / "dpo.yaml", f"output_dir={out}", "dpo.reference=swap", layout, processes=2)
    # Before the first update swapping gives margins of exactly 0; what another layout has computed is off by rounding.
    assert_same_run(metrics_of(out), metrics_of(precomputed), start=1)
    assert not (out / "reference_logprobs").exists()
    out = files / "out_again"
    shutil.copytree(precomputed / "reference_logprobs", out / "reference_logprobs")
    (copied,) = (out / "reference_logprobs").iterdir()
    written = copied.stat().st_mtime_ns
    run("train_dpo.py", files / "dpo.yaml", f"output_dir={out}", layout, "trainer.max_steps=3", processes=2)
    assert copied.name == stored.name, "what is stored does not depend on the layout"
    assert copied.stat().st_mtime_ns == written


@pytest.mark.long
def test_sft_and_conversion(files):
    arguments = ("parallel.tensor_model_parallel_size=2", "trainer.log_interval=2")
    process = run("train_sft.py", files / "sft.yaml", *arguments, processes=2)
    shown = re.findall(r"^step (\d+)/5", process.stdout_text, re.MULTILINE)
    assert shown == ["1", "2", "4", "5"], "the first, the last, and every second"
    metrics = metrics_of(files / "out_sft")
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    exported = files / "exported"
    run("convert", "to-hf", files / "out_sft" / "checkpoints", exported)
    ours, theirs = load_file(exported / "model.safetensors"), load_file(files / "out_sft" / "hf" / "model.safetensors")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    again = run("convert", "to-hf", files / "out_sft" / "checkpoints", exported, check=False)
    assert again.returncode == 2
    assert "exists already" in again.stderr_text


@pytest.mark.long
def test_conversations_that_begin_alike_are_trained_as_apart(files):
    """SFT of conversations whose first turn is common, and trained in each of them: the numbers are the same."""
    first = [{"role": "user", "content": "spell the words"}, {"role": "assistant", "content": "yes"}]
    records = [
        {"messages": [*first, {"role": "user", "content": "say"}, {"role": "assistant", "content": word(i, "good")}]}
        for i in range(32)
    ]
    (files / "chats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    data = (f"data.{part}={files / 'chats.jsonl'}" for part in ("train", "validation"))
    common = (*data, "data.max_sequence_length=120", "checkpoint.export_hf=false")
    shared = ("batch.share_prefixes=true", "batch.min_shared_tokens=4")
    for name, options, processes in (("apart", (), 1), ("shared", shared, 2)):
        run("train_sft.py", files / "sft.yaml", *common, *options, f"output_dir={files / name}", processes=processes)
    apart, shared = metrics_of(files / "apart"), metrics_of(files / "shared")
    assert_same_run(shared, apart)


def test_a_mistake_is_one_line_and_comes_at_once(files):
    """All others are in test_wrong_inputs.py, without the start of a process."""
    started = time.monotonic()
    process = run("train_dpo.py", files / "dpo.yaml", "model.path=nowhere", check=False)
    assert process.returncode == 2
    assert process.stdout_text == ""
    assert process.stderr_text == (
        "error: model.path: nowhere does not exist; give a Hugging Face model directory, or OWNER/NAME on the hub\n"
    )
    assert time.monotonic() - started < 5, "before PyTorch is imported"


POISONED = """
import torch
from mcore_rl.platform import initialize_platform
initialize_platform()
from mcore_rl.algorithms.sft import train_sft
from mcore_rl.config import SFTConfig
from mcore_rl.cli.entry_point import run_script
from mcore_rl.models.policy.megatron_policy import MegatronPolicy

forward_backward = MegatronPolicy.forward_backward

def train_poisoned(self, *args, **kwargs):
    if self.scheduler.num_steps == 2:
        with torch.no_grad():
            next(p for p in self.parameters() if p.ndim == 1)[0] = float("nan")
    return forward_backward(self, *args, **kwargs)

if __name__ == "__main__":
    MegatronPolicy.forward_backward = train_poisoned
    run_script("sft", SFTConfig, train_sft, "")
"""


@pytest.mark.long
def test_nan_stops_with_step_and_leaves_the_checkpoint(files):
    out, script = files / "out_nan", files / "poisoned.py"
    script.write_text(POISONED)
    arguments = (files / "sft.yaml", f"output_dir={out}", "trainer.validation_interval=null", "data.validation=null")
    process = run(
        script, *arguments, "checkpoint.save_interval=1", "parallel.context_parallel_size=2", processes=2, check=False
    )
    assert process.returncode != 0
    assert "error: step 3: the loss is nan; first bad log-probability at rank 0: row" in process.stderr_text
    assert "the last checkpoint is " + str(out / "checkpoints" / "iter_0000002") in process.stderr_text
    assert (out / "checkpoints" / "iter_0000002" / "metadata.json").is_file()
    assert not (out / "run.lock").exists()


@pytest.mark.long
@pytest.mark.parametrize(("config", "algorithm"), [("dpo", "dpo"), ("sft", "sft"), ("dpo", "rm")])
def test_every_layout_is_verified(files, config, algorithm):
    head = "model.head=reward" if algorithm == "rm" else "model.head=lm"
    arguments = ("--algorithm", algorithm, head, "--layouts", "tp=2", "cp=1,2")
    verified = run("layouts", files / f"{config}.yaml", *arguments)
    assert [line.split("  ")[0] for line in verified.stdout_text.splitlines()[2:]] == ["tp2", "tp2 cp2"]
    assert "WRONG" not in verified.stdout_text


@pytest.mark.long
def test_layouts_are_verified_in_bfloat16(files):
    arguments = ("--layouts", "tp=2", "sp=1", "--dtype", "bfloat16")
    lines = run("layouts", files / "dpo.yaml", *arguments).stdout_text.splitlines()
    assert lines[0].endswith("relative differences from one process in float32")
    rows = {line[:28].strip(): list(map(float, line[28:].split())) for line in lines[2:]}
    assert list(rows) == ["one process", "tp2 sp"]
    scores = [row[2] for row in rows.values()]
    assert all(1e-4 < value < 1e-1 for value in scores)  # bfloat16, not float32


@pytest.mark.long
@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--device", "cuda", f"--device cuda: torch {torch.__version__} "),
        (
            "--transformer-impl",
            "transformer_engine",
            "model.transformer_impl=transformer_engine: Transformer Engine is",
        ),
    ],
)
def test_layouts_refuses_what_is_not_there(files, option, value, message, monkeypatch):
    monkeypatch.setenv("MCORE_RL_HIDDEN_DEVICES", "")
    ended = run("layouts", files / "dpo.yaml", option, value, check=False)
    assert ended.returncode == 2 and ended.stdout_text == ""
    assert ended.stderr_text.startswith(f"error: {message}") and len(ended.stderr_text.splitlines()) == 1


@pytest.mark.long
def test_a_run_through_host_memory_writes_the_same_metrics(files):
    metrics = []
    for backend in ("auto", "host"):
        out = files / f"out_{backend}"
        overrides = (f"output_dir={out}", f"parallel.backend={backend}", "parallel.tensor_model_parallel_size=2")
        run(
            "train_dpo.py",
            files / "dpo.yaml",
            *overrides,
            "trainer.max_steps=3",
            "trainer.max_epochs=null",
            processes=2,
        )
        metrics.append(comparable(out))
    assert len(metrics[0]) == 3 and metrics[1] == metrics[0]
