"""Requests and responses of OpenAI's responses (`/v1/responses`), without stored conversations."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from mcore_rl.agents.messages import BadRequest, from_openai
from mcore_rl.agents.openai_api import MODEL, Asked, count_of, refuse_prefill
from mcore_rl.agents.parsing import pieces_of
from mcore_rl.agents.sessions import Call
from mcore_rl.agents.tree import SessionTree, Turn
from mcore_rl.models.generation.interfaces import RequestOptions

WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "tool_choice": ("auto", "none"),
    "top_logprobs": (0,),
}
"""Options that would change the response, with the values that change nothing. Other values are refused."""


def request(body: dict[str, Any]) -> Asked:
    """Check a request; raise BadRequest if it is invalid or has an unsupported option."""
    for name, harmless in WITHOUT_EFFECT.items():
        if body.get(name) is not None and body[name] not in harmless:
            raise BadRequest(f"{name}={json.dumps(body[name])}: is not supported", name, "unsupported_value")
    kind = ((body.get("text") or {}).get("format") or {"type": "text"}).get("type")
    if kind != "text":
        raise BadRequest(f"text.format: {kind} is not supported, because sampling is not constrained", "text")
    messages = from_openai(_messages_of(body))
    refuse_prefill(messages)
    tools = None if body.get("tool_choice") == "none" else _tools_of(body.get("tools")) or None
    options = RequestOptions(count_of(body, "max_output_tokens"))
    return Asked(lambda tree: tree.prompt(messages, tools), 1, options, body.get("seed"))


def _messages_of(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of chat completions for the instructions and the input."""
    asked, messages = body.get("input"), list[dict[str, Any]]()
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    if isinstance(asked, str):
        return [*messages, {"role": "user", "content": asked}]
    if not isinstance(asked, list) or not asked:
        raise BadRequest("input: must be a text or a list of items", "input")
    thought = ""
    for item in asked:
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message":
            message = {"role": item.get("role"), "content": _text_of(item.get("content"))}
            if item.get("role") == "assistant" and thought:
                message["reasoning_content"] = thought
            messages.append(message)
        elif kind == "reasoning":
            thought = _text_of(item.get("content") or item.get("summary"))
            continue
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if messages and messages[-1]["role"] == "assistant":
                messages[-1].setdefault("tool_calls", []).append(call)
            else:
                spoken = {"role": "assistant", "content": "", "tool_calls": [call]}
                messages.append(spoken | ({"reasoning_content": thought} if thought else {}))
        elif kind == "function_call_output":
            output = item.get("output")
            text = output if isinstance(output, str) else _text_of(output)
            messages.append({"role": "tool", "content": text, "tool_call_id": item.get("call_id")})
        else:
            raise BadRequest(f"input: items of type {kind!r} are not supported", "input")
        thought = ""
    return messages


def _text_of(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = [part.get("text") if isinstance(part, dict) else None for part in content]
    if not all(isinstance(part, str) for part in parts):
        raise BadRequest("input: only texts are supported in content", "input")
    return "".join(map(str, parts))


def _tools_of(tools: Any) -> list[dict[str, Any]]:
    """Convert tools to those of chat completions; raise BadRequest for tools that only OpenAI's servers can run."""
    made = []
    for tool in tools or ():
        if not isinstance(tool, dict) or tool.get("type") != "function" or "name" not in tool:
            raise BadRequest("tools: must be functions; hosted tools are not supported", "tools")
        function = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
        made.append({"type": "function", "function": function})
    return made


class ResponseReply:
    """The response to a request, as one object or as a stream of events."""

    def __init__(self, call: Call, tree: SessionTree, body: Mapping[str, Any]) -> None:
        self.call, self.tree, self.asked = call, tree, body
        self.id, self.created = f"resp_{secrets.token_hex(24)}", int(time.time())

    def body(self, turns: list[Turn]) -> dict[str, Any]:
        (turn,) = turns
        is_whole, sampled = turn.response.ended, len(turn.response.token_ids)
        usage = {
            "input_tokens": len(self.call.prompt.ids),
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": len(self.call.prompt.ids) + sampled,
        }
        why = None if is_whole else {"reason": "max_output_tokens"}
        status = "completed" if is_whole else "incomplete"
        return {**self._head(status), "output": self._items(turn, status), "incomplete_details": why, "usage": usage}

    async def events(self, turns: list[Turn]) -> AsyncIterator[str]:
        whole, number = self.body(turns), 0

        def told(kind: str, **values: Any) -> str:
            nonlocal number
            number += 1
            event = {"type": kind, "sequence_number": number - 1, **values}
            return f"event: {kind}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n"

        begun = {**self._head("in_progress"), "output": [], "incomplete_details": None, "usage": None}
        yield told("response.created", response=begun)
        yield told("response.in_progress", response=begun)
        for index, item in enumerate(whole["output"]):
            place = {"item_id": item["id"], "output_index": index}
            emptied: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
            empty = {**item, "status": "in_progress", **emptied}
            yield told("response.output_item.added", output_index=index, item=empty)
            if item["type"] == "function_call":
                for piece in pieces_of(item["arguments"]):
                    yield told("response.function_call_arguments.delta", **place, delta=piece)
                yield told(
                    "response.function_call_arguments.done", **place, name=item["name"], arguments=item["arguments"]
                )
            elif item["type"] == "message":
                (part,), place = item["content"], {**place, "content_index": 0}
                yield told("response.content_part.added", **place, part={**part, "text": ""})
                for piece in pieces_of(part["text"]):
                    yield told("response.output_text.delta", **place, delta=piece, logprobs=[])
                yield told("response.output_text.done", **place, text=part["text"], logprobs=[])
                yield told("response.content_part.done", **place, part=part)
            yield told("response.output_item.done", output_index=index, item=item)
        yield told("response.completed" if whole["status"] == "completed" else "response.incomplete", response=whole)

    def _head(self, status: str) -> dict[str, Any]:
        asked = self.asked
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "instructions": asked.get("instructions"),
            "max_output_tokens": asked.get("max_output_tokens"),
            "metadata": asked.get("metadata") or {},
            "model": asked.get("model") or MODEL,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": asked.get("temperature"),
            "text": {"format": {"type": "text"}},
            "tool_choice": asked.get("tool_choice") or "auto",
            "tools": asked.get("tools") or [],
            "top_p": asked.get("top_p"),
            "truncation": "disabled",
        }

    def _items(self, turn: Turn, status: str) -> list[dict[str, Any]]:
        message, items = turn.messages[-1], list[dict[str, Any]]()
        if message.get("reasoning_content"):
            thought = [{"type": "reasoning_text", "text": message["reasoning_content"]}]
            items.append({"type": "reasoning", "id": _id("rs"), "summary": [], "content": thought, "status": status})
        if message["content"] or not message.get("tool_calls"):
            text = {"type": "output_text", "text": message["content"], "annotations": [], "logprobs": []}
            items.append(
                {"type": "message", "id": _id("msg"), "status": status, "role": "assistant", "content": [text]}
            )
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            items.append(
                {
                    "type": "function_call",
                    "id": _id("fc"),
                    "call_id": call["id"],
                    "name": call["function"]["name"],
                    "arguments": written,
                    "status": status,
                }
            )
        return items


def _id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(24)}"
