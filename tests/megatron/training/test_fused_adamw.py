"""Tests of the fused form of torch's AdamW, which is for GPUs, by the kernel that torch has for CPUs."""

from types import SimpleNamespace

import pytest
import torch
from float32 import FORWARD, approx32, assert_updates32
from layout_cases import LR, make_config, make_data

from mcore_rl.models.megatron.checkpoint.state import _ensure_optimizer_state
from mcore_rl.testing.layout_check import ParallelLayout
from mcore_rl.testing.processes import run_processes


def trained(config, directory, load, fused):
    """Train three steps, of which the third is repeated from a checkpoint of the first two.

    Args:
        load: a checkpoint of the first two steps that is loaded in place of them; None to make and to load one.

    Returns:
        the losses and, after each third step, the weights; the checkpoint; the optimizer's description; the number of
        calls of the fused kernel.
    """
    from mcore_rl.algorithms.build_loss import build_loss
    from mcore_rl.models.megatron.training import optimizer
    from mcore_rl.models.megatron.weights.conversion import export_hf_weights
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    kernel, calls = torch._fused_adamw_, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer, "FUSED_ON", (("cpu", torch.float32),) if fused else ())
        patch.setattr(
            torch, "_fused_adamw_", lambda *tensors, **options: (calls.append(1), kernel(*tensors, **options))
        )
        policy = MegatronPolicy(config, total_steps=10, rows_per_unit=2)
        losses, weights = [], []

        def train():
            losses.append(policy.train(make_data(), build_loss(config))["loss"])

        if load is None:
            train(), train()
            load = policy.save_checkpoint(directory, 2, {})
            train()
            weights.append(dict(export_hf_weights(policy.model)))
        policy.load_checkpoint(load)
        train()
        weights.append(dict(export_hf_weights(policy.model)))
        described = policy.describe_optimizer()
        policy.shutdown()
    return losses, weights, load, described, len(calls)


def assert_equal(weights, others):
    for name, weight in weights.items():
        assert_updates32(weight, others[name], 4 * LR, what=name)


@pytest.mark.long
def test_three_steps_and_a_checkpoint(model_of, tmp_path):
    config = make_config(model_of("llama"))
    plain, fused = (
        run_processes(trained, config, tmp_path / str(fused), None, fused, world_size=1)[0] for fused in (False, True)
    )
    assert plain[4] == 0 and fused[4] >= 4
    assert plain[3].startswith("AdamW of torch, ") and fused[3].startswith("fused AdamW of torch, ")
    assert fused[0] == approx32(plain[0], FORWARD)
    assert_equal(fused[1][0], plain[1][0])
    for losses, (whole, resumed), *_ in (plain, fused):
        assert losses[2] == losses[3]
        assert all(torch.equal(weight, resumed[name]) for name, weight in whole.items())


@pytest.mark.parametrize(("fused", "device"), [(True, "meta"), (False, "cpu"), (None, "cpu")])
def test_step_of_a_new_state_is_where_the_kernel_reads_it(fused, device):
    """The parameter is on a device other than the host's."""
    parameter = torch.nn.Parameter(torch.empty(3, device="meta"))
    adamw = torch.optim.AdamW([parameter])
    adamw.param_groups[0]["fused"] = fused
    inner = SimpleNamespace(optimizer=adamw, config=None, init_state_fn=lambda *_: None)
    _ensure_optimizer_state(SimpleNamespace(chained_optimizers=[inner]))
    assert adamw.state[parameter]["step"].device.type == device


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "layout", "changes"),
    [
        ("llama", ParallelLayout(dp=2), {"offload": True}),
        ("mixtral", ParallelLayout(dp=2, ep=2), {}),
        ("qwen3", ParallelLayout(), {"name": "muon"}),
        ("qwen3", ParallelLayout(), {"moments_dtype": "bfloat16", "adam_beta2": 0.95}),
    ],
    ids=str,
)
def test_a_checkpoint_resumes_under_the_other_form(family, layout, changes, model_of, tmp_path):
    config = layout.apply(make_config(model_of(family), **changes))
    whole = {
        fused: run_processes(trained, config, tmp_path / str(fused), None, fused, world_size=layout.world_size)[0]
        for fused in (False, True)
    }
    for fused in (False, True):
        losses, (weights,), *_ = run_processes(
            trained, config, tmp_path / "resumed", whole[not fused][2], fused, world_size=layout.world_size
        )[0]
        assert losses == approx32(whole[fused][0][2:3], FORWARD)
        assert_equal(weights, whole[not fused][1][0])
