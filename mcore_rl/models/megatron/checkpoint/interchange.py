"""What Megatron-LM and Megatron-Bridge look for in a checkpoint besides its tensors.

Without these entries, Megatron-LM takes a checkpoint for one of version 0, which it loads only with `--finetune` and
not into virtual pipeline stages. Megatron-Bridge refuses a checkpoint without the layout that wrote it.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import yaml

from mcore_rl.config import TrainingConfig
from mcore_rl.models.megatron.attention.attention import GroupedQueryAttention
from mcore_rl.models.megatron.attention.latent import LatentAttention
from mcore_rl.models.megatron.families import Family
from mcore_rl.models.megatron.families.mixtures import Mixture
from mcore_rl.models.megatron.layers.transformer_layer import rope_parameters
from mcore_rl.models.megatron.model.gpt_model import ModelShard
from mcore_rl.models.megatron.weight_mapping import padded_vocab_size

from megatron.core.dist_checkpointing.mapping import ShardedObject

CHECKPOINT_VERSION = 3.0
"""Version of the order of rows in `linear_qkv`: grouped by query group."""
IN_TRANSFORMER_CONFIG = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("add_bias_linear", "add_qkv_bias", "normalization", "layernorm_epsilon", "layernorm_zero_centered_gamma"),
    *("rotary_interleaved", "attention_dropout", "hidden_dropout", "apply_query_key_layer_scaling"),
    *("moe_ffn_hidden_size", "moe_router_topk", "moe_shared_expert_intermediate_size", "moe_shared_expert_gate"),
    *("moe_layer_freq", "moe_router_score_function", "moe_router_enable_expert_bias", "moe_token_dispatcher_type"),
    *("moe_grouped_gemm", "bf16", "fp16"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel"),
)
"""Options with the same name in Megatron's TransformerConfig, Megatron-LM's arguments and Bridge's model providers."""
BRIDGE_PROVIDER = "megatron.bridge.models.gpt_provider.GPTModelProvider"
DESCRIBED_BY_PROVIDER = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""Model types that `BRIDGE_PROVIDER` describes, if all layers are alike, without windows and scaled RoPE."""
LAYOUT_OF_VOCABULARY = 128
"""Number by which Megatron-LM divides the vocabulary of each tensor-parallel rank, unless it is told otherwise."""


def common_entries(
    model: ModelShard, step: int, samples: int = 0, schedule: Mapping[str, Any] | None = None, has_random: bool = False
) -> dict[str, Any]:
    """Return the entries that Megatron-LM's `load_checkpoint` reads from the common state.

    Args:
        samples: number of samples that the run has consumed.
        schedule: result of `schedule_in_samples`; None if the checkpoint has weights alone.
        has_random: whether the checkpoint has `random_object`.
    """
    entries: dict[str, Any] = {
        "args": _arguments(model, step, samples, schedule is not None, has_random),
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": step,
        "num_floating_point_operations_so_far": 0,
    }
    return entries if schedule is None else {**entries, "opt_param_scheduler": dict(schedule)}


def schedule_in_samples(schedule: Mapping[str, Any], config: TrainingConfig) -> dict[str, Any]:
    """Return the state of the learning-rate schedule in Megatron-LM's unit.

    Megatron-LM counts samples: a step advances its schedule by the global batch size.

    Args:
        schedule: the schedule's state, which counts steps.
    """
    batch = config.batch.global_batch_size
    counted = ("num_steps", "lr_warmup_steps", "lr_decay_steps", "wd_incr_steps", "wsd_decay_steps")
    return {
        name: value * batch if name in counted and isinstance(value, int) else value for name, value in schedule.items()
    }


def random_object(states: Mapping[str, Any], model: ModelShard) -> ShardedObject | None:
    """Return this rank's random states in Megatron-LM's form; None if its loader could not use them.

    It reads the state of a GPU and those of Megatron's generators, which runs on the CPU do not have.

    Args:
        states: result of `random_states`.
    """
    if "device" not in states or not states["megatron"]:
        return None
    topology = model.topology
    name, keys, *rest = states["numpy"]
    state = {
        "random_rng_state": states["python"],
        "np_rng_state": (name, keys.tolist(), *rest),  # a list: arrays refer to functions of NumPy
        "torch_rng_state": states["torch"],
        "cuda_rng_state": states["device"],
        "rng_tracker_states": states["megatron"],
    }
    place = (topology.pipeline.rank, topology.tensor.rank)
    sizes = (topology.pipeline.size, topology.tensor.size)
    replica = topology.data.rank * topology.context.size + topology.context.rank
    return ShardedObject("rng_state", [state], sizes, place, replica_id=replica)


def run_config(model: ModelShard, has_training_state: bool = True, has_random: bool = False) -> str:
    """Return the text of `run_config.yaml`, which Megatron-Bridge reads: the layout, and for plain models the model.

    Bridge reads the layout when it resumes or fine-tunes, and then builds the model from its own recipe. It builds the
    model from this file when it loads or exports a checkpoint alone. That works for `DESCRIBED_BY_PROVIDER`.

    Args:
        has_training_state: whether the checkpoint has the state of optimizer and schedule.
        has_random: whether the checkpoint has `random_object`.
    """
    family, config = model.family, model.chunks[0].config
    described: dict[str, Any] = {name: getattr(config, name, None) for name in IN_TRANSFORMER_CONFIG}
    # Bridge reads the unpadded size of a vocabulary that it pads itself, for its own layout.
    described |= {"vocab_size": family.vocab_size, "should_pad_vocab": True}
    described |= {"make_vocab_size_divisible_by": LAYOUT_OF_VOCABULARY, "seq_length": _positions(model)}
    described["share_embeddings_and_output_weights"] = family.ties_embeddings
    described["qk_layernorm"] = family.has_qk_norm
    described["num_moe_experts"] = config.num_moe_experts
    described |= {**_rope(model), **_routing(model)}
    for name in ("params_dtype", "pipeline_dtype"):
        described[name] = {"_target_": str(config.params_dtype), "_call_": False}
    if _is_plain(family) and rope_parameters(family.hf)["rope_type"] == "default":
        silu = {"_target_": "torch.nn.functional.silu", "_call_": False}
        described |= {"_target_": BRIDGE_PROVIDER, "gated_linear_unit": True, "activation_func": silu}
    checkpoint = {
        "ckpt_format": "torch_dist",
        "fully_parallel_save": True,
        "dist_ckpt_optim_fully_reshardable": True,
        "save_optim": has_training_state,
        "save_rng": has_random,
    }
    return yaml.safe_dump({"model": described, "checkpoint": checkpoint}, sort_keys=False)


def _arguments(model: ModelShard, step: int, samples: int, has_training_state: bool, has_random: bool) -> Namespace:
    """Return Megatron-LM's arguments, as far as they describe the model, the layout and the checkpoint.

    Megatron-LM compares some with its own, and takes the model's from here with `--use-checkpoint-args`.
    """
    family, topology, config = model.family, model.topology, model.chunks[0].config
    values: dict[str, Any] = {name: getattr(config, name, None) for name in IN_TRANSFORMER_CONFIG}
    values |= {**_rope(model), **_routing(model)}
    values |= {
        "qk_layernorm": family.has_qk_norm,
        "multi_latent_attention": isinstance(family.token_mixer(0), LatentAttention),
        "norm_epsilon": config.layernorm_epsilon,
        "apply_layernorm_1p": config.layernorm_zero_centered_gamma,
        "swiglu": config.gated_linear_unit,
        "squared_relu": False,
        "group_query_attention": config.num_query_groups != config.num_attention_heads,
        "untie_embeddings_and_output_weights": not family.ties_embeddings,
        "max_position_embeddings": _positions(model),
        "seq_length": _positions(model),
        "add_position_embedding": True,
        "padded_vocab_size": padded_vocab_size(family.vocab_size, topology.tensor.size),
        "make_vocab_size_divisible_by": LAYOUT_OF_VOCABULARY,
        "num_experts": config.num_moe_experts,
        "params_dtype": config.params_dtype,
        "transformer_impl": config.transformer_impl,
    }
    values |= {
        "world_size": topology.tensor.size * topology.pipeline.size * topology.context.size * topology.data.size,
        "data_parallel_size": topology.data.size,
        "ckpt_format": "torch_dist",
        "use_dist_ckpt": True,
        "ckpt_fully_parallel_save": True,
        "use_distributed_optimizer": True,
        "dist_ckpt_optim_fully_reshardable": True,
        "no_save_optim": not has_training_state,
        "no_save_rng": not has_random,
        "iteration": step,
        "consumed_train_samples": samples,
        "skipped_train_samples": 0,
        "consumed_valid_samples": 0,
    }
    return Namespace(**values)


def _routing(model: ModelShard) -> dict[str, Any]:
    """Return the options of the routers, which this package's own router does not take from TransformerConfig."""
    if not isinstance(model.family, Mixture):
        return {}
    experts = model.family.experts
    return {
        # Weights that sum to 1 are the softmax over the chosen experts alone.
        "moe_router_pre_softmax": experts.score == "softmax" and not experts.normalise,
        "moe_router_topk_scaling_factor": experts.scale,
        "moe_router_num_groups": experts.groups if experts.groups > 1 else None,
        "moe_router_group_topk": experts.group_topk if experts.groups > 1 else None,
        "moe_router_load_balancing_type": "none",
    }


