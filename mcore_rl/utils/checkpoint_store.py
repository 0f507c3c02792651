"""Checkpoints on disk: a directory for each iteration. The directory is either complete or does not exist.

    DIRECTORY/iter_0000010/                          manifest.json lists every file's size and SHA-256
    DIRECTORY/latest_checkpointed_iteration.txt      written last

A checkpoint is written under a temporary name, flushed to the disk, and renamed when it is complete. A directory with
the name of a checkpoint is therefore complete, unless the disk has damaged it. The manifest shows such damage.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import shutil
import tempfile
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.errors import UserError
from mcore_rl.utils.files import (
    MANIFEST_FILE,
    WEIGHTS,
    FileDigests,
    digests_of,
    flush,
    flush_directory,
    read_manifest,
    remove_listed,
    unused,
    write_manifest,
)

TRACKER_FILE = "latest_checkpointed_iteration.txt"
RELEASE = "release"
"""Content of Megatron-LM's tracker file, and name of the directory beside it, for weights that were converted."""
CHECKPOINT_FILES = frozenset({"common.pt", "metadata.json", ".metadata"})
_ITERATION = re.compile(r"iter_(\d+)")


@dataclass(frozen=True)
class CheckpointStore:
    """The checkpoints of a run, in one directory."""

    directory: Path

    def iteration(self, step: int) -> Path:
        return self.directory / f"iter_{step:07d}"

    def iterations(self) -> list[Path]:
        """Return the directories of the committed checkpoints, oldest first.

        If a checkpoint was removed and only a user's own files remain in its directory, the directory is not returned.
        """
        found = [path for path in self.directory.glob("iter_*") if _ITERATION.fullmatch(path.name)]
        return sorted((path for path in found if not _is_rest(path)), key=step_of)

    def tracked_step(self) -> int | None:
        """Return the step that the tracker file names; None if the file is missing or does not contain a number."""
        try:
            return int((self.directory / TRACKER_FILE).read_text())
        except (OSError, ValueError):
            return None

    def _tracks_release(self) -> bool:
        try:
            return (self.directory / TRACKER_FILE).read_text().strip() == RELEASE
        except OSError:
            return False

    def begin(self, step: int) -> Path:
        """Create and return an empty directory in which the checkpoint of `step` is written."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for leftover in self.directory.glob(".iter_*.partial"):
            shutil.rmtree(leftover)
        # The name is unique, so that a leftover writer of a killed run can only write into its own directory.
        return Path(tempfile.mkdtemp(prefix=f".{self.iteration(step).name}.", suffix=".partial", dir=self.directory))

    def commit(self, step: int, partial: Path, digests: FileDigests) -> Path:
        """Turn the completely written directory `partial` into the checkpoint of `step`; return its final path.

        This writes the manifest, renames the directory, and then updates the tracker file.
        """
        write_manifest(partial, digests)
        flush_directory(partial)
        final = self.iteration(step)
        if final.exists():  # written by a run that was reset to an earlier iteration
            remove_listed(final)
        if final.exists():  # contains files that no run wrote
            final.rename(unused(final.with_name(f"{final.name}.replaced")))
        os.replace(partial, final)
        self._point_tracker_to(step)
        return final

    def _point_tracker_to(self, step: int) -> None:
        temporary = self.directory / f".{TRACKER_FILE}.partial"
        temporary.write_text(f"{step}\n")
        flush(temporary)
        os.replace(temporary, self.directory / TRACKER_FILE)
        flush(self.directory)

    def prune(self, keep_last: int | None, keep_every: int | None, best: int | None = None) -> list[Path]:
        """Delete old checkpoints, but never the newest intact one; return the deleted ones.

        Args:
            keep_last: number of newest checkpoints to keep; None keeps all.
            keep_every: also keep the checkpoints of steps that are multiples of this.
            best: also keep the checkpoint of this step.
        """
        iterations = self.iterations()
        if keep_last is None or len(iterations) <= keep_last:
            return []
        whole = [path for path in iterations if not quick_problems(path)]
        kept = {*iterations[-keep_last:], *whole[-1:]}
        kept |= {path for path in iterations if step_of(path) == best}
        removed = [p for p in iterations if p not in kept and not (keep_every and step_of(p) % keep_every == 0)]
        for path in removed:
            remove_listed(path)
        return removed

    def forget(self) -> None:
        """Remove the tracker file, and the directory if nothing is left in it."""
        (self.directory / TRACKER_FILE).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.directory.rmdir()

    def candidates(self) -> tuple[list[Path], list[str]]:
        """Return the checkpoints from which a run can resume, and descriptions of damaged ones.

        The checkpoint that the tracker file names comes first, then the others, newest first. This does not read every
        byte, so it does not find all damage; `digest_problems` reads every byte.

        Raises:
            UserError: there are checkpoints, but all are damaged.
        """
        if is_foreign(self.directory / RELEASE) and self._tracks_release():
            return [self.directory / RELEASE], []
        iterations = self.iterations()
        problems = [f"{path}: {problem}" for path in iterations for problem in quick_problems(path)[:1]]
        tracked = self.tracked_step()
        if iterations and tracked is None:
            problems.append(f"{self.directory / TRACKER_FILE}: missing, or not the number of an iteration")
        elif tracked is not None and self.iteration(tracked) not in iterations:
            problems.append(f"{self.directory / TRACKER_FILE}: names iteration {tracked}, which does not exist")
        whole = [path for path in reversed(iterations) if not quick_problems(path)]
        if not whole and (iterations or tracked is not None):
            raise UserError(f"all checkpoints in {self.directory} are damaged or incomplete: {'; '.join(problems)}")
        # The tracker's iteration comes first: a user may set it to an earlier iteration.
        whole.sort(key=lambda path: step_of(path) != tracked)
        return whole, [f"damaged checkpoint: {problem}" for problem in problems]


def is_foreign(iteration: Path) -> bool:
    """Return whether a checkpoint was written by another program: by Megatron-LM or Megatron-Bridge.

    Their checkpoints have the same format, but neither the manifest nor the configuration of this package.
    """
    has = [(iteration / name).is_file() for name in (".metadata", "metadata.json", MANIFEST_FILE, "config.yaml")]
    return has == [True, True, False, False]


def stored_identity(iteration: Path) -> str | None:
    """Return, as JSON, the identity of the run that wrote a checkpoint; None if the file is missing or damaged."""
    import torch

    if is_foreign(iteration):
        return None
    try:
        # The class of the arguments that Megatron-LM looks for. Megatron registers it too, when it is imported; torch's
        # context manager would then remove it.
        torch.serialization.add_safe_globals([Namespace])
        identity = torch.load(iteration / "common.pt", map_location="cpu", weights_only=True)["state"]["identity"]
        return identity if isinstance(json.loads(identity), dict) else None
    except (OSError, KeyError, TypeError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError):
        return None


def _is_rest(iteration: Path) -> bool:
    """Return whether a directory contains a user's files, but none of the files of a checkpoint."""
    try:
        names = os.listdir(iteration)
    except OSError:  # it has just been removed, or is no directory
        return False
    written = {MANIFEST_FILE, *CHECKPOINT_FILES}
    return bool(names) and not any(name in written or name.endswith(WEIGHTS) for name in names)


