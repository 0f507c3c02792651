"""Compare the client of vLLM's servers with plain aiohttp at 4,096 concurrent requests.

    python scripts/benchmarks/bench_requests.py

Four stub servers, one process each, answer each request after two seconds. One process sends 4,096 requests in groups
of 8, first with `ServerPool`, then the same bodies with aiohttp. Exits with 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import aiohttp
from aiohttp import web
from bench_results import Row, finish

from mcore_rl.platform import initialize_platform

initialize_platform()

from mcore_rl.models.generation.sampling import SamplingParams
from mcore_rl.models.generation.vllm.client import (
    KEPT_SECONDS,
    OTHER_FILES,
    Request,
    ServerPool,
    VLLMServer,
    allow_files,
    sampling_params,
)

SERVERS, SERVER_SECONDS, GROUP, PROMPT, RESPONSE = 4, 2.0, 8, 512, 128
PATH, VERSION, PARAMS = "/inference/v1/generate", "bench.0", SamplingParams(RESPONSE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    asked = [Request((n // GROUP, *range(1, PROMPT)), RESPONSE, n, n, (n // GROUP,)) for n in range(arguments.requests)]
    allow_files(len(asked) + OTHER_FILES)  # child processes inherit the limit
    ours, theirs, threads = [], [], 0
    urls, servers = zip(*(start_server() for _ in range(SERVERS)), strict=True)
    try:
        for _ in range(arguments.rounds):
            seconds, threads = through_pool(urls, asked)
            ours.append(seconds)
            theirs.append(asyncio.run(through_aiohttp(urls, asked)))
            print(f"pool {ours[-1]}, aiohttp {theirs[-1]}", flush=True)
    finally:
        for server in servers:
            server.kill()
    (wall, used), (wall_bare, used_bare) = (map(statistics.median, zip(*each, strict=True)) for each in (ours, theirs))
    rows = [
        Row("seconds until all have answered", wall, wall_bare, wall / wall_bare, at_most=1.5),
        Row("processor seconds of the client", used, used_bare, used / used_bare, at_most=2.0),
        Row.figure("threads that the pool starts", threads, "threads", at_most=4),
    ]
    title = f"{len(asked):,} requests in flight, {PROMPT} tokens and answers of {RESPONSE}"
    columns = ("ServerPool", "aiohttp", "ratio, or figure")
    return finish("requests", title, columns, rows, keep=arguments == parser.parse_args([]))


def start_server() -> tuple[str, multiprocessing.Process]:
    ours, its = multiprocessing.Pipe()
    process = multiprocessing.Process(target=serve, args=(its,), daemon=True)
    process.start()
    return f"http://127.0.0.1:{ours.recv()}", process


def serve(parent: Connection) -> None:
    """Send the server's port to `parent`, then answer requests in the format of vLLM's servers."""
    choice = {
        "token_ids": [-1, *range(1, RESPONSE)],
        "finish_reason": "length",
        "weight_versions": [{"version": VERSION, "start": 0, "end": RESPONSE}],
        "logprobs": {"content": [{"logprob": -0.25}] * RESPONSE},
    }
    before, _, after = json.dumps({"choices": [choice]}).partition("-1")  # the place of the seed

    async def answer(request: web.Request) -> web.Response:
        seed = (await request.json())["sampling_params"]["seed"]
        await asyncio.sleep(SERVER_SECONDS)
        return web.Response(text=f"{before}{seed}{after}", content_type="application/json")

    async def run() -> None:
        application = web.Application()
        application.router.add_post(PATH, answer)
        application.router.add_get("/health", lambda request: asyncio.sleep(0, web.Response()))
        # Many connections wait for more than 5 s until their first request is sent.
        runner = web.AppRunner(application, keepalive_timeout=60)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=8192)
        await site.start()
        parent.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(run())


def through_pool(urls: Sequence[str], asked: list[Request]) -> tuple[tuple[float, float], int]:
    """Return wall and processor seconds of all requests, and the number of threads that the pool has started."""
    before = threading.active_count()
    servers = [VLLMServer(url, len(asked) // len(urls)) for url in urls]
    pool = ServerPool(servers, lambda url, reason: print(f"dropped {url}: {reason}"), 60.0)
    pool.announce(VERSION, 0)
    pool.settle(urls)
    wall, used = time.perf_counter(), time.process_time()
    futures = [pool.submit(request, PARAMS) for request in asked]
    time.sleep(SERVER_SECONDS / 2)
    threads = threading.active_count() - before
    for request, future in zip(asked, futures, strict=True):
        assert future.result(120).token_ids[0] == request.seed
    seconds = time.perf_counter() - wall, time.process_time() - used
    pool.close()
    return seconds, threads


async def through_aiohttp(urls: Sequence[str], asked: list[Request]) -> tuple[float, float]:
    """Return wall and processor seconds of the same bodies, sent without a queue, retries or checks."""
    wall, used = time.perf_counter(), time.process_time()
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_SECONDS)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def ask(request: Request) -> None:
            body = {"token_ids": request.token_ids, "sampling_params": sampling_params(request, PARAMS)}
            async with session.post(urls[request.group[0] % len(urls)] + PATH, json=body) as answer:
                assert json.loads(await answer.read())["choices"][0]["token_ids"][0] == request.seed

        await asyncio.gather(*map(ask, asked))
    return time.perf_counter() - wall, time.process_time() - used


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sys.exit(main())