def _is_plain(family: Family) -> bool:
    """Return whether `BRIDGE_PROVIDER` describes the model, apart from a scaled rotary embedding."""
    mixers = [family.token_mixer(layer) for layer in range(family.num_layers)]
    if any(getattr(mixer, "window", None) for mixer in mixers) or family.layers_differ or family.has_reward_head:
        return False
    has_dense_layers = isinstance(family, Mixture) and not all(family.experts.sparse_layers)
    return family.hf.model_type in DESCRIBED_BY_PROVIDER and not has_dense_layers


def _positions(model: ModelShard) -> int:
    return int(model.family.hf.max_position_embeddings)


def _rope(model: ModelShard) -> dict[str, Any]:
    """Return the options of the rotary embedding, as far as Megatron-LM has them."""
    family = model.family
    described: dict[str, Any] = {"position_embedding_type": "rope", "rotary_percent": 1.0, "rotary_base": 10000}
    mixers = [family.token_mixer(layer) for layer in range(family.num_layers)]
    if all(type(mixer) is GroupedQueryAttention for mixer in mixers) and len(family.ropes()) == 1:
        rope = rope_parameters(family.hf)
        described |= {"rotary_base": int(rope["rope_theta"]), "rotary_percent": float(rope["partial_rotary_factor"])}
    return described
