"""A client of served models, and the processes that serve them for this one."""

from __future__ import annotations

import ipaddress
import json
import os
import queue
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import requests

from mcore_rl.errors import UserError
from mcore_rl.utils.process_groups import GroupKeeper, end_groups

KEY_VARIABLE = "MCORE_RL_API_KEY"
"""Environment variable with the key of an endpoint, for `mcore-rl serve` and its clients."""
LAST_LINES = 20
"""Number of lines of a server's errors that are kept, to explain why it has ended."""


def is_loopback(host: str) -> bool:
    """Return whether an address or name is that of this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class ServedModel:
    """A model behind an endpoint.

    Args:
        url: base URL, with /v1.
        key: API key; None without a key.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._session = requests.Session()
        self._session.trust_env = False
        if key is not None:
            self._session.headers["Authorization"] = f"Bearer {key}"
        self.name = self._first_model()

    def _first_model(self) -> str:
        """Return the name of the first model.

        Raises:
            UserError: nobody answers at the URL, or the answer is an error.
        """
        try:
            answer = self._session.get(f"{self.url}/models", timeout=30)
            if answer.status_code != 200:
                raise UserError(f"{self.url}: {_told(answer)}")
            return str(answer.json()["data"][0]["id"])
        except (requests.RequestException, ValueError, KeyError, IndexError, TypeError) as error:
            raise UserError(f"{self.url}: no server with OpenAI's API answers there ({type(error).__name__})") from None

    def chat(self, messages: Sequence[Mapping[str, str]], **options: Any) -> Iterator[tuple[str, str]]:
        """Yield the pieces of a response, each with its key: "content" or "reasoning_content".

        Raises:
            UserError: the server refuses the request, or does not answer any more.
        """
        body = {"model": self.name, "messages": list(messages), "stream": True, **options}
        try:
            with self._session.post(
                f"{self.url}/chat/completions", json=body, stream=True, timeout=(30, 600)
            ) as answer:
                if answer.status_code != 200:
                    raise UserError(f"{self.url}: {_told(answer)}")
                for line in answer.iter_lines():
                    if line.startswith(b"data: ") and line != b"data: [DONE]":
                        yield from _pieces(json.loads(line[6:]), self.url)
        except requests.RequestException as error:
            raise UserError(f"{self.url}: the server does not answer any more ({type(error).__name__})") from None


def _pieces(event: Mapping[str, Any], url: str) -> Iterator[tuple[str, str]]:
    if "error" in event:
        raise UserError(f"{url}: {event['error'].get('message')}")
    for choice in event.get("choices", ()):
        for key in ("reasoning_content", "content"):
            if text := choice["delta"].get(key):
                yield key, text


def _told(answer: requests.Response) -> str:
    """Return the error message of an answer."""
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {answer.status_code}: {answer.text[:200]}"


class ServingProcess:
    """A process (with its ranks) that serves a model for this process, on a free port of this machine.

    It ends with `close`, and also if this process ends in any way.

    Args:
        arguments: arguments of `mcore-rl serve`, without host and port.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self._key = secrets.token_urlsafe(24)
        command = [sys.executable, "-m", "mcore_rl", "serve", *arguments, "--host", "127.0.0.1", "--port", "0"]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, KEY_VARIABLE: self._key},
            start_new_session=True,
        )
        self._keeper = GroupKeeper()
        self._keeper.add(self._process.pid)
        self._url: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._errors = list[str]()
        for read in (self._read_output, self._read_errors):
            threading.Thread(target=read, daemon=True).start()

    def _read_output(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("serving ") and " at http" in line:
                self._url.put(line.split(" at ", 1)[1].split()[0])
        self._url.put("")

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._errors = [*self._errors, line.rstrip()][-LAST_LINES:]

    def model(self) -> ServedModel:
        """Wait until the model is served; return a client.

        Raises:
            UserError: the process has ended.
        """
        if url := self._url.get():
            return ServedModel(url, self._key)
        self._process.wait()
        told = [line.removeprefix("error: ") for line in self._errors if line.startswith("error: ")]
        raise UserError(told[0] if told else f"the model's server has ended: {' '.join(self._errors[-1:])}")

    def close(self) -> None:
        """End the process and its ranks; does nothing the second time."""
        if self._process.returncode is not None:
            return
        pid = self._process.pid
        end_groups([pid], has_ended=lambda _: self._process.poll() is not None)
        self._process.wait()
        self._keeper.remove(pid)
        self._keeper.close()
