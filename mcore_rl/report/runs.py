"""Reader of a run's files, for the report."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from mcore_rl.config import read_yaml
from mcore_rl.errors import UserError
from mcore_rl.run.directory import RunDirectory
from mcore_rl.run.identity import flattened
from mcore_rl.run.metrics import step_log_entries
from mcore_rl.utils.checkpoint_store import quick_problems, step_of

MAX_SAMPLES = 400
"""Maximum number of samples shown of a run; the page states the number of steps with samples."""


@dataclass
class Series:
    """The values of a metric and their steps, in ascending order of steps. Values may be NaN or infinite."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def append(self, step: int, value: float) -> None:
        self.steps.append(step)
        self.values.append(value)

    def finite(self) -> Iterator[tuple[int, float]]:
        """Yield (step, value) for all values that are finite."""
        return ((step, value) for step, value in zip(self.steps, self.values, strict=True) if math.isfinite(value))


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of a run.

    size: size in bytes.
    problem: first problem found by checks that do not read the whole checkpoint; "" if there is none.
    """

    path: Path
    step: int
    size: int
    problem: str


@dataclass
class Run:
    """A run, as its files describe it.

    label: name of the run in the report.
    metrics: metrics by name, in the order in which they first have a value.
    last_step: last step in metrics.jsonl; None if the file has no lines.
    samples: entries of samples.jsonl to show.
    steps_with_samples: number of steps for which samples.jsonl has samples.
    sampled_steps: number of those steps whose samples are in `samples`.
    cut_short: names of the files whose last line is incomplete.
    config: every value of config.yaml by its dotted key; empty if there is no such file.
    """

    path: Path
    label: str
    metrics: dict[str, Series] = field(default_factory=dict)
    last_step: int | None = None
    samples: list[dict[str, Any]] = field(default_factory=list)
    steps_with_samples: int = 0
    sampled_steps: int = 0
    cut_short: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def directory(self) -> RunDirectory:
        return RunDirectory(self.path)

    @cached_property
    def algorithm(self) -> str:
        """Name of the algorithm; "" if the directory has no run.json."""
        identity = self.directory.identity
        return identity.algorithm if identity else ""

    @cached_property
    def state(self) -> str:
        """State of the run: "going on" or "killed" by its lock, "stopped" before its last step, or "ended"."""
        state = {"held": "going on", "left": "killed", "free": "ended"}[self.directory.lock.state()]
        return "stopped" if state == "ended" and (self.last_step or 0) < (self.planned_steps or 0) else state

    @property
    def planned_steps(self) -> int | None:
        """Number of steps of the whole run, from trainer.max_steps; None if the run also or only counts epochs."""
        counts_epochs = self.config.get("trainer.max_epochs") is not None
        return None if counts_epochs else self.config.get("trainer.max_steps")

    @cached_property
    def checkpoints(self) -> list[Checkpoint]:
        """Checkpoints, oldest first; a checkpoint that is removed during the call is omitted."""
        found = []
        for path in self.directory.checkpoints.iterations():
            try:
                size = sum(file.stat().st_size for file in path.iterdir())
                found.append(Checkpoint(path, step_of(path), size, "; ".join(quick_problems(path)[:1])))
            except OSError:
                continue
        return found

    @cached_property
    def stacks(self) -> list[str]:
        """First line of each rank's report of its Python stacks. The line tells the rank's phase."""
        files = sorted((self.path / "stacks").glob("rank_*.txt"))
        return [line for file in files if (line := file.read_text(errors="replace").partition("\n")[0])]

    def total(self, name: str) -> float:
        """Return the sum of a metric over all steps; 0.0 without the metric."""
        series = self.metrics.get(name)
        return math.fsum(value for _, value in series.finite()) if series else 0.0


def read_runs(paths: list[Path]) -> list[Run]:
    """Read the runs in these directories, each directory once, and give them distinct labels.

    Raises:
        UserError: a path is not the directory of a run, or one of its files has an unexpected format.
    """
    unique = list({path.resolve(): path for path in paths}.values())
    names = [path.resolve().name for path in unique]
    labels = [name if names.count(name) == 1 else str(path) for name, path in zip(names, unique, strict=True)]
    return [_read(path, label) for path, label in zip(unique, labels, strict=True)]


def _read(path: Path, label: str) -> Run:
    run = Run(path, label)
    if not path.is_dir():
        raise UserError(f"{path}: is not the output directory of a run")
    if not ((path / "metrics.jsonl").exists() or run.directory.identity):
        raise UserError(f"{path}: has no metrics.jsonl; give the output_dir of a run")
    for entry in _entries(run, "metrics.jsonl"):
        run.last_step = entry.pop("step")
        for name, value in entry.items():
            if isinstance(value, int | float):
                run.metrics.setdefault(name, Series()).append(run.last_step, float(value))
    steps = list(dict.fromkeys(entry["step"] for entry in _entries(run, "samples.jsonl")))
    run.samples, run.sampled_steps = _samples(run, steps)
    run.steps_with_samples = len(steps)
    if (path / "config.yaml").exists():
        run.config = flattened(read_yaml(path / "config.yaml"))
    return run


def _samples(run: Run, steps: list[int]) -> tuple[list[dict[str, Any]], int]:
    """Return at most `MAX_SAMPLES` samples of a run, from evenly spaced steps, and the number of these steps.

    Args:
        steps: all steps in samples.jsonl.
    """
    chosen = {steps[round(k * (len(steps) - 1) / 99)] for k in range(100)} if steps else set()
    samples = [entry for entry in _entries(run, "samples.jsonl", tell=False) if entry["step"] in chosen]
    while len(samples) > MAX_SAMPLES and len(chosen) > 1:
        chosen = set(sorted(chosen)[::2])
        samples = [sample for sample in samples if sample["step"] in chosen]
    return samples[-MAX_SAMPLES:], len(chosen)


def _entries(run: Run, name: str, tell: bool = True) -> Iterator[dict[str, Any]]:
    """Yield the entries of the run's file `name`; nothing if it does not exist.

    Args:
        tell: whether to add the file's name to `run.cut_short` if its last line is incomplete.
    """
    path = run.path / name
    try:
        with open(path, "rb") as file:
            yield from step_log_entries(file)
            size = file.tell()
            file.seek(max(0, size - 1))
            if tell and file.read(1) not in (b"", b"\n"):
                run.cut_short.append(name)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise UserError(f"{path}: one of its lines is not JSON") from None
    except ValueError as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
