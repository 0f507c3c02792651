"""Plain texts: the token ids of prompts, of responses after them, and of text that continues a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mcore_rl.data.chat import end_token_ids
from mcore_rl.data.token_store import TokenSequence
from mcore_rl.data.token_texts import text_of_tokens

ANCHORS = ("\n", ".", "a", "1")
"""Texts that are put before a text to tokenize it as a continuation."""

TEXT_NOTES = {
    "own_start": "the prompt begins with the tokenizer's start token, so no other is added",
    "own_end": "the response ends with an end token, so no other is added",
    "apart": "a token would span the end of the prompt and the start of the response; the two are tokenized separately",
    "inexact": "the tokenizer changes the text between prompt and response; --dry-run shows the text of the tokens",
}
"""Descriptions of how a text was tokenized. A store counts the records of each kind under the kind's name."""


def prompt_text_tokens(tokenizer: Any, text: str) -> TokenSequence:
    """Tokenize a prompt, with the tokenizer's start token before it unless the text begins with this token."""
    return _after_start_token(tokenizer, _ids(tokenizer, text))


def _after_start_token(tokenizer: Any, ids: Sequence[int]) -> TokenSequence:
    start = leading_special_tokens(tokenizer)
    if start and ids[: len(start)] == start:
        return TokenSequence(tuple(ids), (False,) * len(ids), ("own_start",))
    ids = [*start, *ids]
    return TokenSequence(tuple(ids), (False,) * len(ids))


def completed_text_tokens(tokenizer: Any, prompt: str, response: str) -> TokenSequence:
    """Tokenize a prompt and its response. The response and its end token are trained on.

    The ids of the prompt are those of the prompt alone, as in generation. If the ids of the whole text begin with them,
    the rest is the response. The end token is added unless the response ends with one; only white space may follow it,
    which is removed.
    """
    plain = _ids(tokenizer, prompt)
    context = _after_start_token(tokenizer, plain)
    ids, how = _continuation(tokenizer, prompt, plain, response)
    kept = _length_with_end(tokenizer, ids)
    ids, notes = (ids[:kept], ("own_end",)) if kept else ([*ids, tokenizer.eos_token_id] if ids else [], ())
    mask = (*context.token_mask, *(True for _ in ids))
    return TokenSequence((*context.input_ids, *ids), mask, (*context.notes, *how, *notes))


def continuation_ids(tokenizer: Any, before: str, text: str) -> list[int]:
    """Return the ids of `text` where it stands directly after `before`.

    Some tokenizers write a space before a text that they tokenize alone.
    """
    return _continuation(tokenizer, before, _ids(tokenizer, before), text)[0]


def _continuation(tokenizer: Any, before: str, context: list[int], text: str) -> tuple[list[int], tuple[str, ...]]:
    """Return the ids of `text` directly after `before`, whose ids are `context`, and the names of notes about them."""
    whole = _ids(tokenizer, before + text)
    if whole[: len(context)] == context:
        return whole[len(context) :], ()
    wanted, alone = text_of_tokens(tokenizer, whole), _ids(tokenizer, text)
    candidates = [alone]
    for anchor in ANCHORS:
        start, both = _ids(tokenizer, anchor), _ids(tokenizer, anchor + text)
        if both[: len(start)] == start:
            candidates.append(both[len(start) :])
    for ids in candidates:
        if text_of_tokens(tokenizer, [*context, *ids]) == wanted:
            return ids, ("apart",)
    return alone, ("inexact",)


def _length_with_end(tokenizer: Any, ids: Sequence[int]) -> int:
    """Return the number of `ids` through the end token that only white space follows; 0 if there is no such token."""
    length = len(ids)
    while length and ids[length - 1] not in end_token_ids(tokenizer):
        if text_of_tokens(tokenizer, ids[length - 1 : length]).strip():
            return 0
        length -= 1
    return length


def leading_special_tokens(tokenizer: Any) -> list[int]:
    """Return the special tokens that the tokenizer adds before a text: usually a start token, or none."""
    marked, plain = list(tokenizer("a")["input_ids"]), _ids(tokenizer, "a")
    for start in range(len(marked) - len(plain) + 1):
        if marked[start : start + len(plain)] == plain:
            return marked[:start]
    return []


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
