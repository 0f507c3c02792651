"""An environment of the package `verifiers`, with a tool, as a program: `make test-agents`."""

import asyncio
import json
import os
import shutil
import subprocess

import pytest
from agent_cases import Served
from agent_runs import PYTHON, train
from agent_runs import files as files
from programs import ROOT

from mcore_rl.agents.agent_session import AgentSession
from mcore_rl.agents.programs import ProgramError, programs_of
from mcore_rl.config import EnvironmentConfig

TASKSETS = ROOT / "tests" / "support" / "verifiers_tasksets"
OPTIONS = {"agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}
CALL = 'I add. <tool_call>\n{"name": "sums_add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'

pytestmark = pytest.mark.agents


def tasks(*arguments):
    command = [PYTHON, "-m", "mcore_rl.agents.verifiers_program", *arguments]
    path = os.pathsep.join([str(TASKSETS), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=200, env=environment)


@pytest.fixture(scope="module")
def records():
    done = tasks("adding", "--limit", "3", "--options", json.dumps({"taskset": {"num_tasks": 9}}))
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_tasks_become_records(records):
    assert len(records) == 3 and records[2]["task"]["answer"] == "5"
    assert [message["role"] for message in records[2]["prompt"]] == ["system", "user"]
    done = tasks("no-such-taskset")
    assert done.returncode and "no-such-taskset cannot be loaded: ModuleNotFoundError" in done.stderr


async def episodes(log, *asked):
    """Run an episode for each pair of an endpoint and a record, one after the other; return rewards and errors."""
    config = EnvironmentConfig(
        name="agent", program="verifiers:adding", num_workers=1, start_seconds=200,
        agent={"python": PYTHON, "verifiers": OPTIONS},
    )  # fmt: skip
    programs, found = programs_of(config, log), []
    await programs.start()
    try:
        for served, record in asked:
            url, session = served.server.url, served.session
            told = AgentSession(session.id, f"{url}/v1", url, session.key, record, [])
            (result,) = await asyncio.wait_for(asyncio.gather(programs.run(told), return_exceptions=True), 200)
            found.append(result)
    finally:
        await programs.close()
    return found


def test_an_episode_is_a_session(records, tmp_path, monkeypatch):
    """The harness calls the tool, and its second request extends the first; so the session has one row.

    An episode that reaches a limit of its session ends with a reward, and one with an error is a failed sample.
    """
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TASKSETS), str(ROOT)]))
    whole = Served([f"<think>\nHm.\n</think>\n\n{CALL}", "5"], longest=2000)
    short, ended = Served([], longest=10), Served([])
    ended.session.end()
    try:
        asked = (whole, records[2]), (short, records[0]), (ended, records[0]), (ended, {})
        found, limited, refused, wrong = asyncio.run(episodes(tmp_path / "log", *asked))
        assert found == {"reward": 2.0, "rewards": {"right": 1.0, "length": 1.0}}, (tmp_path / "log").read_text()
        first, second = whole.session.tree.turns
        assert second.prompt.parent is first and len(whole.session.tree.rows()) == 1
        assert [message["role"] for message in second.messages] == ["system", "user", "assistant", "tool", "assistant"]
        assert second.messages[3]["content"] == "5" and first.messages[0]["content"].startswith("Use the tool.")
        assert limited["reward"] == 0.0 and short.session.reached == "context"
        assert isinstance(refused, ProgramError) and "the session has ended" in str(refused)
        assert isinstance(wrong, ProgramError) and "has no field 'task'" in str(wrong)
    finally:
        for served in (whole, short, ended):
            served.close()


def test_a_run_trains_on_episodes(files, records):
    (files / "tasks.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    shutil.copytree(TASKSETS / "adding", files / "adding")
    options = [
        *("environment.program=verifiers:adding", f"environment.agent.python={PYTHON}"),
        f"environment.agent.verifiers={json.dumps(OPTIONS)}",
        *(f"data.train={files / 'tasks.jsonl'}", "data.max_sequence_length=700", "trainer.max_steps=1"),
        *("grpo.num_prompts_per_step=1", "grpo.num_generations_per_prompt=2", "environment.start_seconds=200"),
        *("batch.global_batch_size=2", "environment.max_failed_fraction=0"),
    ]
    (line,) = train(files, "verifiers", *options)
    assert line["failed_fraction"] == 0 and line["reward_length_mean"] > 0 and line["turns_mean"] >= 1
