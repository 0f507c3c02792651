"""Tests that files on disk are safe: no run destroys, mixes with or continues files of another run or of the user."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from small_models import make_model
from test_training_programs import run as run_program

from mcore_rl.config import DPOConfig, RMConfig, SFTConfig, load_config
from mcore_rl.errors import Stopped, WorkerError
from mcore_rl.run.directory import RunDirectory
from mcore_rl.testing.processes import run_processes
from mcore_rl.utils.checkpoint_store import CheckpointStore, step_of

CONFIGS = {"sft": SFTConfig, "dpo": DPOConfig, "rm": RMConfig}


def train(algorithm, path, overrides):
    """Run in a separate process; return its standard output."""
    import importlib
    import io
    from contextlib import redirect_stdout

    from mcore_rl.run import metrics

    out = io.StringIO()
    metrics.console.file = out
    with redirect_stdout(out):
        module = importlib.import_module(f"mcore_rl.algorithms.{algorithm}")
        try:
            getattr(module, f"train_{algorithm}")(load_config(CONFIGS[algorithm], path, overrides))
        except Stopped as stop:
            print(f"exit status {stop.status}")
    return out.getvalue()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Two models of one shape, one of another family, data, and a finished run of two steps."""
    root = tmp_path_factory.mktemp("runs")
    make_model("llama", root / "model", initializer_range=0.05)
    make_model("llama", root / "other_weights", initializer_range=0.07)
    make_model("qwen2", root / "other_family", tie_word_embeddings=False, initializer_range=0.05)
    records = [
        {"prompt": f"say {i} ", "completion": "ab" * (1 + i % 5), "chosen": f"yes {i}", "rejected": "no" * (1 + i % 3)}
        for i in range(7)
    ]
    (root / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (root / "other.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records[1:]))
    config = {
        "output_dir": str(root / "out"),
        "model": {"path": str(root / "model")},
        "data": {"train": str(root / "data.jsonl"), "max_sequence_length": 48},
        "batch": {"global_batch_size": 3},
        "optimizer": {"lr": 1.3e-3},
        "trainer": {"max_steps": 2},
    }
    (root / "config.yaml").write_text(yaml.safe_dump(config))
    run_processes(train, "sft", root / "config.yaml", [], world_size=1)
    return root


@pytest.fixture
def out(files, tmp_path):
    """A copy of the finished run."""
    shutil.copytree(files / "out", tmp_path / "run")
    return tmp_path / "run"


def run(files, *overrides, algorithm="sft"):
    return run_processes(train, algorithm, files / "config.yaml", list(map(str, overrides)), world_size=1)[0]


def contents(directory):
    """Every file below a directory, by its digest."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in sorted(directory.rglob("*"))
    }


def refused(files, directory, message, *overrides, algorithm="sft"):
    """The run ends with a user's error that contains `message`, and all files in `directory` are unchanged."""
    before = contents(directory)
    with pytest.raises(WorkerError) as error:
        run(files, *overrides, algorithm=algorithm)
    last = str(error.value).strip().splitlines()[-1]
    assert last.startswith("mcore_rl.errors.UserError: "), error.value
    assert re.search(".*".join(map(re.escape, message.split(".*"))), last), last
    assert contents(directory) == before


def test_a_finished_run_says_what_it_is(files):
    assert (files / "out" / "run.json").is_file()
    assert not (files / "out" / "run.lock").exists()
    assert not list((files / "out").rglob("*partial*"))
    assert not (files / "out" / "stacks").exists()
    manifest = json.loads((files / "out" / "hf" / "manifest.json").read_text())
    assert set(manifest) == {path.name for path in (files / "out" / "hf").iterdir()} - {"manifest.json"}


# ------------------------------------------------------------------ nothing is destroyed


def test_the_model_that_is_trained_is_never_written_over(files, out):
    (out / "hf" / "README.md").write_text("a user's")
    shutil.rmtree(out / "checkpoints")
    arguments = (f"output_dir={out}", f"model.path={out / 'hf'}")
    refused(files, out, "holds README.md, which no run exported or which was changed after the export", *arguments)
    (out / "hf" / "README.md").unlink()
    refused(
        files, out, "is written by this run; choose another output_dir, or set checkpoint.export_hf=false", *arguments
    )


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "samples.jsonl", "hf/notes.txt", "checkpoints/x"])
def test_a_users_files_are_no_run(name, files, tmp_path):
    file = tmp_path / "mine" / name
    file.parent.mkdir(parents=True)
    file.write_text("a user's")
    refused(files, tmp_path, f"holds {Path(name).parts[0]}, which no run wrote", f"output_dir={tmp_path / 'mine'}")


