"""The HTTP client of vLLM's servers: requests, responses, weights."""

from __future__ import annotations

import asyncio
import atexit
import itertools
import json
import resource
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Coroutine, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush
from threading import Thread
from typing import Any, TypeVar

import aiohttp

from mcore_rl.errors import TrainingError
from mcore_rl.models.generation.interfaces import RequestError, Response
from mcore_rl.models.generation.sampling import SamplingParams
from mcore_rl.models.generation.vllm.answers import Answer, Request, decode_answer
from mcore_rl.models.generation.vllm.images import ImageEncoder, with_single_tokens
from mcore_rl.models.generation.vllm.packed import ROUTE
from mcore_rl.models.generation.vllm.signing import PROOF, Signature, server_name
from mcore_rl.models.megatron.families.mixtures import Experts

T = TypeVar("T")

CONNECT_SECONDS = 10.0
HEALTH_SECONDS = 30.0
ATTEMPTS = 3
"""Number of attempts for a request that fails on a healthy server, before its sample fails."""
BUSY_SECONDS = 0.5
"""Seconds before a request to a busy server is repeated."""
BUSY = (408, 429, 503)
UNAUTHORIZED, FORBIDDEN, NOT_FOUND, MISDIRECTED = 401, 403, 404, 421
KEPT_SECONDS = 3.0
"""Seconds for which an idle connection stays open. vLLM's servers close idle connections after 5 s. A request sent at
that moment would fail as if the server had failed."""
CLOSE_SECONDS = 5.0
"""Maximum time that `ServerPool.close` waits for its requests to be cancelled."""
OTHER_FILES = 1024
"""Number of files that a process may open in addition to its connections to servers."""


class ServerError(RuntimeError):
    """A server has ended, timed out or failed; another server may still process the request."""


class BusyError(ServerError):
    """A server has no room for the request at present."""


class WrongServerError(ServerError):
    """A server does not use the weights that it was sent, lacks a feature that this run needs, or is another one."""


class NoRouteError(RequestError):
    """Raised if a server has no such route."""


class WrongKeyError(WrongServerError):
    """Raised if a server does not accept the run's key."""


@dataclass
class _Task:
    request: Request
    params: SamplingParams
    future: Future[Response]
    attempts: int = 0
    busy_since: float | None = None


