"""Tests of rotary embeddings and gated activations, as they are and compiled."""

import functools
from types import SimpleNamespace

import pytest
import torch
from float32 import EPSILON, FORMULA, assert_as_accurate, assert_close32
from small_models import and_long
from torch.autograd.graph import saved_tensors_hooks

from mcore_rl import platform

platform.initialize_platform()

from mcore_rl.models.megatron.layers.transformer_layer import GatedActivation, rotate

from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from megatron.core.transformer.transformer_config import TransformerConfig


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def angles_of(tokens, rotated):
    half = torch.outer(torch.arange(tokens) * 37.0, torch.tensor(0.7) ** torch.arange(rotated // 2))
    return torch.cat((half, half), dim=-1)[:, None, None]


def gated_of(**options):
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1}
    config = TransformerConfig(**sizes, activation_func=torch.nn.functional.silu, gated_linear_unit=True, **options)
    return GatedActivation(config)


@pytest.fixture(params=and_long([False], [True]), ids=["as written", "compiled"])
def way(request, monkeypatch):
    """Traced as for a GPU, and run by the operations of the trace; kernels need a compiler."""
    if request.param:
        monkeypatch.setattr(platform, "compiles", lambda x: True)
        torch._dynamo.reset()
        traced = functools.partial(torch.compile, backend="aot_eager", dynamic=True, fullgraph=True)
        monkeypatch.setattr(platform, "compiled", traced)
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rotated", [8, 6])
def test_rotation_is_that_of_megatron(dtype, rotated, way):
    for tokens in (1, 5, 9):
        x, angles, factor = random(tokens, 1, 3, 8, dtype=dtype), angles_of(tokens, rotated), 1.3 if tokens > 5 else 0.7
        expected = _apply_rotary_pos_emb_bshd(x, angles, mscale=factor)
        found = rotate(x, angles, factor)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        upstream = random(*x.shape, dtype=dtype, seed=1).detach()
        gradients = [torch.autograd.grad(out, x, upstream)[0] for out in (found, expected)]
        growth = FORMULA * torch.finfo(dtype).eps / EPSILON
        assert_close32(*gradients, growth)


def test_rotation_keeps_only_the_angles(way):
    kept = []
    with saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        angles = angles_of(5, 8)
        rotate(random(5, 1, 3, 8), angles, 1.0)
    assert [x.data_ptr() for x in kept] == [angles.data_ptr()]


def test_norm_of_heads_keeps_no_more_than_its_heads():
    """Keys are a small view of the projection of queries, keys and values."""
    from mcore_rl.models.megatron.layers.transformer_layer import HeadRMSNorm

    config = SimpleNamespace(layernorm_zero_centered_gamma=False, params_dtype=torch.float32, sequence_parallel=False)
    norm, projection, kept = HeadRMSNorm(config, 8, 1e-6), random(5, 1, 6 * 8), {}
    keys = projection.view(5, 1, 6, 8)[:, :, 4:5]
    with saved_tensors_hooks(lambda x: kept.setdefault(x.data_ptr(), x), lambda x: x):
        norm(keys).sum().backward()
    sizes = sorted(x.untyped_storage().nbytes() // 4 for x in kept.values())
    assert sizes == [5, 8, 5 * 8]  # scales, weight, keys
    assert projection.grad[..., 4 * 8 : 5 * 8].count_nonzero() == 5 * 8


def activation_by_formula(leaves, with_options):
    gate, up = leaves[0].chunk(2, dim=-1)
    if with_options:
        gate, up = gate.clamp(max=1.0), up.clamp(-1.0, 1.0) + 1.0
    return torch.nn.functional.silu(gate) * up * (leaves[1] if len(leaves) > 1 else 1.0)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("options", [{}, {"activation_func_clamp_value": 1.0, "glu_linear_offset": 1.0}], ids=str)
def test_gated_activation_and_its_gradients(weighted, options, way):
    gated, kept = gated_of(**options), []
    for tokens in (4, 7):
        x, weights = random(tokens, 1, 16), random(tokens, 1, 1, seed=1) if weighted else None
        exact = [leaf.detach().double().requires_grad_() for leaf in (x, weights) if leaf is not None]
        plain = [leaf.float() for leaf in exact]
        expected, reference = (activation_by_formula(leaves, bool(options)) for leaves in (exact, plain))
        kept.clear()
        with saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
            found = gated(x, weights)
        assert {leaf.data_ptr() for leaf in kept} <= {leaf.data_ptr() for leaf in (x, weights) if leaf is not None}
        assert_as_accurate(found, reference, expected)
        upstream = random(*found.shape, seed=2).detach()
        leaves = [leaf for leaf in (x, weights) if leaf is not None]
        gradients = torch.autograd.grad(found, leaves, upstream)
        of_reference = torch.autograd.grad(reference, plain, upstream)
        of_expected = torch.autograd.grad(expected, exact, upstream.double())
        for triple in zip(gradients, of_reference, of_expected, strict=True):
            assert_as_accurate(*triple)
