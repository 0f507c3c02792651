"""Measure the endpoint of agents: its own time for a request, and 256 sessions at once.

    python scripts/benchmarks/bench_agents.py

An engine in the same process answers at once with a fixed text, so that only the endpoint is measured. The first figure
is the time of a chat completion request in a conversation of 20 turns (about 2,000 tokens), over HTTP, without the time
in which the chat template renders and the tokenizer reads its text. For the second, 256 sessions run at once, each with
4 turns from a client process of its own kind (one aiohttp client for all); the benchmark counts responses that were
lost, and rows that are wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from concurrent.futures import Future
from typing import Any

import aiohttp
from bench_results import Row, finish

from mcore_rl.agents.server import Endpoint, Server
from mcore_rl.agents.sessions import Session, SessionLimits, Sessions
from mcore_rl.agents.templates import ChatTemplate
from mcore_rl.models.generation.interfaces import RequestEngine, Response

TURNS, SESSIONS, TURNS_AT_ONCE, WORDS = 20, 256, 4, 40
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class InstantEngine(RequestEngine):
    """Answers every request at once with the same tokens."""

    max_sequence_length = 100_000

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    def submit(self, *arguments: Any, **options: Any) -> Future[Response]:
        future = Future[Response]()
        future.set_result(Response(list(self.ids), [-0.5] * len(self.ids), True, [(0, len(self.ids))]))
        return future


def make_tokenizer() -> Any:
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    trainer = ByteLevelBPETokenizer()
    special = ["<|end|>", "<|user|>", "<|assistant|>"]
    trainer.train_from_iterator([text()], vocab_size=320, special_tokens=special, show_progress=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=trainer._tokenizer, eos_token="<|end|>", pad_token="<|end|>", chat_template=TEMPLATE
    )


def text() -> str:
    return " ".join(f"word{n % 10}" for n in range(WORDS))


class Rendering:
    """Adds up the time in which templates render and tokenizers read texts."""

    def __init__(self) -> None:
        self.seconds = 0.0
        for name in ("render", "ids", "text"):
            setattr(ChatTemplate, name, self._timed(getattr(ChatTemplate, name)))

    def _timed(self, function: Any) -> Any:
        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self.seconds += time.perf_counter() - started

        return timed


async def converse(client: aiohttp.ClientSession, url: str, session: Session, turns: int) -> list[float]:
    """Lead a conversation; return the seconds of each request."""
    messages, seconds = [{"role": "user", "content": text()}], []
    headers = {"Authorization": f"Bearer {session.key}"}
    for _ in range(turns):
        started = time.perf_counter()
        async with client.post(f"{url}/v1/chat/completions", json={"messages": messages}, headers=headers) as answer:
            body = await answer.json()
        seconds.append(time.perf_counter() - started)
        messages += [body["choices"][0]["message"], {"role": "user", "content": text()}]
    return seconds


async def measure() -> tuple[float, float, float, int]:
    """Return the milliseconds of a request without and with rendering, the requests per second, and lost responses."""
    tokenizer, rendering = make_tokenizer(), Rendering()
    ids = [*tokenizer(text(), add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    sessions = Sessions(InstantEngine(ids), tokenizer, SessionLimits(10**6, None))
    server = Server(Endpoint(sessions), "127.0.0.1", 0)
    await server.start()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        own, whole = [], []
        for _ in range(5):
            before = rendering.seconds
            seconds = await converse(client, server.url, sessions.begin(0, {}, []), TURNS)
            own.append((sum(seconds) - (rendering.seconds - before)) / TURNS)
            whole.append(sum(seconds) / TURNS)
        open_ = [sessions.begin(n, {}, []) for n in range(SESSIONS)]
        started = time.perf_counter()
        await asyncio.gather(*(converse(client, server.url, session, TURNS_AT_ONCE) for session in open_))
        rate = SESSIONS * TURNS_AT_ONCE / (time.perf_counter() - started)
        right = TURNS_AT_ONCE * len(ids)
        lost = sum([sum(row.token_mask) for row in session.tree.rows()] != [right] for session in open_)
    await server.stop()
    return 1000 * statistics.median(own), 1000 * statistics.median(whole), rate, lost


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    own, whole, rate, lost = asyncio.run(measure())
    rows = [
        Row.figure("a request, without rendering", own, "ms", None, 5),
        Row.figure("a request, with rendering", whole, "ms"),
        Row.figure(f"{SESSIONS} sessions at once", rate, "requests/s"),
        Row.figure("sessions with a lost or wrong row", lost, "sessions", None, 0),
    ]
    return finish("agents", "The endpoint of agents", ("", "", "figure"), rows)


if __name__ == "__main__":
    sys.exit(main())
