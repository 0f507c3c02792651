"""The parts of Megatron-Core outside its public interface that checkpoints use, and the reasons."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
)


def owned_ranges(inner: Any) -> Iterator[tuple[Parameter, int, int]]:
    """The model's parameters that a distributed optimizer has numbers start … end − 1 of on this rank, row-major.

    Its interface gives whole parameters, gathered over data-parallel ranks.
    """
    for parameter in inner.model_param_gbuf_map:
        owned = inner._get_model_param_range_map(parameter)["param"]
        yield parameter, owned.start, owned.end


def optimizer_tensors_of(inner: Any, parameter: Parameter) -> dict[str, Tensor]:
    """This rank's fp32 numbers of a parameter and their moments, by their names in a checkpoint: the optimizer's own
    memory, where its interface gives copies."""
    tensors = inner._get_main_param_and_optimizer_states(parameter)
    return {name: values for name, values in tensors.items() if name != "step"}  # one number for all parameters


def shards_by_key(state: ShardedStateDict, strategy: TorchDistSaveShardedStrategy) -> dict[str, Any]:
    """Shards as torch's planner wants them: by the names that they have in the checkpoint.

    The strategy's own saving goes on from here to write in processes which it waits for for ever.
    """
    tensors, *_ = _replace_state_dict_keys_with_sharded_keys(state, strategy.keep_only_main_replica)
    found: dict[str, Any] = tensors
    return found
