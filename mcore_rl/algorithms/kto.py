"""Kahneman–Tversky optimization (arXiv:2402.01306): unpaired responses, each desirable or undesirable."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from mcore_rl import platform
from mcore_rl.algorithms.dpo import FIRST_REWARD_TOLERANCE
from mcore_rl.algorithms.supervised import Columns, Objective, SupervisedTrainer, TrainingBatch
from mcore_rl.config import KTOConfig
from mcore_rl.data.batching import collate, global_valid_counts
from mcore_rl.data.datasets import UnpairedDataset
from mcore_rl.distributed.batched_data_dict import LocalBatch
from mcore_rl.errors import TrainingError
from mcore_rl.losses.preference import KTOLossFn, kto_reference_point
from mcore_rl.models.policy.megatron_policy import MegatronPolicy
from mcore_rl.run.setup import claim_output_dir, load_inputs


def train_kto(config: KTOConfig) -> Path | None:
    """Make desirable responses more likely and undesirable ones less likely, relative to the reference."""
    config = platform.resolve(config)
    inputs = claim_output_dir(config, load_inputs(config))
    policy = MegatronPolicy(config, config.total_steps(len(inputs.train)), keep_reference=config.keeps_reference)
    objective = KTOObjective(config, policy, inputs.tokenizer.pad_token_id)
    exported = SupervisedTrainer(config, inputs, policy, objective).run()
    policy.shutdown()
    return exported


class KTOObjective(Objective):
    """The KTO loss, and its columns, such as the reference's log-probabilities and the reference point z₀.

    z₀ is computed from rows that combine each prompt with the response of another record.
    """

    def __init__(self, config: KTOConfig, policy: MegatronPolicy, pad_token_id: int) -> None:
        super().__init__(KTOLossFn(config.kto))
        self.config, self.policy, self.pad_token_id = config, policy, pad_token_id

    def frozen_columns(self, batch: TrainingBatch) -> Columns:
        dataset = cast("UnpairedDataset", batch.dataset)
        columns = {
            "desirable": torch.tensor([dataset.is_desirable(i) for i in batch.indices], dtype=torch.bool),
            "reference_policy_logprobs": self._by_reference(batch.rows).roll(-1, dims=1),  # column t scores token t + 1
        }
        if self.config.kto.needs_reference_point:
            other = self._mismatched(batch)
            columns["mismatched_reference"] = _sums(self._by_reference(other), other)
        return columns

    def current_columns(self, batch: TrainingBatch) -> Columns:
        if not self.config.kto.needs_reference_point:
            return {}
        other, share = self._mismatched(batch), batch.rows.share
        sums = _sums(self.policy.get_logprobs(other)["logprobs"], other)
        of_all = (share.gather(values).float() for values in (sums, batch.rows["mismatched_reference"]))
        return {"kl_reference_point": kto_reference_point(*of_all).expand(batch.rows.size).clone()}

    def check_first_step(self, batch: TrainingBatch, metrics: Mapping[str, float]) -> None:
        if self.config.model.begins_with_dropout:
            return
        reward = max(abs(metrics[f"rewards_{kind}_sum"]) for kind in ("desirable", "undesirable"))
        _, tokens = map(float, global_valid_counts(batch.rows))
        if reward > FIRST_REWARD_TOLERANCE[self.config.model.dtype] * tokens:
            raise TrainingError(
                "step 1: before any update the policy must equal the reference, so all rewards must be 0. They "
                f"add up to {reward:.3g} nats over {tokens:.0f} tokens"
            )

    def _mismatched(self, batch: TrainingBatch) -> LocalBatch[Any]:
        """Return a row for each record of the batch: the record's prompt with the response of another record."""
        dataset, limit = cast("UnpairedDataset", batch.dataset), self.config.data.max_sequence_length
        others = batch.previous if self.config.kto.mismatched == "batch" else [None] * len(batch.indices)
        units = [(dataset.mismatched(i, j).truncate(limit),) for i, j in zip(batch.indices, others, strict=True)]
        return LocalBatch(collate(units, self.pad_token_id), batch.rows.share)

    def _by_reference(self, rows: LocalBatch[Any]) -> Tensor:
        logprobs: Tensor = self.policy.get_reference_policy_logprobs(rows)["reference_logprobs"]
        return logprobs


def _sums(logprobs: Tensor, data: LocalBatch[Any]) -> Tensor:
    """Return the sum of log-probabilities of each row's response, [B]; column t of `logprobs` scores token t."""
    return (logprobs * data["token_mask"])[:, 1:].sum(1)
