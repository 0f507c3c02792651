"""A policy's weights kept and put back: the reference in their place, checkpoints, Hugging Face models."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from mcore_rl.errors import UserError
from mcore_rl.models.megatron.checkpoint import checkpoint
from mcore_rl.models.megatron.checkpoint.host_staging import HostStaging
from mcore_rl.models.megatron.checkpoint.trained_part import TrainedPart
from mcore_rl.models.megatron.hf_checkpoint import write_hf_directory
from mcore_rl.models.megatron.lora import write_peft_directory
from mcore_rl.models.megatron.lora_layers import adapters_in, export_adapters
from mcore_rl.models.megatron.weights import adapters_of, export_hf_weights
from mcore_rl.models.policy.colocation import ColocatablePolicy
from mcore_rl.models.policy.reference import AdaptersOff, KeptWeights, Reference
from mcore_rl.utils.checkpoint_store import CheckpointStore


class Keeping(ColocatablePolicy):
    """The part of the Megatron policy that keeps weights and training state."""

    reference: Reference | None
    optimizer: Any
    scheduler: Any
    kept_beside: Keeping | None = None
    """Another trained model, whose state is in this one's checkpoints."""
    name_beside = ""
    began_elsewhere: Path | None = None
    """The checkpoint whose weights, or whose reference that has moved, are not those of the model's directory."""
    _saving: checkpoint.PendingSave | None = None

    @cached_property
    def _staging(self) -> HostStaging:
        return HostStaging()

    def keep_beside(self, name: str, other: Keeping) -> None:
        """From now on checkpoints hold `other` too, under that name; it may be offloaded when they are written."""
        self.kept_beside, self.name_beside = other, name

    @property
    def updates_made(self) -> tuple[int, ...]:
        """Steps of the optimizers, of models beside this one too."""
        beside = () if self.kept_beside is None else self.kept_beside.updates_made
        return (self.scheduler.num_steps, *beside)

    @property
    def can_be_saved(self) -> bool:
        """Whether all that a checkpoint holds is at hand, not given away to whoever generates."""
        return not (self.weights_away.is_away or self.memory.optimizer.is_away)

    @contextmanager
    def _all_at_hand(self) -> Iterator[None]:
        """Everything that checkpoints hold is on the device inside."""
        with contextlib.ExitStack() as at_hand:
            if self.kept_beside is not None:
                at_hand.enter_context(self.kept_beside.brought_back())
                at_hand.enter_context(self.kept_beside.memory.optimizer_at_hand())
            at_hand.enter_context(self.memory.optimizer_at_hand())
            yield

    @contextmanager
    def reference_weights(self) -> Iterator[None]:
        """The reference weights in place of the current ones; the current ones return whatever happens."""
        if self.reference is None:
            raise UserError("the policy was built without reference weights (keep_reference=True)")
        self.settle_weights()
        with self.reference.in_place():
            yield

    def move_reference(self, alpha: float) -> None:
        """reference ← (1 − alpha) · reference + alpha · policy. From then on checkpoints hold it."""
        assert isinstance(self.reference, KeptWeights), "the policy was built without a reference that can move"
        self.settle_weights()
        self.reference.move(alpha)

    def _new_reference(self, begun: bool) -> Reference:
        """The weights as they are now; `begun`: whether adapters, if there are some, do anything yet."""
        if self.model.lora is None:
            return KeptWeights(self.parameters())
        moves = self.config.reference_sync_of is not None
        return KeptWeights(adapters_in(self.model)) if begun or moves else AdaptersOff(adapters_of(self.model).values())

    def export_adapters(self, destination: Path) -> None:
        """Write the current adapters as a PEFT directory. Collective."""
        lora = self.model.lora
        assert lora is not None, "the model has no adapters"
        self.settle_weights()
        write_peft_directory(
            export_adapters(self.model, first_only=True),
            destination,
            self.config.model.path,
            lora.settings,
            is_writer=self.is_writer,
            chat_template=self.config.data.read_chat_template(),
        )
        torch.distributed.barrier()

    def export_hf(self, destination: Path) -> None:
        """Write the current weights, adapters merged into them, as a Hugging Face model directory. Collective."""
        self.settle_weights()
        write_hf_directory(
            export_hf_weights(self.model, first_only=True),
            destination,
            self.config.model.path,
            self.hf_config,
            is_writer=self.is_writer,
            chat_template=self.config.data.read_chat_template(),
        )
        torch.distributed.barrier()

    def save_checkpoint(self, directory: Path, step: int, state: dict[str, Any], wait: bool = True) -> Path | None:
        """Write iteration `step` below `directory`; `state` is the loop's own (small, plain values).

        Without `wait`, training may go on at once; `finish_saving` then tells when it is there. One save at
        a time: a pending one is waited for first.

        Returns:
            the checkpoint's directory, or None while it is being written.

        Raises:
            SaveError: it could not be written, on every rank; earlier checkpoints are untouched.
        """
        self.finish_saving()
        self.require("save_checkpoint", self.weights_away, self.memory.optimizer)
        with self._all_at_hand():
            store, run = CheckpointStore(directory), self._training_state()
            self._saving = checkpoint.PendingSave(store, step, run, state, self._staging)
        return self.finish_saving() if wait else None

    def finish_saving(self, wait: bool = True) -> Path | None:
        """Tell of the pending checkpoint once it is written and committed; collective.

        Returns:
            its directory; None if there is none, or (without `wait`) it is still being written.

        Raises:
            SaveError: as `save_checkpoint`.
        """
        saving = self._saving
        if saving is None:
            return None
        try:
            if not saving.is_written(wait):
                return None
        except checkpoint.SaveError:
            self._saving = None
            raise
        self._saving = None
        return saving.final

    def finish_saving_alone(self, seconds: float) -> Path | None:
        """Wait at most so long for the pending checkpoint, at the end of a run; otherwise discard it. Not collective.

        Returns:
            its directory; None if there is none, or it was discarded.
        """
        saving, self._saving = self._saving, None
        return saving.final if saving is not None and saving.finish_alone(seconds) else None

    def load_checkpoint(self, iteration: Path, allow_partial: bool = False) -> checkpoint.Restored:
        """Restore weights, optimizer, schedule, random states and the loop's own state, from any layout.

        Raises:
            UserError: the checkpoint does not fit, or lacks a piece and `allow_partial` is not set.
        """
        if isinstance(self.reference, AdaptersOff) and checkpoint.holds_reference(iteration):
            self.reference = KeptWeights(adapters_in(self.model))
        with self._all_at_hand():
            restored = checkpoint.load(iteration, self._training_state(), allow_partial)
        begins = not restored.state  # training begins from these weights
        if begins or restored.has_reference:
            self.began_elsewhere = iteration
        if self.reference is not None and begins:
            self.reference = self._new_reference(begun=True)
            if isinstance(self.reference, KeptWeights):
                self.reference.has_moved = True
        return restored

    def _training_state(self) -> checkpoint.TrainingState:
        kept = self.reference if isinstance(self.reference, KeptWeights) else None
        other = self.kept_beside
        beside = () if other is None else (other.trained_part(self.name_beside),)
        return checkpoint.TrainingState(self.trained_part(), self.config, kept, beside)

    def trained_part(self, name: str = "") -> TrainedPart:
        """Return the parts of this model that a checkpoint holds."""
        self.settle_weights()
        return TrainedPart(self.model, self.optimizer, self.scheduler, name)

    def verify_checkpoint(self, iteration: Path) -> list[str]:
        """Return the damage of a checkpoint after reading every byte; the same on every rank."""
        return checkpoint.verify(iteration)

    def load_weights(self, iteration: Path) -> None:
        """Restore the weights alone of a checkpoint, from any layout; also those of the model kept beside."""
        self.settle_weights()
        checkpoint.load_weights(iteration, self.model)
        if self.kept_beside is not None:
            with self._all_at_hand():
                self.kept_beside.settle_weights()
                checkpoint.load_weights(iteration, self.kept_beside.model, self.name_beside)
