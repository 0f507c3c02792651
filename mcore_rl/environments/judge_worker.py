"""The judging process: `python -m mcore_rl.environments.judge_worker PARENT`. It reads and writes JSON lines.

Input: first the configuration's section `environment`, then {"samples": […]} for each call.
Output: {"ready": true}, then {"steps": […]} for each call; {"error": text} after a failure.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from dataclasses import asdict, replace
from typing import Any

from mcore_rl.environments.interfaces import BatchJudge, Sample, Step
from mcore_rl.environments.judges import make_judge, reported, step_of
from mcore_rl.utils.console import printable
from mcore_rl.utils.parent_process import end_with, take_pipes

LARGEST = 3.4028234663852886e38
"""Largest float32. Rewards are trained on in this precision."""


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run handles Ctrl-C, and ends this process
    if len(sys.argv) > 1:
        end_with(int(sys.argv[1]))
    requests, answers = take_pipes()

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    try:
        judge = make_judge(json.loads(requests.readline()))
    except Exception as error:
        return answer({"error": reported(error)})
    answer({"ready": True})
    with asyncio.Runner() as runner:
        for line in requests:
            samples = [Sample(**sample) for sample in json.loads(line)["samples"]]
            try:
                answer({"steps": [asdict(step) for step in runner.run(_judged(judge, samples))]})
            except Exception as error:
                answer({"error": reported(error)})


async def _judged(judge: BatchJudge, samples: list[Sample]) -> list[Step]:
    return [_checked(result) for result in await judge(samples)]


def _checked(result: float | Step | BaseException | None) -> Step:
    """Return the result of a judge as a valid step; an exception or invalid result becomes a step with an error."""
    try:
        if isinstance(result, BaseException):
            raise result
        if result is None:
            raise ValueError("the judge returned no reward (None) for this sample")
        step = step_of(result)
        if not abs(step.reward) <= LARGEST:
            raise ValueError(f"the reward must be a finite number (float32), got {step.reward}")
        if step.error is not None and not (isinstance(step.error, str) and step.error):
            raise TypeError(f"the error must be a text, got {step.error!r}")
        if step.error is not None:
            step = replace(step, error=printable(step.error))
        if not isinstance(step.rewards, dict) or not all(isinstance(name, str) for name in step.rewards):
            raise TypeError(f"rewards must be a dictionary from names to numbers, got {step.rewards!r}")
        for name, reward in step.rewards.items():
            if not _is_number(reward):
                raise ValueError(f"the reward {name} must be a finite number (float32), got {reward!r}")
        if not all(_is_number(reward) for reward in step.token_rewards):
            raise ValueError(f"token_rewards must be finite numbers, got {list(step.token_rewards)!r}")
        if not isinstance(step.done, bool):
            raise TypeError(f"done must be true or false, got {step.done!r}")
        if step.answer is not None:
            if not isinstance(step.answer, str):
                raise TypeError(f"the answer must be a text, got {step.answer!r}")
            step = replace(step, answer=printable(step.answer))
        if step.observation is not None:
            if not isinstance(step.observation, str):
                raise TypeError(f"the observation must be a text, got {step.observation!r}")
            step.observation.encode()  # tokenizers refuse invalid Unicode
        return step
    except Exception as error:
        return Step(error=reported(error))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


if __name__ == "__main__":
    main()
