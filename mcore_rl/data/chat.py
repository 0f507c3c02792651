"""Conversations: checks of messages, and the text that a chat template makes of them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime, time
from functools import lru_cache
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any, Literal

from mcore_rl.data.images import ImageReader, PlacedImage, is_image, source_of
from mcore_rl.data.readers import parse_json

Message = dict[str, Any]
Messages = list[Message]

IMAGE_ROLES = ("user", "tool")
"""Roles of messages that can have images."""


def check_messages(value: Any, what: str) -> Messages:
    """Check that `value` is a list of messages with `role` and `content`; return it in a uniform format.

    A content in parts becomes a single text, or a list of parts if there are images: {"type": "text", "text": …} and
    {"type": "image", "image": SOURCE}; an image of the record's `images` has no SOURCE here. Keys with null values are
    removed, except in the arguments of tool calls, where null is a value. Other keys are kept for the template.

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
        message["content"] = _content(message["content"], where)
        if has_images(message) and role not in IMAGE_ROLES:
            raise ValueError(
                f"{where}: has an image and the role {role}; only messages of {' and '.join(IMAGE_ROLES)} can have "
                "images"
            )
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


def _content(content: Any, where: str) -> str | list[dict[str, Any]]:
    if not isinstance(content, list) or not any(map(is_image, content)):
        return _text(content, where)
    return [_image(part) if is_image(part) else {"type": "text", "text": _text([part], where)} for part in content]


def _image(part: dict[str, Any]) -> dict[str, Any]:
    source = source_of(part)
    return {"type": "image"} if source is None else {"type": "image", "image": source}


def text_of(message: Message, key: str = "content") -> str:
    """Return the text of a checked message, without its images; "" if it has no content."""
    content = message.get(key, "")
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def has_images(message: Message) -> bool:
    """Return whether a checked message has images."""
    return isinstance(message.get("content"), list)


def with_text(content: Any, text: str) -> Any:
    """Return the content of a checked message with `text` after it."""
    return content + text if isinstance(content, str) else [*content, {"type": "text", "text": text}]


def image_sources(messages: Messages) -> list[Any]:
    """Return the source of each image in checked messages, in their order; None for one of the record's `images`."""
    return [part.get("image") for part in _image_parts(messages)]


def with_sources(messages: Messages, sources: Sequence[Any]) -> Messages:
    """Return checked messages whose images have these sources; no source for None."""
    left = iter(sources)

    def replaced(part: dict[str, Any]) -> dict[str, Any]:
        return _image({"image": next(left)}) if part["type"] == "image" else part

    return [
        {**message, "content": [replaced(part) for part in message["content"]]} if has_images(message) else message
        for message in messages
    ]


def _image_parts(messages: Messages) -> list[dict[str, Any]]:
    parts = (part for message in messages if has_images(message) for part in message["content"])
    return [part for part in parts if part["type"] == "image"]


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{where}: content must be a text or a list of parts, found {_kind(content)}")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else _kind(part)
            raise ValueError(
                f'{where}: each part of content must be {{"type": "text", "text": …}} or {{"type": "image", …}}, '
                f"found {kind}"
            )
    return "".join(part["text"] for part in content)


def _check_call(call: Any, where: str) -> dict[str, Any]:
    call = _with_values(call)
    function = _with_values(call.get("function", call)) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"{where}: a tool call must have a function with a name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):  # OpenAI's format
        try:
            parse_json(arguments)
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


@dataclass(frozen=True)
class ImageTokens:
    """How the text of a conversation represents images.

    text, token_id: the special token that the chat template writes for an image. Tokenization repeats it once for each
        token of the image.
    video_id: id of the token for videos, which are not supported; None if there is none.
    """

    text: str
    token_id: int
    video_id: int | None
    reader: ImageReader


def reads_images(tokenizer: Any) -> bool:
    """Return whether the tokenizer is that of a model that reads images; False for one that is not loaded yet."""
    return "image_tokens" in vars(tokenizer)


