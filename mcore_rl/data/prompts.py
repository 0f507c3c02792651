"""Prompt records: a prompt to answer, and what the environment needs to judge the answer."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mcore_rl.config import DataConfig
from mcore_rl.data.messages import Messages, check_messages
from mcore_rl.data.progress import Say, silent, with_progress
from mcore_rl.data.reading import read_records, record_place, require
from mcore_rl.data.tokenize import tokenize_prompt
from mcore_rl.errors import UserError


@dataclass(frozen=True)
class Prompt:
    """Token ids, the text or messages they come from, and the record's other fields."""

    input_ids: tuple[int, ...]
    content: str | Messages
    record: dict[str, Any]

    @property
    def message_log(self) -> list[dict[str, str]]:
        """As messages; a plain text is one of the user's."""
        return [{"role": "user", "content": self.content}] if isinstance(self.content, str) else list(self.content)


@dataclass(frozen=True)
class PromptDataset:
    """Prompts, and how many were left out for their length."""

    prompts: list[Prompt]
    num_dropped: int = 0

    def __len__(self) -> int:
        return len(self.prompts)

    def describe(self, name: str, limit: int) -> str:
        """One line for the user."""
        text = f"{name}: {len(self):,} prompts, {sum(len(p.input_ids) for p in self.prompts):,} tokens"
        return text + (f", {self.num_dropped:,} dropped (longer than {limit} tokens)" if self.num_dropped else "")

    @cached_property
    def fingerprint(self) -> str:
        """Hash of token ids and records."""
        digest = hashlib.sha256()
        for prompt in self.prompts:
            digest.update(array("q", [len(prompt.input_ids), *prompt.input_ids]).tobytes())
            digest.update(json.dumps(prompt.record, sort_keys=True, default=str).encode())
        return digest.hexdigest()


def load_prompt_dataset(
    source: str, tokenizer: Any, data: DataConfig, max_prompt_length: int, say: Say = silent, valued: Sequence[str] = ()
) -> PromptDataset:
    """Prompts from records `prompt` (a string or messages, with `tools` if there are any), with all else they have.

    Args:
        valued: other keys that must not be null where a record has them.

    Raises:
        UserError: names the file and line of a bad record, or says that no prompt is short enough.
    """
    prompts, dropped = [], 0
    for index, record in enumerate(with_progress(read_records(source), f"tokenizing {source}", say)):
        try:
            require(record, "prompt", *[key for key in valued if key in record])
            prompt = _prompt_of(tokenizer, record)
        except ValueError as error:
            raise UserError(f"{record_place(source, index)}: {error}") from None
        if len(prompt.input_ids) > max_prompt_length:
            dropped += 1
        else:
            prompts.append(prompt)
    if not prompts:
        raise UserError(
            f"{source}: no prompt is left ({dropped} longer than {max_prompt_length} tokens, which is "
            "data.max_sequence_length - grpo.max_new_tokens)"
        )
    return PromptDataset(prompts, dropped)


def _prompt_of(tokenizer: Any, record: dict[str, Any]) -> Prompt:
    content = record["prompt"]
    if not isinstance(content, str):
        content = check_messages(content, "prompt")
    input_ids = tokenize_prompt(tokenizer, content, record.get("tools"))
    if not input_ids:
        raise ValueError("the prompt has no tokens")
    return Prompt(input_ids, content, {key: value for key, value in record.items() if key != "prompt"})
