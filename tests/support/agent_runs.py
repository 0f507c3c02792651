"""Runs of GRPO and PPO with agents' programs: the programs, the files and the command."""

import json
import os
from pathlib import Path

import pytest
import yaml
from programs import ROOT, metrics_of, run
from small_models import make_model

PYTHON = Path(os.environ.get("AGENTS_PYTHON", ROOT / ".venv-agents" / "bin" / "python"))
"""Python of the environment that has the packages of agents (`make test-agents`)."""
PROGRAMS = '''
import asyncio
import os
import sys

import aiohttp


async def ask(session, messages, **options):
    headers = {"Authorization": f"Bearer {session.api_key}"}
    body = {"model": "policy", "messages": messages, **options}
    async with aiohttp.ClientSession(trust_env=False) as client:
        async with client.post(f"{session.base_url}/chat/completions", json=body, headers=headers) as answer:
            return answer.status, await answer.json()


async def two_turns(session):
    """Two turns, then a branch from the first question; the reward depends on all responses."""
    text, messages = "", list(session.messages)
    for _ in range(2):
        status, answer = await ask(session, messages)
        assert status == 200, answer
        content = answer["choices"][0]["message"]["content"] or ""
        text += content
        messages = [*messages, {"role": "assistant", "content": content}, {"role": "user", "content": "b"}]
    status, answer = await ask(session, [*session.messages, {"role": "user", "content": "c"}], max_tokens=5)
    return sum(map(ord, text)) % 7 / 7


async def failing(session):
    """A different failure for each sample; one in three succeeds."""
    kind = sum(map(ord, session.api_key)) % 6
    await ask(session, session.messages)
    if kind == 0:
        raise ValueError("broken program")
    if kind == 1:
        return float("nan")
    if kind == 2:
        return None
    if kind == 3:
        await asyncio.sleep(60)
    return kind / 6


async def dying(session):
    os._exit(3)


async def judged(session):
    await ask(session, session.messages)
'''

COMMAND = """
import json, os, sys, urllib.request

told = json.loads(sys.stdin.readline())
if len(sys.argv) > 1:  # the address that is expected, and a directory that only one session at a time can make
    assert os.environ["OPENAI_BASE_URL"].startswith(sys.argv[1]), os.environ["OPENAI_BASE_URL"]
    os.mkdir(sys.argv[2])


def post(url, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return json.load(opener.open(request, timeout=60))


answer = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"messages": told["messages"]})
text = answer["choices"][0]["message"]["content"] or ""
assert "HF_TOKEN" not in os.environ
if len(sys.argv) > 1:
    os.rmdir(sys.argv[2])
post(os.environ["AGENT_REWARD_URL"], {"reward": len(text) % 5 / 5})
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("agents")
    make_model("qwen3", root / "model", initializer_range=0.05)
    prompts = [
        {"prompt": [{"role": "user", "content": letter}], "answer": letter, "task": n}
        for n, letter in enumerate("abcdefgh")
    ]
    (root / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    (root / "agent_programs.py").write_text(PROGRAMS)
    (root / "command.py").write_text(COMMAND)
    for name in ("grpo", "ppo"):
        config = {
            "output_dir": "set below",
            "model": {"path": str(root / "model")},
            "data": {"train": str(root / "prompts.jsonl"), "max_sequence_length": 160},
            "optimizer": {"lr": 1e-3, "adam_eps": 1e-4},
            "trainer": {"max_steps": 2},
            "checkpoint": {"export_hf": False, "save_interval": 1},
            name: {"num_prompts_per_step": 2, "num_generations_per_prompt": 4, "max_new_tokens": 8},
            "environment": {"name": "agent", "program": "agent_programs:two_turns", "num_workers": 1},
            "parallel": {"timeout_seconds": 60},
        }
        (root / f"{name}.yaml").write_text(yaml.safe_dump(config))
    return root


def train(files, name, *arguments, processes=1, algorithm="grpo", check=True):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(files))
        patch.setenv("HF_TOKEN", "secret")
        out = f"output_dir={files / name}"
        script = f"train_{algorithm}.py"
        done = run(script, files / f"{algorithm}.yaml", out, *arguments, processes=processes, check=check)
    return metrics_of(files / name) if check else done
