"""RMS norms on torch modules, usable under tensor and sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_rl.models.megatron.linear import FasterInGeneration, RowLinear
from mcore_rl.models.megatron.parallel_state import process_groups

from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint


class RMSNorm(FasterInGeneration, torch.nn.Module):
    """Root-mean-square norm in fp32 (arXiv:1910.07467), usable under sequence parallelism.

    Where the configuration has `layernorm_zero_centered_gamma`, 1 is added to the weight (Gemma).
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        self.eps, self.is_zero_centred = eps, config.layernorm_zero_centered_gamma
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Each tensor-parallel rank sees its own tokens: Megatron then sums this weight's gradients.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        weight = 1 + self.weight.float() if self.is_zero_centred else self.weight
        if self.in_generation and x.dtype == torch.float32:  # one operation, the same but for rounding
            return F.rms_norm(x, weight.shape, weight, self.eps)
        normed: Tensor = _Normed.apply(x, weight, self.eps)
        return normed


class _Normed(torch.autograd.Function):
    """weight · x / rms(x), which keeps x itself for the backward pass, where autograd would keep it in fp32 and what
    becomes of it. A weight in fp32 multiplies before rounding to x's precision, any other behind it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        wide = wide * scale
        return (weight * wide).to(x.dtype) if weight.dtype == torch.float32 else weight * wide.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        normed, grad = x.float() * scale, grad.float()
        of_weight = (grad * normed).flatten(0, -2).sum(0)
        grad = grad * weight.float()
        of_x = scale * (grad - normed * (grad * normed).mean(-1, keepdim=True))
        return of_x.to(x.dtype), of_weight.to(weight.dtype), None


class HeadRMSNorm(RMSNorm):
    """RMS norm of each attention head (Qwen3's q and k norms).

    Heads are split over tensor-parallel ranks; Megatron sums the gradients of norms so named itself.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(config, hidden_size, eps)
        self.weight.sequence_parallel = False  # type: ignore[attr-defined]


class WideRMSNorm(torch.nn.Module):
    """RMS norm over all heads together (OLMo-2's q and k norms), which are cut over tensor-parallel ranks.

    Args:
        hidden_size: numbers of a head.
        heads: of all ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, heads: int) -> None:
        super().__init__()
        self.eps, self.group = eps, process_groups().tp
        self.size = heads * hidden_size
        self.weight = torch.nn.Parameter(torch.ones(self.size // self.group.size(), dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        """[T, 1, heads / TP, d], the mean taken over the heads of all ranks, in both directions."""
        wide = x.float().flatten(-2)
        total = reduce_from_tensor_model_parallel_region(wide.square().sum(-1, keepdim=True), group=self.group)
        mean = copy_to_tensor_model_parallel_region(total, group=self.group) / self.size
        return (self.weight * (wide * torch.rsqrt(mean + self.eps))).to(x.dtype).view_as(x)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """Megatron's description: the weight is cut over tensor-parallel ranks."""
        groups = process_groups()
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(
            state, prefix, {"weight": 0}, sharded_offsets, tp_group=groups.tp, dp_cp_group=groups.dp_cp
        )


class NormedRowLinear(RowLinear):
    """The last projection of attention or MLP, with a norm of the block's output behind it."""

    def __init__(self, *args: Any, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(*args, config=config, **kwargs)
        self.post_norm = RMSNorm(config, self.output_size, config.layernorm_epsilon)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(input_)
        return self.post_norm(output), bias

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """Megatron's description: the norm's weight is the same on all ranks."""
        described = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        groups, name = process_groups(), "post_norm.weight"
        del described[prefix + name]
        norm = {name: self.post_norm.weight}
        described.update(
            make_sharded_tensors_for_checkpoint(
                norm, prefix, {}, sharded_offsets, tp_group=groups.tp, dp_cp_group=groups.dp_cp
            )
        )
        return described
