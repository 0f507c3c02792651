"""Tests of conversion: bit-exact in both directions, the same checkpoints as in training, no unpickling."""

import io
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from layout_cases import make_config
from old_checkpoints import remove_module
from programs import run
from safetensors.torch import load_file
from small_models import ALIKE, ARCHITECTURES, and_long
from transformers import AutoModelForCausalLM

from mcore_rl.errors import WorkerError
from mcore_rl.testing.layout_check import ParallelLayout
from mcore_rl.testing.processes import run_processes

QUICK = ("llama", "gpt_oss", "qwen3_5")
FAMILIES = and_long(QUICK, [family for family in ARCHITECTURES if family not in (*QUICK, *ALIKE)], ALIKE)
LAYOUTS = and_long(
    [("mixtral", ParallelLayout(dp=2, ep=2))],
    [
        ("llama", ParallelLayout(pp=2)),
        ("qwen2", ParallelLayout(tp=2)),
        ("llama", ParallelLayout(tp=2)),
        ("qwen2", ParallelLayout(pp=2)),
        ("qwen3", ParallelLayout(tp=2)),
        ("qwen2_moe", ParallelLayout(tp=2, sp=True)),
        ("glm4_moe", ParallelLayout(pp=2)),
        ("phi3", ParallelLayout(tp=2)),
        ("gpt_oss", ParallelLayout(tp=2, sp=True)),
        ("gpt_oss", ParallelLayout(tp=2, ep=2, etp=1, sp=True)),
        ("deepseek_v3", ParallelLayout(tp=2, sp=True)),
        ("ernie4_5_moe", ParallelLayout(dp=2, ep=2)),
        ("glm4", ParallelLayout(tp=2)),
        ("qwen3_5", ParallelLayout(tp=2, sp=True)),
        ("qwen3_next", ParallelLayout(pp=2)),
        ("nemotron_h_moe", ParallelLayout(tp=2, ep=2, etp=1, sp=True)),
    ],
    [("nemotron_h", ParallelLayout(pp=2))],
)


def convert(source, destination):
    from mcore_rl.models.megatron.checkpoint.convert import hf_to_megatron

    return hf_to_megatron(Path(source), Path(destination), lambda items, total: items)


def convert_back(iteration, source, destination):
    from mcore_rl.models.megatron.checkpoint.convert import megatron_to_hf

    megatron_to_hf(iteration, source, destination, lambda items, total: items)


def assert_same_tensors(ours, theirs):
    a, b = load_file(ours / "model.safetensors"), load_file(theirs / "model.safetensors")
    assert set(a) == set(b)
    assert all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in b)


# In bf16 some tensors of some families are fp32.
PRECISIONS = and_long([torch.bfloat16], [], [torch.float32])


@pytest.mark.every_case
@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_is_bit_exact(family, dtype, model_of, tmp_path):
    AutoModelForCausalLM.from_pretrained(model_of(family), dtype=dtype).save_pretrained(tmp_path / "model")
    (iteration,) = run_processes(convert, tmp_path / "model", tmp_path / "megatron", world_size=1)
    run_processes(convert_back, iteration, tmp_path / "model", tmp_path / "back", world_size=1)
    assert_same_tensors(tmp_path / "back", tmp_path / "model")


@pytest.mark.long
def test_a_checkpoint_from_before_models_had_indexers_gets_those_of_the_directory(model_of, tmp_path):
    """It is converted, and loaded in a run."""
    path = model_of("deepseek_v32")
    (iteration,) = run_processes(convert, path, tmp_path / "megatron", world_size=1)
    remove_module(iteration, "indexer.")
    run_processes(convert_back, iteration, path, tmp_path / "back", world_size=1)
    assert_same_tensors(tmp_path / "back", path)
    loaded = run_processes(weights_by_loading, iteration, make_config(path), world_size=1)[0]
    expected = load_file(tmp_path / "back" / "model.safetensors")
    indexers = {name for name in loaded if ".indexer." in name}
    assert indexers and all((loaded[name] == 7).all() for name in indexers), "they keep what they had"
    assert all(torch.equal(loaded[name], expected[name]) for name in loaded.keys() & expected.keys() - indexers)


def weights_by_loading(iteration, config):
    from mcore_rl.models.megatron.weights.conversion import export_hf_weights, named_mappings
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config)
    with torch.no_grad():
        for _, tensor in named_mappings(policy.model):
            tensor.fill_(7)
    policy.checkpoint.load_weights(iteration)
    exported = dict(export_hf_weights(policy.model))
    policy.shutdown()
    return exported


@pytest.mark.every_case
@pytest.mark.parametrize(("family", "layout"), LAYOUTS, ids=str)
def test_any_layout_loads_what_was_converted(family, layout, model_of, tmp_path):
    from layout_cases import make_config

    (iteration,) = run_processes(convert, model_of(family), tmp_path / "megatron", world_size=1)
    config = layout.apply(make_config(model_of(family)))
    loaded = run_processes(weights_by_loading, iteration, config, world_size=2)[0]
    for name, tensor in load_file(model_of(family) / "model.safetensors").items():
        assert torch.equal(loaded[name], tensor), name


