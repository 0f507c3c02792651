"""A session's tree of tokens: the engine's inputs and its samples, each turn once.

The engine is given the tokens that the tree records, and the rows of the training batch are made of the same tokens. A
row is therefore always what the model read and sampled, whichever turn a request continues. Matching only decides how
many rows there are. In doubt, a request begins a new branch.

1. The prompt of a request is the context of its turn.
2. Sampled tokens are never tokenized again.
3. A row is a context and the response to it.
4. Each delivered sampled token carries loss in exactly one row; tokens that were not delivered carry none.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from mcore_rl.agents.messages import Message, ids_of_calls, images_in, key_of, make_call, thought_of
from mcore_rl.agents.parsing import CallForm, Parsed, parse
from mcore_rl.agents.session_images import SessionImages
from mcore_rl.agents.templates import ChatTemplate
from mcore_rl.data.images import PlacedImage, moved
from mcore_rl.data.texts import prompt_text_tokens
from mcore_rl.distributed.sampling_mask import KeptTokens
from mcore_rl.models.generation.interfaces import Response
from mcore_rl.rollouts.samples import Numbers, TokenRow

History = Literal["template", "keep"]


@dataclass(frozen=True)
class TurnPrompt:
    """The prompt of a request.

    parent: turn that the request continues; None if it begins a new branch at the root.
    kept: number of tokens of the parent's response that are in the context; all, or all but the end token.
    new_ids: tokens after the parent's response.
    text: what the template wrote up to the response; the client's text for requests without messages.
    messages: all messages, with the thoughts that the client has dropped; empty for requests without messages.
    in_thought: whether the response continues a thought that the template has begun.
    new_images: the images among `new_ids`; their starts are counted from the first of these.
    """

    parent: Turn | None
    kept: int
    new_ids: list[int]
    text: str
    messages: list[Message]
    tools: Any
    in_thought: bool
    form: CallForm | None
    new_images: tuple[PlacedImage, ...] = ()

    def _earlier(self) -> Iterator[tuple[Turn, int]]:
        """Yield the turns of the context, each with the number of its response's tokens that are in the context."""
        path = self.parent.path if self.parent else []
        ends = [*(turn.prompt.kept for turn in path[1:]), self.kept]
        yield from zip(path, ends[: len(path)], strict=True)

    @property
    def images(self) -> tuple[PlacedImage, ...]:
        """The images among `ids`."""
        images, length = list[PlacedImage](), 0
        for turn, end in self._earlier():
            images += placed_after(turn.prompt.new_images, length)
            length += len(turn.prompt.new_ids) + end
        return (*images, *placed_after(self.new_images, length))

    @property
    def ids(self) -> list[int]:
        """All tokens that the engine is given."""
        ids = list[int]()
        for turn, end in self._earlier():
            ids += [*turn.prompt.new_ids, *turn.response.token_ids[:end].tolist()]
        return ids + self.new_ids


@dataclass(eq=False)
class Turn:
    """A response, and the prompt that it answers.

    messages: the prompt's messages and the response; empty for requests without messages.
    stops: the stop strings of the request.
    is_delivered: False if the response did not reach the program.
    """

    number: int
    prompt: TurnPrompt
    response: Response
    messages: list[Message]
    stops: Sequence[str] = ()
    is_delivered: bool = True

    @property
    def path(self) -> list[Turn]:
        """The turns from the root to this one."""
        path, turn = list[Turn](), self
        while turn is not None:
            path.append(turn)
            turn = turn.prompt.parent  # type: ignore[assignment]
        return path[::-1]


