"""Reference log-probabilities computed once and kept on disk."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mcore_rl.config import ModelConfig
from mcore_rl.data.batches import collate
from mcore_rl.data.division import share_records
from mcore_rl.data.progress import Progress, Say
from mcore_rl.data.token_store import TokenStore
from mcore_rl.distributed.collectives import broadcast_object
from mcore_rl.distributed.own_rows import OwnRows
from mcore_rl.distributed.replicas import gather_on_first
from mcore_rl.errors import UserError
from mcore_rl.models.megatron.checkpoint_writer import SaveError, on_first_rank
from mcore_rl.models.policy.scoring import ScoringModel
from mcore_rl.run_identity import digest_of_weights

DIGEST_BYTES = hashlib.sha256().digest_size
"""At the end of a stored file: the digest of what stands before."""
ITEM_BYTES = np.dtype(np.float32).itemsize


class PrecomputedReference:
    """Reference log-probabilities of every sequence of a dataset, in its order; read when they are used.

    Kept as `DIRECTORY/<key>.logprobs`, float32; the key hashes the reference weights, an adapter on them, their
    precision and the tokenized data (hence tokenizer and chat template), and nothing of the parallel layout.
    """

    def __init__(self, path: Path, lengths: np.ndarray) -> None:
        self._file, self._ends = open(path, "rb"), np.cumsum(lengths)  # noqa: SIM115

    @classmethod
    def load_or_compute(
        cls, directory: Path, model: ScoringModel, units: TokenStore, pad_token_id: int, batch_size: int, say: Say
    ) -> PrecomputedReference:
        """From disk if there and whole; else by `model`, whose weights must be the reference's. Collective.

        What is computed is written batch by batch; who was stopped goes on from there.

        Args:
            model: its adapters, if it has some, must be as they began.
        """
        lengths = units.lengths()
        key = reference_key(model.config.model, units) if model.is_writer else ""
        path = directory / f"{broadcast_object(key)}.logprobs"
        problem = broadcast_object(_problem(path, int(lengths.sum())) if model.is_writer and path.is_file() else None)
        if problem is not None:
            say(f"damaged reference log-probabilities: {path}: {problem}; they are computed again")
        if problem is not None or not broadcast_object(path.is_file()):
            _compute(path, model, units, pad_token_id, batch_size, say)
        return cls(path, lengths)

    def rows(self, sequences: Iterable[int], width: int) -> Tensor:
        """[n, width] for the dataset's sequences of these indices; column t scores token t."""
        picked = [self._of_sequence(index) for index in sequences]
        out = torch.zeros(len(picked), width)
        for row, values in enumerate(picked):
            out[row, : len(values)] = torch.from_numpy(values)
        return out

    def _of_sequence(self, index: int) -> np.ndarray:
        start, end = int(self._ends[index - 1]) if index else 0, int(self._ends[index])
        read = os.pread(self._file.fileno(), (end - start) * ITEM_BYTES, start * ITEM_BYTES)
        return np.frombuffer(bytearray(read), np.float32)


def _compute(path: Path, model: ScoringModel, units: TokenStore, pad_token_id: int, batch_size: int, say: Say) -> None:
    """Write the file; its records stand in `PATH.partial` until all are there, with a checksum of each batch's end
    beside them.

    Raises:
        UserError: it cannot be written.
    """
    partial = path.with_suffix(".partial")
    try:
        done: int = on_first_rank(lambda: _whole_records(partial, units, say))
        before = f", {done:,} of which were before" if done else ""
        say(f"reference log-probabilities: those of {len(units):,} records are computed once{before}: {path}")
        progress = Progress("reference log-probabilities", say)
        for start in range(done, len(units), batch_size):
            indices = range(start, min(start + batch_size, len(units)))
            share, places = share_records(model.divide, model.topology.data, units, indices)
            data: OwnRows[Any] = OwnRows(collate([units[start + place] for place in places], pad_token_id), share)
            scores, ends = model.get_logprobs(data)["logprobs"], data["input_lengths"].tolist()
            of_rows = zip(share.indices, scores, ends, strict=True)
            scored = {row: values[:end].numpy().tobytes() for row, values, end in of_rows}
            gathered = gather_on_first(scored, range(share.total), model.topology)
            on_first_rank(functools.partial(_append, partial, gathered))
            progress.reached((indices.stop - done) / (len(units) - done), indices.stop)
        on_first_rank(lambda: _seal(partial, path))  # nobody looks for it before it is there
    except SaveError as error:
        raise UserError(f"reference log-probabilities: {partial} cannot be written: {error}") from None


