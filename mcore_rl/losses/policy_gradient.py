"""Policy-gradient losses, KL estimators and the critic's loss.

Each policy-gradient loss is a short function. It maps a batch to values per token; `POLICY_LOSSES` lists these
functions by name. `PolicyGradientLossFn` adds what the losses share: importance weights, the off-policy mask,
aggregation, the KL term, entropy and likelihoods. In formulas, A is the advantage, π the token's probability under the
current policy, and r = π / π_prev its ratio to the previous policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypedDict

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.errors import ContractError
from mcore_rl.losses.common import (
    LARGEST_EXPONENT,
    LogprobLoss,
    LossFunction,
    LossType,
    Reduction,
    masked_mean,
    masked_sum,
    reads_options,
    require_count,
    require_keys,
    require_shape,
    sample_mask_of,
    sample_weights_of,
    token_mask_of,
)
from mcore_rl.losses.options import typed_dict
from mcore_rl.losses.policy_options import (
    Aggregation,
    ClippedPGOptions,
    DPPOOptions,
    DROOptions,
    GMPOOptions,
    KLEstimator,
    LUSPOOptions,
    PolicyLossName,
    PolicyLossOptions,
    SAPOOptions,
    TruncationType,
    VESPOOptions,
    policy_loss_options,
)

# In nats. exp() of a larger value times the clip's zero gradient would be NaN; e²⁰ is outside any clip range.
LOG_RATIO_LIMIT = 20.0
SMALLEST_LOG_WEIGHT = math.log(1e-8)
"""Lower bound of VESPO's log W in nats, as in its authors' code and TRL."""


def bounded_ratio(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return exp of `log_ratio` clamped to ±20 nats; the gradient is 0 outside of these bounds."""
    return torch.exp(log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


@dataclass(frozen=True)
class PolicyBatch:
    """A microbatch's data for the predicted tokens: all [B, S − 1], except `sample_mask` and `sample_weights` [B].

    Values of masked tokens are 0, because −inf or NaN would cause NaN gradients. Log-probabilities are in nats.
    `importance_weights` are [B, S − 1], or [B, 1] with one weight per sequence; only vespo reads them.
    """

    current: Tensor
    token_mask: Tensor
    sample_mask: Tensor
    sample_weights: Tensor
    advantages: Tensor
    prev: Tensor
    generation: Tensor
    reference: Tensor | None
    importance_weights: Tensor | None = None

    @property
    def log_ratios(self) -> Float[Tensor, "batch predicted"]:
        return self.current - self.prev

    def sequence_means(self, values: Float[Tensor, "batch predicted"]) -> Float[Tensor, "batch predicted"]:
        """Return, for each token [B, S − 1], the mean of `values` over the unmasked tokens of the token's sequence."""
        return masked_mean(values, self.token_mask, dim=-1)[:, None].expand_as(values)


@dataclass(frozen=True)
class PolicyTerms:
    """Results of a policy-gradient loss for each token, [B, S − 1] each.

    loss: value to minimise, before aggregation.
    ratio: probability ratio, of tokens or of sequences; for metrics.
    clipped_ratio: `ratio` clipped to the bounds of the loss; None for a loss without bounds.
    clipped_low: True for the tokens whose loss the lower bound changes. None means `clipped_ratio` > `ratio` with a
        negative advantage, as in the maximum of the clipped surrogate.
    clipped_high: the same for the upper bound and a positive advantage. Both are given, or neither.
    metrics: further values by name. The mean of each value over tokens becomes a metric.
    """

    loss: Tensor
    ratio: Tensor
    clipped_ratio: Tensor | None = None
    clipped_low: Tensor | None = None
    clipped_high: Tensor | None = None
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


PolicyLoss = Callable[[PolicyBatch, Any], PolicyTerms]
"""Function that computes a loss's `PolicyTerms` from a batch and the loss's own options."""


def clipped_surrogate(advantages: Tensor, ratio: Tensor, clipped_ratio: Tensor) -> Tensor:
    """Return max(−A·r, −A·clip(r))."""
    return torch.maximum(-advantages * ratio, -advantages * clipped_ratio)


def clipped_pg(batch: PolicyBatch, options: ClippedPGOptions) -> PolicyTerms:
    """Return each token's loss: PPO's clipped −A·r, CISPO's −A·clip(r)·log π, or −A·log π with `disable_ppo_ratio`.

    A is the advantage. r is the ratio π / π_prev of the token, or of its sequence with `has_sequence_ratios`.
    """
    advantages = batch.advantages
    if options.disable_ppo_ratio:
        ratio = clipped = batch.current
    else:
        log_ratio = batch.log_ratios
        ratio = bounded_ratio(batch.sequence_means(log_ratio) if options.has_sequence_ratios else log_ratio)
        clipped = ratio.clamp(1 - options.ratio_clip_min, 1 + options.ratio_clip_max)
    if options.clip_type == "cispo":
        counts = advantages != 0
        low, high = (ratio < clipped) & counts, (ratio > clipped) & counts
        return PolicyTerms(-advantages * clipped.detach() * batch.current, ratio, clipped, low, high)
    loss = clipped_surrogate(advantages, ratio, clipped)
    if options.ratio_clip_c is not None:
        bounded = torch.minimum(loss, -advantages * options.ratio_clip_c)
        loss = torch.where(advantages < 0, bounded, loss)
    return PolicyTerms(loss, ratio, clipped)


def luspo(batch: PolicyBatch, options: LUSPOOptions) -> PolicyTerms:
    """Return GSPO's loss of the sequence at each of its tokens. Their sum is the sequence's loss times its length."""
    ratio = bounded_ratio(batch.sequence_means(batch.log_ratios))
    clipped = ratio.clamp(1 - options.ratio_clip_min, 1 + options.ratio_clip_max)
    return PolicyTerms(clipped_surrogate(batch.advantages, ratio, clipped), ratio, clipped)


def dppo_tv(batch: PolicyBatch, options: DPPOOptions) -> PolicyTerms:
    current, prev = batch.current.detach().exp(), batch.prev.exp()
    return _dppo(batch, options, (current - prev).abs())


def dppo_kl(batch: PolicyBatch, options: DPPOOptions) -> PolicyTerms:
    """Return DPPO's loss with the divergence p·log(p / q) + (1 − p)·log((1 − p) / (1 − q)).

    p is the token's probability under the previous policy, q under the current policy.
    """
    log_q, log_p = batch.current.detach(), batch.prev
    not_q, not_p = -torch.expm1(log_q), -torch.expm1(log_p)
    of_others = torch.xlogy(not_p, not_p) - torch.xlogy(not_p, not_q)  # 0 if p = 1; infinite if only q = 1
    return _dppo(batch, options, log_p.exp() * (log_p - log_q) + of_others)


def _dppo(batch: PolicyBatch, options: DPPOOptions, divergence: Tensor) -> PolicyTerms:
    """Return −A·min(r, c)·log π. r is the ratio π / π_prev, without gradient; c is the option `ratio_clip_c`.

    The result is 0 if the token's probability has moved in the direction that A demands, and its `divergence` is above
    the limit in `options`.
    """
    advantages, log_ratio = batch.advantages, batch.log_ratios.detach()
    ratio = bounded_ratio(log_ratio)
    weight = ratio.clamp(max=options.ratio_clip_c)
    high = (advantages > 0) & (log_ratio > 0) & (divergence > options.divergence_clip_max)
    low = (advantages < 0) & (log_ratio < 0) & (divergence > options.divergence_clip_min)
    loss = torch.where(high | low, 0, -advantages * weight * batch.current)
    return PolicyTerms(loss, ratio, weight, low, high)


def sapo(batch: PolicyBatch, options: SAPOOptions) -> PolicyTerms:
    """Return −A·(4 / τ)·σ(τ·(r − 1)); the temperature τ depends on A's sign."""
    ratio = bounded_ratio(batch.log_ratios)
    tau = _by_sign(batch.advantages > 0, options.tau_pos, options.tau_neg, ratio)
    gate = torch.sigmoid(tau * (ratio - 1)) * (4 / tau)
    return PolicyTerms(-gate * batch.advantages, ratio)


def vespo(batch: PolicyBatch, options: VESPOOptions) -> PolicyTerms:
    """Return −φ(W)·A·log π with φ(W) = W^k·exp(λ·(1 − W)); k and λ depend on A's sign.

    W is the ratio of the whole sequence, times its importance weights. φ(W) has no gradient.
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
    """Return `if_positive` where `positive` is True and `otherwise` elsewhere, in the shape and precision of `like`."""
    return torch.full_like(like, otherwise).masked_fill(positive, if_positive)


def gmpo(batch: PolicyBatch, options: GMPOOptions) -> PolicyTerms:
    """Return −A times the geometric mean of a sequence's ratios: clipped from above if A > 0, otherwise from below."""
    log_ratio, positive = batch.log_ratios, batch.advantages > 0
    clamped = log_ratio.clamp(-options.log_ratio_clip_min, options.log_ratio_clip_max)
    clipped = torch.where(positive, torch.minimum(log_ratio, clamped), torch.maximum(log_ratio, clamped))
    loss = -bounded_ratio(batch.sequence_means(clipped)) * batch.advantages
    return PolicyTerms(loss, bounded_ratio(log_ratio.detach()), bounded_ratio(clipped.detach()))


def dro(batch: PolicyBatch, options: DROOptions) -> PolicyTerms:
    """Return DRO's loss −(A·log π − β/2·(log π − log π_prev)²) for each token, with the advantages A."""
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
"""Losses whose formula contains the importance weights. All other losses are multiplied by these weights."""


if TYPE_CHECKING:
    ClippedPGLossConfig = Mapping[str, Any]
else:
    ClippedPGLossConfig = typed_dict("ClippedPGLossConfig", ClippedPGOptions)


def finite_exp(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return eˣ with x clamped to at most 20 nats (gradient 0 above); 0 if x is NaN or eˣ is not finite in this dtype.

    Because of the bound of 20 nats, a product of three such values is finite too (in fp32).
    """
    fits = x <= math.log(torch.finfo(x.dtype).max)
    return torch.where(fits, torch.exp(torch.where(fits, x, 0).clamp(max=LOG_RATIO_LIMIT)), 0)


def importance_weights(
    prev_logprobs: Float[Tensor, "batch predicted"],
    generation_logprobs: Float[Tensor, "batch predicted"],
    mask: Float[Tensor, "batch predicted"],
    sequence_level: bool,
) -> Float[Tensor, "batch weights"]:
    """Return exp(prev − generation) per token [B, S − 1], or exp(Σ(prev − generation)) per sequence [B, 1]."""
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
    """Bound the variance of importance weights.

    Args:
        weights: [B, S − 1] or [B, 1].
        difference: prev − generation log-probabilities, [B, S − 1].
        kind: what happens to weights outside of [lower, upper]. tis: they become the nearer bound (truncated importance
            sampling, https://fengyao.notion.site/off-policy-rl). icepop: they become 0 (IcePop, arXiv:2510.18855;
            masked importance sampling). seq-mask-tis: all weights of a sequence become 0 if its geometric-mean ratio
            exp(mean(difference)) is outside of the bounds.

    Returns:
        The bounded weights, and a mask that is True for weights inside the bounds: in the shape of the weights, or
        [B, 1] for seq-mask-tis.
    """
    judged = finite_exp(masked_mean(difference, mask, dim=-1))[:, None] if kind == "seq-mask-tis" else weights
    inside = (judged >= lower) & (judged <= upper)
    return (weights.clamp(lower, upper) if kind == "tis" else torch.where(inside, weights, 0)), inside


def calculate_kl(
    logprobs: Float[Tensor, "*shape"],
    logprobs_reference: Float[Tensor, "*shape"],
    estimator: KLEstimator = "k3",
    clamp: float | None = 20.0,
    output_clamp: float | None = None,
) -> Float[Tensor, "*shape"]:
    """Return the per-token KL estimate in nats (http://joschu.net/blog/kl-approx.html).

    With x = reference − current, the estimators are:

    k1: −x. Its mean over samples of π is the KL.
    k2: x² / 2. Its mean is not the KL, but its mean gradient is the KL's (see `kl_weights`).
    k3: eˣ − x − 1. Its mean is the KL, and it is never negative.

    Args:
        clamp: x is clamped to ±`clamp`, so that eˣ does not overflow. None for no bound, as in NeMo RL's documented
            version.
        output_clamp: largest absolute value of the estimate; None for no bound.
    """
    x = logprobs_reference - logprobs
    if clamp is not None:
        x = x.clamp(-clamp, clamp)
    if estimator == "k1":
        kl = -x
    elif estimator == "k2":
        kl = x.square() / 2
    elif estimator == "k3":
        # An infinite estimate times the clamp's zero gradient would be NaN.
        kl = torch.expm1(x if output_clamp is None else x.clamp(max=LARGEST_EXPONENT)) - x
    else:
        raise ContractError(f"KL estimator must be k1, k2 or k3, got {estimator!r}")
    return kl if output_clamp is None else kl.clamp(-output_clamp, output_clamp)


def kl_weights(
    logprobs: Float[Tensor, "*shape"],
    generation_logprobs: Float[Tensor, "*shape"] | None,
    gradient: Literal["value", "unbiased"],
) -> Float[Tensor, "*shape"]:
    """Return the importance weight by which a KL estimate is multiplied, with or without a gradient.

    If `generation_logprobs` are given, the samples are from another policy, and the weight's value is
    exp(current − generation). Otherwise it is 1. The argument `gradient` has one of two values:

    value: the weight has no gradient, so only the estimate's formula is differentiated. The mean gradient over samples
        of π is 0 for k1, which therefore does not regularise; ∇KL(π ‖ π_ref) for k2; and ∇KL(π_ref ‖ π) for k3. The
        GRPO paper (arXiv:2402.03300), TRL and NeMo RL's documented version use k3 in this way.
    unbiased: the weight has a gradient, so that the probability of sampling the token is differentiated too. (The
        weight 1 is computed as exp(current − current), with the second term detached.) The mean gradient is
        ∇KL(π ‖ π_ref) for k1 and k3 (arXiv:2506.09477), and ∇E[k2] for k2. NeMo RL's present version does this.
    """
    if generation_logprobs is None:
        if gradient == "value":
            return torch.ones_like(logprobs)
        return torch.exp(logprobs - logprobs.detach())
    weights = finite_exp(logprobs - generation_logprobs)
    return weights if gradient == "unbiased" else weights.detach()


def soft_overlong_penalty(
    response_lengths: Shaped[Tensor, " samples"], max_length: int, cache_length: int
) -> Float[Tensor, " samples"]:
    """Return the penalty to add to each sample's reward: 0 up to max_length − cache_length tokens, −1 at max_length.

    Between these two lengths the penalty is linear.

    Args:
        response_lengths: number of tokens in each sample's longest response; the limit applies to each response of a
            conversation separately.

    Raises:
        ContractError: `cache_length` is not between 1 and `max_length`.
    """
    if not 0 < cache_length <= max_length:
        raise ContractError(f"cache_length must be between 1 and max_length ({max_length}), got {cache_length}")
    return ((max_length - cache_length - response_lengths) / cache_length).clamp(-1.0, 0.0)


class ClippedPGLossDataDict(TypedDict):
    """The entries that policy-gradient losses read. All are [B, S], aligned with `input_ids`, except `sample_mask` [B].

    `reference_policy_logprobs` is needed only with a KL term, `prev_logprobs` only without `force_on_policy_ratio`.

    `positive_example_nll_weight` also requires `rewards` [B] and `num_positive_tokens` [B], the number of tokens in
    samples with a positive reward. `observation_nll_weight` requires `num_observation_tokens` [B], the number of tokens
    in `observation_mask`. Both count the tokens of the global batch and are the same in every row.
    """

    input_ids: Tensor
    advantages: Tensor
    prev_logprobs: Tensor
    generation_logprobs: Tensor
    reference_policy_logprobs: Tensor
    token_mask: Tensor
    sample_mask: Tensor


Mean = Callable[[Tensor], Tensor]
"""Function from values [B, S − 1] to a number that can be summed over microbatches."""


class PolicyGradientLossFn(LogprobLoss):
    """A policy-gradient loss: a function from `POLICY_LOSSES`, chosen by `name`, plus KL and other terms.

    The loss is mean(w·ℓ) + β·mean(KL(π ‖ π_ref)), minus a multiple of the entropy, plus negative log-likelihoods. ℓ is
    the chosen function's value for a token, and w the token's importance weight. ℓ, KL and entropy are aggregated in
    the same way. Log-ratios are clamped to ±20 nats.

    Raises:
        ContractError: no loss has this name, or the loss does not read one of the options.
    """

    reads_counted_tokens_only = True
    metric_reductions: ClassVar[Mapping[str, Reduction]] = {
        "probs_ratio_min": "min",
        "probs_ratio_max": "max",
        "probs_ratio_clamped_min": "min",
        "probs_ratio_clamped_max": "max",
    }

    options: PolicyLossOptions

    def __init__(self, cfg: Mapping[str, Any] | PolicyLossOptions) -> None:
        options = self.options = policy_loss_options(cfg, type(self).__name__)
        of_tokens = options.reduction.startswith("token")
        self.loss_type = LossType.TOKEN_LEVEL if of_tokens else LossType.SEQUENCE_LEVEL
        self.needs_entropy = options.entropy_bonus > 0
        left_out = set() if options.kl_in_loss else {"reference_policy_logprobs"}
        left_out |= {"prev_logprobs"} if options.force_on_policy_ratio else set()
        self.required_keys = tuple(key for key in ClippedPGLossDataDict.__annotations__ if key not in left_out)
        if options.positive_example_nll_weight:
            self.required_keys += ("rewards", "num_positive_tokens")
        if options.observation_nll_weight:
            self.required_keys += ("num_observation_tokens",)

    def tokens_read(self, data: Mapping[str, Any]) -> Float[Tensor, "batch predicted"]:
        counted = super().tokens_read(data)
        return counted + observation_mask(data, counted) if self.options.observation_nll_weight else counted

    def from_logprobs(
        self,
        next_token_logprobs: Float[Tensor, "batch predicted"],
        data: BatchedDataDict[Any],
        global_valid_seqs: Tensor | None,
        global_valid_toks: Tensor | None,
        entropy: Float[Tensor, "batch predicted"] | None = None,
    ) -> tuple[Float[Tensor, ""], dict[str, Any]]:
        self.check(next_token_logprobs, data)
        options, batch = self.options, self._batch(next_token_logprobs, data)
        mean, token_mean, sample_mean = self._means(batch, global_valid_seqs, global_valid_toks)

        weights, inside = self._importance_weights(batch)
        weighs = options.use_importance_sampling_correction
        itself = options.name in WEIGHED_BY_THEMSELVES
        terms = POLICY_LOSSES[options.name](
            replace(batch, importance_weights=weights) if weighs and itself else batch, options
        )
        per_token, left_out = self._on_policy(terms.loss, batch)
        loss = mean(weights * per_token if weighs and not itself else per_token)

        kl = torch.zeros_like(loss)
        if options.kl_in_loss:
            assert batch.reference is not None
            generation = batch.generation if options.use_on_policy_kl_approximation else None
            estimate = calculate_kl(
                batch.current, batch.reference, options.kl_estimator, options.kl_clamp, options.kl_output_clamp
            )
            kl = mean(kl_weights(batch.current, generation, options.kl_gradient) * estimate)
            loss = loss + options.reference_policy_kl_penalty * kl
        if options.entropy_bonus:
            if entropy is None:
                raise ContractError(
                    f"{type(self).__name__}: entropy_bonus needs logits, or the argument entropies [B, S - 1]"
                )
            loss = loss - options.entropy_bonus * mean(entropy)
        likelihoods = self._likelihoods(next_token_logprobs, batch, data)
        for weight, name in LIKELIHOODS.items():
            if name in likelihoods:
                loss = loss + getattr(options, weight) * likelihoods[name]

        metrics = {
            "loss": loss,
            "kl_penalty": kl,
            **self._ratio_metrics(terms, batch, token_mean),
            "sampling_importance_ratio": (sample_mean if options.weighs_sequences else token_mean)(weights),
            "approx_entropy": token_mean(-finite_exp(batch.current - batch.generation) * batch.current),
            **{name: token_mean(values) for name, values in self._mismatch(batch).items()},
            "num_valid_samples": batch.sample_weights.sum(),
            **likelihoods,
        }
        if inside is not None:
            outside_mean = token_mean if inside.shape == batch.current.shape else sample_mean
            metrics["is_oob_ratio"] = outside_mean((~inside).to(batch.current))
        if left_out is not None:
            metrics["off_policy_mask_fraction"] = token_mean(left_out.to(batch.current))
        return loss, {name: value.detach() for name, value in metrics.items()}

    def _batch(self, current: Tensor, data: BatchedDataDict[Any]) -> PolicyBatch:
        """Return the microbatch's data for the predicted tokens. Values of masked tokens are 0."""
        options, mask = self.options, token_mask_of(data, current)

        def counted(values: Tensor) -> Tensor:
            return torch.where(mask > 0, values, 0)

        def predicted(key: str) -> Tensor:
            require_shape(key, data[key], tuple(data["token_mask"].shape), self)
            return counted(data[key][:, 1:].to(current))

        current = counted(current)
        return PolicyBatch(
            current=current,
            token_mask=mask,
            sample_mask=sample_mask_of(data, current),
            sample_weights=sample_weights_of(data, current),
            advantages=predicted("advantages"),
            prev=current.detach() if options.force_on_policy_ratio else predicted("prev_logprobs"),
            generation=predicted("generation_logprobs"),
            reference=predicted("reference_policy_logprobs") if options.kl_in_loss else None,
        )

    def _means(self, batch: PolicyBatch, seqs: Tensor | None, toks: Tensor | None) -> tuple[Mean, Mean, Mean]:
        """Return three functions that aggregate values over the global batch.

        The first function aggregates values [B, S − 1] or [B, 1] as the loss does. The second computes the mean over
        tokens. The third computes the mean of values [B, 1] over samples.

        If a sample has several rows, a mean over its tokens is the mean of its rows' means, weighted by
        `sample_weights`; a sum over its tokens is the plain sum of its rows' sums.
        """
        tokens, reduction = require_count("global_valid_toks", toks, self), self.options.reduction
        length = self.options.constant_length

        def token_mean(values: Tensor) -> Tensor:
            return masked_mean(values, batch.token_mask, global_normalization_factor=tokens)

        def over_samples(values: Tensor, weights: Tensor) -> Tensor:
            sequences = require_count("global_valid_seqs", seqs, self)
            return masked_mean(values, weights, global_normalization_factor=sequences)

        def sample_mean(values: Tensor) -> Tensor:
            return over_samples(values[:, 0], batch.sample_weights)

        def mean_of_token_means(values: Tensor) -> Tensor:
            return over_samples(masked_mean(values, batch.token_mask, dim=-1), batch.sample_weights)

        def mean_of_token_sums(values: Tensor) -> Tensor:
            return over_samples(masked_sum(values, batch.token_mask, dim=-1), batch.sample_mask)

        def mean_of_constant_lengths(values: Tensor) -> Tensor:
            per_row = masked_mean(values, batch.token_mask, dim=-1, global_normalization_factor=length)
            return over_samples(per_row, batch.sample_mask)

        aggregations: dict[Aggregation, Mean] = {
            "token_mean": token_mean,
            "seq_mean_token_mean": mean_of_token_means if length is None else mean_of_constant_lengths,
            "seq_mean_token_sum": mean_of_token_sums,
            "token_sum": lambda values: masked_sum(values, batch.token_mask),
        }
        return aggregations[reduction], token_mean, sample_mean

    def _on_policy(self, per_token: Tensor, batch: PolicyBatch) -> tuple[Tensor, Tensor | None]:
        """Return `per_token` with 0 for off-policy tokens, and a mask that is True for these tokens.

        Without `off_policy_mask_threshold`, no token is off-policy: `per_token` is unchanged, and the mask is None.
        """
        threshold = self.options.off_policy_mask_threshold
        if threshold is None:
            return per_token, None
        distance = batch.sequence_means(batch.generation - batch.current.detach())
        left_out = (batch.advantages < 0) & (distance > threshold)
        return torch.where(left_out, 0, per_token), left_out

    def _importance_weights(self, batch: PolicyBatch) -> tuple[Tensor, Tensor | None]:
        """Return importance weights [B, S − 1] or [B, 1], and a mask.

        The mask is True for weights inside the bounds; None without bounds.
        """
        options = self.options
        weights = importance_weights(batch.prev, batch.generation, batch.token_mask, options.weighs_sequences)
        if options.truncated_importance_sampling_ratio is None:
            return weights, None
        return truncate_importance_weights(
            weights,
            batch.prev - batch.generation,
            batch.token_mask,
            options.truncated_importance_sampling_type or "tis",
            options.truncated_importance_sampling_ratio_min or 0.0,
            options.truncated_importance_sampling_ratio,
        )

    def _likelihoods(self, logprobs: Tensor, batch: PolicyBatch, data: BatchedDataDict[Any]) -> dict[str, Tensor]:
        """Return the likelihood terms whose weights are not 0, by the name of their metric.

        One term is the mean of −log π over the tokens of all samples with a positive reward in the global batch (VAPO,
        eq. 10). The other term is the mean of −log π over the tokens of observations.
        """
        found = {}
        if self.options.positive_example_nll_weight:
            positive = (data["rewards"].to(batch.current) > 0).to(batch.current)[:, None] * batch.token_mask
            total = data["num_positive_tokens"].to(batch.current).amax()
            found["positive_nll_loss"] = masked_mean(-batch.current, positive, global_normalization_factor=total)
        if self.options.observation_nll_weight:
            observed, total = observation_mask(data, logprobs), data["num_observation_tokens"].to(logprobs).amax()
            found["observation_nll_loss"] = masked_mean(-logprobs, observed, global_normalization_factor=total)
        return found

    def _ratio_metrics(self, terms: PolicyTerms, batch: PolicyBatch, token_mean: Mean) -> dict[str, Tensor]:
        ratio, clipped = terms.ratio, terms.clipped_ratio
        metrics = {"probs_ratio": token_mean(ratio), **_extremes("probs_ratio", ratio, batch.token_mask)}
        metrics |= {name: token_mean(values) for name, values in terms.metrics.items()}
        if clipped is None:
            return metrics
        low, high = terms.clipped_low, terms.clipped_high
        if low is None or high is None:
            low, high = (ratio < clipped) & (batch.advantages < 0), (ratio > clipped) & (batch.advantages > 0)
        return {
            **metrics,
            "probs_ratio_clamped": token_mean(clipped),
            "clip_fraction_low": token_mean(low.to(ratio)),
            "clip_fraction_high": token_mean(high.to(ratio)),
            **_extremes("probs_ratio_clamped", clipped, batch.token_mask),
        }

    def _mismatch(self, batch: PolicyBatch) -> dict[str, Tensor]:
        """Return measures of the disagreement of sampler and trainer on each token: by name, [B, S − 1] each.

        `token_mult_prob_error` is a probability ratio. The other measures are in nats: the absolute difference, of
        which more than 1 counts as 1; KL(generation ‖ prev), KL(prev ‖ generation), and the Jensen–Shannon divergence,
        whose two KLs are estimated by k3.
        """
        prev, generation, kind = batch.prev.detach(), batch.generation, self.options.kl_estimator
        mixture = torch.logaddexp(prev, generation) - math.log(2)
        prev_to_mixture, generation_to_mixture = (calculate_kl(x, mixture) for x in (prev, generation))
        return {
            "token_mult_prob_error": bounded_ratio((generation - prev).abs()),
            "logprob_error": (generation - prev).abs().clamp(max=1.0),
            "gen_kl_error": calculate_kl(generation, prev, kind),
            "policy_kl_error": calculate_kl(prev, generation, kind),
            "js_divergence_error": (prev_to_mixture + generation_to_mixture) / 2,
        }


@reads_options(ClippedPGOptions)
class ClippedPGLossFn(PolicyGradientLossFn):
    """The clipped loss of PPO (arXiv:1707.06347), GRPO (arXiv:2402.03300) and their variants.

    By default it is E[max(−A·r, −A·clamp(r, 1 − ε_min, 1 + ε_max))] + β·KL(π ‖ π_ref) with r = π / π_prev. The values
    of `ClippedPGOptions` are also attributes of the loss.
    """

    reads_counted_tokens_only = True
    options: ClippedPGOptions

    def __init__(self, cfg: ClippedPGLossConfig | ClippedPGOptions) -> None:
        super().__init__(ClippedPGOptions.from_config(cfg, type(self).__name__))

    @property
    def use_cispo(self) -> bool:
        """Whether `clip_type` is cispo. Other versions of NeMo RL have this option in place of `clip_type`."""
        return self.options.clip_type == "cispo"


def build_policy_loss(options: PolicyLossOptions) -> PolicyGradientLossFn:
    """Return an instance of the loss class that supports these options."""
    return ClippedPGLossFn(options) if isinstance(options, ClippedPGOptions) else PolicyGradientLossFn(options)


LIKELIHOODS = {
    "positive_example_nll_weight": "positive_nll_loss",
    "observation_nll_weight": "observation_nll_loss",
}
"""Optional likelihood terms of the loss: maps the option for a term's weight to the metric that shows the term."""


def observation_mask(data: Mapping[str, Any], like: Tensor) -> Float[Tensor, "batch predicted"]:
    """Return a mask: 1 for tokens between two responses of a conversation, 0 elsewhere.

    `token_mask` is 1 only for responses, so the tokens between responses are the environment's. In samples whose
    `sample_mask` is 0, the mask is 0 everywhere.
    """
    responses = data["token_mask"][:, 1:] > 0
    before = responses.cumsum(1) > 0
    after = responses.flip(1).cumsum(1).flip(1) > 0
    return (before & after & ~responses).to(like) * sample_mask_of(data, like)[:, None]


def _extremes(name: str, values: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Return the metrics `name`_min and `name`_max of `values` where `mask` is 1; inf and −inf if it is 1 nowhere."""
    low, high = (
        F.pad(torch.where(mask > 0, values, bound).flatten(), (0, 1), value=bound) for bound in (math.inf, -math.inf)
    )
    return {f"{name}_min": low.amin(), f"{name}_max": high.amax()}


class ValueLossDataDict(TypedDict):
    """The entries that `ValueLossFn` reads. All are [B, S], aligned with `input_ids`, except `sample_mask` [B].

    `values` are the critic's values before the update; they are needed only with `value_clip`.
    """

    values: Tensor
    returns: Tensor
    token_mask: Tensor
    sample_mask: Tensor


class ValueLossFn(LossFunction):
    """The critic's loss: half the mean squared error of values V to returns R, with an optional clip.

    With the clip: ½·E[max((V − R)², (V_clip − R)²)] over tokens, V_clip = V_prev + clamp(V − V_prev, −ε, ε). It is from
    PPO's original implementation (arXiv:1707.06347; described in arXiv:2005.12729, section 3). There is no gradient if
    V has moved further than ε and toward R.

    Args:
        value_clip: ε, more than 0, or None for no clip.
    """

    loss_type = LossType.TOKEN_LEVEL
    reads_values = True
    """Whether the loss receives the values of tokens, [B, S], from a model with a reward head."""

    def __init__(self, value_clip: float | None = None) -> None:
        if value_clip is not None and not value_clip > 0:
            raise ContractError(
                f"ValueLossFn: value_clip must be more than 0, or None to clip nothing, got {value_clip}"
            )
        self.value_clip = value_clip
        self.required_keys = ("token_mask", "sample_mask", "returns", *(() if value_clip is None else ("values",)))

    def __call__(
        self,
        values: Float[Tensor, "batch seq"],
        data: Any,
        global_valid_seqs: Tensor | None = None,
        global_valid_toks: Tensor | None = None,
    ) -> tuple[Float[Tensor, ""], dict[str, Any]]:
        """Return the loss and metrics; raise ContractError for missing keys, wrong shapes or wrong counts."""
        require_keys(data, self.required_keys, self)
        for key in self.required_keys:
            shape = tuple(values.shape[:1]) if key == "sample_mask" else tuple(values.shape)
            require_shape(key, data[key], shape, self)
        tokens = require_count("global_valid_toks", global_valid_toks, self)
        values = values if values.dtype == torch.float64 else values.float()
        mask = token_mask_of(data, values)

        def predicted(x: Tensor) -> Tensor:  # 0 for masked tokens, where −inf or NaN would cause NaN gradients
            return torch.where(mask > 0, x[:, 1:].to(values), 0)

        def mean(per_token: Tensor) -> Tensor:
            return masked_mean(per_token, mask, global_normalization_factor=tokens)

        current, returns = predicted(values), predicted(data["returns"])
        error = (current - returns).square()
        clipped_error = error
        if self.value_clip is not None:
            before = predicted(data["values"])
            moved = (current - before).clamp(-self.value_clip, self.value_clip)
            clipped_error = (before + moved - returns).square()
        loss = 0.5 * mean(torch.maximum(error, clipped_error))
        metrics = {
            "loss": loss,
            "value_clip_fraction": mean((clipped_error > error).to(current)),
            "num_valid_samples": data["sample_mask"].sum(),
        }
        return loss, {name: value.detach() for name, value in metrics.items()}