def image_tokens(tokenizer: Any) -> ImageTokens:
    """Return how conversations represent images; `load_tokenizer` sets it.

    Raises:
        ValueError: the model reads no images.
    """
    found: ImageTokens | None = getattr(tokenizer, "image_tokens", None)
    if found is None:
        raise ValueError("the record has images, but the model reads no images; leave them out, or use another model")
    return found


def samples_images(tokenizer: Any, ids: Sequence[int], images: Sequence[PlacedImage]) -> bool:
    """Return whether a context has tokens of images or videos beside those of its images: the policy sampled them."""
    tokens: ImageTokens | None = getattr(tokenizer, "image_tokens", None)
    if tokens is None:
        return False
    return sum(ids.count(token) for token in {tokens.token_id, tokens.video_id} - {None}) > sum(i.count for i in images)


def check_image_tokens(tokenizer: Any, messages: Messages, text: str) -> None:
    """Check that the text that the chat template has made of a conversation has one token for each image.

    Raises:
        ValueError: there are more or fewer, or the model reads no images.
    """
    if count := len(image_sources(messages)):
        token = image_tokens(tokenizer).text
        if (written := text.count(token)) != count:
            raise ValueError(
                f"the conversation has {count} image{'s' * (count > 1)}, but its text has {token} {written} times; the "
                "chat template must write it once for each image, and no message may contain it"
            )


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
    return {} if day is None else {"chat_template": _date_macro(day) + template_of(tokenizer, tools)}


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
    options = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
    return str(apply_template(tokenizer, messages, tools, **options))


def apply_template(tokenizer: Any, messages: Messages, tools: Any, **options: Any) -> Any:
    """Return the result of transformers' `apply_chat_template`, for messages in the form that the template needs.

    Args:
        options: keyword arguments of `apply_chat_template`.

    Raises:
        ValueError: the tokenizer has no template, or the template fails.
    """
    if not tokenizer.chat_template:
        raise ValueError("messages need a chat template, but the tokenizer has none; set data.chat_template")
    if any(message.get("tool_calls") for message in messages):
        form = _call_form(tokenizer, template_of(tokenizer, tools))
        messages = [form.of_message(message) for message in messages]
    return _applied(tokenizer, messages, tools, **options)


def _applied(tokenizer: Any, messages: Messages, tools: Any, **options: Any) -> Any:
    from jinja2 import TemplateError

    messages = [without(message, "weight") for message in messages]
    try:
        return tokenizer.apply_chat_template(messages, tools=tools, **options, **_dated(tokenizer, tools))
    except (TemplateError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"the chat template fails: {' '.join(str(error).split())}") from None


@dataclass(frozen=True)
class _CallForm:
    """The form in which a chat template reads messages with tool calls.

    arguments: "text" if the template can only write arguments that are JSON text, "object" if it can only write
        objects, "any" if it writes both as JSON.
    needs_content: whether a message with tool calls must have a content, which may be empty.
    """

    arguments: Literal["text", "object", "any"]
    needs_content: bool

    def of_message(self, message: Message) -> Message:
        if not message.get("tool_calls"):
            return message
        filled = {"content": "", **message} if self.needs_content else message
        return {**filled, "tool_calls": [self._of_call(call) for call in message["tool_calls"]]}

    def _of_call(self, call: dict[str, Any]) -> dict[str, Any]:
        return with_function(call, arguments=self._of_arguments(function_of(call)["arguments"]))

    def _of_arguments(self, arguments: Any) -> Any:
        if self.arguments == "object" and isinstance(arguments, str):
            return parse_json(arguments)
        if self.arguments == "text" and not isinstance(arguments, str):
            return json.dumps(arguments, ensure_ascii=False)
        return arguments


