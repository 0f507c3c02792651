"""Tests of attention over packs against plain softmax: outputs and all gradients, for every division of tokens."""

import gc
import weakref
from collections import Counter
from inspect import signature
from itertools import pairwise, product
from types import SimpleNamespace

import pytest
import torch
from attention_cases import DIM, HEADS, LONG, expected, in_one_process, inputs, layouts
from small_models import and_long

from mcore_rl.distributed.packs import PackLayout, slice_context_parallel
from mcore_rl.models.megatron.attention.attention import recompute_in_backward
from mcore_rl.models.megatron.kernels import packed_attention as attention_kernels
from mcore_rl.models.megatron.kernels.packed_attention import (
    AttentionPattern,
    efficient_varlen,
    flash_varlen,
    sdpa_by_segment,
    tiled,
)
from mcore_rl.testing.processes import run_processes


@pytest.fixture(autouse=True)
def small_tiles():
    """Lower the thresholds of the number of keys, so that short sequences take the code paths of long ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_kernels, "WORTH_A_TILE", LONG)
        patch.setattr(attention_kernels, "QUERIES_OF_A_BLOCK", LONG // 2)
        yield


WINDOWS = [None, 1, 7, LONG + 30]
KERNELS = {"tiles": (tiled, True), "segments": (sdpa_by_segment, False)}


def kernel_cases():
    """All combinations; those by default contain every pair of values of two parameters."""
    quick, others = [], []
    for (i, cp), (j, heads), (k, window) in product(*map(enumerate, ([1, 2, 4], HEADS, WINDOWS))):
        (others if (i + j + k) % 3 else quick).append((cp, heads, window))
    return and_long(quick, others)


@pytest.mark.parametrize(("cp", "heads", "window"), kernel_cases())
def test_kernels_equal_plain_attention(cp, heads, window):
    for name, layout in layouts(cp).items():
        right = expected(layout, *HEADS[heads], window)
        for kernel, (attend, in_place) in KERNELS.items():
            got = in_one_process(attend, in_place, layout, *HEADS[heads], window, torch.float64)
            for what, one, other in zip(("output", "query", "key", "value"), got, right, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10, msg=f"{kernel}, {name}: {what}")


def efficient_stand_in(
    query, key, value, bias, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, custom_mask_type,
    compute_log_sumexp=False, *, scale=None, seqlen_k=None, window_size=None,
):  # fmt: skip
    """Compute on the CPU what torch's operator for GPUs computes with these arguments."""
    assert bias is None and seqlen_k is None and window_size is None and not dropout_p and compute_log_sumexp
    assert custom_mask_type == 2 and query.shape[2] == key.shape[2] == value.shape[2]
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    assert max_seqlen_q == max(b - a for a, b in pairwise(ends_q)) and ends_q[-1] == query.shape[1]
    assert max_seqlen_k == max(b - a for a, b in pairwise(ends_k)) and ends_k[-1] == key.shape[1]
    outs = []
    for (q, q_end), (k, k_end) in zip(pairwise(ends_q), pairwise(ends_k), strict=True):
        scores = torch.einsum("bqhd,bkhd->bhqk", query[:, q:q_end], key[:, k:k_end])
        scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(scores.shape[-1] - scores.shape[-2] + 1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        outs.append(torch.einsum("bhqk,bkhd->bqhd", weights, value[:, k:k_end]))
    return (torch.cat(outs, dim=1),)


@pytest.mark.parametrize(("cp", "heads"), and_long([(1, "GQA"), (2, "MQA")], [(1, "MHA"), (2, "GQA"), (4, "GQA")]))
def test_efficient_varlen_equals_plain_attention_with_a_stand_in(cp, heads, monkeypatch):
    schema = torch.ops.aten._efficient_attention_forward.default._schema
    assert [argument.name for argument in schema.arguments] == list(signature(efficient_stand_in).parameters)
    monkeypatch.setattr(torch.ops.aten, "_efficient_attention_forward", efficient_stand_in)
    monkeypatch.setattr(AttentionPattern, "cu_seqlens", property(lambda self: self.on_host()[:2]))
    for name, layout in layouts(cp).items():
        for window in (None, 7):
            right = expected(layout, *HEADS[heads], window)
            got = in_one_process(efficient_varlen, False, layout, *HEADS[heads], window, torch.float64)
            for what, one, other in zip(("output", "query", "key", "value"), got, right, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10, msg=f"{name}, {window}: {what}")


def pieces(query, key, cu_seqlens_q, cu_seqlens_k, scale, window_size_left):
    """Yield each segment's ranges of queries and keys, and its scores [heads, Q, K]; −inf for keys that are not
    seen."""
    for (q, q_end), (k, k_end) in zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True):
        keys = key[k:k_end].repeat_interleave(query.shape[1] // key.shape[1], 1)
        scores = torch.einsum("qhd,khd->hqk", query[q:q_end], keys) * (scale or query.shape[-1] ** -0.5)
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(scores.shape[-1] - scores.shape[-2])
        if window_size_left is not None:
            seen = seen.triu(scores.shape[-1] - scores.shape[-2] - window_size_left)
        yield slice(q, q_end), slice(k, k_end), scores.masked_fill(~seen, -torch.inf)


def flash_stand_in(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None,
    window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None, block_table=None,
    num_splits=None,
):  # fmt: skip
    """Compute on the CPU what torch's flash operator for packs computes with these arguments."""
    assert is_causal and window_size_right == 0 and not return_debug_mask and not dropout_p
    out, lse = torch.zeros_like(query), query.new_zeros(query.shape[1], len(query))
    for q, k, scores in pieces(query, key, cum_seq_q, cum_seq_k, scale, window_size_left):
        values = value[k].repeat_interleave(query.shape[1] // key.shape[1], 1)
        out[q] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        lse[:, q] = scores.logsumexp(-1)
    return out, lse, torch.zeros(2), torch.zeros(0), torch.zeros(0)


def flash_backward_stand_in(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state,
    unused, *, scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    """Compute on the CPU what torch's operator for the backward pass computes: probabilities are exp(score − lse)."""
    gradients = [torch.zeros_like(x) for x in (query, key, value)]
    repeats, factor = query.shape[1] // key.shape[1], scale or query.shape[-1] ** -0.5
    for q, k, scores in pieces(query, key, cum_seq_q, cum_seq_k, scale, window_size_left):
        keys, values = (x[k].repeat_interleave(repeats, 1) for x in (key, value))
        shares = (scores - logsumexp[:, q, None]).exp()
        delta = torch.einsum("qhd,khd->hqk", grad_out[q], values) - (grad_out[q] * out[q]).sum(-1).T[..., None]
        d_scores = shares * delta * factor
        gradients[0][q] += torch.einsum("hqk,khd->qhd", d_scores, keys)
        for index, (what, of) in ((1, (d_scores, query[q])), (2, (shares, grad_out[q]))):
            whole = torch.einsum("hqk,qhd->khd", what, of)
            gradients[index][k] += whole.unflatten(1, (-1, repeats)).sum(2)
    return tuple(gradients)


@pytest.mark.parametrize(("cp", "heads", "window"), [(1, "GQA", None), (2, "MQA", 7), (4, "GQA", LONG + 30)])
def test_sinks_equal_plain_attention(cp, heads, window, monkeypatch):
    """Output and all gradients, of torch's flash kernel for GPUs by stand-ins with the signatures of its operators."""
    for name, stand_in in (("forward", flash_stand_in), ("backward", flash_backward_stand_in)):
        schema = getattr(torch.ops.aten, f"_flash_attention_{name}").default._schema
        assert [argument.name for argument in schema.arguments] == list(signature(stand_in).parameters)
        monkeypatch.setattr(torch.ops.aten, f"_flash_attention_{name}", stand_in)
    monkeypatch.setattr(AttentionPattern, "cu_seqlens", property(lambda self: self.on_host()[:2]))
    kernels = {**KERNELS, "flash": (flash_varlen, False), "efficient": (efficient_varlen, False)}
    for name, layout in layouts(cp).items():
        right = expected(layout, *HEADS[heads], window, has_sinks=True)
        for kernel, (attend, in_place) in kernels.items():
            got = in_one_process(attend, in_place, layout, *HEADS[heads], window, torch.float64, has_sinks=True)
            for what, one, other in zip(("output", "query", "key", "value", "sinks"), got, right, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10, msg=f"{kernel}, {name}: {what}")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_tiled_kernel_error_is_within_precision(dtype, tolerance):
    """Also where many queries add to one key's gradient: of the norm."""
    for name, layout in layouts(2).items():
        for window in (None, 7):
            right = expected(layout, *HEADS["MQA"], window)
            got = in_one_process(tiled, True, layout, *HEADS["MQA"], window, dtype)
            for one, other in zip(got, right, strict=True):
                assert one.dtype == dtype
                assert (one.double() - other).norm() < tolerance * other.norm(), name


def attention_module(cp_size, window, recompute):
    """A layer's attention in this process group, all of whose ranks are context-parallel."""
    from mcore_rl.models.megatron.attention.attention import PackedCausalAttention

    config = SimpleNamespace(recompute_granularity="full" if recompute else None)
    module = PackedCausalAttention.__new__(PackedCausalAttention)
    torch.nn.Module.__init__(module)
    module.config, module.window, module.softmax_scale, module.softmax_offset = config, window, None, None
    module.layer_number = 1
    module.cp_group = torch.distributed.group.WORLD if cp_size > 1 else None
    return module


def run_module(cp_size, heads, groups):
    """Return, by layout and window, this rank's positions, output and gradients, and how often it gathered rows of
    others: before and after the backward pass, and whether these were only the rows in windows."""
    from mcore_rl.models.megatron.attention import attention
    from mcore_rl.models.megatron.kernels.packed_attention import visible_keys
    from mcore_rl.models.megatron.layers.packs import PackParams

    attention_kernels.WORTH_A_TILE, attention_kernels.QUERIES_OF_A_BLOCK = LONG, LONG // 2
    rank, results, gathers = torch.distributed.get_rank(), {}, Counter()

    def counted(gather):
        def call(*args, **kwargs):
            gathers[gather.__name__] += 1
            return gather(*args, **kwargs)

        return call

    torch.distributed.all_gather_into_tensor = counted(torch.distributed.all_gather_into_tensor)
    exchange_rows = attention.exchange_rows
    attention.exchange_rows = counted(exchange_rows)
    for name, layout in layouts(cp_size).items():
        for window in (None, 7):
            for recompute in (False, True):
                gathers.clear()
                leaves, upstream = inputs(layout, heads, groups)
                local = [slice_context_parallel(x, layout, rank).detach().requires_grad_() for x in leaves]
                params = PackParams(qkv_format="thd", visible=visible_keys(layout, rank)[0])
                module = attention_module(cp_size, window, recompute)
                out = module(*local, None, packed_seq_params=params).view(-1, heads, DIM)
                before = gathers.total()
                gradients = torch.autograd.grad(out, local, slice_context_parallel(upstream, layout, rank))
                positions = layout.local_positions(rank)
                counts = before, gathers.total(), bool(gathers["exchange_rows"])
                results[name, window, recompute] = positions, [out.detach(), *gradients], counts
    return results


# Packs in which windows of 7 tokens leave out half of the other ranks' rows.
EXCHANGED = {(2, "long"), (4, "long"), (2, "shared, long"), (4, "shared, long")}


@pytest.mark.parametrize(("cp_size", "heads"), and_long([(1, "GQA"), (2, "GQA"), (4, "MQA")], [(2, "MHA"), (4, "GQA")]))
def test_attention_layer_under_context_parallelism_equals_plain_attention(cp_size, heads):
    """Gathered once in each direction; once in all where the whole layer is computed again."""
    ranks = run_processes(run_module, cp_size, *HEADS[heads], world_size=cp_size)
    for name, window, recompute in ranks[0]:
        right = expected(layouts(cp_size)[name], *HEADS[heads], window)
        for rank in ranks:
            positions, got, gathers = rank[name, window, recompute]
            if cp_size > 1:
                assert gathers[:2] == ((1, 1) if recompute else (1, 2))
                assert gathers[2] == (window is not None and (cp_size, name) in EXCHANGED)
            for one, other in zip(got, right, strict=True):
                torch.testing.assert_close(one, other[positions], rtol=1e-10, atol=1e-10)


def test_remade_in_backward_frees_its_tensor():
    made, numbers = [], torch.arange(6.0)

    def make():
        made.append(True)
        return numbers * 2

    doubled = make().requires_grad_()
    alive = weakref.ref(doubled)
    with recompute_in_backward(doubled, make):
        loss = (doubled[:3] * doubled[3:]).sum() + doubled.exp().sum()
    right = torch.cat((doubled[3:], doubled[:3])) + doubled.exp()
    (gradient,) = torch.autograd.grad(loss, doubled)
    torch.testing.assert_close(gradient, right.detach())
    assert len(made) == 2, "once for all of its views"
    del loss, doubled, gradient, right
    gc.collect()
    assert alive() is None


def test_graphs_without_a_backward_pass_are_freed():
    leaf = torch.ones(3, requires_grad=True)
    seen = leaf * 2
    with recompute_in_backward(seen, lambda: seen.detach()):
        out = seen.exp()
    alive = weakref.ref(out)
    freed = []
    weakref.finalize(out.untyped_storage(), freed.append, True)
    del out
    gc.collect()
    assert alive() is None and freed


@pytest.mark.parametrize(
    ("attend", "dtype", "window"),
    [
        (flash_varlen, torch.bfloat16, None),
        (flash_varlen, torch.bfloat16, 3),
        (efficient_varlen, torch.float32, None),
    ],
)
def test_kernels_for_gpus_accept_their_arguments(attend, dtype, window):
    """On shapes: the operators of this torch, with fewer heads of keys than of queries. Torch's function of shapes for
    the backward pass of the memory-efficient operator does not accept what autograd passes to it."""
    visible = AttentionPattern(PackLayout.pack((5, 1, 8)), 0)
    visible.put(*(tensor.to("meta") for tensor in visible.on_host()))
    query, key, value = (
        torch.empty(14, heads, 64, dtype=dtype, device="meta", requires_grad=True) for heads in (6, 2, 2)
    )
    out = attend(query, key, value, visible, 0.3, window)
    assert out.shape == query.shape and out.dtype == dtype and out.requires_grad
    if attend is efficient_varlen:
        return
    out.sum().backward()
    assert [x.grad.shape for x in (query, key, value)] == [x.shape for x in (query, key, value)]
