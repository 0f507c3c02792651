"""The training loop of all algorithms: steps, validation, checkpoints, signals, export."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic

import torch

from mcore_rl import platform
from mcore_rl.config import TrainingConfig, resolved_yaml
from mcore_rl.distributed.collectives import broadcast_object
from mcore_rl.errors import NotFiniteError, Stopped, TrainingError, UserError
from mcore_rl.models.policy.megatron_policy import MegatronPolicy
from mcore_rl.run import directory as run_directory
from mcore_rl.run import watchdog
from mcore_rl.run.checkpoints import BestValidation, RunCheckpoints
from mcore_rl.run.directory import RunDirectory
from mcore_rl.run.metrics import MetricsReporter, console_metrics
from mcore_rl.run.preflight import is_restart
from mcore_rl.run.setup import DatasetT, RunInputs, warn_about_unreached_intervals
from mcore_rl.utils.console import print_error, rank_zero_printer
from mcore_rl.utils.model_directory import make_repository
from mcore_rl.utils.torchrun import is_under_torchrun, launcher, rank

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
SAME_NOTICE_SECONDS = 5
"""Seconds within which a repeated signal is regarded as the same notice.

Slurm signals every process of a job step, and `mcore-rl` passes the signal on to the ranks, so a rank gets it twice.
"""


class StopSignals:
    """Turns Ctrl-C, SIGTERM and SIGUSR1 (Slurm's notice of pre-emption) into a request to stop after the current step.

    A second signal ends the process at once, unless it repeats SIGTERM or SIGUSR1 within `SAME_NOTICE_SECONDS`.
    torchrun forwards the first Ctrl-C to the ranks and waits until the ranks end. A second Ctrl-C reaches only
    torchrun; the ranks end when torchrun has ended. If torchrun was killed, the ranks save and stop, as after SIGHUP:
    otherwise the next start would find a run in progress.

    Args:
        save_seconds: `save_is_due` becomes True this many seconds after the last checkpoint (clock of rank 0); None for
            never.
    """

    def __init__(self, save_seconds: float | None = None) -> None:
        self._received, self._received_at = 0, 0.0
        self.save_seconds, self._saved = save_seconds, time.monotonic()
        self._clock_is_mine = rank() == 0
        self.save_is_due = False
        arrivals, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # not for a child's signals
        for number in SIGNALS:
            signal.signal(number, lambda number, frame: None)
        threading.Thread(target=self._receive_all, args=(arrivals,), daemon=True).start()
        if is_under_torchrun():
            threading.Thread(target=self._wait_for_end_of_launcher, daemon=True).start()

    def _receive_all(self, arrivals: int) -> None:
        """Receive signals from the pipe `arrivals`. A Python handler would have to wait for the current collective."""
        while True:
            for number in os.read(arrivals, 64):
                if number in SIGNALS:
                    self._receive(number)

    def _receive(self, number: int) -> None:
        is_same = number == self._received and number != signal.SIGINT
        if is_same and time.monotonic() - self._received_at < SAME_NOTICE_SECONDS:
            return
        if self._received:
            os._exit(128 + number)
        self._received, self._received_at = number, time.monotonic()
        if self._clock_is_mine:
            name = signal.Signals(number).name
            when = "" if number == signal.SIGINT else f"after {SAME_NOTICE_SECONDS} seconds "
            name = "the launcher has ended" if number == signal.SIGHUP else name
            print_error(f"{name}: finishing the step and saving; again {when}ends at once")

    def _wait_for_end_of_launcher(self) -> None:
        while os.getppid() == launcher():
            time.sleep(0.2)
        if self._received == signal.SIGINT:
            os._exit(128 + self._received)
        if not self._received:
            self._receive(signal.SIGHUP)

    def requested(self) -> int:
        """Return the number of a signal that any rank has received, or 0. Also set `save_is_due`. Collective.

        The returned number and `save_is_due` are the same on every rank.
        """
        seconds = time.monotonic() - self._saved
        due = self._clock_is_mine and self.save_seconds is not None and seconds >= self.save_seconds
        both = torch.tensor([self._received, int(due)], device=platform.device())
        torch.distributed.all_reduce(both, op=torch.distributed.ReduceOp.MAX)
        self.save_is_due = bool(both[1])
        return int(both[0])

    def saved(self) -> None:
        """Start to count `save_seconds` again, because a checkpoint has been saved."""
        self._saved = time.monotonic()


def _divides(interval: int | None, step: int) -> bool:
    """Return whether `interval` divides `step`; False if `interval` is None."""
    return interval is not None and step % interval == 0


class TrainingLoop(ABC, Generic[DatasetT]):
    """Runs a training from its start, or from a checkpoint, to its end. Every method is collective."""

    def __init__(self, config: TrainingConfig, inputs: RunInputs[DatasetT], policy: MegatronPolicy) -> None:
        self.config, self.inputs, self.policy = config, inputs, policy
        self.consumed_samples = 0
        """Number of samples used since the start of the run: the position in the dataset's order, over all epochs."""

    @property
    def total_steps(self) -> int:
        """Number of steps of the whole run, including those before it was resumed."""
        return self.config.total_steps(len(self.inputs.train))

    @property
    def updates_per_step(self) -> int:
        """Number of optimizer steps in each step of the run."""
        return 1

    @property
    def max_record_length(self) -> int:
        """Maximum number of tokens of a record of the dataset."""
        return self.config.data.max_sequence_length

    @abstractmethod
    def train_step(self, step: int) -> dict[str, Any]:
        """Train one step; return its metrics, which include `tokens_per_second` and `tflops_per_second`.

        Raises:
            FloatingPointError: the loss or gradient norm is not finite; the weights are unchanged.
        """

    def validate(self, step: int) -> dict[str, float]:
        """Return the metrics of all validation sets, named `validation_…` or, for named sets, `validation_SET/…`."""
        watchdog.enter(f"step {step}: validation")
        metrics = {}
        for name, dataset in self.inputs.validation.items():
            of_set = self.validate_on(name, dataset, step)
            shown = "  ".join(f"{key} {of_set[key]:.4g}" for key in console_metrics(self.config) if key in of_set)
            self.say(f"step {step}  validation{f' {name}' if name else ''}: {shown}")
            metrics.update({f"validation_{f'{name}/' if name else ''}{key}": value for key, value in of_set.items()})
        return metrics

    @abstractmethod
    def validate_on(self, name: str, dataset: DatasetT, step: int) -> dict[str, float]:
        """Return the metrics of the validation set `dataset`. Its name is `name`."""

    def throughput(self, num_tokens: float, flops: float, seconds: float) -> dict[str, float]:
        """Return the throughput metrics of a step with `num_tokens` tokens and `flops` floating-point operations."""
        return {
            "num_tokens": int(num_tokens),
            "tokens_per_second": num_tokens / seconds,
            "tflops_per_second": flops / seconds / 1e12,
            "step_seconds": seconds,
        }

    def say(self, message: str) -> None:
        """Print a line on rank 0."""
        rank_zero_printer(self.policy.is_writer)(message)

    def run(self) -> Path | None:
        """Run all steps, then export the model; return the exported directory, or None if no model is exported.

        Raises:
            Stopped: a signal has stopped the run before its last step.
        """
        minutes = self.config.checkpoint.save_minutes
        self.checkpoints = RunCheckpoints(
            self.config, self.policy, self.say, self.inputs.checkpoints, self.inputs.identity
        )
        self.signals = StopSignals(None if minutes is None else minutes * 60)
        try:
            done, number = self._resume(), 0
            with contextlib.closing(self.reporter), self.reporter.live():
                if done == 0 and self.config.trainer.validate_at_start:
                    self._validate_before_training()
                while done < self.total_steps and not number and not self._patience_is_over:
                    done += 1
                    number = self._run_step(done)
            stops = number > 0 and done < self.total_steps
            exported = self._finish(done, stopped_by=number if stops else 0)
        except BaseException as error:
            self.checkpoints.finish_alone(error)
            raise
        if stops:
            raise Stopped(number)
        return exported

    def _resume(self) -> int:
        """Restore the checkpoint to resume, if any, and prepare the run; return the number of completed steps."""
        state = self.checkpoints.resume()
        if self.config.checkpoint.asynchronous:
            self.policy.checkpoint.reserve()
        self._begin()
        done: int = state["step"]
        self.consumed_samples = state["consumed_samples"]
        validated_on = " ".join(f"{name}:{data.fingerprint}" for name, data in self.inputs.validation.items())
        self.best = BestValidation.of(self.config, state, validated_on, self.say)
        if self.best is not None and self.best.step and not self.checkpoints.has(self.best.step):
            self.best.forget()  # the best checkpoint belongs to the run from which this run started
        self.reporter = MetricsReporter(self.config, self.policy.is_writer, done + 1, self.total_steps)
        self.print_run_description(done, self.total_steps)
        return done

    @property
    def _patience_is_over(self) -> bool:
        return self.best is not None and self.best.patience_is_over

    def _validate_before_training(self) -> None:
        if metrics := self._or_stop(self.validate, step=0, trained=0):
            self.reporter.record(0, metrics)
            if self.best is not None:
                self.best.is_bettered(0, metrics)

    def _run_step(self, step: int) -> int:
        """Train one step, and validate, report and save if they are due.

        Return the number of the signal that stops the run, or 0.
        """
        metrics = self._or_stop(self.train_step, step, trained=step - 1)
        self._move_reference(step)
        validates = self._validates_after(step)
        if validates:
            metrics.update(self._or_stop(self.validate, step, trained=step))
        self.reporter.record(step, metrics)
        bettered = validates and self._is_bettered(step, metrics)
        if _divides(self.config.trainer.log_interval, step) or step in (1, self.total_steps):
            self.reporter.progress(step, metrics)
        self.reporter.advance(step)
        number = self.signals.requested()
        last = step == self.total_steps or number > 0 or self._patience_is_over
        watchdog.enter(f"step {step}: checkpoint")
        self.checkpoints.poll()
        by_interval = last or bettered or _divides(self.config.checkpoint.save_interval, step)
        if by_interval or self.signals.save_is_due:
            self.checkpoints.save(step, self._state(), last, passing=not by_interval)
            self.signals.saved()
        return number

    def _is_bettered(self, step: int, metrics: dict[str, Any]) -> bool:
        """Return whether the validation with these metrics is the best so far.

        Raises:
            UserError: checkpoint.best_metric is not one of the metrics. A checkpoint has been saved.
        """
        try:
            return self.best is not None and self.best.is_bettered(step, metrics)
        except UserError:
            self.checkpoints.save(step, {"consumed_samples": self.consumed_samples}, wait=True)
            raise

    def _state(self, consumed_samples: int | None = None) -> dict[str, Any]:
        """Return the state of the training loop to store in a checkpoint."""
        consumed = self.consumed_samples if consumed_samples is None else consumed_samples
        return {"consumed_samples": consumed, **({"best": self.best.state()} if self.best else {})}

    def _finish(self, done: int, stopped_by: int) -> Path | None:
        """Print the summary, and export the model unless a signal, whose number is given, has stopped the run."""
        for line in self.reporter.summary(done):
            self.say(line)
        best, exported = self.best, None
        if best is not None:
            self.say(f"  {best}" + (f": {self.checkpoints.store.iteration(best.step)}" if best.step else ""))
        if stopped_by:
            name = signal.Signals(stopped_by).name
            self.say(f"stopped by {name} after step {done}; the same command goes on from here")
        else:
            if done < self.total_steps and best is not None:
                self.say(f"step {done}: {best.waited} validations without a better {best.metric}; training ends here")
            if self.config.checkpoint.export_best and best is not None and best.step != done:
                self._take_weights_of(best)
            exported = self._export()
        watchdog.stop()
        run_directory.release()
        return exported

    def _or_stop(self, part: Callable[[int], dict[str, Any]], step: int, trained: int) -> dict[str, Any]:
        """Call `part` (training or validation) for a step and return its metrics; if it fails, save what can be saved.

        After a FloatingPointError or TrainingError, the pending checkpoint is completed. After a TrainingError (such as
        a failed server), the current weights are saved too, as the checkpoint of the step `trained`. They are not saved
        if `part` has changed them, or if the devices have no room for offloaded weights.

        Args:
            part: function of the step that returns metrics, such as `train_step`.
            trained: the last step that was completed before this call.

        Raises:
            NotFiniteError: a loss or a gradient norm is not finite.
            TrainingError: `part` has raised it.
        """
        updates, consumed = self.policy.updates_made, self.consumed_samples
        try:
            return part(step)
        except FloatingPointError as error:
            try:
                self.checkpoints.poll(wait=True)
            except TrainingError as failed_save:  # report the number that is not finite, which ends the run
                self.say(str(failed_save))
            newest = self.checkpoints.newest() or "none"
            where = "validation: " if part == self.validate else ""
            message = f"step {step}: {where}{error}; the last checkpoint is {newest}"
            if self.policy.is_writer:
                RunDirectory(self.config.output_dir).mark_not_finite(message)
            raise NotFiniteError(message) from None
        except TrainingError:  # raised on every rank
            self.checkpoints.poll(wait=True)
            is_sound = self.policy.updates_made == updates
            if is_sound and trained > 0 and not self.checkpoints.has(trained):
                self.release_engines()
                if self.policy.checkpoint.restore_to_device():
                    self.checkpoints.save(trained, self._state(consumed), wait=True)
                else:
                    self.say(f"step {trained} is not saved: a device has no room for its weights and optimizer state")
            raise

    def release_engines(self) -> None:
        """Make generation engines stop using the device, after an engine or a judge has failed. Collective."""

    def _take_weights_of(self, best: BestValidation) -> None:
        if best.step and self.checkpoints.has(best.step):
            self.policy.checkpoint.load_weights(self.checkpoints.store.iteration(best.step))
        else:
            self.say("export_best: the best validation has no checkpoint; the last weights are exported")

    def _move_reference(self, step: int) -> None:
        sync = self.config.reference_sync_of
        if sync is not None and _divides(sync.interval, step):
            self.policy.move_reference(sync.alpha)
            self.reference_moved()

    def reference_moved(self) -> None:
        """Called after the reference has been updated: discard stored values that the old reference computed."""

    def _validates_after(self, step: int) -> bool:
        trainer = self.config.trainer
        return _divides(trainer.validation_interval, step) or (trainer.validate_at_end and step == self.total_steps)

    def _begin(self) -> None:
        """Mark the output directory as this run's, and start the watchdog."""
        self._make_repository()
        if self.policy.is_writer:
            directory = RunDirectory(self.config.output_dir)
            if self.config.checkpoint.overwrite and not is_restart(self.config.output_dir):
                directory.clear()
            directory.mark(self.inputs.identity, resolved_yaml(self.config))
        watchdog.start(self.config.output_dir / "stacks", self.policy.rank)

    def _make_repository(self) -> None:
        """Create the hub repository that checkpoint.push_to_hub names.

        Raises:
            UserError: the hub refuses. Raised on every rank.
        """
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
        """Print a description of the run: model, layout and data.

        Args:
            done: number of completed steps.
            steps: number of steps of the whole run.
        """
        policy = self.policy
        self.say(f"model: {policy.describe()}, {policy.describe_layout()}")
        if policy.config.model.transformer_impl == "transformer_engine" and (warning := platform.te_warning()):
            self.say(f"warning: {warning}")
        if fp8 := policy.describe_fp8():
            self.say(f"FP8: {fp8}")
        if untrained := policy.describe_untrained():
            self.say(untrained)
        self.say(f"optimizer: {policy.describe_optimizer()}")
        if logits := policy.describe_logits():
            self.say(logits)
        if self.config.checkpoint.export_hf:
            exported = self.config.checkpoint.export_dtype
            own = "the precision of its directory" if exported == "auto" else exported
            self.say(f"precision: trained in {self.config.model.dtype}, exported in {own}")
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
        """If configured, export the trained model in Hugging Face format, and adapters in PEFT format.

        Return the directory of the model, or None if no model is exported.
        """
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
