"""Requests and responses of OpenAI's chat completions and completions."""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_rl.agents.live import LiveText, Piece
from mcore_rl.agents.messages import BadRequest, Message, from_openai, images_in
from mcore_rl.agents.sessions import Call
from mcore_rl.agents.tree import SessionTree, Turn, TurnPrompt
from mcore_rl.data.texts import leading_special_tokens
from mcore_rl.data.token_texts import TokenTexts
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
    "ignore_eos": (False,),
    "use_beam_search": (False,),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "truncate_prompt_tokens": (),
}
"""Options that would change what is sampled, with the values that change nothing. Other values are refused."""


@dataclass(frozen=True)
class Asked:
    """A request, checked.

    prompt: function that returns the prompt in a session's tree.
    count: number of responses.
    images: the image parts of the messages. `prompt` may be called once their sources are files (`SessionImages.take`).
    """

    prompt: Callable[[SessionTree], TurnPrompt]
    count: int
    options: RequestOptions
    seed: Any = None
    images: Sequence[Message] = ()


def digest_of(path: str, body: Any) -> str:
    return hashlib.sha256(json.dumps([path, body], sort_keys=True).encode()).hexdigest()


def chat_request(body: dict[str, Any]) -> Asked:
    """Check a chat completion request; raise BadRequest if it is invalid or has an unsupported option."""
    check_options(body)
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
    images = images_in(messages)
    return Asked(lambda tree: tree.prompt(messages, tools), _choices(body), options, body.get("seed"), images)


def completion_request(body: dict[str, Any], vocabulary: int) -> Asked:
    """Check a completion request; raise BadRequest if it is invalid or has an unsupported option."""
    check_options(body)
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


