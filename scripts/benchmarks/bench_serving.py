"""Measure what serving and evaluating a model add to its generation.

    python scripts/benchmarks/bench_serving.py [--requests 400] [--pairs 5]

1. The endpoint's time per request: a client in another process asks for one token, and the engine answers at once.
2. A batch of `mcore-rl eval`, with its entries for samples.jsonl, divided by the same rollouts of a GRPO step. The two
   alternate; the figure is the median of the pairs' ratios.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "2")

from bench_results import Row, finish
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from mcore_rl.platform import initialize_platform

initialize_platform()

from mcore_rl.agents.server import Server
from mcore_rl.models.generation.interfaces import RequestEngine, Response
from mcore_rl.models.policy.megatron_policy import MegatronPolicy
from mcore_rl.platform import resolve
from mcore_rl.serving.endpoint import PublicEndpoint
from mcore_rl.serving.engine import join_ranks
from mcore_rl.serving.evaluate_model import ModelEvaluation
from mcore_rl.serving.model_source import ModelSource, find_model

REQUEST_SECONDS, EVALUATION_FACTOR = 2e-3, 1.1
VOCABULARY, PROMPTS, SAMPLES, NEW_TOKENS = 4000, 12, 4, 64
CLIENT = """
import http.client, json, statistics, sys, time
connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]))
body, seconds = json.dumps({"prompt": [7, 8, 9], "max_tokens": 1, "temperature": 0}), []
for _ in range(int(sys.argv[2])):
    start = time.perf_counter()
    connection.request("POST", "/v1/completions", body)
    answer = connection.getresponse()
    answer.read()
    assert answer.status == 200
    seconds.append(time.perf_counter() - start)
print(statistics.median(seconds))
"""


class InstantEngine(RequestEngine):
    """Answers each request at once with one token."""

    max_sequence_length = 4096

    def submit(self, prompt, sample_id, group=(), greedy=False, options=None):
        future = Future()
        future.set_result(Response([5], [-0.5], False, [(0, 1)]))
        return future


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--pairs", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        tokenizer = make_model(root / "model")
        endpoint = request_seconds(tokenizer, arguments.requests)
        evaluation, rollouts = evaluation_seconds(root, arguments.pairs)
    ratios = [one / other for one, other in zip(evaluation, rollouts, strict=True)]
    rows = [
        Row.figure("the endpoint, per request", 1e3 * endpoint, "ms", at_most=1e3 * REQUEST_SECONDS),
        Row(
            "an evaluation over a step's rollouts, s", statistics.median(evaluation), statistics.median(rollouts),
            statistics.median(ratios), at_most=EVALUATION_FACTOR,
        ),
    ]  # fmt: skip
    keeps = arguments.requests >= 400 and arguments.pairs >= 5
    return finish("serving", "Serving and evaluating a model", ("evaluation", "rollouts", "figure"), rows, keeps)


def make_model(path: Path) -> PreTrainedTokenizerFast:
    words = {f"w{number}": number for number in range(VOCABULARY)}
    made = Tokenizer(models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="w0", eos_token="w1", pad_token="w1")
    tokenizer.save_pretrained(path)
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 8, "num_key_value_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=4, **sizes)).save_pretrained(path)
    return tokenizer


def request_seconds(tokenizer: PreTrainedTokenizerFast, requests: int) -> float:
    """Return the median time of a request to the endpoint."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    async def start() -> Server:
        server = Server(PublicEndpoint(InstantEngine(), tokenizer, "model"), "127.0.0.1", 0)
        await server.start()
        return server

    server = asyncio.run_coroutine_threadsafe(start(), loop).result()
    port = server.url.rpartition(":")[2]
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, port, str(requests)], capture_output=True, text=True, check=True
    )
    asyncio.run_coroutine_threadsafe(server.stop(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    return float(done.stdout)


def evaluation_seconds(root: Path, pairs: int) -> tuple[list[float], list[float]]:
    """Return the seconds of batches of an evaluation, and of the same rollouts by themselves."""
    from mcore_rl.algorithms.grpo import rollout_worker

    records = [{"prompt": f"w{7 + n} w9 w{20 + n}", "answer": "w3"} for n in range(PROMPTS)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    values = {
        "data": {"train": str(root / "prompts.jsonl"), "max_sequence_length": 2 * NEW_TOKENS},
        "output_dir": str(root / "out"),
        "trainer": {"max_steps": 1},
        "grpo": {"max_new_tokens": NEW_TOKENS},
        "environment": {"name": "exact_match"},
    }
    source = find_model(str(root / "model"), [], values)
    source = ModelSource(source.name, resolve(source.config))
    evaluation = ModelEvaluation(source, print)
    join_ranks(source.config)
    (root / "out").mkdir()
    policy = MegatronPolicy(source.config)
    prompts = evaluation.inputs.train.prompts
    batch = [(prompt, number) for prompt in range(PROMPTS) for number in range(SAMPLES)]
    requests = [(prompt, prompts[prompt]) for prompt, _ in batch]
    ours, peer = [], []
    with rollout_worker(source.config, evaluation.inputs, policy) as worker:
        worker.prepare(0)
        for number in range(pairs + 1):
            start = time.perf_counter()
            worker.run(requests, range(len(batch)))
            middle = time.perf_counter()
            evaluation._entries(worker, batch, SAMPLES, greedy=False)
            if number:  # the first pair warms up
                peer.append(middle - start)
                ours.append(time.perf_counter() - middle)
        worker.finish()
    policy.shutdown()
    return ours, peer


if __name__ == "__main__":
    sys.exit(main())
