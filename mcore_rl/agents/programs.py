"""Starts the programs of sessions, and ends them with all processes that they have started."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Protocol

from mcore_rl.agents.agent_session import AgentSession
from mcore_rl.agents.program_worker import STREAM_LIMIT
from mcore_rl.config import EnvironmentConfig
from mcore_rl.environments.judge_processes import judge_variables
from mcore_rl.errors import UserError
from mcore_rl.utils.process_groups import GroupKeeper

_ROOT = Path(__file__).parents[2]
SOURCE = str(_ROOT) if (_ROOT / "pyproject.toml").is_file() else "PATH, of its wheel"
"""Path from which pip installs this package. By its name, pip would install whatever the index has under that name."""

GRACE_SECONDS = 5.0
"""Time that a coroutine has to end after it was cancelled, before its process is killed."""

BEGIN_WHEN_TOLD = "import os, sys\nif os.read(0, 1):\n    os.execvp(sys.argv[1], sys.argv[1:])"
"""Code that waits for a byte on its standard input and then runs a command; if the input is empty, it ends. Otherwise a
trainer that is killed before it tells the keeper of process groups would leave the command running."""


class ProgramError(Exception):
    """Raised if a program fails; the message continues the sentence "Its program …"."""


class Programs(Protocol):
    """Runs programs. All methods run in the event loop of the endpoint."""

    async def start(self) -> None:
        """Prepare to run programs.

        Raises:
            UserError: the program cannot be run at all.
        """

    async def run(self, session: AgentSession) -> Any:
        """Run the program of a session; return its reward, or None if it returns none.

        Raises:
            ProgramError: the program failed.
        """

    async def close(self) -> None:
        """Kill all programs and their child processes."""


def programs_of(config: EnvironmentConfig, log: Path | None) -> Programs:
    """Return an object that runs the program of the configuration.

    Args:
        log: file for everything that programs print; None to discard it.
    """
    program = config.program
    assert program is not None, "checked by the configuration"
    if config.runs_coroutines:
        assert isinstance(program, str)
        return CoroutinePrograms(config, program, log)
    return CommandPrograms(config, shlex.split(program) if isinstance(program, str) else list(program), log)


def check_program(config: EnvironmentConfig) -> None:
    """Check that sessions can be served and that the program exists.

    Raises:
        UserError: a package is missing, or the program cannot be loaded.
    """
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"environment.name=agent: needs {' and '.join(missing)}; install the extra `agents`: "
            "pip install 'mcore_rl[agents]'"
        )
    programs = programs_of(config.model_copy(update={"num_workers": 1}), None)

    async def start_and_close() -> None:
        try:
            await programs.start()
        finally:
            await programs.close()

    asyncio.run(start_and_close())


def _open_log(log: Path | None) -> IO[bytes]:
    """Open the log for appending; without a log, a file that vanishes when it is closed."""
    return tempfile.TemporaryFile() if log is None else open(log, "ab+")


def _last_line(log: IO[bytes], start: int) -> str:
    """Return the last line that was printed into a log after position `start`."""
    log.seek(start)
    lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"


def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill a process and all processes that it has started, if it has not been waited for."""
    if process.returncode is None:
        _kill_group(process)


