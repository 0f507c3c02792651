"""Supervised fine-tuning."""

from __future__ import annotations

from pathlib import Path

from mcore_rl.algorithms.inputs import claim_output, load_inputs, total_steps
from mcore_rl.algorithms.objectives import loss_of
from mcore_rl.algorithms.supervised import SupervisedRun
from mcore_rl.config import SFTConfig
from mcore_rl.data.records import load_sft_dataset
from mcore_rl.models.policy.megatron_policy import MegatronPolicy


def train_sft(config: SFTConfig) -> Path | None:
    """Minimise the mean negative log-likelihood of the response tokens."""
    inputs = claim_output(config, load_inputs(config, load_sft_dataset, rows_per_unit=1))
    policy = MegatronPolicy(config, total_steps(config.trainer, len(inputs.train), config.batch.global_batch_size))
    exported = SupervisedRun(config, inputs, policy, loss_of(config)).run()
    policy.shutdown()
    return exported
