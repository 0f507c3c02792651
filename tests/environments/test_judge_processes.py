"""Tests of judging processes: judges, and samples whose judge raises, hangs or dies."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
from programs import SUPPORT

from mcore_rl.config import EnvironmentConfig
from mcore_rl.environments.interfaces import Sample, Step
from mcore_rl.environments.judge_processes import JudgeProcesses, _Worker, probe
from mcore_rl.environments.judges import ExactMatch, MathVerify, RetryExactMatch
from mcore_rl.errors import UserError, WorkerError

JUDGES = SUPPORT / "judge_functions.py"


def log(*contents):
    return [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(contents)]


def judged(environment, samples):
    return [future.result(60) for future in [environment.submit(sample) for sample in samples]]


def prompts_of(*records):
    return [Sample(log("say"), record) for record in records]


@pytest.fixture
def environment_of(tmp_path):
    made = []

    def make(**config):
        made.append(JudgeProcesses(EnvironmentConfig(**config), tmp_path / "judge.log"))
        return made[-1]

    yield make
    for environment in made:
        environment.close()


def test_judge_failure_leaves_other_samples_judged(environment_of, monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    environment = environment_of(name="function", function="judge_functions:misbehave", time_limit_seconds=1)
    responses = ["ab", "raise", "abc", "hang", "die", "print", "nan", "abcd", "hang", "x"]
    started = time.monotonic()
    steps = judged(environment, [Sample(log("say", response), {"scale": 2}) for response in responses])
    assert time.monotonic() - started < 30
    rewards = [step.reward for step in steps]
    assert rewards == [1.0, 0.0, 1.5, 0.0, 0.0, 2.5, 0.0, 2.0, 0.0, 0.5]
    errors = {response: step.error for response, step in zip(responses, steps, strict=True)}
    assert errors["raise"] == "ValueError: no such answer"
    assert errors["hang"] == "no answer within environment.time_limit_seconds=1"
    assert errors["die"] == "the process that judged it died"
    assert errors["nan"] == "ValueError: the reward must be a finite number (float32), got nan"
    assert errors["ab"] is None
    wrong = judged(environment, [Sample(log("say", response), {}) for response in ("observe", "half", "done")])
    assert wrong[0].error == "TypeError: the observation must be a text, got 5"
    assert "UnicodeEncodeError" in wrong[1].error
    assert wrong[2].error == "TypeError: done must be true or false, got 'no'"
    odd = judged(environment, [Sample(log("say", response), {}) for response in ("raise odd", "tell odd")])
    assert [step.error for step in odd] == [r"ValueError: a cut emoji: \ud83d", r"a cut emoji: \ud83d"]
    again = judged(environment, [Sample(log("say", "abcd"), {"scale": 4})])
    assert again == [Step(reward=1.0)]
    printed = (tmp_path / "judge.log").read_text()
    assert "noise that is no answer" in printed and "noise of a process" in printed and "and its errors" in printed
    # The place of each error is in the log: once in full, afterwards by its line.
    line = next(
        i for i, text in enumerate(JUDGES.read_text().splitlines(), 1) if 'ValueError("no such answer")' in text
    )
    assert f'File "{JUDGES}", line {line}, in misbehave\n    raise ValueError("no such answer")' in printed
    assert printed.count('File "') < 40
    assert "ValueError: the reward must be a finite number (float32), got nan\n" in printed
    assert capfd.readouterr() == ("", "")


def test_process_of_judge_reads_nothing(environment_of, monkeypatch):
    """A process that a judge starts cannot read the requests from its standard input."""
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    environment = environment_of(
        name="function", function="judge_functions:read_by_a_process", num_workers=1, time_limit_seconds=5
    )
    assert judged(environment, prompts_of({}, {})) == [Step(reward=0.0)] * 2


@pytest.mark.long
def test_probe_calls_judge_on_first_records(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    config = EnvironmentConfig(name="function", function="judge_functions:misbehave", time_limit_seconds=0.5)
    probe(config, prompts_of({"scale": 0}, {"scale": 3, "answer": "x"}))
    message = (
        r"environment.function=judge_functions:misbehave: .* cannot be judged: ZeroDivisionError: .* has answer, scale"
    )
    with pytest.raises(UserError, match=message):
        probe(config, prompts_of(*[{"scale": 0, "answer": 1}] * 2))
    with pytest.raises(UserError, match=r"KeyError: 'answer' \(the record has no field except prompt\)"):
        probe(EnvironmentConfig(), prompts_of({}, {}))
    with pytest.raises(UserError, match=r"no answer within environment\.time_limit_seconds=0\.5"):
        probe(config, prompts_of(*[{"scale": 1, "answer": "hang"}] * 2))


@pytest.mark.long
def test_probe_ends_at_first_success_or_time_limit(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    config = EnvironmentConfig(name="function", function="judge_functions:misbehave", time_limit_seconds=100)
    hang, good = {"scale": 1, "answer": "hang"}, {"scale": 1, "answer": "x"}
    started = time.monotonic()
    probe(config, prompts_of(hang, good, hang, hang))
    with pytest.raises(
        UserError, match=r"time_limit_seconds=0\.5 .*; this trial has a shorter time limit, because other ranks wait"
    ):
        probe(config, prompts_of(*[hang] * 4), seconds=1)
    assert time.monotonic() - started < 50


def test_closing_ends_a_process_that_starts_again_meanwhile(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    config = EnvironmentConfig(
        name="function", function="judge_functions:misbehave", time_limit_seconds=100, num_workers=1
    )
    environment, restart, waits = JudgeProcesses(config), _Worker.restart_if_gone, threading.Event()

    def restart_after_the_end(worker):
        waits.set()
        while worker.process.poll() is None:
            time.sleep(0.01)
        restart(worker)

    monkeypatch.setattr(_Worker, "restart_if_gone", restart_after_the_end)
    (hang,) = prompts_of({"scale": 1, "answer": "hang"})
    answer = {"role": "assistant", "content": "hang"}
    environment.submit(replace(hang, message_log=[*hang.message_log, answer]))
    assert waits.wait(10)
    started = time.monotonic()
    environment.close()
    assert time.monotonic() - started < 30


class Slow:
    """An environment in which a sample takes longer than the ranks' collectives may."""

    def __init__(self):
        self.threads = ThreadPoolExecutor(4)

    def submit(self, sample):
        return self.threads.submit(self.judge, sample.record["number"])

    def judge(self, number):
        import torch.distributed as dist

        if number == "fails":
            raise UserError("the judge is gone")
        time.sleep(2 * dist.get_rank())
        goes_on = number >= 3
        return Step(number + 0.1 * dist.get_rank(), not goes_on, "x" * (number - 3) if goes_on else None)


