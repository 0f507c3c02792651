"""FP8: the matrix products of linear layers in 8 bits, by Transformer Engine.

Both factors of a product are rounded to FP8 with a scale for each block, row or tensor (`FP8Config.recipe`), and their
product is added up in fp32. Parameters, gradients and optimizer state keep their precision. The numbers are rounded in
forward and backward pass, in training and in evaluation. Megatron enters Transformer Engine's context for each layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mcore_rl.config import ModelConfig
from mcore_rl.config.fp8 import FP8Config
from mcore_rl.models.megatron.layers.packs import PackParams
from mcore_rl.models.megatron.parallel_state import process_groups

from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer


def fp8_fields(model: ModelConfig) -> dict[str, Any]:
    """Return the fields of Megatron's configuration for FP8; none without FP8, and none for a simulation."""
    fp8 = model.fp8
    if fp8 is None or model.transformer_impl == "local":
        return {}
    return {
        # With one scale for a whole tensor, gradients need the range of E5M2. With block scales, E4M3 is more precise.
        "fp8": "hybrid" if fp8.recipe == "tensorwise" else "e4m3",
        "fp8_recipe": fp8.recipe,
        "first_last_layers_bf16": bool(fp8.first_layers or fp8.last_layers),
        "num_layers_at_start_in_bf16": fp8.first_layers,
        "num_layers_at_end_in_bf16": fp8.last_layers,
    }


def set_scales(fp8: FP8Config) -> None:
    """Tell Transformer Engine the form of blockwise's scales; the other recipes have only one. For the whole process.

    Transformer Engine reads its environment variable for this form (`NVTE_FP8_BLOCK_SCALING_FP32_SCALES`) when it is
    imported, which is before the configuration is known. Its quantizers read the attributes that are set here.
    """
    if fp8.recipe != "blockwise":
        return
    from transformer_engine.common.recipe import Float8BlockScaling

    assert fp8.scales != "auto", "the configuration is resolved"
    for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
        options = replace(getattr(Float8BlockScaling, name), power_2_scale=fp8.scales == "power_of_two")
        setattr(Float8BlockScaling, name, options)


def describe_fp8(fp8: FP8Config, num_layers: int, pack_multiple: int) -> str:
    """Describe in one line the recipe, the form of its scales, its layers, and the padding of packs."""
    scales = {"power_of_two": "scales that are powers of two", "float32": "scales in float32"}[fp8.scales]
    count = num_layers - fp8.first_layers - fp8.last_layers
    return (
        f"{fp8.recipe}, with {scales}, in {count} of {num_layers} layers; packs are padded to multiples of "
        f"{pack_multiple} tokens"
    )


def release_fp8_copies(chunks: Iterable[torch.nn.Module]) -> None:
    """Release the FP8 copies of weights; the next pass over a first microbatch makes them again."""
    for module in (module for chunk in chunks for module in chunk.modules()):
        getattr(module, "_fp8_workspaces", {}).clear()


def keep_padding_zero(layer: TransformerLayer) -> None:
    """Make padding exactly 0 in every input of the layer's linear layers, if `PackParams.is_token` is given.

    A largest magnitude determines each scale, so other values at padding would change the rounding of tokens. Norms,
    gated activations and linear layers without biases map 0 to 0. Therefore three tensors are multiplied by the mask of
    tokens: the input of the model's first layer, the output of core attention, and the output of a projection with a
    bias. Routers send padding to no expert.
    """
    attention: Any = layer.self_attention
    if layer.layer_number == 1:
        layer.register_forward_pre_hook(_zero_inputs, with_kwargs=True)
    if isinstance(attention, IdentityOp):
        return
    attention.core_attention.register_forward_hook(_zero_outputs, with_kwargs=True)
    attention.register_forward_hook(_zero_biased_outputs, with_kwargs=True)


def _zero_inputs(layer: Any, inputs: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return inputs, {**named, "hidden_states": _without_padding(named["hidden_states"], named)}


def _zero_outputs(module: Any, inputs: Any, named: dict[str, Any], output: Tensor) -> Tensor:
    return _without_padding(output, named)


def _zero_biased_outputs(module: Any, inputs: Any, named: dict[str, Any], outputs: Any) -> Any:
    output, bias = outputs
    return outputs if bias is None else (_without_padding(output + bias, named), None)


def _without_padding(x: Tensor, named: dict[str, Any]) -> Tensor:
    """Return `x` [T / CP (/ TP with SP), …] with zeros at the padding of the pack in `named`."""
    pack: PackParams | None = named.get("packed_seq_params")
    if pack is None or pack.is_token is None:
        return x
    is_token = pack.is_token
    if len(x) != len(is_token):  # sequence parallelism
        ranks = process_groups().tp
        is_token = is_token.chunk(ranks.size())[ranks.rank()]
    return x * is_token.view(-1, *[1] * (x.ndim - 1))
