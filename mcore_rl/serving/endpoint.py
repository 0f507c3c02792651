"""The public endpoint of a model: the routes that agents use, without sessions, and a page for people.

Each request is independent. Tokens are streamed as they are sampled, if the engine tells them.
"""

from __future__ import annotations

import asyncio
import contextlib
import html
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from mcore_rl.agents import anthropic_api, openai_api, responses_api
from mcore_rl.agents.messages import BadRequest
from mcore_rl.agents.openai_api import Asked
from mcore_rl.agents.server import Endpoint, Refused, Reply, disconnected, read_request
from mcore_rl.agents.sessions import Call, Session, SessionLimits, Sessions
from mcore_rl.agents.tree import Turn
from mcore_rl.models.generation.interfaces import Distribution, RequestEngine
from mcore_rl.models.generation.interfaces import Response as Sampled
from mcore_rl.serving.client import is_loopback

LOWEST_TEMPERATURE = 1e-5
"""Temperatures up to this one are greedy: logits divided by them would be infinite."""
MOST_PROMPTS = 1024
"""Maximum number of prompts in one completion request."""


class PublicEndpoint(Endpoint):
    """The routes of a model for everyone who has the key.

    Args:
        name: the model's name in responses. Requests may name any model.
        key: the key that requests must have; None if no key is needed, because only this machine reaches the endpoint.
        scores_prompts: whether the engine returns log-probabilities of prompts.
    """

    _option_of_limit = ""

    def __init__(
        self, engine: RequestEngine, tokenizer: Any, name: str, key: str | None = None, scores_prompts: bool = True
    ) -> None:
        super().__init__(Sessions(engine, tokenizer, SessionLimits(MOST_PROMPTS, None)))
        self.name, self._key, self.scores_prompts = name, key, scores_prompts
        self._parts = dict[Call, asyncio.Queue[Sampled]]()
        self.app.routes.extend(
            [
                Route("/", self._guarded(self.page), methods=["GET"]),
                Route("/health", self.health, methods=["GET"]),
            ]
        )

    # ------------------------------------------------------------ requests

    def _session(self, request: Request) -> Session:
        """Check the key; return a new session, for this request alone."""
        self._check_caller(request)
        return self.sessions.begin(0, {}, [])

    def _check_caller(self, request: Request) -> None:
        """Check the key; without one, refuse requests that a page of another site sends from the user's browser.

        Raises:
            Refused: the caller may not use the endpoint.
        """
        if self._key is not None:
            given = request.headers.get("x-api-key") or request.headers.get("authorization", "")
            if not secrets.compare_digest(given.removeprefix("Bearer ").strip().encode(), self._key.encode()):
                raise Refused(401, "the API key is wrong", "invalid_api_key")
            return
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if not is_loopback(_hostname(f"//{host}")) or (origin is not None and origin.partition("//")[2] != host):
            raise Refused(403, "without an API key, only programs and pages of this machine may ask", "forbidden")

    async def _object(self, request: Request) -> dict[str, Any]:
        body = await super()._object(request)
        return {**body, "model": body.get("model") or self.name}

    async def _ask_own(self, session: Session, body: dict[str, Any], asked: Asked) -> Call:
        """Ask the engine, in a session of this request alone.

        A long text is tokenized for seconds. This happens in a thread, so that other requests go on.
        """
        await session.take_images(asked.images)
        prompt = await asyncio.to_thread(asked.prompt, session.tree)
        parts: asyncio.Queue[Sampled] | None = None
        options = replace(asked.options, distribution=distribution_of(body))
        if body.get("stream") and asked.count == 1 and prompt.form is None:  # calls are told when they are complete
            parts = asyncio.Queue[Sampled]()
            arrive, loop = parts.put_nowait, asyncio.get_running_loop()

            def tell(response: Sampled) -> None:
                loop.call_soon_threadsafe(arrive, response)

            options = replace(options, on_tokens=tell)
        # Without a seed, a repeated request gets another response.
        seed = secrets.randbits(62) if asked.seed is None else asked.seed
        call = self.sessions.ask(session, "", False, lambda: prompt, asked.count, options, seed)
        if parts is not None:
            self._parts[call] = parts
        return call

    async def _answered(
        self, request: Request, session: Session, call: Call, reply: Reply, is_streamed: bool
    ) -> Response:
        try:
            return await super()._answered(request, session, call, reply, is_streamed)
        finally:
            if not is_streamed:
                self._left(session)

    async def _body_of(self, reply: Reply, turns: list[Turn]) -> dict[str, Any]:
        return await asyncio.to_thread(reply.body, turns)  # texts of many tokens take long

    def _left(self, session: Session) -> None:
        """Forget a session, and stop what it still generates."""
        for call in session.calls:
            self._parts.pop(call, None)
        self.sessions.finish(session)
        self.sessions.forget()

    def _parts_of(self, call: Call, working: asyncio.Future[list[Turn]]) -> AsyncIterator[Sampled]:
        parts = self._parts.get(call)
        return super()._parts_of(call, working) if parts is None else _arriving(parts, working)

    # ------------------------------------------------------------ routes

    async def page(self, request: Request) -> Response:
        text = files("mcore_rl.serving").joinpath("page.html").read_text()
        return HTMLResponse(text.replace("{{name}}", html.escape(self.name)))

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def models(self, request: Request) -> Response:
        self._check_caller(request)
        return JSONResponse(openai_api.models_body(self.name, self.sessions.engine.max_sequence_length))

    async def completions(self, request: Request) -> Response:
        """Complete one or several prompts. With echo, the choices begin with their prompts."""
        self._check_caller(request)
        body = await self._object(request)
        echo = body.get("echo") or False
        if not isinstance(echo, bool):
            raise BadRequest("echo: must be true or false", "echo", "invalid_value")
        scores = echo and body.get("logprobs") is not None
        if scores and not self.scores_prompts:
            raise BadRequest(
                "echo with logprobs: vLLM's servers return no log-probabilities of prompts here; serve the model by "
                "the training processes (generation.backend=megatron)",
                "echo",
                "unsupported_value",
            )
        prompts = _prompts_of(body.get("prompt"))
        if len(prompts) == 1 and not echo:
            return await self._complete_one(request, {**body, "prompt": prompts[0]})
        if body.get("stream"):
            raise BadRequest("stream: is for requests with one prompt, without echo", "stream", "unsupported_value")
        return await self._complete_all(request, body, prompts, scores)

    async def _complete_one(self, request: Request, body: dict[str, Any]) -> Response:
        session = self._session(request)
        try:
            asked = read_request(openai_api.completion_request, body, len(self.sessions.template.tokenizer))
            call = await self._ask_own(session, body, asked)
        except BaseException:
            self._left(session)
            raise
        reply = openai_api.CompletionReply(call, session.tree, body)
        return await self._answered(request, session, call, reply, bool(body.get("stream")))

    async def _complete_all(
        self, request: Request, body: dict[str, Any], prompts: Sequence[Any], scores: bool
    ) -> Response:
        """Complete several prompts, each in a session of its own; their choices follow each other."""
        sessions, calls, replies = list[Session](), list[Call](), list[openai_api.CompletionReply]()
        vocabulary = len(self.sessions.template.tokenizer)
        gone = asyncio.ensure_future(disconnected(request))
        try:
            for prompt in prompts:
                own = {**body, "prompt": prompt, "echo": False}
                if body.get("echo") and body.get("max_tokens") == 0:
                    own["max_tokens"] = 1  # the reply leaves it out
                asked = read_request(openai_api.completion_request, own, vocabulary)
                asked = replace(asked, options=replace(asked.options, scores_prompt=scores))
                sessions.append(self._session(request))
                calls.append(await self._ask_own(sessions[-1], own, asked))
                first = sum(len(call.asked) for call in calls[:-1])
                replies.append(openai_api.CompletionReply(calls[-1], sessions[-1].tree, body, first))
            pairs = zip(sessions, calls, strict=True)
            working = asyncio.gather(*(self.sessions.turns(session, call) for session, call in pairs))
            waited: list[asyncio.Future[Any]] = [gone, working]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                working.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await working
                raise ClientDisconnect
            turns = working.result()
        finally:
            gone.cancel()
            for session in sessions:
                self._left(session)
        choices = list[dict[str, Any]]()
        for reply, of_one in zip(replies, turns, strict=True):
            choices += await asyncio.to_thread(reply.choices, of_one)
        usage = [openai_api.usage_of(of_one) for of_one in turns]
        total = {name: sum(one[name] for one in usage) for name in usage[0]}
        return JSONResponse({**replies[0].head, "choices": choices, "usage": total})

    async def chat(self, request: Request) -> Response:
        return await self._converse(request, openai_api.chat_request, openai_api.ChatReply)

    async def messages(self, request: Request) -> Response:
        return await self._converse(request, anthropic_api.request, anthropic_api.Reply)

    async def responses(self, request: Request) -> Response:
        return await self._converse(request, responses_api.request, responses_api.ResponseReply)

    async def count_tokens(self, request: Request) -> Response:
        self._check_caller(request)
        body = await self._object(request)
        asked = read_request(anthropic_api.request, {"max_tokens": 1, **body})
        session = self.sessions.begin(0, {}, [])
        try:
            await session.take_images(asked.images)
            prompt = await asyncio.to_thread(asked.prompt, session.tree)
        finally:
            self._left(session)
        return JSONResponse({"input_tokens": len(prompt.ids)})

    async def reward(self, request: Request) -> Response:
        raise Refused(404, "a served model takes no rewards", "not_found")

    async def _converse(
        self, request: Request, read: Callable[[dict[str, Any]], Asked], make_reply: Callable[..., Reply]
    ) -> Response:
        session, body = self._session(request), {}
        try:
            body = await self._object(request)
            call = await self._ask_own(session, body, read_request(read, body))
        except BaseException:
            self._left(session)
            raise
        reply = make_reply(call, session.tree, body)
        return await self._answered(request, session, call, reply, bool(body.get("stream")))


