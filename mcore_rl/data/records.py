"""Preference and SFT records: read through `datasets`, checked, tokenized, limited in length."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mcore_rl.config import DataConfig
from mcore_rl.data.tokenize import TokenSequence, tokenize_completion, tokenize_messages
from mcore_rl.errors import UserError

Unit = tuple[TokenSequence, ...]
"""Sequences that must stay together: one for SFT, (chosen, rejected) for pairs."""


@dataclass(frozen=True)
class Dataset:
    """Tokenized units, and how many records were left out or shortened for their length."""

    units: list[Unit]
    num_dropped: int = 0
    num_truncated: int = 0

    def __len__(self) -> int:
        return len(self.units)

    def fingerprint(self) -> str:
        """Hash of token ids and masks."""
        return fingerprint(self.units)

    def describe(self, name: str, limit: int) -> str:
        """One line for the user: what is there and what was done to it."""
        tokens = sum(len(sequence) for unit in self.units for sequence in unit)
        parts = [f"{name}: {len(self.units):,} records, {tokens:,} tokens"]
        if self.num_dropped:
            parts.append(f"{self.num_dropped:,} dropped (longer than {limit} tokens)")
        if self.num_truncated:
            parts.append(f"{self.num_truncated:,} truncated to {limit} tokens")
        return ", ".join(parts)


def fingerprint(units: Sequence[Unit]) -> str:
    """Hash of token ids and masks: of the data, the tokenizer and the chat template together."""
    digest = hashlib.sha256()
    for unit in units:
        for sequence in unit:
            digest.update(array("q", [len(sequence), *sequence.input_ids]).tobytes() + bytes(sequence.token_mask))
    return digest.hexdigest()


def load_preference_dataset(source: str, tokenizer: Any, data: DataConfig) -> Dataset:
    """Pairs from records `prompt, chosen, rejected` (strings or messages; the prompt may be implicit)."""
    return _load(source, partial(_tokenize_preference, tokenizer), data)


def load_sft_dataset(source: str, tokenizer: Any, data: DataConfig) -> Dataset:
    """Sequences from records `prompt, completion` or `messages`."""
    return _load(source, partial(_tokenize_sft, tokenizer), data)


def _load(source: str, tokenize: Callable[[dict[str, Any]], Unit], data: DataConfig) -> Dataset:
    units, dropped, truncated = [], 0, 0
    for index, record in enumerate(read_records(source)):
        try:
            unit = tokenize(record)
            if not all(sequence.is_trainable for sequence in unit):
                raise ValueError("the record has no response tokens")
        except ValueError as error:
            raise UserError(f"{record_place(source, index)}: {error}") from None
        if max(map(len, unit)) > data.max_sequence_length:
            unit = tuple(sequence.truncate(data.max_sequence_length) for sequence in unit)
            if data.overlong == "drop" or not all(sequence.is_trainable for sequence in unit):
                dropped += 1
                continue
            truncated += 1
        units.append(unit)
    if not units:
        raise UserError(f"{source}: no record is left ({dropped} longer than data.max_sequence_length)")
    return Dataset(units, dropped, truncated)


def _tokenize_preference(tokenizer: Any, record: dict[str, Any]) -> Unit:
    _require(record, "chosen", "rejected")
    prompt, chosen, rejected = record.get("prompt"), record["chosen"], record["rejected"]
    if prompt is None:
        prompt, chosen, rejected = _split_shared_prompt(chosen, rejected)
    return (
        tokenize_completion(tokenizer, prompt, chosen),
        tokenize_completion(tokenizer, prompt, rejected),
    )


def _split_shared_prompt(chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    """The messages (or text) that both responses begin with are the prompt."""
    if not (isinstance(chosen, list) and isinstance(rejected, list)):
        raise ValueError("lacks the key prompt (it may be left out of message lists only)")
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    return chosen[:shared], chosen[shared:], rejected[shared:]


def _tokenize_sft(tokenizer: Any, record: dict[str, Any]) -> Unit:
    if record.get("messages") is not None:
        return (tokenize_messages(tokenizer, record["messages"]),)
    _require(record, "prompt", "completion")
    return (tokenize_completion(tokenizer, record["prompt"], record["completion"]),)


def _require(record: dict[str, Any], *keys: str) -> None:
    missing = [key for key in keys if record.get(key) is None]
    if missing:
        raise ValueError(f"lacks the key {' and '.join(missing)}; it has {', '.join(sorted(record))}")


def read_records(source: str) -> Sequence[dict[str, Any]]:
    """A local file, or `NAME` / `NAME:SPLIT` of a dataset on the hub."""
    import datasets

    loaders = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
    datasets.disable_progress_bars()
    suffix = Path(source).suffix
    if suffix in loaders:
        if not Path(source).is_file():
            raise UserError(f"data: {source} does not exist")
        if suffix == ".jsonl":
            _check_lines(source)
        try:
            return datasets.load_dataset(loaders[suffix], data_files=source, split="train")
        except datasets.exceptions.DatasetGenerationError as error:
            raise UserError(f"{source}: cannot be read: {' '.join(str(error.__cause__ or error).split())}") from None
    if Path(source).exists():
        raise UserError(f"data: {source} must be a .jsonl, .json or .parquet file")
    name, _, split = source.partition(":")
    try:
        return datasets.load_dataset(name, split=split or "train")
    except (OSError, ValueError, ConnectionError) as error:
        raise UserError(
            f"data: {source} is neither a .jsonl, .json or .parquet file nor a dataset that can be reached: "
            f"{' '.join(str(error).split())}"
        ) from None


def _check_lines(source: str) -> None:
    with open(source, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise UserError(f"{source}, line {number}: not valid JSON: {error}") from None
            if not isinstance(record, dict):
                raise UserError(f"{source}, line {number}: must be a JSON object, found a {type(record).__name__}")


def record_place(source: str, index: int) -> str:
    """Where record `index` is, for an error: its line in a .jsonl file."""
    if Path(source).suffix != ".jsonl":
        return f"{source}, record {index + 1}"
    with open(source, "rb") as file:
        lines = [number for number, line in enumerate(file, start=1) if line.strip()]
    return f"{source}, line {lines[index]}"
