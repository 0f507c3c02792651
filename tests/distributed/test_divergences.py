"""Tests of divergences over the whole vocabulary against float64 autograd: TP 1, 2, 4 × CP 1, 2; odd sizes; memory."""

import inspect
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from logprob_cases import HIDDEN, LENGTHS, PADDED, VOCAB, groups_of, make_case

from mcore_rl.distributed import logprobs
from mcore_rl.distributed.collectives import all_gather
from mcore_rl.distributed.divergences import FinalHiddenStates, HiddenAndHead, linear_divergences
from mcore_rl.distributed.logprobs import gather_hidden_states
from mcore_rl.distributed.packs import LossPositions, gather_context_parallel, slice_context_parallel
from mcore_rl.simulation.counters import LiveBytes
from mcore_rl.testing.processes import run_processes

TEMPERATURE, BETA, TEACHER_HIDDEN = 1.3, 0.2, 5


def plain_divergences(student, teacher, beta):
    """KL(p ‖ q), KL(q ‖ p) and β·KL(p ‖ m) + (1 − β)·KL(q ‖ m) of logits, written from the definitions."""
    q, p = F.log_softmax(student, -1), F.log_softmax(teacher, -1)
    m = torch.log(beta * p.exp() + (1 - beta) * q.exp())
    kl = lambda a, b: (a.exp() * (a - b)).sum(-1)  # noqa: E731
    return torch.stack((kl(p, q), kl(q, p), beta * kl(p, m) + (1 - beta) * kl(q, m)))


def distill_case(packing, cp):
    """Return the case of the log-probabilities' tests with a teacher, a mask, and weights of the three divergences."""
    layout, rows, weights, hidden, head = make_case(packing, cp)
    g = torch.Generator().manual_seed(6)
    double = {"generator": g, "dtype": torch.float64}
    teacher = torch.randn(layout.total, TEACHER_HIDDEN, **double), torch.randn(PADDED, TEACHER_HIDDEN, **double)
    mask = (weights[0] != 0).float()
    return layout, rows, mask, torch.randn(3, *mask.shape, **double), hidden, head, teacher


def dense(packing, cp):
    """Compute values and gradients in float64 with torch only, row by row."""
    layout, _, mask, weights, hidden, head, (teacher_hidden, teacher_head) = distill_case(packing, cp)
    hidden.requires_grad_(), head.requires_grad_()
    found, total = torch.zeros_like(weights), 0.0
    for row, (start, length) in enumerate(zip(layout.starts.tolist(), LENGTHS, strict=True)):
        at = slice(start, start + length - 1)
        student = hidden[at] @ head[:VOCAB].T / TEMPERATURE
        teacher = teacher_hidden[at] @ teacher_head[:VOCAB].T / TEMPERATURE
        values = plain_divergences(student, teacher, BETA) * mask[row, : length - 1]
        found[:, row, : length - 1] = values.detach()
        total = total + (values * weights[:, row, : length - 1]).sum()
    total.backward()
    return found, hidden.grad, head.grad


def sharded(packing, tp, cp, sequence_parallel):
    """The same over shards; everything gathered back to the dense shapes."""
    logprobs.TILE_SHAPE = {"cpu": (3, 5)}
    tensor, context = groups_of(tp, cp)
    layout, _, mask, weights, hidden, head, teacher = distill_case(packing, cp)
    t, c = torch.distributed.get_rank(tensor), torch.distributed.get_rank(context)
    local = slice_context_parallel(hidden, layout, c)
    local = local.chunk(tp)[t] if sequence_parallel else local
    local, shard = local.clone().requires_grad_(), head.chunk(tp)[t].clone().requires_grad_()
    positions = LossPositions.of(layout, mask, c)
    picked = positions.pick(gather_hidden_states(local, tensor, sequence_parallel))
    logits, inputs = HiddenAndHead(picked, shard), positions.inputs()
    states = FinalHiddenStates("one", logits, positions, inputs, VOCAB, 0.5, tensor, context)
    of_teacher = HiddenAndHead(positions.pick(slice_context_parallel(teacher[0], layout, c)), teacher[1].chunk(tp)[t])
    found = torch.stack(states.divergences(of_teacher, VOCAB, TEMPERATURE / 0.5, BETA))
    # Each context-parallel rank computes the whole scalar, and gradients are summed over these ranks.
    ((found * weights).sum() / cp).backward()
    hidden_grad = torch.cat(tuple(all_gather(local.grad, tensor))) if sequence_parallel else local.grad
    head_grad = torch.cat(tuple(all_gather(shard.grad, tensor)))
    torch.distributed.all_reduce(head_grad, group=context)
    return found.detach(), gather_context_parallel(hidden_grad, layout, context), head_grad


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "rows"])
@pytest.mark.parametrize(
    ("tp", "cp", "sequence_parallel"), [(1, 1, False), (2, 1, True), (1, 2, False), (4, 1, False), (2, 2, True)]
)
def test_against_dense_float64(packing, tp, cp, sequence_parallel):
    expected = dense(packing, cp)
    for rank, result in enumerate(run_processes(sharded, packing, tp, cp, sequence_parallel, world_size=tp * cp)):
        for name, value, reference in zip(("values", "hidden", "head"), result, expected, strict=True):
            torch.testing.assert_close(value, reference, rtol=1e-10, atol=1e-10, msg=lambda m: f"{name}, {rank}: {m}")  # noqa: B023


