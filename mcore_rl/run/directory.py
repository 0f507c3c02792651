"""The directory of a run: its owner, its lock, and which of its files a run may replace.

OUTPUT/run.json      identity of the run that owns the directory; without it, a run touches no existing files
OUTPUT/run.lock      exists while a run is active; holds the pid and host of its first process
OUTPUT/not_finite.json   error of a run that ended with a NaN or infinity; a restart by torchrun then ends at once
OUTPUT/wandb.id      the run's id on Weights & Biases
OUTPUT/…             the files that the run writes (`WRITTEN`)
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

from mcore_rl.config.rl import SERVER_LOGS
from mcore_rl.errors import UserError
from mcore_rl.run.identity import RunIdentity
from mcore_rl.utils.checkpoint_store import CheckpointStore
from mcore_rl.utils.files import naming_full_disk, reason_of, remove_listed, unlisted_files
from mcore_rl.utils.lock_file import LockFile, LockHeld
from mcore_rl.utils.torchrun import launch_id

MARKER, LOCK, NOT_FINITE, WANDB_ID = "run.json", "run.lock", "not_finite.json", "wandb.id"
STEP_LOGS, JUDGE_LOG, AGENT_LOG = ("metrics.jsonl", "samples.jsonl"), "judge.log", "agent.log"
IMAGES, SESSION_IMAGES = "agent_images", "agent_images/sessions"
"""Directories of the images that agents' requests contain: those in samples.jsonl, and those of current rollouts."""
APPENDED = (JUDGE_LOG, AGENT_LOG)
LOGS = (*STEP_LOGS, *APPENDED)
WRITTEN = ("config.yaml", *STEP_LOGS, "checkpoints", "hf", "adapter", "critic", "stacks", "tensorboard", IMAGES)
"""Files and directories that a run replaces or removes. It appends to judge.log, agent.log and vllm/ instead."""
REPORT, REPORT_MARK = "report.html", '<meta name="generator" content="mcore_rl report">'
"""Name of the report that `mcore-rl report` writes, and the mark that identifies such a report. A file of that name
without the mark is never replaced."""
MODEL_CONFIG = "config.json"
"""File of a directory that holds a model. No run may write there: ranks would take its files for those of the model."""
OWN = (*WRITTEN, *APPENDED, SERVER_LOGS, REPORT, MARKER, LOCK, NOT_FINITE, WANDB_ID)


