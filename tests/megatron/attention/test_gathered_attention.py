"""Tests of attention that reads only chosen keys: both ways on the CPU, and Triton's kernels by its interpreter."""

import importlib.util
import re

import pytest
import torch
from float32 import FORWARD, assert_close32
from gpu_process import run_on
from triton_cases import compile_for_h100

from mcore_rl.platform import initialize_platform

initialize_platform()  # the interpreter's processes import this file first

from mcore_rl.models.megatron.kernels import gathered_attention as module
from mcore_rl.models.megatron.kernels.gathered_attention import Choice, gathered_attention

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton: make test-triton")

CASES = {
    # queries, heads, groups, dim, topk, keys in a block, own choice of each group, order of keys, sinks
    "keys of all heads": (37, 4, 1, 24, 9, 1, False, False, False),
    "small heads": (9, 2, 1, 8, 5, 1, False, False, False),
    "a head of its own": (5, 3, 3, 16, 4, 1, True, False, True),
    "latent heads": (6, 20, 1, 80, 70, 1, False, True, True),
    "many heads": (4, 70, 1, 48, 40, 1, False, True, False),
    "blocks": (50, 6, 2, 40, 3, 5, True, False, False),
    "blocks in another order": (41, 12, 3, 32, 2, 17, True, True, True),
}


