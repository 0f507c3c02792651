"""Tests of log-probabilities by both paths against float64 autograd, at TP 1, 2, 4 × CP 1, 2, with and without
packing."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from float32 import assert_as_accurate
from logprob_cases import HIDDEN, LENGTHS, PADDED, VOCAB, groups_of, make_case
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from mcore_rl.distributed import logprobs as module
from mcore_rl.distributed.collectives import all_gather
from mcore_rl.distributed.logprobs import (
    gather_hidden_states,
    linear_logprobs,
    next_token_logprobs_from_logits,
    unpack_next_token_values,
    vocab_parallel_logprobs,
)
from mcore_rl.distributed.packs import gather_context_parallel, slice_context_parallel
from mcore_rl.distributed.sampling_mask import KeptTokens, kept_tiles
from mcore_rl.distributed.topk import linear_topk, vocab_parallel_topk
from mcore_rl.simulation.counters import LiveBytes, ProductCounter
from mcore_rl.testing.processes import run_processes

TEMPERATURE = 0.7


def dense(packing, cp):
    """Compute values and gradients in float64 with torch only, row by row."""
    layout, rows, weights, hidden, head = make_case(packing, cp)
    hidden.requires_grad_(), head.requires_grad_()
    logprobs, entropy = torch.zeros_like(weights[0]), torch.zeros_like(weights[0])
    total = 0.0
    for row, (start, length) in enumerate(zip(layout.starts.tolist(), LENGTHS, strict=True)):
        scores = F.log_softmax(hidden[start : start + length] @ head[:VOCAB].T / TEMPERATURE, dim=-1)[:-1]
        lp = scores.gather(1, rows[row, 1:length, None])[:, 0]
        h = -(scores.exp() * scores).sum(-1)
        logprobs[row, : length - 1], entropy[row, : length - 1] = lp.detach(), h.detach()
        total = total + (lp * weights[0, row, : length - 1]).sum() + (h * weights[1, row, : length - 1]).sum()
    total.backward()
    return logprobs, entropy, hidden.grad, head.grad


def sharded(packing, tp, cp, path, sequence_parallel):
    """The same by one of the two paths; everything gathered back to the dense shapes."""
    module.TILE_SHAPE = {"cpu": (3, 5)}
    tensor, context = groups_of(tp, cp)
    layout, rows, weights, hidden, head = make_case(packing, cp)
    t, c = torch.distributed.get_rank(tensor), torch.distributed.get_rank(context)
    local = slice_context_parallel(hidden, layout, c)
    local = local.chunk(tp)[t] if sequence_parallel else local
    local, shard = local.clone().requires_grad_(), head.chunk(tp)[t].clone().requires_grad_()
    gathered = gather_hidden_states(local, tensor, sequence_parallel)
    if path == "logits":
        logprobs, entropy = next_token_logprobs_from_logits(
            gathered @ shard.T, rows, layout, tensor, context, None, VOCAB, TEMPERATURE, with_entropy=True
        )
    else:
        targets = slice_context_parallel(layout.next_of(layout.pack_rows(rows)), layout, c)
        logprobs, entropy = linear_logprobs(gathered, shard, targets, tensor, VOCAB, TEMPERATURE, with_entropy=True)
        logprobs, entropy = unpack_next_token_values(logprobs, entropy, layout, rows.shape[1], context)
    # Each context-parallel rank computes the whole scalar, and gradients are summed over these ranks.
    (((logprobs * weights[0]).sum() + (entropy * weights[1]).sum()) / cp).backward()
    hidden_grad = torch.cat(tuple(all_gather(local.grad, tensor))) if sequence_parallel else local.grad
    hidden_grad = gather_context_parallel(hidden_grad, layout, context)
    head_grad = torch.cat(tuple(all_gather(shard.grad, tensor)))
    torch.distributed.all_reduce(head_grad, group=context)
    return logprobs.detach(), entropy.detach(), hidden_grad, head_grad


@pytest.mark.parametrize("path", ["logits", "fused"])
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "rows"])
@pytest.mark.parametrize(
    ("tp", "cp", "sequence_parallel"),
    [(1, 1, False), (2, 1, True), (1, 2, False), (2, 2, False), (4, 1, False), (4, 2, True)],
)
def test_against_dense_float64(path, packing, tp, cp, sequence_parallel):
    expected = dense(packing, cp)
    for rank, result in enumerate(run_processes(sharded, packing, tp, cp, path, sequence_parallel, world_size=tp * cp)):
        for name, value, reference in zip(("logprobs", "entropy", "hidden", "head"), result, expected, strict=True):
            torch.testing.assert_close(value, reference, rtol=1e-10, atol=1e-10, msg=lambda m: f"{name}, {rank}: {m}")  # noqa: B023


@pytest.mark.parametrize(("with_entropy", "softcap"), [(False, None), (True, None), (True, 1.3)])
def test_gradcheck(with_entropy, softcap, monkeypatch):
    monkeypatch.setitem(module.TILE_SHAPE, "cpu", (2, 4))
    torch.manual_seed(0)
    hidden = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    head = torch.randn(9, 3, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 6, 3, 3, 1])

    def from_hidden(hidden, head):
        found = linear_logprobs(hidden, head, targets, None, 7, 0.8, with_entropy, softcap=softcap)
        return [x for x in found if x is not None]

    def from_logits(logits):
        return [x for x in vocab_parallel_logprobs(logits, targets, None, 0, 7, 0.8, with_entropy, 2) if x is not None]

    assert torch.autograd.gradcheck(lambda *x: tuple(from_hidden(*x)), (hidden, head))
    assert torch.autograd.gradcheck(lambda x: tuple(from_logits(x)), ((hidden @ head.T).detach().requires_grad_(),))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_paths_agree(dtype):
    torch.manual_seed(0)
    hidden = torch.randn(700, 32).to(dtype).requires_grad_()
    head = torch.randn(9000, 32).to(dtype).requires_grad_()
    targets = torch.randint(0, 8990, (700,))
    a, _ = linear_logprobs(hidden, head, targets, vocab_size=8990)
    b, _ = vocab_parallel_logprobs(hidden.float() @ head.float().T, targets, vocab_size=8990)
    torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-5)
    weight = torch.randn(700)
    ours = torch.autograd.grad((a * weight).sum(), (hidden, head))
    theirs = torch.autograd.grad((b * weight).sum(), (hidden, head))
    for x, y in zip(ours, theirs, strict=True):
        assert x.dtype == dtype
        torch.testing.assert_close(x, y, rtol=1e-4 if dtype == torch.float32 else 1e-2, atol=1e-3)


def test_gradient_goes_into_main_grad():
    torch.manual_seed(0)
    hidden, head = torch.randn(6, 4), torch.nn.Parameter(torch.randn(10, 4))
    targets = torch.randint(0, 10, (6,))
    (expected,) = torch.autograd.grad(linear_logprobs(hidden, head, targets)[0].sum(), head)
    head.main_grad = torch.ones(10, 4)
    (given,) = torch.autograd.grad(linear_logprobs(hidden, head, targets)[0].sum(), head)
    assert torch.equal(given, torch.zeros_like(head)), "where nobody drops it, it may be added up"
    head.main_grad, head.grad_added_to_main_grad = torch.ones(10, 4), False  # as Megatron's hook marks it
    linear_logprobs(hidden, head, targets)[0].sum().backward()
    torch.testing.assert_close(head.main_grad, expected + 1)
    assert head.grad_added_to_main_grad
    assert head.grad.data_ptr() == head.data_ptr(), "what Megatron's hook drops has no memory of its own"
    head.zero_out_wgrad = True  # Megatron adds the gradient to main_grad
    (given,) = torch.autograd.grad(linear_logprobs(hidden, head, targets)[0].sum(), head)
    assert torch.equal(given, torch.zeros_like(head))
    torch.testing.assert_close(head.main_grad, 2 * expected + 1)


@pytest.mark.parametrize("keeps_logits", [False, True])
@pytest.mark.parametrize("softcap", [0.9, 30.0])
def test_capped_logits(softcap, keeps_logits, monkeypatch):
    """The smaller cap flattens nearly all logits. One position keeps few tokens, one all, and one its target alone."""
    monkeypatch.setitem(module.TILE_SHAPE, "cpu", (2, 5))
    g = torch.Generator().manual_seed(2)
    hidden, head = (torch.randn(n, HIDDEN, generator=g, dtype=torch.float64) for n in (3, PADDED))
    hidden[0] *= 50
    inputs, targets = (hidden.requires_grad_(), head.requires_grad_()), torch.tensor([4, 20, 0])
    lists = [[3, 4, 19], list(range(VOCAB)), [0]]
    logits = softcap * torch.tanh(hidden @ head[:VOCAB].T / softcap)
    for kept in (None, lists):
        tiles = kept and list(kept_tiles(KeptTokens.of(lists), targets, 0, VOCAB, (2, 7)))
        keep = keeps_logits and kept is None
        found = linear_logprobs(
            *inputs, targets, None, VOCAB, 0.7, True, kept=tiles, keeps_logits=keep, softcap=softcap
        )
        mask = torch.ones(3, VOCAB, dtype=torch.bool)
        if kept is not None:
            for row, ids in zip(mask, lists, strict=True):
                row[:] = False
                row[ids] = True
        scores = (logits / 0.7).masked_fill(~mask, -torch.inf).log_softmax(-1)
        finite = scores.masked_fill(~mask, 0)
        wanted = scores.gather(1, targets[:, None])[:, 0], -(scores.exp() * finite).sum(-1)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        weights = torch.randn(2, 3, generator=g, dtype=torch.float64)
        ours, theirs = (
            torch.autograd.grad((torch.stack(x) * weights).sum(), inputs, retain_graph=True) for x in (found, wanted)
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    best = logits.topk(2)
    values, ids = linear_topk(*inputs, 2, None, VOCAB, chunk_size=2, softcap=softcap)
    torch.testing.assert_close(values, best.values)
    assert torch.equal(ids[1:], best.indices[1:])  # the largest logits of the first token equal the cap


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_kept_logits_save_a_product_and_change_no_bit(dtype, with_entropy, monkeypatch):
    """Rows and columns need several tiles, and the tiles at the ends are smaller."""
    monkeypatch.setitem(module.TILE_SHAPE, "cpu", (4, 9))
    torch.manual_seed(3)
    hidden, weight = torch.randn(11, HIDDEN).to(dtype), torch.randn(PADDED, HIDDEN).to(dtype)
    targets = torch.randint(0, VOCAB, (11, 3))
    found = []
    for keeps in (False, True):
        own, head = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        head.main_grad = torch.full(head.shape, 0.1)
        with FlopCounterMode(display=False) as counter:
            values, entropy = linear_logprobs(own, head, targets, None, VOCAB, 0.7, with_entropy, keeps_logits=keeps)
            (values.square().sum() + (entropy.sum() if with_entropy else 0)).backward()
        products = counter.get_total_flops() / (2 * 11 * HIDDEN * VOCAB)
        found.append((products, [values.detach(), own.grad, head.main_grad]))
    (computed_twice, expected), (kept, results) = found
    assert computed_twice == pytest.approx(4) and kept == pytest.approx(3)
    assert all(torch.equal(one, other) for one, other in zip(results, expected, strict=True))


def test_logits_are_not_kept_without_gradients(monkeypatch):
    kept = []
    statistics = module.shard_statistics

    def noted(*arguments):
        kept.append(arguments[3])
        return statistics(*arguments)

    monkeypatch.setattr(module, "shard_statistics", noted)
    hidden, weight = torch.randn(5, HIDDEN), torch.randn(PADDED, HIDDEN)
    targets = torch.randint(0, VOCAB, (5,))
    linear_logprobs(hidden, weight, targets, keeps_logits=True)
    with torch.no_grad():
        linear_logprobs(hidden.requires_grad_(), weight, targets, keeps_logits=True)
    linear_logprobs(hidden, weight, targets, keeps_logits=True)
    assert [None if products is None else len(products) for products in kept] == [None, None, 1]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("has_main_grad", [False, True])
def test_half_precision_factors_are_multiplied_as_they_are(temperature, has_main_grad, monkeypatch):
    """Keep bfloat16 products in fp32, as a GPU does; compare with fp64 of the same bfloat16 numbers."""
    torch.manual_seed(0)
    hidden = torch.randn(700, 64).bfloat16().requires_grad_()
    head = torch.nn.Parameter(torch.randn(9000, 64).bfloat16() * 0.3)
    targets, weight = torch.randint(0, 8990, (700,)), torch.randn(700)
    if has_main_grad:
        head.main_grad = torch.zeros(9000, 64)
    seen = set()

    def multiply(tiles, a, b):
        seen.add((a.dtype, b.dtype))
        return a.float() @ b.float()

    init = module.Tiles.__init__
    monkeypatch.setattr(
        module.Tiles, "__init__", lambda tiles, *a: (init(tiles, *a), setattr(tiles, "is_half", True))[0]
    )
    monkeypatch.setattr(module.Tiles, "multiply", multiply)
    logprobs, _ = linear_logprobs(hidden, head, targets, vocab_size=8990, temperature=temperature)
    (logprobs * weight).sum().backward()
    exact = [x.detach().double().requires_grad_() for x in (hidden, head)]
    dense = F.log_softmax((exact[0] @ exact[1].T)[:, :8990] / temperature, -1).gather(1, targets[:, None])[:, 0]
    (dense * weight).sum().backward()
    assert seen == {(torch.bfloat16, torch.bfloat16)}
    torch.testing.assert_close(logprobs.double(), dense, rtol=1e-5, atol=2e-5)
    for ours, theirs in ((hidden.grad, exact[0].grad), (head.main_grad if has_main_grad else head.grad, exact[1].grad)):
        assert (ours.double() - theirs).norm() <= 4e-3 * theirs.norm()  # a rounding of each factor to 8 bits


def test_gradient_of_the_head_is_summed_in_fp32_over_microbatches():
    """Compare with fp64 of the same bfloat16 numbers: a sum in bfloat16 would no longer grow after 256 equal ones."""
    torch.manual_seed(0)
    states, head = torch.randn(3, 8).bfloat16(), torch.nn.Parameter(torch.randn(10, 8).bfloat16())
    targets, head.main_grad = torch.randint(0, 10, (3,)), torch.zeros(10, 8)
    for _ in range(600):
        linear_logprobs(states, head, targets)[0].sum().backward()
    exact = head.detach().double().requires_grad_()
    F.log_softmax(states.double() @ exact.T, -1).gather(1, targets[:, None]).sum().backward()
    torch.testing.assert_close(head.main_grad.double(), 600 * exact.grad, rtol=1e-4, atol=1e-4)


def test_products_leave_their_sums_in_fp32_on_a_device():
    """Run the operator on shapes: its arguments are those of this torch version."""
    assert module.WIDENING_PRODUCTS
    hidden, weight = (torch.empty(rows, 4, dtype=torch.bfloat16, device="meta") for rows in (6, 9))
    tiles = module.Tiles(hidden, weight, 9, 0.5)
    assert tiles.product(slice(0, 2), slice(0, 4)).dtype == torch.float32
    total = torch.empty(6, 9, device="meta")
    with ProductCounter(lambda: ("", ""), lambda _: False) as counter:
        tiles.add_product(total, hidden, weight.T)
    assert module.adds_widened(total.device) and total.dtype == torch.float32
    assert counter.get_total_flops() == 2 * 6 * 4 * 9


@pytest.mark.parametrize("widens", [True, False])
def test_memory_beside_a_head_of_a_large_vocabulary(widens, monkeypatch):
    """Run forward and backward on shapes, with the tiles of a GPU, and count the additional memory; the logits alone
    would be 2.5 GB in half precision."""
    tokens, hidden_size, vocabulary = 8192, 4096, 151_936
    monkeypatch.setitem(module.TILE_SHAPE, "meta", module.TILE_SHAPE["cuda"])
    monkeypatch.setattr(module, "adds_widened", lambda device: widens)
    with LiveBytes("meta") as live:
        hidden, head = (
            torch.empty(rows, hidden_size, device="meta", dtype=torch.bfloat16, requires_grad=True)
            for rows in (tokens, vocabulary)
        )
        head.main_grad, head.grad_added_to_main_grad = torch.empty(vocabulary, hidden_size, device="meta"), False
        targets = torch.empty(tokens, device="meta", dtype=torch.long)
        there = live.live + hidden.nbytes  # its gradient
        linear_logprobs(hidden, head, targets)[0].sum().backward()
    assert live.peaks[""] - there < 0.3e9


def test_rows_the_loss_does_not_use_may_hold_nan():
    logits = torch.randn(4, 6)
    logits[2] = float("nan")
    logits.requires_grad_()
    logprobs, _ = vocab_parallel_logprobs(logits, torch.tensor([1, 2, 3, 4]))
    logprobs[[0, 1, 3]].sum().backward()
    assert logits.grad.isfinite().all()
    assert (logits.grad[2] == 0).all()


def topk_on_shards(k):
    torch.manual_seed(0)
    logits = torch.randn(5, PADDED)
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return vocab_parallel_topk(logits.chunk(size, dim=1)[rank], k, torch.distributed.group.WORLD, VOCAB)


@pytest.mark.parametrize("k", [3, 14])
def test_topk_over_shards(k):
    torch.manual_seed(0)
    expected = torch.randn(5, PADDED)[:, :VOCAB].topk(k)
    for values, indices in run_processes(topk_on_shards, k, world_size=2):
        assert torch.equal(values, expected.values)
        assert torch.equal(indices, expected.indices)


def linear_topk_on_shards(k):
    hidden, weight = a_linear_layer()
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    group, counted = torch.distributed.group.WORLD, LargestTensor()
    with counted:
        best = linear_topk(hidden, weight.chunk(size)[rank], k, group, VOCAB, chunk_size=2)
    return *best, counted.elements


def a_linear_layer():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(11, HIDDEN, generator=generator), torch.randn(PADDED, HIDDEN, generator=generator)


class LargestTensor(TorchDispatchMode):
    """The most elements that the result of an operation has, views of arguments left out."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize("k", [1, 2, 14])
