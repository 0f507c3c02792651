"""Private parts of Megatron-Core that checkpoints use, with the reasons."""

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
    """Elements start … end − 1 (row-major) of a parameter, which a distributed optimizer owns on this rank.

    main: these elements in fp32, a parameter of the torch optimizer.
    """

    parameter: Parameter
    start: int
    end: int
    main: Tensor

    def tensors(self, inner: Any) -> dict[str, Tensor]:
        """Return the fp32 elements and their moments, by their names in a checkpoint. They are the optimizer's own
        memory."""
        state = {name: values for name, values in inner.optimizer.state[self.main].items() if name != "step"}
        return {"param": self.main, **state}  # "step" is common to all parameters


def owned_parts(inner: Any) -> Iterator[OwnedPart]:
    """Yield the parts of parameters that a distributed optimizer owns on this rank.

    The optimizer's public interface returns whole parameters, gathered over data-parallel ranks. Its function for a
    single parameter takes another parameter's elements if some weights of a group are float32 and others bfloat16.
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
    """Return shards in the form that torch's planner expects: by their names in the checkpoint.

    The strategy's own saving would then write in subprocesses and wait for them without a time limit.
    """
    tensors, *_ = _replace_state_dict_keys_with_sharded_keys(state, strategy.keep_only_main_replica)
    found: dict[str, Any] = tensors
    return found