@pytest.mark.long
def test_the_script(model_of, tmp_path):
    made = run("convert", "from-hf", model_of("llama"), tmp_path / "megatron")
    assert f"Megatron checkpoint: {tmp_path / 'megatron' / 'iter_0000001'}" in made.stdout_text
    seen = run("convert", "inspect", tmp_path / "megatron").stdout_text
    assert "iter_0000001: whole" in seen
    assert "output_layer.weight" in seen
    assert "float32  256 x 64" in seen
    assert "model: 9 tensors" in seen
    (tmp_path / "megatron" / "iter_0000001" / "__0_0.distcp").write_bytes(b"")
    broken = run("convert", "to-hf", tmp_path / "megatron", tmp_path / "hf", check=False)
    assert broken.returncode == 2
    assert "__0_0.distcp has 0 bytes" in broken.stderr_text
    assert not (tmp_path / "hf").exists()
    again = run("convert", "from-hf", model_of("llama"), tmp_path / "megatron", check=False)
    assert "holds checkpoints already" in again.stderr_text


class Harmful:
    def __reduce__(self):
        return os.system, ("touch " + os.environ["HARM"],)


def poison_index(iteration):
    (iteration / ".metadata").write_bytes(pickle.dumps(Harmful()))


def poison_common(iteration):
    torch.save({"state": Harmful()}, iteration / "common.pt")


def poison_an_object(iteration):
    """Replace a small object among the shards, and update its record and the index."""
    index = pickle.loads((iteration / ".metadata").read_bytes())
    place = next(place for place in index.storage_data if "_extra_state" in place.fqn)
    stream = io.BytesIO()
    torch.save(Harmful(), stream)
    (iteration / "poison").write_bytes(stream.getvalue())
    changes = {"relative_path": "poison", "offset": 0, "length": len(stream.getvalue())}
    index.storage_data[place] = type(index.storage_data[place])(**changes)
    (iteration / ".metadata").write_bytes(pickle.dumps(index))


def leave_the_directory(iteration):
    index = pickle.loads((iteration / ".metadata").read_bytes())
    for storage in index.storage_data.values():
        storage.relative_path = f"../{iteration.name}/{storage.relative_path}"
    (iteration / ".metadata").write_bytes(pickle.dumps(index))


@pytest.mark.parametrize(
    ("poison", "message"),
    [
        (poison_index, "which an index never contains"),
        (poison_common, "common.pt refers to .*system"),
        (poison_an_object, "_extra_state.* refers to .*system"),
        (leave_the_directory, "which must be a file of"),
    ],
)
def test_code_in_a_checkpoint_never_runs(poison, message, model_of, tmp_path, monkeypatch):
    from layout_cases import make_config

    monkeypatch.setenv("HARM", str(tmp_path / "harm"))
    (iteration,) = run_processes(convert, model_of("llama"), tmp_path / "megatron", world_size=1)
    poison(iteration)
    with pytest.raises(WorkerError, match=message):
        run_processes(weights_by_loading, iteration, make_config(model_of("llama")), world_size=1)
    assert not (tmp_path / "harm").exists()


@pytest.mark.long
def test_training_begins_from_converted_weights(model_of, tmp_path):
    """Loading weights only must be requested: such a checkpoint lacks most of the state that a resume needs."""
    import yaml

    run_processes(convert, model_of("llama"), tmp_path / "megatron", world_size=1)
    shutil.copytree(model_of("llama"), tmp_path / "other")
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 4)
    config = {
        "output_dir": str(tmp_path / "out"),
        "model": {"path": str(tmp_path / "other")},
        "data": {"train": str(tmp_path / "data.jsonl"), "max_sequence_length": 16},
        "batch": {"global_batch_size": 4},
        "optimizer": {"lr": 0.0},
        "trainer": {"max_steps": 1},
    }
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(config))
    arguments = (tmp_path / "sft.yaml", f"checkpoint.resume={tmp_path / 'megatron'}")
    refused = run("train_sft.py", *arguments, check=False)
    assert refused.returncode == 2
    assert (
        "lacks optimizer, schedule, random states, data position; set checkpoint.allow_partial" in refused.stderr_text
    )
    begun = run("train_sft.py", *arguments, "checkpoint.allow_partial=true")
    assert "start anew: optimizer, schedule, random states, data position" in begun.stdout_text
    assert_same_tensors(tmp_path / "out" / "hf", model_of("llama"))  # a learning rate of 0 keeps them
    again = run("train_sft.py", *arguments, "checkpoint.allow_partial=true", "trainer.max_steps=2")
    assert f"resumed from {tmp_path / 'out' / 'checkpoints' / 'iter_0000001'}" in again.stdout_text
