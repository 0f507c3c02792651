"""Processes that were given something else than the first one end the run before its first step."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from models import and_long, make_model
from ports import free_port
from safetensors.torch import load_file, save_file

from mcore_rl.algorithms.agreement import Given, disagreement
from mcore_rl.config import SFTConfig
from mcore_rl.run_identity import RunIdentity


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Two nodes' directories: each has a model and data of its own, which are the same."""
    root = tmp_path_factory.mktemp("nodes")
    make_model("llama", root / "0" / "model")
    write(root / "0" / "data.jsonl", "ab")
    shutil.copytree(root / "0", root / "1")
    (root / "2").mkdir()
    write(root / "2" / "data.jsonl", "ba")
    tensors = load_file(root / "0" / "model" / "model.safetensors")
    shutil.copytree(root / "0" / "model", root / "2" / "model")
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], 1.5)
    save_file(tensors, root / "2" / "model" / "model.safetensors", {"format": "pt"})
    return root


def write(path, text):
    path.write_text("".join(json.dumps({"prompt": f"say {i} ", "completion": text * (i + 1)}) + "\n" for i in range(4)))


def start_nodes(files, out, of_second, algorithm="sft", **of_both):
    """Two processes, each the first of its node, the second with values of its own."""
    own = {"model.path": files / "0" / "model", "data.train": files / "0" / "data.jsonl", **of_both}
    port, started = free_port(), []
    for rank in (0, 1):
        values = {**own, **(of_second if rank else {})}
        command = [
            sys.executable,
            f"scripts/train_{algorithm}.py",
            *(f"{key}={value}" for key, value in values.items()),
        ]
        command += [
            f"output_dir={out}",
            "trainer.max_steps=1",
            "data.max_sequence_length=48",
            "batch.global_batch_size=4",
        ]
        environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": ""}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, env=environment, **pipes))
    try:
        told = [process.communicate(timeout=120) for process in started]
    finally:
        for process in started:
            process.kill()
    return [process.returncode for process in started], told


@pytest.mark.parametrize(
    ("key", "value"),
    and_long(
        [("data.train", "2/data.jsonl")],
        [
            ("model.path", "2/model"),
            ("optimizer.lr", "3e-4"),
            ("batch.tokens_per_pack", "480"),
            ("parallel.tensor_model_parallel_size", "2"),
        ],
    ),
)
def test_another_nodes_is_told(key, value, files, tmp_path):
    status, told = start_nodes(files, tmp_path / "out", {key: files / value if "/" in value else value})
    assert status == [2, 2], told
    assert told[0][1].startswith(f"error: {key}") and "process 1 (on " in told[0][1], told[0][1]
    assert told[0][1].count("\n") == 1 and not list(tmp_path.rglob("metrics.jsonl"))


@pytest.mark.long
def test_nothing_is_computed_for_later_runs_by_processes_that_differ(files, tmp_path):
    """Log-probabilities of a reference are kept by a key that the first process makes."""
    pairs = [{"prompt": "say ", "chosen": "ab" * (i + 1), "rejected": "ba"} for i in range(4)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    key, model = "dpo.reference_model", files / "0" / "model"
    of_both = {"data.train": tmp_path / "pairs.jsonl", "dpo.reference": "precompute", key: model}
    status, told = start_nodes(files, tmp_path / "out", {}, "dpo", **of_both)
    assert status == [0, 0], told
    status, told = start_nodes(files, tmp_path / "other", {key: files / "2" / "model"}, "dpo", **of_both)
    assert status == [2, 2] and told[0][1].startswith(f"error: {key}: other weights"), told
    assert list((tmp_path / "out").glob("reference_logprobs/*")), "where processes agree they are kept"
    assert not list((tmp_path / "other").glob("reference_logprobs/*"))


@pytest.mark.long
def test_the_same_may_be_elsewhere(files, tmp_path):
    elsewhere = {"model.path": files / "1" / "model", "data.train": files / "1" / "data.jsonl"}
    elsewhere["data.cache_dir"] = tmp_path / "cache"
    status, told = start_nodes(files, tmp_path / "out", elsewhere)
    assert status == [0, 0], told


def given(host="a", data="1", **changes):
    values = {"output_dir": "out", "model": {"path": "m"}, "data": {"train": "d"}, "optimizer": {"lr": 1e-3}}
    for key, value in changes.pop("config", {}).items():
        section, name = key.split(".")
        values.setdefault(section, {})[name] = value
    config = SFTConfig.model_validate(values).model_dump(mode="json")
    identity = replace(RunIdentity("sft", {"hidden_size": 8}, "w", data, config), **changes)
    return Given(host, {"data.train": data, "data.validation": "v"}, identity.to_json())


def test_what_must_be_the_same():
    first = given()
    of_other_process = Given("a", first.data, "")
    assert (
        disagreement([first, of_other_process, given("b", config={"data.cache_dir": "/local", "data.train": "e"})])
        == ""
    )
    for other, key in (
        (
            given("b", data="2"),
            "data.train: process 2 (on b) was given something else than process 0 (on a); every node",
        ),
        (Given("b", {"data.train": "1", "data.validation": "w"}, ""), "data.validation: process 2"),
        (given("b", architecture={"hidden_size": 9}), "model.path: process 2"),
        (given("b", base_weights="x"), "model.path: other weights: process 2"),
        (given("b", config={"optimizer.lr": 0.1}), "optimizer.lr 0.001 → 0.1: process 2"),
        (given("b", config={"data.max_sequence_length": 99}), "data.max_sequence_length 1024 → 99: process 2"),
    ):
        assert disagreement([first, of_other_process, other]).startswith(key), disagreement([first, first, other])
