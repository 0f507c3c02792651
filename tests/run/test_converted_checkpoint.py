"""Tests of runs whose `model.path` is a checkpoint, which is converted to a model directory."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from programs import run
from safetensors.torch import load_file
from small_models import make_tokenizer

from mcore_rl.cli.entry_point import with_local_models
from mcore_rl.config import SFTConfig, build_config
from mcore_rl.errors import UserError

THEIRS = Path(__file__).parents[1] / "megatron" / "checkpoint" / "megatron_lm"
"""A checkpoint that Megatron-LM wrote."""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MCORE_RL_CACHE", str(tmp_path / "cache"))
    shutil.copytree(THEIRS / "config", tmp_path / "config")
    make_tokenizer().save_pretrained(tmp_path / "config")
    return tmp_path / "cache" / "converted"


def config_of(path, **model):
    values = {"model": {"path": str(path), **model}, "data": {"train": "not read"}, "output_dir": "out"}
    return build_config(SFTConfig, values, [], "test")


def resolved(cache, path=THEIRS):
    return with_local_models(config_of(path, config_path=str(cache.parents[1] / "config")))


@pytest.mark.long
def test_a_checkpoint_of_megatron_lm_is_trained_evaluated_and_served(cache, tmp_path):
    """From the checkpoint itself, the same as from the model directory that the command makes of it."""
    run("convert", "to-hf", THEIRS, tmp_path / "hf", "--model", tmp_path / "config")
    records = [{"prompt": f"say {i} ", "completion": "ab", "answer": "ab"} for i in range(4)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    from_theirs = [THEIRS / "iter_0000002", f"model.config_path={tmp_path / 'config'}"]
    for name, model, *more in (("theirs", *from_theirs), ("hf", tmp_path / "hf")):
        files = ["--model", model, "--data", tmp_path / "data.jsonl", "--output", tmp_path / f"from_{name}"]
        options = ["trainer.max_steps=2", "batch.global_batch_size=2", "data.max_sequence_length=48", *more]
        done = subprocess.run(
            [sys.executable, "-m", "mcore_rl", "train", "sft", "--nproc-per-node", "2", *map(str, [*files, *options])],
            capture_output=True, text=True, timeout=180, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("converting ") == (name == "theirs")
    trained = {name: load_file(tmp_path / f"from_{name}" / "hf" / "model.safetensors") for name in ("theirs", "hf")}
    assert all(torch.equal(trained["theirs"][key], tensor) for key, tensor in trained["hf"].items())
    (directory,) = (path for path in cache.iterdir() if path.is_dir())
    assert yaml.safe_load((tmp_path / "from_theirs" / "config.yaml").read_text())["model"]["path"] == str(directory)
    evaluated = ["--data", tmp_path / "data.jsonl", "--judge", "exact_match", "grpo.max_new_tokens=4"]
    for name, model, *more in (("of_theirs", *from_theirs), ("of_hf", tmp_path / "hf")):
        done = run("eval", model, *evaluated, "--output", tmp_path / name, *more)
        assert "converting " not in done.stdout_text, "it has been converted before"
    first, second = ((tmp_path / name / "samples.jsonl").read_text() for name in ("of_theirs", "of_hf"))
    assert first == second


@pytest.mark.long
def test_several_processes_convert_once(cache, tmp_path):
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import test_converted_checkpoint as t; from pathlib import Path;"
        "print(t.resolved(Path(sys.argv[2])).model.path)"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1] / "support"), os.getcwd()]),
    }
    command = [sys.executable, "-c", program, str(Path(__file__).parent), str(cache)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    printed = [process.communicate(timeout=120)[0].splitlines() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert printed[0][-1] == printed[1][-1] and sum("converting " in line for own in printed for line in own) == 1
    assert sorted(path.name for path in cache.iterdir()) == [Path(printed[0][-1]).name]
    (tmp_path / "config" / "tokenizer_config.json").write_text("{}")
    assert (tmp_path / "config" / "config.json").is_file()


@pytest.mark.long
def test_what_a_killed_conversion_left_is_replaced(cache, monkeypatch):
    from mcore_rl.run import converted_checkpoint as module

    calls = []

    def convert(checkpoint, config_directory, final):
        calls.append(final)
        original(checkpoint, config_directory, final)

    original = module._convert
    monkeypatch.setattr(module, "_convert", convert)
    path = resolved(cache).model.path
    assert resolved(cache).model == resolved(cache).model and len(calls) == 1
    (path / "model.safetensors").unlink()
    shutil.copytree(path, path.with_name(f"{path.name}.partial"))
    assert resolved(cache).model.path == path and len(calls) == 2
    assert (path / "model.safetensors").is_file() and list(cache.iterdir()) == [path]
    os.utime(cache.parents[1] / "config" / "config.json", (1, 1))
    assert resolved(cache).model.path != path and len(calls) == 3


@pytest.mark.long
def test_a_conversion_ends_with_its_command(cache, tmp_path):
    files = [THEIRS, f"model.config_path={tmp_path / 'config'}"]
    with subprocess.Popen(
        [sys.executable, "-m", "mcore_rl", "serve", *map(str, files)], stdout=subprocess.PIPE, text=True
    ) as served:
        assert any("converting " in line for line in served.stdout)
        deadline = time.monotonic() + 30
        while not (family := [p for p in psutil.Process(served.pid).children() if "to-hf" in p.cmdline()]):
            assert time.monotonic() < deadline
        served.kill()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert alive == []


@pytest.mark.long
def test_what_cannot_be_converted_is_refused(cache, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"was written by Megatron-LM or Megatron-Bridge; set model.config_path"):
        with_local_models(config_of(THEIRS))
    with pytest.raises(UserError, match=r"^model.config_path: .* does not exist"):
        with_local_models(config_of(THEIRS, config_path=str(tmp_path / "none")))
    for path in (tmp_path / "file", Path("/proc/none")):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("MCORE_RL_CACHE", str(path))
        with pytest.raises(UserError, match=r"cannot be converted, because .* cannot be written .* MCORE_RL_CACHE"):
            resolved(cache)
    monkeypatch.setenv("MCORE_RL_CACHE", str(cache.parent))
    with pytest.raises(UserError, match=r"model.config_path: is only for checkpoints"):
        with_local_models(config_of(tmp_path / "config", config_path=str(tmp_path / "config")))
    values = json.loads((tmp_path / "config" / "config.json").read_text())
    (tmp_path / "config" / "config.json").write_text(json.dumps({**values, "num_hidden_layers": 9}))
    with pytest.raises(UserError, match=r"^model.path: .*has another architecture than the model: num_hidden_layers"):
        resolved(cache)
    assert list(cache.iterdir()) == []
