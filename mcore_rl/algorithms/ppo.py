"""Proximal policy optimization: the training step of GRPO, but with advantages from a critic's values."""

from __future__ import annotations

from pathlib import Path

from mcore_rl import platform
from mcore_rl.algorithms.critic import Critic
from mcore_rl.algorithms.grpo import GRPOTrainer, build_policy, prepare, rollout_worker
from mcore_rl.config import PPOConfig
from mcore_rl.run.metrics import JsonLinesLog


def train_ppo(config: PPOConfig, record: Path | None = None, replay: Path | None = None) -> Path | None:
    """Train the policy to raise the rewards of its responses, relative to the values of a critic.

    Args:
        record: file to record every step's rollouts in.
        replay: recorded file to train from instead of generating.

    Returns:
        The directory of the exported policy; None if no model is exported.

    Raises:
        UserError: the configuration, the data or one of the files is not usable.
    """
    config = platform.resolve(config)
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