def _append(partial: Path, values: Iterable[bytes]) -> None:
    """Add a batch; it counts once its checksum is there too."""
    size, checksum = _written(partial)[-1]
    _add(partial, batch := b"".join(values))
    _add(_checksums(partial), f"{size + len(batch)} {zlib.crc32(batch, checksum)}\n".encode())


def _add(path: Path, content: bytes) -> None:
    with open(path, "ab") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _checksums(partial: Path) -> Path:
    return partial.with_suffix(".checksums")


def _written(partial: Path) -> list[tuple[int, int]]:
    """Bytes up to the end of each batch, the first of none, and their checksum."""
    path = _checksums(partial)
    text = path.read_text(errors="replace") if path.is_file() else ""
    return [(0, 0), *((int(size), int(checksum)) for size, checksum in re.findall(r"^(\d+) (\d+)\n", text, re.M))]


def _seal(partial: Path, path: Path) -> None:
    """With the digest behind its values the file gets its name."""
    _add(partial, _digest(partial, partial.stat().st_size))
    partial.replace(path)
    _checksums(partial).unlink()


def _whole_records(partial: Path, units: TokenStore, say: Say) -> int:
    """So many have all their values in the file of a run that was stopped; what stands behind them is cut off."""
    partial.parent.mkdir(parents=True, exist_ok=True)
    there = partial.stat().st_size if partial.is_file() else 0
    size, checksum = max(written for written in _written(partial) if written[0] <= there)
    if _checksum(partial, size) != checksum:
        say(f"damaged reference log-probabilities: {partial}: its checksum is another; they are computed again")
        size, checksum = 0, 0
    if there:
        os.truncate(partial, size)
    _checksums(partial).write_text(f"{size} {checksum}\n")
    ends = np.cumsum(units.lengths())[units.sequences_per_unit - 1 :: units.sequences_per_unit]
    return int(np.searchsorted(ends, size // ITEM_BYTES, side="right"))


def reference_key(model: ModelConfig, units: TokenStore) -> str:
    """Hash of the reference model, of its adapter (`digest_of_weights`), its precision, and the data's tokens."""
    digest = hashlib.sha256(model.dtype.encode())
    digest.update((model.path / "config.json").read_bytes())
    digest.update(digest_of_weights(model.path).encode())
    if model.lora is not None and model.lora.path is not None:
        digest.update(digest_of_weights(model.lora.path).encode())
    digest.update(units.fingerprint.encode())
    return digest.hexdigest()[:24]


def _problem(path: Path, tokens: int) -> str | None:
    """Why a stored file is not `tokens` log-probabilities as they were written; None if it is."""
    size = path.stat().st_size - DIGEST_BYTES
    if size != tokens * ITEM_BYTES:
        return f"it holds {size} bytes, not {tokens * ITEM_BYTES}"
    with open(path, "rb") as file:
        file.seek(size)
        return None if file.read() == _digest(path, size) else "its digest is not that of its values"


def _digest(path: Path, size: int) -> bytes:
    """Of a file's first bytes."""
    digest = hashlib.sha256()
    for part in _parts(path, size):
        digest.update(part)
    return digest.digest()


def _checksum(path: Path, size: int) -> int:
    """Of a file's first bytes."""
    return functools.reduce(lambda checksum, part: zlib.crc32(part, checksum), _parts(path, size), 0)


def _parts(path: Path, size: int) -> Iterator[bytes]:
    """A file's first bytes."""
    if not size:
        return
    with open(path, "rb") as file:
        while size:
            part = file.read(min(size, 2**24))
            yield part
            size -= len(part)
