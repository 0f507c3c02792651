"""Responses in a rendered conversation: the place of each message in the text, and the mask of trained tokens."""

from __future__ import annotations

import itertools
import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mcore_rl.data.chat import (
    GENERATION_MARKER,
    Message,
    Messages,
    apply_template,
    check_image_tokens,
    end_token_ids,
    function_of,
    has_images,
    is_prefill,
    render,
    special_token_ids,
    template_of,
    text_of,
    unused_character,
    with_function,
    with_text,
)
from mcore_rl.data.readers import parse_json

LONG = 30


@dataclass(frozen=True)
class Span:
    """The place of a response in a rendered conversation: the characters `start` … `end` − 1."""

    start: int
    end: int
    has_end_token: bool


def tokenize_conversation(
    tokenizer: Any, messages: Messages, wanted: Sequence[int], tools: Any = None, prefill: str = ""
) -> tuple[list[int], list[bool]]:
    """Return token ids and mask of a conversation, up to the end of its last trained response.

    The mask is True for the tokens of the messages to train on.

    Args:
        wanted: indices of the assistant's messages to train on.
        prefill: beginning of the content of the first of these messages that is not trained on.

    Raises:
        ValueError: the template fails or omits a message, or a response cannot be found in the template's output.
    """
    chat = RenderedChat(tokenizer, messages, tools)
    check_shown(chat)
    if GENERATION_MARKER.search(template_of(tokenizer, tools)):
        ids, mask, is_ended = *_by_markers(chat, wanted), True
    else:
        ids, mask, is_ended = _by_marks(chat, wanted)
    if prefill:
        offsets = tokenizer(chat.text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        start = chat.prefill_end(wanted[0], prefill)
        mask = [trained and stop > start for trained, (_, stop) in zip(mask, offsets, strict=True)]
    length = max((position for position, trained in enumerate(mask) if trained), default=-1) + 1
    ids, mask = ids[:length], mask[:length]
    if not is_ended and length:  # the template writes no end token
        ids, mask = [*ids, tokenizer.eos_token_id], [*mask, True]
    return ids, mask


def render_prompt(tokenizer: Any, messages: Messages, tools: Any = None) -> str:
    """Return the text of a conversation, and after it the text by which the template requests a response.

    If the conversation ends with the beginning of a response, its turn stays open, so that the response continues it.

    Raises:
        ValueError: the template fails or omits a part of the conversation, or the conversation ends with tool calls.
    """
    check_shown(RenderedChat(tokenizer, messages, tools))
    if is_prefill(messages):
        return str(apply_template(tokenizer, messages, tools, tokenize=False, continue_final_message=True))
    if messages and messages[-1]["role"] == "assistant":
        raise ValueError(
            f"prompt, message {len(messages)}: ends the prompt with tool calls; add their results as messages of the "
            "role tool"
        )
    return render(tokenizer, messages, tools, add_generation_prompt=True)


@dataclass(frozen=True)
class RenderedChat:
    """A conversation and its rendered `text`.

    It finds messages in the text by rendering the conversation again, with an unused character (a mark) in a message.
    All positions are indices of characters in `text`. Messages are numbered from 0, except in errors.
    """

    tokenizer: Any
    messages: Messages
    tools: Any

    @cached_property
    def text(self) -> str:
        return render(self.tokenizer, self.messages, self.tools)

    @cached_property
    def mark(self) -> str:
        """A character that the text does not contain."""
        return unused_character(self.text)

    def name(self, index: int) -> str:
        return f"message {index + 1} ({self.messages[index]['role']})"

    def first(self, count: int) -> RenderedChat:
        """Return the conversation's first `count` messages."""
        return self if count == len(self.messages) else RenderedChat(self.tokenizer, self.messages[:count], self.tools)

    def with_message(self, index: int, message: Message) -> str:
        """Render the conversation with another message at `index`."""
        return render(self.tokenizer, [*self.messages[:index], message, *self.messages[index + 1 :]], self.tools)

    def content_start(self, index: int) -> int | None:
        """Return the position where the content of a message starts.

        Return None if the message has no content, or if the text before it depends on the content.
        """
        if not has_content(self.messages[index]):
            return None
        before, found, _ = self.with_message(index, {**self.messages[index], "content": self.mark}).partition(self.mark)
        return len(before) if found and self.text.startswith(before) else None

    def prefill_end(self, index: int, prefill: str) -> int:
        """Return the position after `prefill`, with which the content of a message begins.

        Raises:
            ValueError: the text before this position depends on the rest of the content.
        """
        message = self.messages[index]
        content = prefill + self.mark + message["content"][len(prefill) :]
        before, found, _ = self.with_message(index, {**message, "content": content}).partition(self.mark)
        if not found or not self.text.startswith(before):
            raise ValueError(
                f"the chat template rewrites the beginning of {self.name(index)}, with which the prompt ends; end the "
                "prompt with a message of the user"
            )
        return len(before)

    def end(self, index: int) -> int:
        """Return the position after the last content or tool call of a message, before the text that closes its turn.

        With tool calls, text that closes the last call may follow.

        Raises:
            ValueError: the template writes the message not at all, several times, or differently after a change.
        """
        return max(self._end_of(index, part) for part in _marked_parts(self.messages[index], self.mark))

    def _end_of(self, index: int, alternatives: Sequence[Message]) -> int:
        """Return where the mark in one of the `alternatives` to a message is inserted into the text."""
        once = False
        for message in alternatives:
            changed = self.with_message(index, message)
            if changed.count(self.mark) != 1:
                continue
            once = True
            after = _shared(self.text[::-1], changed[::-1])
            end = len(self.text) - after
            if changed.startswith(self.text[:end]):  # otherwise the mark changes other text
                return end
        if not once:
            raise ValueError(f"the chat template must write message {index + 1} exactly once")
        raise ValueError(
            f"the chat template changes the text around {self.name(index)} when only this message changes; mark "
            "responses with {% generation %} in the template"
        )

    def closing(self, count: int) -> str:
        """Return the text after the end of message `count` − 1 in the conversation of the first `count` messages."""
        chat = self.first(count)
        return chat.text[chat.end(count - 1) :]

    def turn_start(self, index: int) -> int | None:
        """Return the position where the turn of a message starts, before its header; None if it cannot be found."""
        try:
            history = self.first(index).text
            if self.text.startswith(history):
                return len(history)
            closing, end = self.closing(index), self.end(index - 1)
        except ValueError:
            return None
        return end + len(closing) if self.text.startswith(closing, end) else None

    def response_start(self, index: int) -> int:
        """Return the position where a response starts, after its header.

        The header is the generation prompt, or as much of its beginning as the text contains. For example, the prompt
        may end with a tag that opens a thought, but the text has no such tag. Without a header, the response starts
        with its content.

        Raises:
            ValueError: the response has neither a header nor a content that can be found.
        """
        asked = self._asked(index)
        if asked is not None and self.text.startswith(asked):
            return len(asked)
        found = (self._header_end(index, asked), self.content_start(index))
        known = [position for position in found if position is not None]
        if not known:
            raise ValueError(
                f"the chat template changes the text before {self.name(index)} when only this message changes; mark "
                "responses with {% generation %} in the template"
            )
        return min(known)

    def _asked(self, index: int) -> str | None:
        """Return the text of the earlier messages with a generation prompt; None if the template cannot render it."""
        if not index:
            return None
        try:
            return render(self.tokenizer, self.messages[:index], self.tools, add_generation_prompt=True)
        except ValueError:
            return None

    def _header_end(self, index: int, asked: str | None) -> int | None:
        """Return the end of the part of the generation prompt with which a turn begins; None if there is none."""
        if asked is None:
            return None
        start = self.turn_start(index)
        if start is None or not asked.startswith(history := self.first(index).text):
            return None
        header = asked[len(history) :]
        shared = _shared(header, self.text[start:])
        offsets = self.tokenizer(header, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        whole = max((stop for _, stop in offsets if stop <= shared), default=0)  # not a part of a token such as <think>
        return start + whole if whole or not header else None

    def limit(self, index: int) -> int:
        """Return the position where the next message's content starts; the end of the text if there is none."""
        if index + 1 == len(self.messages):
            return len(self.text)
        start = self.content_start(index + 1)
        return len(self.text) if start is None else start

    def span(self, index: int, ends: Sequence[tuple[int, int]], specials: Sequence[tuple[int, int]]) -> Span:
        """Return the span of a response: from the end of its header through the first end token after its content.

        If there is no end token, a special token that closes the turn of a last message takes its place. Without such a
        token, the span ends with the response's text.

        Args:
            ends: start and end of each end token in the text.
            specials: start and end of each special token in the text.
        """
        start, end = self.response_start(index), self.end(index)
        if start > end:
            raise ValueError(f"the chat template rewrites {self.name(index)}")
        following = ends[bisect_left(ends, (end, 0)) :][:1]
        if not self.messages[index].get("tool_calls") and following and following[0][0] == end:
            return Span(start, following[0][1], True)
        limit = self.limit(index)
        if limit < end:
            raise ValueError(f"the chat template mixes the texts of {self.name(index)} and {self.name(index + 1)}")
        if following and (following[0][0] == end or following[0][1] <= limit):  # otherwise it belongs to a later turn
            return Span(start, following[0][1], True)
        closing = self.closing(index + 1)
        if not self.text.startswith(closing, end):
            return Span(start, end, False)
        for _, stop in specials[bisect_left(specials, (end, 0)) :][:1]:
            if stop <= end + len(closing):
                return Span(start, stop, True)
        return Span(start, end + len(closing.rstrip()), False)


def _shared(one: str, other: str) -> int:
    """Return the length of the longest common prefix of two texts."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low


def has_content(message: Message) -> bool:
    """Return whether a checked message has a content that is not blank."""
    return has_images(message) or bool(text_of(message).strip())


def _marked_parts(message: Message, mark: str) -> Iterator[list[Message]]:
    """Yield, for the content and the last tool call of a message, the message with a mark at the end of this part.

    Each item is a list of alternatives, because not every template writes all of them exactly once.
    """
    calls = message.get("tool_calls")
    if has_content(message) or not (calls or message.get("reasoning_content")):
        content = message.get("content", "")
        yield [{**message, "content": with_text(content, mark)}]
    elif not calls:
        yield [{**message, "reasoning_content": message["reasoning_content"] + mark}]
    if calls:
        *others, last = calls
        arguments, name = function_of(last)["arguments"], function_of(last)["name"]
        changes: list[dict[str, Any]] = [{"arguments": value} for value in _marked_arguments(arguments, mark)]
        yield [
            {**message, "tool_calls": [*others, with_function(last, **change)]}
            for change in [*changes, {"name": name + mark}]
        ]


def _marked_arguments(arguments: Any, mark: str) -> Iterator[Any]:
    """Yield arguments of a tool call with a last argument, whose value is a mark; nothing if they are no object."""
    known = parse_json(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(known, dict):
        return
    key = max(known, default="") + "x"  # the last one also for templates that sort arguments
    if isinstance(arguments, str):
        inner = arguments.rstrip().removesuffix("}")
        added = f"{json.dumps(key, ensure_ascii=False)}: {json.dumps(mark, ensure_ascii=False)}"
        yield inner + (", " if known else "") + added + "}" + arguments[len(arguments.rstrip()) :]
    else:
        yield {**known, key: mark}


def _by_marks(chat: RenderedChat, wanted: Sequence[int]) -> tuple[list[int], list[bool], bool]:
    """Return token ids, the mask of `wanted` responses, and whether an end token follows the last response."""
    tokenizer = chat.tokenizer
    if not tokenizer.is_fast:
        raise ValueError(
            "messages need the position of each token in the text, but this tokenizer does not return it; use a "
            "fast tokenizer"
        )
    encoded = tokenizer(chat.text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
    ends, specials = (
        [place for token, place in zip(ids, offsets, strict=True) if token in kind]
        for kind in (end_token_ids(tokenizer), special_token_ids(tokenizer))
    )
    spans = [chat.span(index, ends, specials) for index in wanted]
    for before, after in itertools.pairwise(spans):
        if before.end > after.start:
            raise ValueError("the chat template mixes the texts of two messages of the assistant")
    mask = [False] * len(ids)
    starts, stops = [start for start, _ in offsets], [stop for _, stop in offsets]
    for span in spans:  # a token that overlaps a response belongs to it
        for position in range(bisect_right(stops, span.start), bisect_left(starts, span.end)):
            mask[position] = True
    return ids, mask, not spans or spans[-1].has_end_token


def _by_markers(chat: RenderedChat, wanted: Sequence[int]) -> tuple[list[int], list[bool]]:
    """Return the conversation's token ids and the mask of `wanted` responses, for a template with generation markers.

    `{% generation %}` markers surround each response, or several passages of it, such as thought and content.
    """
    out = apply_template(
        chat.tokenizer,
        chat.messages,
        chat.tools,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"return_offsets_mapping": True},
    )
    ids, mask = list(out["input_ids"]), [bool(marked) for marked in out["assistant_masks"]]
    starts = [i for i, marked in enumerate(mask) if marked and not (i and mask[i - 1])]
    owners = _owners(chat, [out["offset_mapping"][start][0] for start in starts])
    if missing := [index for index in wanted if index not in owners]:
        raise ValueError(
            f"the chat template marks no text of {chat.name(missing[0])} as generated; the template must mark each "
            "message of the assistant with {% generation %}"
        )
    kept = {start for start, index in zip(starts, owners, strict=True) if index in wanted}
    run = -1
    for position, marked in enumerate(mask):
        run = position if position in starts else run
        mask[position] = marked and run in kept
    return ids, mask


def _owners(chat: RenderedChat, passages: Sequence[int]) -> list[int]:
    """Return the index of the assistant's message that each marked passage belongs to.

    Args:
        passages: start of each passage in the text.
    """
    responses = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
    if len(passages) == len(responses):
        return responses
    starts = [chat.content_start(index + 1) for index in responses[:-1]]
    limits = [chat.end(index) + 1 if start is None else start for index, start in zip(responses, starts, strict=False)]
    return [responses[bisect_right(limits, start)] for start in passages]


def check_shown(chat: RenderedChat) -> None:
    """Check that the rendered conversation contains all parts of the record.

    Raises:
        ValueError: the template omits a part; the message names it.
    """
    messages = chat.messages
    check_image_tokens(chat.tokenizer, messages, chat.text)
    if chat.tools and render(chat.tokenizer, messages) == chat.text:
        raise ValueError(
            "the chat template does not write the record's tools; use another template, or leave tools out"
        )
    for index, message in enumerate(messages):
        if not _shows(chat, index, "content"):
            raise ValueError(f"the chat template does not write {chat.name(index)}")
        if message.get("tool_calls") and not _shows_calls(chat, index):
            raise ValueError(f"the chat template does not write the tool calls of message {index + 1}")
    # Templates may omit the thoughts of earlier turns. The thoughts of the last turn are trained on.
    if messages and not _shows(chat, len(messages) - 1, "reasoning_content"):
        raise ValueError(f"the chat template does not write the reasoning_content of message {len(messages)}")


def _shows(chat: RenderedChat, index: int, key: str) -> bool:
    """Return whether the template writes the value of `key` of message `index`; True if there is no value."""
    said = text_of(chat.messages[index], key).strip()
    if not said or (len(said) > LONG and said in chat.text):  # too long to be there by chance
        return True
    return chat.mark in chat.with_message(index, {**chat.messages[index], key: chat.mark})


def _shows_calls(chat: RenderedChat, index: int) -> bool:
    """Return whether the template writes the names of all tool calls of a message."""
    message = chat.messages[index]
    for place, call in enumerate(message["tool_calls"]):
        marked = with_function(call, name=function_of(call)["name"] + chat.mark)
        calls = [*message["tool_calls"][:place], marked, *message["tool_calls"][place + 1 :]]
        if chat.mark not in chat.with_message(index, {**message, "tool_calls": calls}):
            return False
    return True