def make_inputs(queries, heads, groups, dim, topk, size, own, ordered, has_sinks, dtype=torch.float32):
    """Return tensors for two rows of keys; the queries are the last tokens of the rows."""
    g = torch.Generator().manual_seed(queries)
    lengths = [queries // 3, queries - queries // 3]
    before = [7, 4 * topk * size]  # keys before the first query of each row
    total = sum(lengths) + sum(before)
    query, grad = (torch.randn(queries, heads, dim, generator=g).to(dtype) for _ in range(2))
    key, value = (torch.randn(total, groups, dim, generator=g).to(dtype) for _ in range(2))
    sinks = torch.randn(heads, generator=g).to(dtype) if has_sinks else None
    ends = torch.cat([b + 1 + torch.arange(n) for b, n in zip(before, lengths, strict=True)])
    first = torch.tensor([0, before[0] + lengths[0]]).repeat_interleave(torch.tensor(lengths))
    chosen = torch.full((queries, groups if own else 1, topk), -1)
    for t, end in enumerate(ends.tolist()):
        count = -(-end // size)
        for s in range(chosen.shape[1]):
            found = torch.randperm(count - 1, generator=g)[: topk - 1]
            chosen[t, s, : len(found) + 1] = torch.cat((found, torch.tensor([count - 1])))
    chosen[1] = -1  # a query that sees nothing
    order = None
    if ordered:  # both rows begin with the same keys
        order = torch.randperm(total, generator=g)
        order[before[0] + lengths[0] :][: before[0]] = order[: before[0]]
    return query, key, value, sinks, grad, Choice(chosen.int(), first.int(), ends.int(), order, size)


def exact(query, key, value, sinks, grad, choice):
    """Return outputs and gradients in float64, query by query."""
    leaves = [x.double().requires_grad_() for x in (query, key, value, *([] if sinks is None else [sinks]))]
    query, key, value = leaves[:3]
    outs, repeats = [], query.shape[1] // key.shape[1]
    for t in range(len(query)):
        of_heads = []
        for head in range(query.shape[1]):
            group = head // repeats
            blocks = choice.chosen[t, min(group, choice.chosen.shape[1] - 1)].tolist()
            places = [b * choice.size + i for b in blocks if b >= 0 for i in range(choice.size)]
            seen = [int(choice.first[t]) + p for p in places if p < choice.ends[t]]
            rows = torch.tensor(seen, dtype=torch.long)
            rows = rows if choice.order is None else choice.order[rows]
            scores = key[rows, group] @ query[t, head] * SCALE
            if len(leaves) > 3:
                scores = torch.cat((scores, leaves[3][head][None]))
            of_heads.append(scores.softmax(0)[: len(rows)] @ value[rows, group])
        outs.append(torch.stack(of_heads))
    out = torch.stack(outs)
    return out.detach(), *torch.autograd.grad(out, leaves, grad.double())


SCALE = 0.37


def ours(kernels, query, key, value, sinks, grad, choice):
    module.kernels = lambda *_: kernels
    leaves = [x.clone().requires_grad_() for x in (query, key, value, *([] if sinks is None else [sinks]))]
    out = gathered_attention(*leaves[:3], choice, SCALE, *leaves[3:])
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_both_ways_equal_float64(case, monkeypatch):
    monkeypatch.setattr(module, "kernels", None)
    monkeypatch.setitem(module.GATHERED_ELEMENTS, "cpu", 5000)
    monkeypatch.setattr(module, "SCORES_AT_A_TIME", 3000)
    inputs = make_inputs(*case)
    wanted = exact(*inputs)
    for way in ("queries", "blocks"):
        kernels = module.Kernels(getattr(module, f"forward_by_{way}"), getattr(module, f"backward_by_{way}"))
        for got, right in zip(ours(kernels, *inputs), wanted, strict=True):
            assert_close32(got.double(), right, FORWARD)


@pytest.mark.parametrize("size", [1, 17])
def test_keys_and_values_are_kept_as_the_views_that_they_were(size):
    """A layer recognizes them by their memory, and under context parallelism gathers them again instead."""
    query, key, _, _, _, choice = make_inputs(11, 4, 2, 24, 3, size, True, True, False)
    gathered = torch.cat((key, key + 1), -1).requires_grad_()
    views, saved = gathered.split(24, -1), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        gathered_attention(query, *views, choice, SCALE)
    kept = [x for x in saved if x.shape == key.shape]
    assert [x.untyped_storage().data_ptr() for x in kept] == [gathered.untyped_storage().data_ptr()] * 2


def interpreted_results(case, dtype):
    from mcore_rl.models.megatron.kernels import triton_gathered_attention

    triton_gathered_attention.KEYS = 16
    inputs = make_inputs(*case, dtype)
    by_torch = module.Kernels(module.forward_by_queries, module.backward_by_queries)
    return [ours(kernels, *inputs) for kernels in (module.triton_kernels(), by_torch)], exact(*inputs)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernels_equal_float64(case, dtype, monkeypatch):
    """Half precision rounds probabilities before their products. The interpreter has no products in bfloat16."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    (by_kernels, by_torch), wanted = run_on("cpu", interpreted_results, case, dtype)
    for got, plain, right in zip(by_kernels, by_torch, wanted, strict=True):
        if dtype == torch.float32:
            assert_close32(got.double(), right, FORWARD)
        else:
            error, of_plain = (float((x.double() - right).norm() / right.norm()) for x in (got, plain))
            assert error < 3 * max(of_plain, 2e-3)


POINTERS = {"chosen": "*i32", "first": "*i32", "ends": "*i32", "order": "*i64", "lses": "*fp32", "means": "*fp32"}
POINTERS |= {"of_keys": "*fp32", "of_values": "*fp32"}
SHAPES = {
    # query heads, groups, dim, keys in a block; largest number of bytes that a thread may spill
    "MiniMax-M3": (64, 4, 128, 128, 64),
    "latent": (64, 1, 576, 1, 1200),
}


@needs_triton
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", ["forward_kernel", "backward_kernel"])
def test_kernels_compile_for_an_h100(name, shape):
    from mcore_rl.models.megatron.kernels import triton_gathered_attention

    heads, groups, dim, size, most = shape
    query, key = (torch.empty(8, n, dim, dtype=torch.bfloat16, device="meta") for n in (heads, groups))
    numbers = torch.empty(8, dtype=torch.int32)
    choice = Choice(torch.empty(8, 1, 16, dtype=torch.int32), numbers, numbers, numbers, size)
    kernel = getattr(triton_gathered_attention, name)
    constants = {"SINKS": True, **triton_gathered_attention._constants(query, key, choice)[1]}
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    scalars = dict.fromkeys(("count", "heads", "groups", "sets"), "i32") | {"scale": "fp32"}
    done = compile_for_h100(kernel, triton_gathered_attention.WARPS, constants, POINTERS, scalars, "*bf16")
    assert done.returncode == 0, done.stderr
    spilled, registers = re.findall(r"(\d+) bytes spill", done.stderr), re.findall(r"Used (\d+)", done.stderr)
    print(name, shape, registers, "registers", spilled, "bytes spilled")
    assert max(map(int, spilled)) <= most
