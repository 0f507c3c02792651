"""Tests of Megatron's own linear layers with apex's kernel for weight gradients, by a stand-in on the CPU."""

from collections import Counter
from types import SimpleNamespace

import pytest
from layout_cases import STEPS, make_config, make_data
from small_models import and_long
from te_cases import EP2, TP2

from mcore_rl import platform
from mcore_rl.config.parallel import ParallelLayout
from mcore_rl.testing.layout_check import compare, compute_layout_result
from mcore_rl.testing.processes import run_processes


def fused_result(config, data):
    """Return the layout's result, and the number of calls of the kernel on this rank."""
    from megatron.core.tensor_parallel import layers

    calls = Counter()

    def accumulate(inputs, gradients, main_grad):
        calls["fp32"] += 1
        main_grad.addmm_(gradients.T.float(), inputs.float())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platform, "fuses_weight_gradients", lambda: True)
        patch.setattr(layers, "_grad_accum_fusion_available", True)
        kernels = SimpleNamespace(wgrad_gemm_accum_fp32=accumulate)
        patch.setattr(layers, "fused_weight_gradient_mlp_cuda", kernels, raising=False)
        return compute_layout_result(config, data, STEPS), calls


OVERLAPS = {"overlap_grad_reduce": True, "overlap_param_gather": True}
CASES = and_long(
    [("llama", ParallelLayout(), {}), ("qwen3", TP2, {}), ("qwen3_moe", EP2, {})],
    [
        ("deep", ParallelLayout(pp=2, vpp=3), {}),
        ("qwen2", ParallelLayout(dp=2), OVERLAPS),
        ("gemma3", ParallelLayout(tp=2, cp=2, sp=True), {}),
        ("qwen2_moe", TP2, OVERLAPS),
    ],
)


@pytest.mark.parametrize(("family", "layout", "parallel"), CASES)
def test_fused_weight_gradients_change_no_number(family, layout, parallel, model_of):
    config, data = make_config(model_of(family)), make_data()
    (plain,) = run_processes(compute_layout_result, config, data, STEPS, world_size=1)
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update=parallel)})
    results = run_processes(fused_result, layout.apply(config), data, world_size=layout.world_size)
    assert all(calls["fp32"] for _, calls in results)
    difference = compare(results[0][0], plain)
    assert difference.within(), difference


def test_kernel_of_apex_is_used_only_on_gpus(monkeypatch):
    monkeypatch.setattr(platform.importlib.util, "find_spec", lambda name: name)
    assert not platform.fuses_weight_gradients()
    monkeypatch.setattr(platform, "has_gpu", lambda: True)
    assert platform.fuses_weight_gradients()
    monkeypatch.setattr(platform.importlib.util, "find_spec", lambda name: None)
    assert not platform.fuses_weight_gradients()
