"""A lock on a directory: a file that names the process which writes there. The lock ends with its process."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from pathlib import Path
from typing import Literal

import psutil


class LockHeld(Exception):
    """Another process holds the lock. The text names this process: its pid and host."""


class LockFile:
    """The lock of a directory, which is the file `path` in it. Nothing is written before `take` is called."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1

    @property
    def is_taken(self) -> bool:
        """Whether this object holds the lock."""
        return self._descriptor >= 0

    def is_foreign(self) -> bool:
        """Return whether the file has content that is not a lock's."""
        return self.path.is_file() and bool(text := self.path.read_bytes()) and not _holder(text)

    def state(self) -> Literal["free", "held", "left"]:
        """Return the state of the lock, without changing it.

        "held": its process is running. "left": a killed process has left it. "free": there is no lock.
        """
        try:
            holder = _holder(self.path.read_bytes())
        except OSError:
            return "free"
        return "held" if _may_live(holder) else "left"

    def take(self) -> str:
        """Take the lock until `release` or the end of this process.

        Returns:
            The pid and host of a killed process that had left its lock; "" if there is none.

        Raises:
            LockHeld: another process holds the lock.
            OSError: the file cannot be written.
        """
        while True:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            holder = _holder(os.read(descriptor, 4096))
            # A record lock. Unlike a lock by flock, the processes that write checkpoints do not inherit it.
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = False
            except OSError as error:
                held = error.errno in (errno.EACCES, errno.EAGAIN) or _may_live(holder)
            if held:
                os.close(descriptor)
                raise LockHeld(_name(holder))
            if self.path.exists() and os.fstat(descriptor).st_ino == self.path.stat().st_ino:
                break
            os.close(descriptor)  # the holder has just removed the file
        self._descriptor = descriptor
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, own_lock().encode(), 0)
        return _name(holder) if holder else ""

    def release(self) -> None:
        """Release the lock, if this object holds it, and remove its file."""
        if self.is_taken:
            self.path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1


def own_lock() -> str:
    """Return the text that this process writes into a lock file: its pid and host."""
    return json.dumps({"pid": os.getpid(), "host": socket.gethostname()}) + "\n"


def _holder(text: bytes) -> dict[str, object]:
    try:
        holder = json.loads(text)
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) and set(holder) == {"pid", "host"} else {}


def _name(holder: dict[str, object]) -> str:
    return f"pid {holder.get('pid', 'unknown')} on {holder.get('host', 'an unknown host')}"


def _may_live(holder: dict[str, object]) -> bool:
    """Return whether the process named in a lock file may be running: its pid exists, or it is on another host."""
    if not holder:
        return False
    return holder.get("host") != socket.gethostname() or psutil.pid_exists(int(str(holder.get("pid", 0))))
