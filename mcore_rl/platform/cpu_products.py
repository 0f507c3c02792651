"""Products of float32 matrices on the CPU by oneDNN.

torch computes them by MKL, which does not use AVX-512 on AMD's processors. oneDNN does, and takes 0.4 to 0.6 of the
time there (docs/benchmarks.md). torch has no setting for it, so this module replaces the kernel of `aten::mm`, through
which the linear layers, the LM head and their gradients go, for the whole process.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor

SMALLEST = 2**20
"""The fewest multiplications for which oneDNN is called; below, the call itself takes longer than the product."""

_kernels: list[torch.library.Library] = []


def install() -> None:
    """Use oneDNN for float32 products of this process, if torch has it. Idempotent."""
    if _kernels or not torch.backends.mkldnn.is_available():
        return
    _kernels.append(torch.library.Library("aten", "IMPL"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"[\s\S]*Overriding a previously registered kernel")
        _kernels[0].impl("mm", _product, "CPU")


@contextlib.contextmanager
def kernel_of_torch() -> Iterator[None]:
    """Compute products inside as programs without this package do, for comparisons."""
    while _kernels:
        _kernels.pop()._destroy()
    try:
        yield
    finally:
        install()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `F.linear` of float32 tensors by oneDNN, without gradient."""
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y


def _product(x: Tensor, y: Tensor) -> Tensor:
    if x.dtype != torch.float32 or y.dtype != torch.float32 or math.prod((*x.shape, y.shape[1])) < SMALLEST:
        return torch.mm(x, y, out=x.new_empty(x.shape[0], y.shape[1]))  # this overload has torch's kernel
    if not x.is_contiguous() and x.numel() > y.numel():  # a left factor is copied: let it be the smaller one
        return linear(y.t(), x).t().contiguous()
    return linear(x, y.t())
