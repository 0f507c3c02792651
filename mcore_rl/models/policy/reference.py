"""The reference model: weights that temporarily replace the policy's weights, or log-probabilities stored on disk."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from mcore_rl import platform
from mcore_rl.config import ModelConfig
from mcore_rl.data.batching import assign_records, collate
from mcore_rl.data.token_store import TokenStore
from mcore_rl.distributed.batched_data_dict import LocalBatch
from mcore_rl.distributed.collectives import broadcast_object, gather_items_on_rank_zero
from mcore_rl.errors import UserError
from mcore_rl.models.megatron.checkpoint.save import SaveError, run_on_rank_zero
from mcore_rl.models.megatron.weights.adapters import adapters_in
from mcore_rl.models.megatron.weights.conversion import adapters_of
from mcore_rl.models.policy.scoring import ScoringModel
from mcore_rl.utils.console import PrintLine, Progress, size_text
from mcore_rl.utils.files import naming_full_disk
from mcore_rl.utils.model_directory import digest_of_weights

if TYPE_CHECKING:
    from mcore_rl.models.policy.interfaces import PolicyInterface


class Reference(Protocol):
    """The reference model. The policy is compared with it."""

    def in_place(self) -> AbstractContextManager[None]:
        """Inside the context, the policy's model computes what the reference model computes.

        Afterwards, even after an error, it computes what the policy computes.
        """
        ...

    def describe(self) -> str:
        """Describe in one line the reference and its memory on this rank."""
        ...


class ReferenceWeights:
    """A reference that is a copy of this rank's current weights.

    The copy is in host memory, which is page-locked if there is a GPU.

    Args:
        tensors: this rank's weights.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.tensors = list(tensors)
        self.kept = copies_on_host(self.tensors)
        self.has_moved = False
        """Whether the reference weights differ from the model directory's. If so, checkpoints must contain them."""
        self._what = "the weights that training began from"

    @torch.no_grad()
    def move(self, alpha: float) -> None:
        """Set reference ← (1 − alpha) · reference + alpha · current, as in arXiv:2404.09656."""
        for kept, tensor in zip(self.kept, self.tensors, strict=True):
            # The average is computed in fp32: bfloat16 rounding of each product would lose a small alpha.
            kept.copy_(torch.lerp(kept.float(), tensor.to(kept.device).float(), alpha))
        self.has_moved, self._what = True, "moved weights"

    def describe(self) -> str:
        return f"{self._what}, {size_text(sum(kept.nbytes for kept in self.kept))} a rank in the host's memory"

    def by_tensor(self) -> dict[int, Tensor]:
        """Return a map from the `id` of each of the model's tensors to the tensor's value in the reference."""
        return {id(tensor): kept for tensor, kept in zip(self.tensors, self.kept, strict=True)}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        swapped = list[tuple[Tensor, Tensor]]()
        try:
            for tensor, kept in zip(self.tensors, self.kept, strict=True):
                swap_tensors(tensor, kept)
                swapped.append((tensor, kept))
            yield
        finally:
            for tensor, kept in reversed(swapped):
                swap_tensors(tensor, kept)
            platform.synchronize_stream()  # a checkpoint reads `kept` without waiting for the device


@torch.no_grad()
def swap_tensors(tensor: Tensor, kept: Tensor) -> None:
    """Exchange the values of `tensor` and `kept`; this temporarily needs a copy of `tensor` on the device."""
    current = tensor.clone()
    tensor.copy_(kept, non_blocking=True)
    kept.copy_(current, non_blocking=True)


@torch.no_grad()
def copies_on_host(tensors: list[Tensor]) -> list[Tensor]:
    """Copy tensors to host memory and return the copies. The memory is page-locked if there is a GPU."""
    copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=platform.has_gpu()) for t in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor)
    return copies


class AdaptersDisabled:
    """A reference that is the policy's model without its adapters.

    It equals the initial policy only if the adapters were new at the start, because new adapters compute zeros.
    """

    def __init__(self, adapters: Iterable[Any]) -> None:
        self.adapters = list(adapters)

    def describe(self) -> str:
        return "the policy without its adapters, no copy"

    @contextmanager
    def in_place(self) -> Iterator[None]:
        try:
            self._enable(False)
            yield
        finally:
            self._enable(True)

    def _enable(self, enabled: bool) -> None:
        for adapter in self.adapters:
            adapter.enabled = enabled


def initial_reference(model: ScoringModel, adapters_are_trained: bool) -> Reference:
    """Return a reference that computes the same as the policy does now.

    Args:
        adapters_are_trained: False if the adapters are new. New adapters compute zeros.
    """
    if model.model.lora is None:
        return ReferenceWeights(model.parameters())
    if adapters_are_trained or model.config.reference_sync_of is not None:
        return ReferenceWeights(adapters_in(model.model))
    return AdaptersDisabled(adapters_of(model.model).values())


DIGEST_BYTES = hashlib.sha256().digest_size
"""Size of the digest at the end of a stored file. It is the digest of all bytes before it."""
ITEM_BYTES = np.dtype(np.float32).itemsize


