"""Reports the metrics of a run: as JSON lines, on the console, to trackers, and in a summary."""

from __future__ import annotations

import contextlib
import html
import json
import secrets
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from mcore_rl.config import RLConfig, TrainingConfig, greatest_is_best
from mcore_rl.run import watchdog
from mcore_rl.run.directory import WANDB_ID
from mcore_rl.run.identity import flattened
from mcore_rl.utils.console import PrintLine, console, rank_zero_printer
from mcore_rl.utils.files import reason_of


class JsonLinesLog:
    """A log to which a run appends JSON lines, each with its step, in ascending order of steps.

    The first `append` removes the entries of its own step and of later steps, and an incomplete last line: an earlier
    launch may have been killed after its last checkpoint. At the first step of a run (0 or 1), it removes all entries.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._goes_on = False

    def append(self, step: int, *entries: dict[str, Any]) -> None:
        if not self._goes_on:
            self._truncate(step)
            self._goes_on = True
        with open(self.path, "a") as file:
            file.writelines(json.dumps({"step": step, **entry}) + "\n" for entry in entries)

    def _truncate(self, step: int) -> None:
        with open(self.path, "ab+") as file:
            file.seek(0)
            earlier = (line for line, entry in _whole_lines(file) if entry["step"] < step)
            file.truncate(0 if step <= 1 else sum(len(line) for line in earlier))


class OptionalLog:
    """A `JsonLinesLog` whose errors do not end the run.

    If the disk is full, entries are missing in the log; the first failure is reported. A crash of the machine may leave
    unreadable lines; these lines are removed when the run resumes.
    """

    def __init__(self, path: Path, say: PrintLine) -> None:
        self._log, self._say, self._fails = JsonLinesLog(path), say, False

    def append(self, step: int, *entries: dict[str, Any]) -> None:
        path = self._log.path
        try:
            try:
                self._log.append(step, *entries)
            except ValueError:
                count = remove_unreadable(path)
                self._say(f"warning: {path}: unreadable lines are removed ({count}); the others are kept")
                self._log.append(step, *entries)
        except OSError as error:
            self._log = JsonLinesLog(path)  # the next append then removes the incomplete line
            if not self._fails:
                reason = reason_of(error, path.parent)
                self._say(f"warning: {path} cannot be written ({reason}); steps are missing in it")
            self._fails = True


def read_step_log(path: Path) -> list[dict[str, Any]]:
    """Return the entries of the log file `path`; an incomplete last line is ignored.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is not an entry.
    """
    with open(path, "rb") as file:
        return list(step_log_entries(file))


def step_log_entries(file: IO[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the entries of an open log file; an incomplete last line is ignored.

    Raises:
        ValueError: a line is not an entry.
    """
    return (entry for _, entry in _whole_lines(file))


def remove_unreadable(path: Path) -> int:
    """Remove the lines of the log file `path` that are not entries; return how many were removed."""
    path = path.resolve()  # a symbolic link is kept
    kept, removed = path.with_name(f".{path.name}.partial"), 0
    with open(path, "rb") as file, open(kept, "wb") as copy:
        for line in file:
            try:
                copy.writelines(whole for whole, _ in _whole_lines([line]))
            except ValueError:
                removed += 1
    kept.replace(path)
    return removed


def _whole_lines(lines: Any) -> Iterator[tuple[bytes, dict[str, Any]]]:
    for line in lines:
        if line.endswith(b"\n"):
            entry = json.loads(line)
            if not (isinstance(entry, dict) and isinstance(entry.get("step"), int)):
                raise ValueError("a line is not an object with an integer step")
            yield line, entry


class Tracker(Protocol):
    """An experiment tracker. It receives the same metrics as metrics.jsonl."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics of a step."""

    def log_samples(self, samples: Sequence[Mapping[str, Any]], step: int) -> None:
        """Log some of a step's samples, given as entries of samples.jsonl."""

    def close(self) -> None:
        """End the tracker's run."""


SAMPLE_COLUMNS = ("prompt", "response", "ground_truth", "reward", "advantage")


