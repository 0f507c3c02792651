"""JSON in which nothing is lost or replaced without a word."""

from __future__ import annotations

import json
import re
from typing import Any

SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is not JSON, a key stands twice in an object, or a text has half a character, which
            tokenizers refuse.
    """
    value = json.loads(text, object_pairs_hook=_unique)
    if SURROGATE.search(text):  # two halves of a character become one
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = ord(error.object[error.start])
            raise ValueError(f"\\u{half:04x} is half a character (a surrogate without its other half)") from None
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in found if keys.count(key) > 1)
        raise ValueError(f"the key {repeated} stands twice in an object")
    return found
