"""Reference log-probabilities computed once and kept on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mcore_rl.data.batches import collate
from mcore_rl.data.token_store import TokenStore
from mcore_rl.distributed.collectives import broadcast_object
from mcore_rl.models.policy.scoring import ScoringModel


class PrecomputedReference:
    """Reference log-probabilities of every sequence of a dataset, in its order.

    Kept as `DIRECTORY/<key>.safetensors`; the key hashes the reference weights, their precision and the
    tokenized data (hence tokenizer and chat template), and nothing of the parallel layout.
    """

    def __init__(self, logprobs: Tensor, lengths: Sequence[int]) -> None:
        self._of_sequence = logprobs.split(list(lengths))

    @classmethod
    def load_or_compute(
        cls, directory: Path, model: ScoringModel, units: TokenStore, pad_token_id: int, batch_size: int
    ) -> PrecomputedReference:
        """From disk if there; else by `model`, whose weights must be the reference's. Collective."""
        lengths = units.lengths().tolist()
        key = reference_key(model.config.model.path, model.config.model.dtype, units) if model.is_writer else ""
        path = directory / f"{broadcast_object(key)}.safetensors"
        if broadcast_object(path.is_file()):
            return cls(load_file(path)["logprobs"], lengths)
        parts = []
        for start in range(0, len(units), batch_size):
            data = collate(units[start : start + batch_size], pad_token_id)
            scores = model.get_logprobs(data)["logprobs"]
            parts += [row[:length] for row, length in zip(scores, data["input_lengths"].tolist(), strict=True)]
        logprobs = torch.cat(parts)
        if model.is_writer:
            directory.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(".partial")
            save_file({"logprobs": logprobs}, temporary)
            temporary.replace(path)
        return cls(logprobs, lengths)

    def rows(self, sequences: Iterable[int], width: int) -> Tensor:
        """[n, width] for the dataset's sequences of these indices; column t scores token t."""
        picked = [self._of_sequence[index] for index in sequences]
        out = torch.zeros(len(picked), width)
        for row, values in enumerate(picked):
            out[row, : len(values)] = values
        return out


def reference_key(model_path: Path, dtype: str, units: TokenStore) -> str:
    """Hash of the reference model's files, its precision, and the token ids of the data."""
    digest = hashlib.sha256(dtype.encode())
    for file in sorted([model_path / "config.json", *model_path.glob("*.safetensors")]):
        with open(file, "rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    digest.update(units.fingerprint.encode())
    return digest.hexdigest()[:24]
