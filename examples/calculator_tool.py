"""An environment with a tool: a response that ends in `=` asks the calculator, whose answer opens the next turn.

    mcore-rl train grpo --nproc-per-node 2 configs/grpo_cpu.yaml output_dir=outputs/calculator \\
        environment.name=function environment.function=calculator_tool:judge environment.max_turns=3 \\
        data.max_sequence_length=32

with this directory in PYTHONPATH. `judge` runs in processes of its own, one answer at a time, within
`environment.time_limit_seconds`; what it returns is a reward, or a `Step` that may go on with an observation. Tokens of
observations carry no loss. The transcript of some samples is in OUTPUT/samples.jsonl.
"""

import re

from mcore_rl.environments.interfaces import Step

CALL = re.compile(r"(\d+)\+(\d+)=$")


def judge(message_log, record):
    """1 for the right answer, less 0.1 for each call of the tool; nothing for a wrong one."""
    calls = sum(message["role"] == "user" for message in message_log) - 1
    response = message_log[-1]["content"].strip()
    if call := CALL.search(response):
        return Step(done=False, observation=str(int(call[1]) + int(call[2])))
    right = response == record["answer"]
    return Step(reward=max(1.0 - 0.1 * calls, 0.0) if right else 0.0)
