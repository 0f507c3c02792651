"""On the CPU, float32 products are computed by oneDNN, with the results of torch's kernel; freed memory is kept."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mcore_rl.distributed.logprobs import linear_logprobs
from mcore_rl.distributed.sampling_mask import KeptTokens, kept_tiles
from mcore_rl.platform import cpu

LARGE = 256
"""Products of square matrices of this size are computed by oneDNN."""


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def onednn_calls(profile: torch.autograd.profiler.profile) -> int:
    return sum(event.name == "mkldnn::_linear_pointwise" for event in profile.function_events)


CASES = {
    "whole": (random(100, 200), random(200, 300)),
    "transposed": (random(200, 100).T, random(300, 200).T),
    "a large transposed factor": (random(200, 900).T, random(200, 100)),
    "columns of larger matrices": (random(100, 500)[:, 7:207], random(200, 301)[:, 1:]),
    "every second row and column": (random(200, 400)[::2, ::2], random(200, 300)),
    "an expanded row": (random(100, 200), random(1, 300).expand(200, 300)),
    "overlapping rows": (random(900).unfold(0, 200, 2), random(897).unfold(0, 300, 3)),
    "one row": (random(1, 900), random(900, 5000)),
    "one column": (random(5000, 900), random(900, 1)),
    "a transposed factor of many rows": (random(1300, 64).T, random(1300, 96)),
    "many rows": (random(1300, 64), random(64, 96)),
    "one term": (random(2500, 1), random(1, 1700)),
}


@pytest.mark.parametrize("parts", [4, 8])
def test_coarse_sizes_are_few_and_near(parts):
    sizes = [cpu.coarse_size(size, parts) for size in range(1, 1025)]
    assert all(size <= coarse < size * (1 + 1 / parts) for size, coarse in enumerate(sizes, 1))
    assert sizes[: 2 * parts] == list(range(1, 2 * parts + 1))
    assert len(set(sizes[512:])) == parts


@pytest.mark.parametrize("name", CASES)
def test_products_of_any_strides_equal_float64s(name):
    x, y = CASES[name]
    with torch.autograd.profiler.profile() as profile:
        product = x @ y
    torch.testing.assert_close(product.double(), x.double() @ y.double(), atol=2e-5 * x.shape[1] ** 0.5, rtol=1e-5)
    assert product.is_contiguous()
    assert onednn_calls(profile) >= 1


@pytest.mark.parametrize("tokens", [LARGE, 2 * LARGE + 9])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("right", ["columns of a larger matrix", "a transposed matrix", "an expanded matrix"])
def test_the_right_factor_has_no_gaps(monkeypatch, tokens, is_transposed, right):
    """oneDNN takes 1000 times as long if the factor has gaps in memory."""
    x = random(tokens, LARGE).T if is_transposed else random(tokens, LARGE)
    terms = x.shape[1]
    y = {"columns of a larger matrix": random(terms, 500)[:, 7:307], "a transposed matrix": random(300, terms).T}
    y["an expanded matrix"] = random(1, 1).expand(terms, 300)
    weights, onednn = [], cpu._onednn
    monkeypatch.setattr(cpu, "_onednn", lambda x, weight, *rest: (weights.append(weight), onednn(x, weight, *rest))[1])
    product = x @ y[right]
    torch.testing.assert_close(product.double(), x.double() @ y[right].double(), atol=1e-3, rtol=1e-4)
    assert weights and all(weight.is_contiguous() or weight.T.is_contiguous() for weight in weights)


def test_a_linear_layer_and_its_gradients_are_products_of_onednn():
    layer, x = torch.nn.Linear(LARGE, LARGE, bias=False), random(2, LARGE // 2, LARGE).requires_grad_()
    with torch.autograd.profiler.profile() as profile, FlopCounterMode(display=False) as counter:
        layer(x).backward(random(2, LARGE // 2, LARGE))
    assert onednn_calls(profile) == 3
    assert counter.get_total_flops() == 3 * 2 * LARGE**3


def test_products_of_many_numbers_of_tokens_have_few_shapes():
    """oneDNN keeps compiled code for each shape."""
    weight, shapes = random(300, 200), set()
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        for tokens in range(20, 1400, 37):
            x, gradient = random(tokens, 200), random(tokens, 300)
            x @ weight.T, gradient @ weight, gradient.T @ x
    for event in profile.function_events:
        if event.name == "mkldnn::_linear_pointwise":
            shapes.add(str(event.input_shapes))
    assert 3 < len(shapes) <= 3 * 10


def test_log_probabilities_over_kept_tokens_have_no_products_of_onednn():
    """The number of kept tokens, and so the shape, differs from tile to tile."""
    hidden, weight = random(64, LARGE).requires_grad_(), random(2000, LARGE).requires_grad_()
    ids = torch.stack([torch.randperm(2000)[:30] for _ in range(64)])
    tiles = list(kept_tiles(KeptTokens.of(ids.tolist()), ids[:, 0], 0, 2000, (64, 2000)))
    with torch.autograd.profiler.profile() as profile:
        linear_logprobs(hidden, weight, ids[:, 0], kept=tiles)[0].sum().backward()
    assert onednn_calls(profile) == 0
    with torch.autograd.profiler.profile() as profile:
        linear_logprobs(hidden, weight, ids[:, 0])[0].sum().backward()
    assert onednn_calls(profile) > 0


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
faults()
print(sum(faults() for _ in range(5)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc")
def test_freed_memory_is_used_again():
    """The test runs in a process of its own, because other tests leave gaps in this process's memory."""
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, timeout=120)
    assert int(done.stdout) < 10_000, done.stderr  # of 146,000 pages


