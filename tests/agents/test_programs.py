"""Programs' processes: their input, their failures, and their end."""

import asyncio
import os

import pytest

from mcore_rl.agents.program_worker import AgentSession
from mcore_rl.agents.programs import ProgramError, programs_of
from mcore_rl.config import EnvironmentConfig

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
    with pytest.raises(ProcessLookupError):
        for _ in range(100):
            os.kill(pid, 0)
            asyncio.run(asyncio.sleep(0.05))