@pytest.mark.long
def test_what_a_user_adds_to_an_export_is_kept(files, out):
    (out / "hf" / "README.md").write_text("a user's")
    more = (f"output_dir={out}", "trainer.max_steps=3")
    refused(files, out, "README.md, which no run exported or which was changed after the export; move it away", *more)
    config = (out / "hf" / "config.json").read_text()
    (out / "hf" / "README.md").unlink()
    (out / "hf" / "config.json").write_text(config + "\n")
    refused(files, out, "holds config.json, which no run exported or which was changed after the export", *more)
    (out / "hf" / "config.json").write_text(config)
    before = contents(out / "hf")
    run(files, *more)
    assert set(contents(out / "hf")) == set(before)
    assert contents(out / "hf")["model.safetensors"] != before["model.safetensors"]
    assert not list(out.glob(".hf*"))


@pytest.mark.long
def test_a_users_files_in_a_checkpoint_outlive_it(files, tmp_path):
    arguments = (f"output_dir={tmp_path}", "checkpoint.save_interval=1", "checkpoint.keep_last=1")
    run(files, *arguments, "checkpoint.export_hf=false")
    (tmp_path / "checkpoints" / "iter_0000002" / "notes.txt").write_text("a user's")
    run(files, *arguments, "checkpoint.export_hf=false", "trainer.max_steps=3")
    assert [path.name for path in (tmp_path / "checkpoints" / "iter_0000002").iterdir()] == ["notes.txt"]


@pytest.mark.long
def test_afresh_beside_a_run_only_when_told_to(files, out):
    afresh = (f"output_dir={out}", "checkpoint.resume=none", "trainer.max_steps=1")
    refused(files, out, "holds a run, which would be mixed with a new one; choose another output_dir, or", *afresh)
    (out / "notes.txt").write_text("a user's")
    text = run(files, *afresh, "checkpoint.overwrite=true", "data.train=" + str(files / "other.jsonl"))
    assert "resumed" not in text
    assert [path.name for path in CheckpointStore(out / "checkpoints").iterations()] == ["iter_0000001"]
    assert [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()] == [1]
    assert (out / "notes.txt").read_text() == "a user's"


@pytest.mark.long
def test_an_export_has_the_template_that_it_was_trained_with(files, tmp_path):
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|end|>{% endfor %}"
    (tmp_path / "own.jinja").write_text(template)
    text = run(files, f"output_dir={tmp_path / 'out'}", f"data.chat_template={tmp_path / 'own.jinja'}")
    assert "data.chat_template takes the place of the tokenizer's own" in text
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(tmp_path / "out" / "hf").chat_template == template
    assert AutoTokenizer.from_pretrained(files / "out" / "hf").chat_template != template
    command = [sys.executable, "-m", "mcore_rl", "convert", "to-hf"]
    subprocess.run([*command, tmp_path / "out" / "checkpoints", tmp_path / "converted"], check=True, timeout=120)
    assert contents(tmp_path / "converted") == contents(tmp_path / "out" / "hf")


@pytest.mark.long
def test_what_never_comes_is_told(files, tmp_path):
    never = ("checkpoint.save_interval=7", "optimizer.warmup_steps=5", f"data.validation={files / 'other.jsonl'}")
    text = run(files, f"output_dir={tmp_path}", "checkpoint.export_hf=false", *never)
    assert "checkpoint.save_interval=7 is never reached: the run has 2 steps" in text
    assert "optimizer.warmup_steps=5 is shortened to 1: there are 2 updates" in text
    assert "data.validation is not used during training: there is no trainer.validation_interval" in text
    assert "never reached" not in run(files, f"output_dir={tmp_path / 'a'}", "checkpoint.export_hf=false")


