"""Messages of OpenAI's and Anthropic's clients in one form, and comparisons of messages.

The form is OpenAI's: `role`, `content` (a text) and, if present, `reasoning_content`, `tool_calls` (the arguments as an
object, or as the client's text if it is not JSON) and `tool_call_id`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

Message = dict[str, Any]

ROLES = {"developer": "system", "function": "tool"}
"""Other names of roles."""
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of content parts that are texts, and the key of the text."""


class BadRequest(ValueError):
    """Raised for a request that cannot be answered as it is; the client gets status 400 and this message.

    code, param: machine-readable reason, and name of the wrong option, as in OpenAI's errors.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code


def from_openai(messages: Any) -> list[Message]:
    """Convert the messages of an OpenAI chat completion; raise BadRequest if they are invalid."""
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages: must be a list with at least one message", "messages")
    return [_from_openai(message, f"messages[{n}]") for n, message in enumerate(messages)]


def _from_openai(message: Any, where: str) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadRequest(f"{where}: must be an object with a role", "messages")
    role = ROLES.get(message["role"], message["role"])
    made: Message = {"role": role, "content": _text(message.get("content"), where)}
    thought = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(thought, str) and role == "assistant":
        made["reasoning_content"] = thought
    if calls := message.get("tool_calls"):
        made["tool_calls"] = [_call(call, where) for call in calls]
    if role == "tool":
        made["tool_call_id"] = str(message.get("tool_call_id") or "")
    if isinstance(name := message.get("name"), str):
        made["name"] = name
    return made


def _text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise BadRequest(f"{where}.content: must be a text or a list of parts", "messages")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        key = TEXT_PARTS.get(str(kind))
        if key is None or not isinstance(part.get(key), str):
            raise BadRequest(f"{where}.content: parts of type {kind!r} are not supported; send only texts", "messages")
        texts.append(part[key])
    return "".join(texts)


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest(f"{where}.tool_calls: each must have a function with a name", "messages")
    arguments = _arguments(function.get("arguments"))
    return make_call(function["name"], arguments, str(call.get("id") or ""))


def make_call(name: str, arguments: Any, call_id: str) -> dict[str, Any]:
    """Return a tool call of a message."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _arguments(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments if arguments is not None else {}
    try:
        return json.loads(arguments) if arguments.strip() else {}
    except ValueError:
        return arguments


def from_anthropic(system: Any, messages: Any) -> list[Message]:
    """Convert the system prompt and messages of an Anthropic request; raise BadRequest if they are invalid."""
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages: must be a list with at least one message")
    made: list[Message] = []
    if system:
        made.append({"role": "system", "content": _blocks_text(system, "system")})
    for n, message in enumerate(messages):
        made += _from_anthropic(message, f"messages.{n}")
    return made


def _from_anthropic(message: Any, where: str) -> list[Message]:
    role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
    if role not in ("user", "assistant", "system"):
        raise BadRequest(f"{where}.role: must be user or assistant")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise BadRequest(f"{where}.content: must be a text or a list of blocks")
    texts, thoughts, calls, results = list[str](), list[str](), list[Any](), list[Message]()
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        try:
            if kind == "text":
                texts.append(block["text"])
            elif kind == "thinking":
                thoughts.append(block["thinking"])
            elif kind == "tool_use":
                calls.append(make_call(block["name"], block["input"], block["id"]))
            elif kind == "tool_result":
                text = _blocks_text(block.get("content") or "", where)
                results.append({"role": "tool", "content": text, "tool_call_id": block["tool_use_id"]})
            elif kind != "redacted_thinking":
                raise BadRequest(f"{where}.content: blocks of type {kind!r} are not supported")
        except KeyError as error:
            raise BadRequest(f"{where}.content: a block of type {kind} lacks {error}") from None
    if role == "assistant":
        spoken: Message = {"role": role, "content": "".join(texts)}
        spoken |= {"reasoning_content": "".join(thoughts)} if thoughts else {}
        return [spoken | ({"tool_calls": calls} if calls else {})]
    if texts or not results:
        results.append({"role": role, "content": "\n".join(texts)})
    return results


def _blocks_text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or any(not isinstance(b, dict) or b.get("type") != "text" for b in content):
        raise BadRequest(f"{where}: must be a text or text blocks")
    return "\n".join(str(block.get("text", "")) for block in content)


def tools_from_anthropic(tools: Any) -> list[dict[str, Any]]:
    """Convert Anthropic's tools to OpenAI's; raise BadRequest for tools that only Anthropic's servers can run."""
    made = []
    for tool in tools or ():
        if not isinstance(tool, dict) or "input_schema" not in tool or "name" not in tool:
            raise BadRequest("tools: each must have a name and an input_schema; server tools are not supported")
        function = {"name": tool["name"], "description": tool.get("description", "")}
        made.append({"type": "function", "function": {**function, "parameters": tool["input_schema"]}})
    return made


def key_of(message: Message) -> str:
    """Return a text that is equal for two messages that differ only in what clients lose or change.

    These are ids of tool calls, thoughts, white space around the content, and the formatting of JSON.
    """
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]
    return json.dumps([message["role"], message["content"].strip(), calls], sort_keys=True, ensure_ascii=False)


def thought_of(message: Message) -> str:
    """Return the message's thought without surrounding white space; "" without a thought."""
    return str(message.get("reasoning_content") or "").strip()


def ids_of_calls(message: Message) -> list[str]:
    return [call["id"] for call in message.get("tool_calls", ())]


def text_of(message: Mapping[str, Any]) -> str:
    """Return a message as plain text for logs: its thought, its content and its tool calls."""
    return "\n".join(f"({text})" if kind == "thought" else text for kind, text in parts_of(message))


def parts_of(message: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return pairs (kind, text) of a message: its thought, its content, and its tool calls ("call"); no empty texts."""
    thought, content = message.get("reasoning_content"), message.get("content")
    written = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False) if content else ""
    calls = (
        f"→ {call['function']['name']}({json.dumps(call['function']['arguments'], ensure_ascii=False)})"
        for call in message.get("tool_calls") or ()
        if isinstance(call, dict) and "function" in call
    )
    parts = [("thought", str(thought or "")), ("content", written), *(("call", call) for call in calls)]
    return [(kind, text) for kind, text in parts if text]
