"""Reference log-probabilities computed once and kept on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from mcore_rl.config import ModelConfig
from mcore_rl.data.batches import collate
from mcore_rl.data.progress import Say
from mcore_rl.data.token_store import TokenStore
from mcore_rl.distributed.collectives import broadcast_object
from mcore_rl.models.megatron.peft_directory import CONFIG_FILE, TENSORS_FILE
from mcore_rl.models.policy.scoring import ScoringModel

DIGEST = "sha256"
"""Key of a stored file's metadata: of the log-probabilities' bytes."""


class PrecomputedReference:
    """Reference log-probabilities of every sequence of a dataset, in its order.

    Kept as `DIRECTORY/<key>.safetensors`; the key hashes the reference weights, an adapter on them, their
    precision and the tokenized data (hence tokenizer and chat template), and nothing of the parallel layout.
    """

    def __init__(self, logprobs: Tensor, lengths: Sequence[int]) -> None:
        self._of_sequence = logprobs.split(list(lengths))

    @classmethod
    def load_or_compute(
        cls, directory: Path, model: ScoringModel, units: TokenStore, pad_token_id: int, batch_size: int, say: Say
    ) -> PrecomputedReference:
        """From disk if there and whole; else by `model`, whose weights must be the reference's. Collective.

        Args:
            model: its adapters, if it has some, must be as they began.
        """
        lengths = units.lengths().tolist()
        key = reference_key(model.config.model, units) if model.is_writer else ""
        path = directory / f"{broadcast_object(key)}.safetensors"
        problem = broadcast_object(_problem(path, sum(lengths)) if model.is_writer and path.is_file() else None)
        if problem is not None:
            say(f"damaged reference log-probabilities: {path}: {problem}; they are computed again")
        elif broadcast_object(path.is_file()):
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
            save_file({"logprobs": logprobs}, temporary, metadata={DIGEST: _digest(logprobs)})
            temporary.replace(path)
        return cls(logprobs, lengths)

    def rows(self, sequences: Iterable[int], width: int) -> Tensor:
        """[n, width] for the dataset's sequences of these indices; column t scores token t."""
        picked = [self._of_sequence[index] for index in sequences]
        out = torch.zeros(len(picked), width)
        for row, values in enumerate(picked):
            out[row, : len(values)] = values
        return out


def reference_key(model: ModelConfig, units: TokenStore) -> str:
    """Hash of the reference model's files and those of its adapter, its precision, and the token ids of the data."""
    digest = hashlib.sha256(model.dtype.encode())
    files = sorted([model.path / "config.json", *model.path.glob("*.safetensors")])
    if model.lora is not None and model.lora.path is not None:
        files += [model.lora.path / CONFIG_FILE, model.lora.path / TENSORS_FILE]
    for file in files:
        with open(file, "rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    digest.update(units.fingerprint.encode())
    return digest.hexdigest()[:24]


def _problem(path: Path, tokens: int) -> str | None:
    """Why a stored file is not `tokens` log-probabilities as they were written; None if it is."""
    try:
        with safe_open(path, framework="pt") as file:
            logprobs, written = file.get_tensor("logprobs"), (file.metadata() or {}).get(DIGEST)
    except (OSError, SafetensorError) as error:
        return " ".join(str(error).split())
    if logprobs.shape != (tokens,):
        return f"it holds {list(logprobs.shape)} values, not {tokens}"
    return None if written == _digest(logprobs) else "its digest is not that of its values"


def _digest(logprobs: Tensor) -> str:
    return hashlib.sha256(logprobs.numpy().tobytes()).hexdigest()
