"""Official clients, unmodified, on the endpoint: `make test-agents`. A scripted engine answers."""

import asyncio
import json
import os
import subprocess

import pytest
from agent_cases import Served
from agent_runs import PYTHON
from programs import ROOT

CALL = 'Let me add.<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'

pytestmark = pytest.mark.agents


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("kind", "thought", "expected"),
    [
        ("openai", "<think>\nHm.\n</think>\n\n", {"refused": [400, 400, 401, 410], "text": " 5"}),
        ("anthropic", "", {"refused": [400, 401]}),
        ("langchain", "<think>\nHm.\n</think>\n\n", {}),
    ],
)
def test_an_agent_uses_a_tool(kind, thought, expected, stream):
    """The second request extends the first, although OpenAI's clients drop thoughts; so the session has one row."""
    served = Served([thought + CALL, "It is 5.", " 5"])
    try:
        environment = {**os.environ, "NO_PROXY": "127.0.0.1", "LANGSMITH_TRACING": "false"}
        command = [PYTHON, ROOT / "tests" / "support" / "agent_clients.py", kind, served.server.url]
        done = subprocess.run(
            [*map(str, command), served.session.key, str(int(stream))],
            capture_output=True,
            text=True,
            timeout=120,
            env=environment,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found = json.loads(done.stdout.splitlines()[-1])
        assert [(text or "").strip() for text in found["said"]] == ["Let me add.", "It is 5."]
        assert {key: found[key] for key in expected} == expected
        turns = served.session.tree.turns
        assert turns[1].prompt.parent is turns[0] and turns[1].prompt.kept == len(turns[0].response.token_ids)
        assert turns[1].prompt.messages[-1] == {**turns[1].prompt.messages[-1], "role": "tool", "content": "5"}
        if kind == "openai":
            assert served.session.reward == 0.5
    finally:
        served.run(asyncio.sleep(0))
        served.close()
