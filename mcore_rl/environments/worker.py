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
            if not math.isfinite(step.reward):
                raise ValueError(f"the reward is {step.reward}")
            answer(asdict(step))
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