def test_topk_straight_from_hidden_states(k):
    """The last shard of the vocabulary is mostly padding, and the chunks do not divide the tokens."""
    hidden, weight = a_linear_layer()
    expected = (hidden.double() @ weight.double().T)[:, :VOCAB].topk(k)
    for values, indices, largest in run_processes(linear_topk_on_shards, k, world_size=2):
        torch.testing.assert_close(values.double(), expected.values, rtol=1e-5, atol=1e-5)
        assert torch.equal(indices, expected.indices)
        if k < 3:
            assert largest <= max(2 * PADDED // 2, 11 * 2 * k), "all tokens' logits exist at once"


@pytest.mark.parametrize("tile", [4, 4096])
def test_topk_of_half_precision_states_is_not_rounded(tile, monkeypatch):
    monkeypatch.setitem(module.TILE_SHAPE, "cpu", (512, tile))
    hidden, weight = (x.bfloat16() for x in a_linear_layer())
    expected = (hidden.double() @ weight.double().T).topk(3)
    values, indices = linear_topk(hidden, weight, 3, chunk_size=2)
    assert_as_accurate(values, (hidden.float() @ weight.float().T).topk(3).values, expected.values)
    assert torch.equal(indices, expected.indices)


def test_bad_input():
    """Invalid calls of functions that users call directly give clear errors."""
    linear_logprobs, vocab_parallel_logprobs = map(
        inspect.unwrap, (module.linear_logprobs, module.vocab_parallel_logprobs)
    )
    with pytest.raises(ValueError, match=r"\[T, H\], \[Vp, H\] and \[T\] or \[T, K\]"):
        linear_logprobs(torch.zeros(3, 4), torch.zeros(5, 6), torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match="temperature"):
        linear_logprobs(torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(3, dtype=torch.long), temperature=0)
    with pytest.raises(ValueError, match=r"logits \(3, 4\)"):
        vocab_parallel_logprobs(torch.zeros(3, 4), torch.zeros(2, dtype=torch.long))
    for k in (0, 5):
        with pytest.raises(ValueError, match=f"k must be at least 1 and at most 4 \\(vocabulary\\), got {k}"):
            vocab_parallel_topk(torch.zeros(3, 4), k)


def wrong_rank():
    group = torch.distributed.group.WORLD
    other = 1 - torch.distributed.get_rank()
    with pytest.raises(ValueError, match="but the rank of this process is"):
        vocab_parallel_logprobs(torch.zeros(3, 4), torch.zeros(3, dtype=torch.long), group, rank=other)


def test_a_rank_that_is_not_the_groups():
    run_processes(wrong_rank, world_size=2)


def unregistered_collective():
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    torch.distributed.all_reduce(y)
    y.sum().backward()


def test_a_collective_that_autograd_cannot_see_is_an_error():
    """`run_processes` turns the warning about wrong gradients into an error."""
    from mcore_rl.errors import WorkerError

    with pytest.raises(WorkerError, match="autograd kernel was not registered"):
        run_processes(unregistered_collective, world_size=2)
