"""Conversations: checks of messages, chat templates, and the mask of the assistant's tokens in the rendered text."""

from __future__ import annotations

import itertools
import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime, time
from functools import lru_cache
from pathlib import Path
from typing import Any

from mcore_rl.data.readers import parse_json
from mcore_rl.errors import UserError

Message = dict[str, Any]
Messages = list[Message]


def check_messages(value: Any, what: str) -> Messages:
    """Check that `value` is a list of messages with `role` and `content`; return it in a uniform format.

    A content in parts becomes a single text, and a tool call's arguments become an object. Keys with null values are
    removed, except in arguments, where null is a value. Other keys are kept for the template.

    Args:
        what: name of the list in errors.

    Raises:
        ValueError: a message is invalid. The error contains its number and the reason.
    """
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise ValueError(f"{what} must be a list of messages, found {_kind(value)}")
    return [_check_message(message, f"{what}, message {n}") for n, message in enumerate(value, start=1)]


def _check_message(message: Message, where: str) -> Message:
    message = _with_values(message)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(
            f"{where}: must have a role and a content; its keys are {', '.join(map(str, message)) or 'none'}"
        )
    if "tool_calls" in message:
        message["tool_calls"] = [_check_call(call, where) for call in _list(message["tool_calls"], where)]
    if "content" in message:
        message["content"] = _text(message["content"], where)
    elif not message.get("tool_calls"):
        raise ValueError(f"{where}: has neither content nor tool_calls; write one of them")
    if not isinstance(message.get("reasoning_content", ""), str):
        raise ValueError(f"{where}: reasoning_content must be a text, found {_kind(message['reasoning_content'])}")
    weight = message.get("weight")
    if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
        raise ValueError(f"{where}: weight must be 0 or 1, got {weight!r}")
    if weight == 1 and role != "assistant":
        raise ValueError(
            f"{where}: has weight 1 and the role {role}; only messages of the assistant can be trained on, so "
            "leave weight out"
        )
    return message


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{where}: content must be a text or a list of parts, found {_kind(content)}")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else _kind(part)
            raise ValueError(f'{where}: each part of content must be {{"type": "text", "text": …}}, found {kind}')
    return "".join(part["text"] for part in content)


def _check_call(call: Any, where: str) -> dict[str, Any]:
    call = _with_values(call)
    function = _with_values(call.get("function", call)) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"{where}: a tool call must have a function with a name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):  # OpenAI's format; templates write JSON themselves
        try:
            arguments = parse_json(arguments)
        except ValueError as error:
            name = function["name"]
            raise ValueError(f"{where}: the arguments of the tool call {name} are not JSON: {error}") from None
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{where}: tool_calls must be a list, found {_kind(value)}")
    return value


def check_tools(value: Any) -> list[Any] | None:
    """Return a record's tools as a list of descriptions.

    `value` is such a list, or its JSON. Return None if the list is empty.

    Raises:
        ValueError: `value` is neither.
    """
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except ValueError as error:
            raise ValueError(f"tools must be a list, or JSON of a list: {error}") from None
    if value is not None and not (isinstance(value, list) and all(isinstance(tool, dict) for tool in value)):
        raise ValueError(f"tools must be a list of descriptions, found {_kind(value)}")
    return [_check_tool(_with_values(tool)) for tool in value] if value else None


def _check_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool's description without the null values of its object `function`; nested null values stay."""
    return {**tool, "function": _with_values(tool["function"])} if "function" in tool else tool


