"""Process that runs programs that are coroutine functions of Python, or environments of the package `verifiers`.

It reads lines of JSON from its standard input: first its configuration, then {"start": …} and {"cancel": ID}. It
answers each session with a line {"id": ID, "reward": …} or {"id": ID, "error": TEXT}. At the end of its input it
cancels the running sessions. Everything that programs print goes to standard error.

It needs only Python's standard library and the program's packages, so that it can run in another environment than the
trainer (`environment.agent.python`).
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, TextIO

from mcore_rl.agents.agent_session import AgentSession
from mcore_rl.agents.verifiers_program import PREFIX, VerifiersProgram
from mcore_rl.utils.parent_process import take_pipes

Program = Callable[["AgentSession"], Awaitable[Any]]
STREAM_LIMIT = 2**28
"""Largest number of bytes of a line of JSON, in both directions."""


def load_program(name: str) -> Program:
    """Return the program `module:function`.

    Raises:
        ValueError: there is no such program. The message continues the sentence "The program …".
    """
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function, None)
    except ImportError as error:
        raise ValueError(f"cannot be imported: {error}") from None
    if not callable(found):
        raise ValueError(f"is missing: {module} has no function {function!r}")
    if not inspect.iscoroutinefunction(found):
        raise ValueError("must be a coroutine: write `async def`")
    return found


async def opened(told: Mapping[str, Any], stack: AsyncExitStack) -> Program:
    """Return the program of a configuration; what it holds while it runs is released with `stack`.

    Raises:
        ValueError: see `load_program` and `VerifiersProgram`.
    """
    name = told["program"]
    if not name.startswith(PREFIX):
        return load_program(name)
    program = VerifiersProgram(name.removeprefix(PREFIX), told["verifiers"])
    await stack.enter_async_context(program.serving())
    return program


async def serve(program: Program, answer: Callable[[dict[str, Any]], None], commands: TextIO) -> None:
    """Run the sessions that `commands` names, until it ends; then cancel those that still run."""
    reader, tasks = asyncio.StreamReader(limit=STREAM_LIMIT), dict[str, asyncio.Task[None]]()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), commands)
    while line := await reader.readline():
        told = json.loads(line)
        if (ended := told.get("cancel")) is not None:
            if ended in tasks:
                tasks[ended].cancel()
            continue
        session = AgentSession(**told["start"])
        task = tasks[session.id] = asyncio.ensure_future(_run(program, session, answer))
        task.add_done_callback(partial(_forget, tasks, session.id))
    running = list(tasks.values())
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def _forget(tasks: dict[str, asyncio.Task[None]], session_id: str, _: asyncio.Task[None]) -> None:
    tasks.pop(session_id, None)


async def _run(program: Program, session: AgentSession, answer: Callable[[dict[str, Any]], None]) -> None:
    try:
        answer({"id": session.id, "reward": await program(session)})
    except asyncio.CancelledError:
        answer({"id": session.id, "error": "it was cancelled"})
    except BaseException as error:
        traceback.print_exception(error)
        answer({"id": session.id, "error": f"{type(error).__name__}: {error}"})
        if not isinstance(error, Exception):
            raise


def main() -> None:
    for ignored in (signal.SIGINT, signal.SIGTERM):  # the end of the input ends this process
        signal.signal(ignored, signal.SIG_IGN)
    commands, answers = take_pipes()
    sys.path.insert(0, os.getcwd())

    def answer(value: dict[str, Any]) -> None:
        try:
            line = json.dumps(value)
        except (TypeError, ValueError):
            line = json.dumps({"id": value["id"], "error": f"its reward {value['reward']!r} is not a number"})
        answers.write(line + "\n")
        answers.flush()

    asyncio.run(_work(json.loads(commands.readline()), answer, commands))


async def _work(told: Mapping[str, Any], answer: Callable[[dict[str, Any]], None], commands: TextIO) -> None:
    async with AsyncExitStack() as stack:
        try:
            program = await opened(told, stack)
        except Exception as error:
            if not isinstance(error, ValueError) or error.__cause__ is not None:
                traceback.print_exception(error)
            return answer({"id": None, "error": str(error) if isinstance(error, ValueError) else f"fails: {error!r}"})
        answer({"id": None, "ready": True})
        await serve(program, answer, commands)


if __name__ == "__main__":
    main()
