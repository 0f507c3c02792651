"""Tests of the Triton kernels for log-probabilities, by Triton's interpreter on the CPU, against float64 autograd and
the torch operations; and of their compilation for an H100, which needs no GPU."""

import functools
import importlib.util
import re

import pytest
import torch
import torch.nn.functional as F
from float32 import EPSILON, FORWARD, assert_close32
from gpu_process import run_on
from triton_cases import compile_for_h100

from mcore_rl.distributed import logprobs as module
from mcore_rl.distributed.divergences import HiddenAndHead, linear_divergences
from mcore_rl.distributed.logprobs import linear_logprobs
from mcore_rl.testing.processes import run_processes

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton: make test-triton")


@pytest.fixture
def interpreted(monkeypatch):
    """Run a function in a process of its own: the interpreter must be chosen before Triton is imported."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return functools.partial(run_on, "cpu")


def use(kernels, tile=(16, 160), block=64):
    """Choose kernels or torch operations, with tiles and blocks that end inside rows and columns of the cases."""
    from mcore_rl.distributed import triton_logprobs

    module.TILE_SHAPE["cpu"], triton_logprobs.BLOCK = tile, block
    module.tile_steps = lambda *_: module.triton_steps() if kernels else module.TORCH_STEPS


def make_inputs(tokens, hidden, rows, columns, k, seed=0):
    """Return hidden states, head, targets (first those at edges of shards, tiles and blocks) and upstream gradients,
    which are 0 for every third token."""
    g = torch.Generator().manual_seed(seed)
    h, w = torch.randn(tokens, hidden, generator=g), torch.randn(rows, hidden, generator=g) * 0.4
    targets = torch.randint(0, columns, (tokens, k), generator=g)
    edges = torch.tensor([0, columns - 1, rows // 2 - 1, rows // 2, 63, 64, 159, 160]).clamp(max=columns - 1)
    targets.view(-1)[: len(edges)] = edges[: targets.numel()]
    of_targets, of_entropy = torch.randn(tokens, k, generator=g), torch.randn(tokens, generator=g)
    of_targets[2::3], of_entropy[2::3] = 0, 0
    return h, w, targets, of_targets, of_entropy


def exact(h, w, targets, of_targets, of_entropy, columns, temperature=1.0, normalize=True, softcap=None):
    h, w = h.double().requires_grad_(), w.double().requires_grad_()
    logits = h @ w[:columns].T
    logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / temperature
    logp = F.log_softmax(logits, -1)
    chosen, entropy = (logp if normalize else logits).gather(1, targets), -(logp.exp() * logp).sum(-1)
    return chosen, entropy, *torch.autograd.grad((chosen * of_targets).sum() + (entropy * of_entropy).sum(), (h, w))


def ours(h, w, targets, of_targets, of_entropy, with_entropy=True, **options):
    h, w = h.clone().requires_grad_(), w.clone().requires_grad_()
    chosen, entropy = linear_logprobs(h, w, targets, with_entropy=with_entropy, **options)
    loss = (chosen * of_targets).sum() + ((entropy * of_entropy).sum() if with_entropy else 0)
    entropy = entropy.detach() if with_entropy else None
    return chosen.detach(), entropy, *torch.autograd.grad(loss, (h, w))


def distance(got, wanted):
    """Return the largest difference relative to the largest number."""
    return float((got.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp(min=1e-3))


CASES = [
    # tokens, hidden, rows of the head, vocabulary, targets a token; temperature, with entropy, normalized, soft cap
    ((1, 32, 100, 100, 1), 0.7, True, True, None),
    ((7, 96, 333, 301, 1), 0.7, True, True, None),
    ((7, 96, 333, 301, 1), 1.0, False, True, None),
    ((19, 40, 700, 650, 2), 1.0, True, True, None),
    ((18, 33, 129, 97, 3), 1.3, True, False, None),
    ((18, 33, 129, 97, 3), 1.1, True, True, 2.5),
]


def errors_of_kernels():
    """Return the distances from float64 of kernels and of torch operations, by case and result."""
    found = {}
    for size, temperature, with_entropy, normalize, softcap in CASES:
        columns = size[3]
        inputs = make_inputs(*size)
        if not with_entropy:
            inputs[-1].zero_()
        options = {"temperature": temperature, "normalize": normalize, "softcap": softcap}
        wanted = exact(*inputs, columns, **options)
        options.update(vocab_size=columns, with_entropy=with_entropy)
        by_way = []
        for kernels in (True, False):
            use(kernels)
            by_way.append(ours(*inputs, **options))
        use(True)
        again = ours(*inputs, **options)
        assert all(torch.equal(a, b) for a, b in zip(by_way[0], again, strict=True) if a is not None), "not repeatable"
        assert (by_way[0][2][2::3] == 0).all() and (by_way[0][3][columns:] == 0).all()
        for name, value, torchs, truth in zip(("logprob", "entropy", "hidden", "head"), *by_way, wanted, strict=True):
            if value is not None:
                found[(size, temperature, name)] = distance(value, truth), distance(torchs, truth)
    return found


@needs_triton
@pytest.mark.long
def test_kernels_are_as_near_to_float64_as_torch_operations(interpreted):
    for key, (kernels, torchs) in interpreted(errors_of_kernels).items():
        assert torchs < FORWARD * EPSILON and kernels <= 1.5 * torchs + 4 * EPSILON, (key, kernels, torchs)


def errors_by_tiling():
    inputs, found = make_inputs(37, 48, 211, 203, 2), {}
    wanted = exact(*inputs, 203, 0.7)
    for kernels in (True, False):
        for tile, block in (((512, 4096), 256), ((9, 33), 16), ((512, 16), 16), ((1, 4096), 64)):
            use(kernels, tile, block)
            got = ours(*inputs, vocab_size=203, temperature=0.7)
            found[kernels, tile] = [distance(a, b) for a, b in zip(got, wanted, strict=True)]
    return found


@needs_triton
@pytest.mark.long
def test_the_error_does_not_grow_with_the_number_of_tiles(interpreted):
    for key, errors in interpreted(errors_by_tiling).items():
        assert max(errors) < FORWARD * EPSILON, (key, errors)


def masked_tokens():
    h, w, targets, of_targets, of_entropy = make_inputs(9, 32, 200, 200, 1)
    for with_entropy in (True, False):
        got = ours(h, w, targets, of_targets * 0, of_entropy * 0, with_entropy)
        assert got[0].isfinite().all() and (got[2] == 0).all() and (got[3] == 0).all()


def logits_of_minus_infinity():
    """Whole blocks, the first whole tile, and targets at the edges of the others."""
    g = torch.Generator().manual_seed(7)
    h, w = torch.rand(6, 8, generator=g) + 1.1, torch.randn(440, 8, generator=g)
    w[:170] = -3e38
    targets = torch.tensor([[170], [439], [191], [192], [319], [320]])
    upstream = torch.ones(6, 1), torch.ones(6)
    wanted = exact(h, w[170:], targets - 170, *upstream, 270)
    got = ours(h, w, targets, *upstream)
    assert (got[3][:170] == 0).all()
    for one, other in zip((*got[:3], got[3][170:]), wanted, strict=True):
        assert distance(one, other) < FORWARD * EPSILON


def rows_of_nan():
    """NaN stays in its row; the gradient of a row that the loss does not use is 0."""
    h, w, targets, of_targets, of_entropy = make_inputs(9, 32, 200, 200, 1)
    clean = ours(h, w, targets, of_targets, of_entropy)
    h[2, 5] = torch.nan
    got = ours(h, w, targets, of_targets, of_entropy)
    keep = torch.arange(9) != 2
    assert got[0][2].isnan().all() and got[1][2].isnan()
    for one, other in zip(got[:3], clean[:3], strict=True):
        assert torch.equal(one[keep], other[keep])
    # The row's share of the head's gradient is 0 times NaN all the same, so a caller leaves such rows out.
    x = torch.full((1, 200), torch.nan)
    tokens = module.TokenGradients(
        torch.zeros(1), torch.zeros(1), targets[2:3], torch.zeros(1, 1), torch.zeros(1), torch.zeros(1)
    )
    assert (module.tile_steps("cpu", torch.float32).gradient(x, *tokens, 0, 1.0, x.dtype) == 0).all()


def nothing_to_compute():
    h, w, targets, *_ = make_inputs(9, 32, 200, 200, 1)
    none, _ = linear_logprobs(h[:0].requires_grad_(), w, targets[:0])
    none.sum().backward()
    assert none.shape == (0, 1)


def gradients_into_main_grad():
    inputs = make_inputs(9, 32, 200, 200, 1)
    w = inputs[1].clone().requires_grad_()
    w.main_grad = torch.ones_like(w)
    (linear_logprobs(inputs[0], w, inputs[2])[0] * inputs[3]).sum().backward()
    torch.testing.assert_close(w.main_grad - 1, ours(*inputs, with_entropy=False)[3], rtol=0, atol=1e-5)


def factors_in_half_precision():
    """Gradients leave the kernel in the factors' precision, as on a GPU."""
    inputs = make_inputs(18, 40, 350, 333, 1)
    halves = [x.half() for x in inputs[:2]]
    init = module.Tiles.__init__
    module.Tiles.__init__ = lambda tiles, *a: (init(tiles, *a), setattr(tiles, "is_half", True))[0]
    module.Tiles.multiply = lambda tiles, a, b: a.float() @ b.float()
    got = ours(*halves, *inputs[2:], vocab_size=333)
    for one, other, bound in zip(got, exact(*halves, *inputs[2:], 333), (3e-6, 3e-6, 1e-3, 1e-3), strict=True):
        assert distance(one, other) < bound