class RunDirectory:
    """The directory `output_dir` of a configuration. Nothing is written before `claim` is called."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = CheckpointStore(path / "checkpoints")
        self.export, self.adapter, self.critic = path / "hf", path / "adapter", path / "critic"
        self.lock = LockFile(path / LOCK)
        self._made: list[Path] = []

    @property
    def exports(self) -> tuple[Path, ...]:
        """Directories to which a run exports models and adapters."""
        return self.export, self.adapter, self.critic

    @property
    def identity(self) -> RunIdentity | None:
        """Identity of the run that owns the directory; None if no run owns it."""
        try:
            return RunIdentity.from_json((self.path / MARKER).read_text())
        except (OSError, ValueError, TypeError):
            return None

    def writes(self, path: Path, exports: bool = True) -> bool:
        """Return whether a run with this output directory writes `path`, or a directory that contains it.

        Args:
            exports: whether the run exports models.
        """
        own, path = self.path.resolve(), path.resolve()
        kept = set() if exports else {exported.name for exported in self.exports}
        return path.is_relative_to(own) and path.relative_to(own).parts[:1] in {(name,) for name in {*OWN} - kept}

    def check(self, export: bool, overwrite: bool = False) -> None:
        """Check that the directory is writable, and that the run would not destroy files that no run wrote.

        Args:
            export: whether the run will export models or adapters.
            overwrite: whether the files of an earlier run are to be removed.

        Raises:
            UserError: the directory cannot be used; the message names the file or directory that prevents it.
        """
        existing = next(p for p in (self.path, *self.path.absolute().parents) if p.exists() or p.is_symlink())
        if not existing.is_dir():
            raise UserError(f"output_dir: {existing} is not a directory")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise UserError(f"output_dir: {self.path} cannot be written ({existing} is not writable)")
        names = () if self.identity else (*WRITTEN, MARKER, MODEL_CONFIG)
        foreign = [name for name in names if _exists(self.path / name)]
        if self.lock.is_foreign():
            foreign.append(LOCK)
        if foreign:
            raise UserError(
                f"output_dir: {self.path} holds {', '.join(foreign)}, which no run wrote; choose another directory"
            )
        for exported in self.exports if export else ():
            if foreign := unlisted_files(exported):
                raise UserError(
                    f"output_dir: {exported} holds {', '.join(foreign[:3])}, which no run exported or which was "
                    "changed after the export; move it away, or set checkpoint.export_hf=false"
                )
        if overwrite:
            for iteration in self.checkpoints.iterations():
                if foreign := unlisted_files(iteration):
                    raise UserError(
                        f"output_dir: {iteration}: {foreign[0]} was added or changed after a run saved this "
                        "checkpoint; move the file away"
                    )

    def holds_results(self) -> bool:
        """Return whether the directory contains results of a run. A new run would mix them with its own results."""
        logs = any((self.path / name).is_file() and (self.path / name).stat().st_size for name in LOGS)
        return bool(self.checkpoints.iterations()) or any(map(_exists, self.exports)) or logs

    def wait_for_lock(self, lock: str, seconds: float) -> bool:
        """Wait up to `seconds` until this directory contains the lock of another process; return whether it does.

        The process that holds the lock must not call this method, because the call would release the lock.

        Args:
            lock: the result of `own_lock` in the other process.
        """
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(OSError):
                if (self.path / LOCK).read_text() == lock:
                    return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)

    def claim(self) -> str | None:
        """Create the directory and lock it until `release` or the end of this process.

        Returns:
            A line for the user if a killed run had left its lock; otherwise None.

        Raises:
            UserError: another run holds the lock, or the directory cannot be created.
        """
        missing = [p for p in (self.path, *self.path.parents) if not p.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._made = missing
            left_by = self.lock.take()
        except LockHeld as holder:
            raise UserError(f"output_dir: {self.path} is being written by another run ({holder})") from None
        except OSError as error:
            raise UserError(f"output_dir: {self.path} cannot be written ({reason_of(error, self.path)})") from None
        global _claimed
        _claimed = self
        return f"the run that held {self.path} ({left_by}) is gone; going on" if left_by else None

    def release(self) -> None:
        """Release the lock, and remove those directories that `claim` created and that are empty."""
        if not self.lock.is_taken:
            return
        self.lock.release()
        for made in self._made:
            with contextlib.suppress(OSError):
                made.rmdir()

    def clear(self) -> None:
        """Remove the files that an earlier run wrote, and no other files.

        Files of precomputed reference log-probabilities are kept.
        """
        if not self.identity:  # judge.log may be a file of the user
            return
        for iteration in self.checkpoints.iterations():
            remove_listed(iteration)
        for exported in self.exports:
            remove_listed(exported)
        self.checkpoints.forget()
        events = (self.path / "tensorboard").glob("events.out.tfevents.*")
        for file in (
            *(self.path / name for name in (*STEP_LOGS, "config.yaml", MARKER, NOT_FINITE, WANDB_ID)),
            *events,
        ):
            file.unlink(missing_ok=True)
        if is_report(self.path / REPORT):
            (self.path / REPORT).unlink()
        for log in APPENDED:
            if (self.path / log).exists():  # judges and programs may have it open already
                os.truncate(self.path / log, 0)

    def mark_not_finite(self, message: str) -> None:
        """Store the error message of a NaN or infinity that ends this launch of the run. `not_finite` reads it."""
        with contextlib.suppress(OSError):
            (self.path / NOT_FINITE).write_text(json.dumps({"launch": launch_id(), "error": message}))

    def not_finite(self, launch: str) -> str | None:
        """Return the message that this `launch` stored by `mark_not_finite`; None if there is no such message."""
        try:
            ended = json.loads((self.path / NOT_FINITE).read_text())
            return str(ended["error"]) if ended["launch"] == launch else None
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def mark(self, identity: str, config: str) -> None:
        """Mark the directory as this run's: write the run's identity (JSON) and its resolved configuration (YAML).

        Raises:
            DiskFullError: the disk has no space for the files.
        """
        (self.path / NOT_FINITE).unlink(missing_ok=True)
        with naming_full_disk(self.path):
            for name, text in ((MARKER, identity), ("config.yaml", config)):
                temporary = self.path / f".{name}.partial"
                temporary.write_text(text)
                temporary.replace(self.path / name)


def is_report(path: Path) -> bool:
    """Return whether `path` is a file that `mcore-rl report` has written."""
    try:
        with open(path, "rb") as file:
            return REPORT_MARK.encode() in file.read(1000)
    except OSError:
        return False


_claimed: RunDirectory | None = None


def release() -> None:
    """Release the output directory that this process has locked, if any."""
    if _claimed is not None:
        _claimed.release()


def _exists(path: Path) -> bool:
    return path.exists() or path.is_symlink()
