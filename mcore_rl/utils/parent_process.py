"""Sends a signal to a child process when its parent ends, so that the child ends too."""

import ctypes
import os
import signal
import sys

DEATH_SIGNAL_OPTION = 1
"""PR_SET_PDEATHSIG of Linux's prctl: sets the signal that a process gets when its parent ends."""


def signal_at_end_of(parent: int, number: int = signal.SIGKILL) -> None:
    """Make the kernel send signal `number` to this process when its parent ends; send it now if the parent has ended.

    On Linux, the signal is sent as soon as the thread that started this process ends, even if other threads of the
    parent still run. On other systems, the signal is sent only if the parent has ended before this call.

    Args:
        parent: process id of the parent.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DEATH_SIGNAL_OPTION, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)
