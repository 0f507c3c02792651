"""An environment with a tool: a response that ends in `=` calls a calculator, whose result starts the next turn.

    mcore-rl train grpo --nproc-per-node 2 configs/grpo_cpu.yaml output_dir=outputs/calculator \\
        environment.name=function environment.function=calculator_tool:judge environment.max_turns=3 \\
        data.max_sequence_length=32

PYTHONPATH must contain this directory. `judge` runs in separate processes, which judge one response after the other,
each within `environment.time_limit_seconds`. It returns a reward, or a `Step`, which may continue the conversation with
an observation. Tokens of observations have no loss. OUTPUT/samples.jsonl has the transcripts of some samples.
"""

import re

from mcore_rl.environments.interfaces import Step

CALL = re.compile(r"(\d+)\+(\d+)=$")


def judge(message_log, record):
    """Return 1 for the right answer, minus 0.1 for each call of the tool; 0 for a wrong answer."""
    calls = sum(message["role"] == "user" for message in message_log) - 1
    response = message_log[-1]["content"].strip()
    if call := CALL.search(response):
        return Step(done=False, observation=str(int(call[1]) + int(call[2])))
    right = response == record["answer"]
    return Step(reward=max(1.0 - 0.1 * calls, 0.0) if right else 0.0)
