"""Diagnoses deadlocks: tells what each rank is doing when it is asked.

All ranks are asked when the collective of a rank has timed out, or when a user creates the file `stacks/requested`.
Each rank then writes the phase that it is in and its Python stacks to `stacks/rank_00000.txt`. A fatal signal (NCCL
aborts a process whose collective timed out) writes the rank's own stacks there. A run that ends well removes the files.

The ranks hear of a request over the store of the process group, through connections of their own: a rank may be blocked
in the group's own connection. Only rank 0 looks for the user's file. Nothing is written before somebody asks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_rl.utils import torchrun

if TYPE_CHECKING:
    from torch.distributed import Store

POLL_SECONDS = 1.0
STORE_SECONDS = 30.0
"""How long a request to the store may take."""


class Watchdog:
    """The file of one rank, and the thread that answers when somebody asks.

    Args:
        directory: shared by all ranks; made if it is not there.
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
        """Say what this rank does from now on."""
        self.phase, self._since = phase, time.localtime()

    def ask_everyone(self, own: str) -> Path:
        """Have all ranks write their stacks, this one with `own` traceback, and give them a moment to."""
        self._own = own
        with contextlib.suppress(RuntimeError):  # the store is gone with rank 0
            self._store.add(self._key, 1)
        self._write()
        time.sleep(2.5 * POLL_SECONDS)
        return self.directory

    def close(self) -> None:
        """Remove this rank's file: the run ended well."""
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
        """Return whether the user's file is there, and remove it. A file system that fails for a moment has none."""
        with contextlib.suppress(OSError):
            if self._request.exists():
                self._request.unlink(missing_ok=True)
                return True
        return False

    def _write(self) -> None:
        """Write the phase and the stacks of all threads in place of earlier ones."""
        with self._writing, contextlib.suppress(OSError):
            self._file.seek(0)
            self._file.truncate()
            since = time.strftime("%Y-%m-%d %H:%M:%S", self._since)
            self._file.write(f"rank {self.rank}, {self.phase}, since {since}\n{self._own}")
            self._file.flush()
            faulthandler.dump_traceback(self._file, all_threads=True)


def own_store() -> Store:
    """Return a connection of this process's own to the store of the process group; one in memory where it is alone.

    A connection serves one request at a time, so the process group's own may be blocked for minutes.
    """
    from torch.distributed import HashStore, TCPStore

    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if torchrun.is_launched() and torchrun.world_size() > 1 and address and port:
        with contextlib.suppress(RuntimeError):  # the group has another kind of store: this rank tells of itself alone
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
    """Stop watching: the run ended well."""
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
