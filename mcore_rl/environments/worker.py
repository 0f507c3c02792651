"""The process that judges: `python -m mcore_rl.environments.worker`, one JSON object a line in and out.

In: {"judge": name, "options": {…}} first, then {"message_log": […], "record": {…}} for each sample.
Out: {"ready": true}, then a step for each sample; {"error": text} where something went wrong.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from dataclasses import asdict
from typing import Any

from mcore_rl.environments.interfaces import Step
from mcore_rl.environments.judges import JUDGES


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the run's business, which then ends this process
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a judge prints must not stand between the answers

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    made = json.loads(sys.stdin.readline())
    try:
        judge = JUDGES[made["judge"]](**made["options"])
    except Exception as error:
        return answer({"error": f"{type(error).__name__}: {error}"})
    answer({"ready": True})
    for line in sys.stdin:
        sample = json.loads(line)
        try:
            step = judge(sample["message_log"], sample["record"])
            step = step if isinstance(step, Step) else Step(float(step))
            _check(step)
            answer(asdict(step))
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})


def _check(step: Step) -> None:
    """Raises TypeError or ValueError for a step that the conversation cannot go on with."""
    if not math.isfinite(step.reward):
        raise ValueError(f"the reward is {step.reward}")
    if not isinstance(step.done, bool):
        raise TypeError(f"done must be true or false, got {step.done!r}")
    if step.observation is not None:
        if not isinstance(step.observation, str):
            raise TypeError(f"the observation must be a text, got {step.observation!r}")
        step.observation.encode()  # tokenizers refuse what is no Unicode


if __name__ == "__main__":
    main()
