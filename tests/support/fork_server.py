"""The server from which test processes are forked: one for all workers of a suite, and for the forked processes."""

import multiprocessing
import os
from multiprocessing import forkserver
from pathlib import Path

import pytest

ADDRESS = "TEST_FORK_SERVER"
"""Variable with the server's address, for the workers of a parallel run."""
PRELOAD = ["preload_in_server", "mcore_rl.testing.preload"]


def serve():
    """Start the server, which imports everything while this process goes on, or use the one of a parallel run."""
    if address := os.environ.get(ADDRESS):
        forkserver._forkserver._forkserver_address = address
        # The server ends with the process that started it, which has the other end of the pipe that is meant here.
        forkserver._forkserver._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)
        share()
        return
    # The server checks shapes too; it finds this folder by the environment that it starts with.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
        forkserver.ensure_running()


def share():
    """Let this process, and those that are forked from it, use the server whose address they have."""
    forkserver._forkserver.ensure_running = lambda: None


def serve_workers():
    """Start the server for the workers that this process starts."""
    serve()
    os.environ[ADDRESS] = forkserver._forkserver._forkserver_address
