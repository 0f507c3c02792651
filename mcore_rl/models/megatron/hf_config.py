"""From a Hugging Face model directory's config to Megatron's, and what is refused on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from mcore_rl.config import ModelConfig, ParallelConfig
from mcore_rl.errors import UserError
from mcore_rl.models.megatron.layer_spec import uses_transformer_engine
from mcore_rl.models.megatron.rope import concentration_scale, rope_frequencies
from mcore_rl.preflight import check_model_directory

from megatron.core.transformer.transformer_config import TransformerConfig  # isort: skip

SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


REWARD_ARCHITECTURE = "ForSequenceClassification"


def load_hf_config(path: Path, trust_remote_code: bool = False, head: str = "lm") -> Any:
    """The transformers config of a model directory, for a model with that head.

    Raises:
        UserError: not a directory with a readable config.json, or a reward model where a language model is wanted.
    """
    from transformers import AutoConfig

    check_model_directory(path)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # its validators raise classes of their own
        raise UserError(f"model.path: {path}/config.json cannot be read: {' '.join(str(error).split())}") from None
    if head == "reward":
        config.architectures = [
            name.replace("ForCausalLM", REWARD_ARCHITECTURE) for name in config.architectures or ["ForCausalLM"]
        ]
        config.num_labels, config.tie_word_embeddings = 1, False
    elif has_reward_head(config):
        raise UserError(f"model.path: {path} is a reward model; set model.head=reward")
    return config


def has_reward_head(hf: Any) -> bool:
    """Whether the model gives one number a sequence in place of the vocabulary's logits."""
    return any(REWARD_ARCHITECTURE in name for name in hf.architectures or ())


def check_model_fits(hf: Any, parallel: ParallelConfig, max_sequence_length: int) -> None:
    """Refuse what is not supported and layouts that do not divide the model; needs no process group.

    Raises:
        UserError: naming the key, what was found and what would be right.
    """
    _check_supported(hf, max_sequence_length)
    rope_frequencies(hf)
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    if hf.num_hidden_layers % pp:
        raise UserError(
            f"parallel.pipeline_model_parallel_size={pp}: must divide the model's {hf.num_hidden_layers} layers"
        )
    groups = hf.num_key_value_heads
    for what, size in (("attention heads", hf.num_attention_heads), ("intermediate size", hf.intermediate_size)):
        if size % tp:
            raise UserError(f"parallel.tensor_model_parallel_size={tp}: must divide the model's {what} ({size})")
    if groups % tp and tp % groups:
        raise UserError(
            f"parallel.tensor_model_parallel_size={tp}: must divide, or be a multiple of, "
            f"the model's key-value heads ({groups})"
        )


def _check_supported(hf: Any, max_sequence_length: int) -> None:
    if hf.model_type not in SUPPORTED_MODEL_TYPES:
        raise UserError(
            f"model.path: model type {hf.model_type!r} is not supported; "
            f"supported are {', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    if hf.hidden_act not in ("silu", "swish"):
        raise UserError(f"model.path: activation {hf.hidden_act!r} is not supported; only silu is")
    if hf.model_type != "qwen2" and getattr(hf, "attention_bias", False):
        raise UserError("model.path: attention_bias=true (a bias on the output projection) is not supported")
    if getattr(hf, "mlp_bias", False):
        raise UserError("model.path: mlp_bias=true is not supported")
    if getattr(hf, "attention_dropout", 0.0):
        raise UserError("model.path: attention_dropout other than 0 is not supported")
    window = getattr(hf, "sliding_window", None)
    if window is not None and getattr(hf, "use_sliding_window", True) and window < max_sequence_length:
        raise UserError(
            f"model.path: a sliding window of {window} tokens is not supported beyond it; "
            f"set data.max_sequence_length (now {max_sequence_length}) to at most {window}"
        )


def head_dim(hf: Any) -> int:
    return getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads


def padded_vocab_size(vocab_size: int, tensor_parallel_size: int) -> int:
    """Rows of the embedding: a multiple of 128, as Megatron pads it, and of the tensor-parallel size.

    The same for every power of two up to 128, so that checkpoints fit any such layout.
    """
    multiple = 128
    while multiple % tensor_parallel_size:
        multiple += 128
    return -(-vocab_size // multiple) * multiple


def transformer_config(hf: Any, model: ModelConfig, parallel: ParallelConfig) -> TransformerConfig:
    """Megatron's configuration of the same architecture under `parallel`."""
    dtype = getattr(torch, model.dtype)
    use_te = uses_transformer_engine()
    config = TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.intermediate_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=head_dim(hf),
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        qk_layernorm=hf.model_type == "qwen3",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=hf.model_type == "qwen2",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        use_cpu_initialization=True,
        perform_initialization=False,
        # With a per-token loss neither the schedule nor DDP rescales anything: see optimizer.py.
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=use_te,
        bias_dropout_fusion=use_te,
        masked_softmax_fusion=False,
        recompute_granularity="full" if model.recompute_activations else None,
        recompute_method="uniform" if model.recompute_activations else None,
        recompute_num_layers=1 if model.recompute_activations else None,
    )
    _, attention_factor = rope_frequencies(hf)
    if attention_factor != 1.0:
        config.yarn_rotary_scaling_factor = concentration_scale(attention_factor)
    return config
