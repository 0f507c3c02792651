"""Builds this rank's part of the model: the specs of a family's layers, and the chunks of a pipeline stage."""

from __future__ import annotations

import copy
import functools
import itertools
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from mcore_rl import platform
from mcore_rl.config import ModelConfig, ParallelConfig
from mcore_rl.distributed.topology import Topology
from mcore_rl.models.megatron.attention.attention import LayerModules, PackedCausalAttention
from mcore_rl.models.megatron.families import Family, family_of
from mcore_rl.models.megatron.families.mixtures import Mixture
from mcore_rl.models.megatron.layers.fp8 import set_scales
from mcore_rl.models.megatron.layers.per_layer_inputs import PerLayerEmbedding
from mcore_rl.models.megatron.layers.transformer_layer import (
    ColumnLinear,
    FloatRMSNorm,
    GatedActivation,
    HeadRMSNorm,
    NormedRowLinear,
    PackedRotaryEmbedding,
    RMSNorm,
    RowLinear,
)
from mcore_rl.models.megatron.layers.vision import VisionTower
from mcore_rl.models.megatron.model.gpt_model import HiddenStateGPTModel, ModelShard, hold_padding_row
from mcore_rl.models.megatron.model.hf_config import transformer_config
from mcore_rl.models.megatron.model.token_prediction import TokenPrediction
from mcore_rl.models.megatron.moe.experts import CountingExperts, GroupedExperts
from mcore_rl.models.megatron.moe.layer import PackMoELayer, ParallelMoELayer, ScaledRouter
from mcore_rl.models.megatron.moe.router import Router
from mcore_rl.models.megatron.parallel_state import process_groups
from mcore_rl.models.megatron.weight_mapping import padded_vocab_size

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

LOCAL = LayerModules(
    norm=RMSNorm,
    head_norm=HeadRMSNorm,
    column_linear=ColumnLinear,
    row_linear=RowLinear,
    normed_row_linear=NormedRowLinear,
    attention=PackedCausalAttention,
    grouped_experts=GroupedExperts,
)


def layer_modules(config: TransformerConfig) -> LayerModules:
    """Return the modules of the implementation that `config.transformer_impl` names."""
    if config.transformer_impl == "local":
        return LOCAL
    from mcore_rl.models.megatron.model import te_layers as te

    return LayerModules(
        norm=te.TERMSNorm,
        head_norm=te.TERMSNorm,
        column_linear=te.TEColumnLinear,
        row_linear=te.TERowLinear,
        normed_row_linear=te.TENormedRowLinear,
        attention=te.TEPackedCausalAttention,
        grouped_experts=te.TEGroupedExperts,
        grouped_linears=(te.TEGroupedColumnLinear, te.TEGroupedRowLinear),
    )


@dataclass(frozen=True)
class MLPSpec:
    """The spec of a layer's MLP, or of its experts. Megatron reads the attributes; since 0.18 it calls the spec.

    It is no ModuleSpec, because Megatron has exceptions for these: before 0.18 it warns of a subclass of its own layer
    of experts and leaves out the process groups; since 0.18 it warns of its own MLP.
    """

    module: type
    submodules: Any
    params: dict[str, Any]

    def __call__(self, *, config: TransformerConfig, **_: Any) -> Any:
        """Build the module. Megatron's other arguments are left out, because `params` has the process groups."""
        return self.module(config=config, submodules=self.submodules, **self.params)


class SizedMLP(MLP):
    """Megatron's MLP with a hidden layer of another size than the configuration's.

    Megatron's own argument for this does not change the second linear layer.
    """

    def __init__(self, config: TransformerConfig, submodules: MLPSubmodules, *, width: int, **kwargs: Any) -> None:
        config = copy.copy(config)
        config.ffn_hidden_size = width
        super().__init__(config, submodules, ffn_hidden_size=width, **kwargs)


def block_spec(config: TransformerConfig, family: Family, pipeline_rank: int, vp_stage: int | None = None) -> Any:
    """Return the specs of the transformer layers of one chunk of a pipeline stage."""
    count = get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=pipeline_rank)
    first = get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=pipeline_rank)
    modules = layer_modules(config)
    layers = [_layer_spec(config, family, modules, layer) for layer in range(first, first + count)]
    norm = FloatRMSNorm if family.float32_norms else modules.norm
    if family.streams is not None:
        norm = family.streams.last_norm(family.float32_norms)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def _router(family: Family, layer: int) -> Any:
    assert isinstance(family, Mixture), "only mixtures have routers"
    ids = family.vocab_size if layer in family.experts.by_id else 0
    router = ScaledRouter if family.experts.is_beside_mlp else Router
    return functools.partial(router, experts=family.experts, vocab_size=ids)


