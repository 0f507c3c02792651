"""Estimators of KL(current ‖ reference) from the log-probabilities of sampled tokens."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3"]


def calculate_kl(
    logprobs: Tensor, logprobs_reference: Tensor, estimator: KLEstimator = "k3", clamp: float | None = 20.0
) -> Tensor:
    """Per-token estimate in nats, of the inputs' shape (http://joschu.net/blog/kl-approx.html).

    With x = reference − current: k1 = −x, k2 = x² / 2, k3 = eˣ − x − 1 (unbiased, never negative).

    Args:
        clamp: bound on |x|, against overflow; None for none.
    """
    x = logprobs_reference - logprobs
    if clamp is not None:
        x = x.clamp(-clamp, clamp)
    if estimator == "k1":
        return -x
    if estimator == "k2":
        return x.square() / 2
    if estimator == "k3":
        return torch.expm1(x) - x
    raise ValueError(f"KL estimator must be k1, k2 or k3, got {estimator!r}")
