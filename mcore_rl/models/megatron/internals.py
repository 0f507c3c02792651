"""Uses of private functions and attributes of Megatron-Core for checkpoints, with the reasons."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Parameter

from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
)


class OwnedPart(NamedTuple):
    """The elements of a parameter that a distributed optimizer updates on this rank.

    start, end: the elements are start … end − 1 in row-major order.
    main: these elements in fp32; `main` is a parameter of the PyTorch optimizer.
    """

    parameter: Parameter
    start: int
    end: int
    main: Tensor

    def tensors(self, inner: Any) -> dict[str, Tensor]:
        """Return the fp32 elements of this part and their moments, by their names in a checkpoint.

        The tensors are not copies; they are the memory of the optimizer `inner`.
        """
        state = {name: values for name, values in inner.optimizer.state[self.main].items() if name != "step"}
        return {"param": self.main, **state}  # "step" is common to all parameters


def owned_parts(inner: Any) -> Iterator[OwnedPart]:
    """Yield, for each parameter, the part that the distributed optimizer `inner` updates on this rank.

    Megatron's own functions do not fit. The public one returns whole parameters, gathered over data-parallel ranks. The
    one for a single parameter returns another parameter's elements if a group has float32 and bfloat16 weights.
    """
    mains = {
        id(parameter): main
        for groups, of_groups in (
            (inner.model_float16_groups, inner.shard_fp32_from_float16_groups),
            (inner.model_fp32_groups, inner.shard_fp32_groups),
        )
        for group, of_group in zip(groups, of_groups, strict=True)
        for parameter, main in zip(group, of_group, strict=True)
    }
    for parameter in inner.model_param_gbuf_map:
        owned = inner._get_model_param_range_map(parameter)["param"]
        yield OwnedPart(parameter, owned.start, owned.end, mains[id(parameter)])


def shards_by_key(state: ShardedStateDict, strategy: TorchDistSaveShardedStrategy) -> dict[str, Any]:
    """Return the shards in `state` by their names in the checkpoint, as PyTorch's planner expects them.

    The strategy's own method for saving begins with this step, but then waits for subprocesses without a time limit.
    """
    tensors, *_ = _replace_state_dict_keys_with_sharded_keys(state, strategy.keep_only_main_replica)
    found: dict[str, Any] = tensors
    return found
