"""Compare the trainer's cost of packed answers from vLLM's servers with that of answers in JSON.

    python scripts/benchmarks/bench_answers.py [--responses 512] [--tokens 32000]

A stub in another process answers requests with random tokens and log-probabilities, either in JSON, as vLLM's
/inference/v1/generate, or packed, as /mcore_rl/generate. For each form, a process of its own asks for all responses
with the package's client and keeps them. It measures its CPU time, and the growth of its memory: at its peak, and with
all responses and no requests. The JSON form is decoded as this package did before: a list of numbers for each response.
The tokens and log-probabilities of both forms must be equal to the bit.

Bounds: packed answers take at most a fifth of the CPU time and an eighth of the memory. Exits with 1 if one is missed.
"""

import argparse
import hashlib
import json
import multiprocessing
import re
import resource
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from bench_results import Row, finish

from mcore_rl.cli.entry_point import Parser, count
from mcore_rl.platform import initialize_platform

CPU_BOUND, MEMORY_BOUND = 1 / 5, 1 / 8
CONNECTIONS, VOCABULARY, SECONDS = 16, 150_000, 1800
KEY = "the-key-of-the-benchmark"


def main() -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--responses", type=count, default=512)
    parser.add_argument("--tokens", type=count, default=32_000, help="tokens of each response")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    told, telling = context.Pipe(duplex=False)
    server = context.Process(target=serve, args=(telling, arguments.tokens), daemon=True)
    server.start()
    results = {}
    try:
        port = told.recv()
        for form in ("json", "packed"):
            measured, sending = context.Pipe(duplex=False)
            client = context.Process(target=measure, args=(sending, form, port, arguments.responses))
            client.start()
            sending.close()
            results[form] = measured.recv()
            client.join()
            print(form, {name: value for name, value in results[form].items() if name != "digest"}, flush=True)
    finally:
        server.kill()
    packed, text = results["packed"], results["json"]
    if packed["digest"] != text["digest"]:
        raise RuntimeError("the two forms have other tokens or log-probabilities")
    figures = [
        ("CPU seconds of the trainer", "cpu_seconds", CPU_BOUND),
        ("memory at its peak, GB", "peak_gb", MEMORY_BOUND),
        ("memory with all responses, GB", "kept_gb", MEMORY_BOUND),
    ]
    rows = [Row(name, packed[key], text[key], packed[key] / text[key], at_most=bound) for name, key, bound in figures]
    title = f"{arguments.responses} responses of {arguments.tokens:,} tokens from a server"
    is_whole = arguments == parser.parse_args([])
    return finish("answers", title, ("packed", "JSON", "packed / JSON"), rows, keep=is_whole)


def numbers_of(seed: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens and log-probabilities of a response."""
    drawn = np.random.default_rng(seed)
    return drawn.integers(0, VOCABULARY, tokens, np.int32), -drawn.exponential(1.0, tokens).astype(np.float32)


def serve(telling: Connection, tokens: int) -> None:
    """Answer requests until the process is killed."""
    from mcore_rl.models.generation.vllm.packed import ROUTE, pack
    from mcore_rl.models.generation.vllm.signing import PROOF, Signature

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seed = asked["sampling_params"]["seed"]
            ids, logprobs = numbers_of(seed, tokens)
            if self.path == ROUTE:
                versions = {"finish_reason": "length", "weight_versions": [["1", 0, tokens]]}
                content = pack(versions, {"token_ids": ids, "logprobs": logprobs})
            else:
                content = as_vllm(ids, logprobs)
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.prove(content)
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self) -> None:  # /health
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.prove(b"")
            self.end_headers()

        def prove(self, content: bytes) -> None:
            if (signature := Signature.read(self.headers.get("Authorization", ""))) is not None:
                self.send_header(PROOF, signature.proof(KEY, 200, content))

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads, request_queue_size = True, 4 * CONNECTIONS

    server = Server(("127.0.0.1", 0), Handler)
    telling.send(server.server_port)
    server.serve_forever()


def as_vllm(ids: np.ndarray, logprobs: np.ndarray) -> bytes:
    """Return an answer with the fields of vLLM's JSON."""
    content = [
        {"token_id": i, "logprob": p, "rank": 1, "top_logprobs": [{"token_id": i, "logprob": p, "rank": 1}]}
        for i, p in zip(ids.tolist(), logprobs.tolist(), strict=True)
    ]
    choice = {
        "index": 0, "logprobs": {"content": content}, "finish_reason": "length", "stop_reason": None,
        "token_ids": ids.tolist(), "routed_experts": None, "sampling_mask": None,
        "weight_versions": [{"version": "1", "start": 0, "end": len(ids)}],
    }  # fmt: skip
    return json.dumps({"choices": [choice]}, separators=(",", ":")).encode()


def measure(sending: Connection, form: str, port: int, responses: int) -> None:
    """Ask for all responses; send the CPU seconds, the growth of memory in GB, and a digest of all numbers."""
    initialize_platform()
    from mcore_rl.models.generation.interfaces import Response
    from mcore_rl.models.generation.sampling import SamplingParams
    from mcore_rl.models.generation.vllm.answers import Answer, Request
    from mcore_rl.models.generation.vllm.client import ServerPool, VLLMServer, sampling_params

    class InLists(VLLMServer):
        """The client as it was before: JSON is decoded in the event loop, and numbers are kept in lists."""

        async def generate(self, session, request, params, seconds):
            body = {"token_ids": request.token_ids, "sampling_params": sampling_params(request, params)}
            told = await self._ask(session, "POST", "/inference/v1/generate", body, seconds)
            (choice,) = told["choices"]
            response = Response.__new__(Response)  # its constructor would make arrays
            response.token_ids = choice["token_ids"]
            response.logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
            response.ended, response.weight_versions = False, ()
            response.choices, response.kept_tokens, response.likeliest = {}, None, ()
            return Answer(response, "length", [("1", len(response.token_ids))])

    class ListPool(ServerPool):
        def _checked(self, server, answer, oldest):
            return answer.response  # without the copy, which would have arrays

    kind, pool_kind = (InLists, ListPool) if form == "json" else (VLLMServer, ServerPool)
    pool = pool_kind([kind(f"http://127.0.0.1:{port}", CONNECTIONS, KEY)], lambda url, why: print(url, why), SECONDS)
    pool.announce("1", 1)
    pool.settle(list(pool.servers))
    params = SamplingParams(8)
    pool.submit(Request((1, 2), 8, responses, 0, (1,)), params).result(SECONDS)  # allocates what every run needs
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    started, before = used_seconds(), resident_bytes("VmRSS")
    futures = [pool.submit(Request((1, 2), 8, number, number, (1,)), params) for number in range(responses)]
    answers = [future.result(SECONDS) for future in futures]
    del futures
    seconds = used_seconds() - started
    kept, peak = resident_bytes("VmRSS") - before, resident_bytes("VmHWM") - before
    digest = hashlib.sha256()
    for answer in answers:
        digest.update(np.asarray(answer.token_ids, np.int32).tobytes())
        digest.update(np.asarray(answer.logprobs, np.float64).tobytes())
    pool.close()
    sending.send({"cpu_seconds": seconds, "peak_gb": peak / 1e9, "kept_gb": kept / 1e9, "digest": digest.digest()})


def resident_bytes(name: str) -> int:
    """Return the resident memory of this process: VmRSS, or its peak VmHWM."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.findall(rf"{name}:\s+(\d+)", status)[0])


def used_seconds() -> float:
    """Return the CPU seconds of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
