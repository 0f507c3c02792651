"""A run's state in Megatron's distributed format, which any layout can read.

What is in a checkpoint: model, optimizer, schedule, the same of models trained beside it, random states, the loop's
own state, and `config.yaml`. How it gets to disk without ever being half there is `mcore_rl.utils.checkpoint_store`'s
business.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from mcore_rl import __version__
from mcore_rl.config import TrainingConfig, resolved_yaml
from mcore_rl.distributed.collectives import gather_objects, gather_objects_on_first, on_all_ranks
from mcore_rl.errors import UserError
from mcore_rl.models.megatron.build import BuiltModel
from mcore_rl.models.megatron.checkpoint import reference_state
from mcore_rl.models.megatron.checkpoint.host_staging import HostStaging
from mcore_rl.models.megatron.checkpoint.optimizer_shards import tensor_regions
from mcore_rl.models.megatron.checkpoint.region_reader import Region, RegionReader
from mcore_rl.models.megatron.checkpoint.trained_part import METADATA, TrainedPart, model_state, set_objects
from mcore_rl.models.megatron.checkpoint.trust import check_trusted
from mcore_rl.models.megatron.checkpoint.writer import (
    PlannedShards,
    SaveError,
    ShardWriter,
    on_every_rank,
    on_first_rank,
    raise_together,
)
from mcore_rl.models.megatron.parallel_state import process_groups, random_states, seed_everything, set_random_states
from mcore_rl.models.megatron.weights import ADAPTER
from mcore_rl.utils.checkpoint_store import CheckpointStore, digest_problems
from mcore_rl.utils.shard_process import POLL_SECONDS, Commit

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import (
    CheckpointingConfig,
    CheckpointingException,
    save_config,
)
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess

VERSIONS = {"mcore_rl": __version__, **{name: version(name) for name in ("torch", "megatron-core")}}


class MovingReference(Protocol):
    """Weights beside the policy's."""

    has_moved: bool

    def by_tensor(self) -> dict[int, Tensor]:
        """The value for each of the model's tensors, by the tensor's `id`."""
        ...


@dataclass(frozen=True)
class TrainingState:
    """The part of a run in a checkpoint, apart from the loop's own values.

    reference: its weights, if it has a copy of them; they are part of a checkpoint once they have moved.
    beside: models that are trained with the policy, each with a name.
    """

    policy: TrainedPart
    config: TrainingConfig
    reference: MovingReference | None = None
    beside: tuple[TrainedPart, ...] = ()

    @property
    def model(self) -> BuiltModel:
        return self.policy.model

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

    def __init__(
        self, store: CheckpointStore, step: int, run: TrainingState, state: dict[str, Any], staging: HostStaging
    ) -> None:
        self.store, self.step = store, step
        self.partial: Path = on_first_rank(lambda: store.begin(step))
        weights = run.policy.weights()
        weights_beside = {part.name: part.weights() for part in run.beside}
        own = list(run.policy.optimizer_shards(weights))
        for part in run.beside:
            own += part.optimizer_shards(weights_beside[part.name])
        shards, common = save_preprocess(
            {
                **weights,
                **_reference_part(run, weights),
                **run.policy.common(),
                **{part.name: {**weights_beside[part.name], **part.common()} for part in run.beside},
                "state": {**state, "step": step},
                "versions": VERSIONS,
                "random": {"layout": run.layout, "states": gather_objects_on_first(random_states())},
                "content_metadata": METADATA,
            }
        )
        on_first_rank(lambda: write_common(common, resolved_yaml(_described(run)), self.partial))
        planned = PlannedShards.of(shards, own, self.partial, process_groups().dp_cp)
        asked, best = run.config.checkpoint, state.get("best", {}).get("step")
        commit = None
        if torch.distributed.get_rank() == 0:
            commit = Commit(store, step, self.partial, planned.metadata, asked.keep_last, asked.keep_every, best)
        self._writer = on_every_rank(lambda: ShardWriter(planned, asked.timeout_seconds, staging, commit))

    @property
    def final(self) -> Path:
        """The directory of the complete checkpoint."""
        return self.store.iteration(self.step)

    def is_written(self, wait: bool = False) -> bool:
        """Whether every rank's shards are on disk, and the checkpoint is committed."""
        while True:
            report = self._writer.poll()
            well, done = on_all_ranks(report is None or report.error is None, report is not None)
            if not well:
                self._writer.abandon()
                raise_together(None if report is None else report.error)
            if done:
                return True
            if not wait:
                return False
            time.sleep(POLL_SECONDS)

    def finish_alone(self, seconds: float) -> bool:
        """Wait at most so long until it is committed; whether it is, otherwise it is discarded. Not collective."""
        return self._writer.finish_alone(seconds)


