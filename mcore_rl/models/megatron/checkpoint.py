"""A run's state in Megatron's distributed format, which any layout can read.

What is in a checkpoint: model, optimizer, schedule, the loop's own state, and `config.yaml`. How it gets
to disk without ever being half there is `mcore_rl.checkpoint_store`'s business.
"""

from __future__ import annotations

import faulthandler
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mcore_rl import __version__
from mcore_rl.checkpoint_store import CheckpointStore, digest_problems, digests_of
from mcore_rl.config import TrainingConfig, resolved_yaml
from mcore_rl.models.megatron.model import BuiltModel

from megatron.core import dist_checkpointing  # isort: skip
from megatron.core.optimizer import MegatronOptimizer  # isort: skip
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # isort: skip

# The one optimizer format that loads under every layout.
METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient": False}


class SaveError(RuntimeError):
    """A checkpoint could not be written; raised on every rank. Earlier checkpoints are untouched."""


def save(
    store: CheckpointStore,
    step: int,
    model: BuiltModel,
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    state: dict[str, Any],
    config: TrainingConfig,
) -> Path:
    """Write iteration `step`; collective. Returns its directory.

    Raises:
        SaveError: the disk is full, the folder cannot be written, …
    """
    partial: Path = _on_first_rank(lambda: store.begin(step))
    model_state = _model_state(model)
    contents = {
        **model_state,
        "optimizer": optimizer.sharded_state_dict(model_state, metadata=METADATA),
        "scheduler": scheduler.state_dict(),
        "state": {**state, "step": step, "version": __version__},
    }
    # Megatron forks processes that write, and waits for them for ever: should one die, end with a traceback.
    faulthandler.dump_traceback_later(config.checkpoint.timeout_seconds, exit=True)
    try:
        _on_every_rank(lambda: dist_checkpointing.save(contents, str(partial), content_metadata=METADATA))
    finally:
        faulthandler.cancel_dump_traceback_later()
    digests = _written_digests(partial)

    def commit() -> Path:
        (partial / "config.yaml").write_text(resolved_yaml(config))
        digests.update(digests_of(partial, ["config.yaml"]))
        final = store.commit(step, partial, digests)
        store.prune(config.checkpoint.keep_last, config.checkpoint.keep_every)
        return final

    final: Path = _on_first_rank(commit)
    return final


def _written_digests(directory: Path) -> dict[str, tuple[int, str]]:
    """Digests of all files, each rank reading back the shards that it wrote."""
    rank = torch.distributed.get_rank()
    shards = {path.name: re.fullmatch(r"__(\d+)_\d+\.distcp", path.name) for path in directory.iterdir()}
    mine = [name for name, match in shards.items() if (int(match[1]) if match else 0) == rank]
    parts: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, _on_every_rank(lambda: digests_of(directory, mine)))
    return {name: digest for part in parts for name, digest in part.items()}


def _on_every_rank(action: Callable[[], Any]) -> Any:
    """`action()`; if it fails on any rank, SaveError on all of them."""
    result, error = None, None
    try:
        result = action()
    except Exception as failure:  # whatever it was, the other ranks must hear of it
        error = f"{type(failure).__name__}: {' '.join(str(failure).split())[:500]}"
    errors: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(errors, error)
    if any(errors):
        raise SaveError("; ".join(f"rank {rank}: {text}" for rank, text in enumerate(errors) if text))
    return result


def _on_first_rank(action: Callable[[], Any]) -> Any:
    """`action()` on rank 0; its result, or SaveError, on all ranks."""
    box = [_on_every_rank(action if torch.distributed.get_rank() == 0 else lambda: None)]
    torch.distributed.broadcast_object_list(box, src=0)
    return box[0]


def verify(iteration: Path) -> list[str]:
    """What is damaged in a checkpoint, every byte read, the files shared out over ranks; collective."""
    parts: list[Any] = [None] * torch.distributed.get_world_size()
    problems = digest_problems(iteration, torch.distributed.get_rank(), len(parts))
    torch.distributed.all_gather_object(parts, problems)
    return [problem for part in parts for problem in part]


def load(
    iteration: Path, model: BuiltModel, optimizer: MegatronOptimizer, scheduler: OptimizerParamScheduler
) -> dict[str, Any]:
    """Restore everything that `save` wrote, under this run's layout; collective. Returns the loop's state."""
    for chained in optimizer.chained_optimizers:
        if not chained.optimizer.state:  # Megatron describes only states that exist
            chained._init_optimizer_states_with_dummy_values()
    model_state = _model_state(model)
    wanted = {
        **model_state,
        "optimizer": optimizer.sharded_state_dict(model_state, is_loading=True, metadata=METADATA),
    }
    loaded = dist_checkpointing.load(wanted, str(iteration))
    for index, chunk in enumerate(model.chunks):
        chunk.load_state_dict(loaded[_model_key(model, index)])
    _load_optimizer(optimizer, loaded["optimizer"])
    scheduler.load_state_dict(loaded["scheduler"])
    state: dict[str, Any] = loaded["state"]
    return state


def _model_key(model: BuiltModel, index: int) -> str:
    return "model" if len(model.chunks) == 1 else f"model{index}"


def _model_state(model: BuiltModel) -> dict[str, Any]:
    return {_model_key(model, i): chunk.sharded_state_dict(metadata=METADATA) for i, chunk in enumerate(model.chunks)}


def load_weights(iteration: Path, model: BuiltModel) -> None:
    """Restore the model alone, under this run's layout; collective."""
    loaded = dist_checkpointing.load(_model_state(model), str(iteration))
    for index, chunk in enumerate(model.chunks):
        chunk.load_state_dict(loaded[_model_key(model, index)])


def _load_optimizer(optimizer: MegatronOptimizer, loaded: dict[Any, Any]) -> None:
    """Restore an optimizer on torch's Adam, whose `step` is a tensor in every parameter's state.

    Megatron's loader assigns one such tensor to all parameters (Adam counts in place, and would advance
    it once per parameter), then copies the moments by the state's keys and finds no saved `step`. So
    the step is taken out while the moments are copied, and put back as a tensor of each parameter's own.
    """
    chained = optimizer.chained_optimizers
    parts = [loaded] if len(chained) == 1 else [part for _, part in sorted(loaded.items())]
    for inner, part in zip(chained, parts, strict=True):
        moments = part.pop("param_state")
        inner.load_state_dict(part)
        steps = [(entry, entry.pop("step")) for entry in inner.optimizer.state.values() if "step" in entry]
        inner.load_parameter_state_from_fully_reshardable(moments)
        for entry, step in steps:
            entry["step"] = step.clone()
