"""A handler of HTTP requests that proves to a run that it has the run's key, as vLLM's servers do."""

import os
from http.server import BaseHTTPRequestHandler

from mcore_rl.models.generation.vllm.signing import PROOF, Signature

KEY = os.environ["VLLM_API_KEY"]  # of all servers and runs of tests (conftest.py)


class SignedHandler(BaseHTTPRequestHandler):
    """Adds the proof of the key to each answer to a signed request."""

    def signature(self):
        return Signature.read(self.headers.get("Authorization", ""))

    def is_signed(self, body=b"", name=None):
        """Return whether the request is signed, and is meant for the server `name` (if it is given)."""
        found = self.signature()
        well = found is not None and found.is_valid(KEY, self.command, self.path) and found.covers(body)
        return well and name in (None, found.server)

    def send_response(self, code, message=None):
        self.status, self.is_proven = code, False
        super().send_response(code, message)

    def prove(self, content=b""):
        """Add the proof that this answer is the server's; before the end of the headers."""
        self.is_proven = True
        if (found := self.signature()) is not None:
            self.send_header(PROOF, found.proof(KEY, self.status, content))

    def end_headers(self):
        if not self.is_proven:
            self.prove()
        super().end_headers()
