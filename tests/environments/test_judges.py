"""Tests of judges of several samples: batches, coroutines, functions of TRL and verl, weighted sums, URLs, tools."""

import asyncio
import contextlib
import json
import os
import re
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from judge_functions import ODD
from ports import free_port
from programs import ROOT, SUPPORT
from small_models import and_long

from mcore_rl.config import EnvironmentConfig
from mcore_rl.environments.interfaces import Sample, Step
from mcore_rl.environments.judge_processes import JudgeProcesses

# ------------------------------------------------------------------ functions of a user's


@pytest.fixture
def judge(tmp_path, monkeypatch):
    """A function from options and samples to steps."""
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))

    def run(samples, **options):
        environment = JudgeProcesses(EnvironmentConfig(**options), tmp_path / "judge.log")
        try:
            return [future.result(60) for future in [environment.submit(sample) for sample in samples]]
        finally:
            environment.close()

    return run


def sample(text, **record):
    log = [{"role": "user", "content": "say"}, {"role": "assistant", "content": text}]
    return Sample(log, record, completion_ids=list(range(len(text))))


# ------------------------------------------------------------------ batches and coroutines


def test_coroutine_functions_judge_a_batch_at_the_same_time(judge):
    texts = ["a"] * 12 + ["raise"]
    options = {"name": "function", "function": "judge_functions:together", "num_workers": 1, "batch_size": 16}
    steps = judge([sample(text) for text in texts], **options)
    assert max(step.reward for step in steps) >= 6
    assert (steps[-1].reward, steps[-1].error) == (0.0, "KeyError: 'that'")


@pytest.mark.parametrize(
    ("bad", "error"),
    and_long(
        [("none", "ValueError: the judge returned no reward (None) for this sample")],
        [
            ("die", "the process that judged it died"),
            ("raise", "ValueError: no such completion"),
            ("hang", "no answer within environment.time_limit_seconds=1"),
        ],
    ),
)
def test_batch_judge_repeats_failed_batch_by_sample(bad, error, judge):
    texts = ["a", "bcd", bad, "ef", ""]
    options = {"name": "trl", "function": "judge_functions:lengths", "num_workers": 1, "batch_size": 5}
    steps = judge([sample(text, scale=3) for text in texts], **options, time_limit_seconds=1)
    assert [step.reward for step in steps] == [1 / 3, 1.0, 0.0, 2 / 3, 0.0]
    assert [step.error for step in steps] == [None, None, error, None, None]


def test_batch_judge_gets_at_most_batch_size_samples(judge):
    options = {"name": "trl", "function": "judge_functions:batch_size", "num_workers": 1, "batch_size": 4}
    steps = judge([sample("x") for _ in range(40)], **options)
    assert {step.reward for step in steps} <= {1.0, 2.0, 3.0, 4.0}
    assert sum(step.reward == 4.0 for step in steps) > 20


@pytest.mark.long
def test_trl_judge_refuses_too_few_rewards(judge):
    steps = judge([sample("x")], name="trl", function="judge_functions:one_too_few")
    assert steps[0].error == "ValueError: the function returned 0 rewards for 1 completions"


# ------------------------------------------------------------------ TRL


def conversations():
    """Samples of either kind of prompt, records that lack a field, and a completion of several messages."""
    system, user = {"role": "system", "content": "be brief"}, {"role": "user", "content": "6*7?"}
    thought = {"role": "assistant", "content": "<think>\neasy\n</think>\n42"}
    more, last = {"role": "user", "content": "sure?"}, {"role": "assistant", "content": "yes"}
    chats = [
        Sample([system, user, thought], {"answer": "42", "level": 1}, 2, False, [5, 6, 7]),
        Sample([user, last], {"answer": "41", "level": None}, 1, False, [8]),
        Sample([user, thought, more, last], {"answer": "42", "level": 3}, 1, False, [1, 2, 3, 4]),
    ]
    texts = [
        Sample(
            [{"role": "user", "content": "6*7="}, {"role": "assistant", "content": "42"}],
            {"answer": "42"},
            1,
            True,
            [9],
        ),
        Sample([{"role": "user", "content": ""}, {"role": "assistant", "content": ""}], {"answer": ""}, 1, True, [0]),
    ]
    return chats, texts


