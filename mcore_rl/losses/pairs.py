"""The losses on pairs, by name: each is a short function of the rewards of a pair. `PAIR_LOSSES` lists them.

What several losses share is composed around these functions by `DPOLossFn`: rewards from log-probabilities, weights of
tokens and pairs, the f-divergence, weighted sums, and the mean over the global batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from mcore_rl.losses.options import DPOOptions, PreferenceLossType

LARGEST_EXPONENT = 80.0
"""In nats: powers of probability ratios are at most exp of it, which fp32 represents."""


@dataclass(frozen=True)
class Pairs:
    """Inputs of the losses on pairs, in nats, without the factor β.

    chosen, rejected: rewards [n], relative to the reference if there is one.
    margin: difference of the f-divergence's scores [n] of chosen and rejected (of the rewards, for the reverse KL).
    mean_margin: the same for scores divided by the number of the response's tokens; for sigmoid_norm.
    policy_margin: chosen − rejected under the policy alone, [n]; for aot.
    partners: by loss, the values [2n] that `batch_partners` gives the rows.
    """

    chosen: Float[Tensor, " n"]
    rejected: Float[Tensor, " n"]
    margin: Float[Tensor, " n"]
    beta: float
    options: DPOOptions
    mean_margin: Float[Tensor, " n"] | None = None
    policy_margin: Float[Tensor, " n"] | None = None
    partners: Mapping[PreferenceLossType, Float[Tensor, " rows"]] = field(default_factory=dict)


PairLoss = Callable[[Pairs], Tensor]


def logistic(logit: Tensor, smoothing: float = 0.0) -> Tensor:
    """Return −log σ(x), or with smoothing ε its conservative form −(1 − ε)·log σ(x) − ε·log σ(−x)."""
    right = -F.logsigmoid(logit)
    return right if smoothing == 0 else (1 - smoothing) * right + smoothing * -F.logsigmoid(-logit)


def sigmoid(pairs: Pairs) -> Tensor:
    return logistic(pairs.beta * pairs.margin, pairs.options.label_smoothing)


def sigmoid_norm(pairs: Pairs) -> Tensor:
    assert pairs.mean_margin is not None, "sigmoid_norm reads means over the tokens of responses"
    return logistic(pairs.beta * pairs.mean_margin, pairs.options.label_smoothing)


def simpo(pairs: Pairs) -> Tensor:
    return logistic(pairs.beta * pairs.margin - pairs.options.simpo_gamma, pairs.options.label_smoothing)


def ipo(pairs: Pairs) -> Tensor:
    return (pairs.margin - 1 / (2 * pairs.beta)) ** 2


def hinge(pairs: Pairs) -> Tensor:
    return F.relu(1 - pairs.beta * pairs.margin)


def robust(pairs: Pairs) -> Tensor:
    logit, smoothing = pairs.beta * pairs.margin, pairs.options.label_smoothing
    return ((1 - smoothing) * logistic(logit) - smoothing * logistic(-logit)) / (1 - 2 * smoothing)


def exo_pair(pairs: Pairs) -> Tensor:
    """Return KL(q ‖ p) with q = (σ(x), σ(−x)) and p = (1 − ε, ε)."""
    logit, smoothing = pairs.beta * pairs.margin, pairs.options.label_smoothing
    log_right, log_wrong = F.logsigmoid(logit), F.logsigmoid(-logit)
    right = torch.sigmoid(logit) * (log_right - math.log1p(-smoothing))
    return right + torch.sigmoid(-logit) * (log_wrong - math.log(smoothing))


def discopop(pairs: Pairs) -> Tensor:
    """Return (1 − m)·(−log σ(x)) + m·exp(−x) with m = σ(x / τ).

    The second term is one exponential: for very negative x, m is 0 and exp(−x) infinite.
    """
    logit = pairs.beta * pairs.margin
    modulation = logit / pairs.options.discopop_tau
    exponential = torch.exp(F.logsigmoid(modulation) - logit)
    return -F.logsigmoid(logit) * torch.sigmoid(-modulation) + exponential


def apo_zero(pairs: Pairs) -> Tensor:
    return 1 - torch.sigmoid(pairs.beta * pairs.chosen) + torch.sigmoid(pairs.beta * pairs.rejected)


def apo_down(pairs: Pairs) -> Tensor:
    return torch.sigmoid(pairs.beta * pairs.chosen) + 1 - torch.sigmoid(pairs.beta * (pairs.chosen - pairs.rejected))


def orpo(pairs: Pairs) -> Tensor:
    return -pairs.beta * F.logsigmoid(_log_odds(pairs.chosen) - _log_odds(pairs.rejected))


def nca_pair(pairs: Pairs) -> Tensor:
    chosen, rejected = pairs.beta * pairs.chosen, pairs.beta * pairs.rejected
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def bco_pair(pairs: Pairs) -> Tensor:
    return -F.logsigmoid(pairs.beta * pairs.chosen) - F.logsigmoid(-pairs.beta * pairs.rejected)


def sppo_hard(pairs: Pairs) -> Tensor:
    half = 0.5 / pairs.beta
    return (pairs.chosen - half) ** 2 + (pairs.rejected + half) ** 2


def aot(pairs: Pairs) -> Tensor:
    """Return each margin's term of the loss of sorted margins: its partner is the reference's margin of equal rank."""
    assert pairs.policy_margin is not None, "aot reads the policy's margins"
    partner = pairs.partners["aot"][::2]
    return logistic(pairs.beta * (pairs.policy_margin - partner), pairs.options.label_smoothing)


def aot_unpaired(pairs: Pairs) -> Tensor:
    """Return each chosen response's term of the loss of sorted rewards.

    Its partner, the rejected reward of equal rank, belongs to another pair, maybe of another microbatch. The second
    term is 0, and has the gradient of the rejected rewards of these pairs.
    """
    partner, smoothing = pairs.partners["aot_unpaired"], pairs.options.label_smoothing
    value = logistic(pairs.beta * (pairs.chosen - partner[::2]), smoothing)
    of_rejected = logistic(pairs.beta * (partner[1::2] - pairs.rejected), smoothing)
    return value + (of_rejected - of_rejected.detach())


OF_MARGIN: Mapping[PreferenceLossType, PairLoss] = {
    "sigmoid": sigmoid,
    "ipo": ipo,
    "hinge": hinge,
    "robust": robust,
    "simpo": simpo,
    "sigmoid_norm": sigmoid_norm,
    "exo_pair": exo_pair,
    "discopop": discopop,
}
"""Losses of the difference of a pair's scores."""
OF_BOTH_REWARDS: Mapping[PreferenceLossType, PairLoss] = {
    "apo_zero": apo_zero,
    "apo_down": apo_down,
    "orpo": orpo,
    "nca_pair": nca_pair,
    "bco_pair": bco_pair,
    "sppo_hard": sppo_hard,
    "aot": aot,
    "aot_unpaired": aot_unpaired,
}
"""Losses that depend on both rewards, not only on their difference, or on those of other pairs."""
PAIR_LOSSES: Mapping[PreferenceLossType, PairLoss] = {**OF_MARGIN, **OF_BOTH_REWARDS}


