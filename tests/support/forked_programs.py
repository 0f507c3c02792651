"""Python programs in processes that are forked from the server of test processes.

A new interpreter needs 5 to 9 seconds of a core to import torch, transformers and Megatron; a forked process has
them. The program runs as `__main__` in its own session, with its own environment, folder, standard output and
error, and its exit status is that of the program. What happens while Python starts or ends is not tested by it.
"""

import atexit
import contextlib
import multiprocessing
import multiprocessing.connection
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch

GRACE_SECONDS = 5


class ForkedProgram:
    """Ranks of a running program, with the methods of `subprocess.Popen` that tests use.

    Args:
        arguments: what stands after `python`: the path of a script or `-m MODULE`, then its own arguments.
        processes: ranks. More than one find each other as they do under torchrun.
    """

    def __init__(self, arguments, environment=None, processes=1, cwd=None):
        self._directory = tempfile.TemporaryDirectory()
        self._files = [Path(self._directory.name) / name for name in ("stdout", "stderr")]
        environment = dict(os.environ if environment is None else environment)
        if processes > 1:  # this process is the store, as torchrun is
            self._store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            environment |= {
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port), "WORLD_SIZE": str(processes),
                "LOCAL_WORLD_SIZE": str(processes), "TORCHELASTIC_USE_AGENT_STORE": "True",
            }  # fmt: skip
        context = multiprocessing.get_context("forkserver")
        self._ranks = []
        for rank in range(processes):
            of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {}
            where = str(cwd or os.getcwd())
            process = context.Process(
                target=_run, args=(list(map(str, arguments)), environment | of_rank, where, self._files)
            )
            process.start()
            self._ranks.append(process)
        self.pid = self._ranks[0].pid

    @property
    def returncode(self):
        return self.poll()

    def poll(self):
        """Return the first exit status that is not 0, or 0, after every rank has ended; None before."""
        statuses = [rank.exitcode for rank in self._ranks]
        return None if None in statuses else next((status for status in statuses if status), 0)

    def communicate(self, timeout=60):
        """Return standard output and error of all ranks. If one fails, the others are ended.

        Raises:
            subprocess.TimeoutExpired: they have not ended within `timeout` seconds.
        """
        deadline, failed_at = time.monotonic() + timeout, None
        while self.poll() is None:
            now = time.monotonic()
            if now > deadline:
                raise subprocess.TimeoutExpired("forked program", timeout)
            if any(rank.exitcode for rank in self._ranks):
                failed_at = failed_at or now
                if now - failed_at > GRACE_SECONDS:
                    self.kill()
            multiprocessing.connection.wait([rank.sentinel for rank in self._ranks if rank.exitcode is None], 0.5)
        return tuple(file.read_text() if file.exists() else "" for file in self._files)

    def send_signal(self, number):
        for rank in self._ranks:
            if rank.exitcode is None:
                os.kill(rank.pid, number)

    def kill(self):
        """Kill every rank that is alive with all that it has started."""
        for rank in self._ranks:
            if rank.exitcode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(rank.pid, signal.SIGKILL)
                rank.kill()
                rank.join(GRACE_SECONDS)


def run_forked(arguments, environment=None, processes=1, cwd=None, timeout=90):
    """Run a program to its end; return its result as `subprocess.run(…, capture_output=True, text=True)` does."""
    program = ForkedProgram(arguments, environment, processes, cwd)
    try:
        out, err = program.communicate(timeout)
    finally:
        program.kill()
    return subprocess.CompletedProcess(arguments, program.returncode, out, err)


def _run(arguments, environment, cwd, files):
    os.setsid()
    for number, file in zip((1, 2), files, strict=True):
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server ignores it
    torch.set_num_threads(1)
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    is_module = arguments[0] == "-m"
    sys.argv = arguments[1:] if is_module else arguments
    sys.path[:0] = [cwd if is_module else str(Path(arguments[0]).parent), *paths]
    status = 0
    try:
        if is_module:
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as ended:
        status = _status_of(ended.code)
    except BaseException:
        traceback.print_exc()
        status = 1
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _status_of(code):
    """Return the exit status of a process that ends by `sys.exit(code)`."""
    if code is None or isinstance(code, int):
        return code or 0
    print(code, file=sys.stderr)
    return 1
