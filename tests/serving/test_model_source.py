"""Tests of what users name as a model: directories of models, runs, checkpoints and adapters."""

import json

import pytest
import yaml
from small_models import make_model

from mcore_rl.errors import UserError
from mcore_rl.run.identity import RunIdentity
from mcore_rl.serving.model_source import LONGEST, find_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("source") / "model"
    make_model("qwen2", path)
    return path


def write_run(directory, path, steps=(), **sections):
    """Write the files of a run that `find_model` reads."""
    directory.mkdir(exist_ok=True)
    values = {
        "model": {"path": str(path)}, "data": {"train": "gone.jsonl", "chat_template": None, "max_sequence_length": 7},
        "optimizer": {"lr": 1.0}, "environment": {"name": "try_again"}, "seed": 5, **sections,
    }  # fmt: skip
    (directory / "config.yaml").write_text(yaml.safe_dump(values))
    (directory / "run.json").write_text(RunIdentity("grpo", {}, "", "", {}, "launch").to_json())
    for step in steps:
        iteration = directory / "checkpoints" / f"iter_{step:07d}"
        iteration.mkdir(parents=True)
        for name, content in (("metadata.json", "{}"), ("config.yaml", yaml.safe_dump(values)), (".metadata", "")):
            (iteration / name).write_text(content)
    if steps:
        (directory / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(str(max(steps)))


def test_a_model_directory(model, tmp_path):
    source = find_model(str(model), ["parallel.tensor_model_parallel_size=2", "model.dtype=float32"])
    assert (source.name, source.checkpoint, source.config.model.path) == ("model", None, model)
    assert source.config.parallel.tensor_model_parallel_size == 2 and source.config.rollouts.max_new_tokens is None
    positions = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    assert source.config.data.max_sequence_length == min(positions, LONGEST)
    assert find_model(str(model), ["data.max_sequence_length=33"]).config.data.max_sequence_length == 33


def test_a_name_on_the_hub_is_kept():
    source = find_model("Qwen/Qwen3-0.6B", [])
    assert (source.name, str(source.config.model.path)) == ("Qwen3-0.6B", "Qwen/Qwen3-0.6B")


def test_a_peft_directory(model, tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(model)}))
    source = find_model(str(tmp_path), [])
    assert source.config.model.path == model and source.config.model.lora.path == tmp_path
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="has no base_model_name_or_path"):
        find_model(str(tmp_path), [])


def test_a_run_is_its_newest_checkpoint_with_its_model_and_judge(model, tmp_path, monkeypatch):
    monkeypatch.setattr("mcore_rl.utils.checkpoint_store.quick_problems", lambda path: [])  # these have no weights
    write_run(tmp_path / "run", model, (2, 10))
    source = find_model(str(tmp_path / "run"), [])
    assert source.checkpoint.name == "iter_0000010" and source.config.model.path == model
    assert (source.config.seed, source.config.environment.name) == (5, "try_again")
    assert source.config.data.max_sequence_length > 7 and source.config.optimizer.lr != 1.0
    assert find_model(str(tmp_path / "run"), [], {"environment": {"name": "math"}}).config.environment.name == "math"
    assert find_model(str(tmp_path / "run"), [], which="best").takes_best
    for path in ("run/checkpoints", "run/checkpoints/iter_0000002"):
        found = find_model(str(tmp_path / path), []).checkpoint.name
        assert found == ("iter_0000002" if "iter" in path else "iter_0000010")


def test_a_run_that_has_only_exported(model, tmp_path):
    run = tmp_path / "run"
    write_run(run, model, model={"path": str(model), "lora": {"rank": 2}})
    with pytest.raises(UserError, match=r"has neither exported a model \(hf/\) nor saved a checkpoint"):
        find_model(str(run), [])
    make_model("qwen2", run / "hf")
    for which in (None, "hf"):
        source = find_model(str(run), [], which=which)
        assert (source.config.model.path, source.checkpoint, source.config.model.lora) == (run / "hf", None, None)
    with pytest.raises(UserError, match="the run has no checkpoint"):
        find_model(str(run), [], which="best")


@pytest.mark.parametrize("content", [None, "file", "empty"])
def test_what_is_no_model_is_told(content, tmp_path):
    path = tmp_path / "nothing"
    if content == "file":
        path.write_text("x")
    elif content == "empty":
        path.mkdir()
    with pytest.raises(UserError, match=r"nothing: is not a model; name a model directory"):
        find_model(str(path), [])


def test_a_choice_among_weights_needs_a_run(model):
    with pytest.raises(UserError, match=r"--checkpoint best: .* is not the directory of a run"):
        find_model(str(model), [], which="best")


def test_a_checkpoint_of_another_program_is_to_be_converted(tmp_path):
    (tmp_path / "metadata.json").write_text("{}")
    with pytest.raises(UserError, match=r"convert it first: mcore-rl convert to-hf \S+ DIRECTORY --model"):
        find_model(str(tmp_path), [])
