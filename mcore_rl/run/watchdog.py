"""What each rank is doing, on disk, for the day when all of them wait for each other.

Every rank keeps a file `stacks/rank_00000.txt` that names the phase it is in. A rank whose collective
timed out asks all ranks for their Python stacks, which they write behind that line; a fatal signal (NCCL
aborts a process whose collective timed out) writes the rank's own. A run that ends well removes them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import threading
import time
from pathlib import Path

POLL_SECONDS = 0.5


class Watchdog:
    """The file of one rank, and the thread that answers when another asks.

    Args:
        directory: shared by all ranks; made if it is not there.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.rank, self.phase = directory, rank, ""
        self._request = directory / "requested"
        self._request.unlink(missing_ok=True)
        self._file = open(directory / f"rank_{rank:05d}.txt", "w")  # noqa: SIM115 (open for the process's life)
        faulthandler.enable(self._file)
        self._stopped = threading.Event()
        threading.Thread(target=self._answer, name="watchdog", daemon=True).start()

    def enter(self, phase: str) -> None:
        """Say what this rank does from now on."""
        self.phase = phase
        self._file.seek(0)
        self._file.truncate()
        self._file.write(f"rank {self.rank}, {phase}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
        self._file.flush()

    def ask_everyone(self, own: str) -> Path:
        """Write `own` traceback, have all ranks write their stacks, and give them a moment to."""
        self._file.write(own)
        self._file.flush()
        self._request.touch()
        time.sleep(4 * POLL_SECONDS)
        return self.directory

    def close(self) -> None:
        """The run ended well."""
        self._stopped.set()
        faulthandler.enable()
        self._file.close()
        for file in (Path(self._file.name), self._request):
            file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the last rank to end removes it
            self.directory.rmdir()

    def _answer(self) -> None:
        while not self._stopped.wait(POLL_SECONDS):
            if self._request.exists():
                faulthandler.dump_traceback(self._file, all_threads=True)
                return


_current: Watchdog | None = None


def start(directory: Path, rank: int) -> None:
    """Watch over this process from now on."""
    global _current
    _current = Watchdog(directory, rank)


def enter(phase: str) -> None:
    """Say what this rank does from now on; nothing where no watchdog was started."""
    if _current is not None:
        _current.enter(phase)


def phase() -> str:
    """Return the phase of this rank; "" where no watchdog was started."""
    return "" if _current is None else _current.phase


def stop() -> None:
    """The run ended well."""
    global _current
    if _current is not None:
        _current.close()
    _current = None


def explain(error: Exception, own_traceback: str) -> str:
    """Return the addition to a traceback of a collective that timed out; asks all ranks for their stacks."""
    if _current is None or "timed out" not in str(error).lower():
        return ""
    directory = _current.ask_everyone(own_traceback)
    return f"a collective took longer than parallel.timeout_seconds; what each rank was doing is in {directory}"