class VLLMServer:
    """A client of one vLLM server.

    Args:
        connections: maximum number of concurrent requests for responses.
        key: the run's key, by which requests are signed.
        experts: description of the model's experts, if a response must contain, for each token, the experts that
            computed it; otherwise None.
        encoder: makes the parts of requests that contain images; None if no request has images.
        run: id of the run that has started the server for itself; empty for any other server.
    """

    def __init__(
        self,
        url: str,
        connections: int,
        key: str,
        experts: Experts | None = None,
        encoder: ImageEncoder | None = None,
        run: str = "",
    ) -> None:
        self.url, self.connections, self.experts, self.encoder = url, connections, experts, encoder
        self._key, self._name = key, server_name(url, run)

    def get(self, path: str, seconds: float) -> Any:
        return asyncio.run(self._ask_once("GET", path, None, seconds))

    def post(self, path: str, body: dict[str, Any], seconds: float) -> Any:
        return asyncio.run(self._ask_once("POST", path, body, seconds))

    async def _ask_once(self, method: str, path: str, body: Any, seconds: float) -> Any:
        async with aiohttp.ClientSession() as session:
            return await self._ask(session, method, path, body, seconds)

    async def _ask(self, session: aiohttp.ClientSession, method: str, path: str, body: Any, seconds: float) -> Any:
        """Send an HTTP request; return the decoded JSON of the answer, or None if the answer is empty.

        Raises:
            ServerError: as `_body`; or the answer is not JSON.
            RequestError: the server rejects the request as invalid.
        """
        content = await self._body(session, method, path, body, seconds)
        try:
            return json.loads(content) if content else None
        except ValueError as error:
            raise ServerError(f"{self.url}{path}: {_reason(error)}") from None

    async def _body(self, session: aiohttp.ClientSession, method: str, path: str, body: Any, seconds: float) -> bytes:
        """Send an HTTP request; return the body of the answer.

        Raises:
            ServerError: there is no answer within `seconds`, or the answer reports a failure.
            WrongKeyError: the server has another key.
            WrongServerError: another program answers.
            RequestError: the server rejects the request as invalid.
        """
        limits = aiohttp.ClientTimeout(total=seconds, sock_connect=min(CONNECT_SECONDS, seconds))
        url, sent = self.url + path, b"" if body is None else json.dumps(body).encode()
        signature = Signature.of(self._key, self._name, method, path, sent)
        headers = {"Authorization": signature.header, "Content-Type": "application/json"}
        try:
            async with session.request(
                method, url, data=sent or None, headers=headers, timeout=limits, allow_redirects=False
            ) as answer:
                content = await answer.read()
        except (aiohttp.ClientError, OSError, ValueError) as error:  # a TimeoutError is an OSError
            raise ServerError(f"{self.url}{path}: {_reason(error)}") from None
        has_proof = answer.headers.get(PROOF, "") == signature.proof(self._key, answer.status, content)
        if answer.status == 200 and has_proof:
            return content
        raise self._failure(path, answer.status, content, has_proof)

    def _failure(self, path: str, status: int, content: bytes, has_proof: bool) -> Exception:
        """Return the error of an answer with this status, with the server's proof or without."""
        try:
            told = _told(json.loads(content))
        except (ValueError, RecursionError):
            told = _told(content.decode(errors="replace"))
        if status == UNAUTHORIZED:
            return WrongKeyError(f"{self.url} has another key than this run")
        if status == MISDIRECTED:
            _, _, address = told.partition("@")
            if address == self._name.partition("@")[2]:
                return WrongServerError(f"{self.url} is a server that another run has started for itself")
            return WrongServerError(
                f"{self.url} leads to a server that calls itself {address}; use the URLs that `mcore-rl vllm-servers` "
                "prints"
            )
        if status == FORBIDDEN and not has_proof:
            return WrongServerError(f"{self.url} refuses requests of this run: {told}")
        if not has_proof and status < 500:  # a server that fails may give none
            return WrongServerError(
                f"{self.url} is another program, or a server that `mcore-rl vllm-servers` has not started "
                f"(status {status} without a proof of the key)"
            )
        if status in BUSY:
            return BusyError(f"{self.url}{path}: status {status}: {told}")
        if status == NOT_FOUND:
            return NoRouteError(f"{self.url}{path}: status {status}: {told}")
        if 400 <= status < 500:
            return RequestError(f"{self.url}{path} refuses the request: {told}")
        return ServerError(f"{self.url}{path}: status {status}: {told}")

    async def is_well(self, session: aiohttp.ClientSession) -> bool:
        """Return whether the server reports that it is healthy."""
        try:
            await self._ask(session, "GET", "/health", None, HEALTH_SECONDS)
        except Exception:  # also of an answer that cannot be decoded
            return False
        return True

    async def generate(
        self, session: aiohttp.ClientSession, request: Request, params: SamplingParams, seconds: float
    ) -> Answer:
        """Return a response with the versions of the weights that generated it.

        Raises:
            ServerError: the server does not answer in time, fails, or aborts the request; or its answer cannot be
                decoded (`decode_answer`).
            RequestError: the server rejects the request as invalid.
            UserError: an image's file is missing, or has changed since its record was tokenized.
        """
        body: dict[str, Any] = {"token_ids": request.token_ids, "sampling_params": sampling_params(request, params)}
        if request.images:
            encoder = self.encoder
            assert encoder is not None, "a server without an encoder gets no requests with images"
            # Reading and encoding takes milliseconds, in which the loop would serve no other request.
            parts = await asyncio.to_thread(lambda: list(map(encoder.part, request.images)))
            ids = with_single_tokens(request.token_ids, request.images)
            body |= {"token_ids": ids, "content_parts": parts, "return_token_ids": True}
        try:
            content = await self._body(session, "POST", ROUTE, body, seconds)
        except NoRouteError:
            raise WrongServerError(f"{self.url} has no route {ROUTE}; start it with `mcore-rl vllm-servers`") from None
        try:
            # Experts and masks have millions of numbers; the loop serves other requests meanwhile.
            answer = await asyncio.to_thread(decode_answer, content, request, self.experts, params.keeps_mask)
        except ValueError as error:
            raise WrongServerError(f"{self.url}: its response has {error}") from None
        if answer.finish_reason not in ("stop", "length"):
            raise ServerError(
                f"{self.url}: the request ended before its response was complete (finish_reason={answer.finish_reason})"
            )
        return answer


