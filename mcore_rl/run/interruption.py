"""Stopping between two steps when the user or the scheduler asks for it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType

import torch

from mcore_rl import platform
from mcore_rl.utils.torchrun import is_under_torchrun, rank

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Interruption:
    """Takes Ctrl-C, SIGTERM and SIGUSR1 (Slurm's notice of pre-emption) as a wish to stop after the step.

    A second signal ends the process at once. torchrun hands a first Ctrl-C on to the ranks and waits for them; a
    second one ends torchrun alone, so the ranks then end with it.

    Args:
        save_seconds: how often, by the clock of rank 0, `save_is_due`; None for never.
    """

    def __init__(self, save_seconds: float | None = None) -> None:
        self._received, self._parent = 0, os.getppid()
        self.save_seconds, self._saved = save_seconds, time.monotonic()
        self._clock_is_mine = rank() == 0
        self.save_is_due = False
        for number in SIGNALS:
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._received:
            os._exit(128 + number)
        self._received = number
        if self._clock_is_mine:
            name = signal.Signals(number).name
            sys.stderr.write(f"{name}: finishing the step and saving; once more ends at once\n")
        if number == signal.SIGINT and is_under_torchrun():
            threading.Thread(target=self._end_with_parent, daemon=True).start()

    def _end_with_parent(self) -> None:
        while os.getppid() == self._parent:
            time.sleep(0.2)
        os._exit(128 + self._received)

    def requested(self) -> str | None:
        """The signal's name if any rank has received one; the same answer on every rank, as is `save_is_due`."""
        seconds = time.monotonic() - self._saved
        due = self._clock_is_mine and self.save_seconds is not None and seconds >= self.save_seconds
        both = torch.tensor([self._received, int(due)], device=platform.device())
        torch.distributed.all_reduce(both, op=torch.distributed.ReduceOp.MAX)
        received, self.save_is_due = int(both[0]), bool(both[1])
        return signal.Signals(received).name if received else None

    def saved(self) -> None:
        """A checkpoint has been begun: the next is due a whole interval later."""
        self._saved = time.monotonic()
