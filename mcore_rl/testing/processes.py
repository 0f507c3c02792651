"""Execution of functions on several processes of this machine.

    results = run_processes(function, *arguments, world_size=2)     # one result per rank

Processes on the CPU are forked from a server that has imported torch and Megatron once, so they start fast. A process
that is forked after CUDA has been started cannot use CUDA, so processes on GPUs (`Start("cuda")`) import everything
themselves. A process ends when its function has returned: gloo's threads do not end with the process group, but only
with the process.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

import torch

from mcore_rl import platform
from mcore_rl.errors import TimeLimitError, WorkerError
from mcore_rl.testing import host_backend
from mcore_rl.testing.gpus import environment_of

MEETINGS = 3
"""Number of attempts to start processes. On a loaded machine, processes may fail to form their group."""

MOST_CASES = 8
"""Maximum number of cases that `run_cases` runs in the same processes."""

_PRELOAD = ["mcore_rl.testing.preload"]


@dataclass(frozen=True)
class Start:
    """The device of the ranks of `run_processes`, and how they communicate.

    backend: backend of torch.distributed. auto: gloo on the CPU; on GPUs NCCL if there is a GPU for each rank, else
        `host`, with which ranks share GPUs.
    spawns: start processes that import everything also on the CPU.
    """

    device: Literal["cpu", "cuda"] = "cpu"
    backend: str = "auto"
    spawns: bool = False

    @property
    def method(self) -> str:
        """How multiprocessing starts the ranks."""
        return "spawn" if self.spawns or self.device == "cuda" else "forkserver"

    def backend_for(self, world_size: int) -> str:
        """Return the backend for so many ranks. Call it in a rank, which sees the GPUs."""
        if self.backend != "auto":
            return self.backend
        if self.device == "cpu":
            return "gloo"
        return "nccl" if world_size <= len(platform.describe_gpus()) else host_backend.NAME


CPU = Start()


def run_processes(
    function: Callable[..., Any], *args: Any, world_size: int, timeout: float = 120, start: Start = CPU
) -> list[Any]:
    """Run `function(*args)` on ranks 0 … world_size − 1 of a process group; return the results in rank order.

    `function` must be importable by name, and its results picklable.

    Raises:
        WorkerError: a rank failed or died. All ranks have been killed.
        TimeLimitError: the ranks took longer than `timeout` seconds. All have been killed.
    """
    for _ in range(MEETINGS - 1):
        with contextlib.suppress(MeetingError):
            return _run_once(function, args, world_size, timeout, start)
    return _run_once(function, args, world_size, timeout, start)


def run_cases(
    cases: Sequence[tuple[Any, ...]], *, world_size: int, timeout: float = 120, start: Start = CPU
) -> list[list[Any]]:
    """Run several cases `(function, *arguments)` one after the other in the same processes.

    Return the results as results[case][rank]. Every case has its own process group. At most 8 cases are allowed,
    because gloo's threads stay after a group is destroyed, until the processes end.

    Raises:
        WorkerError: see `run_processes`; the cases after the failed one are not run.
    """
    if len(cases) > MOST_CASES:
        raise ValueError(f"run_cases: one start of processes can run at most {MOST_CASES} cases, got {len(cases)}")
    with tempfile.TemporaryDirectory() as directory:
        arguments = tuple(cases), directory, timeout, start
        ranks = run_processes(_run_in_turn, *arguments, world_size=world_size, timeout=timeout, start=start)
    return [list(of_case) for of_case in zip(*ranks, strict=True)]


def _run_in_turn(cases: Sequence[tuple[Any, ...]], directory: str, timeout: float, start: Start) -> list[Any]:
    from mcore_rl.models.megatron.parallel_state import destroy_parallel

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    results = []
    for number, (function, *arguments) in enumerate(cases):
        if number:
            _meet(rank, world_size, os.path.join(directory, str(number)), timedelta(seconds=timeout), start)
        results.append(function(*arguments))
        if torch.distributed.is_initialized():
            torch.distributed.barrier()  # no rank closes its connections while others still use them
        destroy_parallel()
    return results


class MeetingError(WorkerError):
    """The processes could not form their process group, so the function was not called."""


def _run_once(
    function: Callable[..., Any], args: tuple[Any, ...], world_size: int, timeout: float, start: Start
) -> list[Any]:
    context: Any = multiprocessing.get_context(start.method)
    if start.method == "forkserver":
        context.set_forkserver_preload(_PRELOAD)  # no effect if the server is running
    workers: dict[Connection, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        store = os.path.join(directory, "store")
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe(duplex=False)
                arguments = (theirs, function, args, rank, world_size, store, timeout, start)
                process = context.Process(target=_work, args=arguments)
                with environment_of(start.device):  # a process starts with its parent's environment
                    process.start()
                theirs.close()
                workers[ours] = process
            return _collect(list(workers), timeout)
        finally:
            for connection, process in workers.items():
                process.kill()
                connection.close()
            for process in workers.values():
                process.join(10)


def _collect(connections: list[Connection], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[str] = []
    pending = dict(zip(connections, range(len(connections)), strict=True))
    deadline = time.monotonic() + timeout
    while pending:
        # After a rank has failed, the others have only a moment to report their errors.
        remaining = min(deadline - time.monotonic(), 2.0 if failures else timeout)
        ready = wait(list(pending), timeout=max(remaining, 0))
        if not ready:
            break
        for connection in [c for c in pending if c in ready]:
            rank = pending.pop(connection)
            try:
                failure, results[rank] = connection.recv()
            except EOFError:
                failure, results[rank] = WorkerError, "the process died"
            if failure is MeetingError:  # other ranks may wait for it until their timeout
                raise MeetingError(f"rank {rank}: {results[rank]}")
            if failure is not None:
                failures.append(f"rank {rank}: {results[rank]}")
    if failures:
        raise WorkerError("\n".join(failures))
    if pending:
        raise TimeLimitError(f"ranks {sorted(pending.values())} took longer than {timeout} s")
    return [results[rank] for rank in range(len(connections))]


def _work(
    connection: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    world_size: int,
    store: str,
    timeout: float,
    start: Start,
) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # A collective that autograd does not track gives wrong gradients: make torch's warning an error.
    warnings.filterwarnings("error", message=".*autograd kernel was not registered.*")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    platform.initialize_platform()  # already done if the server has imported Megatron
    try:
        _meet(rank, world_size, store, timedelta(seconds=timeout), start)
    except BaseException:
        connection.send((MeetingError, traceback.format_exc()))
    else:
        try:
            if platform.device().type != start.device:
                raise WorkerError(
                    f"Start({start.device!r}): the rank runs on {platform.device()}, because it sees no GPU"
                )
            connection.send((None, function(*args)))
        except BaseException:
            connection.send((WorkerError, traceback.format_exc()))
    connection.close()
    # Peers may still be reading from this process; the caller ends it.
    time.sleep(timeout)


def _meet(rank: int, world_size: int, path: str, timeout: timedelta, start: Start) -> None:
    """Create the process group and wait until all ranks have joined it.

    Without waiting, a rank that finishes early would close its connections and prevent others from joining.
    """
    store = torch.distributed.FileStore(path, world_size)
    store.set_timeout(timeout)
    host_backend.register()
    backend = start.backend_for(world_size)
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    store.set(f"met/{rank}", "")
    store.wait([f"met/{other}" for other in range(world_size)])
