"""Guards a vLLM server by the run's key, and adds the route of packed answers. It runs in vLLM's API process.

vLLM's own check of a key covers /v1 and /inference, but not the routes of its development mode, by which anyone who
reaches the server could replace its weights or run code. vLLM's option `--middleware` names the class `RunKey`.
"""

from __future__ import annotations

import hmac
import json
import os
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from mcore_rl.models.generation.vllm.key import VARIABLE
from mcore_rl.models.generation.vllm.signing import AGE_SECONDS, NAME_VARIABLE, PROOF, Signature

OPEN = "/health"
"""The only route that needs no key."""
UNAUTHORIZED, FORBIDDEN, MISDIRECTED, TOO_EARLY = 401, 403, 421, 503

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

if not os.environ.get(VARIABLE):
    # The import fails, and not the construction of `RunKey`: a server would go on if that failed.
    raise RuntimeError(f"{VARIABLE} is not set: this server does not start without the run's key")


class RunKey:
    """ASGI middleware that answers requests of those who have the key.

    Requests of runs are signed (`signing`), and the answers have the server's proof. Such a request gets status 421 if
    it is meant for another server, 503 if it was signed before this server could answer, and 403 if its time is wrong
    or it was answered before. Other clients send the key: `Authorization: Bearer KEY`. The status is 401 for all other
    requests.
    """

    def __init__(self, app: App) -> None:
        self.app = app
        self._key = os.environ[VARIABLE]
        self._bearer = f"Bearer {self._key}".encode()
        self._started = time.time()
        self._seen = OrderedDict[str, float]()
        """The nonces of the requests of the last `AGE_SECONDS`, with their times."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":  # the server starts
            from mcore_rl.models.generation.vllm.answer_route import add_route  # imports vLLM

            add_route(scope["app"])
            self._started = time.time()
            return await self.app(scope, receive, send)
        told = [value for name, value in scope.get("headers", ()) if name.lower() == b"authorization"]
        signature = Signature.read(told[0].decode("latin-1")) if len(told) == 1 else None
        if signature is not None and scope["type"] == "http":
            return await self._answer_signed(signature, scope, receive, send)
        if scope.get("path") != OPEN and not (len(told) == 1 and hmac.compare_digest(told[0], self._bearer)):
            return await _refuse(scope, send, UNAUTHORIZED, "this server needs the run's key")
        await self.app(scope, receive, send)

    async def _answer_signed(self, signature: Signature, scope: Scope, receive: Receive, send: Send) -> None:
        query = scope.get("query_string", b"").decode("latin-1")
        target = f"{scope['path']}?{query}" if query else scope["path"]
        if not signature.is_valid(self._key, scope["method"], target):
            return await _refuse(scope, send, UNAUTHORIZED, "the request is signed with another key")
        own = os.environ.get(NAME_VARIABLE) or "@{}:{}".format(*scope["server"])
        if signature.server != own:
            return await _refuse(scope, send, MISDIRECTED, own)
        if (refused := self._refusal(signature)) is not None:
            return await _refuse(scope, send, *refused)
        body = await _body_of(receive)
        if body is None:  # the client has left
            return
        if not signature.covers(body):
            return await _refuse(scope, send, UNAUTHORIZED, "the request's body has been changed")
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_again() -> Message:
            return messages.pop() if messages else await receive()

        start: Message = {}
        parts = list[bytes]()

        async def send_with_proof(message: Message) -> None:
            """Send the answer when it is complete, because the proof covers it."""
            if message["type"] == "http.response.start":
                start.update(message)
                return
            if message["type"] != "http.response.body":
                return await send(message)
            parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                answer = b"".join(parts)
                proof = (PROOF.lower().encode(), signature.proof(self._key, start["status"], answer).encode())
                await send({**start, "headers": [*start.get("headers", ()), proof]})
                await send({"type": "http.response.body", "body": answer})

        others = [pair for pair in scope["headers"] if pair[0].lower() != b"authorization"]
        # vLLM demands the key itself on some routes.
        scope = {**scope, "headers": [*others, (b"authorization", self._bearer)]}
        await self.app(scope, receive_again, send_with_proof)

    def _refusal(self, signature: Signature) -> tuple[int, str] | None:
        """Return status and reason if a request with the right key must not be answered; otherwise remember it."""
        now, signed = time.time(), float(signature.seconds)
        if signed < self._started:
            return TOO_EARLY, "the request was signed before this server could answer"
        if abs(now - signed) > AGE_SECONDS:
            return FORBIDDEN, f"the clocks of run and server differ by {abs(now - signed):.0f} s"
        while self._seen and next(iter(self._seen.values())) < now - 2 * AGE_SECONDS:
            self._seen.popitem(last=False)
        if signature.nonce in self._seen:
            return FORBIDDEN, "the request was answered before"
        self._seen[signature.nonce] = now
        return None


async def _body_of(receive: Receive) -> bytes | None:
    """Return the body of a request; None if the client leaves before its end."""
    parts, is_complete = list[bytes](), False
    while not is_complete:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        is_complete = not message.get("more_body", False)
    return b"".join(parts)


async def _refuse(scope: Scope, send: Send, status: int, reason: str) -> None:
    if scope["type"] == "websocket":  # a close before the handshake becomes status 403
        await send({"type": "websocket.close", "code": 1008})
        return
    body = json.dumps({"error": {"message": reason, "code": status}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == UNAUTHORIZED:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