EXCLUDING_BIAS = -100.0
"""Lowest bias that vLLM adds to a logit. It divides the probability of an id by e^100, about 10^43."""
BIASED_IDS = 1024
"""Maximum number of ids with a bias in a request; vLLM has this limit."""


def sampling_params(request: Request, params: SamplingParams) -> dict[str, Any]:
    """Return the sampling parameters of a request as vLLM's API names them."""
    top_k, temperature = params.top_k or 0, params.temperature
    if params.max_kept_tokens is not None:  # then a server requires a top_k, and refuses temperature 0
        top_k, temperature = (1, 1.0) if params.greedy else (params.max_kept_tokens, temperature)
    options = {
        "max_tokens": request.max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "seed": request.seed,
        "logprobs": request.num_likeliest,
        "ignore_eos": True,  # only the parameters below end a response
        "stop_token_ids": list(params.stop_token_ids),
        "detokenize": bool(params.stop_strings),
    }
    if params.unused_ids:
        options["logit_bias"] = {str(token): EXCLUDING_BIAS for token in params.unused_ids}
    if params.stop_strings:
        options |= {"stop": list(params.stop_strings), "include_stop_str_in_output": True, "skip_special_tokens": False}
    return options


class RequestQueue:
    """Queue of waiting requests, ordered by their priority numbers.

    All requests of a group go to one server, the group's home: the server that takes the group's first request.
    """

    def __init__(self) -> None:
        self._homes: dict[tuple[int, ...], str] = {}
        # One heap per home. Requests whose groups have no home yet are in the heap of None.
        self._heaps: dict[str | None, list[tuple[int, int, _Task]]] = defaultdict(list)
        self._numbers = itertools.count()

    def push(self, task: _Task) -> None:
        entry = (task.request.priority, next(self._numbers), task)
        heappush(self._heaps[self._homes.get(task.request.group)], entry)

    def pop(self, url: str) -> _Task | None:
        """Remove the next request for the server `url` and return it; None if no request waits for it."""
        own, free = self._heaps[url], self._heaps[None]
        while own or free:
            entry = heappop(min(heap for heap in (own, free) if heap))  # lists compare by their first entries
            task = entry[-1]
            if task.future.cancelled():
                continue
            home = self._homes.setdefault(task.request.group, url)
            if home == url:
                return task
            heappush(self._heaps[home], entry)
        return None

    def forget_homes(self, servers: Iterable[str]) -> None:
        """Let groups whose home is one of `servers` (URLs) find another home."""
        gone = set(servers)
        self._homes = {group: home for group, home in self._homes.items() if home not in gone}
        for url in gone:
            for entry in self._heaps.pop(url, []):
                heappush(self._heaps[None], entry)

    def clear(self) -> list[_Task]:
        """Remove all requests and return them."""
        tasks = [task for heap in self._heaps.values() for *_, task in heap]
        self._heaps.clear()
        return tasks


