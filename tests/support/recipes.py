"""The configurations for large models, and the shapes of their models."""

import json
import math
import operator

from programs import ROOT
from small_models import make_model, make_tokenizer
from transformers import LlamaConfig, Qwen2Config, Qwen3MoeConfig

from mcore_rl.config import DPOConfig, GRPOConfig, SFTConfig, load_config

LARGE = ROOT / "configs" / "large"
ROPE = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE |= {"original_max_position_embeddings": 8192}
# Values from the config.json of each model.
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
    "235b_a22b": Qwen3MoeConfig(
        vocab_size=151_936, hidden_size=4096, intermediate_size=12_288, num_hidden_layers=94, num_attention_heads=64,
        num_key_value_heads=4, head_dim=128, moe_intermediate_size=1536, num_experts=128, num_experts_per_tok=8,
        norm_topk_prob=True, max_position_embeddings=40_960, tie_word_embeddings=False,
    ),
}  # fmt: skip
RECIPES = sorted(LARGE.glob("*.yaml"))


def read_recipe(path, tmp_path, monkeypatch, *overrides):
    """Return the configuration, and its number of GPUs; its model has a config.json and no weights."""
    algorithm, rest = path.stem.split("_", 1)
    model, gpus = rest.replace("_32k", "").rsplit("_", 1)
    monkeypatch.setenv("MODEL", str(tmp_path / model))
    monkeypatch.setenv("DATA", str(tmp_path / "data.jsonl"))
    MODELS[model].save_pretrained(tmp_path / model)
    config = load_config({"dpo": DPOConfig, "sft": SFTConfig, "grpo": GRPOConfig}[algorithm], path, overrides)
    return config, int(gpus.removesuffix("gpu"))


LAYERS, PROCESSES, LONGEST = 4, 4, 64
PARALLEL_SIZES = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size",
)  # fmt: skip
BOUNDS = {"batch.global_batch_size": 8, "trainer.max_steps": 2}
BOUNDS_OF_ROLLOUTS = {
    "trainer.max_steps": 2,
    "grpo.num_prompts_per_step": 4,
    "grpo.num_generations_per_prompt": 4,
    "grpo.max_new_tokens": 12,
    "generation.vllm.tensor_parallel_size": 2,
}
OF_GPUS = ("model.dtype", "model.moe_grouped_gemm", "parallel.overlap_grad_reduce", "parallel.overlap_param_gather")


def shrunk(config):
    """Return overrides with which a large configuration runs in `PROCESSES` processes with a model of `small_model`.

    Every parallel size is at most 2, lengths and counts are small, and a pack keeps its number of sequences. Values
    that are chosen by the device (`auto`) are those of GPUs; Transformer Engine's layers need a GPU, so the layers are
    local. Nothing else changes, with one exception: if a replica would need more than `PROCESSES` processes, its
    context-parallel size becomes 1.
    """
    parallel = {key: min(getattr(config.parallel, key), 2) for key in PARALLEL_SIZES}
    if math.prod(parallel[key] for key in PARALLEL_SIZES[:3]) > PROCESSES:
        parallel["context_parallel_size"] = 1
    if config.parallel.num_layers_in_first_pipeline_stage is not None:
        parallel["num_layers_in_first_pipeline_stage"] = 1
        if config.parallel.num_layers_in_last_pipeline_stage is not None:
            parallel["num_layers_in_last_pipeline_stage"] = LAYERS - 1
    changes = {f"parallel.{key}": value for key, value in parallel.items()}
    longest = min(config.data.max_sequence_length, LONGEST)
    changes["data.max_sequence_length"] = longest
    changes["batch.tokens_per_pack"] = longest * config.batch.tokens_per_pack // config.data.max_sequence_length
    for key, bound in (BOUNDS_OF_ROLLOUTS if isinstance(config, GRPOConfig) else BOUNDS).items():
        value = operator.attrgetter(key)(config)
        changes[key] = bound if value is None else min(value, bound)
    on_gpus = config.for_device(on_gpu=True, te_problem="needs a GPU", simulates=False)
    changes |= {key: operator.attrgetter(key)(on_gpus) for key in OF_GPUS}
    return [f"{key}={json.dumps(value)}" for key, value in changes.items()]


RECORDS = {
    "dpo": lambda i: {"prompt": f"say {i} ", "chosen": "ab" * (1 + i % 5), "rejected": "yz" * (1 + i % 3)},
    "sft": lambda i: {"prompt": f"say {i} ", "completion": "ab" * (1 + i % 7)},
    "grpo": lambda i: {"prompt": f"{i} + 1 = ", "answer": str(i % 2)},
}


def shrunk_run(path, tmp_path, monkeypatch, *overrides):
    """Return the configuration as shipped, and the words after `mcore-rl train` that run it shrunk, in `tmp_path`."""
    config, _ = read_recipe(path, tmp_path, monkeypatch)
    records = map(RECORDS[config.algorithm], range(16))
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    monkeypatch.setenv("MODEL", str(small_model(path, tmp_path / "small")))
    return config, [config.algorithm, path, *shrunk(config), f"output_dir={tmp_path / 'out'}", *overrides]


def small_model(path, directory):
    """Write a small model of the family of a configuration's model, with `LAYERS` layers.

    Several tokens of its tokenizer are the answers 0 and 1 in a box, so that random responses get unequal rewards.
    """
    large = MODELS[path.stem.split("_", 1)[1].replace("_32k", "").rpartition("_")[0]]
    changes = {"num_hidden_layers": LAYERS, "tie_word_embeddings": large.tie_word_embeddings, "initializer_range": 0.1}
    if large.model_type == "qwen3_moe":
        changes["mlp_only_layers"] = large.mlp_only_layers
    make_model(large.model_type, directory, **changes)
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([f"{' ' * spaces}\\boxed{{{answer}}}" for spaces in range(4) for answer in (0, 1)])
    tokenizer.save_pretrained(directory)
    return directory
