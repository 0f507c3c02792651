"""Tests that a run ends before its first step if the inputs of a process differ from those of process 0."""

import json
import os
import re
import shutil
from dataclasses import replace

import pytest
import torch
from forked_programs import ForkedProgram
from ports import free_port
from safetensors.torch import load_file, save_file
from small_models import and_long, make_model

from mcore_rl.config import GRPOConfig, SFTConfig
from mcore_rl.run.identity import RunIdentity
from mcore_rl.run.setup import ProcessInputs, disagreement, files_of


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Write the directories of two nodes, each with a copy of the same model and data."""
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


def start_nodes(files, out, of_second, algorithm="sft", where=(None, None), options=(), **of_both):
    """Run two processes, each the first of its node, the second with different values."""
    own = {"output_dir": out, "model.path": files / "0" / "model", "data.train": files / "0" / "data.jsonl", **of_both}
    port, started = free_port(), []
    for rank in (0, 1):
        values = {**own, **(of_second if rank else {})}
        command = [
            os.path.abspath(f"scripts/train_{algorithm}.py"),
            *(f"{key}={value}" for key, value in values.items()),
        ]
        command += [
            "trainer.max_steps=1",
            "data.max_sequence_length=48",
            *(["grpo.num_prompts_per_step=4"] if algorithm == "grpo" else ["batch.global_batch_size=4"]),
            *(options if rank else ()),
        ]
        environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": ""}
        started.append(ForkedProgram(command, environment, cwd=where[rank]))
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
            ("checkpoint.save_interval", "1"),
            ("logging.tensorboard", "true"),
            ("data.validation", "{b: 0/data.jsonl, a: 0/data.jsonl}"),
            ("data.validation", "{a: 0/data.jsonl, b: 0/data.jsonl, c: 0/data.jsonl}"),
            ("data.validation", "0/data.jsonl"),
            ("data.validation", "null"),
        ],
    ),
)
def test_train_refuses_values_that_differ_between_nodes(key, value, files, tmp_path):
    # A path of the files may itself match the pattern ("pytest-172/"), so replace all matches at once.
    value, validation = (
        re.sub("([02])/", lambda node: f"{files / node[1]}/", text)
        for text in (value, "{a: 0/data.jsonl, b: 0/data.jsonl}")
    )
    status, told = start_nodes(files, tmp_path / "out", {key: value}, **{"data.validation": validation})
    assert status == [2, 2], told
    assert key in told[0][1] and "process 1 (on " in told[0][1] and told[0][1].startswith("error: "), told[0][1]
    assert told[0][1].count("\n") == 1 and not list(tmp_path.rglob("metrics.jsonl"))


@pytest.mark.long
def test_train_refuses_output_directory_that_is_not_shared(files, tmp_path):
    """Each node has a local disk under the path of `output_dir`."""
    of_second = {"output_dir": tmp_path / "other"}
    status, told = start_nodes(files, tmp_path / "out", of_second, **{"parallel.timeout_seconds": 20})
    assert status == [2, 2] and told[0][1].startswith("error: output_dir: process 1 (on "), told
    assert not list(tmp_path.iterdir()), "nothing is left"


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
    (tmp_path / "link").symlink_to(tmp_path)
    elsewhere["output_dir"] = tmp_path / "link" / "out"
    status, told = start_nodes(files, tmp_path / "out", elsewhere)
    assert status == [0, 0], told


@pytest.mark.long
def test_a_process_that_ends_alone_is_told_by_the_others(files, tmp_path):
    """The data is missing on one node."""
    of_second = {"data.train": files / "nowhere.jsonl"}
    status, told = start_nodes(files, tmp_path / "out", of_second, **{"parallel.timeout_seconds": 12})
    assert status == [2, 2] and "nowhere.jsonl does not exist" in told[1][1], told
    assert told[0][1].startswith("error: parallel.timeout_seconds=12: not all 2 processes have joined within this time")
    assert told[0][1].count("\n") == 1


@pytest.mark.long
def test_train_refuses_other_command_line_options_on_second_node(files, tmp_path):
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "say {i} ", "answer": "a"}}\n' for i in range(4)))
    of_both = {"data.train": tmp_path / "prompts.jsonl", "grpo.max_new_tokens": 4}
    options = ("--record", str(tmp_path / "recording.jsonl"))
    status, told = start_nodes(files, tmp_path / "out", {}, "grpo", options=options, **of_both)
    assert status == [2, 2] and told[0][1].startswith("error: --record: process 1 (on "), told


@pytest.mark.long
def test_train_refuses_other_checkpoint_on_second_node(files, tmp_path):
    """The same path leads to different checkpoints of the same run on each node."""
    links = []
    for name, rate in (("a", "1e-3"), ("b", "2e-3")):
        status, told = start_nodes(files, tmp_path / name, {}, **{"optimizer.lr": rate})
        assert status == [0, 0], told
        (tmp_path / f"of_{name}").mkdir()
        (tmp_path / f"of_{name}" / "old").symlink_to(tmp_path / name / "checkpoints")
        links.append(tmp_path / f"of_{name}")
    resumed = {"checkpoint.resume": "old", "model.path": files / "0" / "model"}
    status, told = start_nodes(files, tmp_path / "out", {}, where=links, **resumed)
    assert status == [2, 2] and told[0][1].startswith("error: checkpoint.resume: process 1 (on "), told


def test_train_refuses_other_files_on_second_node(files, tmp_path, monkeypatch):
    """Files other than weights and data that determine the numbers are compared."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_judge.py").write_text("def judge(log, record): return 1.0\n")
    model = shutil.copytree(files / "0" / "model", tmp_path / "model")
    (tmp_path / "iter_0000001").mkdir()
    (tmp_path / "iter_0000001" / "manifest.json").write_text("{}")
    judged = {"name": "function", "function": "own_judge:judge"}
    values = {"output_dir": "out", "model": {"path": model}, "data": {"train": "d"}, "environment": judged}
    config = GRPOConfig.model_validate(values)

    def differences():
        now = ProcessInputs("b", {"data.train": "1", **files_of(config, [tmp_path / "iter_0000001"])})
        return disagreement([ProcessInputs("a", before), now]).partition(": process")[0]

    before = {"data.train": "1", **files_of(config, [tmp_path / "iter_0000001"])}
    assert differences() == ""
    values = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**values, "_name_or_path": "elsewhere"}))
    assert differences() == ""
    for file, text, key in (
        (
            model / "config.json",
            json.dumps({**values, "rms_norm_eps": 10}),
            "model.path: other configuration or tokenizer",
        ),
        (model / "special_tokens_map.json", "{}", "model.path: other configuration or tokenizer"),
        (tmp_path / "own_judge.py", "def judge(log, record): return 2.0\n", "environment.function: other code of own"),
        (tmp_path / "iter_0000001" / "manifest.json", "{ }", "checkpoint.resume"),
    ):
        kept = file.read_text() if file.exists() else None
        file.write_text(text)
        assert differences().startswith(key), file
        file.unlink() if kept is None else file.write_text(kept)


