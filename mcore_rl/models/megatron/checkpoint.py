"""A run's state in Megatron's distributed format, which any layout can read.

What is in a checkpoint: model, optimizer, schedule, random states, the loop's own state, and
`config.yaml`. How it gets to disk without ever being half there is `mcore_rl.checkpoint_store`'s business.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from mcore_rl import __version__
from mcore_rl.checkpoint_store import CheckpointStore, digest_problems, digests_of
from mcore_rl.config import TrainingConfig, resolved_yaml
from mcore_rl.distributed.collectives import gather_objects
from mcore_rl.errors import UserError
from mcore_rl.models.megatron import reference_state
from mcore_rl.models.megatron.adapters import adapter_state
from mcore_rl.models.megatron.checkpoint_trust import check_trusted
from mcore_rl.models.megatron.checkpoint_writer import (
    POLL_SECONDS,
    PlannedShards,
    SaveError,
    ShardWriter,
    on_every_rank,
    on_first_rank,
    raise_together,
)
from mcore_rl.models.megatron.model import BuiltModel
from mcore_rl.models.megatron.optimizer_shards import optimizer_shards, optimizers_with_parameters
from mcore_rl.models.megatron.parallel import process_groups
from mcore_rl.models.megatron.random_states import random_states, seed_everything, set_random_states

from megatron.core import dist_checkpointing  # isort: skip
from megatron.core.dist_checkpointing.core import (  # isort: skip
    CheckpointingConfig,
    CheckpointingException,
    save_config,
)
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess  # isort: skip
from megatron.core.optimizer import MegatronOptimizer  # isort: skip
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # isort: skip

# The one optimizer format that loads under every layout.
METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient": False}
VERSIONS = {"mcore_rl": __version__, **{name: version(name) for name in ("torch", "megatron-core")}}


class MovingReference(Protocol):
    """Weights beside the policy's."""

    has_moved: bool

    def by_tensor(self) -> dict[int, Tensor]:
        """Its value of each of the model's tensors, by the tensor's `id`."""
        ...


@dataclass(frozen=True)
class TrainingState:
    """What a checkpoint holds of a run beside the loop's own values.

    reference: its weights, if it has a copy of them; they are part of a checkpoint once they have moved.
    """

    model: BuiltModel
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    config: TrainingConfig
    reference: MovingReference | None = None

    @property
    def layout(self) -> list[int]:
        """Sizes of the parallel dimensions, for which random states are valid."""
        topology = self.model.topology
        return [d.size for d in (topology.tensor, topology.pipeline, topology.context, topology.data)]


# ------------------------------------------------------------------ saving


def _described(run: TrainingState) -> TrainingConfig:
    """The configuration, with what adapters are if another directory says it, which may not be there for ever."""
    lora, asked = run.model.lora, run.config.model.lora
    if lora is None or asked is None:
        return run.config
    told = {"rank": lora.rank, "alpha": lora.alpha, "target_modules": lora.target_modules}
    model = run.config.model.model_copy(update={"lora": asked.model_copy(update=told)})
    return run.config.model_copy(update={"model": model})


class PendingSave:
    """A checkpoint on its way to disk; every method is collective.

    Raises (the constructor and all methods):
        SaveError: the disk is full, the folder cannot be written, a writing process died, …
    """

    def __init__(self, store: CheckpointStore, step: int, run: TrainingState, state: dict[str, Any]) -> None:
        self.store, self.step, self.config = store, step, run.config
        self.best: int | None = state.get("best", {}).get("step")
        self.partial: Path = on_first_rank(lambda: store.begin(step))
        weights = model_state(run.model)
        _ensure_optimizer_state(run)
        own = list(optimizer_shards(run.optimizer, weights))
        shards, common = save_preprocess(
            {
                **weights,
                **_reference_part(run, weights),
                "optimizer": _optimizer_common(run.optimizer),
                "scheduler": run.scheduler.state_dict(),
                "state": {**state, "step": step},
                "versions": VERSIONS,
                "random": {"layout": run.layout, "states": gather_objects(random_states())},
                "content_metadata": METADATA,
            }
        )
        on_first_rank(lambda: write_common(common, resolved_yaml(_described(run)), self.partial))
        planned = PlannedShards.of(shards, own, self.partial, process_groups().dp_cp)
        self._writer = on_every_rank(lambda: ShardWriter(planned, run.config.checkpoint.timeout_seconds))

    def is_written(self, wait: bool = False) -> bool:
        """Whether every rank's shards are on disk."""
        while True:
            report = self._writer.poll()
            if any(gather_objects(report is not None and report.error is not None)):
                self._writer.abandon()
                raise_together(None if report is None else report.error)
            if all(gather_objects(report is not None)):
                return True
            if not wait:
                return False
            time.sleep(POLL_SECONDS)

    def commit(self) -> Path:
        """Give what is written its name; returns it. To be called once `is_written`."""
        report = self._writer.poll()
        assert report is not None, "not written yet"
        results, digests = zip(*gather_objects((report.results, report.digests)), strict=True)

        def write_index_and_rename() -> Path:
            self._writer.storage.finish(self._writer.metadata, list(results))
            named = {name: digest for part in digests for name, digest in part.items()}
            named.update(digests_of(self.partial, ("common.pt", "config.yaml", "metadata.json", ".metadata")))
            final = self.store.commit(self.step, self.partial, named)
            self.store.prune(self.config.checkpoint.keep_last, self.config.checkpoint.keep_every, self.best)
            return final

        final: Path = on_first_rank(write_index_and_rename)
        return final


