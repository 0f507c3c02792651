"""Diagnosis of deadlocks: on request, each rank reports what it is doing.

All ranks report when a collective has timed out on a rank, or when a user creates the file `stacks/requested`. Each
rank then writes the phase that it is in and its Python stacks to its own file, for example `stacks/rank_00000.txt`. On
a fatal signal (NCCL aborts a process whose collective timed out), the rank's stacks are written to this file too. A run
that ends well removes the files.

Requests go through the store of the process group. Each rank opens a separate connection for the requests, because the
group's connection may be blocked. Only rank 0 looks for the user's file. Nothing is written before the first request.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_rl.utils import torchrun

if TYPE_CHECKING:
    from torch.distributed import Store

POLL_SECONDS = 1.0
STORE_SECONDS = 30.0
"""Time limit of a request to the store, in seconds."""


class Watchdog:
    """Writes the report of one rank, in a thread, when it is requested.

    Args:
        directory: directory of the reports of all ranks; it is created if it does not exist.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.rank, self.phase, self._since = directory, rank, "", time.localtime()
        self._request = directory / "requested"
        if rank == 0:
            self._request.unlink(missing_ok=True)
        self._file = open(directory / f"rank_{rank:05d}.txt", "w")  # noqa: SIM115 (open for the process's life)
        faulthandler.enable(self._file)
        self._own, self._writing = "", threading.Lock()
        self._store, self._key = own_store(), f"mcore_rl/stacks/{torchrun.restarts()}"
        self._answered = self._store.add(self._key, 0)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._answer, name="watchdog", daemon=True)
        self._thread.start()

    def enter(self, phase: str) -> None:
        """Set the phase that this rank is in from now on."""
        self.phase, self._since = phase, time.localtime()

    def ask_everyone(self, own: str) -> Path:
        """Request the stacks of all ranks, write this rank's stacks, and wait a moment for the other ranks.

        Args:
            own: traceback of this rank's error, for its report.
        """
        self._own = own
        with contextlib.suppress(RuntimeError):  # the store has ended with rank 0
            self._store.add(self._key, 1)
        self._write()
        time.sleep(2.5 * POLL_SECONDS)
        return self.directory

    def close(self) -> None:
        """Remove the file of this rank's report, after a successful run."""
        self._stopped.set()
        self._thread.join(STORE_SECONDS)
        faulthandler.enable()
        self._file.close()
        Path(self._file.name).unlink(missing_ok=True)
        if self.rank == 0:
            self._request.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the last rank to end removes it
            self.directory.rmdir()

    def _answer(self) -> None:
        while not self._stopped.wait(POLL_SECONDS):
            try:
                if self.rank == 0 and self._takes_request():
                    self._store.add(self._key, 1)
                asked = self._store.add(self._key, 0)
            except RuntimeError:  # the store is gone with rank 0, and the run with it
                return
            if asked != self._answered:
                self._answered = asked
                self._write()

    def _takes_request(self) -> bool:
        """Remove the user's request file; return whether it existed, or False if the file system fails."""
        with contextlib.suppress(OSError):
            if self._request.exists():
                self._request.unlink(missing_ok=True)
                return True
        return False

    def _write(self) -> None:
        """Write the report: replace the file's content by the phase and the stacks of all threads."""
        with self._writing, contextlib.suppress(OSError):
            self._file.seek(0)
            self._file.truncate()
            since = time.strftime("%Y-%m-%d %H:%M:%S", self._since)
            self._file.write(f"rank {self.rank}, {self.phase}, since {since}\n{self._own}")
            # First, because faulthandler ends after 100 threads, of which the main thread is the last.
            main = sys._current_frames().get(threading.main_thread().ident or 0)
            self._file.write(f"Main thread:\n{''.join(traceback.format_stack(main))}\n")
            self._file.flush()
            faulthandler.dump_traceback(self._file, all_threads=True)


def own_store() -> Store:
    """Return a separate connection to the store of the process group; for a single process, a store in memory.

    A connection serves requests one after the other, so the process group's own connection may be blocked for minutes.
    """
    from torch.distributed import HashStore, TCPStore

    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if torchrun.is_launched() and torchrun.world_size() > 1 and address and port:
        with contextlib.suppress(RuntimeError):  # another kind of store: this rank reports only about itself
            return TCPStore(
                address,
                int(port),
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=STORE_SECONDS),
            )
    return HashStore()


_current: Watchdog | None = None


def start(directory: Path, rank: int) -> None:
    """Start the watchdog of this process."""
    global _current
    _current = Watchdog(directory, rank)


def enter(phase: str) -> None:
    """Set the phase that this rank is in from now on; does nothing without a watchdog."""
    if _current is not None:
        _current.enter(phase)


def phase() -> str:
    """Return the phase of this rank; "" without a watchdog."""
    return "" if _current is None else _current.phase


def stop() -> None:
    """Stop the watchdog after a successful run."""
    global _current
    if _current is not None:
        _current.close()
    _current = None


def explain(error: Exception, own_traceback: str) -> str:
    """If `error` says that a collective timed out, request the stacks of all ranks; return text about them, or "".

    Args:
        own_traceback: traceback of the error, for this rank's report.
    """
    if _current is None or "timed out" not in str(error).lower():
        return ""
    directory = _current.ask_everyone(own_traceback)
    return f"a collective took longer than parallel.timeout_seconds; what each rank was doing is in {directory}"