async def _arriving(parts: asyncio.Queue[Sampled], working: asyncio.Future[Any]) -> AsyncIterator[Sampled]:
    """Yield the parts of a response that come before it is complete."""
    while True:
        getting = asyncio.ensure_future(parts.get())
        try:
            await asyncio.wait([getting, working], return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return
        finally:
            if not getting.done():
                getting.cancel()
        yield getting.result()


def _prompts_of(prompt: Any) -> list[Any]:
    """Return the prompts of a completion request: texts or lists of token ids."""
    if isinstance(prompt, list) and prompt and all(isinstance(one, str | list) for one in prompt):
        if len(prompt) > MOST_PROMPTS:
            raise BadRequest(f"prompt: at most {MOST_PROMPTS} prompts in a request", "prompt", "invalid_value")
        return prompt
    return [prompt]


def distribution_of(body: Mapping[str, Any]) -> Distribution:
    """Return the distribution that a request asks for; temperature 1 without filters if it names none.

    Raises:
        BadRequest: a value is outside its range.
    """
    top_k = body.get("top_k")
    if top_k is not None and (type(top_k) is not int or not -1 <= top_k < 2**31):
        raise BadRequest("top_k: must be an integer of at least 1; -1 and 0 keep all tokens", "top_k", "invalid_value")
    temperature = _number(body, "temperature", 1.0, 0.0, 100.0)
    return Distribution(
        temperature if temperature > LOWEST_TEMPERATURE else 0.0,
        top_k if top_k is not None and top_k > 0 else None,
        _number(body, "top_p", 1.0, 1e-6, 1.0),
        _number(body, "min_p", 0.0, 0.0, 1.0),
    )


def _number(body: Mapping[str, Any], name: str, default: float, least: float, most: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise BadRequest(f"{name}: must be a number from {least:g} to {most:g}", name, "invalid_value")
    return float(value)


def _hostname(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
