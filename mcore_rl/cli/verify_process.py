"""A process of `mcore-rl verify`, with its log and its time limit."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from mcore_rl.utils.parent_process import signal_at_end_of

POLL_SECONDS = 0.2
STACK_SECONDS = 2.0
"""Seconds in which the ranks write their stacks before they are killed at the time limit."""
LONGEST_REASON = 300


@dataclass(frozen=True)
class Ended:
    """The end of a process.

    status: its exit status; None if it was killed, because the time was over or another node's process had failed.
    reason: first line of its error; "" if there is none.
    is_cut_off: whether it was killed because its time was over.
    """

    status: int | None
    seconds: float
    reason: str
    is_cut_off: bool = False


class Interrupted(Exception):
    """This program has received a signal that ends it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Signals:
    """Notes SIGINT, SIGTERM and SIGHUP, so that a running process and all its descendants can be killed first."""

    def __init__(self) -> None:
        self.received = 0
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:
        self.received = self.received or number

    def check(self) -> None:
        """Raise `Interrupted` if a signal has been received."""
        if self.received:
            raise Interrupted(self.received)


def run_process(
    arguments: Sequence[str],
    log: Path,
    limit: float,
    signals: Signals,
    is_over: Callable[[], bool] = lambda: False,
    stack_signal: int | None = None,
) -> Ended:
    """Run `python ARGUMENTS` to its end, with its output in the file `log`.

    The process and all its descendants are killed after `limit` seconds, if `is_over()` becomes true, or if this
    program receives a signal. If this program is killed, they get SIGTERM.

    Args:
        is_over: function that returns whether waiting any longer is useless.
        stack_signal: signal at which the ranks write their stacks to the log; sent to them before they are killed at
            the time limit.

    Raises:
        Interrupted: this program has received a signal.
    """
    started, status, reason, family, is_cut_off = time.monotonic(), None, "", Family(), False
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            # A launcher passes SIGTERM on to its ranks.
            preexec_fn=partial(signal_at_end_of, os.getpid(), signal.SIGTERM),
        )
        try:
            while (status := process.poll()) is None:
                signals.check()
                family.look(process.pid)
                if time.monotonic() - started >= limit:
                    reason, is_cut_off = f"took longer than its {limit:.0f} s", True
                    family.write_stacks(stack_signal)
                    break
                if is_over():
                    reason = "failed on another node"
                    break
                time.sleep(POLL_SECONDS)
        finally:
            family.look(process.pid)
            process.kill()
            family.kill()
            process.wait()
    seconds = time.monotonic() - started
    if status:
        reason = first_error(log.read_text(errors="replace")) or f"ended with status {status}"
    return Ended(status, seconds, reason, is_cut_off)


class Family:
    """All descendants of a process. torchrun starts each rank in a separate session, so no signal reaches all of them.

    The descendants are recorded while the process runs, because they have another parent after its end.
    """

    def __init__(self) -> None:
        self._members: dict[int, psutil.Process] = {}

    def look(self, pid: int) -> None:
        """Note the present descendants of the process `pid`."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._members.update((one.pid, one) for one in psutil.Process(pid).children(recursive=True))

    def write_stacks(self, number: int | None) -> None:
        """Send the signal at which ranks write their stacks, and give them time to do so; None: do nothing."""
        if number is not None:
            self._send(number)
            time.sleep(STACK_SECONDS)

    def kill(self) -> None:
        self._send(signal.SIGKILL)
        psutil.wait_procs(list(self._members.values()), timeout=10)

    def _send(self, number: int) -> None:
        for member in self._members.values():
            with contextlib.suppress(psutil.NoSuchProcess):  # psutil also compares the time of its start
                member.send_signal(number)


_ERROR = re.compile(r"^(?:\[rank \d+\] )?error: (.*)$", re.MULTILINE)
_TRACEBACK = re.compile(
    r"^(?:\[rank (\d+)\] )?Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)*(\S.*)$", re.MULTILINE
)
_ENDED = re.compile(r"^error: (rank \d+ was ended by \w+)$", re.MULTILINE)


def first_error(text: str) -> str:
    """Return the line of a log that contains the cause of a failure; "" if there is none.

    The line names a rank that a signal has ended, or is the first error line, or the error of the first traceback.
    Later errors often follow from the first one.
    """
    if found := _ENDED.search(text):
        return found[1]
    if found := _ERROR.search(text):
        return found[1][:LONGEST_REASON]
    if found := _TRACEBACK.search(text):
        return (f"rank {found[1]}: " if found[1] else "") + found[2][:LONGEST_REASON]
    return ""
