"""Messages of OpenAI's and Anthropic's clients in one form, and comparisons of messages.

The form is OpenAI's: `role`, `content` and, if present, `reasoning_content`, `tool_calls` (the arguments as an object,
or as the client's text if it is not JSON) and `tool_call_id`. The content is a text or, if there are images, a list of
the parts {"type": "text", "text": …} and {"type": "image", "image": SOURCE}. A client's source is a data URL or an
address; a session replaces it by the path of a file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mcore_rl.data.chat import IMAGE_ROLES
from mcore_rl.data.images import data_url

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


class SampledImage(BadRequest):
    """Raised for messages in which a response of the policy has the token of an image."""


def from_openai(messages: Any) -> list[Message]:
    """Convert the messages of an OpenAI chat completion; raise BadRequest if they are invalid."""
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages: must be a list with at least one message", "messages")
    return [_from_openai(message, f"messages[{n}]") for n, message in enumerate(messages)]


def _from_openai(message: Any, where: str) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadRequest(f"{where}: must be an object with a role", "messages")
    role = str(ROLES.get(message["role"], message["role"]))
    made: Message = {"role": role, "content": _content(message.get("content"), role, where)}
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


def _content(content: Any, role: str, where: str) -> str | list[Message]:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise BadRequest(f"{where}.content: must be a text or a list of parts", "messages")
    return _joined([_part(part, where) for part in content], role, where)


def _part(part: Any, where: str) -> Message:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("image_url", "input_image"):
        url = part.get("image_url")
        return _image(url.get("url") if isinstance(url, dict) else url, where)
    key = TEXT_PARTS.get(str(kind))
    if key is None or not isinstance(part.get(key), str):
        raise BadRequest(
            f"{where}.content: parts of type {kind!r} are not supported; send texts and images", "messages"
        )
    return {"type": "text", "text": part[key]}


def _image(url: Any, where: str) -> Message:
    if not isinstance(url, str) or not url:
        raise BadRequest(f"{where}.content: an image must have an URL, which may be a data URL", "messages")
    return {"type": "image", "image": url}


def _joined(parts: list[Message], role: str, where: str, between: str = "") -> str | list[Message]:
    """Return the parts of a content, or a single text if there are no images."""
    if all(part["type"] == "text" for part in parts):
        return between.join(part["text"] for part in parts)
    if role not in IMAGE_ROLES:
        raise BadRequest(f"{where}.content: only messages of {' and '.join(IMAGE_ROLES)} can have images", "messages")
    joined = list[Message]()
    for part in parts:
        if part["type"] == "text" and joined and joined[-1]["type"] == "text":
            joined[-1] = {"type": "text", "text": joined[-1]["text"] + between + part["text"]}
        else:
            joined.append(part)
    return joined


def images_in(messages: Sequence[Message], kind: str = "image") -> list[Message]:
    """Return the image parts of messages, in their order.

    Args:
        kind: type of these parts; "image_url" for messages that `for_clients` has made.
    """
    contents = (message["content"] for message in messages if isinstance(message["content"], list))
    return [part for content in contents for part in content if part["type"] == kind]


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


def for_clients(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose images are files as clients of OpenAI's API send them, with data URLs. Reads the files.

    Raises:
        UserError: an image is missing.
    """
    return [{**message, "content": _for_clients(message["content"])} for message in messages]


def _for_clients(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return [
        {"type": "image_url", "image_url": {"url": data_url(part["image"])}} if part["type"] == "image" else part
        for part in content
    ]


def from_anthropic(system: Any, messages: Any) -> list[Message]:
    """Convert the system prompt and messages of an Anthropic request; raise BadRequest if they are invalid."""
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages: must be a list with at least one message")
    made: list[Message] = []
    if system:
        made.append({"role": "system", "content": _blocks(system, "system", "system")})
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
    spoken, thoughts, calls, results = list[Message](), list[str](), list[Any](), list[Message]()
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        try:
            if kind in ("text", "image"):
                spoken.append(_block(block, where))
            elif kind == "thinking":
                thoughts.append(block["thinking"])
            elif kind == "tool_use":
                calls.append(make_call(block["name"], block["input"], block["id"]))
            elif kind == "tool_result":
                content = _blocks(block.get("content") or "", "tool", where)
                results.append({"role": "tool", "content": content, "tool_call_id": block["tool_use_id"]})
            elif kind != "redacted_thinking":
                raise BadRequest(f"{where}.content: blocks of type {kind!r} are not supported")
        except KeyError as error:
            raise BadRequest(f"{where}.content: a block of type {kind} lacks {error}") from None
    if role == "assistant":
        made: Message = {"role": role, "content": _joined(spoken, role, where)}
        made |= {"reasoning_content": "".join(thoughts)} if thoughts else {}
        return [made | ({"tool_calls": calls} if calls else {})]
    if spoken or not results:
        results.append({"role": role, "content": _joined(spoken, role, where, "\n")})
    return results


def _blocks(content: Any, role: str, where: str) -> str | list[Message]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{where}: must be a text or a list of blocks")
    return _joined([_block(block, where) for block in content], role, where, "\n")


def _block(block: Any, where: str) -> Message:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "text" and isinstance(block.get("text"), str):
        return {"type": "text", "text": block["text"]}
    if kind == "text":
        raise BadRequest(f"{where}: a block of type text must have a text")
    source = block.get("source") if kind == "image" else None
    if not isinstance(source, dict) or source.get("type") not in ("base64", "url"):
        raise BadRequest(f"{where}: blocks must be texts, or images with a source of type base64 or url, not {kind!r}")
    if source["type"] == "url":
        return _image(source.get("url"), where)
    if not isinstance(source.get("data"), str):
        raise BadRequest(f"{where}: a source of type base64 must have data")
    return _image(f"data:{source.get('media_type')};base64,{source['data']}", where)


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
    content = message["content"].strip() if isinstance(message["content"], str) else message["content"]
    return json.dumps([message["role"], content, calls], sort_keys=True, ensure_ascii=False)


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
    parts_of_content = content if isinstance(content, list) else [content] if content else []
    written = "".join(map(_shown, parts_of_content))
    calls = (
        f"→ {call['function']['name']}({json.dumps(call['function']['arguments'], ensure_ascii=False)})"
        for call in message.get("tool_calls") or ()
        if isinstance(call, dict) and "function" in call
    )
    parts = [("thought", str(thought or "")), ("content", written), *(("call", call) for call in calls)]
    return [(kind, text) for kind, text in parts if text]


def _shown(part: Any) -> str:
    """Return a part of a content as text: "[image]" for an image, and JSON for what is no part."""
    if isinstance(part, str):
        return part
    is_image = isinstance(part, dict) and part.get("type") == "image"
    text = part.get("text") if isinstance(part, dict) else None
    return "[image]" if is_image else text if isinstance(text, str) else json.dumps(part, ensure_ascii=False)
