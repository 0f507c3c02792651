"""Kahneman–Tversky optimization: responses that are desirable or not, no pairs (arXiv:2402.01306)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from mcore_rl.algorithms.build_loss import loss_of
from mcore_rl.algorithms.dpo import FIRST_MARGIN_TOLERANCE
from mcore_rl.algorithms.supervised import SupervisedRun
from mcore_rl.config import KTOConfig
from mcore_rl.data.batching import collate
from mcore_rl.data.datasets import Dataset, UnpairedDataset
from mcore_rl.distributed.batched_data_dict import OwnRows, Share
from mcore_rl.errors import TrainingError
from mcore_rl.losses.preference import kto_reference_point
from mcore_rl.models.policy.megatron_policy import MegatronPolicy
from mcore_rl.run.setup import Inputs, claim_output, load_inputs


def train_kto(config: KTOConfig) -> Path | None:
    """Make desirable responses likelier, undesirable ones less likely, relative to the reference."""
    inputs = claim_output(config, load_inputs(config))
    policy = MegatronPolicy(config, config.total_steps(len(inputs.train)), keep_reference=config.keeps_reference)

    made: dict[str, OwnRows[Any]] = {}

    def mismatched(dataset: UnpairedDataset, indices: Sequence[int], share: Share) -> OwnRows[Any]:
        """Each record's prompt with another's response; those of the latest rows are kept."""
        if "latest" not in made or made["latest"].share is not share:
            limit, pad = config.data.max_sequence_length, inputs.tokenizer.pad_token_id
            rows = collate([(dataset.mismatched(i).truncate(limit),) for i in indices], pad)
            made["latest"] = OwnRows(rows, share)
        return made["latest"]

    def add_reference(data: OwnRows[Any], dataset: UnpairedDataset, indices: Sequence[int]) -> None:
        data["desirable"] = torch.tensor([dataset.is_desirable(i) for i in indices], dtype=torch.bool)
        reference = policy.get_reference_policy_logprobs(data)["reference_logprobs"]
        data["reference_policy_logprobs"] = reference.roll(-1, dims=1)  # column t scores token t + 1
        other = mismatched(dataset, indices, data.share)
        data["mismatched_reference"] = _sums(policy.get_reference_policy_logprobs(other)["reference_logprobs"], other)

    def add_reference_point(data: OwnRows[Any], dataset: UnpairedDataset, indices: Sequence[int]) -> None:
        other = mismatched(dataset, indices, data.share)
        sums = _sums(policy.get_logprobs(other)["logprobs"], other)
        of_all = (data.share.everyone(values).float() for values in (sums, data["mismatched_reference"]))
        data["kl_reference_point"] = kto_reference_point(*of_all).expand(data.size).clone()

    def check_rewards(metrics: dict[str, Any], data: OwnRows[Any]) -> None:
        if config.model.begins_with_dropout:
            return
        reward = max(abs(metrics[f"rewards_{kind}_sum"]) for kind in ("desirable", "undesirable"))
        (tokens,) = data.share.sum(float(data["token_mask"][:, 1:].sum()))
        if reward > FIRST_MARGIN_TOLERANCE[config.model.dtype] * tokens:
            raise TrainingError(
                f"step 1: before any update the policy must equal the reference, but rewards add up to {reward:.3g} "
                f"nats over {tokens:.0f} tokens"
            )

    run = SupervisedRun(
        config,
        cast("Inputs[Dataset]", inputs),
        policy,
        loss_of(config),
        add_reference,
        check_rewards,
        add_reference_point,
    )
    exported = run.run()
    policy.shutdown()
    return exported


def _sums(logprobs: Tensor, data: OwnRows[Any]) -> Tensor:
    """[B] log-probabilities of whole responses; column t of `logprobs` scores token t."""
    return (logprobs * data["token_mask"])[:, 1:].sum(1)
