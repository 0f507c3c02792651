"""The texts and bytes of single tokens, as parts of the text of all tokens."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from functools import cache
from typing import Any

INCOMPLETE = "\ufffd"
"""Character in place of the bytes of an incomplete character."""
LONGEST_CHARACTER = 4
"""Maximum number of bytes, and so of tokens, of a character."""
MOST_BEGUN = 16
"""Number of tokens after which bytes that are still no character are taken for bytes that never become one."""
CONTEXT = 4
"""Number of earlier texts that are decoded with a token, because its own text can depend on them."""
BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""A byte in the vocabulary of SentencePiece."""


def text_of_tokens(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the text of tokens, special tokens included."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


class TokenTexts:
    """Divides the text of consecutive tokens among them.

    The tokens' texts, one after another, are the whole text, as long as their bytes are characters. A space that the
    tokenizer writes between two tokens belongs to the second. A character whose bytes are those of several tokens
    belongs to the last; the others have the text "".

    Attributes:
        length: number of characters of the texts so far.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.length = tokenizer, 0
        # Tokens of one or more whole characters each: a decoder may not read bytes from the middle of a character.
        self._before = deque[list[int]](maxlen=CONTEXT)
        self._begun = list[int]()
        self._text_before = ""

    def add(self, token: int, is_last: bool = False) -> str:
        """Return the text of the next token.

        Args:
            is_last: whether no token follows. An incomplete character then has the text `INCOMPLETE`.
        """
        self._begun.append(token)
        text = self._after(self._begun)
        if not text.endswith(INCOMPLETE) or is_last:
            return self._complete(self._begun, [], text)
        if len(self._begun) < MOST_BEGUN:
            return ""
        kept = 1 - LONGEST_CHARACTER  # the last tokens may still become a character
        return self._complete(self._begun[:kept], self._begun[kept:], self._after(self._begun[:kept]))

    def _complete(self, tokens: list[int], begun: list[int], text: str) -> str:
        if text:  # tokens without a text change no other text
            self._before.append(tokens)
            self._text_before = self._decoded([])
        self._begun = begun
        self.length += len(text)
        return text

    def of_next(self, token: int) -> str:
        """Return the text of a token, if it were the next one."""
        return text_of_tokens(self._tokenizer, [token]) if self._begun else self._after([token])

    def bytes_of(self, token: int, text: str) -> list[int] | None:
        """Return the bytes of a token that has this text; None if the vocabulary does not tell them."""
        alone = text_of_tokens(self._tokenizer, [token])
        if INCOMPLETE not in alone:
            return list((alone if INCOMPLETE in text else text).encode())
        written = str(self._tokenizer.convert_ids_to_tokens(token))
        if (byte := BYTE.fullmatch(written)) is not None:
            return [int(byte[1], 16)]
        bytes_by_character = _bytes_by_character()
        return None if set(written) - bytes_by_character.keys() else [bytes_by_character[c] for c in written]

    def _decoded(self, tokens: list[int]) -> str:
        return text_of_tokens(self._tokenizer, [*(token for group in self._before for token in group), *tokens])

    def _after(self, tokens: list[int]) -> str:
        whole = self._decoded(tokens)
        if whole.startswith(self._text_before):
            return whole[len(self._text_before) :]
        return text_of_tokens(self._tokenizer, tokens)


@cache
def _bytes_by_character() -> dict[str, int]:
    """Return the bytes that the characters of byte-level vocabularies stand for."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode  # takes seconds, and few programs need it

    return {character: byte for byte, character in bytes_to_unicode().items()}
