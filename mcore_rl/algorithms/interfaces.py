"""What a loss function is to a policy."""

from __future__ import annotations

import enum
from typing import Any, Protocol, runtime_checkable

import torch

from mcore_rl.distributed.batched_data_dict import BatchedDataDict


class LossType(enum.Enum):
    """What a loss is normalised by: valid tokens or valid sequences of the global batch."""

    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


class LossFunction(Protocol):
    """A loss of one microbatch, already divided by the global batch's count.

    The policy counts valid tokens and sequences over the whole global batch (all microbatches, all
    data-parallel ranks) and hands both to the loss, which divides by the one of its `loss_type`.
    Losses, and metrics, of the microbatches then simply add up. Metrics whose names end in `_min` or
    `_max` are combined by minimum and maximum instead.
    """

    loss_type: LossType

    def __call__(
        self,
        next_token_logits: torch.Tensor,
        data: BatchedDataDict[Any],
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Scalar loss and metrics.

        Args:
            next_token_logits: [B, S, V]; entry (b, i) predicts token i + 1 of row b. Losses that can
                work on shards also take `vocab_parallel_rank`, `vocab_parallel_group` (logits hold
                this rank's columns) and `context_parallel_group` (logits hold its zigzag tokens).
            data: whole rows: `input_ids`, `token_mask` [B, S], `sample_mask` [B], and the loss's own.
            global_valid_seqs: Σ sample_mask over the global batch.
            global_valid_toks: Σ token_mask[:, 1:] · sample_mask over the global batch.
        """
        ...


@runtime_checkable
class LogprobLossFunction(Protocol):
    """A loss that needs only log-probabilities, so that no logits need to exist."""

    needs_entropy: bool

    def from_logprobs(
        self,
        next_token_logprobs: torch.Tensor,
        data: BatchedDataDict[Any],
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
        entropy: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """The same loss from log-probabilities [B, S − 1]: entry (b, t) of token `input_ids[b, t + 1]`."""
        ...
