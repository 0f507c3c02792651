"""Processes without a GPU: freed memory is kept, and no triton is needed."""

import subprocess
import sys

import pytest

FAULTS = """
import resource
import torch
from mcore_rl.platform import cpu

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(1_000_000) for _ in range(30)]  # 120 MB; glibc alone returns most of them to Linux
    del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

cpu.keep_freed_memory()
for _ in range(3):  # depending on the gaps in the heap, it grows in the first rounds
    faults()
print(sum(faults() for _ in range(5)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc")
def test_freed_memory_is_used_again():
    """The test runs in a process of its own, because other tests leave gaps in this process's memory."""
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, timeout=120)
    assert int(done.stdout) < 10_000, done.stderr  # of 146,000 pages


def test_megatron_is_imported_without_triton():
    program = """
import sys
sys.modules["triton"] = None
from mcore_rl.platform import initialize_platform
initialize_platform()
import mcore_rl.models.policy.megatron_policy
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)
