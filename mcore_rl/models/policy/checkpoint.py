"""Checkpoints of a policy: weights, optimizer, schedule, random states, and a reference that changes in training."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from mcore_rl.distributed.collectives import all_ranks_true
from mcore_rl.models.megatron.checkpoint import load
from mcore_rl.models.megatron.checkpoint.save import HostStaging, PendingSave, SaveError
from mcore_rl.models.megatron.checkpoint.state import ModelState, TrainingState
from mcore_rl.models.megatron.parallel_state import process_groups
from mcore_rl.models.megatron.training.optimizer import TrainingMemory, main_parameters
from mcore_rl.models.megatron.weights.adapters import adapters_in
from mcore_rl.models.policy.reference import AdaptersDisabled, Reference, ReferenceWeights, initial_reference
from mcore_rl.models.policy.scoring import ScoringModel
from mcore_rl.platform import bytes_for
from mcore_rl.utils.checkpoint_store import CheckpointStore


class TrainedModel(ScoringModel, ABC):
    """A model that is trained, with the attributes that `PolicyCheckpoint` reads."""

    optimizer: Any
    scheduler: Any
    memory: TrainingMemory
    reference: Reference | None
    checkpoint: PolicyCheckpoint

    @property
    @abstractmethod
    def updates_made(self) -> tuple[int, ...]:
        """Steps made by each learning-rate schedule: this model's, then the second trained model's, if any."""

    @abstractmethod
    def on_device(self) -> AbstractContextManager[None]:
        """Return a context in which all tensors of the model are on the device."""


class PolicyCheckpoint:
    """Writes and reads a policy's checkpoints; they can include a second trained model (`include`). Collective."""

    def __init__(self, policy: TrainedModel) -> None:
        self.policy = policy
        self.second: TrainedModel | None = None
        self.second_name = ""
        self.started_from: Path | None = None
        """The checkpoint that this run's weights or reference come from; None if both come from the model directory."""
        self.pending: PendingSave | None = None

    @cached_property
    def _staging(self) -> HostStaging:
        return HostStaging()

    def include(self, name: str, second: TrainedModel) -> None:
        """Include the model `second` in later checkpoints, under `name`. It may be offloaded when `save` is called."""
        self.second, self.second_name = second, name

    def restore_to_device(self) -> bool:
        """Move offloaded weights and optimizer state back to the device, so that `save` can read them. Collective.

        Returns:
            Whether every rank's device had room for them.
        """
        has_room = True
        try:
            for offload in (self.policy.weights_offload, self.policy.memory.optimizer):
                offload.restore()
        except RuntimeError:  # torch's error for memory
            has_room = False
        return all_ranks_true(has_room)[0]

    @contextmanager
    def _all_on_device(self) -> Iterator[None]:
        """Inside the context, the second model and the optimizer states are on the device, not offloaded."""
        with contextlib.ExitStack() as stack:
            if self.second is not None:
                stack.enter_context(self.second.on_device())
                stack.enter_context(self.second.memory.optimizer_on_device())
            stack.enter_context(self.policy.memory.optimizer_on_device())
            yield

    def save(self, directory: Path, step: int, state: dict[str, Any], wait: bool = True) -> Path | None:
        """Write a checkpoint of iteration `step` below `directory`.

        Without `wait` the checkpoint is written in the background and training may continue at once; call `finish` to
        complete it. Only one save runs at a time: the call first waits for a pending save.

        Args:
            state: state of the training loop itself, in small, plain values.

        Returns:
            The checkpoint's directory; None if the checkpoint is still being written.

        Raises:
            SaveError: the checkpoint could not be written. Raised on every rank; earlier checkpoints are untouched.
        """
        self.finish()
        self.policy.require("save_checkpoint", self.policy.weights_offload, self.policy.memory.optimizer)
        with self._all_on_device():
            store, run = CheckpointStore(directory), self._training_state()
            try:
                self.pending = PendingSave(store, step, run, state, self._staging)
            except BaseException:
                # A copy of the optimizer's state may still run; after this context the state may be offloaded.
                with contextlib.suppress(Exception):
                    self._staging.settle()
                raise
        return self.finish() if wait else None

    def reserve(self) -> None:
        """Start to allocate the host memory that a save needs, so that the first save does not wait for the memory."""
        models = (self.policy,) if self.second is None else (self.policy, self.second)
        replicas = torch.distributed.get_world_size(process_groups().dp_cp)  # they divide the weights
        weights = sum(bytes_for(list(model.parameters())) for model in models) // replicas
        updated = sum(bytes_for(main_parameters(model.optimizer)) for model in models)
        self._staging.reserve(weights + 3 * updated)  # these parameters, and two moments of each

    def finish(self, wait: bool = True) -> Path | None:
        """Complete the pending checkpoint; with `wait`, wait until it is written.

        Returns:
            The checkpoint's directory. None if no checkpoint is pending, or if the checkpoint is still being written
            (only without `wait`).

        Raises:
            SaveError: the checkpoint could not be written. Raised on every rank.
        """
        if self.pending is None:
            return None
        try:
            if not self.pending.is_written(wait):
                return None
        except SaveError:
            self.pending = None
            raise
        final, self.pending = self.pending.final, None
        if not self.policy.config.checkpoint.asynchronous:  # training does not go on beside the writing
            self._staging.release()
        return final

    def finish_alone(self, seconds: float) -> Path | None:
        """At the end of a run, wait for the pending checkpoint; discard it if it is not written within `seconds`.

        Not collective.

        Returns:
            The checkpoint's directory; None if no checkpoint was pending or it was discarded.
        """
        pending, self.pending = self.pending, None
        return pending.final if pending is not None and pending.finish_alone(seconds) else None

    def load(self, iteration: Path, allow_partial: bool = False) -> load.Restored:
        """Restore weights, optimizer, schedule and random states; return the state of the training loop.

        The checkpoint may have been written under another parallel layout.

        Args:
            iteration: directory of the checkpoint.
            allow_partial: accept a checkpoint that lacks some of the state.

        Raises:
            UserError: the checkpoint does not fit the model, or it lacks some state and `allow_partial` is not set.
        """
        policy = self.policy
        if isinstance(policy.reference, AdaptersDisabled) and load.holds_reference(iteration):
            policy.reference = ReferenceWeights(adapters_in(policy.model))
        with self._all_on_device():
            restored = load.load(iteration, self._training_state(), allow_partial)
        begins = not restored.state  # a new run starts from these weights
        if begins or restored.has_reference:
            self.started_from = iteration
        if policy.reference is not None and begins:
            policy.reference = initial_reference(policy, adapters_are_trained=True)
            if isinstance(policy.reference, ReferenceWeights):
                policy.reference.has_moved = True
        return restored

    def load_weights(self, iteration: Path) -> None:
        """Restore only the weights of the policy and the second model. The checkpoint may have any parallel layout."""
        self.policy.finish_param_gather()
        load.load_weights(iteration, self.policy.model)
        if self.second is not None:
            with self._all_on_device():
                self.second.finish_param_gather()
                load.load_weights(iteration, self.second.model, self.second_name)

    def verify(self, iteration: Path) -> list[str]:
        """Read every byte of a checkpoint and return a list of its defects. The list is the same on every rank."""
        return load.verify(iteration)

    def part(self, name: str = "") -> ModelState:
        """Return model, optimizer and schedule to store in a checkpoint, under keys with the prefix `name`."""
        self.policy.finish_param_gather()
        return ModelState(self.policy.model, self.policy.optimizer, self.policy.scheduler, name)

    def _training_state(self) -> TrainingState:
        reference = self.policy.reference
        kept = reference if isinstance(reference, ReferenceWeights) else None
        second = () if self.second is None else (self.second.checkpoint.part(self.second_name),)
        return TrainingState(self.part(), self.policy.config, kept, second)
