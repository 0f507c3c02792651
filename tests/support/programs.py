"""Helpers of tests that run whole programs: start them, and read their metrics."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SUPPORT = ROOT / "tests" / "support"
TIMEOUT = 240


def run(script, *arguments, processes=1, check=True):
    """The finished script; its whole process group is killed if it takes too long."""
    command = [sys.executable, ROOT / "scripts" / script]
    if processes > 1:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command = [*launcher, *command[1:]]
    process = subprocess.Popen(
        [*map(str, command), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    )
    try:
        process.stdout_text, process.stderr_text = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"{script} took longer than {TIMEOUT} s\n{out}\n{err}")
    if check:
        assert process.returncode == 0, process.stdout_text + process.stderr_text
    return process


def metrics_of(directory, name="metrics.jsonl"):
    return [json.loads(line) for line in (directory / name).read_text().splitlines()]


def comparable(directory):
    timings = ("seconds", "per_second")
    return [{k: v for k, v in line.items() if not k.endswith(timings)} for line in metrics_of(directory)]
