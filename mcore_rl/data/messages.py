"""Chat messages as records hold them, checked and brought into the one form that templates know."""

from __future__ import annotations

from typing import Any

from mcore_rl.data.strict_json import parse_json

Message = dict[str, Any]
Messages = list[Message]


def check_messages(value: Any, what: str) -> Messages:
    """Messages of `role` and text `content`; everything else that they have is for the template.

    Parts of text become one text, tool calls' arguments objects, and keys without a value disappear, but for
    those of arguments, where null is a value.

    Raises:
        ValueError: `what` is not a list of such messages; says which message and why.
    """
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise ValueError(f"{what} must be a list of messages, found {_kind(value)}")
    return [_check_message(message, f"{what}, message {n}") for n, message in enumerate(value, start=1)]


def _check_message(message: Message, where: str) -> Message:
    message = _with_values(message)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(f"{where}: must have a role and a content, has {', '.join(map(str, message)) or 'nothing'}")
    if "tool_calls" in message:
        message["tool_calls"] = [_check_call(call, where) for call in _list(message["tool_calls"], where)]
    if "content" in message:
        message["content"] = _text(message["content"], where)
    elif not message.get("tool_calls"):
        raise ValueError(f"{where}: has no content")
    if not isinstance(message.get("reasoning_content", ""), str):
        raise ValueError(f"{where}: reasoning_content must be a text, found {_kind(message['reasoning_content'])}")
    weight = message.get("weight")
    if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
        raise ValueError(f"{where}: weight must be 0 or 1, got {weight!r}")
    if weight == 1 and role != "assistant":
        raise ValueError(f"{where}: weight 1 on the role {role}; only the assistant's messages are trained on")
    return message


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{where}: content must be a text or a list of parts, found {_kind(content)}")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else _kind(part)
            raise ValueError(f'{where}: parts must be {{"type": "text", "text": …}}, found {kind}')
    return "".join(part["text"] for part in content)


def _check_call(call: Any, where: str) -> dict[str, Any]:
    call = _with_values(call)
    function = _with_values(call.get("function", call)) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"{where}: a tool call must have a function with a name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):  # as OpenAI writes them; templates write JSON themselves
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
    """The tools of a record: a list of descriptions, or the same as JSON.

    Raises:
        ValueError: something else.
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
    """Without a null for a description or the like; in the schema of the parameters null is a value."""
    return {**tool, "function": _with_values(tool["function"])} if "function" in tool else tool


def _with_values(value: Any) -> Any:
    """An object's keys that have one."""
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
