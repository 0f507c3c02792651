"""Sessions: one rollout of a program each, with its key, its tree of tokens, its limits and its reward.

All methods run in the event loop of the endpoint; nothing here needs a lock.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import secrets
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from mcore_rl.agents.messages import BadRequest, Message, SampledImage
from mcore_rl.agents.session_images import ImageStore
from mcore_rl.agents.templates import ChatTemplate
from mcore_rl.agents.tree import History, SessionTree, Turn, TurnPrompt
from mcore_rl.data.images import PlacedImage
from mcore_rl.models.generation.interfaces import RequestEngine, RequestOptions, Response

RETRY_SECONDS = 5.0
"""Time in which a client whose connection was lost may repeat its request and get the same response."""


class SessionEnded(Exception):
    """Raised for a request of a session that has ended."""


@dataclass(frozen=True)
class SessionLimits:
    """Limits of a session: requests, and sampled tokens; None for no limit of tokens."""

    calls: int
    tokens: int | None


@dataclass(eq=False)
class Call:
    """A request, and the turns of its responses.

    digest: hash of the request, by which a client's retry is recognized.
    waiting: number of connections that wait for the responses.
    """

    digest: str
    prompt: TurnPrompt
    stops: tuple[str, ...]
    work: asyncio.Task[list[Turn]] = field(init=False)
    asked: list[Future[Response]] = field(default_factory=list)
    waiting: int = 0
    is_delivered: bool = False
    is_given_up: bool = False


@dataclass(eq=False)
class Session:
    """A rollout in progress.

    sample_id: number of the sample among all samples of the run.
    record, messages: fields of the prompt's record, and the prompt's messages.
    done: set when the session ends, by a reward, an error or a limit.
    reached: name of the limit that a request has reached; None if none was reached.
    """

    sample_id: int
    record: Mapping[str, Any]
    messages: list[Message]
    tree: SessionTree
    greedy: bool = False
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    key: str = field(default_factory=lambda: f"sk-{secrets.token_urlsafe(24)}")
    calls: list[Call] = field(default_factory=list)
    num_calls: int = 0
    num_tokens: int = 0
    reward: float | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    reached: str | None = None
    is_over: bool = False
    done: asyncio.Event = field(default_factory=asyncio.Event)
    _asked: Counter[str] = field(default_factory=Counter)

    def end(self) -> None:
        self.is_over = True
        self.done.set()

    def give_reward(self, body: Any) -> None:
        """Set the reward from a number, or from an object with `reward`, `rewards` or `error`; end the session.

        Raises:
            BadRequest: the body is neither, or a reward is not finite.
            SessionEnded: the session has ended.
        """
        if self.is_over:
            raise SessionEnded
        values = body if isinstance(body, dict) else {"reward": body}
        if unknown := set(values) - {"reward", "rewards", "error"}:
            raise BadRequest(f"a reward has the keys reward, rewards and error, not {', '.join(sorted(unknown))}")
        named = values.get("rewards") or {}
        if not isinstance(named, dict):
            raise BadRequest("rewards: must be an object of numbers")
        if values.get("error") is not None:
            self.error = str(values["error"])
            self.end()
            return
        if values.get("reward") is None and not named:
            raise BadRequest("reward: must be a number")
        self.rewards = {str(name): _number(value, f"rewards.{name}") for name, value in named.items()}
        total = values.get("reward")
        self.reward = math.fsum(self.rewards.values()) if total is None else _number(total, "reward")
        self.end()

    async def take_images(self, parts: Sequence[Message]) -> None:
        """Store the images of a request; see `SessionImages.take`."""
        if parts and self.tree.images is None:
            raise BadRequest("messages: has images, which this endpoint does not take", "messages")
        if self.tree.images is not None:
            await self.tree.images.take(parts)

    def sample_id_of(self, prompt: Sequence[int], seed: Any, images: Sequence[PlacedImage] = ()) -> int:
        """Return an id for the random numbers of the next response to a prompt.

        It depends on the session's sample, the client's seed, the prompt, and how often the session has asked with this
        prompt; not on the order in which requests arrive.
        """
        asked = hashlib.blake2b(array("q", prompt).tobytes(), digest_size=16).hexdigest()
        asked += "".join(image.digest for image in images)
        self._asked[asked] += 1
        text = json.dumps([self.sample_id, seed, asked, self._asked[asked]])
        # Engines serve lower ids first, so requests of earlier samples must have lower ids.
        own = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")
        return (self.sample_id << 32) + own


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 1e300:
        raise BadRequest(f"{where}: must be a finite number, got {value!r}")
    return float(value)


class Sessions:
    """The open sessions of a replica, and the requests to the engine.

    Args:
        history: see `SessionTree`.
        images: where images are stored; None refuses them.
    """

    def __init__(
        self,
        engine: RequestEngine,
        tokenizer: Any,
        limits: SessionLimits,
        history: History = "template",
        images: ImageStore | None = None,
    ) -> None:
        self.engine, self.limits, self.history, self.images = engine, limits, history, images
        self.template = ChatTemplate(tokenizer)
        self._by_key = dict[str, Session]()

    def begin(
        self, sample_id: int, record: Mapping[str, Any], messages: Sequence[Message], greedy: bool = False
    ) -> Session:
        """Open a session."""
        session_id = secrets.token_hex(8)
        images = self.images.of_session(session_id) if self.images is not None else None
        tree = SessionTree(self.template, self.history, images)
        session = Session(sample_id, record, list(messages), tree, greedy, session_id)
        self._by_key[session.key] = session
        return session

    def finish(self, session: Session) -> None:
        """End a session, stop its requests, and leave out the responses that did not reach its program.

        Its key stays known as that of an ended session.
        """
        session.end()
        for call in session.calls:
            if not call.is_delivered:
                self._stop_and_discard(session, call)

    def forget(self) -> None:
        """Forget all ended sessions; requests with their keys are then refused like those with wrong keys."""
        self._by_key = {key: session for key, session in self._by_key.items() if not session.is_over}

    def find(self, key: str, session_id: str | None) -> Session | None:
        """Return the session with this key; None if there is none, or if it is not the session `session_id`."""
        given = key.encode()
        session = next((one for own, one in self._by_key.items() if secrets.compare_digest(own.encode(), given)), None)
        return None if session is None or session_id not in (None, session.id) else session

    # ------------------------------------------------------------ requests

    def ask(
        self,
        session: Session,
        digest: str,
        is_retry: bool,
        make_prompt: Callable[[], TurnPrompt],
        count: int,
        options: RequestOptions,
        seed: Any = None,
    ) -> Call:
        """Return the call of a request: a new one, or that of the same request if a client repeats it.

        Args:
            digest: hash of the request.
            is_retry: whether the client says that it repeats the request.
            count: number of responses.

        Raises:
            BadRequest: the request has no valid prompt, or the session has reached a limit.
            SessionEnded: the session has ended.
        """
        if session.is_over:
            raise SessionEnded
        if (same := self.repeated(session, digest, is_retry)) is not None:
            same.waiting += 1
            return same
        self.check_may_ask(session)
        try:
            prompt = make_prompt()
        except SampledImage:
            session.reached = "image token"
            raise
        ids, images = tuple(prompt.ids), prompt.images
        if len(ids) >= self.engine.max_sequence_length:
            session.reached = "context"
            raise BadRequest(
                f"the prompt has {len(ids)} tokens; this model's maximum context length is "
                f"{self.engine.max_sequence_length} tokens (data.max_sequence_length), with the response",
                "messages",
                "context_length_exceeded",
            )
        session.num_calls += 1
        call = Call(digest, prompt, options.stop_strings, waiting=1)
        root = tuple(prompt.parent.path[0].prompt.new_ids) if prompt.parent else ids  # all turns go to the same server
        call.asked = [
            self.engine.submit(ids, session.sample_id_of(ids, seed, images), root, session.greedy, options, images)
            for _ in range(count)
        ]
        call.work = asyncio.ensure_future(self._respond(session, call))
        session.calls.append(call)
        return call

    def repeated(self, session: Session, digest: str, is_retry: bool) -> Call | None:
        """Return the call that a request repeats: one whose connection was lost, or that the client says to repeat."""
        for call in reversed(session.calls):
            if call.digest == digest and (is_retry or (call.waiting == 0 and not call.is_delivered)):
                failed = call.work.done() and (call.work.cancelled() or call.work.exception() is not None)
                return None if failed or call.is_given_up else call
        return None

    def check_may_ask(self, session: Session) -> None:
        """Check that a session has not ended, and that it has reached no limit.

        Raises:
            SessionEnded: the session has ended.
            BadRequest: it has reached a limit.
        """
        if session.is_over:
            raise SessionEnded
        limits = self.limits
        if session.num_calls >= limits.calls:
            session.reached = "calls"
            raise BadRequest(
                f"the session has made {limits.calls} requests, the limit (environment.agent.max_calls)",
                code="call_limit",
            )
        if limits.tokens is not None and session.num_tokens >= limits.tokens:
            session.reached = "tokens"
            raise BadRequest(
                f"the session has sampled {session.num_tokens} tokens, and the limit is {limits.tokens} "
                "(environment.agent.max_tokens)",
                code="token_limit",
            )

    async def _respond(self, session: Session, call: Call) -> list[Turn]:
        responses = await asyncio.gather(*map(asyncio.wrap_future, call.asked))
        turns = []
        try:
            for response in responses:
                session.num_tokens += len(response.token_ids)
                turns.append(session.tree.add(call.prompt, response, lambda: secrets.token_hex(5)[:9], call.stops))
        except Exception:
            for turn in turns:
                session.tree.discard(turn)
            raise
        return turns

    async def turns(self, session: Session, call: Call) -> list[Turn]:
        """Wait for the responses of a call; return their turns.

        Raises:
            SessionEnded: the session has ended meanwhile.
            RequestError: the engine could not generate a response.
        """
        ended = asyncio.ensure_future(session.done.wait())
        try:
            await asyncio.wait([call.work, ended], return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
        if not call.work.done() or call.work.cancelled():
            raise SessionEnded
        return call.work.result()

    def delivered(self, call: Call) -> None:
        """Record that a client has received the responses of a call."""
        call.waiting, call.is_delivered = max(call.waiting - 1, 0), True

    def lost(self, session: Session, call: Call) -> None:
        """Record that the connection of a call was lost.

        If no client repeats the request within `RETRY_SECONDS`, the call is stopped, and its responses do not count.
        """
        call.waiting = max(call.waiting - 1, 0)
        asyncio.get_running_loop().call_later(RETRY_SECONDS, self._give_up, session, call)

    def _give_up(self, session: Session, call: Call) -> None:
        if call.waiting or call.is_delivered or session.is_over:
            return
        call.is_given_up = True
        self._stop_and_discard(session, call)

    def _stop_and_discard(self, session: Session, call: Call) -> None:
        """Stop a request that still runs; leave out the responses of one that is done."""
        if not call.work.done():
            call.work.cancel()
            for asked in call.asked:
                self.engine.cancel(asked)
        elif not call.work.cancelled() and call.work.exception() is None:
            for turn in call.work.result():
                session.tree.discard(turn)