def test_the_logs_of_a_run_are_not_its_data(files, out):
    arguments = (f"output_dir={out}", "checkpoint.resume=auto")
    (out / "samples.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    refused(files, out, "is written by this run", *arguments, f"data.train={out / 'samples.jsonl'}")


def test_overwriting_keeps_what_the_run_reads(files, out):
    (out / "hf" / "mine.jinja").write_text("{{ messages }}")
    arguments = (
        f"output_dir={out}",
        "checkpoint.resume=none",
        "checkpoint.overwrite=true",
        "checkpoint.export_hf=false",
    )
    template = out / "hf" / "mine.jinja"
    refused(
        files,
        out,
        "data.chat_template: .*is written or removed by this run",
        *arguments,
        f"data.chat_template={template}",
    )


# ------------------------------------------------------------------ nothing is continued by another


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"algorithm": "dpo"}, "the algorithm: .*iter_0000002 is of another run (sft → dpo)"),
        ({"model.path": "other_weights"}, "model.path: other weights: .*iter_0000002 is of another run"),
        ({"model.path": "other_family"}, "model.path: .* is of another run (model_type llama → qwen2)"),
        ({"data.train": "other.jsonl"}, "other.jsonl is other data"),
        ({"seed": 3}, "seed: .* is of another run (0 → 3)"),
        ({"optimizer": {"name": "muon"}}, "optimizer.name: .* is of another run (adamw → muon)"),
        ({"model.dtype": "bfloat16"}, "model.dtype: .* is of another run (float32 → bfloat16)"),
    ],
    ids=str,
)
def test_another_run_does_not_go_on(change, message, files, out):
    algorithm = change.get("algorithm", "sft")
    values = {key: value for key, value in change.items() if key != "algorithm"}
    overrides = [
        f"{key}={files / value if '.path' in key or '.train' in key else value}" for key, value in values.items()
    ]
    refused(files, out, message, f"output_dir={out}", "trainer.max_steps=3", *overrides, algorithm=algorithm)


def test_a_run_does_not_begin_from_another_ones_checkpoint(files, out, tmp_path):
    arguments = (f"output_dir={tmp_path / 'new'}", f"checkpoint.resume={out / 'checkpoints'}")
    message = "the algorithm: .*iter_0000002 is of another run (sft → dpo); convert that checkpoint (mco"
    refused(files, tmp_path, message, *arguments, algorithm="dpo")


def test_what_may_change_is_told(files, out):
    changes = ("trainer.max_steps=3", "optimizer.lr=7.7e-4", "batch.global_batch_size=2")
    text = run(files, f"output_dir={out}", *changes)
    (line,) = [line for line in text.splitlines() if line.startswith("changed since")]
    assert line == (
        "changed since iter_0000002: batch.global_batch_size 3 → 2, optimizer.lr 0.0013 → 0.00077, "
        "trainer.max_steps 2 → 3"
    )
    last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    assert (last["step"], last["num_valid_samples"]) == (3, 2)


def test_the_same_weights_under_another_name_are_the_same_model(files, out, tmp_path):
    shutil.copytree(files / "model", tmp_path / "moved")
    (tmp_path / "moved" / "model.safetensors").rename(tmp_path / "moved" / "model-00001-of-00001.safetensors")
    from safetensors import safe_open

    with safe_open(tmp_path / "moved" / "model-00001-of-00001.safetensors", framework="pt") as tensors:
        index = {"weight_map": dict.fromkeys(tensors.keys(), "model-00001-of-00001.safetensors")}
    (tmp_path / "moved" / "model.safetensors.index.json").write_text(json.dumps(index))
    text = run(files, f"output_dir={out}", f"model.path={tmp_path / 'moved'}", "trainer.max_steps=3")
    assert "resumed from" in text


