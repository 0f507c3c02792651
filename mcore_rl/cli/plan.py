"""Description of a run's parallel layouts. It needs no PyTorch, so a dry run prints it at once."""

from __future__ import annotations

from collections.abc import Iterator

from mcore_rl.config import ParallelConfig, TrainingConfig
from mcore_rl.config.algorithms import own_layouts
from mcore_rl.config.parallel import LayoutConfig
from mcore_rl.utils.console import counted
from mcore_rl.utils.model_directory import count_layers

SHOWN_RANKS = 64


def describe_layouts(config: TrainingConfig, world_size: int) -> Iterator[str]:
    """Yield lines about the parallel layouts of the policy and of the other models."""
    yield from layout_picture(config.parallel, world_size, count_layers(config.model.path))
    for key, own in own_layouts(config).items():
        yield f"{key}: {_sizes(own, world_size)}"


def layout_picture(parallel: ParallelConfig, world_size: int, layers: int | None) -> Iterator[str]:
    """Yield lines that show the parallel layout: a line for each tensor-parallel group, with its coordinates.

    Args:
        layers: number of layers of the model; None if it is not known.
    """
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    pp, dp = parallel.pipeline_model_parallel_size, parallel.data_parallel_size(world_size)
    yield f"{counted(world_size, 'process', 'processes')}: {_sizes(parallel, world_size)}"
    if parallel.expert_model_parallel_size > 1:
        experts = counted(parallel.expert_model_parallel_size, "process", "processes")
        yield f"  experts over {experts}, each over {parallel.expert_tensor_size}"
    if pp > 1 and layers is not None:
        chunks = parallel.layers_of_chunks(layers)
        stages = (" + ".join(map(str, chunks[stage::pp])) for stage in range(pp))
        yield f"  layers of the pipeline stages: {', '.join(stages)}"
    for first in range(0, min(world_size, SHOWN_RANKS), tp):  # Megatron's order: tensor, context, data, pipeline
        group = first // tp
        place = f"context {group % cp}  data {group // cp % dp}  pipeline stage {group // cp // dp}"
        ranks = f"rank {first}" if tp == 1 else f"ranks {first}–{first + tp - 1} (tensor 0–{tp - 1})"
        yield f"  {ranks:<28}{place}"
    if world_size > SHOWN_RANKS:
        yield f"  … and {world_size - SHOWN_RANKS} more"


def _sizes(parallel: LayoutConfig, world_size: int) -> str:
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    pp, dp = parallel.pipeline_model_parallel_size, parallel.data_parallel_size(world_size)
    return f"tensor {tp} x context {cp} x data {dp} x pipeline {pp}"
