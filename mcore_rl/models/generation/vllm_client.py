"""vLLM's servers by HTTP: tokens in and out, and weights."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import Any, TypeVar

import requests

from mcore_rl.errors import TrainingError
from mcore_rl.models.generation.interfaces import Response
from mcore_rl.models.generation.sampling import SamplingParams

T = TypeVar("T")

CONNECT_SECONDS = 10.0


class ServerError(RuntimeError):
    """A server is gone, took too long, or has failed; another one may do what it was asked."""


@dataclass(frozen=True)
class Request:
    """One response that is wanted.

    token_ids: the prompt.
    max_tokens: of the response.
    seed: of its random numbers.
    """

    token_ids: tuple[int, ...]
    max_tokens: int
    seed: int


class VLLMServer:
    """One server.

    Args:
        connections: requests at a time.
    """

    def __init__(self, url: str, connections: int) -> None:
        self.url, self.connections = url, connections
        self._session = requests.Session()
        self._session.trust_env = False  # a proxy is for other hosts
        # A kept connection may be closed by the server just as it is used again, which would look like its death.
        self._session.headers["Connection"] = "close"

    def get(self, path: str, seconds: float) -> Any:
        return self._ask("GET", path, None, seconds)

    def post(self, path: str, body: dict[str, Any], seconds: float) -> Any:
        return self._ask("POST", path, body, seconds)

    def _ask(self, method: str, path: str, body: Any, seconds: float) -> Any:
        """The answer's JSON, None for an empty one.

        Raises:
            ServerError: no answer within `seconds`, or one that tells of a failure.
            TrainingError: it says that the request is wrong.
        """
        try:
            limits = (min(CONNECT_SECONDS, seconds), seconds)
            answer = self._session.request(method, self.url + path, json=body, timeout=limits)
            content = answer.json() if answer.content else None
        except (requests.RequestException, ValueError) as error:
            raise ServerError(f"{self.url}{path}: {_reason(error)}") from None
        if 400 <= answer.status_code < 500:
            raise TrainingError(f"{self.url}{path} refuses what it is asked: {_told(content)}")
        if answer.status_code != 200:
            raise ServerError(f"{self.url}{path}: status {answer.status_code}: {_told(content)}")
        return content

    def generate(self, request: Request, params: SamplingParams, version: str, seconds: float) -> Response:
        """A response by the weights of this version.

        Raises:
            ServerError: as `post`; or the server has other weights, such as one that was started again.
        """
        body = {"token_ids": request.token_ids, "sampling_params": sampling_params(request, params)}
        (choice,) = self.post("/inference/v1/generate", body, seconds)["choices"]
        versions = {span["version"] for span in choice["weight_versions"]}
        if versions != {version} or choice["finish_reason"] not in ("stop", "length"):
            raise ServerError(
                f"{self.url}: has the weights of version {'/'.join(sorted(versions))}, not {version}"
                if versions != {version}
                else f"{self.url}: a request was ended by others ({choice['finish_reason']})"
            )
        logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
        return Response(choice["token_ids"], logprobs, ended=choice["finish_reason"] == "stop")


def sampling_params(request: Request, params: SamplingParams) -> dict[str, Any]:
    """What vLLM calls them."""
    options = {
        "max_tokens": request.max_tokens,
        "temperature": params.temperature,
        "top_k": params.top_k or 0,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "seed": request.seed,
        "logprobs": 0,
        "ignore_eos": True,  # what ends a response is said here, and nowhere else
        "stop_token_ids": list(params.stop_token_ids),
        "detokenize": bool(params.stop_strings),
    }
    if params.stop_strings:
        options |= {"stop": list(params.stop_strings), "include_stop_str_in_output": True, "skip_special_tokens": False}
    return options


class ServerPool:
    """Servers that share the work. One that fails is dropped, and what it was asked is asked of another.

    Args:
        drop: called with the URL of a server that is given up, and why.
    """

    def __init__(self, servers: Iterable[VLLMServer], drop: Callable[[str, str], None]) -> None:
        self.servers = {server.url: server for server in servers}
        self._drop, self._lock = drop, Lock()
        self.last_failure = "there never was one"
        threads = sum(server.connections for server in self.servers.values())
        self._threads = ThreadPoolExecutor(threads, "vllm")

    def drop(self, url: str, reason: str) -> None:
        """Ask this server nothing from now on."""
        with self._lock:
            if self.servers.pop(url, None) is not None:
                self.last_failure = reason
                self._drop(url, reason)

    def close(self) -> None:
        """Ask nothing more; what is being asked is not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def require_one(self) -> None:
        """Raises TrainingError if no server is left."""
        if not self.servers:
            raise TrainingError(f"no vLLM server is left; the last one's failure: {self.last_failure}")

    def each(self, call: Callable[[VLLMServer], T]) -> dict[str, T]:
        """What `call` gives for each server at the same time, by URL; those that fail are dropped.

        Raises:
            TrainingError: no server is left.
        """
        return self.gather(self.begin_each(call))

    def begin_each(self, call: Callable[[VLLMServer], T]) -> dict[str, Future[T]]:
        """As `each`, of which `gather` is the end."""
        return {url: self._threads.submit(call, server) for url, server in list(self.servers.items())}

    def gather(self, begun: dict[str, Future[T]]) -> dict[str, T]:
        """The results of what has begun, by URL."""
        results = {}
        for url, future in begun.items():
            try:
                results[url] = future.result()
            except (ServerError, TrainingError) as error:
                self.drop(url, str(error))
        self.require_one()
        return results

    def generate(
        self, groups: Sequence[Sequence[Request]], params: SamplingParams, version: str, seconds: float
    ) -> list[list[Response]]:
        """Responses to all requests, by weights of this version.

        A server takes the next group when it has room. The requests of a group, which begin alike, go to one server,
        where they share what is computed of their beginning.

        Args:
            seconds: that a response may take.

        Raises:
            TrainingError: no server is left, or a request is wrong.
        """
        done: dict[tuple[int, int], Response] = {}
        wanted = [[(index, row) for row in range(len(group))] for index, group in enumerate(groups)]

        def serve(server: VLLMServer, work: _Work) -> None:
            while server.url in self.servers and (place := work.next_for(server.url)):
                index, row = place
                try:
                    done[place] = server.generate(groups[index][row], params, version, seconds)
                except ServerError as error:
                    self.drop(server.url, str(error))

        while missing := [left for group in wanted if (left := [place for place in group if place not in done])]:
            self.require_one()
            work = _Work(missing)
            serving = [
                self._threads.submit(serve, server, work)
                for server in list(self.servers.values())
                for _ in range(server.connections)
            ]
            for future in serving:
                future.result()
        return [[done[place] for place in group] for group in wanted]


class _Work:
    """Groups of what is to be done, each for one of those that ask."""

    def __init__(self, groups: Iterable[Sequence[tuple[int, int]]]) -> None:
        self._groups, self._lock = deque(map(deque, groups)), Lock()
        self._begun: dict[str, deque[tuple[int, int]]] = {}

    def next_for(self, name: str) -> tuple[int, int] | None:
        with self._lock:
            if not self._begun.get(name) and self._groups:
                self._begun[name] = self._groups.popleft()
            group = self._begun.get(name)
            return group.popleft() if group else None


def _reason(error: Exception) -> str:
    """In a few words: what requests says holds the whole story of urllib3."""
    if isinstance(error, requests.Timeout):
        return "took too long"
    return "does not answer" if isinstance(error, requests.ConnectionError) else f"{type(error).__name__}"


def _told(content: Any) -> str:
    """The message in an answer that tells of a failure."""
    for key in ("error", "message", "detail"):
        if isinstance(content, dict) and key in content:
            return _told(content[key])
    return str(content)[:300]