@pytest.mark.parametrize("tokens", [1, 31, 256, 700, 1025])
@pytest.mark.parametrize("bias", [None, random(40)])
def test_linear_layers_of_generation(tokens, bias):
    x, weight = random(1, tokens, 60), random(40, 60)
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(cpu.linear(x, weight, bias).double(), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("size, dtype", [(LARGE, torch.float64), (LARGE, torch.bfloat16), (8, torch.float32)])
def test_other_products_are_torchs(size, dtype):
    x, y = random(size, size).to(dtype), random(size, size + 1).to(dtype)
    with torch.autograd.profiler.profile() as profile:
        product = x @ y
    assert torch.equal(product, torch.mm(x, y, out=torch.empty(size, size + 1, dtype=dtype)))
    assert onednn_calls(profile) == 0


def test_comparisons_can_use_the_kernel_of_torch():
    x = random(LARGE, LARGE)
    with torch.autograd.profiler.profile() as profile, cpu.kernel_of_torch():
        with cpu.kernel_of_torch():
            pass
        assert torch.equal(x @ x, torch.mm(x, x, out=torch.empty_like(x)))
    assert onednn_calls(profile) == 0
    with torch.autograd.profiler.profile() as profile:
        x @ x
    assert onednn_calls(profile) == 1


@pytest.mark.parametrize("shape", [(0, 5, 7), (5, 0, 7), (5, 7, 0)])
def test_empty_products(shape):
    rows, terms, columns = shape
    product = torch.empty(rows, terms) @ torch.empty(terms, columns)
    assert torch.equal(product, torch.zeros(rows, columns))


def test_factors_of_different_types_are_refused():
    with pytest.raises(RuntimeError, match="dtype"):
        random(LARGE, LARGE) @ random(LARGE, LARGE).double()


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("shape", [(400, 1000), (600, 1000), (1, 1000), (1000,)])
def test_factors_whose_shapes_do_not_fit_are_refused(is_transposed, shape):
    x = random(500, 1000).T if is_transposed else random(1000, 500)
    with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied|must be a matrix"):
        torch.mm(x, random(*shape))


def test_megatron_is_imported_without_triton():
    program = """
import sys
sys.modules["triton"] = None
from mcore_rl.platform import initialize_platform
initialize_platform()
import mcore_rl.models.policy.megatron_policy
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)
