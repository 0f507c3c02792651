"""Proximal policy optimization: GRPO's step with a critic, whose values turn rewards into advantages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_rl.algorithms.advantages import gae_advantages, whitened
from mcore_rl.algorithms.grpo import GRPORun, train_on_rollouts
from mcore_rl.config import PPOConfig
from mcore_rl.config.algorithms import CRITIC, config_of_critic
from mcore_rl.distributed.batched_data_dict import BatchedDataDict, OwnRows, Share
from mcore_rl.losses.common import over_steps, reductions_of
from mcore_rl.losses.policy_gradient import ValueLossFn
from mcore_rl.models.policy.megatron_policy import MegatronPolicy
from mcore_rl.rollouts.samples import Outcome, Rollout, TokenColumn, last_response_tokens, rewards_of_tokens
from mcore_rl.run.directory import RunDirectory
from mcore_rl.run.setup import tell_of_optimizer

COLUMNS = ("input_ids", "input_lengths", "token_mask", "sample_mask", "values", "returns")
"""What it reads of a batch: not, for example, the experts that the policy's tokens went to."""


class Critic:
    """Every method is collective.

    Args:
        total_updates: optimizer steps of the whole run.
    """

    def __init__(self, config: PPOConfig, total_updates: int) -> None:
        self.model = MegatronPolicy(config_of_critic(config), total_updates)
        self.loss_fn = ValueLossFn(config.critic.value_clip)
        self.flops = 0.0
        """Operations of the updates since this was last set to 0."""
        if config.critic.offload:
            self.model.offload_after_refit()

    def values(self, data: OwnRows[Any]) -> Tensor:
        """[B, S] of the state that each token of a replica's own rows is chosen in.

        Raises:
            TrainingError: a token has no embedding here.
        """
        self.model.check_tokens(data, CRITIC)
        with self.model.brought_back():
            values: Tensor = self.model.get_values(_read(data))["values"]
        return values

    def update(self, minibatches: Sequence[OwnRows[Any]], passes: int) -> dict[str, float]:
        """Make an optimizer step on each minibatch, in so many passes.

        Returns:
            The last step's metrics; with several minibatches, means over the steps.

        Raises:
            FloatingPointError: loss or gradient norm is not finite, on every rank; weights are as before.
        """
        with self.model.brought_back():
            try:
                steps = [
                    self.model.train(_read(minibatch), self.loss_fn) for _ in range(passes) for minibatch in minibatches
                ]
            except FloatingPointError as error:
                raise FloatingPointError(f"critic: {error}") from None
        self.flops += passes * sum(self.model.flops_of(minibatch) for minibatch in minibatches)
        for step in steps:
            step.pop("all_mb_metrics")
        trained = steps[-1] if len(minibatches) == 1 else over_steps(steps, reductions_of(self.loss_fn))
        of_loss = {"value_loss": trained.pop("loss"), "value_clip_fraction": trained.pop("value_clip_fraction")}
        trained.pop("num_valid_samples")
        return of_loss | {f"critic_{name}": value for name, value in trained.items()}

    def export_hf(self, destination: Path) -> None:
        """Write it as a Hugging Face sequence classifier of one label."""
        with self.model.brought_back():
            self.model.export_hf(destination)


def _read(data: OwnRows[Any]) -> OwnRows[Any]:
    return data.with_entries({name: data[name] for name in COLUMNS if name in data})


def earned_by_tokens(data: Mapping[str, Tensor], beyond: Tensor, penalty: Tensor | None) -> Tensor:
    """[B, S] what each token earns: its own of `token_rewards`, and the last response token what is beyond.

    Args:
        beyond: [B] what shaping has added to each reward.
        penalty: [B, S] to be subtracted (nats).
    """
    earned = data["token_rewards"].clone()
    earned[torch.arange(len(earned)), last_response_tokens(data)] += beyond
    return earned if penalty is None else earned - penalty


