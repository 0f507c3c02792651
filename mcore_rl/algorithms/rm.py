"""Reward models, trained on pairs of responses (Bradley–Terry)."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch

from mcore_rl import platform
from mcore_rl.algorithms.supervised import Columns, Objective, SupervisedTrainer, TrainingBatch
from mcore_rl.config import RMConfig
from mcore_rl.data.datasets import RewardDataset
from mcore_rl.losses.preference import BradleyTerryLoss
from mcore_rl.models.policy.megatron_policy import MegatronPolicy
from mcore_rl.run.setup import claim_output_dir, load_inputs


def train_rm(config: RMConfig) -> Path | None:
    """Train a model to give the chosen response of each pair a higher reward than the rejected one.

    Rewards are read at the last token that is not the tokenizer's pad token, in training and in the exported model.
    """
    config = platform.resolve(config)
    inputs = claim_output_dir(config, load_inputs(config))
    policy = MegatronPolicy(config, config.total_steps(len(inputs.train)), rows_per_unit=2)
    policy.model.family.set_score_padding(inputs.tokenizer.pad_token_id)
    objective = RewardObjective(BradleyTerryLoss(config.reward.center_rewards_coefficient))
    exported = SupervisedTrainer(config, inputs, policy, objective).run()
    policy.shutdown()
    return exported


class RewardObjective(Objective):
    """The Bradley–Terry loss, and the margins of the records if they have any."""

    def frozen_columns(self, batch: TrainingBatch) -> Columns:
        dataset = cast("RewardDataset", batch.dataset)
        if not dataset.has_margins:
            return {}
        margins = torch.tensor([dataset.margin(i) for i in batch.indices], dtype=torch.float32)
        return {"margin": margins.repeat_interleave(2)}
