"""Negative log-likelihood: supervised fine-tuning, and DPO's auxiliary term."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor

from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.losses.common import (
    LogprobLoss,
    masked_mean,
    masked_sum,
    require_count,
    sample_mask_of,
    token_mask_of,
)
from mcore_rl.losses.interfaces import LossType


class NLLLoss(LogprobLoss):
    """−Σ logprob / global_valid_toks over the tokens that carry loss."""

    reads_counted_tokens_only = True
    loss_type = LossType.TOKEN_LEVEL

    def from_logprobs(
        self,
        next_token_logprobs: Float[Tensor, "batch predicted"],
        data: BatchedDataDict[Any],
        global_valid_seqs: Tensor | None,
        global_valid_toks: Tensor | None,
        entropy: Tensor | None = None,
        dpo_loss: bool = False,
        dpo_average_log_probs: bool = False,
    ) -> tuple[Float[Tensor, "*batch"], dict[str, Any]]:
        """The mean over tokens; with `dpo_loss`, per-sequence sums (or means) [B], 0 for masked samples."""
        self.check(next_token_logprobs, data)
        mask = token_mask_of(data, next_token_logprobs)
        if dpo_loss:
            loss = -masked_sum(next_token_logprobs, mask, dim=-1)
            if dpo_average_log_probs:
                loss = loss / mask.sum(-1).clamp(min=1)
        else:
            tokens = require_count("global_valid_toks", global_valid_toks, self)
            loss = masked_mean(-next_token_logprobs, mask, global_normalization_factor=tokens)
        return loss, {
            "loss": loss.detach(),
            "num_unmasked_tokens": mask.sum(),
            "num_valid_samples": sample_mask_of(data, mask).sum(),
        }
