"""Float32 products on the CPU are computed by oneDNN, with the results that torch's kernel gives."""

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mcore_rl.platform import cpu

LARGE = 128
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
    "one row": (random(1, 900), random(900, 1200)),
    "one column": (random(900, 1200), random(1200, 1)),
    "one term": (random(1200, 1), random(1, 900)),
}


@pytest.mark.parametrize("name", CASES)
def test_products_of_any_strides_equal_float64s(name):
    x, y = CASES[name]
    with torch.autograd.profiler.profile() as profile:
        product = x @ y
    torch.testing.assert_close(product.double(), x.double() @ y.double(), atol=2e-5 * x.shape[1] ** 0.5, rtol=1e-5)
    assert product.is_contiguous()
    assert onednn_calls(profile) == 1


def test_a_linear_layer_and_its_gradients_are_products_of_onednn():
    layer, x = torch.nn.Linear(LARGE, LARGE, bias=False), random(2, LARGE // 2, LARGE).requires_grad_()
    with torch.autograd.profiler.profile() as profile, FlopCounterMode(display=False) as counter:
        layer(x).backward(random(2, LARGE // 2, LARGE))
    assert onednn_calls(profile) == 3
    assert counter.get_total_flops() == 3 * 2 * LARGE**3


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
