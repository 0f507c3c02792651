"""Requests and responses of OpenAI's responses (`/v1/responses`), without stored conversations."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any

from mcore_rl.agents import openai_api
from mcore_rl.agents.live import LiveText
from mcore_rl.agents.messages import BadRequest, from_openai, images_in
from mcore_rl.agents.openai_api import MODEL, Asked, check_options, count_of, refuse_prefill
from mcore_rl.agents.parsing import pieces_of
from mcore_rl.agents.sessions import Call
from mcore_rl.agents.tree import SessionTree, Turn
from mcore_rl.models.generation.interfaces import RequestOptions, Response

WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "tool_choice": ("auto", "none"),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "include": ([], ["reasoning.encrypted_content"]),
    "stop": ([],),
    "n": (1,),
}
"""Options that would change the response, with the values that change nothing. Other values are refused."""


def request(body: dict[str, Any]) -> Asked:
    """Check a request; raise BadRequest if it is invalid or has an unsupported option."""
    check_options(body, {**openai_api.WITHOUT_EFFECT, **WITHOUT_EFFECT})
    kind = ((body.get("text") or {}).get("format") or {"type": "text"}).get("type")
    if kind != "text":
        raise BadRequest(f"text.format: {kind} is not supported, because sampling is not constrained", "text")
    messages = from_openai(_messages_of(body))
    refuse_prefill(messages)
    tools = None if body.get("tool_choice") == "none" else _tools_of(body.get("tools")) or None
    options = RequestOptions(count_of(body, "max_output_tokens"))
    return Asked(lambda tree: tree.prompt(messages, tools), 1, options, body.get("seed"), images_in(messages))


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
            message = {"role": item.get("role"), "content": item.get("content")}
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
            messages.append({"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")})
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
        self._ids = dict[str, str]()

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

    async def events(self, parts: AsyncIterator[Response], turns: Awaitable[list[Turn]]) -> AsyncIterator[str]:
        stream = _Stream(self.item)
        begun = {**self._head("in_progress"), "output": [], "incomplete_details": None, "usage": None}
        yield stream.told("response.created", response=begun)
        yield stream.told("response.in_progress", response=begun)
        async for key, piece in LiveText(self.tree, self.call).all_pieces(parts, turns):
            if key != stream.key:
                for event in (*stream.end("completed"), *stream.begin(key)):
                    yield event
            yield stream.add(piece)
        whole = self.body(await turns)
        status = whole["status"]
        for event in stream.end(status):
            yield event
        for item in whole["output"][stream.count :]:  # calls of functions, or an empty text
            is_call = item["type"] == "function_call"
            for event in stream.call(item) if is_call else (*stream.begin("content"), *stream.end(status)):
                yield event
        yield stream.told("response.completed" if status == "completed" else "response.incomplete", response=whole)

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
            of_thought = "completed" if message["content"] or message.get("tool_calls") else status
            items.append(self.item("reasoning_content", message["reasoning_content"], of_thought))
        if message["content"] or not message.get("tool_calls"):
            items.append(self.item("content", message["content"], status))
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            items.append(
                {
                    "type": "function_call",
                    "id": self._id_of(call["id"]),
                    "call_id": call["id"],
                    "name": call["function"]["name"],
                    "arguments": written,
                    "status": status,
                }
            )
        return items

    def item(self, key: str, text: str, status: str) -> dict[str, Any]:
        """Return the item for a text of the message: its thought or its content."""
        item = {"id": self._id_of(key), "content": [_part(key, text)], "status": status}
        if key == "content":
            return {**item, "type": "message", "role": "assistant"}
        return {**item, "type": "reasoning", "summary": []}

    def _id_of(self, key: str) -> str:
        """Return the id of the item for a text or a call: in all events the same."""
        kind = {"content": "msg", "reasoning_content": "rs"}.get(key, "fc")
        return self._ids.setdefault(key, f"{kind}_{secrets.token_hex(24)}")


def _part(key: str, text: str) -> dict[str, Any]:
    if key == "content":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": text}


class _Stream:
    """Makes the events of a stream: first those of the texts, one text after another, then those of function calls.

    key: key of the text that is open; "" if none is.
    count: number of items that have begun.

    Args:
        item: function that returns the item for a key, a text and a status.
    """

    def __init__(self, item: Callable[[str, str, str], dict[str, Any]]) -> None:
        self._item, self._number, self._text = item, 0, ""
        self.key, self.count = "", 0

    def told(self, kind: str, **values: Any) -> str:
        event = {"type": kind, "sequence_number": self._number, **values}
        self._number += 1
        return f"event: {kind}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n"

    def begin(self, key: str) -> Iterator[str]:
        self.key, self.count, self._text = key, self.count + 1, ""
        yield self._of_item("added", {**self._item(key, "", "in_progress"), "content": []})
        yield self.told("response.content_part.added", **self._place, part=_part(key, ""))

    def add(self, piece: str) -> str:
        self._text += piece
        return self._of_text("delta", delta=piece)

    def end(self, status: str) -> Iterator[str]:
        if not self.key:
            return
        yield self._of_text("done", text=self._text)
        yield self.told("response.content_part.done", **self._place, part=_part(self.key, self._text))
        yield self._of_item("done", self._item(self.key, self._text, status))
        self.key = ""

    def call(self, item: Mapping[str, Any]) -> Iterator[str]:
        self.count += 1
        place = {"item_id": item["id"], "output_index": self.count - 1}
        yield self._of_item("added", {**item, "status": "in_progress", "arguments": ""})
        for piece in pieces_of(item["arguments"]):
            yield self.told("response.function_call_arguments.delta", **place, delta=piece)
        done = {"name": item["name"], "arguments": item["arguments"]}
        yield self.told("response.function_call_arguments.done", **place, **done)
        yield self._of_item("done", item)

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item(self.key, "", "")["id"], "output_index": self.count - 1, "content_index": 0}

    def _of_item(self, what: str, item: Mapping[str, Any]) -> str:
        return self.told(f"response.output_item.{what}", output_index=self.count - 1, item=item)

    def _of_text(self, what: str, **values: Any) -> str:
        part = _part(self.key, "")
        more: dict[str, Any] = {"logprobs": []} if "logprobs" in part else {}
        return self.told(f"response.{part['type']}.{what}", **self._place, **values, **more)