class ReferenceLogprobs(Protocol):
    """A source of reference log-probabilities for the records of a dataset."""

    def logprobs(self, rows: LocalBatch[Any], units: TokenStore, indices: Sequence[int]) -> Tensor:
        """Return the log-probability of each token of `rows`, [B, S]; column t belongs to token t.

        Args:
            rows: batch with the sequences of some records of the dataset `units`.
            indices: indices of these records in the dataset.
        """
        ...


class SwappedReference:
    """A source that computes the reference log-probabilities with the policy's model.

    During the computation, the model has the reference's weights.
    """

    def __init__(self, policy: PolicyInterface) -> None:
        self.policy = policy

    def logprobs(self, rows: LocalBatch[Any], units: TokenStore, indices: Sequence[int]) -> Tensor:
        logprobs: Tensor = self.policy.get_reference_policy_logprobs(rows)["reference_logprobs"]
        return logprobs


class SecondModel:
    """A source that computes the reference log-probabilities with a second model, which stays in memory."""

    def __init__(self, model: ScoringModel) -> None:
        self.model = model

    def logprobs(self, rows: LocalBatch[Any], units: TokenStore, indices: Sequence[int]) -> Tensor:
        logprobs: Tensor = self.model.get_logprobs(rows)["logprobs"]
        return logprobs


class StoredLogprobs:
    """Source of reference log-probabilities that were computed before training and are read from files."""

    def __init__(self, stored: Sequence[tuple[TokenStore, PrecomputedLogprobs]]) -> None:
        self.stored = stored

    def logprobs(self, rows: LocalBatch[Any], units: TokenStore, indices: Sequence[int]) -> Tensor:
        of_dataset = next(logprobs for known, logprobs in self.stored if known is units)
        size = units.sequences_per_unit
        return of_dataset.rows([size * index + n for index in indices for n in range(size)], rows["input_ids"].shape[1])


class PrecomputedLogprobs:
    """A file of reference log-probabilities for every sequence of a dataset; they are read from disk when needed.

    The file is `DIRECTORY/<key>.logprobs`. It contains float32 values in the dataset's order. The key is a hash of the
    reference weights, their adapter, their precision and the tokenized data, so it changes with tokenizer and chat
    template. It does not depend on the parallel layout.
    """

    def __init__(self, path: Path, lengths: np.ndarray) -> None:
        self._file, self._ends = open(path, "rb"), np.cumsum(lengths)  # noqa: SIM115

    @classmethod
    def load_or_compute(
        cls,
        directory: Path,
        reference: ModelConfig,
        model: Callable[[], ScoringModel],
        units: TokenStore,
        pad_token_id: int,
        batch_size: int,
        say: PrintLine,
    ) -> PrecomputedLogprobs:
        """Open the file if it exists and is intact; otherwise compute and write it first. Collective.

        Results are written batch by batch. After an interruption, the computation continues with the next batch.

        Args:
            directory: directory of the file.
            reference: configuration of the reference model.
            model: function that returns the reference model; called only if the file must be computed. Adapters of the
                model must still have their initial values.
            units: the dataset.
        """
        lengths, is_first = units.lengths(), torch.distributed.get_rank() == 0
        key = reference_key(reference, units) if is_first else ""
        path = directory / f"{broadcast_object(key)}.logprobs"
        problem = broadcast_object(_problem(path, int(lengths.sum())) if is_first and path.is_file() else None)
        if problem is not None:
            say(f"damaged reference log-probabilities: {path}: {problem}; they are computed again")
        if problem is not None or not broadcast_object(path.is_file()):
            _compute(path, model(), units, pad_token_id, batch_size, say)
        elif is_first:
            with contextlib.suppress(OSError):  # an earlier run was interrupted here, or the directory is read-only
                _ResumableFile(path).clear()
        return cls(path, lengths)

    def rows(self, sequences: Iterable[int], width: int) -> Tensor:
        """Return the log-probabilities of the n sequences with the indices `sequences`, [n, width].

        Column t belongs to token t; the columns after a sequence's end are 0.
        """
        picked = [self._of_sequence(index) for index in sequences]
        out = torch.zeros(len(picked), width)
        for row, values in enumerate(picked):
            out[row, : len(values)] = torch.from_numpy(values)
        return out

    def _of_sequence(self, index: int) -> np.ndarray:
        start, end = int(self._ends[index - 1]) if index else 0, int(self._ends[index])
        read = os.pread(self._file.fileno(), (end - start) * ITEM_BYTES, start * ITEM_BYTES)
        return np.frombuffer(bytearray(read), np.float32)