@lru_cache(maxsize=16)
def _call_form(tokenizer: Any, template: str) -> _CallForm:
    """Return the form of tool calls that `template` needs, found by rendering a short conversation in each form."""
    mark = unused_character(template)
    text = json.dumps({mark: 1}, ensure_ascii=False)

    def writes(arguments: Any, wanted: str, content: dict[str, str]) -> bool:
        function = {"name": "f", "arguments": arguments}
        call = {"id": "abcdefghi", "type": "function", "function": function}
        messages: Messages = [
            {"role": "user", "content": "a"},
            {"role": "assistant", **content, "tool_calls": [call]},
            {"role": "tool", "name": "f", "tool_call_id": call["id"], "content": "b"},
        ]
        try:
            return wanted in _applied(tokenizer, messages, None, tokenize=False)
        except ValueError:
            return False

    for content in ({}, {"content": ""}):
        writes_text, writes_object = writes(text, text, content), writes({mark: 1}, mark, content)
        if writes_text or writes_object:
            form: Literal["text", "object", "any"] = "any" if writes_object else "text"
            return _CallForm(form if writes_text else "object", bool(content))
    return _CallForm("object", False)  # the template fails or omits calls; rendering real messages reports the error


def function_of(call: dict[str, Any]) -> dict[str, Any]:
    """Return the object with name and arguments of a checked tool call."""
    function: dict[str, Any] = call.get("function", call)
    return function


def with_function(call: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return a checked tool call with other values of its name or arguments."""
    function = {**function_of(call), **changes}
    return {**call, "function": function} if "function" in call else function


def is_prefill(messages: Messages) -> bool:
    """Return whether a prompt ends with the beginning of a response: a message of the assistant without tool calls."""
    return bool(messages) and messages[-1].get("role") == "assistant" and not messages[-1].get("tool_calls")


def with_response(messages: Messages, text: str) -> Messages:
    """Return a prompt and a response of the assistant, which continues the prompt's last message if that is one."""
    if is_prefill(messages):
        return [*messages[:-1], {**messages[-1], "content": with_text(messages[-1]["content"], text)}]
    return [*messages, {"role": "assistant", "content": text}]


def without(message: Message, key: str) -> Message:
    """Return a message without one of its keys."""
    return {name: value for name, value in message.items() if name != key}


def template_of(tokenizer: Any, tools: Any) -> str:
    """Return the text of the chat template for conversations with `tools`; "" if the tokenizer has none."""
    if not tokenizer.chat_template:
        return ""
    return str(tokenizer.get_chat_template(None, tools))


def unused_character(text: str) -> str:
    """Return a character from Unicode's private use area that does not occur in `text`."""
    return next(chr(code) for code in range(0xE000, 0xF8FF) if chr(code) not in text)


def end_token_ids(tokenizer: Any) -> frozenset[int]:
    """Return the ids of all tokens that end a response.

    These are the tokenizer's end token, the end tokens in the model's generation_config.json, and the first special
    token that the chat template writes after a response, unless one of the former directly follows it.
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
    special = special_token_ids(tokenizer)
    behind = tokenizer(text.partition(mark)[2], add_special_tokens=False)["input_ids"]
    closing = dropwhile(lambda token: token not in special, behind)
    together = list(takewhile(lambda token: token in special, closing))
    return frozenset(ends if ends.intersection(together) else ends | {*together[:1]})


def special_token_ids(tokenizer: Any) -> frozenset[int]:
    """Return the ids of the special tokens, without the start token and the token for unknown text."""
    added = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    return frozenset({*tokenizer.all_special_ids} | added) - {tokenizer.unk_token_id, tokenizer.bos_token_id}


def _declared_ends(directory: Path) -> list[int]:
    """Return the end tokens in the `directory`'s generation_config.json; [] if there is no such file."""
    try:
        ends = json.loads((directory / "generation_config.json").read_bytes()).get("eos_token_id")
    except (OSError, ValueError, AttributeError):
        return []
    return [end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int)]