@pytest.mark.long
def test_a_checkpoint_is_not_converted_for_another_architecture(files, tmp_path):
    command = [sys.executable, "-m", "mcore_rl", "convert", "to-hf"]
    paths = [files / "out" / "checkpoints", tmp_path / "hf", "--model", files / "other_family"]
    done = subprocess.run([*command, *paths], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "has another architecture than" in done.stderr and "model_type is qwen2 instead of llama" in done.stderr
    assert not (tmp_path / "hf").exists()


def make_adapter(base, directory, seed):
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = peft.LoraConfig(
        r=2, lora_alpha=3, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False
    )
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    peft.get_peft_model(model, config).save_pretrained(directory)
    return directory


@pytest.mark.long
def test_a_precomputed_reference_is_of_its_adapter_and_whole(files, tmp_path):
    """Two adapters one after the other in one directory, then each kind of damage to the stored files."""
    out, first, second = (tmp_path / name for name in ("out", "first", "second"))
    for seed, path in enumerate((first, second)):
        make_adapter(files / "model", path, seed)
    afresh = (f"output_dir={out}", "dpo.reference=precompute", "checkpoint.resume=none", "checkpoint.overwrite=true")
    run(files, *afresh, f"model.lora.path={first}", algorithm="dpo")
    (stored,) = (out / "reference_logprobs").iterdir()
    content = stored.read_bytes()
    said = run(files, *afresh, f"model.lora.path={second}", algorithm="dpo")
    (other,) = set((out / "reference_logprobs").iterdir()) - {stored}
    assert stored.read_bytes() == content and "damaged" not in said
    of_other, of_stored = (np.frombuffer(path.read_bytes()[:-32], np.float32) for path in (other, stored))
    assert np.abs(of_other - of_stored).max() > 1e-3
    for damaged in (content[:-7], b"", content[:-1] + bytes([content[-1] ^ 1]), other.read_bytes()[:50]):
        stored.write_bytes(damaged)
        said = run(files, *afresh, f"model.lora.path={first}", algorithm="dpo")
        assert f"damaged reference log-probabilities: {stored}: " in said and "computed again" in said
        assert stored.read_bytes() == content
    assert "damaged" not in run(files, *afresh, f"model.lora.path={first}", algorithm="dpo")


@pytest.mark.long
def test_a_run_goes_on_with_the_reference_that_it_began_with(files, tmp_path):
    out, reference = tmp_path / "out", tmp_path / "reference"
    shutil.copytree(files / "other_weights", reference)
    run(files, f"output_dir={out}", f"dpo.reference_model={reference}", "checkpoint.export_hf=false", algorithm="dpo")
    more = (f"output_dir={out}", "checkpoint.export_hf=false", "trainer.max_steps=3")
    refused(files, out, "dpo.reference_model: .*is of another run", *more, algorithm="dpo")
    model = f"dpo.reference_model={files / 'model'}"
    refused(files, out, "dpo.reference_model: other weights in ", *more, model, algorithm="dpo")
    moved = reference.rename(tmp_path / "moved")
    said = run(files, *more, f"dpo.reference_model={moved}", algorithm="dpo")
    assert "resumed from" in said and "reference_model" not in said


# ------------------------------------------------------------------ stopped and saved


def train_with_signals(path, overrides, signals):
    """A run that receives signals while it trains its second step."""
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    plain = MegatronPolicy.forward_backward

    def interrupted(self, *args, **kwargs):
        if self.scheduler.num_steps == 1:
            for number in signals:
                os.kill(os.getpid(), number)
        return plain(self, *args, **kwargs)

    MegatronPolicy.forward_backward = interrupted
    return train("sft", path, overrides)


def test_ctrl_c_saves_and_the_run_goes_on(files, tmp_path):
    overrides = [f"output_dir={tmp_path / 'out'}", "trainer.max_steps=4"]
    arguments = (files / "config.yaml", overrides, [signal.SIGINT])
    (text,) = run_processes(train_with_signals, *arguments, world_size=1)
    assert text.endswith("stopped by SIGINT after step 2; the same command goes on from here\nexit status 130\n")
    assert [path.name for path in CheckpointStore(tmp_path / "out" / "checkpoints").iterations()] == ["iter_0000002"]
    assert not (tmp_path / "out" / "hf").exists()
    assert not (tmp_path / "out" / "run.lock").exists()
    assert "resumed from" in run(files, *overrides)
    assert [json.loads(line)["step"] for line in (tmp_path / "out" / "metrics.jsonl").open()] == [1, 2, 3, 4]


def test_a_second_signal_ends_at_once(files, tmp_path):
    arguments = (files / "config.yaml", [f"output_dir={tmp_path / 'out'}"], [signal.SIGINT, signal.SIGINT])
    with pytest.raises(WorkerError, match="the process died"):
        run_processes(train_with_signals, *arguments, world_size=1)
    assert not CheckpointStore(tmp_path / "out" / "checkpoints").iterations()


@pytest.mark.parametrize(("keep_last", "left"), [("null", [2, 4, 5]), ("2", [4, 5])])
def test_the_clock_saves_between_the_intervals(keep_last, left, files, tmp_path):
    """Every step is due; a checkpoint that only the clock requested is removed after the next one, unless retention
    keeps it."""
    clock = ("checkpoint.save_minutes=1e-9", "checkpoint.save_interval=2", f"checkpoint.keep_last={keep_last}")
    text = run(files, f"output_dir={tmp_path}", "trainer.max_steps=5", "checkpoint.export_hf=false", *clock)
    assert text.count("checkpoint: ") == 5
    steps = [int(path.name[5:]) for path in CheckpointStore(tmp_path / "checkpoints").iterations()]
    assert steps == left


KILLED = """
import os
from mcore_rl.platform import initialize_platform
initialize_platform()
from mcore_rl.algorithms.sft import train_sft
from mcore_rl.algorithms.supervised import SupervisedTrainer
from mcore_rl.cli.entry_point import run_script
from mcore_rl.config import SFTConfig
from mcore_rl.run.checkpoints import RunCheckpoints

step, remove = SupervisedTrainer.train_step, RunCheckpoints._remove_passing

def step_or_die(self, number):
    if os.environ["KILLED_BEFORE"] == "the next step" and number == 4:
        os._exit(9)
    return step(self, number)

def remove_or_die(self, newest):
    if os.environ["KILLED_BEFORE"] == "the removal" and newest.name == "iter_0000002":
        os._exit(9)
    remove(self, newest)

if __name__ == "__main__":
    SupervisedTrainer.train_step, RunCheckpoints._remove_passing = step_or_die, remove_or_die
    run_script("sft", SFTConfig, train_sft, "")
"""


@pytest.mark.long
@pytest.mark.parametrize(("killed_before", "found"), [("the next step", [2, 3]), ("the removal", [1, 2])])
def test_a_restarted_run_removes_what_only_the_clock_saved(killed_before, found, files, tmp_path, monkeypatch):
    """The run is killed while such a checkpoint is on disk, once after the commit of the checkpoint that replaces
    it."""
    (tmp_path / "killed.py").write_text(KILLED)
    overrides = ["checkpoint.save_minutes=1e-9", "checkpoint.save_interval=2", "checkpoint.asynchronous=false"]
    overrides += [f"output_dir={tmp_path / 'out'}", "trainer.max_steps=6", "checkpoint.export_hf=false"]
    store = CheckpointStore(tmp_path / "out" / "checkpoints")
    monkeypatch.setenv("KILLED_BEFORE", killed_before)
    killed = run_program(tmp_path / "killed.py", files / "config.yaml", *overrides, check=False)
    assert killed.returncode == 9, killed.stderr_text
    assert [step_of(path) for path in store.iterations()] == found
    run(files, *overrides)
    assert [step_of(path) for path in store.iterations()] == [2, 4, 6]


# ------------------------------------------------------------------ two runs at once

HOLD = """
import sys, time
from pathlib import Path
from mcore_rl.run.directory import RunDirectory
RunDirectory(Path(sys.argv[1])).claim()
print("held", flush=True)
time.sleep(60)
"""


def test_two_runs_do_not_share_a_directory(files, out):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, out], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        message = f"is being written by another run (pid {holder.pid} on {os.uname().nodename})"
        refused(files, out, message, f"output_dir={out}", "trainer.max_steps=3")
        holder.send_signal(signal.SIGKILL)
        holder.wait(10)
    finally:
        holder.kill()
    assert (out / "run.lock").is_file()
    text = run(files, f"output_dir={out}", "trainer.max_steps=3")
    assert f"(pid {holder.pid} on {os.uname().nodename}) is gone; going on" in text
    assert not (out / "run.lock").exists()


def test_a_directory_that_was_made_for_nothing_disappears(tmp_path):
    directory = RunDirectory(tmp_path / "a" / "b")
    directory.claim()
    assert (tmp_path / "a" / "b" / "run.lock").is_file()
    directory.release()
    assert not (tmp_path / "a").exists()


def test_a_lock_is_given_up_with_the_process_not_with_its_children(tmp_path):
    """A process that still writes a checkpoint must not keep the next attempt of its run from starting."""
    code = HOLD.replace("time.sleep(60)", "import os\nif os.fork(): os._exit(0)\ntime.sleep(20)")
    holder = subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    holder.wait(10)
    started = time.monotonic()
    directory = RunDirectory(tmp_path)
    assert "is gone" in directory.claim()
    directory.release()
    assert time.monotonic() - started < 5
