"""Megatron's parallel state, the `Topology` that is derived from it, and the random generators of a process."""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from mcore_rl import platform
from mcore_rl.config import ParallelConfig
from mcore_rl.distributed.topology import ParallelDimension, Topology

from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed


@dataclass
class _Layout:
    """The parallel layout of this process's Megatron groups, and the number of models that use them."""

    config: ParallelConfig
    topology: Topology
    users: int = 0


_layout: _Layout | None = None

OF_A_MODEL = {
    "virtual_pipeline_model_parallel_size",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
    "timeout_seconds",
}
"""Keys of `parallel` that do not change the process groups."""


def initialize_parallel(config: ParallelConfig) -> Topology:
    """Join the processes of this run and build the groups of `config`, if they do not exist yet. Collective.

    Each call needs a matching call of `destroy_parallel`.

    Raises:
        RuntimeError: groups of another layout exist.
    """
    global _layout
    if _layout is None:
        _layout = _Layout(config, _build_groups(config))
    there, wanted = (
        {**layout.model_dump(exclude=OF_A_MODEL), "virtual_pipeline_model_parallel_size": layout.chunks_per_stage}
        for layout in (_layout.config, config)
    )
    if different := [key for key in there if there[key] != wanted[key]]:
        key = different[0]
        raise RuntimeError(
            f"parallel.{key}={wanted[key]}: all models of a process share one layout, which has {there[key]}"
        )
    _layout.users += 1
    return _layout.topology


def destroy_parallel() -> None:
    """Release the process groups; destroy them with the last user's call."""
    global _layout
    if _layout is not None and _layout.users > 1:
        _layout.users -= 1
        return
    _layout = None
    parallel_state.destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _build_groups(config: ParallelConfig) -> Topology:
    timeout = timedelta(seconds=config.timeout_seconds)
    platform.initialize_process_group(timeout)
    config.data_parallel_size(torch.distributed.get_world_size())
    chunks = config.chunks_per_stage
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        context_parallel_size=config.context_parallel_size,
        expert_model_parallel_size=config.expert_model_parallel_size,
        expert_tensor_parallel_size=config.expert_tensor_size,
        distributed_timeout_minutes=config.timeout_seconds / 60,
    )
    groups = process_groups()
    return Topology(
        tensor=ParallelDimension.of(groups.tp),
        pipeline=ParallelDimension.of(groups.pp),
        context=ParallelDimension.of(groups.cp),
        data=ParallelDimension.of(groups.dp),
        sequence_parallel=config.sequence_parallel,
        expert=ParallelDimension.of(groups.ep),
        expert_tensor=ParallelDimension.of(groups.expt_tp),
        expert_data=ParallelDimension.of(groups.expt_dp),
    )


def process_groups() -> ProcessGroupCollection:
    """Return Megatron's process groups, as its modules take them."""
    return ProcessGroupCollection.use_mpu_process_groups()


def seed_everything(seed: int) -> None:
    """Seed every random generator alike on all ranks; Megatron's tracker adds offsets where needed."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def random_states() -> dict[str, Any]:
    """Return the states of python, numpy, torch on the host and the device, and Megatron's tracker."""
    name, keys, *rest = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys, dtype="int64")), *rest),
        "torch": torch.get_rng_state(),
        "megatron": dict(get_cuda_rng_tracker().get_states()),
    }
    if (of_device := platform.random_state()) is not None:
        states["device"] = of_device
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Restore every generator to the states of `random_states`."""
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype("uint32"), *rest))
    torch.set_rng_state(states["torch"])
    get_cuda_rng_tracker().set_states(states["megatron"])
    if "device" in states:
        platform.set_random_state(states["device"])
