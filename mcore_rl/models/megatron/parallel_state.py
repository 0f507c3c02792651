"""Megatron's parallel state, the `Topology` made from it, and the random generators of a process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
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


@dataclass(eq=False)
class _Layout:
    """A parallel layout of this run's processes.

    groups: the variables of Megatron's module `parallel_state` for this layout. Megatron's functions read these
        variables.
    users: number of models that use the layout.
    """

    config: ParallelConfig
    topology: Topology
    groups: dict[str, Any]
    users: int = 0


_layouts: list[_Layout] = []
"""Layouts of the models that exist. The first is the trained model's layout; Megatron's functions return its groups,
except inside `groups_of`."""

OF_A_MODEL = {
    "virtual_pipeline_model_parallel_size",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "timeout_seconds",
    "backend",
}
"""Keys of `parallel` that do not change the process groups."""


def _variables() -> dict[str, Any]:
    """Return the variables of Megatron's module `parallel_state` that describe the current layout, by name."""
    return {name: value for name, value in vars(parallel_state).items() if name.startswith("_") and name.isupper()}


_NO_LAYOUT = _variables()
"""Values of the variables of `parallel_state` before any layout is built."""


def initialize_parallel(config: ParallelConfig, may_differ: bool = False) -> Topology:
    """Connect the processes of this run and build the process groups of a layout, unless they exist. Collective.

    Each call needs a matching call of `destroy_parallel`.

    Args:
        config: the layout.
        may_differ: whether the layout may differ from the trained model's layout. If it differs, Megatron's functions
            return this layout's groups only inside `groups_of`.

    Raises:
        RuntimeError: groups of another layout exist, and `may_differ` is false.
    """
    wanted = _sizes(config)
    layout = next((layout for layout in _layouts if _sizes(layout.config) == wanted), None)
    if _layouts and not may_differ and layout is not _layouts[0]:
        there = _sizes(_layouts[0].config)
        key = next(key for key in there if there[key] != wanted[key])
        raise RuntimeError(
            f"parallel.{key}={wanted[key]}: all trained models of a process must have the same layout; "
            f"set {key}={there[key]}, as for the first model"
        )
    if layout is None:
        layout = _build_layout(config)
        _layouts.append(layout)
    layout.users += 1
    return layout.topology


def _sizes(config: ParallelConfig) -> dict[str, Any]:
    """Return the values in `config` that determine the process groups."""
    return {**config.model_dump(exclude=OF_A_MODEL), "virtual_pipeline_model_parallel_size": config.chunks_per_stage}


def destroy_parallel(topology: Topology | None = None) -> None:
    """Release the process groups of a layout. When no layout is used any more, destroy the groups of all layouts.

    Args:
        topology: topology of the layout; None for the trained model's layout. The groups of this layout may have
            been destroyed before.
    """
    if _layouts:
        released = _layouts[:1] if topology is None else [one for one in _layouts if one.topology is topology]
        for layout in released:
            layout.users -= 1
        if not released or any(one.users > 0 for one in _layouts):
            return
    _layouts.clear()
    parallel_state.destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def is_run_layout(topology: Topology) -> bool:
    """Return whether this is the layout of the run's trained model, not the layout of a teacher or a judge."""
    return topology is _layouts[0].topology


def run_topology() -> Topology:
    """Return the topology of the run's trained model."""
    return _layouts[0].topology


@contextmanager
def groups_of(topology: Topology) -> Iterator[None]:
    """Inside the context, Megatron's functions return the process groups of the layout of `topology`.

    Use it to build a model with this layout and to run the model.
    """
    if is_run_layout(topology):
        yield
        return
    layout, before = _layout_of(topology), _variables()
    vars(parallel_state).update(layout.groups)
    try:
        yield
    finally:
        layout.groups = _variables()
        vars(parallel_state).update(before)


def _layout_of(topology: Topology) -> _Layout:
    return next(layout for layout in _layouts if layout.topology is topology)


def _build_layout(config: ParallelConfig) -> _Layout:
    """Build the groups of a layout. Megatron's functions continue to return the groups of the first layout."""
    before = _variables()
    vars(parallel_state).update(_NO_LAYOUT)
    try:
        topology = _build_groups(config)
        return _Layout(config, topology, _variables())
    finally:
        if _layouts:
            vars(parallel_state).update(before)


def _build_groups(config: ParallelConfig) -> Topology:
    timeout = timedelta(seconds=config.timeout_seconds)
    platform.initialize_process_group(timeout, config.backend)
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
    """Return Megatron's process groups, in the form that Megatron's modules accept."""
    return ProcessGroupCollection.use_mpu_process_groups()


def seed_everything(seed: int) -> None:
    """Seed all random generators, equally on all ranks. Megatron's tracker adds offsets where ranks must differ."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def random_states() -> dict[str, Any]:
    """Return the states of all random generators: Python's, NumPy's, PyTorch's (host and device) and Megatron's."""
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
    """Set all random generators to `states`, a result of `random_states`."""
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype("uint32"), *rest))
    torch.set_rng_state(states["torch"])
    get_cuda_rng_tracker().set_states(states["megatron"])
    if "device" in states:
        platform.set_random_state(states["device"])
