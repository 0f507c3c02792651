"""Proximal policy optimization: GRPO's loop, with a critic whose values turn rewards into advantages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mcore_rl.algorithms.advantages import gae_advantages, whitened
from mcore_rl.algorithms.critic import Critic, earned_by_tokens, value_metrics
from mcore_rl.algorithms.grpo import GRPORun
from mcore_rl.algorithms.rl import train_on_rollouts
from mcore_rl.config import PPOConfig
from mcore_rl.distributed.batched_data_dict import BatchedDataDict, OwnRows
from mcore_rl.rollouts.outcomes import Outcome
from mcore_rl.rollouts.samples import Rollout, rewards_of_tokens
from mcore_rl.rollouts.token_rows import TokenColumn
from mcore_rl.run.directory import RunDirectory
from mcore_rl.run.setup import tell_of_optimizer


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
