"""The computations on tiles of logits in `mcore_rl.distributed.logprobs`, as Triton kernels.

Matrix products are computed by torch. Each kernel passes over a tile once. A program of a kernel computes a row or a
part of a row. The kernels use neither atomics nor autotuning: both would change the order of sums. Therefore the same
inputs give the same bits.
"""

# mypy: disallow_untyped_defs=False
# Triton reads the annotations of kernels.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 2048, 8
"""Number of columns that a program reads at a time, and number of its warps: each of 256 threads reads 8 columns."""


@triton.jit
def add_kernel(
    products, local, peaks, totals, moments, picked, columns, first_column, K, inverse_temperature,
    LOWEST: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add one row of a tile to its running sums (see `logprobs.SoftmaxSums`)."""
    row = tl.program_id(0).to(tl.int64)
    of_row = products + row * columns
    peak, total, moment = tl.load(peaks + row), tl.load(totals + row), tl.load(moments + row)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(of_row + at, mask=at < columns, other=float("-inf")) * inverse_temperature
        # A maximum may hide NaN. The sums below do not.
        higher = tl.maximum(peak, tl.max(x, axis=0))
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        log_before = peak - finite
        before = tl.exp(log_before)
        log_z = x - finite
        z = tl.exp(log_z)
        if ENTROPY:  # 0 times the logarithm of 0 is 0
            moment = (moment + total * tl.maximum(log_before, LOWEST)) * before
            moment += tl.sum(z * tl.maximum(log_z, LOWEST), axis=0)
        total = total * before + tl.sum(z, axis=0)
        peak = higher
    tl.store(peaks + row, peak)
    tl.store(totals + row, total)
    tl.store(moments + row, moment)
    for k in range(K):
        target = tl.load(local + row * K + k) - first_column
        if (target >= 0) & (target < columns):
            tl.store(picked + row * K + k, tl.load(of_row + target) * inverse_temperature)


@triton.jit
def gradient_kernel(
    products, out, local, of_targets, of_lse, of_entropy, lses, entropies, columns, first_column, K,
    inverse_temperature, LOWEST: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a part of a row's gradient (see `logprobs.logprob_gradient`) to `out`, which may be `products`.

    The gradient is exactly 0 if the loss does not use the row.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(products + row * columns + at, mask=at < columns, other=0.0) * inverse_temperature
    logp = x - tl.load(lses + row)
    g = tl.load(of_lse + row)
    used = g != 0.0
    weight = tl.zeros((BLOCK,), tl.float32) - g
    if ENTROPY:
        h = tl.load(of_entropy + row)
        used = used | (h != 0.0)
        weight -= h * (tl.maximum(logp, LOWEST) + tl.load(entropies + row))
    gradient = tl.exp(logp) * weight
    for k in range(K):
        of_target = tl.load(of_targets + row * K + k)
        used = used | (of_target != 0.0)
        gradient += tl.where(at + first_column == tl.load(local + row * K + k), of_target, 0.0)
    gradient = tl.where(used, gradient, 0.0) * inverse_temperature
    tl.store(out + row * columns + at, gradient.to(out.dtype.element_ty), mask=at < columns)


def add_tile(
    lowest: float, x: Tensor, peak: Tensor, total: Tensor, moment: Tensor, picked: Tensor, targets: Tensor,
    first_column: int, temperature: float, with_entropy: bool,
) -> None:  # fmt: skip
    """Add a tile to running sums (see `TileSteps`), by `add_kernel`; `x` is not yet divided by the temperature.

    Args:
        lowest: the logarithm of 0, in nats, in products with 0.
    """
    add_kernel[(len(x),)](
        x, targets, peak, total, moment, picked, x.shape[1], first_column, targets.shape[1], 1 / temperature,
        LOWEST=lowest, ENTROPY=with_entropy, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip


def tile_gradient(
    lowest: float, x: Tensor, lse: Tensor, entropy: Tensor, local: Tensor, of_targets: Tensor, of_lse: Tensor,
    of_entropy: Tensor | None, first_column: int, temperature: float, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Return the gradient with respect to a tile's products `x` (see `TileSteps`), by `gradient_kernel`."""
    out = x if dtype == x.dtype else torch.empty_like(x, dtype=dtype)
    gradient_kernel[(len(x), triton.cdiv(x.shape[1], BLOCK))](
        x, out, local, of_targets, of_lse, of_lse if of_entropy is None else of_entropy, lse, entropy,
        x.shape[1], first_column, local.shape[1], 1 / temperature,
        LOWEST=lowest, ENTROPY=of_entropy is not None, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return out
