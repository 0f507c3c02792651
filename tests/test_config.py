"""Configuration: every file in configs/ loads, and every mistake is one line that names the key."""

from pathlib import Path

import pytest

from mcore_rl.config import (
    DPOConfig,
    GRPOConfig,
    KTOConfig,
    ParallelConfig,
    RMConfig,
    SFTConfig,
    load_config,
    resolved_yaml,
)
from mcore_rl.errors import UserError

CONFIGS = Path(__file__).parent.parent / "configs"
MINIMAL = """
output_dir: out
model: {path: model}
data: {train: train.jsonl, max_sequence_length: 64}
batch: {global_batch_size: 8}
optimizer: {lr: 1e-5}
trainer: {max_steps: 3}
"""


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configurations_load(path):
    kinds = {"dpo": DPOConfig, "sft": SFTConfig, "grpo": GRPOConfig, "rm": RMConfig, "kto": KTOConfig}
    config = load_config(kinds[path.name.split("_")[0]], path)
    assert config.optimizer.lr > 0


def test_overrides_and_types(write):
    config = load_config(DPOConfig, write(MINIMAL), ["optimizer.lr=3e-4", "dpo.reference=precompute"])
    assert config.optimizer.lr == 3e-4  # YAML itself reads 3e-4 as a string
    assert config.dpo.reference == "precompute"


def test_resolved_configuration_reads_back(write, tmp_path):
    config = load_config(DPOConfig, write(MINIMAL))
    assert load_config(DPOConfig, write(resolved_yaml(config))) == config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optimizer.learning_rate=1"], "unknown key optimizer.learning_rate; known here are lr, min_lr"),
        (["optimizer.weigth_decay=1"], r"unknown key optimizer.weigth_decay; did you mean optimizer\.weight_decay\?"),
        (["paralel.x=1"], "unknown key paralel; did you mean parallel?"),
        (["batch.global_batch_size=true"], "batch.global_batch_size: must be a number"),
        (["batch.global_batch_size=0"], "batch.global_batch_size: .*got 0"),
        (["data.overlong=cut"], "data.overlong: .*'drop' or 'truncate'.*got 'cut'"),
        (["seed.x=1"], "seed is a value, not a section"),
        (["seed"], "write it as section.key=value"),
        (["optimizer={lr: 1e-3, lr: 0.5}"], "is not a YAML value: the key lr stands in line 1 and again in line 1"),
        (["trainer.max_steps=null"], "trainer: give max_steps, max_epochs or both"),
        (["optimizer.min_lr=1"], "min_lr: must be at most lr"),
        (["parallel.sequence_parallel=true"], "needs tensor_model_parallel_size > 1"),
        (["parallel.expert_tensor_parallel_size=2"], "needs expert_model_parallel_size > 1"),
        (["parallel.virtual_pipeline_model_parallel_size=2"], "needs pipeline_model_parallel_size > 1"),
    ],
)
def test_mistakes(write, overrides, message):
    import re

    with pytest.raises(UserError) as error:
        load_config(DPOConfig, write("seed: 1" + MINIMAL), overrides)
    assert re.search(message, str(error.value)), str(error.value)
    assert "\n" not in str(error.value)


def test_a_stop_string_is_not_empty(write):
    grpo = "grpo: {num_prompts_per_step: 2, num_generations_per_prompt: 4, max_new_tokens: 8, stop_strings: ['']}"
    with pytest.raises(UserError, match=r"grpo\.stop_strings\.0: .* at least 1 character"):
        load_config(GRPOConfig, write(MINIMAL + grpo))


def test_files_that_are_no_configuration(write, tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        load_config(DPOConfig, tmp_path / "missing.yaml")
    with pytest.raises(UserError, match="not valid YAML"):
        load_config(DPOConfig, write("a: [1"))
    with pytest.raises(UserError, match="must hold sections"):
        load_config(DPOConfig, write("- a"))
    with pytest.raises(UserError, match="optimizer is required"):
        load_config(DPOConfig, write(MINIMAL.replace("optimizer: {lr: 1e-5}", "")))


def test_world_size():
    parallel = ParallelConfig(tensor_model_parallel_size=2, context_parallel_size=2)
    assert parallel.data_parallel_size(8) == 2
    with pytest.raises(UserError, match=r"= 4 must divide the number of processes \(6\)"):
        parallel.data_parallel_size(6)
