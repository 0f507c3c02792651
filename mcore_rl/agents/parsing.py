"""The text of a response, divided into thought, content and tool calls.

The forms of tool calls are those of Hermes, Qwen2.5 and Qwen3 (JSON in <tool_call>), of Qwen3-Coder and Qwen3.5 (tags
for function and parameters), of Llama 3.1 (JSON alone) and of Mistral ([TOOL_CALLS] and JSON). Text is never lost: a
call that cannot be read stays in the content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

THINK, END_THINK = "<think>", "</think>"
IN_TAGS = re.compile(r"<tool_call>((?:(?!<tool_call>).)*?)</tool_call>", re.DOTALL)
FUNCTION = re.compile(r"<function=([^>\n]+)>((?:(?!<function=).)*?)</function>", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
MISTRAL = "[TOOL_CALLS]"

Call = tuple[str, dict[str, Any]]
"""Name and arguments of a tool call."""


@dataclass
class Parsed:
    """The parts of a response. `thought` is None without a thought, and "" with an empty one."""

    content: str = ""
    thought: str | None = None
    calls: list[Call] = field(default_factory=list)


def parse(text: str, in_thought: bool = False, form: CallForm | None = None) -> Parsed:
    """Divide the text of a response into its parts.

    Args:
        in_thought: whether the chat template has begun a thought before the response.
        form: form of tool calls; None if the request has no tools, and calls are text.
    """
    thought, body = None, text
    if in_thought or text.lstrip().startswith(THINK):
        inner = text if in_thought else text.lstrip().removeprefix(THINK)
        thought, ended, body = inner.partition(END_THINK)
        thought = thought.strip()
        if not ended:
            return Parsed("", thought)
    calls: list[Call] = []
    if form is not None:
        body = form(body, calls)
    return Parsed(body.strip(), thought, calls)


CallForm = Callable[[str, list[Call]], str]
"""Function that appends the tool calls of a text to a list and returns the rest of the text."""


def _loaded(text: str) -> Any:
    """Return the value of a JSON text; raise ValueError if it is none, or cannot be sent (NaN, half of a character)."""
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError:
        raise ValueError("too deep") from None
    return value


def _json_call(text: str, key: str = "arguments") -> Call | None:
    try:
        value = _loaded(text)
    except ValueError:
        return None
    arguments = value.get(key, {}) if isinstance(value, dict) else None
    if not isinstance(arguments, dict) or not isinstance(value.get("name"), str):
        return None
    return value["name"], arguments


def hermes(text: str, calls: list[Call]) -> str:
    def take(match: re.Match[str]) -> str:
        if (call := _json_call(match[1])) is None:
            return match[0]
        calls.append(call)
        return ""

    return IN_TAGS.sub(take, text)


def qwen_tags(text: str, calls: list[Call]) -> str:
    """Values of parameters are JSON if they can be read as JSON objects, lists, numbers, true, false or null."""

    def take(match: re.Match[str]) -> str:
        functions = FUNCTION.findall(match[1])
        if len(functions) != 1 or FUNCTION.sub("", match[1]).strip():
            return match[0]
        name, inner = functions[0]
        calls.append((name, {key: _value(value) for key, value in PARAMETER.findall(inner)}))
        return ""

    return IN_TAGS.sub(take, text)


def _value(text: str) -> Any:
    try:
        value = _loaded(text)
    except ValueError:
        return text
    return text if isinstance(value, str) else value


def llama_json(text: str, calls: list[Call]) -> str:
    if (call := _json_call(text.strip().removeprefix("<|python_tag|>"), "parameters")) is None:
        return text
    calls.append(call)
    return ""


def mistral(text: str, calls: list[Call]) -> str:
    before, found, after = text.partition(MISTRAL)
    if not found:
        return text
    try:
        values = _loaded(after)
    except ValueError:
        return text
    made = [_json_call(json.dumps(value)) for value in values] if isinstance(values, list) else [None]
    if not made or None in made:
        return text
    calls += [call for call in made if call is not None]
    return before


def call_form_of(template: str) -> CallForm:
    """Return the form of tool calls that a chat template writes."""
    if "<function=" in template:
        return qwen_tags
    if MISTRAL in template:
        return mistral
    return llama_json if "<tool_call>" not in template and '"parameters"' in template else hermes


def pieces_of(text: str, size: int = 48) -> Sequence[str]:
    """Divide a text into pieces for a stream, none of which is empty."""
    return [text[start : start + size] for start in range(0, len(text), size)]
