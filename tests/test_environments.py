"""Environments: judges, and what happens to a sample whose judge raises, hangs or dies."""

import os
import time

import pytest

from mcore_rl.config import EnvironmentConfig
from mcore_rl.environments.interfaces import Step
from mcore_rl.environments.judged import JudgedEnvironment
from mcore_rl.environments.judges import ExactMatch, MathVerify, TryAgain
from mcore_rl.errors import UserError


def log(*contents):
    return [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(contents)]


def misbehave(message_log, record):
    """A user's function: the response says what to do."""
    response = message_log[-1]["content"]
    if response == "raise":
        raise ValueError("no such answer")
    if response == "hang":
        time.sleep(1000)
    if response == "die":
        os._exit(3)
    if response == "nan":
        return float("nan")
    if response == "print":
        print("noise that is no answer")
    return len(response) / record["scale"]


@pytest.fixture
def environment_of():
    made = []

    def make(**config):
        made.append(JudgedEnvironment(EnvironmentConfig(**config)))
        return made[-1]

    yield make
    for environment in made:
        environment.close()


def test_a_sample_that_fails_stops_nothing(environment_of, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__))
    environment = environment_of(name="function", function="test_environments:misbehave", time_limit_seconds=1)
    responses = ["ab", "raise", "abc", "hang", "die", "print", "nan", "abcd", "hang", "x"]
    started = time.monotonic()
    steps = environment.step([log("say", response) for response in responses], [{"scale": 2}] * len(responses))
    assert time.monotonic() - started < 30
    rewards = [step.reward for step in steps]
    assert rewards == [1.0, 0.0, 1.5, 0.0, 0.0, 2.5, 0.0, 2.0, 0.0, 0.5]
    errors = {response: step.error for response, step in zip(responses, steps, strict=True)}
    assert errors["raise"] == "ValueError: no such answer"
    assert errors["hang"] == "no answer within environment.time_limit_seconds=1"
    assert errors["die"] == "the process that judged it died"
    assert errors["nan"] == "ValueError: the reward is nan"
    assert errors["ab"] is None
    again = environment.step([log("say", "abcd")], [{"scale": 4}])
    assert again == [Step(reward=1.0)]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("nowhere:f", "No module named 'nowhere'"),
        ("math:nothing", "no attribute 'nothing'"),
        ("plain", "must be written module:function"),
    ],
)
def test_a_function_that_cannot_be_imported(function, message, environment_of):
    with pytest.raises(UserError, match=message):
        environment_of(name="function", function=function)


@pytest.mark.parametrize(
    ("pattern", "response", "reward"),
    [
        (None, " 42\n", 1),
        (None, "the answer is 42", 0),
        (r"answer is (\d+)", "the answer is 41, no, the answer is 42", 1),
        (r"answer is (\d+)", "42", 0),
        (r"\d+", "6 times 7 is 42", 1),
    ],
)
def test_exact_match(pattern, response, reward):
    assert ExactMatch(pattern)(log("6*7=", response), {"answer": 42}) == reward


@pytest.mark.parametrize(
    ("answer", "response", "reward"),
    [
        ("1/2", r"So it is \boxed{\frac{1}{2}}.", 1),
        ("0.5", r"$\frac{2}{4}$", 1),
        (r"\boxed{x+1}", "$1 + x$", 1),
        ("7", "The answer is $8$.", 0),
        ("7", "no idea", 0),
    ],
)
def test_math(answer, response, reward):
    pytest.importorskip("math_verify")
    assert MathVerify()(log("?", response), {"answer": answer}) == reward


def test_try_again():
    judge = TryAgain()
    assert judge(log("6*7=", "42"), {"answer": 42}) == Step(reward=1.0)
    wrong = judge(log("6*7=", "43"), {"answer": 42})
    assert not wrong.done
    assert wrong.observation
    assert judge(log("6*7=", "43", wrong.observation, "42"), {"answer": 42}) == Step(reward=0.5)
