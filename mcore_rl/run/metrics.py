"""Metrics of a run: one JSON object a step, a line on the console, trackers, a summary."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from mcore_rl.config import TrainingConfig, greatest_is_best
from mcore_rl.run import watchdog
from mcore_rl.run.step_log import StepLog
from mcore_rl.run.trackers import Trackers
from mcore_rl.utils.console import console, speaker

SHOWN = ("reward_mean", "loss", "value_loss", "explained_variance", "accuracy")
"""Metrics for people."""


class Reporter:
    """Writes on rank 0 and does nothing on the others.

    Args:
        first_step: the first that is done now, of `total`.
    """

    def __init__(self, config: TrainingConfig, is_writer: bool, first_step: int, total: int) -> None:
        self.enabled, self.total = is_writer, total
        self.first_step, self.started = first_step, time.monotonic()
        self.directory, self._course = config.output_dir, dict[str, _Course]()
        self._tokens, self._seconds = 0, 0.0
        self._bar: Progress | None = None
        if is_writer:
            self.log = StepLog(config.output_dir / "metrics.jsonl")
            self.trackers = Trackers(config, speaker(is_writer))
            self._log_fails = False

    def record(self, step: int, metrics: dict[str, Any]) -> None:
        """Write an object for the step to metrics.jsonl and to trackers."""
        if not self.enabled:
            return
        try:
            self.log.append(step, metrics)
        except OSError as error:
            self.log = StepLog(self.log.path)  # what it has written of the line is taken away with the next
            if not self._log_fails:
                speaker(True)(f"warning: {self.log.path} cannot be written ({error.strerror}); steps are missing in it")
            self._log_fails = True
        self.trackers.log(metrics, step)
        self._tokens += metrics.get("num_tokens", 0)
        self._seconds += metrics.get("step_seconds", 0.0)
        for name, value in metrics.items():
            plain = name.removeprefix("validation_").rpartition("/")[2] if name.startswith("validation_") else name
            if plain in SHOWN:
                self._course.setdefault(name, _Course(max if greatest_is_best(plain) else min)).take(step, value)

    def progress(self, step: int, metrics: Mapping[str, Any]) -> None:
        """The line that a person watches."""
        if not self.enabled:
            return
        per_step = (time.monotonic() - self.started) / (step - self.first_step + 1)
        parts = [f"{name} {metrics[name]:.4g}" for name in (*SHOWN, "grad_norm", "lr") if name in metrics]
        parts.append(f"{metrics['tokens_per_second']:,.0f} tokens/s")
        parts.append(f"{metrics['tflops_per_second']:.3g} TFLOP/s")
        parts.append(f"ETA {_duration((self.total - step) * per_step)}")
        console.print(f"step {step}/{self.total}  " + "  ".join(parts), markup=False)

    @contextlib.contextmanager
    def live(self) -> Iterator[None]:
        """On a terminal: a bar below everything else that is printed, with the phase that the run is in."""
        if not (self.enabled and console.is_terminal):
            yield
            return
        columns = (
            *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()),
            *(TextColumn("left"), TimeRemainingColumn(), _Phase("", markup=False)),
        )
        with Progress(*columns, console=console, transient=True, refresh_per_second=4) as bar:
            self._bar, self._task = bar, bar.add_task("steps", total=self.total, completed=self.first_step - 1)
            yield

    def advance(self, step: int) -> None:
        """Move the bar, if there is one."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def close(self) -> None:
        """Tell other programs that the run is over."""
        if self.enabled:
            self.trackers.close()

    def summary(self, last_step: int) -> Iterator[str]:
        """Yield the lines of a summary of all steps; none if there were no steps."""
        if not self.enabled or last_step < self.first_step:
            return
        taken = time.monotonic() - self.started
        speed = f", {self._tokens / self._seconds:,.0f} tokens/s" if self._seconds else ""
        yield f"steps {self.first_step}–{last_step} in {_duration(taken)}: {self._tokens:,} tokens{speed}"
        for name, course in self._course.items():
            yield f"  {name}: {course}"
        yield f"  metrics: {self.directory / 'metrics.jsonl'}"
        yield f"  curves and samples: mcore-rl report {shlex.quote(str(self.directory))}"


@dataclass
class _Course:
    """The course of a metric over the steps."""

    better: Any
    first: float | None = None
    last: float = 0.0
    best: float = 0.0
    best_step: int = 0

    def take(self, step: int, value: float) -> None:
        if self.first is None or self.better(self.best, value) != self.best:
            self.best, self.best_step = value, step
        self.first, self.last = value if self.first is None else self.first, value

    def __str__(self) -> str:
        return f"{self.first:.4g} → {self.last:.4g}, best {self.best:.4g} at step {self.best_step}"


class _Phase(TextColumn):
    """Show what the process is doing."""

    def render(self, task: Any) -> Any:
        self.text_format = watchdog.phase().replace("{", "{{").replace("}", "}}")
        return super().render(task)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
