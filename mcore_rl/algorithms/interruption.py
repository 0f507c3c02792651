"""Stopping between two steps when the scheduler asks for it."""

from __future__ import annotations

import os
import signal
from types import FrameType

import torch

from mcore_rl import platform

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Interruption:
    """Takes SIGTERM and SIGUSR1 (Slurm's notice of pre-emption) as a wish to stop after the step.

    A second signal ends the process at once.
    """

    def __init__(self) -> None:
        self._received = 0
        for number in SIGNALS:
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._received:
            os._exit(128 + number)
        self._received = number

    def requested(self) -> str | None:
        """The signal's name if any rank has received one; the same answer on every rank."""
        received = torch.tensor(self._received, device=platform.device())
        torch.distributed.all_reduce(received, op=torch.distributed.ReduceOp.MAX)
        return signal.Signals(int(received)).name if received else None