def sample_rows(samples: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Return a table row with `SAMPLE_COLUMNS` for each of the `samples`; `samples` are entries of samples.jsonl.

    The column `response` begins with the assistant's first message.
    """
    rows = []
    for sample in samples:
        messages = sample["messages"]
        roles = [message["role"] for message in messages]
        start = roles.index("assistant") if "assistant" in roles else len(roles)
        texts = [
            "\n".join(str(message["content"]) for message in part) for part in (messages[:start], messages[start:])
        ]
        rows.append([*texts, *(sample.get(name) for name in SAMPLE_COLUMNS[2:])])
    return rows


def text_rows(samples: Sequence[Mapping[str, Any]]) -> list[list[str | None]]:
    """Return `sample_rows` with all values but None as text, for tables that need one type in each column."""
    return [[None if value is None else str(value) for value in row] for row in sample_rows(samples)]


class TensorBoard:
    """Tracker that writes event files for TensorBoard to output_dir/tensorboard."""

    def __init__(self, config: TrainingConfig) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(config.output_dir / "tensorboard"))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_samples(self, samples: Sequence[Mapping[str, Any]], step: int) -> None:
        def cell(value: Any) -> str:
            return html.escape(str(value)).replace("|", "&#124;").replace("\n", "<br>")

        table = [SAMPLE_COLUMNS, ["---"] * len(SAMPLE_COLUMNS), *(map(cell, row) for row in sample_rows(samples))]
        self._writer.add_text("samples", "\n".join(f"| {' | '.join(row)} |" for row in table), step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Tracker that logs to Weights & Biases. A resumed run continues its W&B run: output_dir has the id."""

    def __init__(self, config: TrainingConfig) -> None:
        import wandb

        asked, kept = config.logging, config.output_dir / WANDB_ID
        run_id = kept.read_text().strip() if kept.is_file() else ""
        if not run_id:
            run_id = secrets.token_hex(8)
            with contextlib.suppress(OSError):
                kept.write_text(run_id)
        self._run: Any = wandb.init(
            id=run_id,
            resume="allow",
            project=asked.wandb,
            name=asked.run_name,
            tags=list(asked.wandb_tags) or None,
            dir=str(config.output_dir),
            config=config.model_dump(mode="json"),
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, samples: Sequence[Mapping[str, Any]], step: int) -> None:
        import wandb

        table = wandb.Table(columns=list(SAMPLE_COLUMNS), data=text_rows(samples))
        self._run.log({"samples": table}, step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """Tracker that logs to the MLflow server or directory that the environment variable `MLFLOW_TRACKING_URI` names."""

    def __init__(self, config: TrainingConfig) -> None:
        import mlflow

        self._mlflow = mlflow
        mlflow.set_experiment(config.logging.mlflow)
        mlflow.start_run(run_name=config.logging.run_name)
        mlflow.log_params(flattened(config.model_dump(mode="json")))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        # MLflow refuses names with @.
        self._mlflow.log_metrics({n.replace("@", "_at_"): float(value) for n, value in metrics.items()}, step=step)

    def log_samples(self, samples: Sequence[Mapping[str, Any]], step: int) -> None:
        # Each step has a table of its own, because MLflow extends a table by reading and writing all of it.
        rows = text_rows(samples)
        table = {name: [row[column] for row in rows] for column, name in enumerate(SAMPLE_COLUMNS)}
        self._mlflow.log_table(table, f"samples/step_{step:06d}.json")

    def close(self) -> None:
        self._mlflow.end_run()


class Trackers:
    """All configured trackers.

    If a tracker fails, the failure is reported once, and the tracker is not used any more.
    """

    def __init__(self, config: TrainingConfig, say: PrintLine) -> None:
        asked, self._say, self._started = config.logging, say, dict[str, Tracker]()
        kinds: dict[str, tuple[object, Callable[[TrainingConfig], Tracker]]] = {
            "TensorBoard": (asked.tensorboard, TensorBoard),
            "Weights & Biases": (asked.wandb, WeightsAndBiases),
            "MLflow": (asked.mlflow, MLflow),
        }
        for name, (is_asked, start) in kinds.items():
            if is_asked:
                with self._left_out_if_it_fails(name):
                    self._started[name] = start(config)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send the metrics of a step to all trackers."""
        for name, tracker in list(self._started.items()):
            with self._left_out_if_it_fails(name):
                tracker.log(metrics, step)

    def log_samples(self, samples: Sequence[Mapping[str, Any]], step: int) -> None:
        """Send some of a step's samples to all trackers."""
        for name, tracker in list(self._started.items()):
            with self._left_out_if_it_fails(name):
                tracker.log_samples(samples, step)

    def close(self) -> None:
        """Close all trackers."""
        for name, tracker in list(self._started.items()):
            with self._left_out_if_it_fails(name):
                tracker.close()

    @contextlib.contextmanager
    def _left_out_if_it_fails(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a failure of a tracker must not end the training
            self._started.pop(name, None)
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            self._say(f"warning: {name} fails and is left out from now on ({reason}); metrics.jsonl goes on")


def console_metrics(config: TrainingConfig) -> tuple[str, ...]:
    """Return the names of the metrics that the console shows for steps and validations.

    The summary shows their best values. In training on rollouts the loss is not shown, because it does not indicate
    progress.
    """
    if isinstance(config, RLConfig):
        return ("reward_mean", "reward_positive_fraction", "value_loss", "explained_variance")
    return ("loss", "accuracy")


MORE_OF_ROLLOUTS = ("response_length_mean", "truncated_fraction", "kl_penalty", "approx_entropy")
"""Metrics that the console also shows for a step (not for a validation) if the run trains on rollouts."""


class MetricsReporter:
    """Reports metrics: to metrics.jsonl, trackers and the console on rank 0; on other ranks, it does nothing.

    Args:
        first_step: first step of this launch of the run.
        total: number of steps of the whole run.
    """

    def __init__(self, config: TrainingConfig, is_writer: bool, first_step: int, total: int) -> None:
        self.enabled, self.total = is_writer, total
        self.first_step, self.started = first_step, time.monotonic()
        self.directory, self._course = config.output_dir, dict[str, _MetricHistory]()
        self._tokens, self._seconds = 0, 0.0
        self._bar: Progress | None = None
        self._summarized = console_metrics(config)
        self._shown = (*self._summarized, *MORE_OF_ROLLOUTS * isinstance(config, RLConfig), "grad_norm", "lr")
        if is_writer:
            self.log = OptionalLog(config.output_dir / "metrics.jsonl", rank_zero_printer(is_writer))
            self.trackers = Trackers(config, rank_zero_printer(is_writer))

    def record(self, step: int, metrics: dict[str, Any]) -> None:
        """Write the step's metrics to metrics.jsonl and to the trackers."""
        if not self.enabled:
            return
        self.log.append(step, metrics)
        self.trackers.log(metrics, step)
        self._tokens += metrics.get("num_tokens", 0)
        self._seconds += metrics.get("step_seconds", 0.0)
        for name, value in metrics.items():
            plain = name.removeprefix("validation_").rpartition("/")[2] if name.startswith("validation_") else name
            if plain in self._summarized:
                self._course.setdefault(name, _MetricHistory(max if greatest_is_best(plain) else min)).take(step, value)

    def record_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Send samples, if there are any, to the trackers."""
        if self.enabled and samples:
            self.trackers.log_samples(samples, step)

    def progress(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Print a line with the step's metrics and the remaining time on the console."""
        if not self.enabled:
            return
        per_step = (time.monotonic() - self.started) / (step - self.first_step + 1)
        parts = [f"{name} {metrics[name]:.4g}" for name in self._shown if name in metrics]
        parts.append(f"{metrics['tokens_per_second']:,.0f} tokens/s")
        parts.append(f"ETA {_duration((self.total - step) * per_step)}")
        console.print(f"step {step}/{self.total}  " + "  ".join(parts), markup=False)

    @contextlib.contextmanager
    def live(self) -> Iterator[None]:
        """Context in which a terminal shows a progress bar, with the current phase, below all other output."""
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
        """Advance the progress bar, if there is one."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def close(self) -> None:
        """Close the log and the trackers."""
        if self.enabled:
            self.trackers.close()

    def summary(self, last_step: int) -> Iterator[str]:
        """Yield the lines of a summary of this launch's steps; no lines if it has made no step."""
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
class _MetricHistory:
    """First, last and best value of a metric so far."""

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
    """Column of the progress bar that shows the current phase."""

    def render(self, task: Any) -> Any:
        self.text_format = watchdog.phase().replace("{", "{{").replace("}", "}}")
        return super().render(task)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
