"""Kahneman–Tversky optimization: rows that are desirable or not, no pairs (arXiv:2402.01306)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.losses.common import (
    Configured,
    LogprobLoss,
    masked_mean,
    masked_sum,
    require_count,
    require_shape,
    sample_mask_of,
    token_mask_of,
)
from mcore_rl.losses.interfaces import LossType
from mcore_rl.losses.options import KTOOptions, typed_dict

if TYPE_CHECKING:
    KTOLossConfig = Mapping[str, Any]
else:
    KTOLossConfig = typed_dict("KTOLossConfig", KTOOptions)


class KTOLossDataDict(TypedDict):
    """`desirable` [B] (bool) and `kl_reference_point` [B] (z₀, see `kto_reference_point`).

    Column t of `reference_policy_logprobs` [B, S] scores token t + 1, as for DPO.
    """

    input_ids: Tensor
    token_mask: Tensor
    sample_mask: Tensor
    reference_policy_logprobs: Tensor
    desirable: Tensor
    kl_reference_point: Tensor


def kto_reference_point(
    sequence_logprobs: Float[Tensor, " sequences"], reference_sequence_logprobs: Float[Tensor, " sequences"]
) -> Float[Tensor, ""]:
    """z₀ = max(0, mean(log π − log π_ref)) over mismatched prompts and completions; no gradient.

    One number for the whole global batch: hand it whole-batch sums [n], then expand it to every row.
    """
    return (sequence_logprobs.detach() - reference_sequence_logprobs).mean().clamp(min=0)


class KTOLossFn(Configured, LogprobLoss):
    """λ_D·(1 − σ(β(r − z₀))) for desirable rows, λ_U·(1 − σ(β(z₀ − r))) for the others.

    r = Σ (logprob − reference logprob); averaged over the sequences of the global batch.
    """

    reads_counted_tokens_only = True
    loss_type = LossType.SEQUENCE_LEVEL
    required_keys = tuple(KTOLossDataDict.__annotations__)

    options: KTOOptions

    def __init__(self, cfg: KTOLossConfig | KTOOptions) -> None:
        self.configure(KTOOptions.from_config(cfg, type(self).__name__))

    def from_logprobs(
        self,
        next_token_logprobs: Float[Tensor, "batch predicted"],
        data: BatchedDataDict[Any],
        global_valid_seqs: Tensor | None,
        global_valid_toks: Tensor | None = None,
        entropy: Tensor | None = None,
    ) -> tuple[Float[Tensor, ""], dict[str, Any]]:
        self.check(next_token_logprobs, data)
        seqs = require_count("global_valid_seqs", global_valid_seqs, self)
        reference = data["reference_policy_logprobs"]
        require_shape("reference_policy_logprobs", reference, tuple(data["token_mask"].shape), self)
        sample_mask = sample_mask_of(data, next_token_logprobs)
        rewards = masked_sum(
            next_token_logprobs - reference[:, :-1].to(next_token_logprobs),
            token_mask_of(data, next_token_logprobs),
            dim=-1,
        )
        desirable = data["desirable"].bool()
        options = self.options
        margin = options.reference_policy_kl_penalty * (rewards - data["kl_reference_point"].to(rewards))
        value = torch.where(
            desirable,
            options.desirable_weight * torch.sigmoid(-margin),
            options.undesirable_weight * torch.sigmoid(margin),
        )
        loss = masked_mean(value, sample_mask, global_normalization_factor=seqs)
        desirable_mask = sample_mask * desirable
        undesirable_mask = sample_mask - desirable_mask
        return loss, {
            "loss": loss.detach(),
            "rewards_desirable_sum": masked_sum(rewards.detach(), desirable_mask),
            "kl_reference_point": masked_mean(
                data["kl_reference_point"].to(rewards), sample_mask, global_normalization_factor=seqs
            ),
            "rewards_undesirable_sum": masked_sum(rewards.detach(), undesirable_mask),
            "num_desirable_samples": desirable_mask.sum(),
            "num_valid_samples": sample_mask.sum(),
        }
