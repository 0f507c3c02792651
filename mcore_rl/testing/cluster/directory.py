"""The output directory of a check: what a check writes there, and its lock. It needs no torch."""

from __future__ import annotations

import shutil
from pathlib import Path

from mcore_rl.errors import UserError
from mcore_rl.utils.lock_file import LockFile, LockHeld

MARK = "verify.json"
"""File by which a directory is recognized as the output directory of a check."""
LOCK = "verify.lock"
WRITTEN = (
    MARK, LOCK, "verify.html", "plan.json", "nodes",
    "models", "data", "configs", "results", "logs", "resume", "grpo", "speed",
    "verify.json.partial", "verify.html.partial",
)  # fmt: skip
"""Everything that a check writes to its output directory. A check that is killed may leave partial files."""


class CheckDirectory:
    """The output directory of a check. Nothing is written before `claim` is called."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = LockFile(path / LOCK)

    def claim(self) -> None:
        """Create the directory, or remove the results of an earlier check from it; lock and mark it.

        The lock ends with this process, or with `close`.

        Raises:
            UserError: the directory contains other files, another check writes there, or it cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._refuse_other_files()
            self._lock.take()
            # The mark comes first, so that the next check finds it if this one is killed.
            (self.path / MARK).write_text("{}\n")
            for name in WRITTEN:
                if name not in (MARK, LOCK):
                    path = self.path / name
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        except LockHeld as holder:
            raise UserError(
                f"--output {self.path}: is being written by another check ({holder}); name another directory"
            ) from None
        except OSError as error:
            raise UserError(f"--output {self.path}: cannot be written ({error.strerror})") from None

    def _refuse_other_files(self) -> None:
        names = {path.name for path in self.path.iterdir()}
        others = names - {*WRITTEN}
        if others or (names - {LOCK} and MARK not in names):
            raise UserError(
                f"--output {self.path}: contains files that no check has written "
                f"({', '.join(sorted(others or names)[:3])}); name another directory"
            )

    def close(self) -> None:
        """Release the lock, if this process holds it."""
        self._lock.release()
