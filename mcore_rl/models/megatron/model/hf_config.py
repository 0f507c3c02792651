"""Converts a Hugging Face configuration to Megatron's, and rejects what is not supported."""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path
from typing import Any

import torch

from mcore_rl import platform
from mcore_rl.config import LoRAConfig, ModelConfig, ParallelConfig
from mcore_rl.config.fp8 import FP8Config
from mcore_rl.errors import UserError
from mcore_rl.models.megatron.attention.attention import GroupedQueryAttention
from mcore_rl.models.megatron.families import CONFIGURED_AS, Family, family_of
from mcore_rl.models.megatron.families.base import LM_HEAD, MTP_DEPTH, REWARD_ARCHITECTURE, has_reward_head
from mcore_rl.models.megatron.families.mixtures import Mixture
from mcore_rl.models.megatron.layers.fp8 import fp8_fields
from mcore_rl.models.megatron.model.hf_directory import SafetensorsDirectory, check_quantization
from mcore_rl.models.megatron.model.lora import is_expert_target, lora_of
from mcore_rl.models.megatron.weight_mapping import Mapping
from mcore_rl.utils.model_directory import check_model_directory, missing_files, sizes_in

from megatron.core.transformer.transformer_config import TransformerConfig

MAY_BE_NULL = {
    "q_lora_rank", "topk_group", "sliding_window", "n_shared_experts", "num_shared_experts", "num_nextn_predict_layers",
    "mtp_num_hidden_layers",
}  # fmt: skip
"""Sizes of config.json that are null in a model without this part, though transformers has a number for it."""
DEEP_EP = "pip install --no-build-isolation git+https://github.com/deepseek-ai/DeepEP@v1.2.1"


def hf_config_of(model: ModelConfig) -> Any:
    """Return `load_hf_config` of the model that the section `model` describes."""
    return load_hf_config(model.path, model.trust_remote_code, model.head, model.mtp_loss_scaling_factor > 0)


def load_hf_config(path: Path, trust_remote_code: bool = False, head: str = "lm", trains_mtp: bool = False) -> Any:
    """Return transformers' configuration of a model directory.

    It does not tie the embeddings if the directory's LM head differs from them; see `has_separate_head`.

    Args:
        head: head that the model gets, "lm" or "reward".
        trains_mtp: whether the layers that predict further tokens are trained.

    Raises:
        UserError: config.json cannot be read, the directory contains a reward model although `head` is "lm", the model
            is quantized in an unsupported way, or it has no layers that predict further tokens and can be trained.
    """
    config = _read_config(path, trust_remote_code)
    if (quantization := getattr(config, "quantization_config", None)) is not None:
        check_quantization(quantization, path)
        del config.quantization_config  # the weights are decoded, and exported in bfloat16
    if head == "reward":
        architectures = config.architectures or ["ForCausalLM"]
        config.architectures = [
            re.sub("ForCausalLM|ForConditionalGeneration", REWARD_ARCHITECTURE, name) for name in architectures
        ]
        config.num_labels, config.tie_word_embeddings = 1, False
    elif has_reward_head(config):
        raise UserError(f"model.path: {path} is a reward model; set model.head=reward")
    elif _differs_from_embeddings(path, config):
        config.tie_word_embeddings = family_of(config).hf.tie_word_embeddings = False
    if trains_mtp:
        setattr(config, MTP_DEPTH, _mtp_depth(family_of(config), path))
    return config


def _mtp_depth(family: Family, path: Path) -> int:
    """Return the number of layers in the directory that predict further tokens.

    Raises:
        UserError: it has none, or the family does not know their names.
    """
    names, key = SafetensorsDirectory(path).names(), "model.mtp_loss_scaling_factor"
    known = [part for k in range(len(names)) if (part := family.prediction_names(k)) is not None]
    if not known:
        raise UserError(
            f"{key}: layers that predict further tokens cannot be trained in {family.model_type}; leave {key} out"
        )
    depth = next(k for k in range(len(known) + 1) if k == len(known) or f"{known[k].projection}.weight" not in names)
    if not depth:
        raise UserError(
            f"{key}: {path} has no layers that predict further tokens ({known[0].projection}.weight); leave {key} out"
        )
    return depth


