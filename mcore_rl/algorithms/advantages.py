"""Advantages from the rewards of a step's groups (P prompts, G responses each) and, with a critic, from values.

Everything is computed in fp64, and equal rewards give exactly 0. In floating point, r − mean may differ from 0 for
equal rewards such as 0.7; the division by an equally small deviation, and then Adam, would amplify this to a full step.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from mcore_rl.config import GRPOAlgorithmConfig
from mcore_rl.distributed.batched_data_dict import BatchShare
from mcore_rl.rollouts.samples import differ, has_signal


def group_advantages(
    rewards: Float[Tensor, "prompts group"],
    leave_one_out: bool = False,
    normalize: bool = True,
    population: bool = False,
    epsilon: float = 1e-4,
    judged: Bool[Tensor, "prompts group"] | None = None,
) -> Float[Tensor, "prompts group"]:
    """Compute (r − baseline) / (deviation + ε), fp32 (fp64 for fp64 rewards).

    The defaults are GRPO (arXiv:2402.03300, section 4.1.2). Without `normalize` it is Dr.GRPO (arXiv:2503.20783): easy
    and hard prompts have the same weight. With `leave_one_out` and without `normalize` it is RLOO (arXiv:2402.14740).

    Args:
        leave_one_out: compute baseline and deviation of each response from the other responses of its group.
        population: divide by n in the deviation, not by n − 1.
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
        # If the other rewards of a group are all equal, their deviation is 0; the advantage is then not divided.
        sharpens = differ(r[:, None], counted)
        advantages = torch.where(sharpens, advantages / (variance.sqrt() + epsilon), advantages)
    return advantages.to(_result_type(rewards))


def reinforce_plus_plus_advantages(
    rewards: Float[Tensor, "prompts group"],
    token_mask: Float[Tensor, "own seq"],
    penalty: Float[Tensor, "own seq"] | None = None,
    minus_baseline: bool = False,
    epsilon: float = 1e-4,
    share: BatchShare | None = None,
    judged: Bool[Tensor, "prompts group"] | None = None,
) -> Float[Tensor, "own seq"]:
    """Compute REINFORCE++ (arXiv:2501.03262): A_t = r − Σ_{i ≥ t} penalty_i, normalised over all response tokens.

    Args:
        rewards: rewards of all samples.
        token_mask: 1 for the tokens of responses; the samples have the order of `rewards`.
        penalty: β·KL of each token (nats), part of the reward of that token; None for no penalty.
        minus_baseline: first subtract the mean of each prompt's rewards (REINFORCE++-baseline).
        share: the samples in token_mask and penalty; by default, all samples. Collective.
        judged: see `group_advantages`.

    Returns:
        fp32 (fp64 for fp64 rewards), 0 outside of responses.
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
    """Compute advantages and returns by generalized advantage estimation (arXiv:1506.02438, eq. 16), fp64.

    t runs over a sample's response tokens in their order; tokens between responses are skipped:
    δ_t = r_t + γ·V_{t+1} − V_t, A_t = δ_t + γλ·A_{t+1}, R_t = A_t + V_t. V and A are 0 after the last token, even if
    the response was truncated: the token limit is part of the task.

    Args:
        token_rewards: reward of each token.
        values: value of the state in which each token is chosen.
        token_mask: 1 for the tokens of responses; entries of other tokens are not read.

    Returns:
        0 outside of responses.
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
    """Compute (x − mean) / (deviation + ε) over the masked values, fp64; 0 elsewhere, and if all values are equal.

    Args:
        share: the samples in `values`; mean and deviation are over all samples of the batch. By default, `values` has
            all samples. Collective.
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


def advantages_of(
    config: GRPOAlgorithmConfig,
    rewards: Float[Tensor, "prompts group"],
    token_mask: Float[Tensor, "own seq"],
    penalty: Float[Tensor, "own seq"] | None = None,
    share: BatchShare | None = None,
    judged: Bool[Tensor, "prompts group"] | None = None,
) -> Float[Tensor, "own seq"]:
    """Compute the advantage of each token of some samples, by the configured estimator.

    Args:
        rewards: rewards of all samples.
        share: the samples in token_mask and penalty; by default, all samples. Collective.
        judged: see `group_advantages`.
    """
    if config.advantage_estimator == "reinforce_plus_plus":
        return reinforce_plus_plus_advantages(
            rewards, token_mask, penalty, config.minus_baseline, config.advantage_epsilon, share, judged
        )
    leave_one_out, normalize = config.baseline_and_scale
    population = config.advantage_deviation == "population"
    advantages = group_advantages(rewards, leave_one_out, normalize, population, config.advantage_epsilon, judged)
    return _select_rows(advantages, share).expand(token_mask.shape).contiguous()


def _select_rows(of_samples: Shaped[Tensor, "prompts group"], share: BatchShare | None) -> Shaped[Tensor, "own 1"]:
    """Return the values of a share's samples as a column; those of all samples if `share` is None."""
    column = of_samples.reshape(-1, 1)
    return column if share is None else share.select(column)


def _result_type(rewards: Tensor) -> torch.dtype:
    return torch.float64 if rewards.dtype == torch.float64 else torch.float32
