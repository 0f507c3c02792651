"""Tests of tests/support/float32.py: differences below a limit pass, larger ones fail."""

import pytest
import torch
from float32 import EPSILON, FORMULA, FORWARD, approx32, assert_as_accurate, assert_close32


@pytest.mark.parametrize("scale", [1.0, 1e-3, 40.0])
def test_limits_grow_with_the_size_of_the_terms(scale):
    limit = FORMULA * EPSILON * scale
    assert approx32(0.0, FORMULA, scale=scale) == 0.99 * limit
    assert approx32(0.0, FORMULA, scale=scale) != 1.01 * limit
    expected = torch.tensor([scale, 0.0, -scale / 3], dtype=torch.float64)
    for factor, passes in ((0.99, True), (1.01, False)):
        found = expected + torch.tensor([0.0, factor * limit, 0.0])
        if passes:
            assert_close32(found, expected, FORMULA)
        else:
            with pytest.raises(AssertionError, match="a gradient: Tensor-likes are not close"):
                assert_close32(found, expected, FORMULA, what="a gradient")


def test_not_a_number_and_no_elements():
    assert_close32(torch.zeros(0), torch.zeros(0), FORWARD)
    assert approx32(1.0, FORWARD) != float("nan")
    with pytest.raises(AssertionError):
        assert_close32(torch.tensor([1.0, float("nan")]), torch.ones(2), FORWARD)


def test_a_sum_in_another_order_is_as_accurate_and_one_in_bfloat16_is_not():
    x = torch.randn(512, 300, generator=torch.Generator().manual_seed(1))
    exact, reference = x.double().sum(1), x.sum(1)
    assert_as_accurate(x.flip(1).cumsum(1)[:, -1], reference, exact, factor=16)
    with pytest.raises(AssertionError, match=r"sums: .* from float64, the reference"):
        assert_as_accurate(x.bfloat16().sum(1).float(), reference, exact, factor=16, what="sums")