def divergences():
    g = torch.Generator().manual_seed(3)
    states = [HiddenAndHead(torch.randn(9, 8, generator=g), torch.randn(333, 8, generator=g)) for _ in "sp"]
    values = []
    for kernels in (True, False):
        use(kernels)
        values.append(torch.stack(linear_divergences(*states, vocab_size=301, temperature=0.7, js_beta=0.3)))
    assert_close32(*values, FORWARD)


def awkward_cases():
    for case in (
        masked_tokens,
        logits_of_minus_infinity,
        rows_of_nan,
        nothing_to_compute,
        gradients_into_main_grad,
        divergences,
        factors_in_half_precision,
    ):
        use(True)
        case()


@needs_triton
@pytest.mark.long
def test_awkward_numbers_by_kernels(interpreted):
    interpreted(awkward_cases)


def on_a_rank(vocabulary):
    use(True)
    h, w, *rest = make_inputs(21, 40, 256, vocabulary, 1, seed=3)
    group = torch.distributed.group.WORLD
    shard = w.chunk(2)[torch.distributed.get_rank()]
    got = ours(h, shard, *rest, group=group, vocab_size=vocabulary, temperature=0.7)
    torch.distributed.all_reduce(got[2])
    return got


def two_ranks(vocabulary):
    return run_processes(on_a_rank, vocabulary, world_size=2)


