"""Requests and responses of OpenAI's chat completions and completions."""

from __future__ import annotations

import hashlib
import itertools
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_rl.agents.live import LiveText
from mcore_rl.agents.messages import BadRequest, Message, from_openai
from mcore_rl.agents.parsing import pieces_of
from mcore_rl.agents.sessions import Call
from mcore_rl.agents.tree import SessionTree, Turn, TurnPrompt
from mcore_rl.models.generation.interfaces import RequestOptions, Response

MODEL = "policy"
"""Name of the model in `/v1/models`. Requests may name any model."""
MOST_CHOICES = 128
MOST_STOPS, LONGEST_STOP = 64, 1024
MOST_LIKELIEST = 20
"""Maximum of `top_logprobs`, and of the `logprobs` of a completion request."""

WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "tool_choice": ("auto", "none"),
    "function_call": ("auto", "none"),
}
"""Options that would change what is sampled, with the values that change nothing. Other values are refused."""


@dataclass(frozen=True)
class Asked:
    """A request, checked.

    prompt: function that returns the prompt in a session's tree.
    count: number of responses.
    """

    prompt: Callable[[SessionTree], TurnPrompt]
    count: int
    options: RequestOptions
    seed: Any = None


def digest_of(path: str, body: Any) -> str:
    return hashlib.sha256(json.dumps([path, body], sort_keys=True).encode()).hexdigest()


def chat_request(body: dict[str, Any]) -> Asked:
    """Check a chat completion request; raise BadRequest if it is invalid or has an unsupported option."""
    _check_options(body)
    tools = None if body.get("tool_choice") == "none" else body.get("tools") or None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise BadRequest("tools: must be a list of tools", "tools")
    messages = from_openai(body.get("messages"))
    refuse_prefill(messages)
    longest = count_of(body, "max_completion_tokens") or count_of(body, "max_tokens")
    count = count_of(body, "top_logprobs", most=MOST_LIKELIEST, least=0) or 0
    if body.get("logprobs") not in (None, False, True):
        raise BadRequest("logprobs: must be true or false", "logprobs", "invalid_value")
    if count and not body.get("logprobs"):
        raise BadRequest("top_logprobs: requires logprobs=true", "top_logprobs", "invalid_value")
    options = RequestOptions(longest, stops_of(body.get("stop"), "stop"), count)
    return Asked(lambda tree: tree.prompt(messages, tools), _choices(body), options, body.get("seed"))


def completion_request(body: dict[str, Any], vocabulary: int) -> Asked:
    """Check a completion request; raise BadRequest if it is invalid or has an unsupported option."""
    _check_options(body)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    are_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not prompt or not (are_ids or isinstance(prompt, str)):
        raise BadRequest("prompt: must be one text, or the token ids of one text", "prompt")
    if are_ids and not all(0 <= token < vocabulary for token in prompt):
        raise BadRequest(f"prompt: token ids must be from 0 to {vocabulary - 1}", "prompt")
    count = count_of(body, "logprobs", most=MOST_LIKELIEST, least=0) or 0
    options = RequestOptions(count_of(body, "max_tokens") or 16, stops_of(body.get("stop"), "stop"), count)
    return Asked(lambda tree: tree.prompt_of_text(prompt), _choices(body), options, body.get("seed"))


def refuse_prefill(messages: Sequence[Message]) -> None:
    if messages[-1]["role"] == "assistant":
        raise BadRequest("messages: the last message must not be the assistant's", "messages")


def _check_options(body: Mapping[str, Any]) -> None:
    for name, harmless in WITHOUT_EFFECT.items():
        value = body.get(name)
        if value is not None and value not in harmless:
            raise BadRequest(
                f"{name}={json.dumps(value)}: is not supported, because it changes which tokens are sampled; leave it "
                "out",
                name,
                "unsupported_value",
            )

    if not isinstance(body.get("stream_options") or {}, dict):
        raise BadRequest("stream_options: must be an object", "stream_options")


def _choices(body: Mapping[str, Any]) -> int:
    return count_of(body, "n", most=MOST_CHOICES) or 1