class ServerPool:
    """Distributes requests over servers. An unhealthy server is dropped, and its requests go to other servers.

    If a request fails on a healthy server, it is sent again; it is sent at most `ATTEMPTS` times.

    When a server has room, it gets the waiting request with the lowest priority number. Of several idle servers the
    first one gets it, in the order of `servers`. Requests of the same group start with the same tokens. They all go to
    one server, so that these tokens are computed once.

    One thread with an event loop sends all requests. Only this thread changes `servers` and the queue, so they need no
    lock.

    Args:
        drop: called with the URL of a dropped server and the reason.
        seconds: time limit for a response, in seconds.
    """

    def __init__(self, servers: Iterable[VLLMServer], drop: Callable[[str, str], None], seconds: float) -> None:
        self.servers = {server.url: server for server in servers}
        self._order = {url: place for place, url in enumerate(self.servers)}
        self._drop, self._seconds = drop, seconds
        self.last_failure = "there never was one"
        self._queue = RequestQueue()
        self._in_flight = Counter[str]()
        self._serving: set[asyncio.Task[None]] = set()
        self._drops_in_progress = 0  # number of calls of `drop` in progress
        self._versions: dict[str, int] = {}
        self._announced = self._settled = -1
        self._control = ThreadPoolExecutor(max(1, len(self.servers)), "vllm-control")
        allow_files(sum(server.connections for server in self.servers.values()) + OTHER_FILES)
        self._loop = asyncio.new_event_loop()
        # A daemon, so that pending requests do not keep the process alive.
        self._thread = Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()
        self._session = self._in_loop(self._open())
        atexit.register(self.close)  # aiohttp prints an error if a session is not closed

    async def _open(self) -> aiohttp.ClientSession:
        # No limit is needed: each server's `connections` limits its requests. aiohttp does not use proxies by default.
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_SECONDS))

    def _in_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the event loop and return its result. The loop's own thread must not call this."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # ------------------------------------------------------------ responses

    def submit(self, request: Request, params: SamplingParams) -> Future[Response]:
        """Start a request and return the future response.

        If weights change during a response, several versions of the weights generate it. The future raises RequestError
        if the request is invalid or every attempt fails, and TrainingError if no server is left.
        """
        task = _Task(request, params, Future())
        self._loop.call_soon_threadsafe(self._enqueue, task)
        return task.future

    def announce(self, name: str, number: int) -> None:
        """Record that the servers now receive new weights, with version name `name` and number `number`.

        Until `settle` is called, a server may have the old or the new weights.
        """
        self._versions[name] = self._announced = number

    def settle(self, servers: Collection[str]) -> None:
        """Record that `servers` (URLs) now have the weights that were announced last; drop all other servers."""

        async def settled() -> None:
            self._settled = self._announced
            self._queue.forget_homes(self.servers)

        self._in_loop(settled())
        for url in set(self.servers) - set(servers):
            self.drop(url, f"{url}: the first rank has dropped it")

    def _enqueue(self, task: _Task) -> None:
        """Send a request as soon as a server has room; let it fail if no server is left."""
        if self.servers:
            self._queue.push(task)
            self._send_waiting()
        else:
            _resolve(task.future, self._none_left())

    def _send_waiting(self) -> None:
        """Send waiting requests to servers that have room, always to the one with the fewest requests in flight."""
        without_work: set[str] = set()
        while have_room := [
            server
            for url, server in self.servers.items()
            if url not in without_work and self._in_flight[url] < server.connections
        ]:
            server = min(have_room, key=lambda server: self._in_flight[server.url])
            task = self._queue.pop(server.url)
            if task is None:
                without_work.add(server.url)
                continue
            self._in_flight[server.url] += 1
            serving = self._loop.create_task(self._serve(server, task))
            self._serving.add(serving)
            serving.add_done_callback(partial(self._served, server, task))

    def _served(self, server: VLLMServer, task: _Task, serving: asyncio.Task[None]) -> None:
        """Send waiting requests, because `server` has room again. Cancel the future of a cancelled request.

        A request may be cancelled before `_serve` has begun to run, so `_serve` cannot do this itself.
        """
        self._serving.discard(serving)
        self._in_flight[server.url] -= 1
        if serving.cancelled():
            _cancel(task.future)
        self._send_waiting()

    async def _serve(self, server: VLLMServer, task: _Task) -> None:
        """Send a request to `server` and resolve its future, or queue the request again."""
        oldest = self._settled
        try:
            answer = await server.generate(self._session, task.request, task.params, self._seconds)
            response = self._checked(server, answer, oldest)
        except ServerError as error:
            await self._take_back(server, task, error)
        except Exception as error:  # an error of this request
            _resolve(task.future, error)
        else:
            _resolve(task.future, response)

    async def _take_back(self, server: VLLMServer, task: _Task, error: ServerError) -> None:
        """Handle a request that failed with `error`: queue it again, or let it fail after the last attempt.

        Drop the server if it is not healthy.
        """
        is_lost = isinstance(error, WrongServerError) or not await server.is_well(self._session)
        if not is_lost and isinstance(error, BusyError):
            now = time.monotonic()
            task.busy_since = task.busy_since or now
            if now - task.busy_since > self._seconds:
                return _resolve(task.future, RequestError(f"{error} (tried again for {self._seconds:g} s)"))
            await asyncio.sleep(BUSY_SECONDS)
        elif not is_lost:
            task.attempts += 1
            if task.attempts >= ATTEMPTS:
                return _resolve(task.future, RequestError(f"{error} (attempts: {ATTEMPTS})"))
        if is_lost:
            await self._drop_server(server.url, str(error), task)
        else:
            self._enqueue(task)

    def _checked(self, server: VLLMServer, answer: Answer, oldest: int) -> Response:
        """Return the response in `answer`, with the weights' version numbers in place of their version names.

        Raises:
            WrongServerError: the weights are older than version number `oldest`, or do not come from this run.
        """
        numbers = [self._versions.get(name, -1) for name, _ in answer.spans]
        if not numbers or min(numbers) < oldest:
            has = "/".join(sorted({name for name, _ in answer.spans}))
            wanted = next((name for name, number in self._versions.items() if number == oldest), "none")
            raise WrongServerError(
                f"{server.url}: generated with weights of version {has}, but must have version {wanted} or newer"
            )
        spans = [(number, tokens) for number, (_, tokens) in zip(numbers, answer.spans, strict=True)]
        return replace(answer.response, weight_versions=spans)

    # ------------------------------------------------------------ servers

    def add(self, server: VLLMServer) -> None:
        """Send requests to a further server, or again to one that was dropped."""

        async def added() -> None:
            self._order.setdefault(server.url, len(self._order))
            all_servers = {**self.servers, server.url: server}
            self.servers = {url: all_servers[url] for url in sorted(all_servers, key=self._order.__getitem__)}
            self._queue.forget_homes([server.url])
            self._send_waiting()

        self._in_loop(added())

    def drop(self, url: str, reason: str) -> None:
        """Drop a server: send it no more requests. The event loop's thread must not call this."""
        self._in_loop(self._drop_server(url, reason))

    async def _drop_server(self, url: str, reason: str, *taken_back: _Task) -> None:
        """Drop a server, and give its waiting requests and those in `taken_back` to other servers."""
        dropped = self.servers.pop(url, None) is not None
        self._queue.forget_homes([url])
        for task in taken_back:
            self._queue.push(task)
        if dropped:
            self.last_failure = reason
            self._send_waiting()
            self._drops_in_progress += 1
            try:
                await self._tell(url, reason)
            finally:
                self._drops_in_progress -= 1
                self._resume()
        else:
            self._resume()

    async def _tell(self, url: str, reason: str) -> None:
        """Call `drop` in a daemon thread. It may take seconds, which must not delay the exit of this process."""
        done: Future[None] = Future()

        def call() -> None:
            try:
                self._drop(url, reason)
            except BaseException as error:  # a SystemExit would end the event loop
                done.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))
            else:
                done.set_result(None)

        Thread(target=call, name="vllm-drop", daemon=True).start()
        await asyncio.wrap_future(done)

    def _resume(self) -> None:
        """Send waiting requests to the remaining servers. If none remains, fail them after the last call of `drop`."""
        if self.servers or self._drops_in_progress:
            self._send_waiting()
        else:
            for task in self._queue.clear():
                _resolve(task.future, self._none_left())

    def close(self) -> None:
        """Send no more requests, and cancel pending requests without waiting for the servers. Also runs at exit."""

        async def end() -> None:
            self.servers.clear()
            for task in self._queue.clear():
                _cancel(task.future)
            for serving in self._serving:
                serving.cancel()
            await asyncio.gather(*self._serving, return_exceptions=True)
            await self._session.close()

        self._control.shutdown(wait=False, cancel_futures=True)
        # The loop keeps running, because other threads may still call it, for example to drop a server.
        if self._thread.is_alive():  # not in a forked child
            with suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(end(), self._loop).result(CLOSE_SECONDS)
        atexit.unregister(self.close)

    def _none_left(self) -> TrainingError:
        return TrainingError(f"no vLLM server is left; the last server's failure: {self.last_failure}")

    def each(self, call: Callable[[VLLMServer], T], urls: Iterable[str] | None = None) -> dict[str, T]:
        """Call `call` for the servers `urls`, or for all, concurrently; return the results by URL.

        A server for which the call fails is dropped.

        Raises:
            TrainingError: no server is left.
        """
        return self.gather(self.begin_each(call, urls))

    def begin_each(self, call: Callable[[VLLMServer], T], urls: Iterable[str] | None = None) -> dict[str, Future[T]]:
        """Start `call` for the servers `urls`, or for all; return the futures by URL. `gather` waits for them."""
        wanted = None if urls is None else set(urls)
        return {
            url: self._control.submit(call, server)
            for url, server in list(self.servers.items())
            if wanted is None or url in wanted
        }

    def gather(self, begun: dict[str, Future[T]]) -> dict[str, T]:
        """Wait for the futures of `begin_each`; return the results by URL, and drop the servers that failed.

        Raises:
            TrainingError: no server is left.
        """
        results = {}
        for url, future in begun.items():
            try:
                results[url] = future.result()
            except (ServerError, TrainingError) as error:
                self.drop(url, str(error))
        if not self.servers:
            raise self._none_left()
        return results


def _resolve(future: Future[T], result: T | Exception) -> None:
    """Set a future's result or exception, unless it was cancelled."""
    if future.set_running_or_notify_cancel():
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)


def _cancel(future: Future[T]) -> None:
    """Cancel a future that has no result yet, and wake the threads that wait for it."""
    if not future.done() and future.cancel():
        future.set_running_or_notify_cancel()


def allow_files(count: int) -> None:
    """Let this process open at least `count` files, if the system allows it; the default is often 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        most = count if hard == resource.RLIM_INFINITY else min(count, hard)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def _reason(error: Exception) -> str:
    """Return a short description of an error of aiohttp. Its own messages are long."""
    if isinstance(error, TimeoutError):
        return "took too long"
    if isinstance(error, (aiohttp.ClientConnectionError, ConnectionError)):
        return "does not answer"
    return type(error).__name__


def _told(content: Any) -> str:
    """Return the error message in a server's answer; `content` is the answer's decoded JSON."""
    for key in ("error", "message", "detail"):
        if isinstance(content, dict) and key in content:
            return _told(content[key])
    return str(content)[:300]
