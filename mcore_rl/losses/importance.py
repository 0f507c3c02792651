"""Ratios and importance weights between the policies that sampled, that scored, and that is trained."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mcore_rl.losses.common import masked_mean, masked_sum
from mcore_rl.losses.options import TruncationType

# Nats. exp() of more would, times the 0 that clipping gives as a gradient, be NaN; e²⁰ is outside any clip range.
LOG_RATIO_LIMIT = 20.0


def bounded_ratio(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """exp of a log-ratio, which beyond ±20 nats is held there and has gradient 0."""
    return torch.exp(log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def finite_exp(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """eˣ, held beyond 20 nats with gradient 0; 0 where x is NaN or eˣ is not finite in this precision.

    Products of two such weights and a ratio are then finite too.
    """
    fits = x <= math.log(torch.finfo(x.dtype).max)
    return torch.where(fits, torch.exp(torch.where(fits, x, 0).clamp(max=LOG_RATIO_LIMIT)), 0)


def importance_weights(
    prev_logprobs: Float[Tensor, "batch predicted"],
    generation_logprobs: Float[Tensor, "batch predicted"],
    mask: Float[Tensor, "batch predicted"],
    sequence_level: bool,
) -> Float[Tensor, "batch weights"]:
    """exp(prev − generation) per token [B, S − 1], or exp of the sum over the sequence [B, 1]."""
    difference = prev_logprobs - generation_logprobs
    return finite_exp(masked_sum(difference, mask, dim=-1)[:, None] if sequence_level else difference)


def truncate_importance_weights(
    weights: Float[Tensor, "batch weights"],
    difference: Float[Tensor, "batch predicted"],
    mask: Float[Tensor, "batch predicted"],
    kind: TruncationType,
    lower: float,
    upper: float,
) -> tuple[Float[Tensor, "batch weights"], Bool[Tensor, "batch kept"]]:
    """Bound the weights' variance.

    Args:
        weights: [B, S − 1] or [B, 1].
        difference: prev − generation log-probabilities, [B, S − 1].
        kind: tis: weights outside [lower, upper] become the nearer bound (truncated importance sampling,
            https://fengyao.notion.site/off-policy-rl); icepop: they become 0 (IcePop, arXiv:2510.18855; masked
            importance sampling); seq-mask-tis: all weights of sequences whose geometric-mean ratio
            exp(mean(difference)) is outside become 0.

    Returns:
        the weights, and where they were inside the bounds: of their shape, or [B, 1] for seq-mask-tis.
    """
    judged = finite_exp(masked_mean(difference, mask, dim=-1))[:, None] if kind == "seq-mask-tis" else weights
    inside = (judged >= lower) & (judged <= upper)
    return (weights.clamp(lower, upper) if kind == "tis" else torch.where(inside, weights, 0)), inside