class SessionTree:
    """The turns of a session.

    counts: numbers of requests that continue a turn ("extended"), that begin a branch because the template or the
        program rewrote earlier turns ("rewritten"), and others ("new").

    Args:
        history: template: a request continues a turn only if the template writes this turn's response as it was
            sampled. keep: it continues the turn always, so that thoughts stay in the context that the template would
            remove.
        images: the session's images; None if it has none.
    """

    def __init__(
        self, template: ChatTemplate, history: History = "template", images: SessionImages | None = None
    ) -> None:
        self.template, self.history, self.images = template, history, images
        self.turns: list[Turn] = []
        self.counts = Counter[str]()
        self._by_messages: dict[tuple[str, ...], list[Turn]] = defaultdict(list)

    # ------------------------------------------------------------ requests

    def prompt(self, messages: Sequence[Message], tools: Any = None) -> TurnPrompt:
        """Return the prompt of a request with these messages.

        Raises:
            BadRequest: the chat template fails.
        """
        keys = (_tools_key(tools), *map(key_of, messages))
        full, is_rewritten = list(messages), False
        for length in range(len(messages), 0, -1):
            for turn in self._candidates(keys[: length + 1], messages[:length]):
                found = self._continued(turn, messages[length:], tools)
                if found is not None:
                    self.counts["extended"] += 1
                    return found
                if not is_rewritten:  # the longest match: its messages have the thoughts that the client dropped
                    is_rewritten, full = True, [*turn.messages, *messages[length:]]
        text = self.template.render(full, tools)
        self.template.check_responses(full)
        ids, images = self.template.placed(text, self._images_of(full))
        self.counts["rewritten" if is_rewritten else "new"] += 1
        return self._of_ids(ids, text, full, tools, images)

    def _images_of(self, messages: Sequence[Message]) -> list[PlacedImage]:
        parts = images_in(messages)
        assert self.images is not None or not parts, "only sessions with images take image parts"
        return [self.images[part["image"]] for part in parts] if self.images is not None else []

    def prompt_of_text(self, prompt: str | Sequence[int]) -> TurnPrompt:
        """Return the prompt of a request without messages: a text, or token ids.

        A text continues the turn whose texts it repeats. Because the client's text has no end token, the context does
        not have it either.
        """
        if not isinstance(prompt, str):
            self.template.check_text(prompt)
            return self._of_ids(list(prompt), "", [], None)
        best, length = None, 0
        for turn in self.delivered():
            whole = turn.prompt.text + self.template.text(self._without_end(turn))
            if turn.prompt.text and not turn.messages and prompt.startswith(whole) and len(whole) >= length:
                best, length = turn, len(whole)
        if best is None:
            ids = prompt_text_tokens(self.template.tokenizer, prompt).input_ids
            self.template.check_text(ids)
            return self._of_ids(list(ids), prompt, [], None)
        new = self.template.ids(prompt[length:])
        self.template.check_text(new)
        return TurnPrompt(best, len(self._without_end(best)), new, prompt, [], None, False, None)

    def _without_end(self, turn: Turn) -> list[int]:
        return self.ids_without_end(turn.response)

    def ids_without_end(self, response: Response) -> list[int]:
        """Return the tokens of a response without its end token."""
        ids: list[int] = response.token_ids.tolist()
        return ids[:-1] if ids and ids[-1] in self.template.ends else ids

    def _candidates(self, keys: tuple[str, ...], messages: Sequence[Message]) -> list[Turn]:
        """Return the turns whose messages are these, the likeliest first.

        Turns with the same ids of tool calls come first, then newer ones. A client that sends thoughts must send those
        of the turn; a client that sends none matches.
        """
        found = [
            turn
            for turn in self._by_messages.get(keys, ())
            if all(thought_of(told) in ("", thought_of(own)) for told, own in zip(messages, turn.messages, strict=True))
        ]
        calls = ids_of_calls(messages[-1])
        return sorted(found, key=lambda turn: (ids_of_calls(turn.messages[-1]) == calls, turn.number), reverse=True)

    def _continued(self, turn: Turn, new: Sequence[Message], tools: Any) -> TurnPrompt | None:
        """Return the prompt that continues a turn by new messages; None if the template writes the turn differently."""
        full, template = [*turn.messages, *new], self.template
        text = template.render(full, tools)
        after = template.after_response(full, len(turn.messages) - 1, tools)
        if after is None or (self.history == "template" and not self._repeats(turn, text, after)):
            return None
        ids, images = template.placed(after, self._images_of(new))
        response = turn.response.token_ids
        if len(response) and ids and ids[0] == response[-1] and ids[0] in template.ends:
            ids, images = ids[1:], placed_after(images, -1)  # the response has sampled its end token
        in_thought, form = template.begins_thought(text), template.call_form(tools)
        return TurnPrompt(turn, len(response), ids, text, full, tools, in_thought, form, images)

    def _repeats(self, turn: Turn, text: str, after: str) -> bool:
        """Return whether the text of a longer conversation has the text of a turn, with the response as it was."""
        fits = len(turn.prompt.text) + len(after) <= len(text)
        if not (text.startswith(turn.prompt.text) and text.endswith(after) and fits):
            return False
        written = parse(text[len(turn.prompt.text) : len(text) - len(after)], turn.prompt.in_thought, turn.prompt.form)
        own = turn.messages[-1]
        shown = message_of(written)
        keeps_thought = (written.thought is None) == ("reasoning_content" not in own)  # also an empty thought
        return keeps_thought and key_of(shown) == key_of(own) and thought_of(shown) == thought_of(own)

    def _of_ids(
        self,
        ids: list[int],
        text: str,
        messages: list[Message],
        tools: Any,
        images: tuple[PlacedImage, ...] = (),
    ) -> TurnPrompt:
        """Return the prompt with these tokens. If they begin with all tokens of a turn, the prompt continues it."""
        parent, length = None, 0
        equal = dict[Turn | None, tuple[int, int]]({None: (0, 0)})
        """For each turn whose context `ids` begins with: the context's length, and that of the equal response part."""
        for turn in self.turns:
            before, same = equal.get(turn.prompt.parent, (0, -1))
            new, response = turn.prompt.new_ids, turn.response.token_ids.tolist()
            start = before + turn.prompt.kept
            end, whole = start + len(new), start + len(new) + len(response)
            if same >= turn.prompt.kept and ids[start:end] == new and _same_images(images, turn.prompt, start, end):
                equal[turn] = end, _common(ids[end:whole], response)
                if turn.is_delivered and ids[end:whole] == response and length < whole < len(ids):
                    parent, length = turn, whole
        kept = len(parent.response.token_ids) if parent else 0
        in_thought, form = self.template.begins_thought(text), self.template.call_form(tools)
        own = moved(images, length, len(ids), -length)
        return TurnPrompt(parent, kept, ids[length:], text, messages, tools, in_thought, form, own)

    # ------------------------------------------------------------ responses

    def text_of(self, response: Response, stops: Sequence[str] = ()) -> str:
        """Return the text of a response, without its end token and without the stop string that has ended it."""
        text = self.template.text(self.ids_without_end(response))
        found = [at for stop in stops if response.ended and (at := text.find(stop)) >= 0]
        return text[: min(found)] if found else text

    def add(
        self,
        prompt: TurnPrompt,
        response: Response,
        make_id: Callable[[], str] = str,
        stops: Sequence[str] = (),
    ) -> Turn:
        """Add the response to a prompt; return its turn.

        Args:
            make_id: returns a new id for a tool call.
            stops: the stop strings of the request.
        """
        messages = list[Message]()
        if prompt.messages:
            parsed = parse(self.text_of(response, stops), prompt.in_thought, prompt.form)
            messages = [*prompt.messages, message_of(parsed, make_id)]
        turn = Turn(len(self.turns), prompt, response, messages, stops)
        self.turns.append(turn)
        if messages:
            self._by_messages[_tools_key(prompt.tools), *map(key_of, messages)].append(turn)
        return turn

    def delivered(self) -> list[Turn]:
        """Return the turns whose responses have reached the program, in the order of the responses."""
        return [turn for turn in self.turns if turn.is_delivered]

    def discard(self, turn: Turn) -> None:
        """Record that a response did not reach the program: no request continues it, and it is not trained on."""
        turn.is_delivered = False
        for turns in self._by_messages.values():
            if turn in turns:
                turns.remove(turn)

    # ------------------------------------------------------------ rows

    def rows(self) -> list[TokenRow]:
        """Return a row for each delivered turn that no other delivered turn continues with its whole response.

        The rows have the order of these turns. A turn that several rows share carries loss in the first of them.
        """
        counted = dict.fromkeys(self.delivered(), 0)
        return [_row(turn, counted) for turn in self._leaves()]

    def _leaves(self) -> list[Turn]:
        """Return the last turn of each row."""
        delivered = self.delivered()
        continued = {
            turn.prompt.parent
            for turn in delivered
            if turn.prompt.parent and turn.prompt.kept == len(turn.prompt.parent.response.token_ids)
        }
        return [turn for turn in delivered if turn not in continued]

    def logged(self) -> list[dict[str, Any]]:
        """Return the turns for samples.jsonl, in the order of the responses.

        A turn has the index of the turn whose messages its own messages continue (`parent`), the messages that follow
        these, with the response as the last one, whether its tokens continue the parent's too (`extends`), the numbers
        of new prompt tokens and of sampled tokens, whether the response ended by itself, and the number of the row in
        which it carries loss; null if it did not reach the program.
        """
        row_of = dict[Turn, int]()
        for row, leaf in enumerate(self._leaves()):
            for turn in leaf.path:
                row_of.setdefault(turn, row)
        by_keys, keys, logged = dict[tuple[str, ...], Turn](), dict[int, str](), list[dict[str, Any]]()
        for turn in self.turns:
            # Turns share the messages that they have in common.
            keys |= {id(message): key_of(message) for message in turn.messages if id(message) not in keys}
            own = tuple(keys[id(message)] for message in turn.messages)
            own_row = row_of.get(turn) if turn.is_delivered else None
            logged.append(self._logged(turn, own, by_keys) | {"row": own_row})
            if turn.is_delivered and own:
                by_keys[own] = turn
        return logged

    def _logged(self, turn: Turn, keys: tuple[str, ...], by_keys: Mapping[tuple[str, ...], Turn]) -> dict[str, Any]:
        """Return the entry of a turn.

        Args:
            keys: keys of its messages; none for a request without messages.
            by_keys: the earlier turns by the keys of their messages.
        """
        messages, parent = self.messages_of(turn), turn.prompt.parent
        if keys:  # the longest conversation that this one continues, with the same or with rewritten tokens
            known = next((n for n in range(len(keys) - 1, 0, -1) if keys[:n] in by_keys), 0)
            parent = parent if parent is not None and len(parent.messages) == known else by_keys.get(keys[:known])
            messages = messages[known:]
        elif parent is not None:
            before = "".join(message["content"] for message in self.messages_of(parent))
            messages = [{**messages[0], "content": messages[0]["content"].removeprefix(before)}, messages[1]]
        return {
            "parent": None if parent is None else parent.number,
            "extends": parent is not None and parent is turn.prompt.parent,
            "messages": messages,
            "prompt_tokens": len(turn.prompt.new_ids),
            "sampled_tokens": len(turn.response.token_ids),
            "ended": turn.response.ended,
        }

    def messages_of(self, turn: Turn) -> list[Message]:
        """Return the messages of a request and its response; for a request without messages, its text as a message."""
        if turn.messages:
            return turn.messages
        prompt = turn.prompt.text or self.template.text(turn.prompt.ids)
        answer = self.text_of(turn.response, turn.stops)
        return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def _row(leaf: Turn, counted: dict[Turn, int]) -> TokenRow:
    """Return the row of a turn.

    Args:
        counted: for each turn, the number of its response's tokens that carry loss in earlier rows; updated.
    """
    path, kept, length = leaf.path, KeptTokens.none(0), 0
    ids, mask, logprobs, images = list[Numbers](), list[Numbers](), list[Numbers](), list[PlacedImage]()
    has_kept = any(turn.response.kept_tokens is not None for turn in path)
    ends = [*(turn.prompt.kept for turn in path[1:]), len(leaf.response.token_ids)]
    for turn, end in zip(path, ends, strict=True):
        prompt, response = turn.prompt.new_ids, turn.response
        first = min(counted.get(turn, 0), end)
        if turn in counted:
            counted[turn] = max(first, end)
        else:  # a response that was not delivered
            first = end
        unsampled = len(prompt) + first
        ids += [np.array(prompt, np.int32), response.token_ids[:end]]
        mask += [np.zeros(unsampled, bool), np.ones(end - first, bool)]
        logprobs += [np.zeros(unsampled, np.float32), response.logprobs[first:end]]
        images += placed_after(turn.prompt.new_images, length)
        length += len(prompt) + end
        if has_kept and response.kept_tokens is not None:
            own, _ = response.kept_tokens.split([end, len(response.token_ids) - end])
            kept = kept.padded(length - end) + own
    row = TokenRow(np.concatenate(ids), np.concatenate(mask), np.concatenate(logprobs))
    row.kept_tokens = kept if has_kept else None
    row.choices, row.images = leaf.response.choices, tuple(images)
    return row


def placed_after(images: Sequence[PlacedImage], by: int) -> tuple[PlacedImage, ...]:
    """Return images, each shifted by `by` tokens."""
    return tuple(replace(image, start=image.start + by) for image in images)


def _same_images(images: Sequence[PlacedImage], prompt: TurnPrompt, start: int, end: int) -> bool:
    """Return whether the tokens `start` … `end` − 1 have the images of a prompt, whose tokens they equal."""
    own = moved(images, start, end, -start)
    return [(i.start, i.identity) for i in own] == [(i.start, i.identity) for i in prompt.new_images]


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common beginning of two lists."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def message_of(parsed: Parsed, make_id: Callable[[], str] = str) -> Message:
    """Return a response as a message of the assistant."""
    message: Message = {"role": "assistant", "content": parsed.content}
    if parsed.thought is not None:
        message["reasoning_content"] = parsed.thought
    if parsed.calls:
        message["tool_calls"] = [make_call(name, arguments, make_id()) for name, arguments in parsed.calls]
    return message


def _tools_key(tools: Any) -> str:
    return json.dumps(tools or None, sort_keys=True)