def value_metrics(values: Tensor, returns: Tensor, mask: Tensor, share: Share | None = None) -> dict[str, float]:
    """Means over the tokens that the mask [B, S] counts, and the explained variance 1 − Var(R − V) / Var(R).

    The last is left out where returns do not differ.

    Args:
        share: of which the rows are; the means are over all of them. Collective. All, if left out.
    """
    share = share or Share.whole(len(values))
    v, r = (x[mask > 0].double() for x in (values, returns))
    count, of_values, of_returns = share.sum(len(v), float(v.sum()), float(r.sum()))
    found = {"values_mean": of_values / count, "returns_mean": of_returns / count}
    spreads = (float((x - mean).square().sum()) for x, mean in (
        (r, found["returns_mean"]), (r - v, found["returns_mean"] - found["values_mean"]))
    )  # fmt: skip
    variance, unexplained = (total / count for total in share.sum(*spreads))
    found["returns_std"] = variance**0.5
    low, high = share.extent(r)
    if high > low:
        found["explained_variance"] = 1 - unexplained / variance
    return found


def train_ppo(config: PPOConfig, record: Path | None = None, replay: Path | None = None) -> Path | None:
    """Raise the rewards of the policy's own answers, compared with what a critic expects.

    Args:
        record: a file that keeps every step's rollouts.
        replay: such a file, to train from instead of generating.

    Returns:
        The directory of the exported policy; None without one.

    Raises:
        UserError: the configuration, the data or one of the files is not usable.
    """
    return train_on_rollouts(config, record, replay, PPORun)


@dataclass
class PPORun(GRPORun):
    """Values of a step's tokens, advantages by them, then updates of the critic and of the policy."""

    config: PPOConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        self.critic = Critic(self.config, self.total_steps * self.updates_per_step)
        self.policy.keep_beside("critic", self.critic.model)

    def run(self) -> Path | None:
        exported = super().run()
        self.critic.model.shutdown()
        return exported

    def _introduce(self, done: int, steps: int) -> None:
        super()._introduce(done, steps)
        self.say(f"critic: {self.critic.model.describe()}")
        tell_of_optimizer("critic.optimizer", self.config.critic.optimizer, steps * self.updates_per_step, self.say)

    def _columns(self) -> list[TokenColumn]:
        return [*super()._columns(), TokenColumn("token_rewards", torch.float32)]

    def _batch_of(self, rollouts: Sequence[Rollout]) -> BatchedDataDict[Any]:
        data = super()._batch_of(rollouts)
        data["token_rewards"] = rewards_of_tokens(rollouts, data)
        return data

    def _add_advantages(
        self,
        step: int,
        data: OwnRows[Any],
        outcomes: Sequence[Outcome],
        rewards: torch.Tensor,
        penalty: torch.Tensor | None,
    ) -> None:
        ppo, mask = self.config.ppo, data["token_mask"] * data["sample_mask"][:, None]
        with self._phase(step, "critic"):
            values = self.critic.values(data)
        beyond = rewards.flatten() - torch.tensor([outcome.reward for outcome in outcomes])
        earned = earned_by_tokens(data, data.share.select(beyond), penalty)
        del data["token_rewards"]
        advantages, returns = gae_advantages(earned, values, mask, ppo.gamma, ppo.gae_lambda)
        if ppo.whiten_advantages:
            advantages = whitened(advantages, mask, ppo.advantage_epsilon, data.share)
        data["values"], data["returns"], data["advantages"] = values, returns.float(), advantages.float()

    def _update(self, step: int, data: OwnRows[Any], minibatches: Sequence[OwnRows[Any]]) -> dict[str, Any]:
        counted = data["token_mask"] * data["sample_mask"][:, None]
        metrics = value_metrics(data["values"], data["returns"], counted, data.share)
        passes = self.config.ppo.num_updates_per_rollout
        with self._phase(step, "critic"):
            metrics |= self.critic.update(minibatches, passes)
        if left_out := self.updates_per_step - passes * len(minibatches):
            self.critic.model.advance_schedule(left_out)
        return metrics if step < self.config.first_update_step else metrics | super()._update(step, data, minibatches)

    def _pass_over(self, step: int) -> None:
        super()._pass_over(step)
        self.critic.model.advance_schedule(self.updates_per_step)

    def throughput(self, num_tokens: float, flops: float, seconds: float) -> dict[str, float]:
        of_critic, self.critic.flops = self.critic.flops, 0.0
        return super().throughput(num_tokens, flops + of_critic, seconds)

    def _export(self) -> Path | None:
        exported = super()._export()
        if self.config.critic.export_hf:
            directory = RunDirectory(self.config.output_dir)
            self.critic.export_hf(directory.critic)
            self.say(f"critic: {directory.critic}")
        return exported
