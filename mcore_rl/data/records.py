"""Preference and SFT records: checked, tokenized, limited in length."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mcore_rl.config import DataConfig
from mcore_rl.data.chat import end_token_ids
from mcore_rl.data.progress import Say, silent, with_progress
from mcore_rl.data.reading import read_records, record_place, require
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

    @cached_property
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


def load_preference_dataset(source: str, tokenizer: Any, data: DataConfig, say: Say = silent) -> Dataset:
    """Pairs from records `prompt, chosen, rejected` (strings or messages; the prompt may be implicit)."""
    dataset = _load(source, tokenizer, _tokenize_preference, data, say)
    equal = sum(chosen == rejected for chosen, rejected in dataset.units)
    if equal == len(dataset):
        raise UserError(f"{source}: chosen and rejected are the same in every record; there is nothing to prefer")
    if equal:
        say(f"{source}: chosen and rejected are the same in {equal:,} of {len(dataset):,} records, which teach nothing")
    return dataset


def load_sft_dataset(source: str, tokenizer: Any, data: DataConfig, say: Say = silent) -> Dataset:
    """Sequences from records `prompt, completion` or `messages`, with `tools` if there are any."""
    return _load(source, tokenizer, _tokenize_sft, data, say)


def _load(
    source: str, tokenizer: Any, tokenize: Callable[[Any, dict[str, Any]], Unit], data: DataConfig, say: Say
) -> Dataset:
    units, dropped, truncated = [], 0, 0
    ends, teaches_end = end_token_ids(tokenizer), False
    records = read_records(source)
    for index, record in enumerate(with_progress(records, f"tokenizing {source}", say)):
        try:
            unit = tokenize(tokenizer, record)
            if not all(sequence.is_trainable for sequence in unit):
                raise ValueError("the record has no response tokens")
        except ValueError as error:
            raise UserError(f"{record_place(source, index)}: {error}") from None
        teaches_end = teaches_end or any(not ends.isdisjoint(sequence.trained_ids) for sequence in unit)
        if max(map(len, unit)) > data.max_sequence_length:
            unit = tuple(sequence.truncate(data.max_sequence_length) for sequence in unit)
            if data.overlong == "drop" or not all(sequence.is_trainable for sequence in unit):
                dropped += 1
                continue
            truncated += 1
        units.append(unit)
    if not units:
        raise UserError(f"{source}: no record is left ({dropped} longer than data.max_sequence_length)")
    if not teaches_end:
        say(
            f"{source}: no response is trained to end: the chat template writes no end token inside what it marks by "
            "{% generation %}; close the block behind the end token"
        )
    return Dataset(units, dropped, truncated)


def _tokenize_preference(tokenizer: Any, record: dict[str, Any]) -> Unit:
    require(record, "chosen", "rejected")
    prompt, chosen, rejected = record.get("prompt"), record["chosen"], record["rejected"]
    if prompt is None:
        prompt, chosen, rejected = _split_shared_prompt(chosen, rejected)
    elif isinstance(prompt, list) and all(
        isinstance(response, list) and response[: len(prompt)] == prompt for response in (chosen, rejected)
    ):  # whole conversations, beside the prompt that they begin with
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    tools = record.get("tools")
    return (
        tokenize_completion(tokenizer, prompt, chosen, tools),
        tokenize_completion(tokenizer, prompt, rejected, tools),
    )


def _split_shared_prompt(chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    """The messages that both responses begin with are the prompt; the last of each is its response in any case."""
    if not (isinstance(chosen, list) and isinstance(rejected, list)):
        raise ValueError("lacks the key prompt (it may be left out of message lists only)")
    shared = 0
    while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    return chosen[:shared], chosen[shared:], rejected[shared:]


def _tokenize_sft(tokenizer: Any, record: dict[str, Any]) -> Unit:
    if record.get("messages") is not None:
        if record.get("completion") is not None:  # a prompt alone is no second conversation
            raise ValueError("has both messages and a completion; leave out the one that is not to be trained on")
        return (tokenize_messages(tokenizer, record["messages"], record.get("tools")),)
    require(record, "prompt", "completion")
    return (tokenize_completion(tokenizer, record["prompt"], record["completion"], record.get("tools")),)