def _reference_part(run: TrainingState, weights: dict[str, Any]) -> dict[str, Any]:
    if run.reference is None or not run.reference.has_moved:
        return {}
    return {reference_state.KEY: reference_state.reference_state(weights, run.reference.by_tensor())}


def _optimizer_common(optimizer: MegatronOptimizer) -> dict[Any, Any]:
    """What all ranks share of the optimizer: its parameter groups, of which only the step is read back.

    Experts have an optimizer of their own, with the same step and rates.
    """
    state = optimizers_with_parameters(optimizer)[0].state_dict()
    return {**state, "param_state_sharding_type": METADATA["distrib_optim_sharding_type"]}


def write_common(common: dict[str, Any], config: str, directory: Path) -> None:
    """The files of a checkpoint beside its shards and their index: `config` is the text of config.yaml."""
    torch.save(common, directory / "common.pt")
    (directory / "config.yaml").write_text(config)
    save_config(CheckpointingConfig("torch_dist"), str(directory))


def verify(iteration: Path) -> list[str]:
    """What is damaged in a checkpoint, every byte read, the files shared out over ranks; collective."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return [problem for part in gather_objects(digest_problems(iteration, rank, size)) for problem in part]


# ------------------------------------------------------------------ loading


@dataclass
class Restored:
    """What a checkpoint gave back.

    state: the loop's own values; empty where the checkpoint has none.
    pieces: what was restored, in words.
    missing: what the checkpoint does not hold.
    """

    state: dict[str, Any]
    pieces: list[str]
    missing: list[str] = field(default_factory=list)


def load(iteration: Path, run: TrainingState, allow_partial: bool = False) -> Restored:
    """Restore everything that was saved, under this run's layout; collective.

    Raises:
        UserError: it does not fit the model, lacks a piece (unless `allow_partial`), or names code to run.
    """
    index = check_trusted(iteration)
    common = dist_checkpointing.load_common_state_dict(str(iteration))
    has_optimizer = any(key.startswith("optimizer.state.") for key in index.state_dict_metadata)
    restored = Restored(common.get("state", {}), ["weights" if run.model.lora is None else "adapters"])
    present = {
        "optimizer": has_optimizer and "optimizer" in common,
        "schedule": "scheduler" in common,
        "random states": "random" in common,
        "data position": "state" in common,
    }
    restored.missing = [name for name, there in present.items() if not there]
    if restored.missing and not allow_partial:
        raise UserError(
            f"{iteration} lacks {', '.join(restored.missing)}; "
            "set checkpoint.allow_partial=true to go on from what it has"
        )
    _load_model_and_optimizer(iteration, run, present["optimizer"])
    if run.reference is not None and holds_reference(iteration):
        restored.pieces.append("reference")
    if present["schedule"]:
        run.scheduler.load_state_dict(common["scheduler"])
    restored.pieces += [name for name in ("optimizer", "schedule") if present[name]]
    if present["random states"]:
        restored.pieces.append(_restore_random(common["random"], run, restored.state))
    return restored


def holds_reference(iteration: Path) -> bool:
    """Whether a checkpoint has the weights of a reference that has moved."""
    keys = check_trusted(iteration).state_dict_metadata
    return any(key.startswith(f"{reference_state.KEY}.") for key in keys)


def _restore_random(saved: dict[str, Any], run: TrainingState, state: dict[str, Any]) -> str:
    if saved["layout"] == run.layout:
        set_random_states(saved["states"][torch.distributed.get_rank()])
        return "random states"
    seed_everything(run.config.seed + int(state.get("step", 0)))
    return "random states (seeded anew: the layout is another)"


def _load_model_and_optimizer(iteration: Path, run: TrainingState, with_optimizer: bool) -> None:
    weights = model_state(run.model)
    wanted = dict(weights)
    if with_optimizer:
        _ensure_optimizer_state(run)
        for index, inner in enumerate(optimizers_with_parameters(run.optimizer)):
            described = inner.sharded_state_dict(weights, is_loading=True, metadata=METADATA)
            wanted[f"moments{index}"] = described["param_state"]
    moved = run.reference is not None and holds_reference(iteration)
    if run.reference is not None and moved:
        wanted[reference_state.KEY] = reference_state.reference_state(weights, run.reference.by_tensor())
    loaded = load_sharded(wanted, iteration)
    if run.reference is not None and moved:
        reference_state.set_reference(weights, run.reference.by_tensor(), loaded[reference_state.KEY])
        run.reference.has_moved = True
    _set_model_state(run.model, loaded)
    if with_optimizer:
        step = loaded["optimizer"]["optimizer"]["param_groups"][0].get("step")
        for index, inner in enumerate(optimizers_with_parameters(run.optimizer)):
            _load_optimizer(inner, step, loaded[f"moments{index}"])
    else:
        run.optimizer.reload_model_params()


def _ensure_optimizer_state(run: TrainingState) -> None:
    """Zero moments before the first step: Megatron describes only states that exist."""
    for inner in optimizers_with_parameters(run.optimizer):
        if not inner.optimizer.state:
            rates = [group["lr"] for group in inner.optimizer.param_groups]
            for group in inner.optimizer.param_groups:  # a step on zero gradients would still decay the weights
                group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
            inner._init_optimizer_states_with_dummy_values()
            for group, rate in zip(inner.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            for state in inner.optimizer.state.values():
                if "step" in state:
                    state["step"].zero_()


def load_weights(iteration: Path, model: BuiltModel) -> None:
    """Restore the model alone, under this run's layout; collective.

    Raises:
        UserError: it does not fit the model, or names code to run.
    """
    check_trusted(iteration)
    _set_model_state(model, load_sharded(model_state(model), iteration))


def load_sharded(wanted: dict[str, Any], iteration: Path) -> dict[str, Any]:
    """What Megatron's description `wanted` asks for.

    Raises:
        UserError: the checkpoint does not hold it, or in another shape.
    """
    try:
        loaded: dict[str, Any] = dist_checkpointing.load(wanted, str(iteration))
    except (CheckpointingException, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{iteration} does not fit the model of model.path: {reason}") from None
    return loaded


def _model_key(model: BuiltModel, index: int) -> str:
    return "model" if len(model.chunks) == 1 else f"model{index}"


def model_state(model: BuiltModel) -> dict[str, Any]:
    """Megatron's description of the model's part of a checkpoint, by chunk: of the adapters alone, where there are."""
    return {
        _model_key(model, index): adapter_state(model, chunk)
        if model.lora
        else chunk.sharded_state_dict(metadata=METADATA)
        for index, chunk in enumerate(model.chunks)
    }


def _set_model_state(model: BuiltModel, loaded: dict[str, Any]) -> None:
    for index, chunk in enumerate(model.chunks):
        state = loaded.get(_model_key(model, index), {})  # which Megatron drops where it holds nothing: no adapters
        if model.lora is None:
            chunk.load_state_dict(state)
            continue
        with torch.no_grad():
            for name, value in state.items():
                chunk.get_parameter(name).copy_(value)


def _load_optimizer(inner: Any, step: Any, moments: dict[Any, Any]) -> None:
    """Restore an optimizer on torch's Adam, whose `step` is a tensor in every parameter's state.

    Megatron's loader assigns one such tensor to all parameters (Adam counts in place, and would advance
    it once per parameter), then copies the moments by the state's keys and finds no saved `step`. So
    the step is taken out while the moments are copied, and put back as a tensor of each parameter's own.
    """
    own = inner.state_dict()
    for group in own["optimizer"]["param_groups"]:
        group["step"] = step
    inner.load_state_dict(own)
    steps = [(entry, entry.pop("step")) for entry in inner.optimizer.state.values() if "step" in entry]
    inner.load_parameter_state_from_fully_reshardable(moments)
    for entry, value in steps:
        entry["step"] = value.clone()


__all__ = ["PendingSave", "Restored", "SaveError", "TrainingState", "load", "load_weights", "verify"]
