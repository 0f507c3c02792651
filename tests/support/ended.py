"""Helpers for processes: whether one has ended, and one that ends with a test."""

import os
import signal
import time
from contextlib import contextmanager, suppress

import psutil


def has_ended(process_id):
    """Return whether a process does not exist any more, or only as an entry that its parent has not read."""
    try:
        return psutil.Process(process_id).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_for_end(process_id, seconds=60):
    """Return when a process has ended; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not has_ended(process_id):
        assert time.monotonic() < deadline, f"process {process_id} is still running"
        time.sleep(0.05)


@contextmanager
def kept_until_end(process):
    """Context with a process that leads a group; at its end, kill the group if the process still runs."""
    try:
        yield process
    finally:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
