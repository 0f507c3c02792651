"""The interface between a loss function and a policy."""

from __future__ import annotations

import enum
from typing import Any, Literal, Protocol, runtime_checkable

import torch

from mcore_rl.distributed.batched_data_dict import BatchedDataDict


class LossType(enum.Enum):
    """The count that normalises a loss: valid tokens or valid sequences of the global batch."""

    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


Reduction = Literal["sum", "mean", "min", "max"]
"""How a metric of several calls becomes one; mean: weighted by the valid samples of each call."""


@runtime_checkable
class LossFunction(Protocol):
    """A loss of one microbatch, already divided by the global batch's count.

    The policy counts valid tokens and sequences over the whole global batch (all microbatches, all
    data-parallel ranks) and hands both to the loss, which divides by the one of its `loss_type`.
    Losses of the microbatches then simply add up.

    Four more attributes are read if a loss has them: `prepare`, called with this rank's microbatches before they go
    through the policy; `metric_reductions`, a dictionary from the names of metrics that do not add up to their
    `Reduction`; `rows_per_unit`, how many neighbouring rows belong together (2 for pairs; 1 if there is none), which
    packing never separates; and `reads_values`, true of a loss that a model with a reward head gives its number at
    every token, [B, S], not only at the last.
    """

    loss_type: LossType

    def __call__(
        self,
        next_token_logits: torch.Tensor,
        data: BatchedDataDict[Any],
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Scalar loss and metrics (numbers, or tensors of one element; any names).

        Args:
            next_token_logits: [B, S, V]; entry (b, i) predicts token i + 1 of row b. Losses that can
                work on shards also take `vocab_parallel_rank`, `vocab_parallel_group` (logits hold
                this rank's columns) and `context_parallel_group` (logits hold its zigzag tokens). Under
                context parallelism every rank computes the whole loss; see
                `context_parallel.gather_context_parallel` for what that means for gradients.
            data: whole rows: `input_ids`, `token_mask` [B, S], `sample_mask` [B], and the loss's own.
            global_valid_seqs: Σ sample_mask over the global batch.
            global_valid_toks: Σ token_mask[:, 1:] · sample_mask over the global batch.
        """
        ...
