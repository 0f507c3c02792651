"""Requests and responses of Anthropic's messages."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Mapping
from typing import Any

from mcore_rl.agents import openai_api
from mcore_rl.agents.live import LiveText
from mcore_rl.agents.messages import BadRequest, from_anthropic, images_in, tools_from_anthropic
from mcore_rl.agents.openai_api import MODEL, Asked, count_of, refuse_prefill, stops_of
from mcore_rl.agents.parsing import pieces_of
from mcore_rl.agents.sessions import Call
from mcore_rl.agents.tree import SessionTree, Turn
from mcore_rl.models.generation.interfaces import RequestOptions, Response

ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    410: "invalid_request_error",
    413: "request_too_large",
}
BLOCKS: Mapping[str, Mapping[str, Any]] = {
    "reasoning_content": {"type": "thinking", "thinking": "", "signature": ""},
    "content": {"type": "text", "text": ""},
}
"""The blocks, as they begin, for the texts of a message."""


def request(body: dict[str, Any]) -> Asked:
    """Check a request; raise BadRequest if it is invalid or has an unsupported option."""
    choice = (body.get("tool_choice") or {"type": "auto"}).get("type")
    if choice not in ("auto", "none"):
        raise BadRequest(
            f"tool_choice: {choice} is not supported, because sampling is not constrained; send auto or none"
        )
    own = {name: values for name, values in openai_api.WITHOUT_EFFECT.items() if name != "tool_choice"}
    openai_api.check_options(body, {**own, "stop": ([],), "n": (1,), "output_format": ()})
    tools = None if choice == "none" else tools_from_anthropic(body.get("tools")) or None
    messages = from_anthropic(body.get("system"), body.get("messages"))
    refuse_prefill(messages)
    if (longest := count_of(body, "max_tokens")) is None:
        raise BadRequest("max_tokens: is missing")
    options = RequestOptions(longest, stops_of(body.get("stop_sequences"), "stop_sequences"))
    return Asked(lambda tree: tree.prompt(messages, tools), 1, options, images=images_in(messages))


def error_body(status: int, message: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"type": "error", "error": {"type": ERRORS.get(status, "api_error"), "message": message}}


class Reply:
    """The response to a request, as one object or as a stream of events."""

    def __init__(self, call: Call, tree: SessionTree, body: Mapping[str, Any]) -> None:
        self.call, self.tree, self.asked = call, tree, body
        self.id = f"msg_{secrets.token_hex(12)}"

    def body(self, turns: list[Turn]) -> dict[str, Any]:
        (turn,) = turns
        reason, stop = self._stop(turn)
        usage = {"input_tokens": len(self.call.prompt.ids), "output_tokens": len(turn.response.token_ids)}
        return {
            **self._head,
            "content": self._blocks(turn),
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage,
        }

    async def events(self, parts: AsyncIterator[Response], turns: Awaitable[list[Turn]]) -> AsyncIterator[str]:
        usage = {"input_tokens": len(self.call.prompt.ids), "output_tokens": 0}
        message = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield _event("message_start", message=message)
        index, kind = -1, ""
        async for key, piece in LiveText(self.tree, self.call).all_pieces(parts, turns):
            if kind != BLOCKS[key]["type"]:
                if kind:
                    yield _event("content_block_stop", index=index)
                index, kind = index + 1, BLOCKS[key]["type"]
                yield _event("content_block_start", index=index, content_block=BLOCKS[key])
            yield _event("content_block_delta", index=index, delta={"type": f"{kind}_delta", kind: piece})
        if kind:
            yield _event("content_block_stop", index=index)
        whole = self.body(await turns)
        for place, block in enumerate(whole["content"][index + 1 :], index + 1):  # tool calls, or an empty text
            is_call = block["type"] == "tool_use"
            yield _event("content_block_start", index=place, content_block={**block, "input": {}} if is_call else block)
            for piece in pieces_of(json.dumps(block["input"], ensure_ascii=False)) if is_call else ():
                delta = {"type": "input_json_delta", "partial_json": piece}
                yield _event("content_block_delta", index=place, delta=delta)
            yield _event("content_block_stop", index=place)
        ended = {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
        yield _event("message_delta", delta=ended, usage={"output_tokens": whole["usage"]["output_tokens"]})
        yield _event("message_stop")

    @property
    def _head(self) -> dict[str, Any]:
        model = self.asked.get("model") or MODEL
        return {"id": self.id, "type": "message", "role": "assistant", "model": model}

    def _blocks(self, turn: Turn) -> list[dict[str, Any]]:
        message, blocks = turn.messages[-1], list[dict[str, Any]]()
        if message.get("reasoning_content"):
            blocks.append({**BLOCKS["reasoning_content"], "thinking": message["reasoning_content"]})
        if message["content"] or not message.get("tool_calls"):
            blocks.append({**BLOCKS["content"], "text": message["content"]})
        for call in message.get("tool_calls", ()):
            function = call["function"]
            blocks.append(
                {"type": "tool_use", "id": call["id"], "name": function["name"], "input": function["arguments"]}
            )
        return blocks

    def _stop(self, turn: Turn) -> tuple[str, str | None]:
        if not turn.response.ended:
            return "max_tokens", None
        if turn.messages[-1].get("tool_calls"):
            return "tool_use", None
        text = self.tree.text_of(turn.response)
        found = [stop for stop in self.call.stops if stop in text]
        return ("stop_sequence", min(found, key=text.find)) if found else ("end_turn", None)


def _event(kind: str, **values: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **values}, ensure_ascii=False)}\n\n"
