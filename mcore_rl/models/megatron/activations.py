"""The gated activation between an MLP's two linear layers, which keeps its input alone for the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.core.transformer.transformer_config import TransformerConfig


class GatedActivation:
    """[…, 2 · width] → […, width]: activation(first half) · second half.

    Autograd would keep the activated half and a copy of the other too: 2/5 of what an MLP keeps. No module: Megatron
    asks the modules of an MLP for what a checkpoint holds of them.
    """

    def __init__(self, config: TransformerConfig) -> None:
        self.activation = config.activation_func

    def __call__(self, x: Tensor) -> Tensor:
        gated: Tensor = _Gated.apply(x, self.activation)
        return gated


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.activation = activation
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return activation(gate) * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        halves = [half.detach().requires_grad_() for half in ctx.saved_tensors[0].chunk(2, dim=-1)]
        with torch.enable_grad():
            gated = ctx.activation(halves[0]) * halves[1]
        return torch.cat(torch.autograd.grad(gated, halves, grad), dim=-1), None