def _with_values(value: Any) -> Any:
    """Return a JSON object without its keys that have null values; return any other value unchanged."""
    return {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else value


def _kind(value: Any) -> str:
    if isinstance(value, list):
        other = next((item for item in value if not isinstance(item, dict)), None)
        return f"a list with {_kind(other)}" if other is not None else "a list"
    names = {
        str: "a text",
        dict: "an object",
        bool: "true or false",
        int: "a number",
        float: "a number",
        type(None): "null",
    }
    return names.get(type(value), f"a {type(value).__name__}")


GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")

DATE_CODES = (
    "%-d",
    "%-m",
    "%-j",
    "%-y",
    "%-H",
    "%-I",
    "%-M",
    "%-S",
    *(f"%{c}" for c in "aAbBcCdDeFGghHIjklmMnpPrRsSTtuUVwWxXyYzZf"),
)
"""Codes that a chat template may use in `strftime_now`, including the codes of the C library."""

LONG = 30


@dataclass(frozen=True)
class Span:
    """The place of a response in a rendered conversation: the characters `start` … `end` − 1."""

    start: int
    end: int
    has_end_token: bool


def set_chat_day(tokenizer: Any, day: date) -> None:
    """Set the date that the chat template inserts if it calls `strftime_now`.

    With the current date, the tokens of a run would change at midnight.
    """
    if "strftime_now" in str(tokenizer.chat_template):
        tokenizer.chat_day = day


def chat_day(tokenizer: Any) -> date | None:
    """Return the date that `set_chat_day` has set for the chat template, or None if no date is set."""
    return getattr(tokenizer, "chat_day", None)


def _dated(tokenizer: Any, tools: Any) -> dict[str, str]:
    """Return arguments for `apply_chat_template` that set the template's date; {} if `set_chat_day` has set none.

    The argument `chat_template` is a macro `strftime_now`, followed by the tokenizer's template for `tools`. It is a
    macro because transformers does not accept a function of this name.
    """
    day = chat_day(tokenizer)
    return {} if day is None else {"chat_template": _date_macro(day) + _template(tokenizer, tools)}


@lru_cache
def _date_macro(day: date) -> str:
    """Return a Jinja macro `strftime_now(format)` that formats midnight of `day`."""
    midnight, percent = datetime.combine(day, time()), "\0"  # placeholder of "%%"
    codes = {"%%": percent, **{code: midnight.strftime(code) for code in DATE_CODES}, percent: "%"}
    return (
        "{%- macro strftime_now(format) -%}{%- set said = namespace(text=format) -%}"
        f"{{%- for code, text in {json.dumps(list(codes.items()))} -%}}"
        "{%- set said.text = said.text | replace(code, text) -%}{%- endfor -%}{{ said.text }}{%- endmacro %}"
        "{{ '' }}"  # keeps a line break at the start of the template
    )


def render(tokenizer: Any, messages: Messages, tools: Any = None, add_generation_prompt: bool = False) -> str:
    """Return the text that the chat template makes from a conversation.

    Raises:
        ValueError: the tokenizer has no template, or the template fails.
    """
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise ValueError("messages need a chat template, but the tokenizer has none; set data.chat_template")
    messages = [_without(message, "weight") for message in messages]
    try:
        return str(
            tokenizer.apply_chat_template(
                messages,
                tools=tools,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **_dated(tokenizer, tools),
            )
        )
    except (TemplateError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"the chat template fails: {' '.join(str(error).split())}") from None


def tokenize_conversation(
    tokenizer: Any, messages: Messages, wanted: Sequence[int], tools: Any = None
) -> tuple[list[int], list[bool]]:
    """Return token ids and mask of a conversation, up to the end of its last trained response.

    The mask is True for the tokens of the messages to train on.

    Args:
        wanted: indices of the assistant's messages to train on.

    Raises:
        ValueError: the template fails or omits a message, or a response cannot be found in the template's output.
    """
    text = render(tokenizer, messages, tools)
    _check_shown(tokenizer, messages, tools, text)
    if GENERATION_MARKER.search(_template(tokenizer, tools)):
        ids, mask, is_ended = *_by_markers(tokenizer, messages, wanted, tools), True
    else:
        ids, mask, is_ended = _by_marks(tokenizer, messages, wanted, tools, text)
    length = max((position for position, trained in enumerate(mask) if trained), default=-1) + 1
    ids, mask = ids[:length], mask[:length]
    if not is_ended and length:  # the template writes no end token
        ids, mask = [*ids, tokenizer.eos_token_id], [*mask, True]
    return ids, mask


def render_prompt(tokenizer: Any, messages: Messages, tools: Any = None) -> str:
    """Return the text of a conversation, and after it the text by which the template requests a response.

    Raises:
        ValueError: the template fails, or omits a part of the conversation.
    """
    _check_shown(tokenizer, messages, tools, render(tokenizer, messages, tools))
    return render(tokenizer, messages, tools, add_generation_prompt=True)


def _template(tokenizer: Any, tools: Any) -> str:
    if not tokenizer.chat_template:
        return ""
    return str(tokenizer.get_chat_template(None, tools))


def _by_markers(tokenizer: Any, messages: Messages, wanted: Sequence[int], tools: Any) -> tuple[list[int], list[bool]]:
    """Return the conversation's token ids and the mask of `wanted` responses, for a template with generation markers.

    `{% generation %}` markers surround each response; consecutive marked tokens are one response.
    """
    messages = [_without(message, "weight") for message in messages]
    out = tokenizer.apply_chat_template(
        messages,
        tools=tools,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        **_dated(tokenizer, tools),
    )
    ids, mask = list(out["input_ids"]), [bool(marked) for marked in out["assistant_masks"]]
    starts = [i for i, marked in enumerate(mask) if marked and not (i and mask[i - 1])]
    responses = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if len(starts) != len(responses):
        raise ValueError(
            f"the chat template marks {len(starts)} passages as generated, but the conversation has "
            f"{len(responses)} messages of the assistant; the template must mark each of these messages once"
        )
    kept = {start for start, index in zip(starts, responses, strict=True) if index in wanted}
    run = -1
    for position, marked in enumerate(mask):
        run = position if position in starts else run
        mask[position] = marked and run in kept
    return ids, mask


def _by_marks(
    tokenizer: Any, messages: Messages, wanted: Sequence[int], tools: Any, text: str
) -> tuple[list[int], list[bool], bool]:
    """Return token ids, the mask of `wanted` responses, and whether an end token follows the last response.

    To find a response, the conversation is rendered again with an unused character in place of the response's content.
    """
    if not tokenizer.is_fast:
        raise ValueError(
            "messages need the position of each token in the text, but this tokenizer does not return it; use a "
            "fast tokenizer"
        )
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
    ends = end_token_ids(tokenizer)
    end_tokens = [place for token, place in zip(ids, offsets, strict=True) if token in ends]
    spans = [_span(_Marked(tokenizer, messages, tools, text, index), end_tokens) for index in wanted]
    for before, after in itertools.pairwise(spans):
        if before.end > after.start:
            raise ValueError("the chat template mixes the texts of two messages of the assistant")
    mask = [False] * len(ids)
    starts, stops = [start for start, _ in offsets], [stop for _, stop in offsets]
    for span in spans:  # a token that overlaps a response belongs to it
        for position in range(bisect_right(stops, span.start), bisect_left(starts, span.end)):
            mask[position] = True
    return ids, mask, not spans or spans[-1].has_end_token


@dataclass(frozen=True)
class _Marked:
    """Finds a message in a rendered conversation, by rendering the conversation again with marks in the messages.

    `text` is the rendered conversation, and `index` the number of the message in `messages`, from 0.
    """

    tokenizer: Any
    messages: Messages
    tools: Any
    text: str
    index: int

    @property
    def name(self) -> str:
        return f"message {self.index + 1} ({self.messages[self.index]['role']})"

    def around(self, index: int) -> tuple[str, str]:
        """Render the conversation; return the text before the content of message `index`, and the text after it."""
        mark = unused_character(self.text)
        marked = render(self.tokenizer, [*_with(self.messages, index, "content", mark)], self.tools)
        before, found, after = marked.partition(mark)
        if not found or mark in after:
            raise ValueError(f"the chat template must write message {index + 1} exactly once")
        return before, after

    def start(self, before: str) -> int:
        """Return the position in `text` where the response starts, after its header.

        The header is the generation prompt, or as much of its beginning as `text` contains. For example, the prompt may
        end with a tag that opens a thought, but `text` has no such tag. Without a header, the response starts with its
        content.

        Args:
            before: text before the message's content.
        """
        content = len(before) if self.text.startswith(before) else None
        earlier = self.messages[: self.index]
        if earlier:
            asked = render(self.tokenizer, earlier, self.tools, add_generation_prompt=True)
            if self.text.startswith(asked):
                return len(asked)
            history = render(self.tokenizer, earlier, self.tools)
            shared = next((i for i, (a, b) in enumerate(zip(self.text, asked, strict=False)) if a != b), len(asked))
            if self.text.startswith(history) and asked.startswith(history) and shared > len(history):
                return shared if content is None else min(shared, content)
        if content is None:
            raise ValueError(
                f"the chat template changes the text before {self.name} when only the content of {self.name} changes; "
                "mark responses with {% generation %} in the template"
            )
        return content

    def limit(self) -> int:
        """Return the position in `text` where the next message's content starts; the end of `text` if unknown."""
        if self.index + 1 == len(self.messages):
            return len(self.text)
        before, _ = self.around(self.index + 1)
        return len(before) if self.text.startswith(before) else len(self.text)


def _span(marked: _Marked, end_tokens: Sequence[tuple[int, int]]) -> Span:
    """Return the span of a message: from the end of its header through the first end token after its content.

    If there is no end token, the span ends with the content.

    Args:
        end_tokens: start and end of each end token in the text.
    """
    before, after = marked.around(marked.index)
    if not marked.text.endswith(after):
        raise ValueError(
            f"the chat template changes the text after {marked.name} when the content of this message changes; mark "
            "responses with {% generation %} in the template"
        )
    start, content_end = marked.start(before), len(marked.text) - len(after)
    if start > content_end:
        raise ValueError(f"the chat template rewrites {marked.name}")
    begin, end = next((place for place in end_tokens if place[0] >= content_end), (len(marked.text), None))
    if begin > content_end and end is not None and end > marked.limit():  # the end token belongs to a later turn
        end = None
    return Span(start, content_end if end is None else end, end is not None)


def _with(messages: Messages, index: int, key: str, value: str) -> Messages:
    changed: Message = {**messages[index], key: value}
    return [*messages[:index], changed, *messages[index + 1 :]]


def _without(message: Message, key: str) -> Message:
    return {name: value for name, value in message.items() if name != key}


def unused_character(text: str) -> str:
    """Return a character from Unicode's private use area that does not occur in `text`."""
    return next(chr(code) for code in range(0xE000, 0xF8FF) if chr(code) not in text)


def end_token_ids(tokenizer: Any) -> frozenset[int]:
    """Return the ids of all tokens that end a response.

    These are the tokenizer's end token, the end tokens in the model's generation_config.json, and the first special
    token that the chat template writes after a response.
    """
    return _end_token_ids(tokenizer, str(tokenizer.chat_template))


@lru_cache(maxsize=16)
def _end_token_ids(tokenizer: Any, template: str) -> frozenset[int]:
    mark = unused_character(template)
    ends = {tokenizer.eos_token_id, *_declared_ends(Path(str(tokenizer.name_or_path)))}
    try:
        text = render(tokenizer, [{"role": "user", "content": "a"}, {"role": "assistant", "content": mark}])
    except ValueError:  # the template expects other conversations; rendering real messages reports the error
        return frozenset(ends)
    special = {*tokenizer.all_special_ids} - {tokenizer.unk_token_id, tokenizer.bos_token_id}
    special |= {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    behind = tokenizer(text.partition(mark)[2], add_special_tokens=False)["input_ids"]
    return frozenset(ends | {*[token for token in behind if token in special][:1]})


def _declared_ends(directory: Path) -> list[int]:
    """Return the end tokens in the `directory`'s generation_config.json; [] if there is no such file."""
    try:
        ends = json.loads((directory / "generation_config.json").read_bytes()).get("eos_token_id")
    except (OSError, ValueError, AttributeError):
        return []
    return [end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int)]


def _check_shown(tokenizer: Any, messages: Messages, tools: Any, text: str) -> None:
    """Check that `text`, the rendered conversation, contains all parts of the record.

    Raises:
        ValueError: the template omits a part; the message names it.
    """
    if tools and render(tokenizer, messages) == text:
        raise ValueError(
            "the chat template does not write the record's tools; use another template, or leave tools out"
        )
    for index, message in enumerate(messages):
        if not _shows(tokenizer, messages, tools, text, index, "content"):
            raise ValueError(f"the chat template does not write message {index + 1} ({message['role']})")
        if message.get("tool_calls"):
            without = _without(message, "tool_calls")
            if render(tokenizer, [*messages[:index], without, *messages[index + 1 :]], tools) == text:
                raise ValueError(f"the chat template does not write the tool calls of message {index + 1}")
    # Templates may omit the thoughts of earlier turns. The thoughts of the last turn are trained on.
    if messages and not _shows(tokenizer, messages, tools, text, len(messages) - 1, "reasoning_content"):
        raise ValueError(f"the chat template does not write the reasoning_content of message {len(messages)}")


def _shows(tokenizer: Any, messages: Messages, tools: Any, text: str, index: int, key: str) -> bool:
    """Return whether the template writes the value of `key` of message `index`; True if there is no value.

    Args:
        text: the rendered conversation.
    """
    said = messages[index].get(key, "").strip()
    if not said or (len(said) > LONG and said in text):  # too long to be there by chance
        return True
    mark = unused_character(text)
    return mark in render(tokenizer, _with(messages, index, key, mark), tools)

    # ------------------------------------------------------------------ conversations of several turns


def tokens_between(tokenizer: Any, conversation: Messages, observation: str, response: Sequence[int]) -> list[int]:
    """Return the tokens that follow a response: the end of its turn, `observation`, and the request for a new response.

    Args:
        conversation: messages that the response answers.
        response: sampled tokens of the response. If they do not end with the end token, the result begins with it.

    Raises:
        ValueError: the template fails.
    """
    mark = unused_character(observation)
    answered = [*conversation, {"role": "assistant", "content": mark}, {"role": "user", "content": observation}]
    _, found, after = render(tokenizer, answered, add_generation_prompt=True).rpartition(mark)
    if not found:
        raise ValueError("the chat template does not write earlier responses")
    tokens = list(tokenizer(after, add_special_tokens=False)["input_ids"])
    ended = bool(response) and bool(tokens) and response[-1] == tokens[0] and tokens[0] in end_token_ids(tokenizer)
    return tokens[1:] if ended else tokens


def check_keeps_turns(tokenizer: Any) -> None:
    """Check that the chat template does not change the text of earlier turns in a longer conversation.

    Raises:
        UserError: the template changes this text; the message describes the change.
    """
    ask, more = {"role": "user", "content": "A question."}, {"role": "user", "content": "And now?"}
    try:
        prompt = render(tokenizer, [ask], add_generation_prompt=True)
        for answer in ("An answer.", "<think>\nA thought.\n</think>\n\nAn answer."):
            answered = [ask, {"role": "assistant", "content": answer}, more]
            second = render(tokenizer, answered, add_generation_prompt=True)
            kept = second.startswith(prompt) and second[len(prompt) :].lstrip().startswith(answer)
            third = render(tokenizer, [*answered, answered[1], more], add_generation_prompt=True)
            if not (kept and third.startswith(second)):
                what = "thoughts in earlier responses" if "<think>" in answer else "earlier turns"
                raise UserError(
                    f"environment.max_turns: the chat template rewrites {what} in a longer conversation, so the "
                    "model would be trained on other text than it read; set data.chat_template to a template that "
                    "keeps earlier turns, or use max_turns=1"
                )
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"environment.max_turns: the chat template cannot write a conversation of several turns: {error}"
        ) from None
