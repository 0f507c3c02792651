"""Computes advantages from the rewards of a step's groups (P prompts, G responses each), and from a critic's values.

Everything is computed in fp64. Equal rewards give an advantage of exactly 0. Without a special case, rounding could
make r − mean and the standard deviation tiny instead of 0, and their quotient would be an advantage of ordinary size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from mcore_rl.config import GRPOAlgorithmConfig
from mcore_rl.distributed.batched_data_dict import BatchShare, reduced
from mcore_rl.errors import TrainingError
from mcore_rl.rollouts.samples import differ, has_signal, last_response_tokens


def group_advantages(
    rewards: Float[Tensor, "prompts group"],
    leave_one_out: bool = False,
    normalize: bool = True,
    population: bool = False,
    epsilon: float = 1e-4,
    judged: Bool[Tensor, "prompts group"] | None = None,
) -> Float[Tensor, "prompts group"]:
    """Compute (r − baseline) / (standard deviation + ε) within each group; return fp32 (fp64 for fp64 rewards).

    The defaults are GRPO (arXiv:2402.03300, section 4.1.2). normalize=False is Dr.GRPO (arXiv:2503.20783): easy and
    hard prompts have the same weight. normalize=False with `leave_one_out` is RLOO (arXiv:2402.14740).

    Args:
        leave_one_out: compute a response's baseline and standard deviation from the other responses of its group.
        normalize: divide by the standard deviation.
        population: divide by n, not by n − 1, in the standard deviation.
        judged: False for responses without a reward. Their advantage is 0, and they do not affect other advantages.
            None if all responses have a reward.
    """
    group = rewards.shape[1]
    judged = torch.ones_like(rewards, dtype=torch.bool) if judged is None else judged
    r = torch.where(judged, rewards.double(), 0)
    counted = judged[:, None].expand(-1, group, -1)  # [prompt, response, responses in its baseline]
    if leave_one_out:
        counted = counted & ~torch.eye(group, dtype=torch.bool)
    n = counted.sum(2)
    baseline = (r[:, None] * counted).sum(2) / n.clamp(min=1)
    differs = has_signal(r, judged)[:, None] & judged
    advantages = torch.where(differs, r - baseline, 0)
    if normalize:
        spread = r[:, None] - baseline[:, :, None]
        variance = (spread.square() * counted).sum(2) / (n if population else n - 1).clamp(min=1)
        # If all rewards that count for a response are equal, their deviation is 0; do not divide its advantage.
        sharpens = differ(r[:, None], counted)
        advantages = torch.where(sharpens, advantages / (variance.sqrt() + epsilon), advantages)
    return advantages.to(_result_type(rewards))


def maxrl_advantages(
    rewards: Float[Tensor, "prompts group"],
    epsilon: float = 1e-4,
    judged: Bool[Tensor, "prompts group"] | None = None,
) -> Float[Tensor, "prompts group"]:
    """Compute MaxRL (arXiv:2602.02710): (r − mean) / (mean + ε) within each group, for rewards of at least 0.

    Args:
        judged: see `group_advantages`.

    Raises:
        TrainingError: a reward is negative. A negative mean would reverse the signs of the advantages.
    """
    judged = torch.ones_like(rewards, dtype=torch.bool) if judged is None else judged
    r = torch.where(judged, rewards.double(), 0)
    if bool((r < 0).any()):
        raise TrainingError(
            "grpo.advantage_estimator=maxrl divides by the mean reward, so rewards must be at least 0; a sample "
            f"has {float(r.min()):g}. Correct the rewards, or choose another estimator"
        )
    mean = r.sum(1, keepdim=True) / judged.sum(1, keepdim=True).clamp(min=1)
    differs = has_signal(r, judged)[:, None] & judged
    return torch.where(differs, (r - mean) / (mean + epsilon), 0).to(_result_type(rewards))


def gdpo_advantages(
    rewards: Float[Tensor, "names prompts group"],
    weights: Float[Tensor, " names"],
    epsilon: float = 1e-4,
    judged: Bool[Tensor, "prompts group"] | None = None,
) -> Float[Tensor, "prompts group"]:
    """Compute GDPO (arXiv:2601.05242): the weighted sum of GRPO's advantages of each named reward, whitened.

    Each named reward is normalised within its groups, so a reward with small differences counts as much as one with
    large differences. The weighted sum is whitened over all samples.

    Args:
        rewards: each named reward of each sample; NaN where a reward does not apply to a sample. Such a reward adds 0
            to the weighted sum of the sample.
        weights: weight of each named reward.
        judged: see `group_advantages`.
    """
    judged = torch.ones_like(rewards[0], dtype=torch.bool) if judged is None else judged
    of_names = [group_advantages(r.double(), epsilon=epsilon, judged=judged & ~r.isnan()) for r in rewards]
    total = (torch.stack(of_names) * weights.double()[:, None, None]).sum(0)
    counted = total[judged]
    if len(counted) < 2 or counted.max() == counted.min():
        return torch.zeros_like(total).to(_result_type(rewards))
    return torch.where(judged, (total - counted.mean()) / (counted.std() + epsilon), 0).to(_result_type(rewards))


def optimal_token_baseline_advantages(
    token_rewards: Float[Tensor, "own seq"],
    score_norms: Float[Tensor, "own seq"],
    token_mask: Float[Tensor, "own seq"],
    group_of: Int[Tensor, " own"],
    groups: int,
    share: BatchShare | None = None,
) -> Float[Tensor, "own seq"]:
    """Compute each token's return G_t minus the baseline b_t of least variance (verl's optimal_token_baseline).

    t counts the response tokens of a sample, and G_t is the sum of the token rewards from t on. The baseline is
    b_t = Σ_i G_it·W_it / Σ_i W_it over the samples i of the group; 0 if only one of them has a response token t. W_t is
    the sum of ‖∂ log π / ∂ logits‖² = 1 − 2π + Σ π² over the response tokens up to t; Σ π² is over the vocabulary.

    Args:
        token_rewards: reward of each token.
        score_norms: 1 − 2π + Σ π² of each token.
        token_mask: 1 for the tokens of responses of judged samples.
        group_of: number of each sample's group, from 0 to `groups` − 1.
        share: the samples whose rows the tensors above contain; None for all samples of the batch. If `share` is given,
            the call is collective.

    Returns:
        The advantage of each token, fp32; 0 outside of responses.
    """
    share = share or BatchShare.whole(len(token_mask))
    own = token_mask > 0
    earned, norms = (torch.where(own, x.double(), 0) for x in (token_rewards, score_norms))
    returns, weights = earned.flip(1).cumsum(1).flip(1), norms.cumsum(1)
    longest = int(share.max(float(own.sum(1).max()) if own.numel() else 0.0)[0])
    places = (group_of[:, None] * longest + own.cumsum(1) - 1)[own]
    sums = torch.zeros(3, groups * longest, dtype=torch.float64)
    for row, values in zip(sums, (returns * weights, weights, own.double()), strict=True):
        row.index_add_(0, places, values[own])
    weighted, total, count = reduced(sums, share.replicas)
    baselines = torch.where(count > 1, weighted / total.clamp(min=1e-8), 0)
    advantages = torch.zeros_like(returns)
    advantages[own] = returns[own] - baselines[places]
    return advantages.float()


def token_rewards_with_penalty(data: Mapping[str, Tensor], beyond: Tensor, penalty: Tensor | None) -> Tensor:
    """Return each token's reward [B, S]: the column `token_rewards` of `data`, plus `beyond`, minus `penalty`.

    Args:
        beyond: [B], the amount that reward shaping has added to each sample's reward; it is added to the sample's last
            response token.
        penalty: [B, S], penalty of each token (nats); None for no penalty.
    """
    earned = data["token_rewards"].clone()
    earned[torch.arange(len(earned)), last_response_tokens(data)] += beyond
    return earned if penalty is None else earned - penalty


def reinforce_plus_plus_advantages(
    rewards: Float[Tensor, "prompts group"],
    token_mask: Float[Tensor, "own seq"],
    penalty: Float[Tensor, "own seq"] | None = None,
    minus_baseline: bool = False,
    epsilon: float = 1e-4,
    share: BatchShare | None = None,
    judged: Bool[Tensor, "prompts group"] | None = None,
) -> Float[Tensor, "own seq"]:
    """Compute REINFORCE++ (arXiv:2501.03262): A_t = r − Σ_{i ≥ t} penalty_i, whitened over all response tokens.

    Args:
        rewards: rewards of all samples.
        token_mask: 1 for the tokens of responses; the samples have the order of `rewards`.
        penalty: β·KL of each token (nats); it is subtracted from the token's reward. None for no penalty.
        minus_baseline: first subtract the mean of each prompt's rewards (REINFORCE++-baseline).
        share: the samples whose rows `token_mask` and `penalty` contain; None for all samples of the batch. If `share`
            is given, the call is collective.
        judged: see `group_advantages`.

    Returns:
        The advantage of each token, fp32 (fp64 for fp64 rewards); 0 outside of responses.
    """
    judged = torch.ones_like(rewards, dtype=torch.bool) if judged is None else judged
    r, mask = torch.where(judged, rewards.double(), 0), token_mask.double() * _select_rows(judged, share)
    if minus_baseline:
        mean = r.sum(1, keepdim=True) / judged.sum(1, keepdim=True).clamp(min=1)
        r = torch.where(has_signal(r, judged)[:, None], r - mean, 0)
    returns = _select_rows(r, share).expand(mask.shape)
    if penalty is not None:
        costs = penalty.double() * mask
        returns = returns - costs.flip(1).cumsum(1).flip(1)
    return whiten(returns, mask, epsilon, share).to(_result_type(rewards))


def gae_advantages(
    token_rewards: Float[Tensor, "samples seq"],
    values: Float[Tensor, "samples seq"],
    token_mask: Float[Tensor, "samples seq"],
    gamma: float = 1.0,
    gae_lambda: float = 0.95,
) -> tuple[Float[Tensor, "samples seq"], Float[Tensor, "samples seq"]]:
    """Compute advantages A and returns R by generalized advantage estimation (arXiv:1506.02438, eq. 16), fp64.

    δ_t = r_t + γ·V_{t+1} − V_t, A_t = δ_t + γλ·A_{t+1}, R_t = A_t + V_t. t runs over a sample's response tokens in
    their order; tokens between responses are skipped. V and A are 0 after the last token, where the episode ends, even
    if the response was truncated.

    Args:
        token_rewards: reward of each token.
        values: value of the state in which each token is chosen.
        token_mask: 1 for the tokens of responses; the rewards and values of other tokens are not read.

    Returns:
        Advantages and returns; 0 outside of responses.
    """
    own = token_mask > 0
    rewards, values = (torch.where(own, x.double(), 0) for x in (token_rewards, values))
    advantages = torch.zeros_like(values)
    next_value, next_advantage = values.new_zeros(2, len(values))
    for t in range(values.shape[1] - 1, -1, -1):
        found = rewards[:, t] + gamma * next_value - values[:, t] + gamma * gae_lambda * next_advantage
        advantages[:, t] = torch.where(own[:, t], found, 0)
        next_value = torch.where(own[:, t], values[:, t], next_value)
        next_advantage = torch.where(own[:, t], found, next_advantage)
    return advantages, advantages + values


def whiten(
    values: Float[Tensor, "own seq"],
    mask: Float[Tensor, "own seq"],
    epsilon: float = 1e-4,
    share: BatchShare | None = None,
) -> Float[Tensor, "own seq"]:
    """Compute (x − mean) / (standard deviation + ε) of the values x where `mask` is 1, fp64.

    The result is 0 where `mask` is 0, and everywhere if all values are equal.

    Args:
        share: the samples whose rows `values` and `mask` contain; None for all samples of the batch. If `share` is
            given, the call is collective, and the mean and the standard deviation are over all samples of the batch.
    """
    share = share or BatchShare.whole(len(values))
    mask = mask.double()
    values = torch.where(mask > 0, values.double(), 0)
    total, count = share.sum(float((values * mask).sum()), float(mask.sum()))
    low, high = share.min_max(values[mask > 0])
    mean, count = total / max(count, 1), max(count, 1)
    (squares,) = share.sum(float(((values - mean).square() * mask).sum()))
    if high <= low:
        return torch.zeros_like(values)
    return (values - mean) * mask / (math.sqrt(squares / count) + epsilon)


@dataclass(frozen=True)
class EstimatorInputs:
    """Inputs of some advantage estimators, in addition to the rewards of the samples.

    named_rewards: [N, P, G], N named rewards of each sample, for gdpo; NaN where a reward does not apply.
    reward_weights: [N], weights of the named rewards, for gdpo.
    token_rewards, score_norms: [B, S] each, for optimal_token_baseline. They have rows only for the samples in the
        argument `share` of `advantages_of`.
    """

    named_rewards: Tensor | None = None
    reward_weights: Tensor | None = None
    token_rewards: Tensor | None = None
    score_norms: Tensor | None = None


def advantages_of(
    config: GRPOAlgorithmConfig,
    rewards: Float[Tensor, "prompts group"],
    token_mask: Float[Tensor, "own seq"],
    penalty: Float[Tensor, "own seq"] | None = None,
    share: BatchShare | None = None,
    judged: Bool[Tensor, "prompts group"] | None = None,
    more: EstimatorInputs = EstimatorInputs(),
) -> Float[Tensor, "own seq"]:
    """Compute the advantage of each token by the configured estimator.

    Args:
        rewards: rewards of all samples.
        share: the samples for which advantages are computed; by default, all samples. `token_mask`, `penalty` and the
            tensors [B, S] in `more` have only these samples. If `share` is given, the call is collective.
        judged: see `group_advantages`.
    """
    name, epsilon = config.advantage_estimator, config.advantage_epsilon
    if name == "reinforce_plus_plus":
        return reinforce_plus_plus_advantages(
            rewards, token_mask, penalty, config.minus_baseline, epsilon, share, judged
        )
    if name == "optimal_token_baseline":
        assert more.token_rewards is not None
        assert more.score_norms is not None
        groups, size = rewards.shape
        group_of = _select_rows(torch.arange(groups)[:, None].expand(-1, size), share)[:, 0]
        mask = token_mask if judged is None else token_mask * _select_rows(judged, share)
        return optimal_token_baseline_advantages(more.token_rewards, more.score_norms, mask, group_of, groups, share)
    if name == "gdpo":
        assert more.named_rewards is not None
        assert more.reward_weights is not None
        advantages = gdpo_advantages(more.named_rewards, more.reward_weights, epsilon, judged)
    elif name == "maxrl":
        advantages = maxrl_advantages(rewards, epsilon, judged)
    else:
        leave_one_out, normalize = config.baseline_and_scale
        population = config.advantage_deviation == "population"
        advantages = group_advantages(rewards, leave_one_out, normalize, population, epsilon, judged)
    return _select_rows(advantages, share).expand(token_mask.shape).contiguous()


def _select_rows(of_samples: Shaped[Tensor, "prompts group"], share: BatchShare | None) -> Shaped[Tensor, "own 1"]:
    """Return the values `of_samples` as a column [B, 1], only for the samples in `share` if it is given."""
    column = of_samples.reshape(-1, 1)
    return column if share is None else share.select(column)


def _result_type(rewards: Tensor) -> torch.dtype:
    return torch.float64 if rewards.dtype == torch.float64 else torch.float32
