"""Checkpoints of a run: when they are written, which are kept, the best validation, and resuming."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl.config import TrainingConfig
from mcore_rl.distributed.collectives import broadcast_object
from mcore_rl.errors import TrainingError, UserError, is_lost_peer
from mcore_rl.models.megatron.checkpoint.load import architecture_of_checkpoint
from mcore_rl.models.megatron.checkpoint.save import SaveError
from mcore_rl.models.policy.megatron_policy import MegatronPolicy
from mcore_rl.run.identity import RunIdentity, identity_of
from mcore_rl.utils.checkpoint_store import CheckpointStore, step_of
from mcore_rl.utils.console import PrintLine, silent
from mcore_rl.utils.files import remove_listed
from mcore_rl.utils.model_directory import architecture_changes


@dataclass
class BestValidation:
    """The best validation of a run so far, by one metric.

    metric: name of the validation metric, without its prefix `validation_`.
    highest: whether the highest value of the metric is the best; otherwise, the lowest value is the best.
    data: fingerprint of the validation data.
    patience: the run ends after this number of consecutive validations without an improvement; None: no limit.
    step: step of the best validation so far; 0 if it came before the first step, or if there is none yet.
    value: value of the metric in the best validation so far; None if there is none.
    waited: number of validations since the best one.
    """

    metric: str
    highest: bool
    data: str
    patience: int | None
    step: int = 0
    value: float | None = None
    waited: int = 0

    @classmethod
    def of(
        cls, config: TrainingConfig, state: Mapping[str, Any], data: str, say: PrintLine = silent
    ) -> BestValidation | None:
        """Return the best validation so far, from the `state` of a checkpoint; None without checkpoint.best_metric.

        A best validation with another metric, another direction or other validation data is ignored.
        """
        asked = config.checkpoint
        if asked.best_metric is None:
            return None
        best = cls(asked.best_metric, asked.best_is_highest is True, data, config.trainer.early_stopping_patience)
        earlier = state.get("best", {})
        if earlier.get("data", data) != data:
            say("data.validation is other data than before: the best validation so far is forgotten")
        elif (earlier.get("metric"), earlier.get("highest")) == (best.metric, best.highest):
            best.step, best.value, best.waited = earlier["step"], earlier["value"], earlier["waited"]
        return best

    def is_bettered(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Record the metrics of a validation; return whether this validation is the best so far.

        A validation with NaN is never the best.

        Raises:
            UserError: the best_metric is not among the validation's metrics.
        """
        if f"validation_{self.metric}" not in metrics:
            known = sorted(name.removeprefix("validation_") for name in metrics if name.startswith("validation_"))
            raise UserError(
                f"checkpoint.best_metric={self.metric}: is not a validation metric; choose from {', '.join(known)}"
            )
        value = metrics[f"validation_{self.metric}"]
        better = value == value and (self.value is None or (value > self.value if self.highest else value < self.value))
        if better:
            self.step, self.value, self.waited = step, value, 0
        else:
            self.waited += 1
        return better

    @property
    def patience_is_over(self) -> bool:
        """Whether the number of validations since the best one has reached `patience`."""
        return self.patience is not None and self.waited >= self.patience

    def forget(self) -> None:
        """Forget the best validation: it belongs to another run, from whose checkpoint this run started."""
        self.step, self.value, self.waited = 0, None, 0

    def state(self) -> dict[str, Any]:
        """Return the state to store in a checkpoint; `of` restores this object from that state."""
        return {
            "metric": self.metric,
            "highest": self.highest,
            "data": self.data,
            "step": self.step,
            "value": self.value,
            "waited": self.waited,
        }

    def __str__(self) -> str:
        if self.value is None:
            return f"best validation: none has a {self.metric}"
        if self.step == 0:
            return f"best validation: none has a better {self.metric} than {self.value:.4g} before the first step"
        return f"best validation: {self.metric} {self.value:.4g} at step {self.step}"


LOST_PEER_SECONDS = 2.0
"""Seconds to wait for the pending checkpoint after another rank has died; torchrun then restarts the run."""


def check_identity(identity: RunIdentity, candidates: list[Path]) -> list[str]:
    """Check that the checkpoint to resume belongs to this run; return lines about what has changed since.

    Args:
        candidates: checkpoints to resume from, best first.

    Raises:
        UserError: the checkpoint belongs to another run; the message names the key that differs.
    """
    for iteration in candidates:
        if earlier := identity_of(iteration):
            identity.require_same(earlier, iteration)
            changes = identity.changes(earlier)
            return [f"changed since {iteration.name}: {', '.join(changes)}"] if changes else []
    for iteration in candidates[:1]:
        for key, was, now in architecture_changes(architecture_of_checkpoint(iteration), identity.architecture):
            raise UserError(
                f"model.path: {iteration} has another architecture ({key} is {was} in the checkpoint, {now} in "
                "the model)"
            )
    return [f"{path.name} does not name its run, so it could not be compared with this run" for path in candidates[:1]]