def given(host="b", read=("1", "v"), sections=None, environment=None, torch_version="2", **changes):
    values = {"output_dir": "out", "model": {"path": "m"}, "data": {"train": "d"}, **(sections or {})}
    config, judged = (GRPOConfig, {"environment": environment}) if environment else (SFTConfig, {})
    values = config.model_validate(values | judged).model_dump(mode="json")
    identity = replace(RunIdentity("sft", {"hidden_size": 8}, "w", read[0], values), **changes)
    fingerprints = dict(zip(("data.train", "data.validation"), read, strict=True))
    return ProcessInputs(host, fingerprints, identity.to_json(), {"torch": torch_version})


LORA = {"model": {"path": "m", "lora": {"rank": 4}}}


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"read": ("2", "v")}, "data.train: d is other data: process 2 (on b) was given something else than process 0"),
        ({"read": ("2", "v"), "torch_version": "2.1"}, "torch 2 → 2.1: process 2"),
        ({"read": ("1", "w")}, "data.validation: process 2"),
        ({"architecture": {"hidden_size": 9}}, "model.path hidden_size 8 → 9: process 2"),
        ({"base_weights": "x"}, "model.path: other weights: process 2"),
        ({"chat_day": "2024-02-29"}, "the date  → 2024-02-29: process 2"),
        ({"sections": {"optimizer": {"lr": 0.1}}}, "optimizer.lr 2e-05 → 0.1: process 2"),
        ({"sections": {"checkpoint": {"save_interval": 2}}}, "checkpoint.save_interval None → 2: process 2"),
        ({"sections": LORA}, "model.lora None → (not given): process 2"),
        (
            {"read": ("2", "v"), "sections": {"data": {"train": "d", "overlong": "truncate"}}},
            "data.overlong drop → trun",
        ),
    ],
)
def test_what_must_be_the_same(other, told):
    of_other_process = ProcessInputs("a", {"data.train": "1", "data.validation": "v"})
    first = given("a")
    assert disagreement([first, of_other_process, given()]) == ""
    assert disagreement([first, of_other_process, given(**other)]).startswith(told)


