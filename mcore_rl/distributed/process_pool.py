"""A pool of gloo processes, started once, that runs ordinary functions on any number of ranks.

    with DistributedPool(4) as pool:
        results = pool.run(function, *arguments, world_size=2)     # one result a rank

Every rank gets a fresh process group (initialised through a file, so ports cannot clash) and a time limit.
A failing rank's own traceback is what the caller sees.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch


class WorkerError(RuntimeError):
    """A function failed on a rank; the message holds that rank's traceback."""


class DistributedPool:
    """`size` worker processes on this machine; more are started when a larger world is asked for."""

    def __init__(self, size: int = 1) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[tuple[Any, Connection]] = []
        self._grow(size)

    def __enter__(self) -> DistributedPool:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def run(self, function: Callable[..., Any], *args: Any, world_size: int, timeout: float = 120) -> list[Any]:
        """`function(*args)` on ranks 0 … world_size − 1; their results in rank order.

        `function` must be importable by name, its results picklable.

        Raises:
            WorkerError: a rank failed or took longer than `timeout` seconds; all workers are then replaced.
        """
        self._grow(world_size)
        with tempfile.TemporaryDirectory() as directory:
            store = os.path.join(directory, "store")
            for rank in range(world_size):
                self._workers[rank][1].send((function, args, rank, world_size, store, timeout))
            return self._collect(world_size, timeout)

    def _collect(self, world_size: int, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        pending = {self._workers[rank][1]: rank for rank in range(world_size)}
        failures: list[str] = []
        while pending:
            # Once a rank has failed the others only get a moment to tell their part.
            remaining = min(deadline - time.monotonic(), 2.0 if failures else float("inf"))
            ready = wait(list(pending), timeout=max(remaining, 0))
            if not ready:
                break
            for connection in [c for c in pending if c in ready]:
                rank = pending.pop(connection)
                try:
                    ok, value = connection.recv()
                except EOFError:
                    ok, value = False, "the process died"
                results[rank] = value
                if not ok:
                    failures.append(f"rank {rank}: {value}")
        if failures or pending:
            self.close()
            raise WorkerError("\n".join(failures) or f"ranks {sorted(pending.values())} took longer than {timeout} s")
        return [results[rank] for rank in range(world_size)]

    def _grow(self, size: int) -> None:
        while len(self._workers) < size:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_work, args=(theirs,), daemon=False)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def close(self) -> None:
        """End all workers, whatever they do."""
        for process, connection in self._workers:
            process.kill()
            connection.close()
        for process, _ in self._workers:
            process.join(10)
        self._workers = []


def _work(connection: Connection) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # A collective that autograd cannot see gives wrong gradients: never only a warning.
    warnings.filterwarnings("error", message=".*autograd kernel was not registered.*")
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        function, args, rank, world_size, store, timeout = task
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
        try:
            torch.distributed.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout),
            )
            result = function(*args)
            connection.send((True, result))
        except BaseException:
            connection.send((False, traceback.format_exc()))
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
