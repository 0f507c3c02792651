"""Proximal policy optimization: GRPO's step with a critic, whose values turn rewards into advantages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_rl.algorithms.advantages import gae_advantages, whiten
from mcore_rl.algorithms.grpo import GRPOTrainer, build_policy, prepare, rollout_worker
from mcore_rl.config import PPOConfig
from mcore_rl.config.algorithms import CRITIC, critic_config
from mcore_rl.distributed.batched_data_dict import BatchShare, LocalBatch
from mcore_rl.losses.common import over_steps, reductions_of
from mcore_rl.losses.policy_gradient import ValueLossFn
from mcore_rl.models.policy.megatron_policy import MegatronPolicy
from mcore_rl.rollouts.samples import RolloutSummary, last_response_tokens
from mcore_rl.run.metrics import JsonLinesLog
from mcore_rl.run.setup import warn_about_optimizer
from mcore_rl.utils.console import PrintLine

COLUMNS = ("input_ids", "input_lengths", "token_mask", "sample_mask", "values", "returns")
"""What it reads of a batch: not, for example, the experts that the policy's tokens went to."""


class Critic:
    """Every method is collective.

    Args:
        total_updates: optimizer steps of the whole run.
    """

    def __init__(self, config: PPOConfig, total_updates: int) -> None:
        self.config = config
        self.model = MegatronPolicy(critic_config(config), total_updates)
        self.loss_fn = ValueLossFn(config.critic.value_clip)
        self._flops = 0.0
        if config.critic.offload:
            self.model.offload_after_refit()

    def values(self, data: LocalBatch[Any]) -> Tensor:
        """[B, S] of the state that each token of a replica's own rows is chosen in.

        Raises:
            TrainingError: a token has no embedding here.
        """
        self.model.check_tokens(data, CRITIC)
        with self.model.on_device():
            values: Tensor = self.model.get_values(_read(data))["values"]
        return values

    def add_advantages(
        self, rows: LocalBatch[Any], rewards: Tensor, outcomes: Sequence[RolloutSummary], penalty: Tensor | None
    ) -> dict[str, float]:
        """Add `values`, `returns` and `advantages` [B, S] to a replica's own rows; returns metrics of the values.

        Args:
            rewards: [P, G] of all samples, as shaped.
            outcomes: of all samples.
            penalty: [B, S] to be subtracted from each own token's reward (nats).
        """
        ppo, mask = self.config.ppo, rows["token_mask"] * rows["sample_mask"][:, None]
        values = self.values(rows)
        shaping = rewards.flatten() - torch.tensor([outcome.reward for outcome in outcomes])
        earned = token_rewards_with_penalty(rows, rows.share.select(shaping), penalty)
        del rows["token_rewards"]
        advantages, returns = gae_advantages(earned, values, mask, ppo.gamma, ppo.gae_lambda)
        if ppo.whiten_advantages:
            advantages = whiten(advantages, mask, ppo.advantage_epsilon, rows.share)
        rows["values"], rows["returns"], rows["advantages"] = values, returns.float(), advantages.float()
        return value_metrics(rows["values"], rows["returns"], mask, rows.share)

    def update(self, minibatches: Sequence[LocalBatch[Any]], passes: int, of_all: int) -> dict[str, float]:
        """Make an optimizer step on each minibatch, in so many passes.

        Args:
            of_all: optimizer steps that the schedule counts for this step; minibatches without tokens were left out.

        Returns:
            The last step's metrics; with several minibatches, means over the steps.

        Raises:
            FloatingPointError: loss or gradient norm is not finite, on every rank; weights are as before.
        """
        with self.model.on_device():
            try:
                steps = [
                    self.model.train(_read(minibatch), self.loss_fn) for _ in range(passes) for minibatch in minibatches
                ]
            except FloatingPointError as error:
                raise FloatingPointError(f"critic: {error}") from None
        self._flops += passes * sum(self.model.flops_of(minibatch) for minibatch in minibatches)
        if left_out := of_all - len(steps):
            self.model.advance_schedule(left_out)
        for step in steps:
            step.pop("all_mb_metrics")
        trained = steps[-1] if len(minibatches) == 1 else over_steps(steps, reductions_of(self.loss_fn))
        of_loss = {"value_loss": trained.pop("loss"), "value_clip_fraction": trained.pop("value_clip_fraction")}
        trained.pop("num_valid_samples")
        return of_loss | {f"critic_{name}": value for name, value in trained.items()}

    def take_flops(self) -> float:
        """Return the operations of the updates since the last call."""
        flops, self._flops = self._flops, 0.0
        return flops

    def introduce(self, updates: int, say: PrintLine) -> None:
        """Say which model the critic is; warn about an optimizer that does not fit so many updates."""
        say(f"critic: {self.model.describe()}")
        warn_about_optimizer("critic.optimizer", self.config.critic.optimizer, updates, say)

    def export_hf(self, destination: Path) -> None:
        """Write the critic as a Hugging Face sequence classifier of one label."""
        with self.model.on_device():
            self.model.export_hf(destination)


def _read(data: LocalBatch[Any]) -> LocalBatch[Any]:
    return data.with_entries({name: data[name] for name in COLUMNS if name in data})


def token_rewards_with_penalty(data: Mapping[str, Tensor], beyond: Tensor, penalty: Tensor | None) -> Tensor:
    """[B, S] what each token earns: its own of `token_rewards`, and the last response token what is beyond.

    Args:
        beyond: [B] what shaping has added to each reward.
        penalty: [B, S] to be subtracted (nats).
    """
    earned = data["token_rewards"].clone()
    earned[torch.arange(len(earned)), last_response_tokens(data)] += beyond
    return earned if penalty is None else earned - penalty


def value_metrics(values: Tensor, returns: Tensor, mask: Tensor, share: BatchShare | None = None) -> dict[str, float]:
    """Means over the tokens that the mask [B, S] counts, and the explained variance 1 − Var(R − V) / Var(R).

    The last is left out where returns do not differ.

    Args:
        share: of which the rows are; the means are over all of them. Collective. All, if left out.
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
    inputs, recorded = prepare(config, record, replay)
    policy = build_policy(config, inputs)
    with rollout_worker(config, inputs, policy) as worker:
        critic = Critic(config, config.total_steps(len(inputs.train)) * config.updates_per_step)
        policy.checkpoint.include("critic", critic.model)
        recording = JsonLinesLog(record) if record else None
        exported = GRPOTrainer(config, inputs, policy, worker, critic, recording, recorded).run()
        critic.model.shutdown()
    policy.shutdown()
    return exported
