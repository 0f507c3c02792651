"""Checkpoints on disk: a directory for each iteration, which is complete or does not exist.

    DIRECTORY/iter_0000010/                          manifest.json lists every file's size and SHA-256
    DIRECTORY/latest_checkpointed_iteration.txt      written last

A checkpoint is written beside its name, flushed to the disk, and renamed when whole; so a directory of
that name is a whole checkpoint unless the disk damaged it, which the manifest tells.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.errors import UserError

TRACKER_FILE = "latest_checkpointed_iteration.txt"
MANIFEST_FILE = "manifest.json"
WEIGHTS = (".safetensors", ".distcp")
CHECKPOINT_FILES = frozenset({"common.pt", "metadata.json", ".metadata"})
_ITERATION = re.compile(r"iter_(\d+)")

FileDigests = dict[str, tuple[int, str]]
"""File name → (size in bytes, SHA-256)."""


@dataclass(frozen=True)
class CheckpointStore:
    """The checkpoints of one run."""

    directory: Path

    def iteration(self, step: int) -> Path:
        return self.directory / f"iter_{step:07d}"

    def iterations(self) -> list[Path]:
        """Committed checkpoints, oldest first."""
        found = [path for path in self.directory.glob("iter_*") if _ITERATION.fullmatch(path.name)]
        return sorted(found, key=step_of)

    def tracked_step(self) -> int | None:
        """Return the iteration in the tracker file; None if it is missing or not a number."""
        try:
            return int((self.directory / TRACKER_FILE).read_text())
        except (OSError, ValueError):
            return None

    def begin(self, step: int) -> Path:
        """An empty directory to write iteration `step` into."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for leftover in self.directory.glob(".iter_*.partial"):
            shutil.rmtree(leftover)
        # A name of its own: a writer left over from a run that was killed can only write into its own.
        return Path(tempfile.mkdtemp(prefix=f".{self.iteration(step).name}.", suffix=".partial", dir=self.directory))

    def commit(self, step: int, partial: Path, digests: FileDigests) -> Path:
        """Give a written directory its name, then let the tracker file point to it."""
        write_manifest(partial, digests)
        flush_directory(partial)
        final = self.iteration(step)
        if final.exists():  # of a run that was taken back to an earlier iteration
            remove_listed(final)
        if final.exists():  # with files in it that no run wrote
            final.rename(_unused(final.with_name(f"{final.name}.replaced")))
        os.replace(partial, final)
        self._point_tracker_to(step)
        return final

    def _point_tracker_to(self, step: int) -> None:
        temporary = self.directory / f".{TRACKER_FILE}.partial"
        temporary.write_text(f"{step}\n")
        _flush(temporary)
        os.replace(temporary, self.directory / TRACKER_FILE)
        _flush(self.directory)

    def prune(self, keep_last: int | None, keep_every: int | None, best: int | None = None) -> list[Path]:
        """Delete what retention does not keep, but never the newest checkpoint that is whole.

        Args:
            keep_last: how many of the newest stay; None keeps all.
            keep_every: iterations that are multiples of this stay too.
            best: this iteration stays in any case.
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
        """Checkpoints to resume from, the best first, and what was found wrong with others.

        Only what can be seen without reading every byte; `digest_problems` reads them.

        Raises:
            UserError: there are checkpoints, but every one is damaged.
        """
        iterations = self.iterations()
        problems = [f"{path}: {problem}" for path in iterations for problem in quick_problems(path)[:1]]
        tracked = self.tracked_step()
        if iterations and tracked is None:
            problems.append(f"{self.directory / TRACKER_FILE}: missing, or not the number of an iteration")
        elif tracked is not None and self.iteration(tracked) not in iterations:
            problems.append(f"{self.directory / TRACKER_FILE}: names iteration {tracked}, which is not there")
        whole = [path for path in reversed(iterations) if not quick_problems(path)]
        if not whole and (iterations or tracked is not None):
            raise UserError(f"no checkpoint in {self.directory} is whole: {'; '.join(problems)}")
        # What the tracker names comes first: a user may point it back to an earlier iteration.
        whole.sort(key=lambda path: step_of(path) != tracked)
        return whole, [f"damaged checkpoint: {problem}" for problem in problems]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def step_of(iteration: Path) -> int:
    match = _ITERATION.fullmatch(iteration.name)
    assert match, f"{iteration} is not named like a checkpoint"
    return int(match[1])


def digests_of(directory: Path, names: Iterable[str]) -> FileDigests:
    """Sizes and digests of files as they are on disk."""
    paths = {name: directory / name for name in names}
    return {name: (path.stat().st_size, digest_of_file(path)) for name, path in paths.items()}


def digest_of_file(path: Path) -> str:
    """SHA-256."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(directory: Path, digests: FileDigests) -> None:
    """List a directory's files in it, and let others read it, which mkdtemp's mode does not."""
    (directory / MANIFEST_FILE).write_text(json.dumps(digests, indent=1, sort_keys=True))
    directory.chmod(0o777 & ~_umask())


