"""Parameters of this package's modules: how tensor-parallel ranks divide them, and whether the ranks sum gradients."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from mcore_rl.models.megatron.parallel_state import process_groups

from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default


class ShardedMixin:
    """A module that describes its parameters for a checkpoint.

    sharded: for each of the module's own parameters that tensor-parallel ranks divide, the dimension that is divided.
        The other parameters are the same on all ranks.
    """

    sharded: ClassVar[dict[str, int]] = {}

    def sharded_state_dict(
        self: Any, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return Megatron's sharded state dict of the module's own parameters and of its children."""
        groups, own = process_groups(), dict(self.named_parameters(recurse=False))
        described: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            own, prefix, self.sharded, sharded_offsets, tp_group=groups.tp, dp_cp_group=groups.dp_cp
        )
        for name, child in self.named_children():
            described |= sharded_state_dict_default(
                child, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=groups.tp
            )
        return described


class ShardedModuleList(ShardedMixin, torch.nn.ModuleList):
    """A list of modules. Of an ordinary list, Megatron would take all parameters to be the same on all ranks."""


def sum_over_sequence_ranks(*parameters: Tensor, when: bool) -> None:
    """Set whether Megatron sums gradients of the parameters over tensor-parallel ranks.

    Under sequence parallelism each of these ranks sees other tokens, so a parameter that is the same on all of them
    has the gradient of a part of the tokens on each. Megatron sums the gradients of parameters with this attribute.

    Args:
        when: whether the model uses sequence parallelism; False if the ranks need no sum, or sum in another way.
    """
    for parameter in parameters:
        parameter.sequence_parallel = when  # type: ignore[attr-defined]
