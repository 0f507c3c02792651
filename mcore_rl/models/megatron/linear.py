"""Megatron's linear layers, with an adapter where there is one, and faster on the CPU while sequences are generated."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` without gradient; in fp32 on the CPU by oneDNN, in about half of MKL's time for a few rows."""
    if x.is_cpu and x.dtype == torch.float32 and torch.backends.mkldnn.is_available():
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return y
    return F.linear(x, weight, bias)


class FasterInGeneration:
    """A module with a faster pass, whose rounding may be another, for generation alone.

    Scoring takes the pass that trains: log-probabilities before the first update are then those of the update, bit
    for bit, and a margin of 0 is 0.
    """

    in_generation = False


class Adapted(FasterInGeneration):
    """A linear layer that may have an adapter, whose output is added to its own."""

    weight: Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.adapter: Any = None

    def _with_adapter(self, input_: Tensor, output: Tensor) -> Tensor:
        if self.adapter is None or not self.adapter.enabled:
            return output
        return (output + self.adapter(input_)).to(output.dtype)


class ColumnLinear(Adapted, ColumnParallelLinear):
    """Rows of the weight are cut over tensor-parallel ranks."""

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        output, bias = self._plain(input_, *args, **kwargs)
        return self._with_adapter(input_, output), bias

    def _plain(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        if not self.in_generation:
            output: tuple[Tensor, Tensor | None] = super().forward(input_, *args, **kwargs)
            return output
        if self.sequence_parallel and not self.explicit_expert_comm:
            input_ = gather_from_sequence_parallel_region(input_, group=self.tp_group)
        return linear(input_, self.weight, self.bias), None


class RowLinear(Adapted, RowParallelLinear):
    """Columns of the weight are cut over tensor-parallel ranks; the output is summed over them."""

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = self._plain(input_)
        return self._with_adapter(input_, output), bias

    def _plain(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        if not self.in_generation:
            output: tuple[Tensor, Tensor | None] = super().forward(input_)
            return output
        partial = linear(input_, self.weight)
        if self.explicit_expert_comm:  # experts' outputs are summed where tokens come back to their ranks
            return partial, None
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(partial, group=self.tp_group), None
        return reduce_from_tensor_model_parallel_region(partial, group=self.tp_group), None
