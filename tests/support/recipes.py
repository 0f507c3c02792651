"""The configurations for large models, and the shapes of their models."""

from programs import ROOT
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
