"""The tensors of the samples that a step trains on: the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mcore_rl.data.token_store import Unit
from mcore_rl.distributed.batched_data_dict import BatchedDataDict


def collate(units: Sequence[Unit], pad_token_id: int) -> BatchedDataDict[Any]:
    """Right-padded rows, a unit's sequences next to one another.

    Returns `input_ids`, `token_mask` [B, S], `input_lengths`, `sample_mask` [B].
    """
    sequences = [sequence for unit in units for sequence in unit]
    width = max(map(len, sequences))
    input_ids = torch.full((len(sequences), width), pad_token_id, dtype=torch.long)
    token_mask = torch.zeros(len(sequences), width)
    for row, sequence in enumerate(sequences):
        input_ids[row, : len(sequence)] = torch.tensor(sequence.input_ids)
        token_mask[row, : len(sequence)] = torch.tensor(sequence.token_mask, dtype=torch.float32)
    return BatchedDataDict(
        input_ids=input_ids,
        token_mask=token_mask,
        input_lengths=torch.tensor([len(sequence) for sequence in sequences]),
        sample_mask=torch.ones(len(sequences)),
    )


def valid_counts(data: BatchedDataDict[Any]) -> tuple[Tensor, Tensor]:
    """(global_valid_seqs, global_valid_toks) of a global batch, fp32 scalars."""
    sample_mask = data["sample_mask"].float()
    tokens = data["token_mask"][:, 1:].float() * sample_mask[:, None]
    return sample_mask.sum(), tokens.sum()
