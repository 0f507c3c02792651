"""Updated weights that are gathered from the replicas while the next forward pass goes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.core.distributed import DistributedDataParallel


class ParameterGather:
    """The distributed optimizer gives each replica its own part of the updated weights. Here the rest comes in the
    forward pass of the next training step, each bucket of parameters while the layers before it compute.

    Until then no rank's weights are whole: whoever else takes them calls `settle` first. Every method is collective
    over the replicas.

    Args:
        wrapped: chunks whose configuration has Megatron's `overlap_param_gather`.
    """

    def __init__(self, wrapped: Sequence[DistributedDataParallel]) -> None:
        self.wrapped, self.is_pending = wrapped, False
        for chunk in wrapped:
            chunk.disable_forward_pre_hook(param_sync=False)  # there is nothing to gather yet
            chunk.module.gather = self
            for module in chunk.module.modules():
                if getattr(module, "takes_weights_of_parts", False):
                    module.register_forward_pre_hook(self._wait_for_parts)

    def begin(self) -> None:
        """After an optimizer step: gather what the first layers need; they ask for the next."""
        self.is_pending = True
        for chunk in self.wrapped:
            chunk.enable_forward_pre_hook()
            for groups in (chunk.bucket_groups, chunk.expert_parallel_bucket_groups):
                if groups:  # in the order of the backward pass
                    groups[-1].start_param_sync()

    def settle(self) -> None:
        """Wait for what is on its way, gather what was not asked for; nothing where all is there."""
        if not self.is_pending:
            return
        self.is_pending = False
        for chunk in self.wrapped:
            chunk.disable_forward_pre_hook(param_sync=False)
        for group in self._groups():
            if not group.param_gather_dispatched or group.param_gather_handle is not None:
                group.start_param_sync(force_sync=True)

    def wait_for(self, weight: Tensor) -> None:
        """Wait for a weight that is used without its module's forward pass, as Megatron's hooks do for a module."""
        if not self.is_pending:
            return
        for chunk in self.wrapped:
            if weight in chunk.param_to_bucket_group:
                chunk.param_to_bucket_group[weight].finish_param_sync()

    def _wait_for_parts(self, module: torch.nn.Module, inputs: Any) -> None:
        for weight in module.parameters():
            self.wait_for(weight)

    def _groups(self) -> Iterator[Any]:
        for chunk in self.wrapped:
            yield from chunk.bucket_groups
            yield from chunk.expert_parallel_bucket_groups