def test_sections_of_the_first_process_alone():
    assert disagreement([given(sections=LORA), given()]).startswith("model.lora.")


@pytest.mark.parametrize("sets", [("b", "a"), ("a",), ("a", "b", "c"), ()])
def test_sets_and_their_order(sets):
    first = ProcessInputs("a", {"data.train": "1", "data.validation a": "v", "data.validation b": "v"})
    other = ProcessInputs("b", {"data.train": "1", **{f"data.validation {name}": "v" for name in sets}})
    assert "data.validation" in disagreement([first, other])


JUDGES = {name: {"name": "http", "url": f"http://{name}:8000"} for name in "ab"}


@pytest.mark.parametrize(
    "environments",
    [
        (JUDGES["a"], JUDGES["b"]),
        ({"name": "weighted", "rewards": {"x": JUDGES["a"]}}, {"name": "weighted", "rewards": {"x": JUDGES["b"]}}),
    ],
    ids=["a judge", "one of several"],
)
def test_a_nodes_own_servers(environments):
    """Judges run on the node whose samples they judge."""
    first, other = environments
    assert disagreement([given("a", environment=first), given(environment=other)]) == ""
    slower = {**other, "time_limit_seconds": 99}
    told = disagreement([given("a", environment=first), given(environment=slower)])
    assert told.startswith("environment.time_limit_seconds 10.0 → 99.0: process 1")


def test_a_node_without_the_judges_module_is_named(tmp_path):
    """Before, it looked equal, and the others waited for it."""
    identity = RunIdentity("grpo", {}, "", "", {}).to_json()
    code = {"environment.function: other code of judging:judge": "abc"}
    has, lacks = ProcessInputs("node0", code, identity), ProcessInputs("node1", {}, identity)
    for everyone in ([has, lacks], [lacks, has]):
        told = disagreement(everyone)
        assert told.startswith(
            "environment.function: other code of judging:judge (only one of the two processes has it)"
        )
    assert disagreement([has, ProcessInputs("node0", {})]) == "", (
        "a process that is not the first of its node reads less"
    )


def test_a_module_in_a_package_that_is_not_there_has_no_file(tmp_path):
    config = GRPOConfig.model_validate(
        {
            "output_dir": str(tmp_path), "model": {"path": str(tmp_path)},
            "data": {"train": str(tmp_path / "d.jsonl"), "max_sequence_length": 40},
            "grpo": {"max_new_tokens": 8},
            "environment": {"name": "function", "function": "no_such_package.judging:judge"},
        }
    )  # fmt: skip
    (tmp_path / "config.json").write_text("{}")
    assert not [key for key in files_of(config, []) if "other code" in key]
