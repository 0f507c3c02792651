"""Tests of what users name as a model: directories of models, runs, checkpoints and adapters."""

import json
from pathlib import Path

import pytest
import yaml
from small_models import make_model

from mcore_rl.errors import UserError
from mcore_rl.run.identity import RunIdentity
from mcore_rl.serving.model_source import LONGEST, find_model, overrides_for

THEIRS = Path(__file__).parents[1] / "megatron" / "checkpoint" / "megatron_lm"


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


@pytest.mark.parametrize(("positions", "length"), [(8192, 8192), (2050, 2050), (10**6, LONGEST)])
def test_the_context_is_the_models(positions, length, model, tmp_path):
    """Also if options need more than the default of `data.max_sequence_length`."""
    values = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "max_position_embeddings": positions}))
    config = find_model(str(tmp_path), ["grpo.max_new_tokens=1500"]).config
    assert (config.data.max_sequence_length, config.rollouts.max_new_tokens) == (length, 1500)
    asked = find_model(str(tmp_path), [], {"grpo": {"max_new_tokens": min(2048, length // 2)}}).config
    assert asked.data.max_sequence_length == length


def test_the_context_of_a_model_on_the_hub_is_read_there(model, monkeypatch):
    monkeypatch.setattr("mcore_rl.serving.model_source.download", lambda name, key, with_weights: model)
    positions = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    assert find_model("some/name", []).config.data.max_sequence_length == positions
    config = find_model(str(THEIRS), ["model.config_path=some/name"]).config
    assert config.data.max_sequence_length == positions


def test_a_configuration_directory_is_only_for_checkpoints_of_others(model):
    changes = ["model.config_path=x", "seed=3"]
    assert overrides_for(str(model), changes) == overrides_for("some/name", changes) == ["seed=3"]
    assert overrides_for(str(THEIRS), changes) == overrides_for(str(THEIRS / "iter_0000002"), changes) == changes
    source = find_model(str(THEIRS), [f"model.config_path={THEIRS / 'config'}"])
    assert (source.config.model.path, source.checkpoint) == (THEIRS, None)
    positions = json.loads((THEIRS / "config" / "config.json").read_text())["max_position_embeddings"]
    assert source.config.data.max_sequence_length == positions


def test_a_name_on_the_hub_is_kept(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
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


def test_a_checkpoint_without_its_files_is_refused(tmp_path):
    (tmp_path / "metadata.json").write_text("{}")
    with pytest.raises(UserError, match=r"config.yaml: does not exist; is this a checkpoint\?"):
        find_model(str(tmp_path), [])
