"""Prompt records: a prompt to answer, and what the environment needs to judge the answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, overload

from mcore_rl.config import DataConfig
from mcore_rl.data.messages import Messages, check_messages
from mcore_rl.data.readers import require
from mcore_rl.data.records import Source, described_shares, load_store, named, tokenization_of
from mcore_rl.data.sample_order import Order
from mcore_rl.data.token_cache import TokenCache
from mcore_rl.data.token_store import TokenStore, Unit
from mcore_rl.data.tokenize import TokenSequence, tokenize_prompt
from mcore_rl.errors import UserError
from mcore_rl.utils.progress import Say, silent


@dataclass(frozen=True)
class Prompt:
    """Token ids, the text or messages they come from, and the record's other fields."""

    input_ids: tuple[int, ...]
    content: str | Messages
    record: dict[str, Any]

    @property
    def message_log(self) -> list[dict[str, str]]:
        """The prompt as messages; a plain text becomes a message of the user."""
        return [{"role": "user", "content": self.content}] if isinstance(self.content, str) else list(self.content)


class StoredPrompts(Sequence[Prompt]):
    """The prompts of a store, each made when it is asked for."""

    def __init__(self, store: TokenStore) -> None:
        self.store = store

    def __len__(self) -> int:
        return len(self.store)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        ((sequence,), record) = self.store[index], json.loads(self.store.extra(index % len(self)))
        return Prompt(sequence.input_ids, record.pop("prompt"), record)


@dataclass(frozen=True)
class PromptDataset:
    """Prompts, and how many were left out for their length."""

    prompts: StoredPrompts

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def has_messages(self) -> bool:
        """Whether any prompt is a conversation."""
        return self.prompts.store.counts["messages"] > 0

    def describe(self, name: str, limit: int) -> str:
        """Describe the dataset in one line for the user."""
        store = self.prompts.store
        dropped = store.counts["dropped"]
        text = f"{name}: {len(self):,} prompts, {store.num_tokens:,} tokens"
        text += f", {dropped:,} dropped (longer than {limit} tokens)" if dropped else ""
        return text + described_shares(store)

    def order(self, seed: int) -> Order:
        """In which a run meets the prompts."""
        return self.prompts.store.order(seed)

    @property
    def fingerprint(self) -> str:
        """Hash of token ids and records."""
        return self.prompts.store.fingerprint


def load_prompt_dataset(
    source: Source,
    tokenizer: Any,
    data: DataConfig,
    max_prompt_length: int,
    say: Say = silent,
    valued: Sequence[str] = (),
    cache: TokenCache | None = None,
) -> PromptDataset:
    """Prompts from records `prompt` (a string or messages, with `tools` if there are any), with all else they have.

    What JSON has no form for (a table's dates) is text from here on.

    Args:
        valued: other keys that must not be null where a record has them.

    Raises:
        UserError: names the file and line of a bad record, or says that no prompt is short enough.
    """
    what = tokenization_of(
        data,
        f"prompts {sorted(valued)}",
        partial(_unit_of, valued=tuple(valued)),
        1,
        max_length=max_prompt_length,
        overlong="drop",
        needs_response=False,
        extra_of=_checked_record,
        seen_in=_kind_of,
    )
    store = load_store(source, tokenizer, data, what, say, cache)
    if not len(store):
        raise UserError(
            f"{named(source)}: no prompt is left ({store.counts['dropped']} longer than {max_prompt_length} tokens, "
            "which is data.max_sequence_length - max_new_tokens)"
        )
    return PromptDataset(StoredPrompts(store))


def _unit_of(tokenizer: Any, record: dict[str, Any], valued: Sequence[str]) -> Unit:
    require(record, "prompt", *[key for key in valued if key in record])
    input_ids = tokenize_prompt(tokenizer, _content_of(record), record.get("tools"))
    if not input_ids:
        raise ValueError("the prompt has no tokens")
    return (TokenSequence(input_ids, (False,) * len(input_ids)),)


def _content_of(record: dict[str, Any]) -> str | Messages:
    content = record["prompt"]
    return content if isinstance(content, str) else check_messages(content, "prompt")


def _checked_record(record: dict[str, Any]) -> dict[str, Any]:
    return {**record, "prompt": _content_of(record)}


def _kind_of(unit: Unit, record: dict[str, Any]) -> list[str]:
    return [] if isinstance(record["prompt"], str) else ["messages"]
