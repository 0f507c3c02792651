"""Importance weights between the policy that sampled and the policy that is trained."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from mcore_rl.algorithms.loss_functions.common import masked_mean, masked_sum

TruncationType = Literal["tis", "icepop", "seq-mask-tis"]


def finite_exp(x: Tensor) -> Tensor:
    """eˣ, with 0 where that is not finite."""
    value = torch.exp(x)
    return torch.where(torch.isfinite(value), value, 0)


def importance_weights(
    prev_logprobs: Tensor, generation_logprobs: Tensor, mask: Tensor, sequence_level: bool
) -> Tensor:
    """exp(prev − generation) per token [B, S − 1], or exp of the sum over the sequence [B, 1]."""
    difference = prev_logprobs - generation_logprobs
    return finite_exp(masked_sum(difference, mask, dim=-1)[:, None] if sequence_level else difference)


def truncate_importance_weights(
    weights: Tensor, difference: Tensor, mask: Tensor, kind: TruncationType, lower: float, upper: float
) -> Tensor:
    """Bound the weights' variance.

    Args:
        weights: [B, S − 1] or [B, 1].
        difference: prev − generation log-probabilities, [B, S − 1].
        kind: tis: weights above `upper` become `upper` (truncated importance sampling,
            https://fengyao.notion.site/off-policy-rl); icepop: weights outside [lower, upper] become 0
            (IcePop, arXiv:2510.18855; masked importance sampling); seq-mask-tis: sequences whose
            geometric-mean ratio exp(mean(difference)) is outside [lower, upper] become 0.
    """
    if kind == "tis":
        return weights.clamp(max=upper)
    if kind == "icepop":
        return torch.where((weights >= lower) & (weights <= upper), weights, 0)
    geometric = finite_exp(masked_mean(difference, mask, dim=-1))[:, None]
    return torch.where((geometric >= lower) & (geometric <= upper), weights, 0)