@needs_triton
@pytest.mark.long
@pytest.mark.parametrize("vocabulary", [256, 201, 128])  # 128: the second shard is all padding
def test_kernels_on_a_sharded_vocabulary(interpreted, vocabulary):
    wanted = exact(*make_inputs(21, 40, 256, vocabulary, 1, seed=3), vocabulary, 0.7)
    results = interpreted(two_ranks, vocabulary)
    head = torch.cat([result[3] for result in results])
    for result in results:
        for one, other in zip((*result[:3], head), wanted, strict=True):
            assert distance(one, other) < FORWARD * EPSILON


@needs_triton
def test_tile_steps_are_kernels_for_fp32_sums_on_a_gpu_with_triton(monkeypatch):
    choose = module.tile_steps.__wrapped__
    assert choose("cuda", torch.float32) is module.triton_steps()
    for other in (("cuda", torch.float64), ("cpu", torch.float32), ("meta", torch.float32)):
        assert choose(*other) is module.TORCH_STEPS
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert choose("cuda", torch.float32) is module.TORCH_STEPS


POINTERS = {"local": "*i64", "out": "*bf16"}
SCALARS = {"columns": "i32", "first_column": "i32", "K": "i32", "inverse_temperature": "fp32"}


@needs_triton
@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("name", ["add_kernel", "gradient_kernel"])
def test_kernels_compile_for_an_h100_without_spills(name, with_entropy):
    from mcore_rl.distributed import triton_logprobs

    constants = {"LOWEST": module.LOWEST_LOGPROB, "ENTROPY": with_entropy, "BLOCK": triton_logprobs.BLOCK}
    done = compile_for_h100(getattr(triton_logprobs, name), triton_logprobs.WARPS, constants, POINTERS, SCALARS)
    assert done.returncode == 0, done.stderr
    (registers,) = re.findall(r"Used (\d+) registers", done.stderr)
    print(name, with_entropy, registers, "registers")
    assert re.findall(r"(\d+) bytes spill", done.stderr) == ["0", "0"], done.stderr
    assert int(registers) <= 65536 // 2048 * 2, "fewer than half of an SM's threads fit"
