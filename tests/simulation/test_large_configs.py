"""Tests that the configurations for large models load, match their models, and fit their GPUs in a simulation."""

import pytest
from programs import ROOT
from transformers import LlamaConfig, Qwen2Config, Qwen3MoeConfig

from mcore_rl.config import DPOConfig, SFTConfig, load_config
from mcore_rl.models.megatron.hf_config import check_model_fits, load_hf_config
from mcore_rl.simulation.search import chosen_ranks, simulate
from mcore_rl.simulation.step import Sequences

LARGE = ROOT / "configs" / "large"
ROPE = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE |= {"original_max_position_embeddings": 8192}
# The values are those of the models' config.json.
MODELS = {
    "1.5b": Qwen2Config(
        vocab_size=151_936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
        num_key_value_heads=2, max_position_embeddings=32_768, tie_word_embeddings=True,
    ),
    "8b": LlamaConfig(
        vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=131_072, rope_parameters=ROPE,
    ),
    "70b": LlamaConfig(
        vocab_size=128_256, hidden_size=8192, intermediate_size=28_672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, max_position_embeddings=131_072, rope_parameters=ROPE,
    ),
    "30b_a3b": Qwen3MoeConfig(
        vocab_size=151_936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=48, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
        norm_topk_prob=True, max_position_embeddings=40_960, tie_word_embeddings=False,
    ),
}  # fmt: skip
FILES = sorted(LARGE.glob("*.yaml"))


def read(path, tmp_path, monkeypatch, *overrides):
    """The configuration, and the number of its GPUs."""
    algorithm, rest = path.stem.split("_", 1)
    model, gpus = rest.rsplit("_", 1)
    monkeypatch.setenv("MODEL", str(tmp_path / model))
    monkeypatch.setenv("DATA", str(tmp_path / "data.jsonl"))
    MODELS[model].save_pretrained(tmp_path / model)
    config = load_config({"dpo": DPOConfig, "sft": SFTConfig}[algorithm], path, overrides)
    return config, int(gpus.removesuffix("gpu"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_fits_its_model(path, tmp_path, monkeypatch):
    config, gpus = read(path, tmp_path, monkeypatch)
    hf = load_hf_config(config.model.path)
    check_model_fits(hf, config.parallel, config.data.max_sequence_length, config.model)
    replicas = config.parallel.data_parallel_size(gpus)
    assert config.batch.global_batch_size % replicas == 0
    assert config.pack_width(config.rows_per_unit) >= config.data.max_sequence_length
    assert f"{path.relative_to(LARGE.parent.parent)}" in path.read_text()  # its command


@pytest.mark.long
@pytest.mark.parametrize("path", [path for path in FILES if "a3b" not in path.stem], ids=lambda path: path.stem)
def test_it_fits_its_gpus(path, tmp_path, monkeypatch):
    """The costliest stages at the peak of a step in which every pack is full; 80 GB, of which some is not ours."""
    config, gpus = read(path, tmp_path, monkeypatch)
    longest, replicas = config.data.max_sequence_length, config.parallel.data_parallel_size(gpus)
    stages = config.parallel.pipeline_model_parallel_size
    pairs = replicas * max(stages, config.pack_width(2) // (2 * longest))  # as many microbatches as stages keep
    sequences = Sequences((longest,) * (2 * pairs), (longest // 3,) * (2 * pairs))
    batch = config.batch.model_copy(update={"global_batch_size": pairs})
    config = config.model_copy(update={"batch": batch})
    reports = simulate(config, gpus, chosen_ranks(config, gpus, "first,last"), sequences)
    peaks = [report.peak / 1e9 for report in reports]
    print(path.stem, [f"{peak:.1f} GB" for peak in peaks])
    assert max(peaks) < 70, [report.memory for report in reports]