class RunCheckpoints:
    """Saves and restores the checkpoints of a run. Every method is collective, except `finish_alone`.

    Args:
        candidates: the result of `preflight.find_checkpoints`: checkpoints to resume from, best first, and notes for
            the user.
        identity: identity of the run as JSON. It is stored in each checkpoint.
    """

    def __init__(
        self,
        config: TrainingConfig,
        policy: MegatronPolicy,
        say: PrintLine,
        candidates: tuple[list[Path], list[str]],
        identity: str,
    ) -> None:
        self.config, self.policy, self.say, self.identity = config, policy, say, identity
        self.resume_from, self.notes = candidates
        self.store = CheckpointStore(config.output_dir / "checkpoints")
        self._passing: list[Path] = []

    def resume(self) -> dict[str, Any]:
        """Restore the first intact checkpoint of the candidates; return the training loop's state.

        If there is nothing to resume, the state has `step` 0.

        Raises:
            UserError: all checkpoints are damaged, or the checkpoint does not fit this run.
        """
        for note in self.notes:
            self.say(note)
        self.resume_from = broadcast_object(self.resume_from)  # other nodes may not see them after a restart
        for iteration in self.resume_from:
            if problems := self.policy.checkpoint.verify(iteration):
                self.say(f"damaged checkpoint: {iteration}: {'; '.join(problems)}")
                continue
            restored = self.policy.load_checkpoint(iteration, self.config.checkpoint.allow_partial)
            state = {"step": 0, "consumed_samples": 0, **restored.state}
            position = f"data position ({state['consumed_samples']:,} samples)"
            self.say(f"resumed from {iteration}: {', '.join([*restored.pieces, position])}")
            self._take_over_passing(iteration, state.pop("passing", []))
            if self.policy.reference is None and restored.has_reference:
                self.say("the checkpoint's reference, which has been updated, is not used; later checkpoints have none")
            if restored.missing:
                self.say(f"the checkpoint lacks these, which start anew: {', '.join(restored.missing)}")
            return state
        if self.resume_from:
            raise UserError(
                f"all checkpoints in {self.resume_from[0].parent} are damaged; choose another output_dir or "
                "another checkpoint.resume"
            )
        return {"step": 0, "consumed_samples": 0}

    def save(self, step: int, state: dict[str, Any], wait: bool, passing: bool = False) -> None:
        """Start to write the checkpoint of `step`; wait until it is written if `wait` is True or saving is synchronous.

        Args:
            passing: whether the checkpoint is saved only because checkpoint.save_minutes have passed. Such a checkpoint
                is removed as soon as a later one is committed.
        """
        wait = wait or not self.config.checkpoint.asynchronous
        self.poll(wait=True)
        path = self.store.iteration(step)
        self._passing = [earlier for earlier in self._passing if earlier != path] + [path] * passing
        state = {**state, "identity": self.identity, "passing": [step_of(path) for path in self._passing]}
        self._or_fail(step, lambda: self.policy.save_checkpoint(self.store.directory, step, state, wait))

    def poll(self, wait: bool = False) -> None:
        """Commit the pending checkpoint if it has been written, and report a failure.

        Args:
            wait: whether to wait until the checkpoint has been written.
        """
        if (pending := self.policy.checkpoint.pending) is not None:
            self._or_fail(pending.step, lambda: self.policy.checkpoint.finish(wait))

    def finish_alone(self, error: BaseException) -> None:
        """Finish or discard the pending checkpoint when `error` ends the run on this rank. Not collective.

        If another rank has died, the wait is short, because that rank will not finish its files.
        """
        limit = LOST_PEER_SECONDS if is_lost_peer(error) else self.config.checkpoint.timeout_seconds
        if path := self.policy.checkpoint.finish_alone(limit):
            self.say(f"checkpoint: {path}")

    def has(self, step: int) -> bool:
        """Return whether the checkpoint of `step` exists on rank 0's disk."""
        return bool(broadcast_object(self.store.iteration(step).is_dir()))

    def newest(self) -> Path | None:
        """Return the newest checkpoint on disk."""
        return next(reversed(self.store.iterations()), None)

    def _or_fail(self, step: int, action: Callable[[], Path | None]) -> None:
        try:
            if path := action():
                self.say(f"checkpoint: {path}")
                self._remove_passing(path)
        except SaveError as error:
            message = f"step {step}: the checkpoint could not be written: {error}"
            if self.config.checkpoint.on_failure == "stop":
                raise TrainingError(message) from None
            self.say(message)

    def _take_over_passing(self, resumed: Path, steps: list[int]) -> None:
        """Remove the passing checkpoints (argument `passing` of `save`) that the earlier launch has left.

        If the checkpoint `resumed` is one of them, it is removed after the next save.

        Args:
            steps: steps of the passing checkpoints, as stored in the checkpoint `resumed`.
        """
        if resumed.resolve().parent == self.store.directory.resolve():
            self._passing = [self.store.iteration(step) for step in steps]
            self._remove_passing(self.store.iteration(step_of(resumed)))

    def _remove_passing(self, newest: Path) -> None:
        """Remove the passing checkpoints (argument `passing` of `save`) except `newest`; none if keep_last is set."""
        earlier = [path for path in self._passing if path != newest]
        self._passing = [path for path in self._passing if path == newest]
        if self.policy.is_writer and self.config.checkpoint.keep_last is None:
            for path in earlier:
                remove_listed(path)
