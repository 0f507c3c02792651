"""Which samples a step trains on, and their tensors: the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcore_rl.data.records import Unit
from mcore_rl.distributed.batched_data_dict import BatchedDataDict


@dataclass(frozen=True)
class SampleOrder:
    """Sample k of a run, shuffled anew each epoch: a function of (seed, epoch, position) alone."""

    num_samples: int
    seed: int

    def indices(self, start: int, count: int) -> list[int]:
        """Dataset indices of samples start … start + count − 1, across the ends of epochs."""
        positions = range(start, start + count)
        orders = {epoch: self._order(epoch) for epoch in {k // self.num_samples for k in positions}}
        return [orders[k // self.num_samples][k % self.num_samples] for k in positions]

    def _order(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        return torch.randperm(self.num_samples, generator=generator).tolist()


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
