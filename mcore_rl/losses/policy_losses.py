"""The policy-gradient losses, by name: each is a short function from a batch to terms per token. `POLICY_LOSSES` lists
them.

What several losses share is composed around these functions by `PolicyGradientLossFn`: importance weights, the
off-policy mask, aggregation, the KL term, entropy and likelihoods.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_rl.losses.common import masked_mean, masked_sum
from mcore_rl.losses.policy_options import (
    ClippedPGOptions,
    DPPOOptions,
    DROOptions,
    GMPOOptions,
    LUSPOOptions,
    PolicyLossName,
    SAPOOptions,
    VESPOOptions,
)

# In nats. exp() of a larger value times the clip's zero gradient would be NaN; e²⁰ is outside any clip range.
LOG_RATIO_LIMIT = 20.0
SMALLEST_LOG_WEIGHT = math.log(1e-8)
"""In nats: VESPO's log W is at least this, as in its authors' code and TRL."""


def bounded_ratio(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return exp of a log-ratio that is clamped to ±20 nats; the gradient is 0 outside."""
    return torch.exp(log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


@dataclass(frozen=True)
class PolicyBatch:
    """The data of a microbatch at the predicted tokens: [B, S − 1] each, `sample_mask` [B].

    Values of tokens that do not count are 0, because −inf or NaN would cause NaN gradients. Log-probabilities are in
    nats. `importance_weights` are [B, S − 1], or [B, 1] with one weight per sequence; only vespo reads them.
    """

    current: Tensor
    token_mask: Tensor
    sample_mask: Tensor
    advantages: Tensor
    prev: Tensor
    generation: Tensor
    reference: Tensor | None
    importance_weights: Tensor | None = None

    @property
    def log_ratios(self) -> Float[Tensor, "batch predicted"]:
        return self.current - self.prev

    def sequence_means(self, values: Float[Tensor, "batch predicted"]) -> Float[Tensor, "batch predicted"]:
        """Return each sequence's mean over its counted tokens, at all of its tokens."""
        return masked_mean(values, self.token_mask, dim=-1)[:, None].expand_as(values)


@dataclass(frozen=True)
class PolicyTerms:
    """Values of a loss per token, [B, S − 1] each.

    loss: value to minimise, before aggregation.
    ratio: probability ratio, of tokens or of sequences; for metrics.
    clipped_ratio: the ratio inside its bounds; None for a loss without bounds.
    clipped_low, clipped_high: whether a bound applies to the token; by default, whether the clipped ratio differs.
    metrics: more values of which the metrics have the mean over tokens.
    """

    loss: Tensor
    ratio: Tensor
    clipped_ratio: Tensor | None = None
    clipped_low: Tensor | None = None
    clipped_high: Tensor | None = None
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


PolicyLoss = Callable[[PolicyBatch, Any], PolicyTerms]
"""Function from a batch and the loss's own options to its terms."""


def clipped_surrogate(advantages: Tensor, ratio: Tensor, clipped_ratio: Tensor) -> Tensor:
    """Return max(−A·r, −A·clip(r))."""
    return torch.maximum(-advantages * ratio, -advantages * clipped_ratio)


def clipped_pg(batch: PolicyBatch, options: ClippedPGOptions) -> PolicyTerms:
    """Return −A·r with the clips of PPO, or of CISPO; without a ratio, −A·log π."""
    advantages = batch.advantages
    if options.disable_ppo_ratio:
        ratio = clipped = batch.current
    else:
        log_ratio = batch.log_ratios
        ratio = bounded_ratio(batch.sequence_means(log_ratio) if options.has_sequence_ratios else log_ratio)
        clipped = ratio.clamp(1 - options.ratio_clip_min, 1 + options.ratio_clip_max)
    if options.clip_type == "cispo":
        return PolicyTerms(-advantages * clipped.detach() * batch.current, ratio, clipped)
    loss = clipped_surrogate(advantages, ratio, clipped)
    if options.ratio_clip_c is not None:
        bounded = torch.minimum(loss, -advantages * options.ratio_clip_c)
        loss = torch.where(advantages < 0, bounded, loss)
    return PolicyTerms(loss, ratio, clipped)


def luspo(batch: PolicyBatch, options: LUSPOOptions) -> PolicyTerms:
    """Return GSPO's loss; summing it over a sequence's tokens multiplies it by their number."""
    ratio = bounded_ratio(batch.sequence_means(batch.log_ratios))
    clipped = ratio.clamp(1 - options.ratio_clip_min, 1 + options.ratio_clip_max)
    return PolicyTerms(clipped_surrogate(batch.advantages, ratio, clipped), ratio, clipped)


def dppo_tv(batch: PolicyBatch, options: DPPOOptions) -> PolicyTerms:
    current, prev = batch.current.detach().exp(), batch.prev.exp()
    return _dppo(batch, options, (current - prev).abs())


def dppo_kl(batch: PolicyBatch, options: DPPOOptions) -> PolicyTerms:
    """Return DPPO's loss with p·log(p / q) + (1 − p)·log((1 − p) / (1 − q)), p previous and q current."""
    log_q, log_p = batch.current.detach(), batch.prev
    not_q, not_p = -torch.expm1(log_q), -torch.expm1(log_p)
    of_others = torch.xlogy(not_p, not_p) - torch.xlogy(not_p, not_q)  # 0 for p = 1, infinite for q = 1 alone
    return _dppo(batch, options, log_p.exp() * (log_p - log_q) + of_others)


def _dppo(batch: PolicyBatch, options: DPPOOptions, divergence: Tensor) -> PolicyTerms:
    """Return −A·min(r, c)·log π, r without a gradient, for tokens that have not moved too far in A's direction."""
    advantages, log_ratio = batch.advantages, batch.log_ratios.detach()
    ratio = bounded_ratio(log_ratio)
    weight = ratio.clamp(max=options.ratio_clip_c)
    high = (advantages > 0) & (log_ratio > 0) & (divergence > options.divergence_clip_max)
    low = (advantages < 0) & (log_ratio < 0) & (divergence > options.divergence_clip_min)
    loss = torch.where(high | low, 0, -advantages * weight * batch.current)
    return PolicyTerms(loss, ratio, weight, low, high)


def sapo(batch: PolicyBatch, options: SAPOOptions) -> PolicyTerms:
    """Return −A·(4 / τ)·σ(τ·(r − 1)); τ depends on A's sign."""
    ratio = bounded_ratio(batch.log_ratios)
    tau = _by_sign(batch.advantages > 0, options.tau_pos, options.tau_neg, ratio)
    gate = torch.sigmoid(tau * (ratio - 1)) * (4 / tau)
    return PolicyTerms(-gate * batch.advantages, ratio)


def vespo(batch: PolicyBatch, options: VESPOOptions) -> PolicyTerms:
    """Return −φ(W)·A·log π with φ(W) = W^k·exp(λ·(1 − W)), without a gradient; k and λ depend on A's sign.

    W is the ratio of the whole sequence, times its importance weights.
    """
    log_ratio = batch.log_ratios.detach()
    log_w = masked_sum(log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), batch.token_mask, dim=-1)[:, None]
    if batch.importance_weights is not None:
        weights = batch.importance_weights.log().clamp(SMALLEST_LOG_WEIGHT, LOG_RATIO_LIMIT)
        log_w = log_w + (weights if weights.shape[1] == 1 else masked_sum(weights, batch.token_mask, dim=-1)[:, None])
    log_w = log_w.clamp(SMALLEST_LOG_WEIGHT, LOG_RATIO_LIMIT)
    positive = batch.advantages >= 0
    k = _by_sign(positive, options.k_pos, options.k_neg, log_ratio)
    decay = _by_sign(positive, options.lambda_pos, options.lambda_neg, log_ratio)
    weight = torch.exp(decay + k * log_w - decay * log_w.exp())
    loss = -weight * batch.advantages * batch.current
    return PolicyTerms(loss, bounded_ratio(log_ratio), metrics={"vespo_weight": weight})


