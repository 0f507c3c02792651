"""The text of a response while it is being sampled, in pieces that a client can show at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mcore_rl.agents.parsing import END_THINK, THINK, parse
from mcore_rl.agents.sessions import Call
from mcore_rl.agents.tree import SessionTree, Turn
from mcore_rl.models.generation.interfaces import Response

INCOMPLETE = "\ufffd"
"""Character in place of the bytes of an incomplete character."""


class LiveText:
    """Divides a growing response into pieces of text.

    Text that may become a part of a stop string or of a tag is held back until it is decided.
    """

    def __init__(self, tree: SessionTree, call: Call) -> None:
        self._tree, self._call = tree, call
        self._sent = dict[str, str]()
        self.sent_tokens = 0
        """Number of tokens for which `pieces` was called last."""

    def pieces(self, response: Response) -> list[tuple[str, str]]:
        """Return new pieces as pairs of a message's key ("content" or "reasoning_content") and its text."""
        prompt, self.sent_tokens = self._call.prompt, len(response.token_ids)
        text = self._tree.text_of(response, self._call.stops).rstrip(INCOMPLETE)
        marks = [*self._call.stops, *((THINK, END_THINK) if prompt.messages else ())]
        held = 0 if response.ended else max((_overlap(text, mark) for mark in marks), default=0)
        text = text[: len(text) - held]
        text = text[: min((at for stop in self._call.stops if (at := text.find(stop)) >= 0), default=len(text))]
        if not prompt.messages:
            return list(self._new({"content": text}))
        parsed = parse(text, prompt.in_thought, None)
        return list(self._new({"reasoning_content": parsed.thought or "", "content": parsed.content}))

    def rest(self, turn: Turn) -> list[tuple[str, str]]:
        """Return what of the whole response has not been sent yet."""
        self.sent_tokens = len(turn.response.token_ids)
        if not turn.messages:
            return list(self._new({"content": self._tree.text_of(turn.response, self._call.stops)}))
        message = turn.messages[-1]
        return list(self._new({key: message.get(key) or "" for key in ("reasoning_content", "content")}))

    def _new(self, texts: dict[str, str]) -> Iterator[tuple[str, str]]:
        for key, text in texts.items():
            sent = self._sent.get(key, "")
            if len(text) > len(sent) and text.startswith(sent):
                self._sent[key] = text
                yield key, text[len(sent) :]


def _overlap(text: str, mark: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `mark`, but not all of it."""
    lengths: Sequence[int] = range(min(len(text), len(mark) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(mark[:length])), 0)
