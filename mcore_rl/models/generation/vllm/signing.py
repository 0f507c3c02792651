"""Signatures of requests to vLLM's servers and of their answers, by which both prove that they have the run's key.

The key itself is not sent: another program may listen on the port of a server, for example while the server starts. A
request names the server that it is meant for, and the time at which it was signed; a server answers each request once,
and none that is older than the server. What another program receives is therefore of no use to it: it cannot change a
request, send it to a server, or answer it.

A signature is an HMAC (RFC 2104) with SHA-256. Imported inside vLLM too, so only the standard library is imported here.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

SCHEME = "MCORE-RL"
"""Scheme of the header Authorization with a signature."""
PROOF = "MCORE-RL-Proof"
"""Header of an answer with the server's proof."""
NAME_VARIABLE = "MCORE_RL_SERVER"
"""Environment variable with the name of a server."""
NONCE_BYTES = 16
AGE_SECONDS = 300.0
"""Maximum age of a request at its arrival, by the clocks of both machines."""


def server_name(url: str, run: str = "") -> str:
    """Return the name of the server with this URL.

    Args:
        run: id of the run that starts the server for itself; empty for a server that several runs may use.
    """
    parts = urlsplit(url)
    return f"{run}@{parts.hostname}:{parts.port or 80}"


@dataclass(frozen=True)
class Signature:
    """What the header Authorization of a signed request contains.

    server: name of the server that the request is meant for.
    nonce: random text, different in each request.
    seconds: time at which the request was signed, in seconds since 1970.
    digest: SHA-256 of the request's body.
    code: the HMAC of these values, method and target.
    """

    server: str
    nonce: str
    seconds: str
    digest: str
    code: str

    @classmethod
    def of(cls, key: str, server: str, method: str, target: str, body: bytes) -> Signature:
        """Sign a request.

        Args:
            key: the run's key.
            target: path and query of the request.
        """
        parts = server, secrets.token_hex(NONCE_BYTES), f"{time.time():.3f}", hashlib.sha256(body).hexdigest()
        return cls(*parts, _code(key, *parts, method, target))

    @classmethod
    def read(cls, header: str) -> Signature | None:
        """Return the signature in a header Authorization; None if the header has another form."""
        scheme, *parts = header.split(" ")
        return cls(*parts) if scheme == SCHEME and len(parts) == 5 else None

    @property
    def header(self) -> str:
        return " ".join((SCHEME, self.server, self.nonce, self.seconds, self.digest, self.code))

    def is_valid(self, key: str, method: str, target: str) -> bool:
        """Return whether this signs a request for `target`, by `key`. The body must be checked too (`covers`)."""
        expected = _code(key, self.server, self.nonce, self.seconds, self.digest, method, target)
        return hmac.compare_digest(self.code.encode(), expected.encode())

    def covers(self, body: bytes) -> bool:
        return hmac.compare_digest(self.digest.encode(), hashlib.sha256(body).hexdigest().encode())

    def proof(self, key: str, status: int, body: bytes) -> str:
        """Return the proof of a server with the key `key` that this is its answer to the request."""
        return _code(key, "answer", self.server, self.nonce, str(status), hashlib.sha256(body).hexdigest())


def _code(key: str, *parts: str) -> str:
    return hmac.digest(key.encode(), "\n".join(parts).encode(), "sha256").hex()