def check_options(body: Mapping[str, Any], values: Mapping[str, tuple[Any, ...]] = WITHOUT_EFFECT) -> None:
    """Raise BadRequest for an option that is not supported, unless it has a value of `values`."""
    for name, harmless in values.items():
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
            texts = TokenTexts(self.tree.template.tokenizer)
            logprobs = self._logprobs(texts, turn.response, True) if self.asked.get("logprobs") else None
            message = {**_message(turn.messages[-1]), "refusal": None}
            choice = {"index": index, "message": message, "finish_reason": finish_of(turn), "logprobs": logprobs}
            choices.append(choice | ({"token_ids": turn.response.token_ids.tolist()} if self._tells_ids else {}))
        made = {**self._head("chat.completion"), "choices": choices, "usage": usage_of(turns)}
        return made | ({"prompt_token_ids": self.call.prompt.ids} if self._tells_ids else {})

    async def events(self, parts: AsyncIterator[Response], turns: Awaitable[list[Turn]]) -> AsyncIterator[str]:
        head = self._head("chat.completion.chunk")
        with_usage = bool((self.asked.get("stream_options") or {}).get("include_usage"))

        def chunk(index: int, delta: Mapping[str, Any], **more: Any) -> str:
            choice = {"index": index, "delta": delta, "finish_reason": None, "logprobs": None, **more}
            return event({**head, "choices": [choice], **({"usage": None} if with_usage else {})})

        def chunks(pieces: Sequence[Piece], part: Response, is_last: bool) -> Iterator[str]:
            """Yield the chunks of some pieces; the first one has the log-probabilities of all tokens."""
            logprobs = self._logprobs(texts, part, is_last) if self.asked.get("logprobs") else None
            for number, (key, text) in enumerate(pieces or ([("content", "")] if logprobs else [])):
                yield chunk(index, {key: text}, logprobs=logprobs if number == 0 else None)

        index, live, texts = 0, LiveText(self.tree, self.call), TokenTexts(self.tree.template.tokenizer)
        yield chunk(0, {"role": "assistant", "content": ""})
        async for part in parts:
            for each in chunks(live.pieces(part), part, False):
                yield each
        whole = await turns
        for index, turn in enumerate(whole):
            if index > 0:
                live, texts = LiveText(self.tree, self.call), TokenTexts(self.tree.template.tokenizer)
                yield chunk(index, {"role": "assistant", "content": ""})
            for each in chunks(*live.rest(turn), True):
                yield each
            for place, called in enumerate(_message(turn.messages[-1]).get("tool_calls", ())):
                yield chunk(index, {"tool_calls": [{"index": place, **called}]})
            yield chunk(index, {}, finish_reason=finish_of(turn))
        if with_usage:
            yield event({**head, "choices": [], "usage": usage_of(whole)})
        yield "data: [DONE]\n\n"

    @property
    def _tells_ids(self) -> bool:
        return bool(self.asked.get("return_token_ids"))

    def _head(self, kind: str) -> dict[str, Any]:
        model = self.asked.get("model") or MODEL
        return {"id": self.id, "object": kind, "created": self.created, "model": model, "system_fingerprint": None}

    def _logprobs(self, texts: TokenTexts, part: Response, is_last: bool) -> dict[str, Any]:
        """Return the log-probabilities of the tokens of `part`, which come after the tokens in `texts`."""

        def told(token: int, text: str, logprob: float) -> dict[str, Any]:
            return {"token": text, "logprob": logprob, "bytes": texts.bytes_of(token, text)}

        content, tokens = list[dict[str, Any]](), _Tokens.of(part)
        for place, token in enumerate(tokens.ids):
            others = [told(other, texts.of_next(other), logprob) for other, logprob in tokens.likeliest[place]]
            text = texts.add(token, is_last and place == len(tokens.ids) - 1)
            content.append({**told(token, text, part.logprobs[place].item()), "top_logprobs": others})
        return {"content": content, "refusal": None}


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

    async def events(self, parts: AsyncIterator[Response], turns: Awaitable[list[Turn]]) -> AsyncIterator[str]:
        live, texts = LiveText(self.tree, self.call), TokenTexts(self.tree.template.tokenizer)

        def chunk(pieces: Sequence[Piece], part: Response, finish: str | None) -> str:
            text, logprobs = "".join(text for _, text in pieces), None
            if self.asked.get("logprobs") is not None:
                logprobs = self._told(texts, _Tokens.of(part), finish is not None)
            choice = {"index": self.first, "text": text, "finish_reason": finish, "logprobs": logprobs}
            return event({**self.head, "choices": [choice]})

        async for part in parts:
            if (pieces := live.pieces(part)) or self.asked.get("logprobs") is not None:
                yield chunk(pieces, part, None)
        whole = await turns
        if len(whole) == 1:
            yield chunk(*live.rest(whole[0]), _end_of(whole[0]))
        else:  # then there were no parts
            for choice in self.choices(whole):
                yield event({**self.head, "choices": [choice]})
        if (self.asked.get("stream_options") or {}).get("include_usage"):
            yield event({**self.head, "choices": [], "usage": usage_of(whole)})
        yield "data: [DONE]\n\n"

    def _choice(self, index: int, turn: Turn) -> dict[str, Any]:
        ids, logprobs = turn.response.token_ids.tolist(), None
        sampled = _Tokens.of(turn.response)
        text, finish = self.tree.text_of(turn.response, self.call.stops), _end_of(turn)
        if self.asked.get("echo"):
            prompt = self.call.prompt.ids
            text_of_prompt = self.call.prompt.text or self.tree.template.text(prompt)
            if self.asked.get("max_tokens") == 0:  # the engine samples at least one token
                ids, sampled, finish, text = [], _Tokens([], [], []), "length", ""
            text, sampled = text_of_prompt + text, _Tokens.of_prompt(prompt, turn.response) + sampled
        if self.asked.get("logprobs") is not None:
            added = self._num_added(self.call.prompt.ids) if self.asked.get("echo") else 0
            logprobs = self._told(TokenTexts(self.tree.template.tokenizer), sampled, True, added)
        choice = {"index": index, "text": text, "finish_reason": finish, "logprobs": logprobs}
        return choice | ({"token_ids": ids} if self.asked.get("return_token_ids") else {})

    def _num_added(self, ids: list[int]) -> int:
        """Return how many tokens the tokenizer has added before the text of a prompt."""
        template, text = self.tree.template, self.call.prompt.text
        start = leading_special_tokens(template.tokenizer)
        return len(start) if text and ids[: len(start)] == start and not text.startswith(template.text(start)) else 0

    def _told(self, texts: TokenTexts, tokens: _Tokens, are_last: bool, added: int = 0) -> dict[str, Any]:
        """Return the `logprobs` of tokens, which come after the tokens already added to `texts`.

        The likeliest tokens of each position, and the sampled token, are listed by their texts. If several have the
        same text, only the likeliest of them is listed.

        Args:
            added: number of tokens at the beginning that are not part of the text.
        """
        told, tops, offsets = list[str](), list[dict[str, float] | None](), list[int]()
        for token, logprob, likeliest in zip(tokens.ids, tokens.logprobs, tokens.likeliest, strict=True):
            others = [(texts.of_next(other), value) for other, value in likeliest if other != token]
            offsets.append(texts.length)
            is_last = are_last and len(told) == len(tokens.ids) - 1
            told.append("" if len(told) < added else texts.add(token, is_last))
            tops.append(None if logprob is None else _best_by_text([*others, (told[-1], logprob)]))
        return {
            "tokens": told,
            "token_logprobs": tokens.logprobs,
            "top_logprobs": tops if self.asked.get("logprobs") else None,
            "text_offset": offsets,
        }


def _best_by_text(pairs: Sequence[tuple[str, float]]) -> dict[str, float]:
    best = dict[str, float]()
    for text, logprob in pairs:
        best[text] = max(logprob, best.get(text, logprob))
    return best


def _end_of(turn: Turn) -> str:
    return "stop" if turn.response.ended else "length"


@dataclass(frozen=True)
class _Tokens:
    """Tokens with their log-probabilities and the likeliest tokens in their places; None for a prompt's first token."""

    ids: list[int]
    logprobs: list[float | None]
    likeliest: list[Sequence[tuple[int, float]]]

    @classmethod
    def of(cls, response: Response) -> _Tokens:
        ids = response.token_ids.tolist()
        return cls(ids, response.logprobs.tolist(), list(response.likeliest) or [()] * len(ids))

    @classmethod
    def of_prompt(cls, ids: list[int], response: Response) -> _Tokens:
        scores = response.prompt_scores
        if scores is None:  # only the text is asked for
            return cls([], [], [])
        return cls(list(ids), [None, *scores.logprobs.tolist()], [(), *scores.likeliest])

    def __add__(self, other: _Tokens) -> _Tokens:
        return _Tokens(self.ids + other.ids, self.logprobs + other.logprobs, self.likeliest + other.likeliest)
