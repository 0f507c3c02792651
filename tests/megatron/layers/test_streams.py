"""Tests of hyper-connections: their formulas, what is kept for the backward pass, and what is refused.

Whole models with streams are compared with transformers in test_families, test_layout_check, test_megatron_generation.
"""

from types import SimpleNamespace

import pytest
import torch
from small_models import make_config, make_model
from torch.autograd.graph import saved_tensors_hooks

from mcore_rl.errors import UserError
from mcore_rl.models.megatron.families import family_of
from mcore_rl.models.megatron.layers.hyper_connections import HyperConnection, Streams, sinkhorn
from mcore_rl.models.megatron.model.hf_config import load_hf_config

COUNT, HIDDEN, TOKENS = 3, 8, 5


def connection(**fields):
    config = SimpleNamespace(hidden_size=HIDDEN, sequence_parallel=False)
    module = HyperConnection(config, Streams(COUNT, 1e-5, 1e-3, **fields))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(parameter.numel()))
    return module


def plain(module, x, out, magnitude, output_eps, iterations):
    """Return the block's input and the streams after the block, token by token, from the formulas."""
    sums, streams = [], []
    for token, added in zip(x, out[:, 0], strict=True):
        norm = (token.square().mean() + 1e-5).sqrt()
        rows = module.weight.double() @ token.flatten() / norm
        scales = module.scale.double().repeat_interleave(torch.tensor(module.groups))
        rows = rows * scales + module.bias.double()
        before, after = rows[:COUNT].sigmoid() + 1e-3, magnitude * rows[COUNT : 2 * COUNT].sigmoid() + output_eps
        matrix = torch.eye(COUNT, dtype=torch.float64)
        if iterations:
            matrix = rows[2 * COUNT :].view(COUNT, COUNT).softmax(1) + 1e-3
            for number in range(2 * iterations - 1):
                matrix = matrix / (matrix.sum(number % 2, keepdim=True) + 1e-3)
        sums.append(before @ token)
        streams.append(torch.stack([after[j] * added + matrix[:, j] @ token for j in range(COUNT)]))
    return torch.stack(sums)[:, None], torch.stack(streams)


@pytest.mark.parametrize(
    "fields",
    [{"magnitude": 1.7, "output_eps": 1e-3, "iterations": 0}, {"magnitude": 2.0, "output_eps": 0.0, "iterations": 4}],
    ids=["plain", "mixed"],
)
def test_connection_equals_its_formulas(fields):
    module = connection(**fields).double()
    x, out = (torch.randn(TOKENS, n, HIDDEN, dtype=torch.float64, requires_grad=True) for n in (COUNT, 1))
    total, *weights = module(x)
    got = total, module.add(x, out, *weights)
    expected = plain(module, x, out, **fields)
    inputs = [x, out, *module.parameters()]
    grads = [torch.randn_like(tensor) for tensor in got]
    for ours, right in zip(
        (*got, *torch.autograd.grad(got, inputs, grads)),
        (*expected, *torch.autograd.grad(expected, inputs, grads)),
        strict=True,
    ):
        torch.testing.assert_close(ours, right, rtol=1e-9, atol=1e-9)


def test_sinkhorn_matrices_have_rows_and_columns_that_sum_to_1():
    logits = torch.randn(50, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    matrix = sinkhorn(logits, 200, 1e-12)
    for dimension in (1, 2):
        sums = matrix.sum(dimension)
        torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=1e-6)  # float64: has nearly converged


def test_streams_are_kept_in_their_own_precision_only():
    """Beside the parameters, a block keeps the streams, its output, and a few numbers of each token."""
    module, kept = connection(iterations=4), {}

    def note(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x, out = (torch.randn(TOKENS, n, HIDDEN, dtype=torch.bfloat16, requires_grad=True) for n in (COUNT, 1))
    with saved_tensors_hooks(note, lambda tensor: tensor):
        total, *weights = module(x)
        streams = module.add(x, out, *weights)
    assert streams.dtype == total.dtype == torch.bfloat16
    own = sum(tensor.nbytes for tensor in (*module.parameters(), x, out, *weights))
    assert sum(kept.values()) <= own


@pytest.mark.parametrize("limit", [0.0, -1.0])
def test_a_limit_at_which_experts_return_nothing_is_refused(limit):
    with pytest.raises(UserError, match=rf"swiglu_limit={limit} must be above 0"):
        family_of(make_config("hy_v4", swiglu_limit=limit)).check(16)


@pytest.mark.parametrize("family", ["hy_v4", "glm5_next", "deepseek_v4", "qwen4"])
def test_layers_that_predict_further_tokens_are_refused_with_streams(family, tmp_path):
    path = make_model(family, tmp_path)
    with pytest.raises(
        UserError, match=r"mtp_loss_scaling_factor: layers that predict further tokens cannot be trained"
    ):
        load_hf_config(path, trains_mtp=True)
