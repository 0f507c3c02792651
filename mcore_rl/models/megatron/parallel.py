"""The process groups of a run: Megatron's parallel state, and the `Topology` made from it once."""

from __future__ import annotations

from datetime import timedelta

import torch

from mcore_rl import platform
from mcore_rl.config import ParallelConfig
from mcore_rl.distributed.topology import ParallelDimension, Topology

from megatron.core import parallel_state  # isort: skip
from megatron.core.process_groups_config import ProcessGroupCollection  # isort: skip


def initialize_parallel(config: ParallelConfig) -> Topology:
    """Join the processes of this run and build the groups of `config`. Collective."""
    timeout = timedelta(seconds=config.timeout_seconds)
    platform.initialize_process_group(timeout)
    config.data_parallel_size(torch.distributed.get_world_size())
    chunks = config.virtual_pipeline_model_parallel_size
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
    )


def destroy_parallel() -> None:
    """Leave all process groups."""
    parallel_state.destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def process_groups() -> ProcessGroupCollection:
    """Megatron's groups, to hand to its modules."""
    return ProcessGroupCollection.use_mpu_process_groups()
