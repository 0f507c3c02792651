"""The texts and bytes of single tokens, as parts of the text of all tokens."""

from __future__ import annotations

import re
from functools import cache

from transformers.convert_slow_tokenizer import bytes_to_unicode

from mcore_rl.agents.templates import ChatTemplate

INCOMPLETE = "\ufffd"
"""Character in place of the bytes of an incomplete character."""
MOST_BEGUN = 16
"""Number of tokens after which bytes that are still no character are taken for bytes that never become one."""
CONTEXT = 8
"""Number of earlier tokens that are decoded with a token, because its text can depend on them."""
BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""A byte in the vocabulary of SentencePiece."""


class TokenTexts:
    """Divides the text of consecutive tokens among them.

    The tokens' texts, one after another, are the whole text. A space that the tokenizer writes between two tokens
    belongs to the second. A character whose bytes are those of several tokens belongs to the last; the others have the
    text "".

    Attributes:
        length: number of characters of the texts so far.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template, self.length = template, 0
        self._before, self._begun = list[int](), list[int]()
        self._text_before = ""

    def add(self, token: int, is_last: bool = False) -> str:
        """Return the text of the next token.

        Args:
            is_last: whether no token follows. An incomplete character then has the text `INCOMPLETE`.
        """
        self._begun.append(token)
        text = self._after(self._begun)
        if text.endswith(INCOMPLETE) and len(self._begun) < MOST_BEGUN and not is_last:
            return ""
        self._before, self._begun = [*self._before, *self._begun][-CONTEXT:], []
        self._text_before = self._template.text(self._before)
        self.length += len(text)
        return text

    def of_next(self, token: int) -> str:
        """Return the text of a token, if it were the next one."""
        return self._template.text([token]) if self._begun else self._after([token])

    def bytes_of(self, token: int, text: str) -> list[int] | None:
        """Return the bytes of a token that has this text; None if the vocabulary does not tell them."""
        alone = self._template.text([token])
        if INCOMPLETE not in alone:
            return list((alone if INCOMPLETE in text else text).encode())
        written = str(self._template.tokenizer.convert_ids_to_tokens(token))
        if (byte := BYTE.fullmatch(written)) is not None:
            return [int(byte[1], 16)]
        bytes_by_character = _bytes_by_character()
        return None if set(written) - bytes_by_character.keys() else [bytes_by_character[c] for c in written]

    def _after(self, tokens: list[int]) -> str:
        whole = self._template.text([*self._before, *tokens])
        if whole.startswith(self._text_before):
            return whole[len(self._text_before) :]
        return self._template.text(tokens)


@cache
def _bytes_by_character() -> dict[str, int]:
    """Return the bytes that the characters of byte-level vocabularies stand for."""
    return {character: byte for byte, character in bytes_to_unicode().items()}
