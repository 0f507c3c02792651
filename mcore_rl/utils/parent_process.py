"""Processes that serve their parent: they end with it, with all that they have started, and keep their pipes."""

import ctypes
import io
import os
import signal
import sys
from typing import TextIO

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


def end_with(parent: int) -> None:
    """Ensure that this process ends when its parent dies, and that its process group ends when this process dies.

    To end the group, a second process (the guard) waits until this process dies, and then kills the rest of the group.
    """
    own = os.getpid()
    signal_at_end_of(parent)
    if os.fork():
        return
    for number in (0, 1):  # the reader waits until no process has the pipe open
        os.close(number)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    signal_at_end_of(own, signal.SIGTERM)
    while os.getppid() == own:
        signal.sigwait([signal.SIGTERM])
    os.killpg(own, signal.SIGKILL)


def take_pipes() -> tuple[TextIO, TextIO]:
    """Return this process's standard input and output, for itself alone.

    Code that this process runs, and the processes that it starts, then read an empty standard input, and print into
    standard error.
    """
    pipes = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)  # a process that is killed has printed its lines
    return pipes
