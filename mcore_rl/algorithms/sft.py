"""Supervised fine-tuning."""

from __future__ import annotations

from pathlib import Path

from mcore_rl import platform
from mcore_rl.algorithms.build_loss import build_loss
from mcore_rl.algorithms.supervised import Objective, SupervisedTrainer
from mcore_rl.config import SFTConfig
from mcore_rl.models.policy.megatron_policy import MegatronPolicy
from mcore_rl.run.setup import claim_output_dir, load_inputs


def train_sft(config: SFTConfig) -> Path | None:
    """Minimise the mean negative log-likelihood of the response tokens, or the loss that `sft.loss` names."""
    config = platform.resolve(config)
    inputs = claim_output_dir(config, load_inputs(config))
    policy = MegatronPolicy(config, config.total_steps(len(inputs.train)))
    exported = SupervisedTrainer(config, inputs, policy, Objective(build_loss(config))).run()
    policy.shutdown()
    return exported
