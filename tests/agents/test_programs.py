"""Programs' processes: their input, their failures, and their end."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from ended import has_ended, wait_for_end

from mcore_rl.agents.agent_session import AgentSession
from mcore_rl.agents.programs import ProgramError, programs_of
from mcore_rl.config import EnvironmentConfig
from mcore_rl.errors import UserError

PROGRAMS = '''
import asyncio
import os
import subprocess
import sys


async def reads_input(session):
    """Run a tool that reads its standard input to the end."""
    process = await asyncio.create_subprocess_exec("cat", stdout=subprocess.PIPE)
    told, _ = await process.communicate()
    return float(len(told))


async def ends(session):
    sys.exit(3)


async def starts_tool(session):
    process = await asyncio.create_subprocess_exec("sleep", "300")
    with open(session.record["file"], "w") as file:
        print(process.pid, file=file, flush=True)
    await process.wait()


async def number(session):
    print("this is not an answer")
    return session.record["value"]
'''


@pytest.fixture
def make_programs(tmp_path, monkeypatch):
    (tmp_path / "some_programs.py").write_text(PROGRAMS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    def make(program, **options):
        config = EnvironmentConfig(name="agent", program=program, num_workers=1, **options)
        return programs_of(config, tmp_path / "log")

    return make


def sessions(count, **record):
    return [AgentSession(str(n), "http://x/v1", "http://x", f"key {n}", record, []) for n in range(count)]


async def run_all(programs, asked):
    await programs.start()
    try:
        return await asyncio.gather(*map(programs.run, asked), return_exceptions=True)
    finally:
        await programs.close()


def test_a_tool_of_a_program_does_not_read_the_sessions(make_programs):
    assert asyncio.run(run_all(make_programs("some_programs:reads_input"), sessions(6))) == [0.0] * 6


def test_output_of_programs_is_no_answer(make_programs, tmp_path):
    assert asyncio.run(run_all(make_programs("some_programs:number"), sessions(3, value=0.5))) == [0.5] * 3
    assert (tmp_path / "log").read_text().count("this is not an answer") == 3


def test_a_process_that_has_ended_is_replaced_once(make_programs, monkeypatch):
    """Sessions that wait for it fail; later ones get one new process, which ends with the others."""
    programs, started = make_programs("some_programs:ends"), []
    start = programs._new_worker

    async def noted():
        started.append(await start())
        return started[-1]

    monkeypatch.setattr(programs, "_new_worker", noted)

    async def twice():
        await programs.start()
        try:
            return [await asyncio.gather(*map(programs.run, sessions(4)), return_exceptions=True) for _ in range(2)]
        finally:
            await programs.close()

    for results in asyncio.run(twice()):
        assert all(isinstance(result, ProgramError) for result in results)
    assert len(started) == 2 and all(worker.process.returncode is not None for worker in started)


def test_a_command_gets_addresses_and_a_filtered_environment(make_programs, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "secret")
    command = ["sh", "-c", f"cat > {tmp_path}/told; env > {tmp_path}/env; test -z $HF_TOKEN"]
    assert asyncio.run(run_all(make_programs(command), sessions(1, value=2))) == [None]
    assert '"value": 2' in (tmp_path / "told").read_text()
    assert "OPENAI_API_KEY=key 0" in (tmp_path / "env").read_text()
    failed = asyncio.run(run_all(make_programs(["sh", "-c", "exit 4"]), sessions(1)))
    assert str(failed[0]) == "ended with status 4"


def test_children_of_a_command_end_with_it(make_programs, tmp_path):
    command = ["sh", "-c", f"sleep 300 & echo $! > {tmp_path}/pid"]
    asyncio.run(run_all(make_programs(command), sessions(1)))
    pid = int((tmp_path / "pid").read_text())
    wait_for_end(pid)


def test_what_ended_at_the_start_is_told(make_programs, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'no module of this name' >&2\nexit 1\n")
    python.chmod(0o755)
    programs = make_programs("some_programs:number", agent={"python": python})
    with pytest.raises(UserError, match=r"ended when it was started: no module of this name; .*pip install --no-deps"):
        asyncio.run(run_all(programs, []))


TRAINER = """
import asyncio, sys
from mcore_rl.agents.agent_session import AgentSession
from mcore_rl.agents.programs import programs_of
from mcore_rl.config import EnvironmentConfig


async def main():
    program = sys.argv[2] if len(sys.argv) == 3 else sys.argv[2:]
    programs = programs_of(EnvironmentConfig(name="agent", program=program, num_workers=1), None)
    await programs.start()
    await programs.run(AgentSession("0", "http://x/v1", "http://x", "key", {"file": sys.argv[1]}, []))


asyncio.run(main())
"""


@pytest.mark.long
@pytest.mark.parametrize("program", [["some_programs:starts_tool"], ["sh", "-c", "sleep 300 & echo $! > $0/pid; wait"]])
def test_programs_end_with_a_killed_trainer(program, make_programs, tmp_path):
    """Programs and what they have started end, although the trainer cannot end them any more."""
    told = program[0] if len(program) == 1 else [*program, str(tmp_path)]
    arguments = [told] if isinstance(told, str) else told
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, str(tmp_path / "pid"), *arguments])
    try:
        for _ in range(600):
            if (tmp_path / "pid").exists() and (text := (tmp_path / "pid").read_text().strip()):
                break
            time.sleep(0.1)
        pid = int(text)
        assert not has_ended(pid)
    finally:
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
    wait_for_end(pid)


KILLED_AT_ONCE = """
import os, signal
from mcore_rl.utils.process_groups import GroupKeeper

GroupKeeper.add = lambda self, group: os.kill(os.getpid(), signal.SIGKILL)
"""


def arguments_of(process):
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


def test_a_command_does_not_begin_before_it_would_end_with_the_trainer(tmp_path):
    """The trainer is killed between starting the command and telling the keeper of process groups."""
    command = ["sh", "-c", "echo begun > $0/begun", str(tmp_path)]
    arguments = [sys.executable, "-c", KILLED_AT_ONCE + TRAINER, str(tmp_path / "file"), *command]
    assert subprocess.run(arguments, timeout=120).returncode == -signal.SIGKILL
    deadline = time.monotonic() + 60
    while any(str(tmp_path) in part for process in psutil.process_iter() for part in arguments_of(process)):
        assert time.monotonic() < deadline, "the command is still running"
        time.sleep(0.05)
    assert not (tmp_path / "begun").exists()
