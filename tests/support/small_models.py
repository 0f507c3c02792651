"""Small Hugging Face models with random weights, and a tokenizer that needs no download."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

if hasattr(transformers, "Mistral4Config"):  # a causal language model that is missing in this class's table
    AutoModelForCausalLM.register(transformers.Mistral4Config, transformers.Mistral4ForCausalLM, exist_ok=True)
if "glm5_next" in CONFIG_MAPPING:  # transformers has no class without the vision tower
    AutoModelForCausalLM.register(
        CONFIG_MAPPING["glm5_next"], transformers.Glm5NextForConditionalGeneration, exist_ok=True
    )
VOCAB_SIZE = 250  # not a multiple of anything: the vocabulary is padded, and cut again at export

SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 256}
LATENT = {
    "head_dim": 8,
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "q_lora_rank": 28,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "rms_norm_eps": 1e-5,  # unlike the epsilon of the norms of latent states
    "num_hidden_layers": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 3,
    "routed_scaling_factor": 1.7,
}
# With few heads, many scores are 0. The embedding of a padding token is 0, and so are all scores of such a query in the
# first layer. Of equal scores transformers chooses any. With 21 keys, the last chosen score and the next one differ by
# at least 5e-6 of the largest in the tests' data, so that rounding exchanges no keys.
INDEX = {"index_topk": 21, "index_n_heads": 32, "index_head_dim": 16, "pad_token_id": None}
DELTA_NETS = {
    # With 1e-6, the gated norms amplify rounding: transformers' gradients differ from its own in float64 by up to 1e-3.
    "rms_norm_eps": 1e-4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 12,
}
DELTA_NET_EXPERTS = {
    **DELTA_NETS,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 80,
}
MAMBA2 = {
    "layer_norm_epsilon": 1e-4,  # as in DELTA_NETS
    "n_groups": 4,
    "mamba_num_heads": 12,
    "mamba_head_dim": 20,
    "ssm_state_size": 12,
    "conv_kernel": 4,
    "chunk_size": 64,
    "time_step_min": 0.3,  # many step sizes are smaller: their gradient is 0
}
TOWER = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 4,
    "position_embedding_size": 16,
}
GEMMA4 = {
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "sliding_window": 9,
    "global_head_dim": 24,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "final_logit_softcapping": 7.5,
    "hidden_size_per_layer_input": 0,
    "use_bidirectional_attention": "vision",
    "tie_word_embeddings": True,
}
GEMMA4_E = {  # layers with inputs of their own, and with keys of earlier layers
    **GEMMA4,
    "num_hidden_layers": 6,
    "layer_types": [
        *("sliding_attention", "full_attention", "sliding_attention"),
        *("sliding_attention", "full_attention", "full_attention"),
    ],
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": 255,
}
FAMILIES = {
    "llama": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "qwen2": ("qwen2", {"rope_parameters": YARN_ROPE, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "deep": (  # for uneven pipelines, with tied embeddings on their ends
        "qwen2",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "num_hidden_layers": 6,
            "tie_word_embeddings": True,
        },
    ),
    "mistral": (
        "mistral",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0}, "sliding_window": None},
    ),
    "phi3": (
        "phi3",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.75},
            "sliding_window": None,
        },
    ),
    "olmo2": ("olmo2", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "gemma3": (
        "gemma3_text",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 9,
            "query_pre_attn_scalar": 24,
            "tie_word_embeddings": True,
        },
    ),
    "gemma4": ("gemma4_text", GEMMA4),
    "gemma4_moe": (
        "gemma4_text",
        {**GEMMA4, "enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 48},
    ),
    "gemma4_e": ("gemma4_text", GEMMA4_E),
    "gemma4_tower": ("gemma4", {**GEMMA4_E, "vision_config": TOWER}),
    "windows": (  # Mistral's first version: every layer sees a few tokens only
        "mistral",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "sliding_window": 13},
    ),
    "mixtral": (
        "mixtral",
        {
            "rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0},
            "sliding_window": None,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
        },
    ),
    "qwen2_moe": (
        "qwen2_moe",
        {
            "rope_parameters": YARN_ROPE,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 80,
        },
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "num_hidden_layers": 4,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "glm4_moe": (
        "glm4_moe",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
            "num_hidden_layers": 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 48,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 3,
            "routed_scaling_factor": 1.7,
            "first_k_dense_replace": 2,  # under PP2 the first stage has no experts
            "attention_bias": True,
            "use_qk_norm": True,
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            **LATENT,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 40.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 0.7,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 32,
            },
            "first_k_dense_replace": 1,
        },
    ),
    "moonlight": (
        "deepseek_v3",
        {
            **LATENT,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "rope_interleave": False,
            "first_k_dense_replace": 3,
            "q_lora_rank": None,
        },
    ),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        {
            **LATENT,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
        },
    ),
    "deepseek_v32": (
        "deepseek_v32",
        {
            **LATENT,
            **INDEX,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        },
    ),
    "glm_moe_dsa": (
        "glm_moe_dsa",
        {
            **LATENT,
            **INDEX,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "indexer_types": ["full", "shared", "full", "shared"],
        },
    ),
    "hy_v4": (
        "hy_v4",
        {
            **LATENT,
            **INDEX,
            "n_group": 1,
            "topk_group": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "indexer_types": ["full", "shared", "full", "shared"],
            "hc_mult": 3,
            "hc_magnitude": 1.7,
            "hc_eps": 1e-3,
            "learnable_sink_init": 0.3,
            "swiglu_limit": 1.5,
        },
    ),
    "glm5_next": (
        "glm5_next",
        {
            **LATENT,
            **INDEX,
            "rms_norm_eps": 1e-4,  # as in DELTA_NETS
            "qk_nope_head_dim": 20,
            "qk_rope_head_dim": 0,
            "layer_types": ["linear_attention", "indexed_attention", "linear_attention", "indexed_attention"],
            "indexer_types": ["full"] * 4,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "index_topk": 20,
            "index_kpool": 4,
            "linear_head_dim": 12,
            "linear_num_heads": 4,
            "linear_lower_bound": -3.5,
            "hc_mult": 3,
            "hc_eps": 1e-3,
            "hc_sinkhorn_iters": 5,
            "swiglu_limit": 3.0,
            "vision_config": {
                "depth": 1,
                "hidden_size": 16,
                "num_heads": 2,
                "image_size": 28,
                "out_hidden_size": 16,
                "intermediate_size": 24,
                "projection_intermediate_size": 24,
            },
        },
    ),
    "deepseek_v4": (
        "deepseek_v4",
        {
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "num_hidden_layers": 4,
            "q_lora_rank": 28,
            "partial_rotary_factor": 0.5,
            "rope_theta": 1e4,
            "compress_rope_theta": 1e5,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "original_max_position_embeddings": 64,
            },
            "layer_types": [
                "sliding_attention",
                "compressed_sparse_attention",
                "heavily_compressed_attention",
                "compressed_sparse_attention",
            ],
            "compress_rates": {"compressed_sparse_attention": 3, "heavily_compressed_attention": 8},
            "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
            "sliding_window": 7,
            "index_topk": 5,
            "index_n_heads": 32,
            "index_head_dim": 16,
            "o_groups": 2,
            "o_lora_rank": 12,
            "hc_mult": 3,
            "hc_eps": 1e-3,
            "hc_sinkhorn_iters": 5,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "swiglu_limit": 4.0,
            "pad_token_id": None,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 15e4,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 32,
            },
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "sliding_window": 13,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "intermediate_size": 48,
            "swiglu_limit": 1.5,
            "swiglu_alpha": 1.5,
        },
    ),
    "olmo3": (
        "olmo3",
        {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "sliding_window": 11,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 5e5,
                    "factor": 8.0,
                    "attention_factor": 1.2079441541679836,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "original_max_position_embeddings": 64,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            },
        },
    ),
    "minimax_m2": (
        "minimax_m2",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "intermediate_size": 48,
        },
    ),
    "mistral4": (
        "mistral4",
        {
            **LATENT,
            "head_dim": 20,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 16.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": 64,
                "max_position_embeddings": 1024,
            },
        },
    ),
    "mimo_v2_flash": (
        "mimo_v2_flash",
        {
            "num_hidden_layers": 4,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "sliding_window": 9,
            "head_dim": 20,
            "v_head_dim": 14,
            "attention_value_scale": 0.707,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.334},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.334},
            },
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 1.3,
        },
    ),
    "minimax_m3": (
        "minimax_m3_vl_text",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
            "num_hidden_layers": 4,
            "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse", "full_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "intermediate_size": 48,
            "dense_intermediate_size": 96,
            "shared_intermediate_size": 32,
            "swiglu_limit": 2.5,
            "index_n_heads": 2,
            "index_head_dim": 12,
            "index_block_size": 5,
            "index_topk_blocks": 4,
            "index_local_blocks": 2,
        },
    ),
    "seed_oss": (
        "seed_oss",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
            "attention_bias": True,
            "attention_out_bias": True,
        },
    ),
    "smollm3": (
        "smollm3",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 2e6},
            "num_hidden_layers": 4,
            "no_rope_layers": [1, 0, 1, 1],
            "tie_word_embeddings": True,
        },
    ),
    "glm4": (
        "glm4",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "ministral3": (
        "ministral3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
            "num_hidden_layers": 4,
            "moe_num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_interval": 2,
        },
    ),
    "qwen3_next": ("qwen3_next", {**DELTA_NET_EXPERTS, "mlp_only_layers": [1], "norm_topk_prob": True}),
    "qwen3_5": ("qwen3_5_text", DELTA_NETS),
    "qwen3_5_moe": ("qwen3_5_moe_text", DELTA_NET_EXPERTS),
    "qwen4": (
        "qwen4_exp_text",
        {
            **DELTA_NET_EXPERTS,
            "layer_types": ["linear_attention", "indexed_attention", "linear_attention", "indexed_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
            "hc_count": 3,
            "hc_lowrank": 10,
            "indexer_n_heads": 16,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 12,
            "indexer_budget": 20,
            "indexer_compress_ratio": 4,
            "output_gate_type": "sigmoid",
            "ple_layer_ids": [1, 3],
            "ple_embed_dim": 48,
            "ple_conv_kernel_size": 3,
            "heads_per_ngram": 2,
            "ngram_vocab_size_base": 40,
            "make_ngram_vocab_size_divisible_by": 16,
            "split_ngram_parts": 3,
            "pad_token_id": None,
        },
    ),
    "kimi_linear": (
        "kimi_linear",
        {
            **{name: value for name, value in LATENT.items() if name != "n_routed_experts"},
            "rms_norm_eps": 1e-4,  # as in DELTA_NETS
            "q_lora_rank": None,
            "num_local_experts": 8,
            "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "linear_conv_kernel_dim": 4,
            "linear_head_dim": 12,
            "linear_num_heads": 4,
        },
    ),
    "nemotron_h": (
        "nemotron_h",
        {**MAMBA2, "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"]},
    ),
    "nemotron_h_moe": (
        "nemotron_h",
        {
            **MAMBA2,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "moe", "mlp"],
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "moe_shared_expert_intermediate_size": 80,
            "moe_latent_size": 40,
            "n_group": 4,
            "topk_group": 3,
            "routed_scaling_factor": 1.7,
        },
    ),
}
FAMILIES = {
    name: family for name, family in FAMILIES.items() if family[0] in CONFIG_MAPPING
}  # transformers 4 lacks some
WITH_DELTA_NETS = [name for name in FAMILIES if name.startswith(("qwen3_next", "qwen3_5"))]
# Families that differ from another one in few places.
ALIKE = (
    "moonlight",
    "glm4_moe_lite",
    "deepseek_v32",
    "glm_moe_dsa",
    "seed_oss",
    "minimax_m2",
    "mistral",
    "mistral4",
    "qwen3_5_moe",
    "nemotron_h",
    "gemma4",
    "gemma4_tower",
)
ARCHITECTURES = [family for family in FAMILIES if family != "deep"]


def has_experts(family):
    return not {"num_experts_per_tok", "top_k_experts"}.isdisjoint(FAMILIES[family][1])


def models_below(make_directory, **changes):
    """Return a function from a family's name to the directory of a small model of it, which is written once.

    Args:
        make_directory: gives a new directory of this name.
        changes: of its configuration.
    """
    made = {}

    def get(family):
        if family not in made:
            made[family] = make_model(family, make_directory(family), **changes)
        return made[family]

    return get


def and_long(quick, long, exhaustive=()):
    """Return the cases of a parametrised test; those in `long` and `exhaustive` run only when such tests are
    selected."""
    lots = (long, pytest.mark.long), (exhaustive, pytest.mark.exhaustive)
    marked = [(case if isinstance(case, tuple) else (case,), mark) for cases, mark in lots for case in cases]
    return [*quick, *(pytest.param(*case, marks=mark) for case, mark in marked)]


CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_config(family: str, **changes):
    model_type, own = FAMILIES[family]
    values = {**SMALL, **own, **changes}
    if transformers.__version__.startswith("4."):  # one dictionary in 5, two keys before
        rope = dict(values.pop("rope_parameters"))
        if "full_attention" in rope:  # Gemma 3
            values["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
            rope = dict(rope["full_attention"])
        values["rope_theta"] = rope.pop("rope_theta")
        values["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    if "vision_config" in values:
        values = {"vision_config": values.pop("vision_config"), "text_config": values}
        values["tie_word_embeddings"] = values["text_config"].pop("tie_word_embeddings", False)
    return AutoConfig.for_model(model_type, **values)


def make_model(family: str, directory: Path, **changes) -> Path:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(make_config(family, **changes), dtype=torch.float32)
    with torch.no_grad():
        for parameter in (
            *model.parameters(),
            *(b for name, b in model.named_buffers() if "bias" in name or name.endswith("layer_scalar")),
        ):
            # Norms are ones and biases zeros: hide nothing behind that. Experts' biases are rows of a matrix.
            if parameter.ndim == 1 or not parameter.any():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, table in model.named_buffers():
            if name.endswith("tid2eid"):  # distinct experts for each token id
                table.copy_(torch.rand(len(table), model.config.n_routed_experts).argsort(-1)[:, : table.shape[1]])
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory


def make_tokenizer(more: Sequence[str] = (), chat_template: str = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character.

    Args:
        more: further special tokens; their ids start at 6.
    """
    special = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|unk|>"]
    characters = sorted(set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,!?'+-*/=\n"))
    special += more
    tokens = [*special, *characters]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        unk_token="<|unk|>",
        additional_special_tokens=[*special[2:5], *more],
        chat_template=chat_template,
    )