def _compute(
    path: Path, model: ScoringModel, units: TokenStore, pad_token_id: int, batch_size: int, say: PrintLine
) -> None:
    """Compute the log-probabilities of all records of `units` and write them to the file `path`.

    Until the file is complete, it has the suffix `.partial`.

    Raises:
        UserError: the file cannot be written.
    """
    partial = _ResumableFile(path)
    try:
        done: int = run_on_rank_zero(lambda: partial.begin(units, say))
        before = f", {done:,} of which are done" if done else ""
        say(f"reference log-probabilities: computing them once for {len(units):,} records{before}: {path}")
        progress = Progress("reference log-probabilities", say)
        for start in range(done, len(units), batch_size):
            indices = range(start, min(start + batch_size, len(units)))
            share, places = assign_records(model.divide, model.topology.data, units, indices)
            data: LocalBatch[Any] = LocalBatch(collate([units[start + place] for place in places], pad_token_id), share)
            scores, ends = model.get_logprobs(data)["logprobs"], data["input_lengths"].tolist()
            of_rows = zip(share.indices, scores, ends, strict=True)
            scored = {row: values[:end].numpy().tobytes() for row, values, end in of_rows}
            gathered = gather_items_on_rank_zero(scored, range(share.total), model.topology)
            run_on_rank_zero(functools.partial(partial.append, gathered))
            progress.reached((indices.stop - done) / (len(units) - done), indices.stop)
        run_on_rank_zero(lambda: partial.seal(path))  # every rank waits here before it looks for the file
    except SaveError as error:
        raise UserError(f"reference log-probabilities: {partial.path} cannot be written: {error}") from None


class _ResumableFile:
    """An incomplete file of log-probabilities. With it, an interrupted computation can be resumed.

    After each batch, a second file gets a line with the size and the checksum of the first file. A batch counts as
    written if its line exists. Only one process writes the files.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.lines = path.with_suffix(".partial"), path.with_suffix(".checksums")
        self._size = self._checksum = 0

    def begin(self, units: TokenStore, say: PrintLine) -> int:
        """Open the file for writing; return how many records an interrupted run has completely written.

        Bytes after these records are removed.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        there = self.path.stat().st_size if self.path.is_file() else 0
        text = self.lines.read_text(errors="replace") if self.lines.is_file() else ""
        found = [(int(size), int(sum_)) for size, sum_ in re.findall(r"^(\d{1,18}) (\d{1,18})\n", text, re.MULTILINE)]
        size, checksum = max((batch for batch in found if batch[0] <= there), default=(0, 0))
        ends = ITEM_BYTES * np.cumsum(units.lengths())[units.sequences_per_unit - 1 :: units.sequences_per_unit]
        records = int(np.searchsorted(ends, size, side="right"))
        if size not in (0, *ends[records - 1 : records]) or _checksum(self.path, size) != checksum:
            size = checksum = records = 0
        if there and not size:
            say(f"reference log-probabilities: {self.path}: no batch matches its checksum; it is computed anew")
        with open(self.path, "ab") as file:
            file.truncate(size)
        self.lines.write_text(f"{size} {checksum}\n")
        self._size, self._checksum = size, checksum
        return records

    def append(self, values: Iterable[bytes]) -> None:
        batch = b"".join(values)
        _append(self.path, batch)
        self._size, self._checksum = self._size + len(batch), zlib.crc32(batch, self._checksum)
        _append(self.lines, f"{self._size} {self._checksum}\n".encode())

    def seal(self, path: Path) -> None:
        """Complete the file: append the digest of its values and rename it to `path`."""
        _append(self.path, _digest(self.path, self._size))
        self.path.replace(path)
        self.clear()

    def clear(self) -> None:
        """Remove the incomplete file and the file of its checksums."""
        self.path.unlink(missing_ok=True)
        self.lines.unlink(missing_ok=True)


def _append(path: Path, content: bytes) -> None:
    with naming_full_disk(path.parent), open(path, "ab") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def reference_key(model: ModelConfig, units: TokenStore) -> str:
    """Return a hash of the reference model's weights, its adapter, its precision, and the data's tokens."""
    digest = hashlib.sha256(model.dtype.encode())
    digest.update((model.path / "config.json").read_bytes())
    digest.update(digest_of_weights(model.path).encode())
    if model.lora is not None and model.lora.path is not None:
        digest.update(digest_of_weights(model.lora.path).encode())
    digest.update(units.fingerprint.encode())
    return digest.hexdigest()[:24]


def _problem(path: Path, tokens: int) -> str | None:
    """Check that a file is intact and contains log-probabilities of `tokens` tokens; return the defect, or None."""
    size = path.stat().st_size - DIGEST_BYTES
    if size != tokens * ITEM_BYTES:
        return f"it holds {size} bytes, not {tokens * ITEM_BYTES}"
    with open(path, "rb") as file:
        file.seek(size)
        return None if file.read() == _digest(path, size) else "its digest does not match its values"


def _digest(path: Path, size: int) -> bytes:
    """Return the SHA-256 digest of the first `size` bytes of a file."""
    digest = hashlib.sha256()
    for part in _parts(path, size):
        digest.update(part)
    return digest.digest()


def _checksum(path: Path, size: int) -> int:
    """Return the CRC-32 checksum of the first `size` bytes of a file."""
    return functools.reduce(lambda checksum, part: zlib.crc32(part, checksum), _parts(path, size), 0)


def _parts(path: Path, size: int) -> Iterator[bytes]:
    """Yield the first `size` bytes of a file, in parts of limited size."""
    if not size:
        return
    with open(path, "rb") as file:
        while size:
            part = file.read(min(size, 2**24))
            yield part
            size -= len(part)
