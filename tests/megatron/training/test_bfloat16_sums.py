"""Tests of sums in fp32 in a model in bfloat16: of gradients over microbatches, ranks and tokens, and in the router."""

from types import SimpleNamespace

import pytest
import torch
from float32 import EPSILON, FORMULA, assert_close32
from layout_cases import make_data, make_sft_config

from mcore_rl import platform
from mcore_rl.config.parallel import ParallelLayout
from mcore_rl.testing.processes import run_cases

platform.initialize_platform()

from mcore_rl.models.megatron.layers.transformer_layer import RMSNorm
from mcore_rl.models.megatron.moe.router import Router

ROWS = 2


def whole_and_parts(config):
    """Return this rank's gradients of a batch, and the float64 sums of the gradients of its rows, each of which is a
    microbatch."""
    from mcore_rl.algorithms.build_loss import build_loss
    from mcore_rl.data.batching import global_valid_counts
    from mcore_rl.models.megatron.training.optimizer import gather_gradients
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy, data = MegatronPolicy(config, total_steps=1), make_data().slice(0, ROWS)
    loss, counts = build_loss(config), global_valid_counts(data)

    def gradients(rows):
        policy.zero_gradients()
        policy.forward_backward(data | {"sample_mask": rows}, loss, counts)
        gather_gradients(policy.chunks)
        named = (pair for chunk in policy.model.chunks for pair in chunk.named_parameters())
        return {name: parameter.main_grad.double() for name, parameter in named}

    whole, parts = gradients(torch.ones(ROWS)), [gradients(row) for row in torch.eye(ROWS)]
    policy.shutdown()
    return whole, {name: sum(part[name] for part in parts) for name in whole}


def in_bfloat16(path, layout):
    config = make_sft_config(path)
    return layout.apply(config.model_copy(update={"model": config.model.model_copy(update={"dtype": "bfloat16"})}))


CASES = [
    ("qwen3_moe", ParallelLayout(dp=2, packing=False)),  # router, norms of heads, separate LM head
    ("qwen2", ParallelLayout(tp=2, sp=True, packing=False)),  # norms summed over tensor-parallel ranks, tied LM head
    ("qwen2", ParallelLayout(pp=2, packing=False)),  # a tied LM head summed over stages
    ("llama", ParallelLayout(cp=2, packing=False)),
]


def test_gradients_are_summed_in_fp32_over_microbatches_and_ranks(model_of):
    cases = [(whole_and_parts, in_bfloat16(model_of(family), layout)) for family, layout in CASES]
    for case, ranks in zip(CASES, run_cases(cases, world_size=2), strict=True):
        for whole, parts in ranks:
            for name, gradient in whole.items():
                error = (gradient - parts[name]).norm() / parts[name].norm()
                assert error < FORMULA * EPSILON, f"{case}: {name} {error:.1e}"  # one rounding to bfloat16 is 1e-3


def of_training(config, data):
    """Return the result of a layout after an update, and precision and bytes of this rank's gradient buffers."""
    from mcore_rl.models.megatron.training import optimizer
    from mcore_rl.testing.layout_check import compute_layout_result

    buffers, gather = [], optimizer.gather_gradients

    def noted(chunks):
        buffers.extend(optimizer.gradient_buffers(chunks))
        return gather(chunks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer, "gather_gradients", noted)
        result = compute_layout_result(config, data, 1)
    return result, {buffer.dtype for buffer in buffers}, sum(buffer.nbytes for buffer in buffers)


@pytest.mark.long
def test_gradients_in_bfloat16_take_half_the_memory(model_of):
    """Each gradient is about as far from that with sums in fp32 as bfloat16 rounds (2⁻⁹), or a few times of it."""
    found = {}
    for half in (True, False):
        layout = ParallelLayout(dp=2, packing=False)
        config = in_bfloat16(model_of("qwen3_moe"), layout)
        parallel = config.parallel.model_copy(update={"grad_reduce_in_fp32": not half})
        config = config.model_copy(update={"parallel": parallel})
        found[half] = run_cases([(of_training, config, make_data())], world_size=2)[0][0]
    (rounded, half_types, half_bytes), (exact, types, size) = found[True], found[False]
    assert half_types == {torch.bfloat16} and types == {torch.float32}
    assert half_bytes * 2 == size
    for name, gradient in exact.gradients.items():
        error = float((rounded.gradients[name] - gradient).norm() / gradient.norm())
        assert 0 < error < 1e-2, f"{name}: {error:.1e}"
    assert rounded.metrics["grad_norm"] == pytest.approx(exact.metrics["grad_norm"], rel=3e-3)


def rounded_once(found, exact):
    """Return the share of numbers that are the exact ones, rounded to bfloat16."""
    return (found == exact.bfloat16()).double().mean()


@pytest.mark.parametrize("zero_centred", [False, True])
def test_gradient_of_a_norm_is_summed_in_fp32_over_tokens(zero_centred):
    config = SimpleNamespace(
        layernorm_zero_centered_gamma=zero_centred, params_dtype=torch.bfloat16, sequence_parallel=False
    )
    torch.manual_seed(0)
    norm, x, upstream = RMSNorm(config, 64, 1e-6), *torch.randn(2, 4096, 64).bfloat16()
    norm(x).backward(upstream)
    exact = (upstream.double() * x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()).sum(0)
    assert rounded_once(norm.weight.grad, exact) > 0.98


def test_router_computes_in_fp32():
    """Logits, weights of the chosen experts, and the gradient of the router's weight over many tokens."""
    torch.manual_seed(0)
    x, weight = torch.randn(4096, 1, 64).bfloat16(), torch.nn.Parameter(torch.randn(8, 64).bfloat16())
    experts = SimpleNamespace(score="softmax", normalise=True, scale=None, selection_bias=False, groups=1, topk=2)
    router = SimpleNamespace(
        weight=weight, bias=None, experts=experts, pack=None, load=None, training=True, index=0, token_experts=None,
        _choose=lambda logits: Router._choose(router, logits),
        _weights=lambda logits, chosen: Router._weights(router, logits, chosen),
    )  # fmt: skip
    weights, chosen = Router.routing(router, Router.gating(router, x))
    exact = weight.detach().double().requires_grad_()
    logits = x[:, 0].double() @ exact.T
    expected = logits.masked_fill(~chosen, -torch.inf).softmax(-1)
    assert weights.dtype == torch.float32
    assert torch.equal(chosen, logits >= logits.topk(2).values[:, 1:])
    assert_close32(weights.double(), expected, FORMULA)
    upstream = torch.randn(4096, 8)
    weights.backward(upstream)
    expected.backward(upstream.double())
    assert rounded_once(weight.grad, exact.grad) > 0.98
