"""Processes without a GPU: freed memory is kept, and no triton is needed."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from mcore_rl.platform import cpu

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


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc")
def test_freed_memory_is_used_again():
    """The test runs in a process of its own, because other tests leave gaps in this process's memory."""
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, timeout=120)
    assert int(done.stdout) < 10_000, done.stderr  # of 146,000 pages


RESIDENT = """
import torch
from mcore_rl.platform import cpu

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 // 10**6

cpu.keep_freed_memory()
tensors = [torch.ones(250_000) for _ in range(300)]  # 300 MB in blocks of 1 MB
kept = tensors[-1]
del tensors[:-1]
before = resident()
cpu.return_freed_memory()
print(before - resident(), float(kept.sum()))
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc")
def test_freed_memory_is_returned():
    """Also what lies below a block in use."""
    done = subprocess.run([sys.executable, "-c", RESIDENT], capture_output=True, text=True, timeout=120)
    freed, total = done.stdout.split()
    assert int(freed) > 200 and float(total) == 250_000, done.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
def test_products_of_few_rows(has_bias, dtype):
    generator = torch.Generator().manual_seed(0)
    weight, bias = (torch.randn(size, generator=generator, dtype=torch.float64) for size in ((77, 33), (77,)))
    bias = bias if has_bias else None
    for shape in ((0,), (1,), (2,), (3,), (8,), (9,), (32,), (65,), (256,), (257,), (3, 1), (2, 5), ()):
        x = torch.randn(*shape, 33, generator=generator, dtype=torch.float64)
        own = cpu.linear_of_few_rows(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
        assert own.shape == (*shape, 77) and own.dtype == dtype
        expected = F.linear(x, weight, bias)
        limit = {torch.float32: 2e-5, torch.bfloat16: 0.3, torch.float64: 1e-12}[dtype]
        assert torch.allclose(own.double(), expected, atol=limit, rtol=0)
    sliced = torch.randn(33, 9, generator=generator, dtype=dtype).T
    expected = F.linear(sliced.double(), weight.to(dtype).double())
    limit = {torch.float32: 2e-5, torch.bfloat16: 0.3, torch.float64: 1e-12}[dtype]
    assert torch.allclose(cpu.linear_of_few_rows(sliced, weight.to(dtype)).double(), expected, atol=limit, rtol=0)


@pytest.mark.long
def test_megatron_is_imported_without_triton():
    program = """
import sys
sys.modules["triton"] = None
from mcore_rl.platform import initialize_platform
initialize_platform()
import mcore_rl.models.policy.megatron_policy
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)
