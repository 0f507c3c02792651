"""Checkpoints in Megatron's distributed format, which any layout can read.

`DIR/iter_0000010/` holds model, optimizer, schedule and the loop's state, `config.yaml` beside them,
and `DIR/latest_checkpointed_iteration.txt` names the newest. A checkpoint is written under another
name and renamed when it is whole; the tracker file follows.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from mcore_rl import __version__
from mcore_rl.config import TrainingConfig, resolved_yaml
from mcore_rl.errors import UserError
from mcore_rl.models.megatron.model import BuiltModel

from megatron.core import dist_checkpointing  # isort: skip
from megatron.core.optimizer import MegatronOptimizer  # isort: skip
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # isort: skip

TRACKER_FILE = "latest_checkpointed_iteration.txt"
# The one optimizer format that loads under every layout.
METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient": False}


def iteration_directory(directory: Path, step: int) -> Path:
    return directory / f"iter_{step:07d}"


def latest(directory: Path) -> Path | None:
    """The newest checkpoint below `directory`, as its tracker file says; None if there is none.

    Raises:
        UserError: the tracker names no complete checkpoint.
    """
    tracker = directory / TRACKER_FILE
    if not tracker.is_file():
        return None
    text = tracker.read_text().strip()
    if not text.isdigit():
        raise UserError(f"{tracker}: must hold the number of an iteration, found {text!r}")
    iteration = iteration_directory(directory, int(text))
    check_iteration(iteration)
    return iteration


def check_iteration(iteration: Path) -> None:
    """Raises UserError unless `iteration` is a whole checkpoint directory."""
    for name in ("metadata.json", ".metadata", "common.pt"):
        if not (iteration / name).is_file():
            raise UserError(f"checkpoint {iteration} is not complete: {name} is missing")


def save(
    directory: Path,
    step: int,
    model: BuiltModel,
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    state: dict[str, Any],
    config: TrainingConfig,
) -> Path:
    """Write iteration `step`; collective. Returns its directory."""
    final = iteration_directory(directory, step)
    temporary = final.with_name(f".{final.name}.partial")
    is_writer = torch.distributed.get_rank() == 0
    if is_writer:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    torch.distributed.barrier()
    model_state = _model_state(model)
    contents = {
        **model_state,
        "optimizer": optimizer.sharded_state_dict(model_state, metadata=METADATA),
        "scheduler": scheduler.state_dict(),
        "state": {**state, "step": step, "version": __version__},
    }
    dist_checkpointing.save(contents, str(temporary), content_metadata=METADATA)
    torch.distributed.barrier()
    if is_writer:
        (temporary / "config.yaml").write_text(resolved_yaml(config))
        _sync(temporary)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(temporary, final)
        _write_tracker(directory, step)
        if config.checkpoint.keep_last:
            _remove_old(directory, config.checkpoint.keep_last)
    torch.distributed.barrier()
    return final


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


def _write_tracker(directory: Path, step: int) -> None:
    temporary = directory / f".{TRACKER_FILE}.partial"
    temporary.write_text(f"{step}\n")
    _sync_file(temporary)
    os.replace(temporary, directory / TRACKER_FILE)
    _sync_file(directory)


def _remove_old(directory: Path, keep: int) -> None:
    for old in sorted(directory.glob("iter_*"))[:-keep]:
        shutil.rmtree(old)


def _sync(directory: Path) -> None:
    for entry in [*directory.iterdir(), directory]:
        _sync_file(entry)


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
