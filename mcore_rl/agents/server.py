"""HTTP endpoint of sessions: OpenAI's chat completions, completions, responses and models, Anthropic's messages, and
rewards.

The key of a request (`Authorization: Bearer` or `x-api-key`) names the session. Base URLs with the session's id, such
as `/s/ID/v1`, exist too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from mcore_rl.agents import anthropic_api, openai_api, responses_api
from mcore_rl.agents.live import no_parts
from mcore_rl.agents.messages import BadRequest
from mcore_rl.agents.openai_api import Asked
from mcore_rl.agents.sessions import Call, Session, SessionEnded, Sessions
from mcore_rl.agents.tree import Turn
from mcore_rl.errors import TrainingError
from mcore_rl.models.generation.interfaces import RequestError
from mcore_rl.models.generation.interfaces import Response as Sampled

Handler = Callable[[Request], Awaitable[Response]]


class Refused(Exception):
    """A request that gets an error status other than 400."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Reply(Protocol):
    """The response to a request, in the form of an API."""

    def body(self, turns: list[Turn]) -> dict[str, Any]: ...

    def events(self, parts: AsyncIterator[Sampled], turns: Awaitable[list[Turn]]) -> AsyncIterator[str]:
        """Yield the events of a stream.

        Args:
            parts: the response as it comes, if there is one response: its new tokens; not the last ones. May be empty.
            turns: the turns of the whole responses.
        """
        ...


