"""Limits for comparisons in float32, derived from its rounding.

Processors add in different orders, with and without fused multiply-adds. Two correct results therefore differ by
rounding, and a limit that one processor meets may fail on another. Here the limit of a difference is

    growth · EPSILON · scale

where scale is the size of the numbers that were added up, which exceeds their sum where they cancel, and growth is one
of those below. One rounding changes a number by at most EPSILON / 2 of its size, so a growth of n allows for 2n
roundings in the same direction, and for far more that are independent.

If a result in float64 is known, `assert_as_accurate` needs neither: it compares distances from that result. Numbers
that must be equal bit for bit are compared with `torch.equal`.
"""

import pytest
import torch

EPSILON = torch.finfo(torch.float32).eps
"""Spacing of float32 at 1, 2⁻²³."""

FORMULA = 16
"""A formula of given numbers: a few functions and a sum. The error of a sum of n terms is typically √n / 2 roundings,
and kernels add up parts of long sums separately."""

FORWARD = 4 * FORMULA
"""A small model's forward pass, to log-probabilities, rewards or a loss: about four such sums, one after another."""

GRADIENT = 4 * FORWARD
"""Gradients and their norm: products of the results of a forward pass, added up over tokens and layers."""

AFTER_UPDATES = 4 * GRADIENT
"""Metrics and gradients that are computed with updated weights, which differ by the errors of earlier gradients."""

UPDATE = 32 * GRADIENT
"""Updates of weights. AdamW and Muon divide gradients by their own size, so that an error of GRADIENT relative to the
largest gradient is many times as large relative to a small one."""


def approx32(expected, growth, scale=1.0):
    """Return `pytest.approx(expected)` for one or more float32 numbers.

    Args:
        scale: size of the numbers that were added up, if it exceeds `expected`; log-probabilities, rewards and
            advantages of tests are about 1.
    """
    return pytest.approx(expected, rel=growth * EPSILON, abs=growth * EPSILON * scale)


def approx32_after_updates(expected):
    """Return `pytest.approx(expected)` for metrics that are computed with updated weights.

    Metrics near 0 are compared as before the updates.
    """
    return pytest.approx(expected, rel=AFTER_UPDATES * EPSILON, abs=FORWARD * EPSILON)


def assert_close32(found, expected, growth, scale=0.0, what=None):
    """Check that a tensor is within growth · EPSILON · scale of `expected`.

    Args:
        scale: size of the numbers that were added up, if it exceeds the largest element of `expected`.
        what: name of the tensor, for the message.
    """
    if expected.numel():
        scale = max(scale, float(expected.detach().abs().max()))
    _assert_within(found, expected, 0.0, growth * EPSILON * scale, what)


def assert_updates32(found, expected, moved, what=None):
    """Check that weights differ by at most UPDATE · EPSILON · `moved` and their own rounding.

    Args:
        moved: how far the updates can have moved a weight: the learning rate times their number.
        what: name of the tensor, for the message.
    """
    _assert_within(found, expected, 2 * EPSILON, UPDATE * EPSILON * moved, what)


def _assert_within(found, expected, rtol, atol, what):
    torch.testing.assert_close(
        found, expected, rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}" if what else text
    )


def assert_as_accurate(found, reference, exact, factor=4.0, what=None):
    """Check that a tensor is at most `factor` times as far from the float64 tensor `exact` as a float32 `reference`.

    Distances are norms. A reference that happens to be exact counts as one rounding away.
    """
    assert found.shape == reference.shape == exact.shape and found.dtype == reference.dtype == torch.float32
    ours, theirs = (float((x.detach().double() - exact.detach()).norm()) for x in (found, reference))
    limit = factor * max(theirs, EPSILON * float(exact.detach().norm()))
    assert ours <= limit, f"{what}: {ours:.2e} from float64, the reference {theirs:.2e}"
