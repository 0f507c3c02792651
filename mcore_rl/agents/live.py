"""The text of a response while it is being sampled, in pieces that a client can show at once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from dataclasses import replace

from mcore_rl.agents.parsing import END_THINK, THINK, parse, pieces_of
from mcore_rl.agents.sessions import Call
from mcore_rl.agents.tree import SessionTree, Turn
from mcore_rl.data.token_texts import TokenTexts
from mcore_rl.models.generation.interfaces import Response

Piece = tuple[str, str]
"""A message's key ("content" or "reasoning_content") and a piece of its text, which is not empty."""


class LiveText:
    """Divides a growing response into pieces of text.

    Text that may become a part of a stop string or of a tag is held back until it is decided.
    """

    def __init__(self, tree: SessionTree, call: Call) -> None:
        self._tree, self._call = tree, call
        self._texts, self._text, self._sent = TokenTexts(tree.template.tokenizer), "", dict[str, str]()
        self._num_tokens = 0

    def pieces(self, part: Response) -> list[Piece]:
        """Return the new pieces after `part`, the next tokens of the response."""
        self._num_tokens += len(part.token_ids)
        self._text += "".join(map(self._texts.add, self._tree.ids_without_end(part)))
        marks = [*self._call.stops, *((THINK, END_THINK) if self._call.prompt.messages else ())]
        held = max((_overlap(self._text, mark) for mark in marks), default=0)
        return list(self._new(self._parsed(self._text[: len(self._text) - held])))

    def rest(self, turn: Turn) -> tuple[list[Piece], Response]:
        """Return the pieces and the tokens of the whole response that have not been sent yet."""
        start, response = self._num_tokens, turn.response
        part = replace(
            response,
            token_ids=response.token_ids[start:],
            logprobs=response.logprobs[start:],
            likeliest=response.likeliest[start:],
        )
        whole = {"content": self._tree.text_of(response, self._call.stops)}
        if turn.messages:
            whole = {key: turn.messages[-1].get(key) or "" for key in ("reasoning_content", "content")}
        if not all(whole[key].startswith(text) for key, text in self._sent.items()):
            # The decoder may decode invalid bytes in another way once further bytes follow.
            ids = self._tree.ids_without_end(part)
            self._text += "".join(self._texts.add(token, place == len(ids) - 1) for place, token in enumerate(ids))
            whole = self._parsed(self._text)
        return list(self._new(whole)), part

    def _parsed(self, text: str) -> dict[str, str]:
        text = text[: min((at for stop in self._call.stops if (at := text.find(stop)) >= 0), default=len(text))]
        if not self._call.prompt.messages:
            return {"content": text}
        parsed = parse(text, self._call.prompt.in_thought, None)
        return {"reasoning_content": parsed.thought or "", "content": parsed.content}

    async def all_pieces(
        self, parts: AsyncIterator[Response], turns: Awaitable[Sequence[Turn]]
    ) -> AsyncIterator[Piece]:
        """Yield the pieces of a response while it comes in `parts`, then the rest of the turn."""
        async for part in parts:
            for piece in self.pieces(part):
                yield piece
        (turn,) = await turns
        for piece in self.rest(turn)[0]:
            yield piece

    def _new(self, texts: dict[str, str]) -> Iterator[Piece]:
        for key, text in texts.items():
            sent = self._sent.get(key, "")
            if len(text) > len(sent) and text.startswith(sent):
                self._sent[key] = text
                yield from ((key, piece) for piece in pieces_of(text[len(sent) :]))


def _overlap(text: str, mark: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `mark`, but not all of it."""
    lengths: Sequence[int] = range(min(len(text), len(mark) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(mark[:length])), 0)


async def no_parts() -> AsyncIterator[Response]:
    """Yield no parts, for a response that is sent only when it is complete."""
    return
    yield
