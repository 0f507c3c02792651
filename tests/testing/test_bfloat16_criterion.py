"""Tests of the criterion for layouts in bfloat16: it passes another rounding of the same result, and finds errors."""

import copy

import pytest
import torch

from mcore_rl.config.parallel import ParallelLayout
from mcore_rl.testing.layout_check import LayoutResult, compare, compare_in_bfloat16, table_row

SHAPES = {"matrix": (40, 30), "norm": (40,), "zero": (40,)}


def made(seed, noise):
    """Return the same result with relative noise of this size."""
    exact, other = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)

    def tensor(shape, scale=1.0):
        x = torch.randn(shape, generator=exact, dtype=torch.float64) * scale
        return x * (1 + noise * torch.randn(shape, generator=other, dtype=torch.float64))

    scales = {"matrix": 1.0, "norm": 0.01, "zero": 0.0}
    steps = [{"loss": 2.0 * (1 + noise / 10), "grad_norm": 1.5 * (1 - noise / 10), "accuracy": 0.5} for _ in range(3)]
    gradients, weights = ({name: tensor(shape, scales[name]) for name, shape in SHAPES.items()} for _ in range(2))
    return LayoutResult(steps, tensor((8, 20)), gradients, weights)


EXACT, ONE = made(1, 0.0), made(2, 0.01)


def test_another_rounding_of_the_same_result_passes():
    other = made(3, 0.01)
    other.steps[0]["accuracy"] = 0.75  # a count that one rounding can change
    difference = compare_in_bfloat16(other, ONE, EXACT)
    assert difference.within() and 0.8 < difference.ratio < 1.5
    assert 0.005 < difference.scores < 0.02  # the table shows the distance from float32
    assert "WRONG" not in table_row(ParallelLayout(), difference)


def test_one_process_has_the_ratio_one():
    assert compare_in_bfloat16(ONE, ONE, EXACT).ratio == pytest.approx(1.0)


def changed_gradient(result):
    result.gradients["norm"] *= 1.05


def changed_weight(result):
    result.weights["norm"][:10] = 0


def gradient_that_must_be_zero(result):
    result.gradients["zero"] += 0.01


def changed_scores(result):
    result.scores[0, 3] += 1


def infinite_scores(result):
    result.scores[0, 0] = torch.inf


def loss_of_two_ranks(result):
    result.steps[2]["loss"] *= 2


def norm_of_two_ranks(result):
    result.steps[0]["grad_norm"] *= 2**0.5


def rounder_everywhere(result):
    """A layout with 1.7 times the rounding errors: within the limit of each parameter, but not of all."""
    result.gradients = made(3, 0.017).gradients


@pytest.mark.parametrize(
    ("change", "named", "limit"),
    [
        (changed_gradient, "gradient of norm", 3.0),
        (changed_weight, "weight of norm", 3.0),
        (gradient_that_must_be_zero, "gradient of zero", 3.0),
        (rounder_everywhere, "all gradients", 1.5),
        (changed_scores, "scores", 1.5),
        (infinite_scores, "scores", 1.5),
        (loss_of_two_ranks, "loss", 1.5),
        (norm_of_two_ranks, "grad_norm", 1.5),
    ],
)
def test_an_error_is_found_and_named(change, named, limit):
    result = copy.deepcopy(made(3, 0.01))
    change(result)
    difference = compare_in_bfloat16(result, ONE, EXACT)
    assert not difference.within() and difference.worst_quantity == named
    row = table_row(ParallelLayout(), difference)
    assert f"WRONG ({named}: {difference.ratio:.2f} times one process, at most {limit})" in row


def nan_gradient(result):
    result.gradients["norm"][3] = torch.nan


def nan_scores(result):
    result.scores[0, 3] = torch.nan


def nan_weight(result):
    result.weights["matrix"][0, 0] = torch.nan


def nan_in_a_later_step(result):
    result.steps[2]["loss"] = float("nan")


def infinite_norm(result):
    result.steps[0]["grad_norm"] = float("inf")


@pytest.mark.parametrize("spoil", [nan_gradient, nan_scores, nan_weight, nan_in_a_later_step, infinite_norm])
def test_values_that_are_not_finite_are_no_agreement(spoil):
    """Also if both results have them: `max` of Python drops NaN, and NaN is not larger than a limit."""
    other, both = copy.deepcopy(EXACT), copy.deepcopy(EXACT)
    assert compare(other, EXACT).within()
    spoil(other)
    spoil(both)
    for outcome, reference in ((other, EXACT), (EXACT, both), (other, both)):
        difference = compare(outcome, reference)
        assert not difference.within() and "WRONG" in table_row(ParallelLayout(), difference)
    assert not compare_in_bfloat16(other, ONE, EXACT).within()
