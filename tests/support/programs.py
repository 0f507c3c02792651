"""Helpers of tests that run whole programs: start them and read their metrics."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from forked_programs import ForkedProgram

from mcore_rl.run.metric_meanings import meaning_of

ROOT = Path(__file__).parent.parent.parent
SUPPORT = ROOT / "tests" / "support"
TIMEOUT = 240


def run(script, *arguments, processes=1, check=True, launcher=False):
    """Run a program of this repository to its end; kill its processes after a time limit.

    Args:
        script: file in `scripts`, or a command of `mcore-rl`.
        launcher: start it by torchrun and a new interpreter, not by a fork of the server of test processes.
    """
    is_script = str(script).endswith(".py")
    command = [*([ROOT / "scripts" / script] if is_script else ["-m", "mcore_rl", script]), *arguments]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    if launcher:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes]
        process = subprocess.Popen(
            [sys.executable, *map(str, [*torchrun, *command])],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=environment,
        )
    else:
        process = ForkedProgram(command, environment, processes)
    try:
        out, err = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        out, err = process.communicate(timeout=TIMEOUT)
        pytest.fail(f"{script} took longer than {TIMEOUT} s\n{out}\n{err}")
    process.stdout_text, process.stderr_text = out, err
    if check:
        assert process.returncode == 0, out + err
    return process


def metrics_of(directory, name="metrics.jsonl", own=()):
    """Return the lines of a log. The page of metrics must describe all metrics of metrics.jsonl but a loss's `own`."""
    lines = [json.loads(line) for line in (directory / name).read_text().splitlines()]
    if name == "metrics.jsonl":
        names = {metric for line in lines for metric in line} - {"step", *own}
        assert not [metric for metric in names if meaning_of(metric) is None], "add them to metric_meanings.yaml"
    return lines


def comparable(directory):
    timings = ("seconds", "per_second")
    return [{k: v for k, v in line.items() if not k.endswith(timings)} for line in metrics_of(directory)]
