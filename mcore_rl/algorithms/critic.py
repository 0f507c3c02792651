"""PPO's critic: a model of values, and the advantages that follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_rl.algorithms.advantages import gae_advantages, token_rewards_with_penalty, whiten
from mcore_rl.config import PPOConfig
from mcore_rl.config.algorithms import CRITIC, critic_config
from mcore_rl.data.images import IMAGES
from mcore_rl.distributed.batched_data_dict import BatchShare, LocalBatch
from mcore_rl.losses.common import over_updates, reductions_of
from mcore_rl.losses.policy_gradient import ValueLossFn
from mcore_rl.models.policy.megatron_policy import MegatronPolicy
from mcore_rl.rollouts.samples import RolloutSummary
from mcore_rl.run.setup import warn_about_optimizer
from mcore_rl.utils.console import PrintLine

COLUMNS = ("input_ids", "input_lengths", "token_mask", "sample_mask", IMAGES, "values", "returns")
"""Columns of a batch that the critic reads. The routed experts of the policy, for example, are not among them."""


class Critic:
    """PPO's critic: a model that predicts values, with its optimizer. Every method is collective.

    Args:
        total_updates: number of optimizer steps of the whole run.
    """

    def __init__(self, config: PPOConfig, total_updates: int) -> None:
        self.config = config
        self.model = MegatronPolicy(critic_config(config), total_updates)
        self.loss_fn = ValueLossFn(config.critic.value_clip)
        self._flops = 0.0
        if config.critic.offload:
            self.model.offload_after_refit()

    def values(self, data: LocalBatch[Any]) -> Tensor:
        """Return a value [B, S] for each token of this replica's rows: the value of the state before the token.

        Raises:
            TrainingError: a token has no embedding in the critic.
        """
        self.model.check_tokens(data, CRITIC)
        with self.model.on_device():
            values: Tensor = self.model.get_values(_read(data))["values"]
        return values

    def add_advantages(
        self,
        rows: LocalBatch[Any],
        of_rollouts: BatchShare,
        rewards: Tensor,
        outcomes: Sequence[RolloutSummary],
        penalty: Tensor | None,
    ) -> dict[str, float]:
        """Add `values`, `returns` and `advantages` [B, S] to this replica's `rows`; return metrics of the values.

        Args:
            of_rollouts: the samples of `rows`.
            rewards: [P, G], the shaped rewards of all samples.
            outcomes: summaries of all samples.
            penalty: [B, S], subtracted from the rewards of the tokens of `rows` (nats).
        """
        ppo, mask = self.config.ppo, rows["token_mask"] * rows["sample_mask"][:, None]
        values = self.values(rows)
        shaping = rewards.flatten() - torch.tensor([outcome.reward for outcome in outcomes])
        earned = token_rewards_with_penalty(rows, of_rollouts.select(shaping), penalty)
        del rows["token_rewards"]
        advantages, returns = gae_advantages(earned, values, mask, ppo.gamma, ppo.gae_lambda)
        if ppo.whiten_advantages:
            advantages = whiten(advantages, mask, ppo.advantage_epsilon, rows.share)
        rows["values"], rows["returns"], rows["advantages"] = values, returns.float(), advantages.float()
        return value_metrics(rows["values"], rows["returns"], mask, rows.share)

    def update(self, minibatches: Sequence[LocalBatch[Any]], passes: int, of_all: int) -> dict[str, float]:
        """Make `passes` passes over the minibatches, with an optimizer step on each minibatch.

        Args:
            of_all: number of steps by which the learning-rate schedule advances. It is larger than the number of
                optimizer steps if minibatches without tokens were left out.

        Returns:
            The metrics of the critic's updates (see `over_updates`).

        Raises:
            FloatingPointError: loss or gradient norm is not finite. Raised on every rank; the weights are unchanged.
        """
        with self.model.on_device():
            try:
                steps = [
                    self.model.train_batch(_read(minibatch), self.loss_fn)
                    for _ in range(passes)
                    for minibatch in minibatches
                ]
            except FloatingPointError as error:
                raise FloatingPointError(f"critic: {error}") from None
        self._flops += passes * sum(self.model.flops_of(minibatch) for minibatch in minibatches)
        if left_out := of_all - len(steps):
            self.model.advance_schedule(left_out)
        trained = over_updates(steps, reductions_of(self.loss_fn))
        trained.pop("num_valid_samples")
        return {_critics_name(name): value for name, value in trained.items()}

    def take_flops(self) -> float:
        """Return the number of floating-point operations of all updates since the last call of this method."""
        flops, self._flops = self._flops, 0.0
        return flops

    def introduce(self, updates: int, say: PrintLine) -> None:
        """Print a description of the critic, and a warning if its optimizer does not fit a run of `updates` updates."""
        say(f"critic: {self.model.describe()}")
        warn_about_optimizer("critic.optimizer", self.config.critic.optimizer, updates, say)

    def export_hf(self, destination: Path) -> None:
        """Write the critic as a Hugging Face sequence classifier with one label."""
        with self.model.on_device():
            self.model.export_hf(destination)


def _critics_name(name: str) -> str:
    """Return the name of a critic's metric beside the policy's metrics."""
    if name == "loss" or name.startswith("loss/"):
        return f"value_{name}"
    return name if name == "value_clip_fraction" else f"critic_{name}"


def _read(data: LocalBatch[Any]) -> LocalBatch[Any]:
    return data.with_entries({name: data[name] for name in COLUMNS if name in data})


def value_metrics(values: Tensor, returns: Tensor, mask: Tensor, share: BatchShare | None = None) -> dict[str, float]:
    """Return metrics over the tokens in `mask` [B, S]: means, and the explained variance 1 − Var(R − V) / Var(R).

    The explained variance is omitted if all returns R are equal.

    Args:
        share: the samples whose rows the arguments contain; None for all samples of the batch. If `share` is given, the
            call is collective, and the metrics are over the whole batch.
    """
    share = share or BatchShare.whole(len(values))
    v, r = (x[mask > 0].double() for x in (values, returns))
    count, of_values, of_returns = share.sum(len(v), float(v.sum()), float(r.sum()))
    found = {"values_mean": of_values / count, "returns_mean": of_returns / count}
    spreads = (float((x - mean).square().sum()) for x, mean in (
        (r, found["returns_mean"]), (r - v, found["returns_mean"] - found["values_mean"]))
    )  # fmt: skip
    variance, unexplained = (total / count for total in share.sum(*spreads))
    found["returns_std"] = variance**0.5
    low, high = share.min_max(r)
    if high > low:
        found["explained_variance"] = 1 - unexplained / variance
    return found