def pair(tokens, vocabulary, dtype=torch.float32, scale=1.0):
    g = torch.Generator().manual_seed(0)
    student, head, teacher, teacher_head = (
        (torch.randn(n, HIDDEN, generator=g) * scale).to(dtype) for n in (tokens, vocabulary, tokens, vocabulary)
    )
    return HiddenAndHead(student.requires_grad_(), head.requires_grad_()), HiddenAndHead(teacher, teacher_head)


@pytest.mark.parametrize("caps", [(2.0, None), (None, 2.0), (1.5, 3.0)])
def test_capped_logits(caps, monkeypatch):
    """The soft cap of either model, or one for each."""
    monkeypatch.setitem(logprobs.TILE_SHAPE, "cpu", (3, 5))
    models = [replace(model, softcap=cap) for model, cap in zip(pair(7, 13, torch.float64), caps, strict=True)]
    weights = torch.randn(3, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logits = [x.hidden @ x.weight[:11].T for x in models]
    logits = [x if cap is None else cap * torch.tanh(x / cap) for x, cap in zip(logits, caps, strict=True)]
    plain = plain_divergences(*(x / 0.8 for x in logits), BETA)
    ours = torch.stack(linear_divergences(*models, None, 11, 0.8, BETA))
    torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-12)
    inputs = models[0].hidden, models[0].weight
    ours, theirs = (torch.autograd.grad((x * weights).sum(), inputs) for x in (ours, plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_the_precision_of_a_model(dtype, monkeypatch):
    monkeypatch.setitem(logprobs.TILE_SHAPE, "cpu", (64, 100))
    student, teacher = pair(150, 333, dtype)
    weights = torch.randn(3, 150, generator=torch.Generator().manual_seed(1))
    ours = torch.stack(linear_divergences(student, teacher, None, 330, 0.8, BETA))
    logits = [x.hidden.double() @ x.weight[:330].double().T / 0.8 for x in (student, teacher)]
    plain = plain_divergences(*logits, BETA)
    torch.testing.assert_close(ours.double(), plain, rtol=1e-4, atol=1e-5)
    inputs = student.hidden, student.weight
    ours, theirs = (torch.autograd.grad((x * weights).sum(), inputs) for x in (ours, plain))
    for x, y in zip(ours, theirs, strict=True):
        assert x.dtype == dtype
        torch.testing.assert_close(x, y.to(dtype), rtol=1e-4 if dtype == torch.float32 else 1e-2, atol=1e-3)


@pytest.mark.parametrize("scale", [30.0, 1e4])
def test_distributions_of_one_token_each(scale):
    """Probabilities of e^−1000 and less: divergences are large and finite, and so are gradients."""
    student, teacher = pair(6, 9, scale=scale**0.5)
    found = torch.stack(linear_divergences(student, teacher, js_beta=BETA))
    exact = [(x.hidden.double() @ x.weight.double().T).log_softmax(-1) for x in (student, teacher)]
    torch.testing.assert_close(
        found[0].double(), (exact[1].exp() * (exact[1] - exact[0])).sum(-1), rtol=1e-5, atol=1e-3
    )
    torch.testing.assert_close(
        found[1].double(), (exact[0].exp() * (exact[0] - exact[1])).sum(-1), rtol=1e-5, atol=1e-3
    )
    entropy_of_beta = -(BETA * torch.tensor(BETA).log() + (1 - BETA) * torch.tensor(1 - BETA).log())
    assert (found[2] <= entropy_of_beta + 1e-5).all()  # the value for two disjoint distributions
    for gradient in torch.autograd.grad(found.sum(), (student.hidden, student.weight)):
        assert gradient.isfinite().all()


@pytest.mark.long
@pytest.mark.parametrize("beta", [0.1, 0.5])
def test_jensen_shannon_is_trls(beta):
    from trl.experimental.gkd import GKDTrainer

    student, teacher = pair(5, 11, torch.float64)
    ours = linear_divergences(student, teacher, None, None, 0.9, beta)
    logits = [(x.hidden @ x.weight.T)[None] for x in (student, teacher)]
    for values, at in ((ours.forward_kl, 0.0), (ours.reverse_kl, 1.0), (ours.js, beta)):
        theirs = GKDTrainer.generalized_jsd_loss(*logits, beta=at, temperature=0.9, reduction="sum")
        torch.testing.assert_close(values.sum(), theirs)


def test_equal_distributions_have_no_divergence_and_no_gradient():
    student, _ = pair(4, 12)
    found = torch.stack(linear_divergences(student, student, js_beta=0.7))
    assert found.abs().max() < 1e-5
    assert max(g.abs().max() for g in torch.autograd.grad(found.sum(), (student.hidden, student.weight))) < 1e-5


def test_a_gradient_goes_into_main_grad_and_none_to_the_teacher():
    student, teacher = pair(6, 10)
    head = torch.nn.Parameter(student.weight.detach().clone())
    (expected,) = torch.autograd.grad(linear_divergences(student, teacher).reverse_kl.sum(), student.weight)
    head.main_grad = torch.ones(10, HIDDEN)
    taught = HiddenAndHead(teacher.hidden.requires_grad_(), teacher.weight.requires_grad_())
    linear_divergences(HiddenAndHead(student.hidden, head), taught).reverse_kl.sum().backward()
    torch.testing.assert_close(head.main_grad, expected + 1)
    assert taught.hidden.grad is None is taught.weight.grad


def test_logits_of_all_tokens_never_exist(monkeypatch):
    """The peak of forward and backward, beyond inputs and gradients, is a few tiles."""
    tokens, vocabulary, tile = 600, 2000, (100, 200)
    monkeypatch.setitem(logprobs.TILE_SHAPE, "cpu", tile)
    student, teacher = pair(tokens, vocabulary)
    gradients = student.hidden.nbytes + student.weight.nbytes
    with LiveBytes("cpu") as live:
        live.phase = "ours"
        sum(x.sum() for x in linear_divergences(student, teacher, js_beta=0.5)).backward()
    peak = live.peaks["ours"]
    print(f"peak {peak / 1e3:.0f} kB, gradients {gradients / 1e3:.0f} kB, a tile {4 * tile[0] * tile[1] / 1e3:.0f} kB")
    assert peak < 4 * tokens * vocabulary / 4  # bytes of one model's logits: 4.8 MB
    assert peak < 2 * gradients + 10 * 4 * tile[0] * tile[1] + 20 * 4 * tokens


def test_bad_input():
    call = inspect.unwrap(linear_divergences)
    student, teacher = pair(3, 8)
    for wrong, kwargs, message in (
        (
            HiddenAndHead(teacher.hidden[:2], teacher.weight),
            {},
            r"the same T and Vp in student and teacher; the student has \(\(3, 7\), \(8, 7\)\)",
        ),
        (HiddenAndHead(teacher.hidden, teacher.weight[:7]), {}, r"the teacher \(\(3, 7\), \(7, 7\)\)"),
        (teacher, {"temperature": 0.0}, "temperature must be positive"),
        (teacher, {"js_beta": 1.0}, "js_beta must be between 0 and 1, got 1.0"),
    ):
        with pytest.raises(ValueError, match=message):
            call(student, wrong, **kwargs)
