"""Tests that a checkpoint of any layout can be resumed under any other: weights, optimizer state, schedule."""

import functools
import math

import pytest
import torch
from float32 import FORWARD, GRADIENT, approx32, assert_updates32
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_cases import LR, make_config, run_steps
from small_models import and_long

from mcore_rl.testing.layout_check import ParallelLayout
from mcore_rl.testing.processes import run_processes


def continued(family, first, second, model_of, tmp_path):
    config = make_config(model_of(family), schedule="cosine")
    load = None
    for layout, steps in ((first, 2), (second, 2)):
        arguments = (layout.apply(config), tmp_path, load, steps)
        metrics, weights, load = run_processes(run_steps, *arguments, world_size=layout.world_size)[0]
    return metrics, weights


@pytest.fixture(scope="module")
def uninterrupted(model_of, tmp_path_factory):
    made = {}

    def get(family):
        if family not in made:
            directory = tmp_path_factory.mktemp(f"uninterrupted_{family}")
            config = make_config(model_of(family), schedule="cosine")
            made[family] = run_processes(run_steps, config, directory, None, 4, world_size=1)[0]
        metrics, weights, _ = made[family]
        return metrics[2:], weights

    return get


PAIRS = and_long(
    [(ParallelLayout(tp=2, dp=2, sp=True), ParallelLayout(pp=2))],
    [(ParallelLayout(dp=3), ParallelLayout(cp=2)), (ParallelLayout(pp=2, cp=2), ParallelLayout())],
)
ELSEWHERE = and_long(
    [],
    [
        ("mixtral", ParallelLayout(dp=2, ep=2), ParallelLayout(tp=2, ep=2, etp=1, sp=True)),
        ("glm4_moe", ParallelLayout(), ParallelLayout(pp=2, dp=2, ep=2)),
        ("deep", ParallelLayout(pp=2, vpp=3, stages="E|tt|t|t|tt|L"), ParallelLayout(pp=3, stages="Et|t*5|L")),
        ("deepseek_v3", ParallelLayout(tp=2, sp=True), ParallelLayout(dp=2, ep=2)),
        # Not under tensor parallelism: rounding moves gates over their limit, where the derivative jumps.
        ("gpt_oss", ParallelLayout(pp=2), ParallelLayout(cp=2, ep=2)),
        ("smollm3", ParallelLayout(tp=2), ParallelLayout(pp=2)),
    ],
    [
        ("deep", ParallelLayout(pp=2, vpp=3), ParallelLayout(pp=2, first=1)),
        ("qwen3_moe", ParallelLayout(tp=2, dp=2, ep=2, sp=True), ParallelLayout()),
        ("olmo2", ParallelLayout(tp=2, sp=True), ParallelLayout()),
        ("gemma3", ParallelLayout(), ParallelLayout(tp=2, sp=True)),
        ("deepseek_v32", ParallelLayout(cp=2), ParallelLayout(dp=2, ep=2)),
        ("glm_moe_dsa", ParallelLayout(tp=2, sp=True), ParallelLayout(pp=2)),
        ("hy_v4", ParallelLayout(pp=2), ParallelLayout(cp=2, ep=2)),
        ("glm5_next", ParallelLayout(dp=2, ep=2), ParallelLayout(pp=2)),
        ("deepseek_v4", ParallelLayout(dp=2, ep=2), ParallelLayout(pp=2)),
        ("gemma4", ParallelLayout(pp=2), ParallelLayout(tp=2, sp=True)),
        ("gemma4_moe", ParallelLayout(pp=2), ParallelLayout(cp=2, ep=2)),
        ("gemma4_e", ParallelLayout(tp=2), ParallelLayout(dp=2)),
        ("qwen4", ParallelLayout(tp=2, sp=True), ParallelLayout(pp=2)),
    ],
)
MORE = [
    (ParallelLayout(), ParallelLayout(tp=4)),
    (ParallelLayout(), ParallelLayout(dp=4)),
    (ParallelLayout(tp=2, pp=2), ParallelLayout(tp=2, cp=2, sp=True)),
    (ParallelLayout(tp=2, pp=2, dp=2), ParallelLayout(dp=2)),
    (ParallelLayout(cp=2, dp=2), ParallelLayout(tp=2, pp=2, dp=2)),
]


def check(family, first, second, model_of, uninterrupted, tmp_path):
    metrics, weights = continued(family, first, second, model_of, tmp_path)
    expected, expected_weights = uninterrupted(family)
    for ours, theirs in zip(metrics, expected, strict=True):
        for name in ("loss", "grad_norm", "preference_loss", "lr"):
            assert ours[name] == approx32(theirs[name], GRADIENT if name == "grad_norm" else FORWARD, scale=0), name
    for name, tensor in expected_weights.items():
        assert_updates32(weights[name], tensor, 4 * LR, what=name)


@pytest.mark.parametrize(("first", "second"), PAIRS, ids=str)
def test_resume_under_another_layout_equals_uninterrupted(first, second, model_of, uninterrupted, tmp_path):
    check("qwen2", first, second, model_of, uninterrupted, tmp_path)


@pytest.mark.parametrize(("family", "first", "second"), ELSEWHERE, ids=str)
def test_resume_with_experts_and_layers_elsewhere_is_equal(family, first, second, model_of, uninterrupted, tmp_path):
    check(family, first, second, model_of, uninterrupted, tmp_path)


MIXED = and_long(
    [],
    [
        ("qwen3_5_moe", ParallelLayout(dp=2), {}),
    ],
    [
        ("deepseek_v3", ParallelLayout(), {}),
        ("deepseek_v3", ParallelLayout(tp=2, sp=True), {"name": "muon"}),
        ("deepseek_v32", ParallelLayout(dp=2, ep=2), {}),
    ],
)


@pytest.mark.parametrize(("family", "layout", "optimizer"), MIXED, ids=str)
def test_resume_in_bfloat16_with_float32_weights_is_bit_equal(family, layout, optimizer, model_of, tmp_path):
    """Megatron's groups list float32 weights first, whatever their order in the model."""
    config = layout.apply(make_config(model_of(family), schedule="cosine", **optimizer))
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "bfloat16"})})
    run = functools.partial(run_processes, run_steps, config, world_size=layout.world_size)
    metrics, weights, _ = run(tmp_path / "whole", None, 4)[0]
    *_, saved = run(tmp_path, None, 2)[0]
    resumed, resumed_weights, _ = run(tmp_path, saved, 2)[0]
    assert [one["loss"] for one in resumed] == [one["loss"] for one in metrics[2:]]
    assert all(torch.equal(resumed_weights[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize(("first", "second"), and_long([], MORE[2:], MORE[:2]), ids=str)
def test_resume_under_larger_layout_equals_uninterrupted(family, first, second, model_of, uninterrupted, tmp_path):
    check(family, first, second, model_of, uninterrupted, tmp_path)


@settings(deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_rectangles_cover_a_range_once(shape, data):
    from mcore_rl.models.megatron.checkpoint.state import rectangles

    numbers = torch.arange(math.prod(shape)).view(shape)
    start = data.draw(st.integers(0, numbers.numel() - 1))
    end = data.draw(st.integers(start + 1, numbers.numel()))
    covered = []
    for offsets, sizes, begin, stop in rectangles(start, end, tuple(shape)):
        cut = numbers[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
        assert cut.flatten().tolist() == list(range(begin, stop))
        covered += range(begin, stop)
    assert covered == list(range(start, end))
