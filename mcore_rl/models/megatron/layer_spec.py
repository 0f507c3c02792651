"""Megatron's layer specs: Transformer Engine's where it is usable, else ours on torch modules."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_rl import platform
from mcore_rl.models.megatron.attention import PackedCausalAttention
from mcore_rl.models.megatron.families import Family
from mcore_rl.models.megatron.families.mixture import Mixture
from mcore_rl.models.megatron.linear import ColumnLinear, RowLinear
from mcore_rl.models.megatron.router import PackLayer, Router

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add  # isort: skip
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec  # isort: skip
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules  # isort: skip
from megatron.core.transformer.enums import AttnMaskType  # isort: skip
from megatron.core.transformer.identity_op import IdentityOp  # isort: skip
from megatron.core.transformer.mlp import MLP, MLPSubmodules  # isort: skip
from megatron.core.transformer.moe.experts import SequentialMLP  # isort: skip
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules  # isort: skip
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP  # isort: skip
from megatron.core.transformer.spec_utils import ModuleSpec  # isort: skip
from megatron.core.transformer.transformer_block import (  # isort: skip
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig  # isort: skip
from megatron.core.transformer.transformer_layer import (  # isort: skip
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
                layer.submodules.mlp.submodules.router = _router(family)
        return spec
    count = get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=pipeline_rank)
    first = get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=pipeline_rank)
    layers = [_layer_spec(config, family, layer) for layer in range(first, first + count)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def _router(family: Family) -> Any:
    assert isinstance(family, Mixture), "only mixtures have routers"
    return functools.partial(Router, experts=family.experts)


def _layer_spec(config: TransformerConfig, family: Family, layer: int) -> ModuleSpec:
    head_norm = HeadRMSNorm if config.qk_layernorm else IdentityOp
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnLinear,
            core_attention=PackedCausalAttention,
            linear_proj=RowLinear,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )
    is_sparse = isinstance(family, Mixture) and family.experts.sparse_layers[layer]
    return ModuleSpec(
        module=PackLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=_sparse_mlp(family) if is_sparse else ModuleSpec(module=MLP, submodules=LINEARS),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=FUSED_NORM_KEYS if is_sparse else {**FUSED_NORM_KEYS, **FUSED_MLP_NORM_KEYS},
        ),
    )


def _sparse_mlp(family: Family) -> ModuleSpec:
    return ModuleSpec(
        module=MoELayer,
        submodules=MoESubmodules(
            router=_router(family),
            experts=ModuleSpec(module=SequentialMLP, submodules=LINEARS),
            shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=LINEARS),
        ),
    )


LINEARS = MLPSubmodules(linear_fc1=ColumnLinear, linear_fc2=RowLinear)

# Megatron's checkpoints name the norms as Transformer Engine fuses them into the linear layers.
FUSED_NORM_KEYS = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
FUSED_MLP_NORM_KEYS = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm in fp32 (arXiv:1910.07467), usable under sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Each tensor-parallel rank sees its own tokens: Megatron then sums this weight's gradients.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and x.dtype == torch.float32:  # one operation, the same but for rounding
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(x.dtype)


class HeadRMSNorm(RMSNorm):
    """RMS norm of each attention head (Qwen3's q and k norms).

    Heads are split over tensor-parallel ranks; Megatron sums the gradients of norms so named itself.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(config, hidden_size, eps)
        self.weight.sequence_parallel = False  # type: ignore[attr-defined]
