"""The process that writes a rank's shards, forked from the server of test processes.

A new interpreter needs 2 seconds of a core to import torch and its checkpoints, which is more than most of the runs
need that the tests start. The forked process runs the same code over the same socket.
"""

import contextlib
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
import types

from mcore_rl.utils import shard_process

LAUNCH = shard_process.launch
"""How a run starts the process outside of tests."""


def fork_writers():
    """Fork the writing processes that this process, and those that are forked from it, start from now on."""
    shard_process.launch = ForkedWriter


class ForkedWriter:
    """A writing process, with the members of `subprocess.Popen` that its handle uses."""

    def __init__(self, trainer):
        context = multiprocessing.get_context("forkserver")
        self._process = context.Process(target=_serve, args=(os.getpid(), trainer), daemon=True)
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")  # the process would run the trainer's program again
        try:
            self._process.start()
        finally:
            sys.modules["__main__"] = main
        multiprocessing.process._children.discard(self._process)  # an exit would wait for its end
        self.pid = self._process.pid

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self._process.exitcode

    def kill(self):
        self._process.kill()

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("forked writer", timeout)
        return self._process.exitcode


def _serve(parent, trainer):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    shard_process.ignore_stop_signals()
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    with trainer, contextlib.suppress(ConnectionError):  # the trainer may end before it has read a message
        shard_process.serve(trainer)


def _end_with(parent):
    try:
        end = os.pidfd_open(parent)
    except ProcessLookupError:
        pass
    else:
        select.select([end], [], [])
    os.kill(os.getpid(), signal.SIGKILL)