def _kill_group(process: asyncio.subprocess.Process) -> None:
    """Kill the process group of a process that still runs, or that has just ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


class CommandPrograms:
    """Runs a command for each session. Base URLs and key are in its environment; its standard input has the session.

    The environment has `OPENAI_BASE_URL`, `OPENAI_API_KEY`, `ANTHROPIC_BASE_URL`, `ANTHROPIC_API_KEY` and
    `AGENT_REWARD_URL`. The standard input has a line of JSON with `record` and `messages`.
    """

    def __init__(self, config: EnvironmentConfig, command: Sequence[str], log: Path | None) -> None:
        self.config, self.command, self.log = config, list(command), log
        self._running, self._keeper = set[asyncio.subprocess.Process](), GroupKeeper()

    async def start(self) -> None:
        if shutil.which(self.command[0]) is None:
            raise UserError(f"environment.program: the command {self.command[0]!r} does not exist")

    async def run(self, session: AgentSession) -> None:
        address = {
            "OPENAI_BASE_URL": session.base_url,
            "OPENAI_API_KEY": session.api_key,
            "ANTHROPIC_BASE_URL": session.anthropic_base_url,
            "ANTHROPIC_API_KEY": session.api_key,
            "AGENT_REWARD_URL": f"{session.anthropic_base_url}/reward",
        }
        with _open_log(self.log) as printed:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", "-c", BEGIN_WHEN_TOLD, *self.command),
                stdin=asyncio.subprocess.PIPE,
                stdout=printed,
                stderr=printed,
                start_new_session=True,  # its child processes end with it
                env=judge_variables(self.config, os.environ) | address,
            )
        self._running.add(process)
        self._keeper.add(process.pid)
        try:
            told = json.dumps({"record": session.record, "messages": session.messages})
            await process.communicate(b"\n" + told.encode() + b"\n")
        finally:
            _kill_group(process)
            self._keeper.remove(process.pid)
            self._running.discard(process)
        if process.returncode:
            how = f"the signal {-process.returncode}" if process.returncode < 0 else f"status {process.returncode}"
            raise ProgramError(f"ended with {how}")

    async def close(self) -> None:
        for process in list(self._running):
            _kill(process)
            await process.wait()
        self._keeper.close()


class CoroutinePrograms:
    """Runs coroutines in `environment.num_workers` processes, each of which runs many sessions at once."""

    def __init__(self, config: EnvironmentConfig, program: str, log: Path | None) -> None:
        self.config, self.program, self.log = config, program, log
        self.python = str(config.agent.python or sys.executable)
        self.variables = judge_variables(config, os.environ)
        if config.agent.python is not None:  # as in the activated environment, so that its programs are found
            directory = str(config.agent.python.parent.absolute())
            self.variables["PATH"] = os.pathsep.join([directory, os.environ.get("PATH", "")])
        self._workers, self._choosing, self._keeper = list[_Worker](), asyncio.Lock(), GroupKeeper()

    async def start(self) -> None:
        for _ in range(self.config.num_workers):
            self._workers.append(await self._new_worker())

    async def _new_worker(self) -> _Worker:
        with _open_log(self.log) as printed:
            start = printed.seek(0, os.SEEK_END)
            try:
                process = await asyncio.create_subprocess_exec(
                    *(self.python, "-m", "mcore_rl.agents.program_worker"),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=printed,
                    start_new_session=True,
                    env=self.variables,
                    limit=STREAM_LIMIT,
                )
            except OSError as error:
                raise UserError(f"environment.agent.python: {self.python} cannot be started: {error}") from None
            self._keeper.add(process.pid)
            worker = _Worker(process)
            worker.tell({"program": self.program, "verifiers": self.config.agent.verifiers})
            problem = await self._problem_of(worker, printed, start)
        if problem is not None:
            await self._end(worker)
            raise UserError(f"environment.program: {self.program} {problem}")
        worker.begin()
        return worker

    async def _problem_of(self, worker: _Worker, printed: IO[bytes], start: int) -> str | None:
        """Wait until a process is ready; return why it is not, in words that continue "The program …"."""
        try:
            told = await asyncio.wait_for(worker.read(), self.config.start_seconds)
        except TimeoutError:
            return f"was not ready within environment.start_seconds={self.config.start_seconds:g}"
        if told is None:
            needed = f"; {self.python} needs mcore_rl: pip install --no-deps {SOURCE}" * bool(self.config.agent.python)
            return f"ended when it was started: {_last_line(printed, start)}{needed}"
        return str(told["error"]) if "error" in told else None

    async def _end(self, worker: _Worker) -> None:
        await worker.close()
        self._keeper.remove(worker.process.pid)

    async def run(self, session: AgentSession) -> Any:
        async with self._choosing:  # sessions that start together must not each replace the same process
            place = min(range(len(self._workers)), key=lambda n: len(self._workers[n].answers))
            if self._workers[place].is_gone:
                self._keeper.remove(self._workers[place].process.pid)
                self._workers[place] = await self._new_worker()
            worker = self._workers[place]
            future = worker.answers[session.id] = asyncio.get_running_loop().create_future()
        worker.tell({"start": asdict(session)})
        try:
            told = await future
        except asyncio.CancelledError:
            worker.tell({"cancel": session.id})
            asyncio.get_running_loop().call_later(GRACE_SECONDS, worker.kill_if_running, session.id)
            raise
        if "error" in told:
            raise ProgramError(str(told["error"]))
        return told["reward"]

    async def close(self) -> None:
        await asyncio.gather(*map(self._end, self._workers))
        self._keeper.close()


class _Worker:
    """A process that runs coroutines.

    answers: futures of the answers, by session.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.answers = dict[str, asyncio.Future[Any]]()
        self.is_gone = False

    def tell(self, value: Any) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.process.stdin.write(json.dumps(value).encode() + b"\n")

    async def read(self) -> dict[str, Any] | None:
        """Return what the process tells when it is ready, or why it is not; None if it has ended."""
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        return dict(json.loads(line)) if line else None

    def begin(self) -> None:
        self._reading = asyncio.ensure_future(self._read_answers())

    async def _read_answers(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            told = json.loads(line)
            if (future := self.answers.pop(told["id"], None)) is not None and not future.done():
                future.set_result(told)
        self.is_gone = True
        _kill_group(self.process)  # what it has started
        await self.process.wait()
        for future in self.answers.values():
            if not future.done():
                future.set_result({"error": "lost its process, which has ended"})
        self.answers.clear()

    async def close(self) -> None:
        """Let the process cancel its sessions and end; kill it if it does not."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), GRACE_SECONDS / 2)
        _kill(self.process)
        await self.process.wait()

    def kill_if_running(self, session_id: str) -> None:
        """Kill the process if the session's coroutine has not ended after it was cancelled."""
        if session_id in self.answers:
            _kill(self.process)
