"""The tensors of the samples that a step trains on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mcore_rl.data.token_store import Unit
from mcore_rl.distributed.batched_data_dict import BatchedDataDict, share_of


def collate(units: Sequence[Unit], pad_token_id: int) -> BatchedDataDict[Any]:
    """Right-padded rows, a unit's sequences next to one another.

    Returns `input_ids`, `token_mask` [B, S], `input_lengths`, `sample_mask` [B].
    """
    sequences = [sequence for unit in units for sequence in unit]
    rows = padded_rows([sequence.input_ids for sequence in sequences], pad_token_id)
    token_mask = torch.zeros(rows["input_ids"].shape)
    for row, sequence in enumerate(sequences):
        token_mask[row, : len(sequence)] = torch.tensor(sequence.token_mask, dtype=torch.float32)
    return BatchedDataDict(**rows, token_mask=token_mask, sample_mask=torch.ones(len(sequences)))


def padded_rows(sequences: Sequence[Sequence[int]], pad_token_id: int = 0) -> dict[str, Tensor]:
    """`input_ids` [B, S], right-padded, and `input_lengths` [B]; there may be none."""
    input_ids = torch.full((len(sequences), max(map(len, sequences), default=1)), pad_token_id, dtype=torch.long)
    for row, sequence in enumerate(sequences):
        input_ids[row, : len(sequence)] = torch.tensor(sequence)
    return {"input_ids": input_ids, "input_lengths": torch.tensor([len(s) for s in sequences], dtype=torch.long)}


def valid_counts(data: BatchedDataDict[Any]) -> tuple[Tensor, Tensor]:
    """(global_valid_seqs, global_valid_toks) of a global batch, fp32 scalars; collective, of a replica's own rows."""
    sample_mask = data["sample_mask"].double()
    tokens = data["token_mask"][:, 1:].double() * sample_mask[:, None]
    sequences, total = torch.tensor(share_of(data).sum(float(sample_mask.sum()), float(tokens.sum())))
    return sequences, total