def _layer_spec(config: TransformerConfig, family: Family, modules: LayerModules, layer: int) -> ModuleSpec:
    """Return the spec of a layer. A layer without token mixer or without MLP keeps Megatron's identities there."""
    norm = FloatRMSNorm if family.float32_norms else modules.norm
    before = norm if family.norms_before else IdentityOp
    experts = family.experts if isinstance(family, Mixture) and family.experts.sparse_layers[layer] else None
    is_sparse = experts is not None
    # Names of the norms in Megatron's checkpoints: Megatron's own layers fuse the norms into the linear layers.
    keys, parts = dict[str, str](), dict[str, Any]()
    if (mixer := family.token_mixer(layer)) is not None:
        keys["input_layernorm."] = f"self_attention.{mixer.input_linear}.layer_norm_"
        parts |= {"input_layernorm": before, "self_attention": mixer.spec(modules)}
        parts["self_attn_bda"] = get_bias_dropout_add
    if family.has_mlp(layer):
        if not is_sparse:
            keys["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
        width = family.mlp_width(layer)
        own: dict[str, Any] = {} if width == config.ffn_hidden_size else {"width": width}
        options = {"tp_group": process_groups().tp, **own}
        mlp = MLPSpec(SizedMLP if own else MLP, _linears(modules, family.norms_after), options)
        is_beside = experts is not None and experts.is_beside_mlp
        parts |= {"pre_mlp_layernorm": IdentityOp if is_beside else before, "mlp_bda": get_bias_dropout_add}
        parts["mlp"] = _sparse_mlp(family, config, modules, layer) if is_sparse else mlp
    module, params = family.layer_module(layer)
    return ModuleSpec(
        module=module,
        params={"rope": _rope_of(family, layer), **params},
        submodules=TransformerLayerSubmodules(**parts, sharded_state_dict_keys_map=keys if family.norms_before else {}),
    )


def _rope_of(family: Family, layer: int) -> slice | None:
    """Return the slice of the rotary angles that the layer uses; None if all layers use the same angles.

    The angles of all kinds of layers are in one tensor, one kind after the other.
    """
    sizes = (2 * len(frequencies) for frequencies in family.ropes())
    ends, kind = list(itertools.accumulate(sizes, initial=0)), family.rope_kind(layer)
    return slice(ends[kind], ends[kind + 1]) if len(ends) > 2 else None


def _linears(modules: LayerModules, has_norm: bool) -> MLPSubmodules:
    return MLPSubmodules(
        linear_fc1=modules.column_linear,
        linear_fc2=modules.normed_row_linear if has_norm else modules.row_linear,
        activation_func=GatedActivation,
    )


def _sparse_mlp(family: Family, config: TransformerConfig, modules: LayerModules, layer: int) -> Any:
    assert isinstance(family, Mixture), "only mixtures have experts"
    linears = _linears(modules, family.norms_after and not family.experts.is_beside_mlp)
    options: dict[str, Any] = {
        "has_biases": family.experts.has_biases,
        "limit": family.experts.limit,
        "latent": family.experts.latent,
    }
    options = {name: value for name, value in options.items() if value}
    experts = ModuleSpec(module=CountingExperts, params=options, submodules=linears)
    if config.moe_grouped_gemm:
        of_all = linears
        if modules.grouped_linears is not None:
            first, second = modules.grouped_linears
            of_all = MLPSubmodules(linear_fc1=first, linear_fc2=second, activation_func=GatedActivation)
        experts = ModuleSpec(module=modules.grouped_experts, params=options, submodules=of_all)
    submodules = MoESubmodules(
        router=_router(family, layer),
        experts=experts,
        shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=linears),
    )
    latent = {"latent": family.experts.latent} if family.experts.latent else {}
    module = ParallelMoELayer if family.experts.is_beside_mlp else PackMoELayer
    return MLPSpec(module, submodules, {"pg_collection": process_groups(), **latent})