@pytest.mark.long
@pytest.mark.parametrize("kind", [0, 1], ids=["messages", "texts"])
def test_trl_judge_calls_function_as_trl_does(kind, monkeypatch):
    """The arguments are those that TRL's `_calculate_rewards` passes, except for its own objects."""
    from types import SimpleNamespace

    import torch
    from accelerate import PartialState
    from trl.trainer import grpo_trainer

    from mcore_rl.environments.judges import TRLReward

    samples, seen = conversations()[kind], []

    def reward(**arguments):
        seen.append(arguments)
        return [0.3 * len(str(c)) for c in arguments["completions"]]

    ours = asyncio.run(TRLReward(reward)(samples))
    prompts = [s.message_log[: s.num_prompt_messages] for s in samples]
    completions = [s.message_log[s.num_prompt_messages :] for s in samples]
    if kind == 1:
        prompts, completions = ([messages[0]["content"] for messages in part] for part in (prompts, completions))
    inputs = [{"prompt": p, **s.record} for p, s in zip(prompts, samples, strict=True)]
    PartialState(cpu=True)
    monkeypatch.setattr(grpo_trainer, "gather", lambda tensor: tensor)
    monkeypatch.setattr(grpo_trainer, "profiling_context", lambda *_: contextlib.nullcontext())
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu", is_main_process=False),
        reward_funcs=[reward], reward_processing_classes=[None],
        reward_func_names=["reward"], state=None,
        environments=None, _log_completion_extra=None, _log_metric=None,
    )  # fmt: skip
    ids = [list(s.completion_ids) for s in samples]
    theirs = grpo_trainer.GRPOTrainer._calculate_rewards(trainer, inputs, prompts, completions, ids)
    passed = {
        name: value for name, value in seen[1].items() if name not in ("trainer_state", "log_extra", "log_metric")
    }
    assert seen[0] == passed
    torch.testing.assert_close(torch.tensor(ours)[:, None], theirs)


@pytest.mark.long
def test_trl_judge_accepts_reward_functions_of_trl(judge):
    chats, _ = conversations()
    thinks = judge(chats, name="trl", function="trl.rewards:think_format_reward", batch_size=3, time_limit_seconds=60)
    assert [step.error for step in thinks] == [None] * 3
    from trl.rewards import think_format_reward

    expected = think_format_reward([s.message_log[s.num_prompt_messages :] for s in chats])
    assert [step.reward for step in thinks] == expected
    assert {1.0, 0.0} == set(expected)


@pytest.mark.parametrize("function", ["compute_score", "compute_score_remotely"])
def test_verl_judge_calls_function_with_fields_of_verls_records(function, judge):
    truth = {"style": "rule", "ground_truth": "42"}
    samples = [
        sample("42", data_source="gsm8k", reward_model=truth, extra_info={"bonus": 0.5}, answer="not this"),
        sample("41", data_source="dapo", reward_model=truth, extra_info={"index": 3}),
        sample("42", answer="42"),
        sample("", ground_truth="42", extra_info=None),
        sample("42", data_source="odd", ground_truth="42"),
        sample("42", data_source="gsm8k"),
    ]
    steps = judge(samples, name="verl", function=f"judge_functions:{function}", num_workers=1)
    assert [step.reward for step in steps] == [1.5, -1.0, 1.0, 0.0, 0.0, 0.0]
    assert [step.answer for step in steps] == [None, "41", None, None, None, None]
    assert [step.error for step in steps[:4]] == [None] * 4
    assert steps[4].error == "ValueError: the function returned a dictionary without score: acc"
    assert steps[5].error.startswith("ValueError: the record has no reward_model.ground_truth, ground_truth or answer")


GUESSING = """
from typing import NamedTuple
import torch

class EnvironmentReturn(NamedTuple):
    observations: list
    metadata: list
    next_stop_strings: list
    rewards: torch.Tensor
    terminateds: torch.Tensor
    answers: list

class Guessing:
    def __init__(self, cfg):
        assert cfg["num_workers"] == 1

    def step(self, message_log_batch, metadata):
        right = [log[-1]["content"] == of["answer"] for log, of in zip(message_log_batch, metadata)]
        told = [{"role": "environment", "content": "right" if is_right else "wrong"} for is_right in right]
        ends = torch.tensor(right)
        return EnvironmentReturn(told, metadata, [None] * len(right), ends.float(), ends, [None] * len(right))
"""