def weighted_sum(kinds: Mapping[PreferenceLossType, float], pairs: Pairs) -> Float[Tensor, " n"]:
    """Return the weighted sum of the losses of each pair."""
    of_margin = [weight * OF_MARGIN[kind](pairs) for kind, weight in kinds.items() if kind in OF_MARGIN]
    parts = [_sum(of_margin)] if of_margin else []
    parts += [weight * OF_BOTH_REWARDS[kind](pairs) for kind, weight in kinds.items() if kind in OF_BOTH_REWARDS]
    return _sum(parts)


def _sum(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


def f_divergence_scores(log_ratio: Float[Tensor, " rows"], options: DPOOptions) -> Float[Tensor, " rows"]:
    """Return f′(u), u = exp(`log_ratio`), of the f-divergence (arXiv:2309.16240, table 1)."""
    kind = options.f_divergence_type
    if kind == "js_divergence":
        return math.log(2) + F.logsigmoid(log_ratio)
    if kind == "forward_kl":
        return _alpha_scores(log_ratio, 0.0)
    if kind == "alpha_divergence":
        return _alpha_scores(log_ratio, options.f_alpha_divergence_coef)
    return log_ratio


def _alpha_scores(log_ratio: Tensor, alpha: float) -> Tensor:
    """Return (u^(α − 1) − 1) / (α − 1), or log u for α = 1, its limit."""
    power = alpha - 1
    if abs(power) < 1e-6:
        return log_ratio
    return torch.expm1((power * log_ratio).clamp(max=LARGEST_EXPONENT)) / power


def shared_length_weights(mask: Float[Tensor, "rows predicted"], alpha: float) -> Float[Tensor, "rows predicted"]:
    """Return LD-DPO's weights of tokens: 1 up to the counted tokens of the pair's shorter response, α after them."""
    lengths = mask.sum(-1)
    shared = torch.minimum(lengths[::2], lengths[1::2]).repeat_interleave(2)
    return torch.where(mask.cumsum(-1) > shared[:, None], alpha, 1.0).to(mask)


def batch_partners(
    kinds: Mapping[PreferenceLossType, float],
    policy: Float[Tensor, " rows"],
    reference: Float[Tensor, " rows"],
    counted: Bool[Tensor, " n"],
) -> dict[PreferenceLossType, Float[Tensor, " rows"]]:
    """Return the values [2n] that the losses of sorted quantities compare each row's with, by loss.

    The gradient of such a loss is that of the compared values, because sorting only permutes them. Equal values are
    taken in the order of the pairs.

    Args:
        policy: sums of the policy's log-probabilities of all rows of the global batch.
        reference: those of the reference.
        counted: pairs that count; the others get 0.
    """
    partners: dict[PreferenceLossType, Tensor] = {}
    if "aot" in kinds:
        own, other = policy[::2] - policy[1::2], reference[::2] - reference[1::2]
        partners["aot"] = _of_equal_rank(own, other, counted).repeat_interleave(2)
    if "aot_unpaired" in kinds:
        chosen, rejected = (policy - reference).unflatten(0, (-1, 2)).unbind(1)
        of_chosen, of_rejected = _of_equal_rank(chosen, rejected, counted), _of_equal_rank(rejected, chosen, counted)
        partners["aot_unpaired"] = torch.stack((of_chosen, of_rejected), 1).flatten()
    return partners


def _of_equal_rank(own: Tensor, other: Tensor, counted: Tensor) -> Tensor:
    """Return for each counted value of `own` the counted value of `other` of the same rank, and 0 for the others."""
    found, (places,) = torch.zeros_like(own), counted.nonzero(as_tuple=True)
    found[places[own[places].argsort(stable=True)]] = other[places].sort().values
    return found


def _log_odds(logprob: Tensor) -> Tensor:
    """Return log(p / (1 − p)) for log p < 0. For log p = 0 (an empty response), use the largest p below 1."""
    logprob = logprob.clamp(max=-torch.finfo(logprob.dtype).eps)
    return logprob - torch.log(-torch.expm1(logprob))
