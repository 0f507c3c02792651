"""Which samples a step trains on, and their tensors: the same on every rank."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcore_rl.data.token_store import Unit
from mcore_rl.distributed.batched_data_dict import BatchedDataDict

ROUNDS = 8


@dataclass(frozen=True)
class SampleOrder:
    """Sample k of a run, shuffled anew each epoch: a function of (seed, epoch, position) alone, in time O(1).

    A position is enciphered by a Feistel network over the smallest even number of bits that holds the dataset, again
    and again until it is of the dataset (Black and Rogaway, Ciphers with arbitrary finite domains, 2002); at most 4
    times on average.
    """

    num_samples: int
    seed: int

    def indices(self, start: int, count: int) -> list[int]:
        """Dataset indices of samples start … start + count − 1, across the ends of epochs."""
        return [self._index(*divmod(k, self.num_samples)) for k in range(start, start + count)]

    def _index(self, epoch: int, position: int) -> int:
        half = max(1, -(-(self.num_samples - 1).bit_length() // 2))
        mask = (1 << half) - 1
        while True:
            left, right = position >> half, position & mask
            for number in range(ROUNDS):
                left, right = right, left ^ self._round(epoch, number, right) & mask
            position = left << half | right
            if position < self.num_samples:
                return position

    def _round(self, epoch: int, number: int, value: int) -> int:
        key = struct.pack("<qqqq", self.seed, epoch, number, value)
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")


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
