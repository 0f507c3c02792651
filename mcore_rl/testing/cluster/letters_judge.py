"""The judge of the GRPO part: it rewards letters, because responses of an untrained model differ in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def judge(message_log: Sequence[Mapping[str, Any]], record: Mapping[str, Any]) -> float:
    """Return the fraction of the response's characters that are letters; 0 for an empty response."""
    text = str(message_log[-1]["content"])
    return sum(character.isalpha() for character in text) / max(len(text), 1)
