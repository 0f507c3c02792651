"""Guards a vLLM server by the run's key, and adds the route of packed answers. It runs in vLLM's API process.

vLLM's own check of a key covers /v1 and /inference, but not the routes of its development mode, by which anyone who
reaches the server could replace its weights or run code. vLLM's option `--middleware` names the class `RunKey`.
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from mcore_rl.models.generation.vllm.key import VARIABLE

OPEN = "/health"
"""The only route that needs no key."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

if not os.environ.get(VARIABLE):
    # The import fails, and not the construction of `RunKey`: a server would go on if that failed.
    raise RuntimeError(f"{VARIABLE} is not set: this server does not start without the run's key")


class RunKey:
    """ASGI middleware that answers 401 unless a request has the header `Authorization: Bearer KEY`."""

    def __init__(self, app: App) -> None:
        self.app = app
        self._expected = f"Bearer {os.environ[VARIABLE]}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":  # the server starts
            from mcore_rl.models.generation.vllm.answer_route import add_route  # imports vLLM

            add_route(scope["app"])
        elif scope.get("path") != OPEN and not self._is_allowed(scope):
            await _refuse(scope, send)
            return
        await self.app(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        told = [value for name, value in scope.get("headers", ()) if name.lower() == b"authorization"]
        return len(told) == 1 and hmac.compare_digest(told[0], self._expected)


async def _refuse(scope: Scope, send: Send) -> None:
    if scope["type"] == "websocket":  # a close before the handshake becomes status 403
        await send({"type": "websocket.close", "code": 1008})
        return
    body = json.dumps({"error": {"message": "this server needs the run's key", "code": 401}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": body})
