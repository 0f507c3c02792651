"""Functions that tests name in `environment.function`."""

import asyncio
import os
import subprocess
import time

from mcore_rl.environments.interfaces import Step


def misbehave(message_log, record):
    """Judge as a user's function does; the response determines the behaviour."""
    response = message_log[-1]["content"]
    if response == "raise":
        raise ValueError("no such answer")
    if response == "raise odd":
        raise ValueError("a cut emoji: \ud83d")
    if response == "tell odd":
        return Step(error="a cut emoji: \ud83d")
    if response == "hang":
        time.sleep(1000)
    if response == "die":
        os._exit(3)
    if response == "nan":
        return float("nan")
    if response == "observe":
        return Step(done=False, observation=5)
    if response == "half":
        return Step(done=False, observation="\ud83d")
    if response == "done":
        return Step(done="no")
    if response == "print":
        print("noise that is no answer")
        os.system("echo noise of a process; echo and its errors >&2")
    return len(response) / record["scale"]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Judge as a function written for verl."""
    right = solution_str == ground_truth
    if data_source == "dapo":
        return {"score": 1.0 if right else -1.0, "acc": right, "pred": solution_str}
    return {"acc": right} if data_source == "odd" else right + extra_info.get("bonus", 0)


async def compute_score_remotely(**arguments):
    await asyncio.sleep(0)
    return compute_score(**arguments)


def read_by_a_process(message_log, record):
    """Return the length of what a process of the judge reads from its standard input."""
    return float(len(subprocess.run(["cat"], capture_output=True, check=True).stdout))


running = 0


async def together(message_log, record):
    """Return the number of samples that are judged at the same time."""
    global running
    running += 1
    try:
        await asyncio.sleep(0.2)
        if message_log[-1]["content"] == "raise":
            raise KeyError("that")
        return running
    finally:
        await asyncio.sleep(0.2)
        running -= 1


async def thirds(message_log, record):
    await asyncio.sleep(0)
    if message_log[-1]["content"] == "raise":
        raise KeyError("that")
    return len(message_log[-1]["content"]) / 3


def lengths(prompts, completions, completion_ids, scale, **columns):
    """Judge in TRL's form; the rewards depend on the arguments."""
    if "die" in completions:
        os._exit(3)
    if "hang" in completions:
        time.sleep(100)
    if "raise" in completions:
        raise ValueError("no such completion")
    assert all(len(ids) == len(text) for ids, text in zip(completion_ids, completions, strict=True))
    return [None if text == "none" else len(text) / by for text, by in zip(completions, scale, strict=True)]


async def batch_size(prompts, completions, **columns):
    return [len(completions)] * len(completions)


def one_too_few(prompts, completions, **columns):
    return [1.0] * (len(completions) - 1)


ODD = {
    "none": {"rewards": None},
    "text": {"rewards": {"a": "x"}},
    "nan": {"rewards": {"a": float("nan")}},
    "bool": {"rewards": {"a": True}},
    "empty": {"error": ""},
}


def by_token(message_log, record, response_ids):
    """Give each token its own number as a reward; for odd texts, return invalid rewards."""
    odd = {"nan": [float("nan")], "text": "1", "number": 1.0, "bool": [True]}
    return Step(1.0, token_rewards=odd.get(message_log[-1]["content"], [float(token) for token in response_ids]))


def alike(message_log, record, response_ids):
    return Step(token_rewards=[0.5] * len(response_ids))


def one_token(message_log, record):
    return Step(token_rewards=[0.5])


def oddly(message_log, record):
    """Return a step with which no conversation can continue."""
    return Step(1.0, **ODD[message_log[-1]["content"]])


def calculator(message_log, record):
    """Judge conversations with a tool: `calc: 6*7` is answered; any other response is the final answer."""
    response = message_log[-1]["content"]
    if response.startswith("calc:"):
        left, right = response.removeprefix("calc:").split("*")
        return Step(-0.125, done=False, observation=f"{int(left) * int(right)}")
    return float(response == record["answer"])


def counts_letters(message_log, record):
    """Return how often the response has the letter `answer`, divided by 10."""
    return message_log[-1]["content"].count(record["answer"]) / 10