class Endpoint:
    """The endpoint's routes.

    Args:
        max_body_bytes: largest body of a request.
    """

    _option_of_limit = " (environment.agent.max_body_bytes)"
    """The key of the configuration that sets `max_body_bytes`, as error messages name it."""

    def __init__(self, sessions: Sessions, max_body_bytes: int = 2**24) -> None:
        self.sessions, self.max_body_bytes = sessions, max_body_bytes
        routes = []
        for base in ("", "/s/{session}"):
            for path, handler, method in (
                ("/v1/chat/completions", self.chat, "POST"),
                ("/v1/completions", self.completions, "POST"),
                ("/v1/models", self.models, "GET"),
                ("/v1/messages", self.messages, "POST"),
                ("/v1/responses", self.responses, "POST"),
                ("/v1/messages/count_tokens", self.count_tokens, "POST"),
                ("/reward", self.reward, "POST"),
                ("/v1/reward", self.reward, "POST"),
            ):
                routes.append(Route(base + path, self._guarded(handler), methods=[method]))
        self.app = Starlette(routes=routes)

    def _guarded(self, handler: Handler) -> Handler:
        """Return a handler that answers errors in the form of the API that is called."""

        async def guarded(request: Request) -> Response:
            try:
                return await handler(request)
            except ClientDisconnect:
                return Response(status_code=499)
            except Exception as error:
                status, *told = _error_of(error)
                body = _api(request).error_body(status, *told)
                return JSONResponse(body, status, {"x-should-retry": "false"})

        return guarded

    # ------------------------------------------------------------ requests

    def _session(self, request: Request) -> Session:
        given = request.headers.get("x-api-key") or request.headers.get("authorization", "")
        key = given.removeprefix("Bearer ").strip()
        session = self.sessions.find(key, request.path_params.get("session"))
        if session is None:
            raise Refused(401, "the API key is not that of a session", "invalid_api_key")
        return session

    async def _body(self, request: Request) -> Any:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self.max_body_bytes:
                limit = f"{self.max_body_bytes} bytes{self._option_of_limit}"
                raise Refused(413, f"the body is larger than {limit}", "request_too_large")
        try:
            value = json.loads(body or b"null")
            if b"\\ud" in body.lower():
                json.dumps(value, ensure_ascii=False).encode()
        except (ValueError, RecursionError):
            raise BadRequest("the body must be JSON of complete characters") from None
        return value

    async def _object(self, request: Request) -> dict[str, Any]:
        body = await self._body(request)
        if not isinstance(body, dict):
            raise BadRequest("the body must be a JSON object")
        if body.get("stream") not in (None, False, True):
            raise BadRequest("stream: must be true or false", "stream", "invalid_value")
        return body

    async def _ask(self, request: Request, session: Session, body: dict[str, Any], asked: Asked) -> Call:
        is_retry = request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
        digest = openai_api.digest_of(request.url.path, body)
        if asked.images and self.sessions.repeated(session, digest, is_retry) is None:
            self.sessions.check_may_ask(session)  # before files are written
            await session.take_images(asked.images)
        return self.sessions.ask(
            session, digest, is_retry, lambda: asked.prompt(session.tree), asked.count, asked.options, asked.seed
        )

    async def _answered(
        self,
        request: Request,
        session: Session,
        call: Call,
        reply: Reply,
        is_streamed: bool,
    ) -> Response:
        """Return the response of a call: one JSON object, or a stream of events."""
        gone = asyncio.ensure_future(disconnected(request))
        working = asyncio.ensure_future(self.sessions.turns(session, call))
        try:
            if is_streamed:
                return self._streamed(request, session, call, working, reply)
            await asyncio.wait([gone, working], return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                self.sessions.lost(session, call)
                raise ClientDisconnect
            turns = working.result()
        finally:
            gone.cancel()
            if not is_streamed:
                working.cancel()
        response = JSONResponse(await self._body_of(reply, turns))
        self.sessions.delivered(call)
        return response

    def _streamed(
        self,
        request: Request,
        session: Session,
        call: Call,
        working: asyncio.Future[list[Turn]],
        reply: Reply,
    ) -> Response:
        async def told() -> AsyncIterator[str]:
            try:
                try:
                    async for event in reply.events(self._parts_of(call, working), working):
                        yield event
                except Exception as error:
                    body = _api(request).error_body(*_error_of(error))
                    yield f"event: error\n{openai_api.event(body)}"
                    return
                self.sessions.delivered(call)
            finally:
                working.cancel()
                if not call.is_delivered:
                    self.sessions.lost(session, call)
                self._left(session)

        return StreamingResponse(told(), media_type="text/event-stream", headers={"cache-control": "no-cache"})

    def _parts_of(self, call: Call, working: asyncio.Future[list[Turn]]) -> AsyncIterator[Sampled]:
        """Return the parts of a call's response as they are sampled. This class sends only complete responses."""
        return no_parts()

    async def _body_of(self, reply: Reply, turns: list[Turn]) -> dict[str, Any]:
        return reply.body(turns)

    def _left(self, session: Session) -> None:
        """Do what remains after a streamed response."""

    # ------------------------------------------------------------ routes

    async def models(self, request: Request) -> Response:
        self._session(request)
        return JSONResponse(openai_api.models_body())

    async def chat(self, request: Request) -> Response:
        session, body = self._session(request), await self._object(request)
        asked, tree = read_request(openai_api.chat_request, body), session.tree
        call = await self._ask(request, session, body, asked)
        reply = openai_api.ChatReply(call, tree, body)
        return await self._answered(request, session, call, reply, bool(body.get("stream")))

    async def completions(self, request: Request) -> Response:
        session, body = self._session(request), await self._object(request)
        asked = read_request(openai_api.completion_request, body, len(self.sessions.template.tokenizer))
        call = await self._ask(request, session, body, asked)
        reply = openai_api.CompletionReply(call, session.tree, body)
        return await self._answered(request, session, call, reply, bool(body.get("stream")))

    async def messages(self, request: Request) -> Response:
        session, body = self._session(request), await self._object(request)
        call = await self._ask(request, session, body, read_request(anthropic_api.request, body))
        reply = anthropic_api.Reply(call, session.tree, body)
        return await self._answered(request, session, call, reply, bool(body.get("stream")))

    async def responses(self, request: Request) -> Response:
        session, body = self._session(request), await self._object(request)
        call = await self._ask(request, session, body, read_request(responses_api.request, body))
        reply = responses_api.ResponseReply(call, session.tree, body)
        return await self._answered(request, session, call, reply, bool(body.get("stream")))

    async def count_tokens(self, request: Request) -> Response:
        session, body = self._session(request), await self._object(request)
        asked = read_request(anthropic_api.request, {"max_tokens": 1, **body})
        if asked.images:
            self.sessions.check_may_ask(session)
            await session.take_images(asked.images)
        return JSONResponse({"input_tokens": len(asked.prompt(session.tree).ids)})

    async def reward(self, request: Request) -> Response:
        session = self._session(request)
        session.give_reward(await self._body(request))
        return JSONResponse({"status": "ok"})


def read_request(convert: Callable[..., Asked], *arguments: Any) -> Asked:
    """Convert a request; raise BadRequest also for values of types that `convert` does not expect."""
    try:
        return convert(*arguments)
    except (TypeError, AttributeError, KeyError, IndexError) as error:
        raise BadRequest(f"the request is malformed: {error}") from None


def _api(request: Request) -> Any:
    """Return the module of the API that a request calls."""
    return anthropic_api if "/v1/messages" in request.url.path else openai_api


def _error_of(error: Exception) -> tuple[int, str, str | None, str | None]:
    """Return status, message, name of the option and code of an error's response."""
    if isinstance(error, BadRequest):
        return 400, str(error), error.param, error.code
    if isinstance(error, SessionEnded):
        return 410, "the session has ended", None, "session_ended"
    if isinstance(error, Refused):
        return error.status, str(error), None, error.code
    if isinstance(error, TrainingError):  # also a RequestError, of one request
        return 500 if isinstance(error, RequestError) else 503, str(error), None, "engine_error"
    traceback.print_exception(error)
    return 500, f"{type(error).__name__}: {error}", None, "internal_error"


async def disconnected(request: Request) -> None:
    """Wait until the client closes the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Server:
    """A running endpoint.

    url: base URL, without /v1.
    """

    def __init__(self, endpoint: Endpoint, host: str, port: int) -> None:
        # asyncio switches Nagle's algorithm off only for sockets that name their protocol. With it, a response takes
        # 40 ms, because its body waits for the client to acknowledge its head.
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
            self._socket.listen(2048)
        except OSError:
            self._socket.close()
            raise
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(
            endpoint.app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=1
        )
        self._server = uvicorn.Server(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.ensure_future(self._server.serve(sockets=[self._socket]))
        while not self._server.started:
            if self._task.done():
                self._task.result()
                raise RuntimeError("the endpoint's server has ended while it started")
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        if self._task is not None:
            with contextlib.suppress(Exception):
                await self._task
        self._socket.close()
