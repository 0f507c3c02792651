"""Private parts of Megatron-Core that checkpoints use, with the reasons."""

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
    """Yield the parameters of which a distributed optimizer owns elements start … end − 1 (row-major) on this rank.

    The optimizer's public interface returns whole parameters, gathered over data-parallel ranks.
    """
    for parameter in inner.model_param_gbuf_map:
        owned = inner._get_model_param_range_map(parameter)["param"]
        yield parameter, owned.start, owned.end


def optimizer_tensors_of(inner: Any, parameter: Parameter) -> dict[str, Tensor]:
    """Return this rank's fp32 elements of a parameter and their moments, by their names in a checkpoint. The tensors
    are the optimizer's own memory; its public interface returns copies."""
    tensors = inner._get_main_param_and_optimizer_states(parameter)
    return {name: values for name, values in tensors.items() if name != "step"}  # "step" is common to all parameters


def shards_by_key(state: ShardedStateDict, strategy: TorchDistSaveShardedStrategy) -> dict[str, Any]:
    """Return shards in the form that torch's planner expects: by their names in the checkpoint.

    The strategy's own saving would then write in subprocesses and wait for them without a time limit.
    """
    tensors, *_ = _replace_state_dict_keys_with_sharded_keys(state, strategy.keep_only_main_replica)
    found: dict[str, Any] = tensors
    return found