def judge_slowly(store, numbers):
    """Collectives have a timeout of 3 s; ranks 0 and 2 are the first of a replica."""
    import torch.distributed as dist
    from topologies import grid

    from mcore_rl.data.datasets import Prompt
    from mcore_rl.models.generation.interfaces import Response
    from mcore_rl.rollouts.samples import Rollout
    from mcore_rl.rollouts.worker import Conversation, RolloutWorker

    class Tokenizer:
        """A tokenizer with as many tokens as letters."""

        def decode(self, tokens, **kwargs):
            return "!"

        def __call__(self, text, **kwargs):
            return {"input_ids": [7] * len(text)}

    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=3)
    )
    topology = grid(width=2)
    tokenizer, limit = Tokenizer(), SimpleNamespace(max_sequence_length=9)
    worker = RolloutWorker(limit, Slow() if topology.leads_replica else None, tokenizer, 2, 0.3, topology)
    going = []
    for number in numbers[topology.data.rank :: 2]:
        prompt = Prompt((5,), "?", {"number": number})
        going.append(Conversation(Rollout.begin(0, 0, prompt), prompt))
        going[-1].respond(Response([6], [-1.0], True), tokenizer)
    left = worker._judge(going)
    rewards = [conversation.rollout.reward for conversation in going]
    return rewards, [going.index(one) for one in left], [one.rollout.input_ids.tolist() for one in left]


@pytest.mark.long
def test_each_replica_judges_its_own_for_longer_than_a_collective_may_take(tmp_path):
    from mcore_rl.testing.processes import run_processes  # not above: the judges' processes import this file

    judged = run_processes(judge_slowly, tmp_path / "a", list(range(5)), world_size=4, timeout=40)
    going = [[2], [1]], [[[5, 6, 7]], [[5, 6]]]
    for rank, (rewards, places, tokens) in enumerate(judged):
        leads, replica = rank % 2 == 0, rank // 2
        assert rewards == ([[0.0, 2.0, 4.0], [1.2, 3.2]][replica] if leads else [0.0] * len(rewards))
        assert (places, tokens) == (going[0][replica], going[1][replica]), "4 and 3 go on, an observation is empty"
    with pytest.raises(WorkerError) as error:
        run_processes(judge_slowly, tmp_path / "b", [0, "fails"], world_size=4, timeout=40)
    assert str(error.value).count("UserError: the judge is gone") == 4


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("nowhere:f", "No module named 'nowhere'"),
        ("math:nothing", "no attribute 'nothing'"),
    ],
)
def test_judge_function_that_cannot_be_imported_is_refused(function, message, environment_of):
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
    judged = ExactMatch(pattern)(log("6*7=", response), {"answer": 42})
    assert judged.reward == reward
    assert (judged.answer == "42") == bool(reward)


@pytest.mark.long
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
    judged = MathVerify()(log("?", response), {"answer": answer})
    assert judged.reward == reward
    assert judged.answer == (answer if reward else {"The answer is $8$.": "8", "no idea": None}[response])


def test_try_again():
    judge = RetryExactMatch()
    assert judge(log("6*7=", "42"), {"answer": 42}) == Step(reward=1.0, answer="42")
    wrong = judge(log("6*7=", "43"), {"answer": 42})
    assert not wrong.done
    assert wrong.observation
    assert judge(log("6*7=", "43", wrong.observation, "42"), {"answer": 42}) == Step(reward=0.5, answer="42")