def build_model(
    hf: Any, model: ModelConfig, parallel: ParallelConfig, topology: Topology, memory: bool = True
) -> ModelShard:
    """Build this rank's part of the model on the run's device. The weights are not loaded.

    If `memory` is False, or on a simulated device, the parameters have only shapes (PyTorch's meta device). The
    parameters are built on the meta device directly: moving them later would lose the attributes that Megatron sets.
    """
    memory = memory and not platform.simulates()
    family = family_of(hf)
    model = platform.resolve(model)
    config = transformer_config(family, model, parallel)
    count = parallel.chunks_per_stage
    chunks, tower = [], vision_tower(family, model, topology)
    predicts = [_layer_spec(config, family.predictor, layer_modules(config), 0) for _ in range(family.mtp_depth)]
    for index in range(count):
        spec = block_spec(config, family, topology.pipeline.rank, index if count > 1 else None)
        with nullcontext() if memory else torch.device("meta"):
            chunk = _build_chunk(family, config, spec, topology, index, count)
            if tower is not None and chunk.pre_process:
                chunk.set_tower(tower, family.vision_config, model.recompute_activations)
            if predicts and chunk.post_process:
                chunk.mtp = _token_prediction(family, config, predicts, model.mtp_loss_scaling_factor, topology, chunk)
        if model.recompute_activations and family.shares_tensors:
            for layer in chunk.decoder.layers:
                layer.recompute()
        chunk.rotary_pos_emb = PackedRotaryEmbedding(family.ropes(), process_groups(), family.rope_axes())
        chunks.append(chunk.to(platform.device()) if memory else chunk)
    # Since 0.18, Megatron builds norms of queries and keys only if this is set. It then also sums their gradients over
    # tensor-parallel ranks, which is wrong if each rank holds a different part of the weight.
    config.qk_layernorm = family.has_qk_norm
    stages = tuple(parallel.stages_of_layers(family.num_layers))
    if (fp8 := model.fp8) is not None and not platform.simulates():
        set_scales(fp8)
    logits_bytes = 2**30 * float(model.logits_memory_gib)
    return ModelShard(chunks, family, topology, stages, tower=tower, logits_bytes=logits_bytes, fp8=fp8)


def _token_prediction(
    family: Family,
    config: TransformerConfig,
    blocks: list[ModuleSpec],
    scaling_factor: float,
    topology: Topology,
    chunk: HiddenStateGPTModel,
) -> TokenPrediction:
    """Build the layers that predict further tokens, for the last chunk."""
    norm, groups = layer_modules(config).norm, process_groups()
    prediction = TokenPrediction(config, norm, blocks, scaling_factor, topology, family.num_ids, chunk.vp_stage, groups)
    if not chunk.pre_process and not family.ties_embeddings:
        prediction.table = torch.zeros_like(chunk.output_layer.weight, dtype=config.params_dtype)
    return prediction


def vision_tower(family: Family, model: ModelConfig, topology: Topology) -> VisionTower | None:
    """Return the vision tower, without its module; None if the model reads no images."""
    config = family.vision_config
    if config is None:
        return None
    is_trained = model.vision_tower == "trained"
    return VisionTower(None, topology, config.spatial_merge_size, family.deepstack, is_trained)


def _build_chunk(
    family: Family, config: TransformerConfig, spec: Any, topology: Topology, index: int, count: int
) -> HiddenStateGPTModel:
    """Build chunk `index` of the `count` chunks of this pipeline stage."""
    chunk = HiddenStateGPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=padded_vocab_size(family.vocab_size, topology.tensor.size),
        max_sequence_length=family.hf.max_position_embeddings,
        pre_process=topology.is_first_stage and index == 0,
        post_process=topology.is_last_stage and index == count - 1,
        share_embeddings_and_output_weights=family.ties_embeddings,
        position_embedding_type="rope",
        pg_collection=process_groups(),
        vp_stage=index if count > 1 else None,
    )
    if chunk.post_process and family.has_reward_head:
        chunk.set_reward_head(config)
    elif chunk.post_process and family.float32_head and not family.ties_embeddings:
        chunk.output_layer.weight.data = chunk.output_layer.weight.data.float()
    chunk.per_layer_inputs = family.per_layer_inputs
    if chunk.pre_process and family.per_layer_inputs is not None:
        chunk.embedding.per_layer = PerLayerEmbedding(config, family.per_layer_inputs, topology.tensor)
    if chunk.pre_process and family.padding_token is not None:
        hold = functools.partial(hold_padding_row, token=family.padding_token, ranks=topology.tensor)
        chunk.embedding.register_forward_hook(hold, with_kwargs=True)
    if chunk.pre_process and family.embedding_scale != 1:
        scale = torch.tensor(family.embedding_scale, dtype=config.params_dtype, device="cpu").item()
        chunk.embedding.register_forward_hook(lambda module, inputs, embedded: embedded * scale)
    if chunk.pre_process and family.streams_count > 1:
        count = family.streams_count
        chunk.embedding.register_forward_hook(lambda module, inputs, embedded: embedded.repeat(1, count, 1))
    return chunk
