"""Tests of the lines about long generation: by the training processes, in the background, and by vLLM's servers."""

import re
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch
from generation_cases import PARAMS, config_of, make_prompts
from generation_cases import model_path as model_path
from small_models import make_tokenizer

from mcore_rl.models.generation.interfaces import RequestError, Response, StreamingGeneration
from mcore_rl.testing.layout_check import ParallelLayout
from mcore_rl.testing.processes import run_processes
from mcore_rl.utils import console
from mcore_rl.utils.console import GenerationProgress

LINE = r"generating(?: \(replica 0 of 2\))?: ([\d,]+) of ([\d,]+) responses?, ([\d,]+) tokens?, [\d,]+ tokens/s"


def read(line):
    """Return the complete responses, all responses and the tokens of a line."""
    return [int(number.replace(",", "")) for number in re.fullmatch(LINE, line).groups()]


def test_progress_prints_every_ten_seconds(monkeypatch):
    clock, said, asked = SimpleNamespace(now=100.0), [], []

    def reach(second, *counts):
        clock.now = 100.0 + second
        progress.reached(lambda: asked.append(second) or counts)

    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: clock.now))
    progress = GenerationProgress(1200, 4, said.append, tokens=500)
    for second, *counts in ((1, 0, 600), (9.9, 1, 900), (12, 1, 1700), (21, 2, 9000), (22, 1100, 98_500)):
        reach(second, *counts)
    assert said == [
        "generating (replica 0 of 4): 1 of 1,200 responses, 1,700 tokens, 100 tokens/s",
        "generating (replica 0 of 4): 1,100 of 1,200 responses, 98,500 tokens, 4,455 tokens/s",
    ]
    assert asked == [12, 22], "nothing is counted between the lines"
    said.clear()
    progress = GenerationProgress(1, 1, said.append)
    reach(9.9 + 22, 0, 9)
    assert not said, "generation that ends in less than ten seconds prints nothing"


def generate_with_lines(config):
    """Return a replica's output, without lines and with a line after each step, and the lines."""
    from mcore_rl.models.generation.megatron.generation import MegatronGeneration
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy
    from mcore_rl.utils.console import silent

    policy, said = MegatronPolicy(config), []
    generation = MegatronGeneration(policy.model, PARAMS, 100, make_tokenizer(), 4, prefill_tokens=100)
    quiet = generation.generate(make_prompts())
    console.SECONDS_BETWEEN_LINES = 0.0
    generation.say = said.append if policy.is_writer else silent
    told = generation.generate(make_prompts())
    policy.shutdown()
    return quiet.data, told.data, said


@pytest.mark.long
def test_training_processes_print_the_first_replicas_progress_and_sample_the_same(model_path):
    layout = ParallelLayout(dp=2)
    results = run_processes(generate_with_lines, config_of(model_path("qwen2"), layout), world_size=2)
    for quiet, told, _ in results:
        assert all(torch.equal(told[name], quiet[name]) for name in ("output_ids", "logprobs", "generation_lengths"))
    (_, told, lines), (*_, silent) = results
    assert not silent and all("(replica 0 of 2)" in line for line in lines)
    counts = [read(line) for line in lines]
    rows = counts[0][1]
    assert counts[-1] == [rows, rows, int(told["generation_lengths"][:rows].sum())]
    assert counts == sorted(counts) and len({done for done, *_ in counts}) > 2


class Slow(StreamingGeneration):
    """Answers each request after a while, with as many tokens as the prompt has."""

    max_sequence_length = 100

    def submit(self, prompt, sample_id, group, greedy=False, options=None, images=()):
        future = Future()
        answer = Response(list(prompt), [0.0] * len(prompt), True)
        threading.Timer(0.3 * (1 + sample_id), future.set_result, [answer]).start()
        return future

    def generate(self, data, greedy=False):
        raise NotImplementedError

    def prepare_for_generation(self, *args, **kwargs):
        return True

    def finish_generation(self, *args, **kwargs):
        return True


class Judge:
    def submit(self, sample):
        from mcore_rl.environments.interfaces import Step

        future = Future()
        future.set_result(Step(1.0))
        return future


def collected():
    from topologies import grid

    from mcore_rl.data.datasets import Prompt
    from mcore_rl.rollouts import worker as workers
    from mcore_rl.utils.console import silent

    topology, said = grid(width=1), []
    is_first = torch.distributed.get_rank() == 0
    console.SECONDS_BETWEEN_LINES = workers.POLL_SECONDS = 0.02
    say = said.append if is_first else silent
    worker = workers.RolloutWorker(Slow(), Judge(), make_tokenizer(), 1, 0.2, topology, say)
    prompts = [(i, Prompt((20,) * (1 + i), "text", {})) for i in range(6)]
    begun = worker.begin(prompts, range(6))
    time.sleep(0.4)
    before = list(said)
    worker.collect(begun)
    at_end = len(said)
    time.sleep(0.1)
    worker.close()
    return before, said, len(said) - at_end


def test_waiting_for_conversations_in_the_background_prints_the_first_replicas_progress():
    (before, lines, after), (*_, silent, _) = run_processes(collected, world_size=2)
    assert not before and not silent and after <= 1, "only while the step waits"
    counts = [read(line) for line in lines]
    assert counts == sorted(counts) and {total for _, total, _ in counts} == {3}
    tokens_of = {0: (0, 1), 1: (1, 4), 2: (4, 9), 3: (9,)}  # a conversation ends a moment after its response
    assert lines and all(tokens in tokens_of[done] for done, _, tokens in counts)


def test_waiting_for_vllm_prints_progress_and_ends_at_a_lost_server(monkeypatch):
    from mcore_rl.errors import TrainingError
    from mcore_rl.models.generation.vllm import generation as vllm

    monkeypatch.setattr(console, "SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setattr(vllm, "POLL_SECONDS", 0.02)
    engine, asked = object.__new__(vllm.VLLMGeneration), [Future() for _ in range(4)]
    engine.say, said = (said := []).append, said
    answer = Response([1, 2, 3], [0.0] * 3, True)
    outcomes = [lambda: asked[2].set_result(answer), lambda: asked[0].set_exception(RequestError("no"))]
    outcomes.append(lambda: asked[1].set_exception(TrainingError("no server is left")))
    for number, outcome in enumerate(outcomes):
        threading.Timer(0.15 * (1 + number), outcome).start()
    engine._wait_for_all(asked, replicas=2)
    assert not asked[3].done()
    assert said and {tuple(read(line)) for line in said} <= {(0, 4, 0), (1, 4, 3)}