def step_of(iteration: Path) -> int:
    match = _ITERATION.fullmatch(iteration.name)
    assert match, f"{iteration} is not named like a checkpoint"
    return int(match[1])


def quick_problems(iteration: Path, required: frozenset[str] = CHECKPOINT_FILES) -> list[str]:
    """Return problems of a checkpoint that are found without reading its files: in manifest, file names and sizes.

    Args:
        required: files that the manifest must list. Checkpoints of other programs have no manifest.
    """
    if is_foreign(iteration):
        return []
    try:
        manifest = read_manifest(iteration)
    except ValueError as error:
        return [str(error)]
    problems = []
    for name, (size, _) in manifest.items():
        path = iteration / name
        if Path(name).name != name:
            problems.append(f"{MANIFEST_FILE} names {name!r}, which is not a file of this directory")
        elif not path.is_file():
            problems.append(f"{name} is missing")
        elif path.stat().st_size != size:
            problems.append(f"{name} has {path.stat().st_size} bytes, not {size}")
    if not required <= set(manifest):
        problems.append(f"{MANIFEST_FILE} does not list a whole checkpoint")
    return problems


def digest_problems(iteration: Path, part: int = 0, parts: int = 1) -> list[str]:
    """Read a checkpoint's files; return a problem for each file whose content differs from the manifest.

    The files are divided into `parts` equal parts, and only part number `part` is read. Ranks can thus share the work.
    Checkpoints of other programs have no manifest to compare with.
    """
    if is_foreign(iteration):
        return []
    manifest = read_manifest(iteration)
    names = sorted(manifest)[part::parts]
    found = digests_of(iteration, names)
    return [f"{name}: its contents are damaged (SHA-256)" for name in names if found[name] != manifest[name]]