def test_adapter_of_the_documentation_calls_an_environment_of_nemo_rl(judge, tmp_path, monkeypatch):
    page = (ROOT / "docs" / "environments.md").read_text()
    (adapter,) = re.findall(r"```python\n(# nemo_rl_judge.py\n.*?)```", page, re.DOTALL)
    (tmp_path / "nemo_rl_judge.py").write_text(adapter)
    (tmp_path / "my_environments.py").write_text(GUESSING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    samples = [sample("7", answer="7"), sample("8", answer="7")]
    steps = judge(samples, name="function", function="nemo_rl_judge:judge", num_workers=1, time_limit_seconds=60)
    assert steps == [Step(1.0), Step(0.0, done=False, observation="wrong")]


# ------------------------------------------------------------------ several rewards


@pytest.mark.long
def test_weighted_judge_sums_rewards(judge):
    rewards = {
        "exact": {"name": "exact_match", "weight": 2.0},
        "length": {"name": "trl", "function": "judge_functions:lengths", "weight": -0.3},
        "slow": {"name": "function", "function": "judge_functions:thirds", "weight": 0.0},
    }
    samples = [
        sample("ab", answer="ab", scale=7),
        sample("none", answer="x", scale=7),
        sample("raise", answer="x", scale=7),
    ]
    steps = judge(samples, name="weighted", rewards=rewards, num_workers=1)
    assert steps[0].reward == pytest.approx(2.0 - 0.3 * 2 / 7, abs=1e-12)
    assert steps[0].rewards == {"exact": 1.0, "length": 2 / 7, "slow": 2 / 3}
    assert steps[1].rewards == {"exact": 0.0, "slow": 4 / 3}, "None does not apply"
    assert steps[1].reward == 0.0
    assert (steps[2].reward, steps[2].error) == (0.0, "length: ValueError: no such completion")
    only = judge([sample("none", scale=1)], name="weighted", rewards={"length": rewards["length"]})
    assert only[0].error == "ValueError: the judge returned no reward (None) for this sample"


@pytest.mark.long
def test_weighted_judge_combines_tool_turns_and_reward(judge):
    tool = {"name": "function", "function": "judge_functions:calculator"}
    asked, answered = sample("calc: 6*7", answer="42"), sample("42", answer="42")
    assert judge([asked, answered], **tool, max_turns=3) == [
        Step(-0.125, done=False, observation="42"),
        Step(1.0),
    ]
    rewards = {"same": {"name": "exact_match"}, "tool": tool}
    steps = judge([asked, answered], name="weighted", rewards=rewards, max_turns=3)
    assert steps == [
        Step(-0.125, done=False, observation="42", rewards={"same": 0.0, "tool": -0.125}, answer="calc: 6*7"),
        Step(2.0, rewards={"same": 1.0, "tool": 1.0}, answer="42"),
    ]


def of_tokens(text, count):
    """A response whose last `count` tokens are the one to judge."""
    return replace(sample(text), num_response_tokens=count)


def test_function_judge_returns_reward_of_each_token(judge):
    assert list(of_tokens("abcd", 0).response_ids) == []
    function = {"name": "function", "function": "judge_functions:by_token"}
    steps = judge([of_tokens("abcd", 3), *(of_tokens(odd, 1) for odd in ("nan", "text", "number", "bool"))], **function)
    assert steps[0] == Step(1.0, token_rewards=[1.0, 2.0, 3.0])
    told = ("token_rewards must be finite numbers, got [nan]", "got ['1']", "'float' object is not iterable", "[True]")
    for step, error in zip(steps[1:], told, strict=True):
        assert error in step.error and step.reward == 0


@pytest.mark.long
def test_weighted_judge_sums_token_rewards(judge):
    own = {"name": "function", "function": "judge_functions:by_token", "weight": 2.0}
    rewards = {"own": own, "alike": {"name": "function", "function": "judge_functions:alike", "weight": -1.0}}
    (step,) = judge([of_tokens("abcd", 2)], name="weighted", rewards=rewards)
    assert step.reward == 2 and step.token_rewards == [2 * 2 - 0.5, 2 * 3 - 0.5]
    rewards["few"] = {"name": "function", "function": "judge_functions:one_token"}
    (step,) = judge([of_tokens("abcd", 2)], name="weighted", rewards=rewards)
    assert step.error == "few: rewards 1 tokens, another judge 2"


def test_invalid_step_fails_only_its_sample(judge):
    steps = judge([sample(text) for text in ODD], name="function", function="judge_functions:oddly", num_workers=1)
    told = (
        "rewards must be a dictionary from names to numbers, got None",
        "the reward a must be a finite number (float32), got 'x'",
        "the reward a must be a finite number (float32), got nan",
    )
    for step, error in zip(
        steps,
        (*told, "the reward a must be a finite number (float32), got True", "the error must be a text, got ''"),
        strict=True,
    ):
        assert step.reward == 0.0 and step.error.endswith(error), step


# ------------------------------------------------------------------ a URL


class Remote(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        status, answer = self.server.behave(len(self.server.asked), body)
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content) + 100 * ("cut" in answer)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def remote():
    servers = []

    def serve(behave):
        server = ThreadingHTTPServer(("127.0.0.1", 0), Remote)
        server.daemon_threads, server.block_on_close, server.asked, server.behave = True, False, [], behave
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        servers.append(server)
        return server, f"http://127.0.0.1:{server.server_port}/judge"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def counted(_, body):
    return 200, {"rewards": [len(s["messages"][-1]["content"]) * s["record"]["scale"] for s in body["samples"]]}


def test_http_judge_retries_failed_request(judge, remote):
    server, url = remote(lambda n, body: counted(n, body) if n > 2 else ((503, 429)[n - 1], {}))
    steps = judge([sample("abc", scale=0.1)], name="http", url=url, retries=2, num_workers=1)
    assert steps == [Step(3 * 0.1)]
    assert len(server.asked) == 3
    assert server.asked[0] == {"samples": [{"messages": sample("abc").message_log, "record": {"scale": 0.1}}]}


def test_http_judge_retries_incomplete_response(judge, remote):
    server, url = remote(lambda n, body: counted(n, body) if n > 1 else (200, {"cut": 1}))
    steps = judge([sample("abc", scale=0.1)], name="http", url=url, retries=1, num_workers=1)
    assert steps == [Step(3 * 0.1)] and len(server.asked) == 2


def test_http_judge_accepts_numbers_null_and_objects(judge, remote):
    going = {"reward": 0.25, "done": False, "observation": "go on"}
    _, url = remote(lambda n, body: (200, {"rewards": [[0.5, None, going][s["record"]["n"]] for s in body["samples"]]}))
    steps = judge([sample("x", n=n) for n in range(3)], name="http", url=url, num_workers=1, batch_size=3)
    assert steps[0] == Step(0.5)
    assert steps[1].error == "ValueError: the judge returned no reward (None) for this sample"
    assert steps[2] == Step(0.25, done=False, observation="go on")


@pytest.mark.parametrize(
    ("behave", "limit", "asked", "error"),
    [
        (lambda n, body: (500, {}), 3, 2, r"status 500 \(attempts: 2\)"),
        (lambda n, body: (422, {"detail": "what?"}), 3, 1, "422 Client Error"),
        (lambda n, body: time.sleep(30), 3, 2, r"took too long \(attempts: 2\)"),
        (lambda n, body: (200, {"rewards": []}), 3, 1, "returned 0 rewards for 1 samples"),
        (lambda n, body: (200, {"score": 1}), 3, 1, "/judge must answer with an object that has a list of"),
        (lambda n, body: (200, [1]), 3, 1, "/judge must answer with an object that has a list of rewards, got \\[1\\]"),
        (lambda n, body: (200, {"rewards": [{"reward": 1, "rewards": None}]}), 3, 1, "rewards must be a dictionary"),
        (None, 3, 0, r"does not answer \(attempts: 2\)"),
    ],
    ids=["fails", "refuses", "hangs", "too few", "other words", "a list", "no rewards", "not there"],
)
def test_http_judge_failure_fails_sample_within_limit(behave, limit, asked, error, judge, remote):
    server, url = remote(behave)
    if behave is None:
        url = f"http://127.0.0.1:{free_port()}/judge"
    started = time.monotonic()
    (step,) = judge([sample("x")], name="http", url=url, retries=1, time_limit_seconds=limit, num_workers=1)
    assert time.monotonic() - started < limit + 5
    assert step.reward == 0.0
    assert re.search(error, step.error), step.error
    assert len(server.asked) == asked