def _reference_part(run: TrainingState, weights: dict[str, Any]) -> dict[str, Any]:
    if run.reference is None or not run.reference.has_moved:
        return {}
    return {reference_state.KEY: reference_state.reference_state(weights, run.reference.by_tensor())}


def write_common(common: dict[str, Any], config: str, directory: Path) -> None:
    """The files of a checkpoint beside its shards and their index: `config` is the text of config.yaml."""
    torch.save(common, directory / "common.pt")
    (directory / "config.yaml").write_text(config)
    save_config(CheckpointingConfig("torch_dist"), str(directory))


def verify(iteration: Path) -> list[str]:
    """Return the damage of a checkpoint after reading every byte; ranks share the files. Collective."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return [problem for part in gather_objects(digest_problems(iteration, rank, size)) for problem in part]


# ------------------------------------------------------------------ loading


@dataclass
class Restored:
    """The content that was loaded from a checkpoint.

    state: the loop's own values; empty where the checkpoint has none.
    pieces: what was restored, in words.
    missing: what the checkpoint does not hold.
    has_reference: whether the checkpoint holds the weights of a reference that has moved.
    """

    state: dict[str, Any]
    pieces: list[str]
    missing: list[str] = field(default_factory=list)
    has_reference: bool = False


def load(iteration: Path, run: TrainingState, allow_partial: bool = False) -> Restored:
    """Restore everything that was saved, under this run's layout; collective.

    Raises:
        UserError: it does not fit the model, lacks a piece (unless `allow_partial`), or names code to run.
    """
    index = check_trusted(iteration)
    _check_adapters(iteration, index, run.model)
    common = dist_checkpointing.load_common_state_dict(str(iteration))
    has_optimizer = any(key.startswith("optimizer.state.") for key in index.state_dict_metadata)
    restored = Restored(common.get("state", {}), ["weights" if run.model.lora is None else "adapters"])
    present = {
        "optimizer": has_optimizer and "optimizer" in common,
        "schedule": "scheduler" in common,
        **{part.name: part.name in common for part in run.beside},
        "random states": "random" in common,
        "data position": "state" in common,
    }
    restored.missing = [name for name, there in present.items() if not there]
    if restored.missing and not allow_partial:
        raise UserError(
            f"{iteration} lacks {', '.join(restored.missing)}; "
            "set checkpoint.allow_partial=true to go on from what it has"
        )
    restored.has_reference = _has_reference(index)
    reference = run.reference if restored.has_reference else None
    there = [part for part in run.beside if present[part.name]]
    _load_weights_and_moments(iteration, index, run, common if present["optimizer"] else {}, reference)
    _load_beside(iteration, index, there, common)
    if reference is not None:
        restored.pieces.append("reference")
    if present["schedule"]:
        run.policy.scheduler.load_state_dict(common["scheduler"])
    restored.pieces += [name for name in ("optimizer", "schedule", *(part.name for part in there)) if present[name]]
    if present["random states"]:
        restored.pieces.append(_restore_random(common["random"], run, restored.state))
    return restored


def _check_adapters(iteration: Path, index: Any, model: BuiltModel) -> None:
    """Raises UserError if a checkpoint holds adapters alone and the model has none, or the other way round."""
    there = any(ADAPTER in key for key in index.state_dict_metadata)
    if there and model.lora is None:
        raise UserError(f"{iteration} holds adapters alone; set model.lora to go on with them")
    if model.lora is not None and not there:
        raise UserError(
            f"{iteration} holds a whole model, which model.lora takes from model.path; convert it "
            "(scripts/convert_checkpoint.py megatron-to-hf) if that is not where it came from, and leave "
            "checkpoint.resume out"
        )


def holds_reference(iteration: Path) -> bool:
    """Whether a checkpoint has the weights of a reference that has moved."""
    return _has_reference(check_trusted(iteration))


def _has_reference(index: Any) -> bool:
    return any(key.startswith(f"{reference_state.KEY}.") for key in index.state_dict_metadata)


def _restore_random(saved: dict[str, Any], run: TrainingState, state: dict[str, Any]) -> str:
    if saved["layout"] == run.layout:
        set_random_states(saved["states"][torch.distributed.get_rank()])
        return "random states"
    seed_everything(run.config.seed + int(state.get("step", 0)))
    return "random states (seeded anew: the layout is another)"


def _load_weights_and_moments(
    iteration: Path, index: Metadata, run: TrainingState, common: dict[str, Any], reference: MovingReference | None
) -> None:
    """
    Args:
        common: what all ranks share of the optimizer; {} where there is none to be loaded.
    """
    weights = run.policy.weights()
    regions = [*run.policy.regions(weights, bool(common))]
    if reference is not None:
        regions += tensor_regions(reference_state.reference_state(weights, reference.by_tensor()))
    _read_regions(iteration, index, regions)
    if reference is not None:
        reference.has_moved = True
    _load_objects(iteration, index, run.model, weights)
    run.policy.restore_step(common.get("optimizer"))


def _load_beside(iteration: Path, index: Metadata, parts: Sequence[TrainedPart], common: dict[str, Any]) -> None:
    """Models trained beside the policy, whole or not at all."""
    for part in parts:
        weights = part.weights()
        _read_regions(iteration, index, part.regions(weights, with_optimizer=True))
        _load_objects(iteration, index, part.model, weights)
        part.restore_step(common[part.name]["optimizer"])
        part.scheduler.load_state_dict(common[part.name]["scheduler"])


def load_weights(iteration: Path, model: BuiltModel, name: str = "") -> None:
    """Restore the model alone, under this run's layout; collective.

    Args:
        name: of a model trained beside the policy.

    Raises:
        UserError: it does not fit the model, or names code to run.
    """
    index, weights = check_trusted(iteration), model_state(model, name)
    _read_regions(iteration, index, tensor_regions(weights))
    _load_objects(iteration, index, model, weights)


def _read_regions(iteration: Path, index: Metadata, regions: Iterable[Region]) -> None:
    """Each rank reads its own; if one cannot, it is an error on all of them. Collective.

    Raises:
        UserError: the checkpoint does not fit, or a file of it is damaged.
    """
    problem = None
    try:
        RegionReader(iteration, index).read(regions)
    except UserError as error:
        problem = str(error)
    for found in gather_objects(problem):
        if found is not None:
            raise UserError(found)


def _load_objects(iteration: Path, index: Metadata, model: BuiltModel, weights: dict[str, Any]) -> None:
    """Load the objects that modules keep in addition to their tensors, which Megatron reads. Collective.

    Args:
        weights: Megatron's description of the model.

    Raises:
        UserError: the checkpoint does not hold it.
    """
    if not any(isinstance(entry, BytesStorageMetadata) for entry in index.state_dict_metadata.values()):
        return
    objects = {
        chunk: {name: entry for name, entry in entries.items() if isinstance(entry, ShardedObject)}
        for chunk, entries in weights.items()
    }
    try:
        loaded = dist_checkpointing.load(objects, str(iteration))
    except (CheckpointingException, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{iteration} does not fit the model of model.path: {reason}") from None
    set_objects(model, loaded)


__all__ = ["PendingSave", "Restored", "SaveError", "TrainingState", "load", "load_weights", "verify"]