def _read_config(path: Path, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    values = check_model_directory(path)
    alias = CONFIGURED_AS.get(values["model_type"])
    try:
        if alias is None:
            config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        else:
            given = {key: value for key, value in values.items() if key not in ("model_type", "auto_map")}
            config = AutoConfig.for_model(alias, **given)
    except Exception as error:  # its validators raise various exception classes
        raise UserError(f"model.path: {path}/config.json cannot be read: {' '.join(str(error).split())}") from None
    for name, value, _ in sizes_in(values):
        if value is None and _is_needed(config, *name.split(".")):
            raise UserError(f"model.path: {path}/config.json: {name} must be a number, got null")
    return config


def _is_needed(config: Any, *name: str) -> bool:
    """Return whether transformers leaves a size at null although its class has a number for it.

    Args:
        name: keys of the parts of `config`, from the outside, and the size's key.
    """
    *parts, key = name
    part = functools.reduce(lambda outer, inner: getattr(outer, inner, None), parts, config)
    is_left = key not in MAY_BE_NULL and getattr(part, key, 0) is None
    return is_left and getattr(type(part)(), key, None) is not None


def has_separate_head(path: Path, trust_remote_code: bool = False) -> bool:
    """Return whether config.json ties the embeddings to the LM head, but the directory's LM head differs from them.

    Merging adapters of embedding and LM head, for example, leaves such a directory. As in transformers 5, the two
    tensors are then separate weights. If the weights are not in the directory, the result is False.
    """
    return _differs_from_embeddings(path, _read_config(path, trust_remote_code))


COMPARED_ROWS = 4096
"""Number of rows of embedding and LM head that are compared at a time."""
CP_COMM_SINCE = {"all_gather": (2, 20), "a2a": (2, 10)}
"""Versions of Transformer Engine (major, minor) since which these forms of `cp_comm_type` accept packs."""


def _differs_from_embeddings(path: Path, config: Any) -> bool:
    family = family_of(config)
    if not family.ties_embeddings or missing_files(path):
        return False
    source = SafetensorsDirectory(path)
    pair = (family.embedding_name, LM_HEAD)
    if not source.names().issuperset(pair):
        return False
    return _are_different(path, pair, tuple((path / source.file_of[name]).stat().st_mtime_ns for name in pair))


@functools.lru_cache(maxsize=8)
def _are_different(path: Path, names: tuple[str, str], written_at: tuple[int, ...]) -> bool:
    """Return whether two tensors differ. A run asks several times for files that may have gigabytes.

    Args:
        written_at: times at which their files were written; the answer is kept for these.
    """
    source = SafetensorsDirectory(path)
    if source.shape(names[0]) != source.shape(names[1]):
        return True
    blocks = (slice(start, start + COMPARED_ROWS) for start in range(0, source.shape(names[1])[0], COMPARED_ROWS))
    return not all(torch.equal(*(source.read(name, rows) for name in names)) for rows in blocks)


def check_model_fits(
    hf: Any, parallel: ParallelConfig, max_sequence_length: int, model: ModelConfig | None = None
) -> None:
    """Raise an error if the model is not supported, or if the parallel layout does not divide it evenly.

    No process group is needed.

    Args:
        hf: transformers' configuration of the model.
        model: options of the model; they are checked too. With None, no options are checked.

    Raises:
        UserError: the message names the key, its value, and what it must be.
    """
    family = family_of(hf)
    family.check(max_sequence_length)
    _check_experts(family, parallel)
    if model is not None:
        model = platform.resolve(model)
        _check_options(family, model)
        if model.moe_grouped_gemm is True and (problem := _grouped_gemm_problem(family, model, parallel)):
            raise UserError(f"model.moe_grouped_gemm: {problem}; leave model.moe_grouped_gemm out")
        _check_precision(model, parallel)
        if model.fp8 is not None:
            _check_fp8(family, model.fp8, parallel)
    if model is not None and model.lora:
        _check_adapted_stages(family, model, parallel)
    _check_first_chunk(family, parallel)
    _check_shared_choices(family, parallel, max_sequence_length)
    _check_shared_keys(family, parallel)
    tp = parallel.tensor_model_parallel_size
    for what, size in family.divisible_by_tensor_parallel().items():
        if size % tp:
            raise UserError(f"parallel.tensor_model_parallel_size={tp}: must divide the model's {what} ({size})")
    both = tp * parallel.context_parallel_size
    for what, size in family.divisible_by_tensor_and_context_parallel().items():
        if size % both:
            raise UserError(
                f"parallel.context_parallel_size={parallel.context_parallel_size}: tensor x context parallelism "
                f"({both}) must divide the model's {what} ({size})"
            )
    for groups in sorted({family.num_query_groups, *_key_value_heads(family)}):
        if groups % tp and tp % groups:
            raise UserError(
                f"parallel.tensor_model_parallel_size={tp}: must divide the model's key-value heads ({groups}), or be "
                "a multiple of them"
            )


def _key_value_heads(family: Family) -> set[int]:
    """Return the numbers of key-value heads in layers with grouped-query attention."""
    mixers = map(family.token_mixer, range(family.num_layers))
    return {mixer.groups for mixer in mixers if isinstance(mixer, GroupedQueryAttention)}


def _check_adapted_stages(family: Family, model: ModelConfig, parallel: ParallelConfig) -> None:
    """Raise UserError if a pipeline stage has no adapters to train."""
    assert model.lora is not None
    adapters = lora_of(model.lora, family, with_tower=model.vision_tower == "trained")
    stages, count = parallel.stages_of_layers(family.num_layers), parallel.pipeline_model_parallel_size
    for what, layers in (("layers", range(family.num_layers)), ("layer with adapters", adapters.layers())):
        if layers and len({stages[layer] for layer in layers}) < count:
            raise UserError(
                f"model.lora: every pipeline stage needs adapters to train, but one stage has no {what}; give each "
                "stage a layer with adapters (model.lora.target_modules, parallel.pipeline_model_parallel_layout)"
            )


def _check_first_chunk(family: Family, parallel: ParallelConfig) -> None:
    """Raise UserError if the first chunk lacks layers to whose outputs features of images are added."""
    first, *others = parallel.layers_of_chunks(family.num_layers)
    if first >= family.deepstack:
        return
    if not others or family.num_layers < family.deepstack:
        raise UserError(
            f"model.path: features of images are added to the outputs of the first {family.deepstack} layers, but the "
            f"text model has only {family.num_layers}; use a model with more layers"
        )
    share, more = divmod(family.num_layers - family.deepstack, len(others))
    layers = [family.deepstack, *(share + (number < more) for number in range(len(others)))]
    layout = "|".join("t" * count for count in layers)
    only_last_is_empty = all(layers[:-1])  # a chunk may have only the LM head, but not nothing
    remedy = f"set parallel.pipeline_model_parallel_layout='E{layout}L'" if only_last_is_empty else "use fewer stages"
    raise UserError(
        f"parallel.pipeline_model_parallel_size={parallel.pipeline_model_parallel_size}: features of images are added "
        f"to the outputs of the first {family.deepstack} layers of {family.model_type}, but the first chunk has only "
        f"{first}; {remedy}"
    )


def _check_shared_choices(family: Family, parallel: ParallelConfig, max_sequence_length: int) -> None:
    """Raise UserError if the keys of a chunk's layer are chosen in another chunk; choices are not sent to it."""
    first = 0
    for count in parallel.layers_of_chunks(family.num_layers):
        layers = range(first, first + count)
        for layer in layers:
            indexer = getattr(family.token_mixer(layer), "indexer", None)
            if indexer is not None and max_sequence_length > indexer.most_seen and indexer.source not in layers:
                raise UserError(
                    f"parallel.pipeline_model_parallel_size={parallel.pipeline_model_parallel_size}: layer {layer} "
                    f"attends to the keys that layer {indexer.source} chooses (indexer_types of config.json), so both "
                    "must be in the same stage; set parallel.pipeline_model_parallel_layout, or "
                    f"data.max_sequence_length={indexer.topk} (index_topk), up to which no keys are chosen"
                )
        first += count


def _check_shared_keys(family: Family, parallel: ParallelConfig) -> None:
    """Raise UserError if a chunk's layer uses keys and values of another chunk's; they are not sent to it."""
    stages, first = parallel.pipeline_model_parallel_size, 0
    for count in parallel.layers_of_chunks(family.num_layers):
        layers = range(first, first + count)
        for layer in layers:
            source = getattr(family.token_mixer(layer), "source", None)
            if source is not None and source not in layers:
                raise UserError(
                    f"parallel.pipeline_model_parallel_size={stages}: layer {layer} uses the keys and values of layer "
                    f"{source} (num_kv_shared_layers of config.json), so both must be in the same stage; set "
                    "parallel.pipeline_model_parallel_layout"
                )
        first += count


def _check_experts(family: Family, parallel: ParallelConfig) -> None:
    tp, ep, etp = (
        parallel.tensor_model_parallel_size,
        parallel.expert_model_parallel_size,
        parallel.expert_tensor_size,
    )
    if not isinstance(family, Mixture):
        if (ep, etp) != (1, tp):
            raise UserError(
                f"parallel.expert_model_parallel_size={ep}: {family.model_type} has no experts; leave "
                "parallel.expert_model_parallel_size and expert_tensor_parallel_size out"
            )
        if parallel.moe_token_dispatcher_type != "alltoall":
            raise UserError(
                f"parallel.moe_token_dispatcher_type: {family.model_type} has no experts; leave "
                "parallel.moe_token_dispatcher_type out"
            )
        return
    if parallel.moe_token_dispatcher_type == "flex":
        _check_flex_dispatcher(ep * etp)
    experts = family.experts
    if experts.count % ep:
        raise UserError(f"parallel.expert_model_parallel_size={ep}: must divide the model's {experts.count} experts")
    if experts.width % etp:
        raise UserError(
            f"parallel.expert_tensor_parallel_size={etp}: must divide the width of an expert ({experts.width})"
        )
    if tp > 1 and not parallel.sequence_parallel:
        raise UserError("parallel.sequence_parallel: must be true for mixtures of experts under tensor parallelism")


def _check_precision(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Raise UserError if a choice of `parallel` does not fit the precision of the weights."""
    if not parallel.grad_reduce_in_fp32 and (model.dtype != "bfloat16" or model.lora is not None):
        trained = "adapters are" if model.lora is not None else "the model is"
        raise UserError(
            f"parallel.grad_reduce_in_fp32: gradients have at least the precision of the trained weights, and "
            f"{trained} in float32; leave parallel.grad_reduce_in_fp32 out"
        )
    if parallel.moe_token_dispatcher_type == "flex" and model.dtype != "bfloat16" and platform.has_gpu():
        raise UserError(
            "parallel.moe_token_dispatcher_type: the kernels of flex add up only bfloat16; set model.dtype=bfloat16, "
            "or leave parallel.moe_token_dispatcher_type out"
        )


def _check_flex_dispatcher(processes: int) -> None:
    if processes == 1:
        raise UserError(
            "parallel.moe_token_dispatcher_type: flex needs expert_model_parallel_size x expert_tensor_parallel_size > "
            "1, because one process has all experts; leave parallel.moe_token_dispatcher_type out"
        )
    if importlib.util.find_spec("deep_ep") is None and not platform.simulates():
        raise UserError(
            "parallel.moe_token_dispatcher_type: flex needs DeepEP, which is not installed; install it on a machine "
            f"with CUDA's compiler by: {DEEP_EP}, or leave parallel.moe_token_dispatcher_type out"
        )


def _check_options(family: Family, model: ModelConfig) -> None:
    if model.vision_tower == "trained" and family.vision_config is None:
        raise UserError(
            f"model.vision_tower: {family.model_type} has no vision tower that can be trained; leave "
            "model.vision_tower out"
        )
    if model.lora is not None:
        _check_adapters(family, model, model.lora)
    is_mixture = isinstance(family, Mixture)
    has_bias = isinstance(family, Mixture) and family.experts.selection_bias
    for name, possible, what in (
        ("moe_aux_loss_coeff", is_mixture, "experts"),
        ("moe_z_loss_coeff", is_mixture, "experts"),
        ("moe_router_replay", is_mixture, "experts"),
        ("indexer_replay", bool(family.layers_with_indexer), "indexer that chooses keys"),
        ("moe_grouped_gemm", is_mixture, "experts"),
        ("moe_router_bias_update_rate", has_bias, "biases to choose experts with"),
    ):
        if getattr(model, name) not in (False, 0, "if_possible") and not possible:
            raise UserError(f"model.{name}: {family.model_type} has no {what}; leave model.{name} out")
    _check_recomputed(family, model)
    key = "model.mtp_loss_scaling_factor"
    for name, has in (("lora", model.lora), ("fp8", model.fp8), ("head", model.head == "reward")):
        if family.mtp_depth and has:
            raise UserError(
                f"{key}: layers that predict further tokens are not trained with model.{name}; leave {key} out"
            )


def _check_recomputed(family: Family, model: ModelConfig) -> None:
    """Raise UserError if `model.recompute_modules` names a module that no layer has."""
    layers = range(family.num_layers)
    sparse = family.experts.sparse_layers if isinstance(family, Mixture) else (False,) * family.num_layers
    shares = isinstance(family, Mixture) and bool(family.experts.shared_width)
    dense = any(family.has_mlp(layer) and not sparse[layer] for layer in layers)
    for name, present in (("mlp", dense), ("moe", any(sparse)), ("shared_experts", shares)):
        if name in model.recompute_modules and not present:
            raise UserError(f"model.recompute_modules: no layer of {family.model_type} has {name}; leave {name} out")


def uses_grouped_gemm(family: Family, model: ModelConfig, parallel: ParallelConfig) -> bool:
    """Return whether all experts of a layer are computed in one product per linear layer."""
    if isinstance(model.moe_grouped_gemm, bool):
        return model.moe_grouped_gemm
    return isinstance(family, Mixture) and _grouped_gemm_problem(family, model, parallel) is None


def _grouped_gemm_problem(family: Family, model: ModelConfig, parallel: ParallelConfig) -> str | None:
    """Return why the experts cannot be computed in grouped products; None if they can.

    PyTorch's `grouped_mm` needs matrices whose rows are multiples of 16 bytes. Transformer Engine's kernels, which
    replace it if the experts have no adapters, take all sizes.
    """
    if not isinstance(family, Mixture):
        return None  # refused by `_check_options`
    if model.transformer_impl != "local" and not _adapts_experts(family, model):
        return None
    if not hasattr(torch.nn.functional, "grouped_mm"):
        return f"torch {torch.__version__} has no grouped_mm"
    processes = parallel.expert_tensor_size
    multiple = 16 // getattr(torch, model.dtype).itemsize
    of_rank = f" on each of {processes} processes" if processes > 1 else ""
    for what, size in (
        ("latent size", family.experts.latent) if family.experts.latent else ("hidden size", family.hidden_size),
        (f"width of an expert{of_rank}", family.experts.width // processes),
    ):
        if size % multiple:
            return f"in {model.dtype} the model's {what} ({size}) must be a multiple of {multiple}"
    return None


def _cp_comm_type(family: Family, model: ModelConfig, parallel: ParallelConfig) -> str | None:
    """Return how attention communicates under context parallelism; None for the way of the layers' own.

    Raises:
        UserError: the layers, the version of Transformer Engine, or the numbers of heads do not allow it.
    """
    chosen, size = parallel.cp_comm_type, parallel.context_parallel_size
    if chosen == "p2p" or size == 1:
        return None
    if model.transformer_impl != "transformer_engine":
        raise UserError(
            f"parallel.cp_comm_type: {chosen} is a way of Transformer Engine's attention, but the layers are local "
            "(model.transformer_impl); leave parallel.cp_comm_type out"
        )
    if problem := platform.te_lacks(*CP_COMM_SINCE[chosen]):
        raise UserError(f"parallel.cp_comm_type: {chosen} with packs needs {problem}; leave parallel.cp_comm_type out")
    heads, groups = (
        n // parallel.tensor_model_parallel_size for n in (family.num_attention_heads, family.num_query_groups)
    )
    if chosen == "a2a" and (heads % size or groups % size):
        raise UserError(
            f"parallel.cp_comm_type: for a2a, context_parallel_size ({size}) must divide the {heads} heads and "
            f"{groups} groups of a tensor-parallel process; use p2p or all_gather"
        )
    return chosen


def _check_fp8(family: Family, fp8: FP8Config, parallel: ParallelConfig) -> None:
    """Check that FP8 can be used for a model of this family, in this layout and on this device.

    Raises:
        UserError: the device does not support the recipe; `first_layers` or `last_layers` are too many; or a factor of
            a product has a size that FP8 cannot divide into blocks.
    """
    if family.streams_count > 1:
        raise UserError(
            f"model.fp8: is not supported for {family.model_type}, whose residual has several streams; leave model.fp8 "
            "out"
        )
    if (problem := platform.fp8_problem(fp8.recipe, fp8.scales)) is not None:
        raise UserError(f"model.fp8: {problem}")
    layers, stages = family.num_layers, parallel.pipeline_model_parallel_size
    if fp8.first_layers + fp8.last_layers >= layers:
        raise UserError(
            f"model.fp8: first_layers ({fp8.first_layers}) and last_layers ({fp8.last_layers}) leave none of the "
            f"model's {layers} layers in FP8; leave model.fp8 out"
        )
    most = layers // stages  # Megatron's limit
    for name, count in (("first_layers", fp8.first_layers), ("last_layers", fp8.last_layers)):
        if count > most:
            raise UserError(
                f"model.fp8.{name}={count}: must be at most {most}, the {layers} layers divided by "
                f"pipeline_model_parallel_size={stages}"
            )
    for mapping in family.table.values():
        if _is_in_fp8(mapping, fp8, layers):
            _check_sizes(mapping, fp8, parallel)


def _is_in_fp8(mapping: Mapping, fp8: FP8Config, num_layers: int) -> bool:
    """Return whether the parameter is the weight of a product in FP8.

    These are the weights of Transformer Engine's linear layers, which tensor-parallel ranks divide. Routers and the
    down projections of latent attention, which each rank has as a whole, are not computed in FP8.
    """
    section, _, rest = mapping.megatron.partition("decoder.layers.")
    is_of_layer = not section and rest.endswith(".weight") and fp8.in_fp8(int(rest.partition(".")[0]), num_layers)
    return is_of_layer and mapping.kind.partition_dim is not None


def _check_sizes(mapping: Mapping, fp8: FP8Config, parallel: ParallelConfig) -> None:
    """Raise UserError if a rank's shard of a weight has a number of rows or columns that FP8 cannot multiply."""
    ranks = parallel.expert_tensor_size if mapping.is_expert else parallel.tensor_model_parallel_size
    gathers = parallel.sequence_parallel and not mapping.is_expert
    for dimension, size in enumerate(mapping.kind.shard_shape(mapping.parts, ranks)):
        # Under sequence parallelism, ranks gather rows of this size in FP8: inputs of column-parallel layers, and
        # gradients of the outputs of row-parallel layers.
        whole_blocks = gathers and dimension != mapping.kind.partition_dim
        multiple = fp8.token_multiple if whole_blocks else fp8.size_multiple
        if size % multiple:
            remedy = "parallel.sequence_parallel or model.fp8" if whole_blocks else "model.fp8"
            raise UserError(
                f"model.fp8: {mapping.parts[0].name} has {size} {('rows', 'columns')[dimension]} on a process; "
                f"{fp8.recipe}{' under sequence parallelism' if whole_blocks else ''} requires a multiple of "
                f"{multiple}; leave {remedy} out"
            )


def _adapts_experts(family: Family, model: ModelConfig) -> bool:
    if model.lora is None:
        return False
    adapters = lora_of(model.lora, family, with_tower=model.vision_tower == "trained")
    return any(map(is_expert_target, adapters.target_modules))


def _check_adapters(family: Family, model: ModelConfig, lora: LoRAConfig) -> None:
    lora_of(lora, family, with_tower=model.vision_tower == "trained")
    if model.head == "reward":
        raise UserError(
            "model.lora: is not supported for a reward model, because its new head must be trained too; leave "
            "model.lora out"
        )
    if model.moe_router_bias_update_rate:
        raise UserError(
            "model.moe_router_bias_update_rate: changes the model's own weights, which model.lora freezes; leave "
            "model.moe_router_bias_update_rate out"
        )


def transformer_config(family: Family, model: ModelConfig, parallel: ParallelConfig) -> TransformerConfig:
    """Return Megatron's configuration for a model of this family with the options `model` and `parallel`."""
    model = platform.resolve(model)
    dtype, chunks = getattr(torch, model.dtype), parallel.chunks_per_stage
    experts = isinstance(family, Mixture)
    config = TransformerConfig(
        **family.megatron_fields(),
        **({"moe_token_dispatcher_type": parallel.moe_token_dispatcher_type} if experts else {}),
        moe_aux_loss_coeff=model.moe_aux_loss_coeff,
        moe_z_loss_coeff=model.moe_z_loss_coeff or None,
        moe_grouped_gemm=uses_grouped_gemm(family, model, parallel),
        moe_router_bias_update_rate=0.0,  # `StepRouterStatistics` updates the biases, only after completed steps
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        # Interleaved chunks receive each other's tensors if sends and receives are batched (wrong gradients).
        overlap_p2p_comm=chunks > 1,
        batch_p2p_comm=chunks == 1,
        pipeline_model_parallel_layout=_pipeline_layout(family, parallel),
        context_parallel_size=parallel.context_parallel_size,
        cp_comm_type=_cp_comm_type(family, model, parallel),
        sequence_parallel=parallel.sequence_parallel,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tensor_size,
        deterministic_mode=torch.are_deterministic_algorithms_enabled(),
        use_cpu_initialization=True,
        perform_initialization=False,
        # A per-token loss stops the schedule and DDP from rescaling gradients: see optimizer.py.
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=platform.fuses_weight_gradients(),
        transformer_impl=model.transformer_impl,
        apply_rope_fusion=False,  # attention modules rotate themselves
        bias_dropout_fusion=platform.has_gpu(),
        masked_softmax_fusion=False,
        **_recomputation(family, model),
        **fp8_fields(model),
    )
    # Set after the configuration's own checks, which accept only Transformer Engine's activations.
    config.use_te_activation_func = True
    return config


def _recomputation(family: Family, model: ModelConfig) -> dict[str, Any]:
    """Return Megatron's options for the recomputation of activations in the backward pass."""
    if model.recompute_activations and not family.shares_tensors:
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if model.recompute_modules:
        return {"recompute_granularity": "selective", "recompute_modules": list(model.recompute_modules)}
    return {}


def _pipeline_layout(family: Family, parallel: ParallelConfig) -> list[list[str]] | None:
    """Return Megatron's list of the layers in each chunk, or None without pipeline parallelism.

    Several options of `parallel` can determine how the layers are divided.
    """
    if parallel.pipeline_model_parallel_size == 1:
        return None
    layout = [["decoder"] * count for count in parallel.layers_of_chunks(family.num_layers)]
    layout[0].insert(0, "embedding")
    layout[-1].append("loss")
    return layout
