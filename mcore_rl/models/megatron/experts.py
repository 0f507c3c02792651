"""A layer's experts: one after the other, as Megatron has them, or all in one product per linear layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_rl import platform
from mcore_rl.models.megatron.linear import FasterInGeneration
from mcore_rl.models.megatron.router import RouterLoad

from megatron.core.transformer.moe.experts import SequentialMLP


class _GroupedLinear(torch.autograd.Function):
    """Rows [T, in] that stand expert by expert → [T, out], by each expert's weight [out, in].

    ends: [experts] int32, behind each one's last row; an expert may have none. The weights are stacked for the product
    alone, and again for the backward pass: saved, the copy would double what they take for as long as activations are
    kept.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, ends, *weights)
        return F.grouped_mm(rows, torch.stack(weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, ends, *weights = ctx.saved_tensors
        grad = grad.contiguous()
        grad_rows: Tensor | None = None
        grad_weights: Sequence[Tensor | None] = [None] * len(weights)
        if ctx.needs_input_grad[0]:
            grad_rows = F.grouped_mm(grad, torch.stack(weights), offs=ends)
        if ctx.needs_input_grad[2]:
            grad_weights = F.grouped_mm(grad.T, rows, offs=ends).unbind()
        return grad_rows, None, *grad_weights


class CountingExperts(SequentialMLP):
    """Megatron's experts, which note how many tokens reach them.

    load: where a training step's are noted; None outside of one.
    """

    load: RouterLoad | None = None

    def forward(self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Tokens [T, hidden] that stand expert by expert, with the weights [T] of their outputs → [T, hidden]."""
        # As in the router: of a recomputation the pass with gradient counts.
        if self.load is not None and self.training and torch.is_grad_enabled():
            self.load.received += len(hidden)
        return self._compute(hidden, tokens_per_expert, probs)

    def _compute(self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        output: tuple[Tensor, None] = super().forward(hidden, tokens_per_expert, probs)
        return output


class GroupedExperts(FasterInGeneration, CountingExperts):
    """Megatron's experts with the same parameters, each linear layer computed by one grouped product.

    While sequences are generated a pass has few tokens, too few to stack the weights for.
    """

    takes_weights_of_parts = True
    """The linear layers' weights are used, but not by their own forward passes: who hooks those must hook this."""

    def _compute(self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        if self.in_generation:
            return super()._compute(hidden, tokens_per_expert, probs)
        ends = platform.sent(tokens_per_expert, hidden.device).cumsum(0, dtype=torch.int32)
        first, second = ([getattr(e, name).weight for e in self.local_experts] for name in ("linear_fc1", "linear_fc2"))
        gate, up = _GroupedLinear.apply(hidden, ends, *first).chunk(2, dim=-1)
        scaled = self.config.activation_func(gate) * up * probs[:, None]
        return _GroupedLinear.apply(scaled.to(hidden.dtype), ends, *second), None
