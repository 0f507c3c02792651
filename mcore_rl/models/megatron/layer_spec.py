"""Megatron's layer specs: Transformer Engine's where it is usable, else ours on torch modules."""

from __future__ import annotations

import functools
import importlib.util
import itertools
from typing import Any

from mcore_rl import platform
from mcore_rl.models.megatron.activations import GatedActivation
from mcore_rl.models.megatron.attention import PackedCausalAttention
from mcore_rl.models.megatron.experts import CountingExperts, GroupedExperts
from mcore_rl.models.megatron.families import Family
from mcore_rl.models.megatron.families.mixture import Mixture
from mcore_rl.models.megatron.linear import ColumnLinear, RowLinear
from mcore_rl.models.megatron.norms import HeadRMSNorm, NormedRowLinear, RMSNorm, WideRMSNorm
from mcore_rl.models.megatron.router import PackLayer, PackMoELayer, Router

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
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


def uses_transformer_engine() -> bool:
    """True where a GPU is there and Transformer Engine is installed."""
    return platform.has_gpu() and importlib.util.find_spec("transformer_engine") is not None


def block_spec(config: TransformerConfig, family: Family, pipeline_rank: int, vp_stage: int | None = None) -> Any:
    """The specs of the transformer layers of one chunk of a pipeline stage."""
    if uses_transformer_engine():
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage, pp_rank=pipeline_rank)
        for layer in spec.layer_specs:
            layer.module = PackLayer
            if layer.submodules.mlp.module is MoELayer:
                layer.submodules.mlp.module = PackMoELayer
                layer.submodules.mlp.submodules.router = _router(family)
                layer.submodules.mlp.submodules.experts.module = CountingExperts  # with Transformer Engine's linears
        return spec
    count = get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=pipeline_rank)
    first = get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=pipeline_rank)
    layers = [_layer_spec(config, family, layer) for layer in range(first, first + count)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def _router(family: Family) -> Any:
    assert isinstance(family, Mixture), "only mixtures have routers"
    return functools.partial(Router, experts=family.experts)


def _layer_spec(config: TransformerConfig, family: Family, layer: int) -> ModuleSpec:
    before = RMSNorm if family.norms_before else IdentityOp
    is_sparse = isinstance(family, Mixture) and family.experts.sparse_layers[layer]
    keys = FUSED_NORM_KEYS if is_sparse else {**FUSED_NORM_KEYS, **FUSED_MLP_NORM_KEYS}
    return ModuleSpec(
        module=PackLayer,
        params={"rope": _rope_of(family, layer)},
        submodules=TransformerLayerSubmodules(
            input_layernorm=before,
            self_attention=_attention(family, layer),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=before,
            mlp=_sparse_mlp(family, config) if is_sparse else ModuleSpec(module=MLP, submodules=_linears(family)),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=keys if family.norms_before else {},
        ),
    )


# Megatron's checkpoints name the norms as Transformer Engine fuses them into the linear layers.
FUSED_NORM_KEYS = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
FUSED_MLP_NORM_KEYS = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}


def _attention(family: Family, layer: int) -> ModuleSpec:
    norms: dict[str, Any] = dict.fromkeys("qk", HeadRMSNorm if family.has_qk_norm else IdentityOp)
    if family.has_wide_qk_norm:
        heads = {"q": family.num_attention_heads, "k": family.num_query_groups}
        norms = {name: ModuleSpec(module=WideRMSNorm, params={"heads": count}) for name, count in heads.items()}
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnLinear,
            core_attention=ModuleSpec(module=PackedCausalAttention, params={"window": family.window(layer)}),
            linear_proj=_output_linear(family),
            q_layernorm=norms["q"],
            k_layernorm=norms["k"],
        ),
    )


def _rope_of(family: Family, layer: int) -> slice | None:
    """Return the slice of the layer's angles among the angles of all kinds of layers."""
    sizes = (2 * len(frequencies) for frequencies in family.ropes())
    ends, kind = list(itertools.accumulate(sizes, initial=0)), family.rope_kind(layer)
    return slice(ends[kind], ends[kind + 1]) if len(ends) > 2 else None


def _output_linear(family: Family) -> type[RowLinear]:
    return NormedRowLinear if family.norms_after else RowLinear


def _linears(family: Family) -> MLPSubmodules:
    return MLPSubmodules(linear_fc1=ColumnLinear, linear_fc2=_output_linear(family), activation_func=GatedActivation)


def _sparse_mlp(family: Family, config: TransformerConfig) -> ModuleSpec:
    linears, experts = _linears(family), GroupedExperts if config.moe_grouped_gemm else CountingExperts
    return ModuleSpec(
        module=PackMoELayer,
        submodules=MoESubmodules(
            router=_router(family),
            experts=ModuleSpec(module=experts, submodules=linears),
            shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=linears),
        ),
    )