def _by_sign(positive: Tensor, if_positive: float, otherwise: float, like: Tensor) -> Tensor:
    """Return an option's value for each token, in the precision of `like`."""
    return torch.full_like(like, otherwise).masked_fill(positive, if_positive)


def gmpo(batch: PolicyBatch, options: GMPOOptions) -> PolicyTerms:
    """Return −A times the geometric mean of a sequence's ratios, each clipped in A's direction."""
    log_ratio, positive = batch.log_ratios, batch.advantages > 0
    clamped = log_ratio.clamp(-options.log_ratio_clip_min, options.log_ratio_clip_max)
    clipped = torch.where(positive, torch.minimum(log_ratio, clamped), torch.maximum(log_ratio, clamped))
    loss = -bounded_ratio(batch.sequence_means(clipped)) * batch.advantages
    return PolicyTerms(loss, bounded_ratio(log_ratio.detach()), bounded_ratio(clipped.detach()))


def dro(batch: PolicyBatch, options: DROOptions) -> PolicyTerms:
    """Return −(A·log π − β/2·(log π − log π_prev)²)."""
    log_ratio = batch.log_ratios
    loss = -(batch.advantages * batch.current - 0.5 * options.dro_beta * log_ratio.square())
    return PolicyTerms(loss, bounded_ratio(log_ratio.detach()))


POLICY_LOSSES: Mapping[PolicyLossName, PolicyLoss] = {
    "clipped_pg": clipped_pg,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "sapo": sapo,
    "vespo": vespo,
    "luspo": luspo,
    "gmpo": gmpo,
    "dro": dro,
}
WEIGHED_BY_THEMSELVES: frozenset[PolicyLossName] = frozenset({"vespo"})
"""Losses that read the importance weights; the values of the others are multiplied by them."""