def count_of(body: Mapping[str, Any], name: str, most: int | None = None, least: int = 1) -> int | None:
    """Return an integer of a request, at least `least` and at most `most`; None if it is missing."""
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int or value < least or (most is not None and value > most):
        range_ = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise BadRequest(f"{name}: must be an integer {range_}, got {json.dumps(value)}", name, "invalid_value")
    return value


def stops_of(value: Any, name: str) -> tuple[str, ...]:
    """Return the stop strings of a request."""
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise BadRequest(f"{name}: must be a text or a list of texts", name, "invalid_value")
    if len(stops) > MOST_STOPS or any(len(stop) > LONGEST_STOP for stop in stops):
        limit = f"{MOST_STOPS} texts of at most {LONGEST_STOP} characters"
        raise BadRequest(f"{name}: must be at most {limit}", name, "invalid_value")
    return tuple(stops)


# ------------------------------------------------------------ responses


def models_body(name: str = MODEL, max_sequence_length: int | None = None) -> dict[str, Any]:
    card: dict[str, Any] = {"id": name, "object": "model", "created": 0, "owned_by": "mcore_rl"}
    # Anthropic's list has the same route and further keys.
    card |= {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
    if max_sequence_length is not None:
        card["max_model_len"] = max_sequence_length  # vLLM's name
    return {"object": "list", "data": [card], "has_more": False, "first_id": name, "last_id": name}


def error_body(status: int, message: str, param: str | None, code: str | None) -> dict[str, Any]:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def event(value: Any) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


def usage_of(turns: Sequence[Turn]) -> dict[str, int]:
    asked, sampled = len(turns[0].prompt.ids), sum(len(turn.response.token_ids) for turn in turns)
    return {"prompt_tokens": asked, "completion_tokens": sampled, "total_tokens": asked + sampled}


class ChatReply:
    """The response to a chat completion request, as one object or as a stream of chunks."""

    def __init__(self, call: Call, tree: SessionTree, body: Mapping[str, Any]) -> None:
        self.call, self.tree, self.asked = call, tree, body
        self.id, self.created = f"chatcmpl-{secrets.token_hex(12)}", int(time.time())

    def body(self, turns: list[Turn]) -> dict[str, Any]:
        choices = []
        for index, turn in enumerate(turns):
            logprobs = self._logprobs(turn) if self.asked.get("logprobs") else None
            message = {**_message(turn.messages[-1]), "refusal": None}
            choice = {"index": index, "message": message, "finish_reason": finish_of(turn), "logprobs": logprobs}
            choices.append(choice | ({"token_ids": turn.response.token_ids.tolist()} if self._tells_ids else {}))
        made = {**self._head("chat.completion"), "choices": choices, "usage": usage_of(turns)}
        return made | ({"prompt_token_ids": self.call.prompt.ids} if self._tells_ids else {})

    async def events(self, turns: list[Turn]) -> AsyncIterator[str]:
        head = self._head("chat.completion.chunk")
        with_usage = bool((self.asked.get("stream_options") or {}).get("include_usage"))

        def chunk(index: int, delta: Mapping[str, Any], **more: Any) -> str:
            choice = {"index": index, "delta": delta, "finish_reason": None, "logprobs": None, **more}
            return event({**head, "choices": [choice], **({"usage": None} if with_usage else {})})

        for index, turn in enumerate(turns):
            message = _message(turn.messages[-1])
            yield chunk(index, {"role": "assistant", "content": ""})
            for key in ("reasoning_content", "content"):
                for piece in pieces_of(message.get(key) or ""):
                    yield chunk(index, {key: piece})
            for place, called in enumerate(message.get("tool_calls", ())):
                yield chunk(index, {"tool_calls": [{"index": place, **called}]})
            logprobs = self._logprobs(turn) if self.asked.get("logprobs") else None
            yield chunk(index, {}, finish_reason=finish_of(turn), logprobs=logprobs)
        if with_usage:
            yield event({**head, "choices": [], "usage": usage_of(turns)})
        yield "data: [DONE]\n\n"

    async def live_events(self, parts: AsyncIterator[Response], turns: Awaitable[list[Turn]]) -> AsyncIterator[str]:
        """Yield the events of one response while it is sampled.

        Args:
            parts: the response as it grows.
            turns: the turn of the whole response.
        """
        head, live = self._head("chat.completion.chunk"), LiveText(self.tree, self.call)
        with_usage = bool((self.asked.get("stream_options") or {}).get("include_usage"))

        def chunk(delta: Mapping[str, Any], **more: Any) -> str:
            choice = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": None, **more}
            return event({**head, "choices": [choice], **({"usage": None} if with_usage else {})})

        def chunks(pieces: Sequence[tuple[str, str]], response: Response, start: int) -> Iterator[str]:
            logprobs = self._logprobs_of(response, start) if self.asked.get("logprobs") else None
            for number, (key, text) in enumerate(pieces or ([("content", "")] if logprobs else [])):
                yield chunk({key: text}, logprobs=logprobs if number == 0 else None)

        yield chunk({"role": "assistant", "content": ""})
        async for response in parts:
            start = live.sent_tokens
            for each in chunks(live.pieces(response), response, start):
                yield each
        (turn,) = await turns
        start = live.sent_tokens
        for each in chunks(live.rest(turn), turn.response, start):
            yield each
        yield chunk({}, finish_reason=finish_of(turn))
        if with_usage:
            yield event({**head, "choices": [], "usage": usage_of([turn])})
        yield "data: [DONE]\n\n"

    @property
    def _tells_ids(self) -> bool:
        return bool(self.asked.get("return_token_ids"))

    def _head(self, kind: str) -> dict[str, Any]:
        model = self.asked.get("model") or MODEL
        return {"id": self.id, "object": kind, "created": self.created, "model": model, "system_fingerprint": None}

    def _logprobs(self, turn: Turn) -> dict[str, Any]:
        return self._logprobs_of(turn.response, 0)

    def _logprobs_of(self, response: Response, start: int) -> dict[str, Any]:
        """Return the log-probabilities of the tokens from `start` on."""
        sampled = zip(response.token_ids[start:].tolist(), response.logprobs[start:].tolist(), strict=True)
        likeliest = list(response.likeliest)[start:] or [()] * (len(response.token_ids) - start)
        content = [
            {**self._of_token(*pair), "top_logprobs": [self._of_token(*other) for other in others]}
            for pair, others in zip(sampled, likeliest, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _of_token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.tree.template.text([token])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def finish_of(turn: Turn) -> str:
    if not turn.response.ended:
        return "length"
    return "tool_calls" if turn.messages and turn.messages[-1].get("tool_calls") else "stop"


def _message(message: Message) -> dict[str, Any]:
    """Return a message in OpenAI's form: arguments of tool calls as JSON text, content null beside tool calls."""
    made = dict(message)
    if "tool_calls" in made:
        made["content"] = made["content"] or None
        made["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _json(call["function"]["arguments"])}}
            for call in made["tool_calls"]
        ]
    return made


def _json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


class CompletionReply:
    """The response to a completion request.

    Args:
        first: index of the first choice, if the request has several prompts.
    """

    def __init__(self, call: Call, tree: SessionTree, body: Mapping[str, Any], first: int = 0) -> None:
        self.call, self.tree, self.asked, self.first = call, tree, body, first
        self.head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.get("model") or MODEL,
        }

    def body(self, turns: list[Turn]) -> dict[str, Any]:
        made = {**self.head, "choices": self.choices(turns), "usage": usage_of(turns)}
        tells_ids = self.asked.get("return_token_ids")
        return made | ({"prompt_token_ids": self.call.prompt.ids} if tells_ids else {})

    def choices(self, turns: list[Turn]) -> list[dict[str, Any]]:
        return [self._choice(index, turn) for index, turn in enumerate(turns, self.first)]

    async def events(self, turns: list[Turn]) -> AsyncIterator[str]:
        for choice in self.choices(turns):
            yield event({**self.head, "choices": [choice]})
        for each in self._last_events(turns):
            yield each

    async def live_events(self, parts: AsyncIterator[Response], turns: Awaitable[list[Turn]]) -> AsyncIterator[str]:
        """Yield the events of one response while it is sampled; see `ChatReply.live_events`."""
        live, offset = LiveText(self.tree, self.call), 0

        def chunk(pieces: Sequence[tuple[str, str]], response: Response, start: int, finish: str | None) -> str:
            nonlocal offset
            text, logprobs = "".join(text for _, text in pieces), None
            if self.asked.get("logprobs") is not None:
                tokens = _Tokens.of(response, start)
                logprobs, offset = self._told(tokens, offset)
            choice = {"index": self.first, "text": text, "finish_reason": finish, "logprobs": logprobs}
            return event({**self.head, "choices": [choice]})

        async for response in parts:
            start = live.sent_tokens
            if (pieces := live.pieces(response)) or self.asked.get("logprobs") is not None:
                yield chunk(pieces, response, start, None)
        (turn,) = await turns
        start = live.sent_tokens
        yield chunk(live.rest(turn), turn.response, start, "stop" if turn.response.ended else "length")
        for each in self._last_events([turn]):
            yield each

    def _last_events(self, turns: list[Turn]) -> Iterator[str]:
        if (self.asked.get("stream_options") or {}).get("include_usage"):
            yield event({**self.head, "choices": [], "usage": usage_of(turns)})
        yield "data: [DONE]\n\n"

    def _choice(self, index: int, turn: Turn) -> dict[str, Any]:
        ids, logprobs = turn.response.token_ids.tolist(), None
        sampled = _Tokens.of(turn.response, 0)
        text = self.tree.text_of(turn.response, self.call.stops)
        finish = "stop" if turn.response.ended else "length"
        if self.asked.get("echo"):
            prompt = self.call.prompt.ids
            text = (self.call.prompt.text or self.tree.template.text(prompt)) + text
            if self.asked.get("max_tokens") == 0:  # the engine samples at least one token
                ids, sampled, finish = [], _Tokens([], [], []), "length"
                text = self.call.prompt.text or self.tree.template.text(prompt)
            sampled = _Tokens.of_prompt(prompt, turn.response) + sampled
        if self.asked.get("logprobs") is not None:
            logprobs, _ = self._told(sampled, 0)
        choice = {"index": index, "text": text, "finish_reason": finish, "logprobs": logprobs}
        return choice | ({"token_ids": ids} if self.asked.get("return_token_ids") else {})

    def _told(self, tokens: _Tokens, offset: int) -> tuple[dict[str, Any], int]:
        """Return the `logprobs` of tokens whose text begins at `offset`, and the offset of the next token."""
        texts = [self.tree.template.text([token]) for token in tokens.ids]
        ends = list(itertools.accumulate(map(len, texts), initial=offset))
        told = {
            "tokens": texts,
            "token_logprobs": tokens.logprobs,
            "top_logprobs": self._top_logprobs(tokens) if self.asked.get("logprobs") else None,
            "text_offset": ends[:-1],
        }
        return told, ends[-1]

    def _top_logprobs(self, tokens: _Tokens) -> list[dict[str, float] | None]:
        """Return the likeliest tokens of each position, and the sampled one, by their texts; None where not known.

        Of tokens with the same text, it has the likeliest.
        """
        text = self.tree.template.text
        return [
            None
            if logprob is None
            else {text([token]): logprob, **{text([other]): value for other, value in reversed(likeliest)}}
            for token, logprob, likeliest in zip(tokens.ids, tokens.logprobs, tokens.likeliest, strict=True)
        ]


@dataclass(frozen=True)
class _Tokens:
    """Tokens with their log-probabilities and the likeliest tokens in their places; None for a prompt's first token."""

    ids: list[int]
    logprobs: list[float | None]
    likeliest: list[Sequence[tuple[int, float]]]

    @classmethod
    def of(cls, response: Response, start: int) -> _Tokens:
        ids = response.token_ids[start:].tolist()
        return cls(ids, response.logprobs[start:].tolist(), list(response.likeliest)[start:] or [()] * len(ids))

    @classmethod
    def of_prompt(cls, ids: list[int], response: Response) -> _Tokens:
        scores = response.prompt_scores
        if scores is None:  # only the text is asked for
            return cls([], [], [])
        return cls(list(ids), [None, *scores.logprobs.tolist()], [(), *scores.likeliest])

    def __add__(self, other: _Tokens) -> _Tokens:
        return _Tokens(self.ids + other.ids, self.logprobs + other.logprobs, self.likeliest + other.likeliest)
