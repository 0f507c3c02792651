"""The training loop that all algorithms share: steps, validation, checkpoints, signals, export."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Generic

import torch

from mcore_rl import platform
from mcore_rl.config import TrainingConfig, resolved_yaml
from mcore_rl.distributed.collectives import broadcast_object
from mcore_rl.errors import NotFiniteError, TrainingError, UserError
from mcore_rl.models.policy.megatron_policy import MegatronPolicy
from mcore_rl.run import directory as run_directory
from mcore_rl.run import watchdog
from mcore_rl.run.checkpoints import BestValidation, RunCheckpoints
from mcore_rl.run.directory import RunDirectory
from mcore_rl.run.metrics import CONSOLE_METRICS, MetricsReporter
from mcore_rl.run.preflight import is_restart
from mcore_rl.run.setup import DatasetT, RunInputs, warn_about_unreached_intervals
from mcore_rl.utils.console import rank_zero_printer
from mcore_rl.utils.model_directory import make_repository
from mcore_rl.utils.torchrun import is_under_torchrun, rank

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class StopSignals:
    """Takes Ctrl-C, SIGTERM and SIGUSR1 (Slurm's notice of pre-emption) as a wish to stop after the step.

    A second signal ends the process at once. torchrun hands a first Ctrl-C on to the ranks and waits for them; a
    second one ends torchrun alone, so the ranks then end with it.

    Args:
        save_seconds: how often, by the clock of rank 0, `save_is_due`; None for never.
    """

    def __init__(self, save_seconds: float | None = None) -> None:
        self._received, self._parent = 0, os.getppid()
        self.save_seconds, self._saved = save_seconds, time.monotonic()
        self._clock_is_mine = rank() == 0
        self.save_is_due = False
        for number in SIGNALS:
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._received:
            os._exit(128 + number)
        self._received = number
        if self._clock_is_mine:
            name = signal.Signals(number).name
            sys.stderr.write(f"{name}: finishing the step and saving; once more ends at once\n")
        if number == signal.SIGINT and is_under_torchrun():
            threading.Thread(target=self._end_with_parent, daemon=True).start()

    def _end_with_parent(self) -> None:
        while os.getppid() == self._parent:
            time.sleep(0.2)
        os._exit(128 + self._received)

    def requested(self) -> str | None:
        """The signal's name if any rank has received one; the same answer on every rank, as is `save_is_due`."""
        seconds = time.monotonic() - self._saved
        due = self._clock_is_mine and self.save_seconds is not None and seconds >= self.save_seconds
        both = torch.tensor([self._received, int(due)], device=platform.device())
        torch.distributed.all_reduce(both, op=torch.distributed.ReduceOp.MAX)
        received, self.save_is_due = int(both[0]), bool(both[1])
        return signal.Signals(received).name if received else None

    def saved(self) -> None:
        """A checkpoint has been begun: the next is due a whole interval later."""
        self._saved = time.monotonic()


def _divides(interval: int | None, step: int) -> bool:
    """Whether something that happens every `interval` steps (never, for None) happens now."""
    return interval is not None and step % interval == 0


def _state(consumed_samples: int, best: BestValidation | None) -> dict[str, Any]:
    """The loop's state in a checkpoint."""
    return {"consumed_samples": consumed_samples, **({"best": best.state()} if best else {})}


@dataclass
class TrainingLoop(ABC, Generic[DatasetT]):
    """A run from its start, or the checkpoint it resumes from, to its end. Every method is collective."""

    config: TrainingConfig
    inputs: RunInputs[DatasetT]
    policy: MegatronPolicy
    consumed_samples = 0
    """Position in the order of the dataset, across epochs."""

    @property
    def total_steps(self) -> int:
        """From the run's very start to its end."""
        return self.config.total_steps(len(self.inputs.train))

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of a step."""
        return 1

    @property
    def max_record_length(self) -> int:
        """In tokens."""
        return self.config.data.max_sequence_length

    @abstractmethod
    def train_step(self, step: int) -> dict[str, Any]:
        """Train once; returns metrics, among them `tokens_per_second` and `tflops_per_second`.

        Raises:
            FloatingPointError: training cannot go on; weights are as before.
        """

    def validate(self, step: int) -> dict[str, float]:
        """Metrics of the validation sets, each named `validation_…`, of several `validation_SET/…`; {} without one."""
        watchdog.enter(f"step {step}: validation")
        metrics = {}
        for name, dataset in self.inputs.validation.items():
            of_set = self.validate_on(name, dataset, step)
            shown = "  ".join(f"{key} {of_set[key]:.4g}" for key in CONSOLE_METRICS if key in of_set)
            self.say(f"step {step}  validation{f' {name}' if name else ''}: {shown}")
            metrics.update({f"validation_{f'{name}/' if name else ''}{key}": value for key, value in of_set.items()})
        return metrics

    @abstractmethod
    def validate_on(self, name: str, dataset: DatasetT, step: int) -> dict[str, float]:
        """Metrics of one validation set."""

    def throughput(self, num_tokens: float, flops: float, seconds: float) -> dict[str, float]:
        """Metrics of a step on so many tokens, by so many operations."""
        return {
            "num_tokens": int(num_tokens),
            "tokens_per_second": num_tokens / seconds,
            "tflops_per_second": flops / seconds / 1e12,
            "step_seconds": seconds,
        }

    def say(self, message: str) -> None:
        """A line for the user, once."""
        rank_zero_printer(self.policy.is_writer)(message)

    def run(self) -> Path | None:
        """All steps, then the export, whose directory is returned; None without one."""
        config, policy = self.config, self.policy
        steps = self.total_steps
        checkpoints = RunCheckpoints(config, policy, self.say, self.inputs.checkpoints, self.inputs.identity)
        minutes = config.checkpoint.save_minutes
        interruption = StopSignals(None if minutes is None else minutes * 60)
        try:
            return self._run(steps, checkpoints, interruption)
        except BaseException as error:
            checkpoints.finish_alone(error)
            raise

    def _run(self, steps: int, checkpoints: RunCheckpoints, interruption: StopSignals) -> Path | None:
        """All steps and the export, from the checkpoint that the run goes on from."""
        config, policy = self.config, self.policy
        state = checkpoints.resume()
        self._begin()
        done, self.consumed_samples = state["step"], state["consumed_samples"]
        validated_on = " ".join(f"{name}:{data.fingerprint}" for name, data in self.inputs.validation.items())
        best = BestValidation.of(config, state, validated_on, self.say)
        if best is not None and best.step and not checkpoints.has(best.step):  # it began from another run's checkpoint
            best.forget()
        reporter = MetricsReporter(config, policy.is_writer, done + 1, steps)
        self.print_run_description(done, steps)
        signal = None
        with contextlib.closing(reporter), reporter.live():
            if (
                done == 0
                and config.trainer.validate_at_start
                and (metrics := self._or_stop(self.validate, 0, 0, checkpoints, best))
            ):
                reporter.record(0, metrics)
                if best is not None:
                    best.is_bettered(0, metrics)
            while done < steps and signal is None and not (best and best.patience_is_over):
                done += 1
                metrics = self._or_stop(self.train_step, done, done - 1, checkpoints, best)
                self._move_reference(done)
                if validates := self._validates_after(done):
                    metrics.update(self._or_stop(self.validate, done, done, checkpoints, best))
                reporter.record(done, metrics)
                try:
                    bettered = best is not None and validates and best.is_bettered(done, metrics)
                except UserError:  # a metric that there is not: what was trained so far is kept
                    checkpoints.save(done, {"consumed_samples": self.consumed_samples}, wait=True)
                    raise
                if _divides(config.trainer.log_interval, done) or done in (1, steps):
                    reporter.progress(done, metrics)
                reporter.advance(done)
                signal = interruption.requested()
                last = done == steps or signal is not None or bool(best and best.patience_is_over)
                watchdog.enter(f"step {done}: checkpoint")
                checkpoints.poll(done)
                by_interval = last or bettered or _divides(config.checkpoint.save_interval, done)
                if by_interval or interruption.save_is_due:
                    state = _state(self.consumed_samples, best)
                    checkpoints.save(done, state, last, passing=not by_interval)
                    interruption.saved()
        for line in reporter.summary(done):
            self.say(line)
        if best is not None:
            self.say(f"  {best}" + (f": {checkpoints.store.iteration(best.step)}" if best.step else ""))
        exported = None
        if signal and done < steps:
            self.say(f"stopped by {signal} after step {done}; the same command goes on from here")
        else:
            if done < steps and best is not None:
                self.say(f"step {done}: {best.waited} validations without a better {best.metric}; training ends here")
            if config.checkpoint.export_best and best is not None and best.step != done:
                self._take_weights_of(best, checkpoints)
            exported = self._export()
        watchdog.stop()
        run_directory.release()
        return exported

    def _or_stop(
        self,
        part: Callable[[int], dict[str, Any]],
        step: int,
        trained: int,
        checkpoints: RunCheckpoints,
        best: BestValidation | None,
    ) -> dict[str, Any]:
        """Do a part of a step and return its metrics; what makes it impossible to go on ends the run.

        The checkpoint that is being written is finished before. Where judges or servers are gone and the part has made
        no update, the weights are sound and are saved as well.

        Args:
            trained: the step whose weights the part begins with.
        """
        updates, consumed = self.policy.updates_made, self.consumed_samples
        try:
            return part(step)
        except FloatingPointError as error:
            checkpoints.poll(step, wait=True)
            newest = checkpoints.newest() or "none"
            where = "validation: " if part == self.validate else ""
            message = f"step {step}: {where}{error}; the last checkpoint is {newest}"
            if self.policy.is_writer:
                RunDirectory(self.config.output_dir).mark_not_finite(message)
            raise NotFiniteError(message) from None
        except TrainingError:  # on every rank alike
            checkpoints.poll(step, wait=True)
            is_sound = self.policy.updates_made == updates and self.policy.checkpoint.can_be_saved
            if is_sound and trained > 0 and not checkpoints.has(trained):
                checkpoints.save(trained, _state(consumed, best), wait=True)
            raise

    def _take_weights_of(self, best: BestValidation, checkpoints: RunCheckpoints) -> None:
        if best.step and checkpoints.has(best.step):
            self.policy.checkpoint.load_weights(checkpoints.store.iteration(best.step))
        else:
            self.say("export_best: no checkpoint is of the best validation; the last weights are exported")

    def _move_reference(self, step: int) -> None:
        sync = self.config.reference_sync_of
        if sync is not None and _divides(sync.interval, step):
            self.policy.move_reference(sync.alpha)
            self.reference_moved()

    def reference_moved(self) -> None:
        """Drop values that were computed by a reference that has moved."""

    def _validates_after(self, step: int) -> bool:
        trainer = self.config.trainer
        return _divides(trainer.validation_interval, step) or (trainer.validate_at_end and step == self.total_steps)

    def _begin(self) -> None:
        """From now on the output directory is this run's, which is watched over."""
        self._make_repository()
        if self.policy.is_writer:
            directory = RunDirectory(self.config.output_dir)
            if self.config.checkpoint.overwrite and not is_restart(self.config.output_dir):
                directory.clear()
            directory.mark(self.inputs.identity, resolved_yaml(self.config))
        watchdog.start(self.config.output_dir / "stacks", self.policy.rank)

    def _make_repository(self) -> None:
        """Create the repository of checkpoint.push_to_hub; what the hub refuses ends the run on every rank."""
        if (name := self.config.checkpoint.push_to_hub) is None:
            return
        problem = None
        if self.policy.is_writer:
            try:
                make_repository(name)
            except UserError as error:
                problem = str(error)
        if problem := broadcast_object(problem):
            raise UserError(problem)

    def print_run_description(self, done: int, steps: int) -> None:
        """Say what is trained on what."""
        policy = self.policy
        self.say(f"model: {policy.describe()}, {policy.describe_layout()}")
        if lora := policy.model.lora:
            self.say(f"LoRA: {lora}")
        if policy.reference is not None:
            self.say(f"reference: {policy.reference.describe()}")
        self.say(self.inputs.train.describe("train", self.max_record_length))
        for name, dataset in self.inputs.validation.items():
            self.say(dataset.describe(f"validation {name}".rstrip(), self.max_record_length))
        warn_about_unreached_intervals(self.config, steps, self.say, self.updates_per_step)
        if done >= steps:
            self.say(f"nothing left to train: the checkpoint is at step {done} of {steps}")

    def _export(self) -> Path | None:
        """The trained model as Hugging Face has it, and its adapters as PEFT does, if the configuration asks for it."""
        if not self.config.checkpoint.export_hf:
            return None
        watchdog.enter("export")
        directory = RunDirectory(self.config.output_dir)
        if self.config.model.lora is not None:
            self.policy.export_adapters(directory.adapter)
            self.say(f"PEFT adapter: {directory.adapter}")
        self.policy.export_hf(directory.export)
        self.say(f"Hugging Face model: {directory.export}")
        return directory.export
