"""The two passes of `gathered_attention` as Triton kernels.

A program computes some query heads of one query and one group. It reads the chosen keys one block of rows at a time,
and each key once for all its heads. The backward pass adds to the gradients of keys by atomic operations, whose order
changes from run to run: deterministic runs do not use it.

A head's elements are divided into two parts with sizes that Triton has: 576 are 512 and 64, 192 are 128 and 64.
"""

# mypy: disallow_untyped_defs=False
# Triton reads the annotations of kernels.
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

KEYS, WARPS = 32, 4
"""Number of keys that a program reads at a time, and number of its warps."""
LEAST = 16
"""Smallest size of a matrix in Triton's products, and number of heads of a program: more do not fit into registers."""


@triton.jit
def rows_of(chosen, order, first, end, start, count, SIZE: tl.constexpr, ORDERED: tl.constexpr, N: tl.constexpr):
    """Return the rows of the keys in places `start` … of a query's choice, and which of them the query sees."""
    at = start + tl.arange(0, N)
    block = tl.load(chosen + at // SIZE, mask=at < count, other=-1)
    place = block * SIZE + at % SIZE
    seen = (block >= 0) & (place < end)
    row = (first + place).to(tl.int64)
    if ORDERED:
        row = tl.load(order + row, mask=seen, other=0).to(tl.int64)
    return row, seen


@triton.jit
def forward_kernel(
    query, key, value, sinks, chosen, first, ends, order, out, lses, count, heads, groups, sets, scale,
    REPEATS: tl.constexpr, SIZE: tl.constexpr, ORDERED: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, H: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Write the outputs and log-sum-exps of H heads of a query."""
    t, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head = tl.program_id(2) * H + tl.arange(0, H)
    used = head < REPEATS
    head = group * REPEATS + head
    in1, in2 = tl.arange(0, D1), D1 + tl.arange(0, D2)
    heads1, heads2 = used[:, None] & (in1 < D)[None], used[:, None] & (in2 < D)[None]
    of_head = (t * heads + head)[:, None] * D
    q1 = tl.load(query + of_head + in1[None], mask=heads1, other=0.0)
    if D > D1:
        q2 = tl.load(query + of_head + in2[None], mask=heads2, other=0.0)
    if SINKS:
        peak = tl.load(sinks + head, mask=used, other=0.0).to(tl.float32)
        total = tl.full((H,), 1.0, tl.float32)
    else:
        peak = tl.full((H,), float("-inf"), tl.float32)
        total = tl.zeros((H,), tl.float32)
    sum1, sum2 = tl.zeros((H, D1), tl.float32), tl.zeros((H, D2), tl.float32)
    of_query = chosen + (t * sets + tl.minimum(group, sets - 1)) * (count // SIZE)
    begin, end = tl.load(first + t), tl.load(ends + t)
    for start in range(0, count, N):
        row, seen = rows_of(of_query, order, begin, end, start, count, SIZE, ORDERED, N)
        of_key = ((row * groups + group) * D)[:, None]
        mask1, mask2 = seen[:, None] & (in1 < D)[None], seen[:, None] & (in2 < D)[None]
        k1 = tl.load(key + of_key + in1[None], mask=mask1, other=0.0)
        s = tl.dot(q1, tl.trans(k1), input_precision=PRECISION)
        if D > D1:
            k2 = tl.load(key + of_key + in2[None], mask=mask2, other=0.0)
            s += tl.dot(q2, tl.trans(k2), input_precision=PRECISION)
        s = tl.where(seen[None], s * scale, float("-inf"))
        higher = tl.maximum(peak, tl.max(s, axis=1))
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        before, p = tl.exp(peak - finite), tl.exp(s - finite[:, None])
        total = total * before + tl.sum(p, axis=1)
        p = p.to(value.dtype.element_ty)
        v1 = tl.load(value + of_key + in1[None], mask=mask1, other=0.0)
        sum1 = sum1 * before[:, None] + tl.dot(p, v1, input_precision=PRECISION)
        if D > D1:
            v2 = tl.load(value + of_key + in2[None], mask=mask2, other=0.0)
            sum2 = sum2 * before[:, None] + tl.dot(p, v2, input_precision=PRECISION)
        peak = higher
    empty = total == 0.0  # the query sees nothing: its output is 0
    total = tl.where(empty, 1.0, total)
    tl.store(out + of_head + in1[None], (sum1 / total[:, None]).to(out.dtype.element_ty), mask=heads1)
    if D > D1:
        tl.store(out + of_head + in2[None], (sum2 / total[:, None]).to(out.dtype.element_ty), mask=heads2)
    tl.store(lses + t * heads + head, tl.where(empty, 0.0, peak + tl.log(total)), mask=used)


@triton.jit
def backward_kernel(
    query, key, value, chosen, first, ends, order, grad, lses, means, of_queries, of_keys, of_values,
    count, heads, groups, sets, scale,
    REPEATS: tl.constexpr, SIZE: tl.constexpr, ORDERED: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, H: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Write the gradients of H heads of a query, and add to those of its keys and values."""
    t, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head = tl.program_id(2) * H + tl.arange(0, H)
    used = head < REPEATS
    head = group * REPEATS + head
    in1, in2 = tl.arange(0, D1), D1 + tl.arange(0, D2)
    heads1, heads2 = used[:, None] & (in1 < D)[None], used[:, None] & (in2 < D)[None]
    of_head = (t * heads + head)[:, None] * D
    q1 = tl.load(query + of_head + in1[None], mask=heads1, other=0.0)
    g1 = tl.load(grad + of_head + in1[None], mask=heads1, other=0.0)
    if D > D1:
        q2 = tl.load(query + of_head + in2[None], mask=heads2, other=0.0)
        g2 = tl.load(grad + of_head + in2[None], mask=heads2, other=0.0)
    lse = tl.load(lses + t * heads + head, mask=used, other=0.0)
    mean = tl.load(means + t * heads + head, mask=used, other=0.0)
    sum1, sum2 = tl.zeros((H, D1), tl.float32), tl.zeros((H, D2), tl.float32)
    of_query = chosen + (t * sets + tl.minimum(group, sets - 1)) * (count // SIZE)
    begin, end = tl.load(first + t), tl.load(ends + t)
    for start in range(0, count, N):
        row, seen = rows_of(of_query, order, begin, end, start, count, SIZE, ORDERED, N)
        of_key = ((row * groups + group) * D)[:, None]
        mask1, mask2 = seen[:, None] & (in1 < D)[None], seen[:, None] & (in2 < D)[None]
        k1 = tl.load(key + of_key + in1[None], mask=mask1, other=0.0)
        v1 = tl.load(value + of_key + in1[None], mask=mask1, other=0.0)
        s = tl.dot(q1, tl.trans(k1), input_precision=PRECISION)
        dp = tl.dot(g1, tl.trans(v1), input_precision=PRECISION)
        if D > D1:
            k2 = tl.load(key + of_key + in2[None], mask=mask2, other=0.0)
            v2 = tl.load(value + of_key + in2[None], mask=mask2, other=0.0)
            s += tl.dot(q2, tl.trans(k2), input_precision=PRECISION)
            dp += tl.dot(g2, tl.trans(v2), input_precision=PRECISION)
        p = tl.exp(tl.where(seen[None] & used[:, None], s * scale, float("-inf")) - lse[:, None])
        ds = (p * (dp - mean[:, None]) * scale).to(query.dtype.element_ty)
        p = p.to(query.dtype.element_ty)
        of_value, of_score = tl.trans(p), tl.trans(ds)
        sum1 += tl.dot(ds, k1, input_precision=PRECISION)
        part = tl.dot(of_value, g1, input_precision=PRECISION)
        tl.atomic_add(of_values + of_key + in1[None], part, mask=mask1, sem="relaxed")
        part = tl.dot(of_score, q1, input_precision=PRECISION)
        tl.atomic_add(of_keys + of_key + in1[None], part, mask=mask1, sem="relaxed")
        if D > D1:
            sum2 += tl.dot(ds, k2, input_precision=PRECISION)
            part = tl.dot(of_value, g2, input_precision=PRECISION)
            tl.atomic_add(of_values + of_key + in2[None], part, mask=mask2, sem="relaxed")
            part = tl.dot(of_score, q2, input_precision=PRECISION)
            tl.atomic_add(of_keys + of_key + in2[None], part, mask=mask2, sem="relaxed")
    tl.store(of_queries + of_head + in1[None], sum1.to(of_queries.dtype.element_ty), mask=heads1)
    if D > D1:
        tl.store(of_queries + of_head + in2[None], sum2.to(of_queries.dtype.element_ty), mask=heads2)


def _constants(query: Tensor, key: Tensor, choice: Any) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Return the grid of programs, and the constants of both kernels."""
    (queries, heads, dim), groups = query.shape, key.shape[1]
    repeats, first = heads // groups, max(LEAST, 1 << (dim.bit_length() - 1))
    constants = {
        "REPEATS": repeats, "SIZE": choice.size, "ORDERED": choice.order is not None,
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
        "D": dim, "D1": first, "D2": max(LEAST, triton.next_power_of_2(max(dim - first, 1))), "H": LEAST, "N": KEYS,
        "num_warps": WARPS,
    }  # fmt: skip
    return (queries, groups, triton.cdiv(repeats, LEAST)), constants


def forward(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, choice: Any, scale: float
) -> tuple[Tensor, Tensor]:
    """See `gathered_attention.Kernels`."""
    grid, constants = _constants(query, key, choice)
    out, lses = torch.empty_like(query), query.new_empty(query.shape[:2], dtype=torch.float32)
    forward_kernel[grid](
        query, key, value, lses if sinks is None else sinks, choice.chosen, choice.first, choice.ends,
        choice.chosen if choice.order is None else choice.order, out, lses, choice.most, query.shape[1], key.shape[1],
        choice.chosen.shape[1], scale, SINKS=sinks is not None, **constants,
    )  # fmt: skip
    return out, lses


def backward(
    query: Tensor, key: Tensor, value: Tensor, choice: Any, scale: float, grad: Tensor, lses: Tensor, means: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See `gathered_attention.Kernels`."""
    grid, constants = _constants(query, key, choice)
    of_query = torch.empty_like(query)
    of_key, of_value = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (key, value))
    backward_kernel[grid](
        query, key, value, choice.chosen, choice.first, choice.ends,
        choice.chosen if choice.order is None else choice.order, grad, lses, means, of_query, of_key, of_value,
        choice.most, query.shape[1], key.shape[1], choice.chosen.shape[1], scale, **constants,
    )  # fmt: skip
    return of_query, of_key, of_value
