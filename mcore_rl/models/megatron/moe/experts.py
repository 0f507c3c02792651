"""Experts: the MLPs of a mixture on this rank, one after the other or as grouped products."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_rl import platform
from mcore_rl.models.megatron.layers.transformer_layer import GenerationFastPath, bias_of_first_rank
from mcore_rl.models.megatron.moe.router import RouterStatistics

from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_config import TransformerConfig


class _GroupedLinear(torch.autograd.Function):
    """Autograd function that computes a linear layer of every expert, as one grouped product.

    It maps rows [T, in], sorted by expert, to [T, out]. `ends`: [experts] int32, the number of the row after the last
    row of each expert; an expert may have no rows. `weights`: each expert's weight [out, in].
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, ends, *weights)
        return F.grouped_mm(rows, stacked(weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, ends, *weights = ctx.saved_tensors
        grad = grad.contiguous()
        grad_rows: Tensor | None = None
        grad_weights: Sequence[Tensor | None] = [None] * len(weights)
        if ctx.needs_input_grad[0]:
            grad_rows = F.grouped_mm(grad, stacked(weights), offs=ends)
        if ctx.needs_input_grad[2]:
            grad_weights = F.grouped_mm(grad.T, rows, offs=ends).unbind()
        return grad_rows, None, *grad_weights


def stacked(weights: Sequence[Tensor]) -> Tensor:
    """Return the experts' weights [out, in] as one tensor [experts, out, in]; without a copy, if their places allow it.

    Without a copy, the tensor is a view of the weights' own memory, so it has every change of the weights. For this,
    the weights must be at equal distances in one storage, in the order of the experts; see `GroupedExperts`.

    In a storage of Megatron's DDP, a distance differs if a bucket ends between two experts and must be padded to a
    multiple of 128 and of the number of replicas. Then each call copies the weights. A copy that is kept until the next
    update would double the memory of the weights, and could be used after a change: an update in bfloat16 and an
    all-gather of updated weights do not change the version counters of parameters.
    """
    first = weights[0]
    storage, place = platform.storage_id(first), first.storage_offset()
    distance = weights[1].storage_offset() - place if len(weights) > 1 else first.numel()
    is_regular = distance >= first.numel() and all(
        weight.storage_offset() == place + number * distance and platform.storage_id(weight) == storage
        for number, weight in enumerate(weights)
    )
    if not is_regular:
        return torch.stack(list(weights))
    return first.as_strided((len(weights), *first.shape), (distance, *first.stride()))


class ExpertList(torch.nn.ModuleList):
    """A list of experts that names the last expert's modules and parameters first.

    Megatron's DDP stores parameters in the reverse of the order in which they are named. Therefore the experts'
    parameters are stored in the order of the experts, as `stacked` needs them.
    """

    def named_modules(
        self, memo: set[torch.nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        for name, expert in reversed(list(self.named_children())):
            yield from expert.named_modules(memo, f"{prefix}.{name}" if prefix else name, remove_duplicate)


def row_ends(tokens_per_expert: Tensor, rows: Tensor) -> Tensor:
    """Return, for each expert, the number of the row after its last row: [experts] int32, on the device of `rows`."""
    return platform.sent(tokens_per_expert, rows.device).cumsum(0, dtype=torch.int32)


def with_adapters(adapters: Sequence[Any], output: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    """Add what the experts' adapters compute to the `output` [T, out] of a linear layer; return the sum.

    Args:
        adapters: the adapter of each expert, or None for every expert.
        rows, ends: input of the linear layer, as in `_GroupedLinear`.
    """
    first = adapters[0]
    if first is None or not first.enabled:
        return output
    return (output + first.of_all(adapters, rows, ends)).to(output.dtype)


class ExpertsMixin:
    """Mixin for experts that counts the tokens that they get, and allows biases.

    load: statistics of the current training step; None outside a step.

    Args:
        has_biases: whether the experts' linear layers have biases. Megatron's option for biases is set only in a copy
            of the configuration. In the model's configuration it would apply to all linear layers, and Megatron would
            reject it for tensor-parallel experts.
        limit: limit to which the experts' gate and up projections are clamped; None for the model's own.
        latent: size of the experts' inputs and outputs; 0 for the size of the hidden states.
    """

    load: RouterStatistics | None = None
    training: bool

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        *args: Any,
        has_biases: bool = False,
        limit: float | None = None,
        latent: int = 0,
        **kwargs: Any,
    ) -> None:
        if has_biases or latent or limit is not None:
            config = copy.copy(config)
            config.hidden_size = latent or config.hidden_size
        if limit is not None:
            config.activation_func_clamp_value = limit
        if has_biases:
            config.add_bias_linear, config.bias_dropout_fusion = True, False
        super().__init__(num_local_experts, config, *args, **kwargs)  # type: ignore[call-arg]

    def forward(self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Map tokens [T, hidden], sorted by expert, to outputs [T, hidden], multiplied by their weights `probs` [T]."""
        # A recomputation is counted in its pass with gradient, as in the router.
        if self.load is not None and self.training and torch.is_grad_enabled():
            self.load.received += len(hidden)
        return self._compute(hidden, tokens_per_expert, probs)

    def _compute(self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        output: tuple[Tensor, None] = super().forward(hidden, tokens_per_expert, probs)  # type: ignore[misc]
        return output


class CountingExperts(ExpertsMixin, SequentialMLP):
    """Megatron's sequential experts, with this package's counts of the tokens that each expert gets."""


class GroupedExperts(GenerationFastPath, CountingExperts):
    """Experts with the same parameters as Megatron's; a linear layer of all experts is computed as one grouped product.

    In generation the experts are computed one after the other: a pass has so few tokens that stacking the weights would
    take longer than the grouped product saves.

    The experts' weights in a linear layer share one storage. Megatron's DDP later moves those that are trained to a
    storage of its own.
    """

    takes_weights_of_parts = True
    """Whether this module uses its submodules' weights without calling the submodules, so their hooks do not run."""

    local_experts: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.local_experts = ExpertList(self.local_experts)
        for name in ("linear_fc1", "linear_fc2"):
            weights = [getattr(expert, name).weight for expert in self.local_experts]
            for weight, part in zip(weights, torch.stack([w.detach() for w in weights]).unbind(), strict=True):
                weight.data = part

    def _compute(self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        if self.in_generation:
            return super()._compute(hidden, tokens_per_expert, probs)
        ends = row_ends(tokens_per_expert, hidden)
        projected, biases = self._linear("linear_fc1", hidden, ends)
        if biases is not None:
            projected = projected + biases
        scaled = self.local_experts[0].activation_func(projected, probs[:, None])
        output, biases = self._linear("linear_fc2", scaled, ends)
        if biases is not None:
            output = (output + bias_of_first_rank(biases) * probs[:, None]).to(hidden.dtype)
        return output, None

    def _linear(self, name: str, rows: Tensor, ends: Tensor) -> tuple[Tensor, Tensor | None]:
        """Compute the linear layer `name` of all experts.

        Returns:
            The outputs [T, out] without bias, and the bias of each row [T, out], or None if there are no biases.
        """
        layers = [getattr(expert, name) for expert in self.local_experts]
        output = _GroupedLinear.apply(rows, ends, *(layer.weight for layer in layers))
        output = with_adapters([layer.adapter for layer in layers], output, rows, ends)
        if layers[0].bias is None:
            return output, None
        expert = torch.bucketize(torch.arange(len(rows), device=rows.device), ends, right=True)
        return output, F.embedding(expert, torch.stack([layer.bias for layer in layers]))