def read_manifest(iteration: Path) -> FileDigests:
    """Raises ValueError if there is none that can be read."""
    try:
        manifest = json.loads((iteration / MANIFEST_FILE).read_text())
        return {str(name): (int(size), str(digest)) for name, (size, digest) in manifest.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        raise ValueError(f"{MANIFEST_FILE} is missing or cannot be read") from None


def quick_problems(iteration: Path, required: frozenset[str] = CHECKPOINT_FILES) -> list[str]:
    """Return the errors in a directory's list of files and their sizes; `required` must be among them."""
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
    """Files whose contents are not what was written; part `part` of `parts` of them, for ranks to share."""
    manifest = read_manifest(iteration)
    names = sorted(manifest)[part::parts]
    found = digests_of(iteration, names)
    return [f"{name}: its contents are damaged (SHA-256)" for name in names if found[name] != manifest[name]]


def foreign_files(directory: Path) -> list[str]:
    """What is in a directory beside what its manifest lists, or is not as listed; [] if it does not exist.

    Of weights only the size is compared: nobody edits them by hand, and their digests take minutes.
    """
    if not (directory.exists() or directory.is_symlink()):
        return []
    if not directory.is_dir() or directory.is_symlink():
        return [directory.name]
    found = sorted(path.name for path in directory.iterdir())
    try:
        listed = read_manifest(directory)
    except ValueError:
        return found
    changed = [name for name in found if name in listed and not _is_as_listed(directory / name, *listed[name])]
    return [name for name in found if name not in {*listed, MANIFEST_FILE}] + changed


def _is_as_listed(path: Path, size: int, digest: str) -> bool:
    if not path.is_file() or path.stat().st_size != size:
        return False
    return path.suffix in WEIGHTS or digests_of(path.parent, [path.name])[path.name] == (size, digest)


def remove_listed(directory: Path) -> None:
    """Remove the files that a directory's manifest lists, and the directory if nothing else is in it."""
    try:
        listed = read_manifest(directory)
    except ValueError:
        return
    for name in (*listed, MANIFEST_FILE):
        if Path(name).name == name:
            (directory / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        directory.rmdir()


def replace_listed(new: Path, destination: Path) -> None:
    """Give the directory `new` the name of one that a manifest lists (or that is not there), which then goes.

    Raises:
        UserError: `destination` holds what no manifest lists.
    """
    if foreign := foreign_files(destination):
        raise UserError(f"{destination} holds {', '.join(foreign[:3])}, which is not ours to remove; see {new}")
    old = _unused(destination.with_name(f".{destination.name}.old"))
    if destination.exists():
        destination.rename(old)
    os.replace(new, destination)
    remove_listed(old)


def _unused(path: Path) -> Path:
    """`path`, or that name with the first number that is free."""
    numbered = (path.with_name(f"{path.name}.{n}") for n in itertools.count(1))
    return next(name for name in itertools.chain([path], numbered) if not name.exists())


def flush_directory(directory: Path) -> None:
    """Wait until a directory and its files are on the disk."""
    for entry in [*directory.iterdir(), directory]:
        _flush(entry)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
