"""Compare the time of a step with asynchronous and with synchronous rollouts, measured within one run.

    OMP_NUM_THREADS=1 python scripts/benchmarks/bench_async.py [--steps 16] [--hidden 256] [--layers 4]

Training is real and runs on the CPU. The generation engine is a stub that computes nothing: it sleeps for as long as
the last step's training took, and then returns random tokens. The benchmark thus shows the gain from overlapping if
generation and training take equally long on separate hardware; it does not measure an engine. The times in the ratio
are in units of each run's training time, so that other load on the machine does not matter. Exits with 1 if the ratio
is below its bound.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import torch
from bench_results import Row, finish
from transformers import LlamaConfig, LlamaForCausalLM

from mcore_rl.config import GRPOConfig, build_config
from mcore_rl.data.datasets import Prompt
from mcore_rl.data.token_store import SampleOrder
from mcore_rl.platform import initialize_platform, resolve
from mcore_rl.utils.console import quiet_libraries

BOUND = 1.6
PROMPTS, GROUP, NEW_TOKENS, VOCABULARY = 4, 4, 64, 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    arguments = parser.parse_args()
    quiet_libraries()
    initialize_platform()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        make_model(Path(directory) / "model", arguments)
        from mcore_rl.models.policy.megatron_policy import MegatronPolicy

        policy = MegatronPolicy(config_of(directory, arguments.steps, staleness=0), total_steps=4 + 2 * arguments.steps)
        training = statistics.median(train(directory, policy, 4, staleness=0, latency=0.0)[1])
        (now, of_now), (ahead, of_ahead) = (
            train(directory, policy, arguments.steps, s, latency=training) for s in (0, 1)
        )
        policy.shutdown()
    now, ahead = now / sum(of_now), ahead / sum(of_ahead)
    columns = ("max_staleness 1", "max_staleness 0", "0 / 1")
    rows = [Row("rollouts one step ahead", ahead, now, now / ahead, at_least=BOUND)]
    title, is_whole = "Time of a step, in units of its training", arguments == parser.parse_args([])
    return finish("async", title, columns, rows, keep=is_whole)


def train(directory, policy, steps, staleness, latency):
    """Return the seconds of all steps and of each step's training; `latency` is the engine's initial latency."""
    from mcore_rl.algorithms.grpo import GRPOTrainer
    from mcore_rl.rollouts.worker import RolloutWorker

    prompts = tuple(Prompt((3, 4, 5 + i), "text", {}) for i in range(64))
    dataset = PromptList(prompts)
    tokenizer = SimpleNamespace(pad_token_id=0, decode=lambda ids, **_: "")
    inputs = SimpleNamespace(train=dataset, validation=None, tokenizer=tokenizer)
    config = config_of(directory, steps, staleness)
    config.output_dir.mkdir(exist_ok=True)
    engine = make_engine(latency)
    worker = RolloutWorker(engine, RandomRewards(), tokenizer, 1)
    run, training = GRPOTrainer(config, inputs, policy, worker), []
    run.reporter = SimpleNamespace(record_samples=lambda step, samples: None)
    started = time.perf_counter()
    for step in range(1, steps + 1):
        run.train_step(step)
        training.append(run.phases.seconds["logprobs"] + run.phases.seconds["training"])
        engine.latency = training[-1] if latency else 0.0
    seconds = time.perf_counter() - started
    worker.close()
    return seconds, training


def make_engine(latency):
    """Return an engine with a slot for each response of a step; each slot sleeps and then returns random tokens."""
    from mcore_rl.models.generation.interfaces import Response, StreamingGeneration

    class StubEngine(StreamingGeneration):
        max_sequence_length = 3 + NEW_TOKENS

        def __init__(self):
            self.places, self.version, self.latency = ThreadPoolExecutor(PROMPTS * GROUP), 0, latency

        def submit(self, prompt, sample_id, group, greedy=False, images=()):
            return self.places.submit(self.answer, sample_id)

        def answer(self, sample_id):
            version, drawn = self.version, random.Random(sample_id)
            time.sleep(self.latency)
            tokens = [drawn.randrange(3, VOCABULARY) for _ in range(NEW_TOKENS)]
            return Response(tokens, [-7.0] * NEW_TOKENS, True, [(version, NEW_TOKENS)])

        def prepare_for_generation(self, *args, weight_version=0, **kwargs):
            self.version = weight_version
            return True

        def finish_generation(self, *args, **kwargs):
            return True

        def generate(self, data, greedy=False):
            raise NotImplementedError("it answers one by one")

    return StubEngine()


class RandomRewards:
    """An environment whose reward is the sum of a response's random token ids, modulo 7."""

    def submit(self, sample):
        from mcore_rl.environments.interfaces import Step

        judged = Future()
        judged.set_result(Step(reward=float(sum(sample.completion_ids) % 7)))
        return judged


class PromptList:
    """A prompt dataset in memory, without files."""

    def __init__(self, prompts):
        self.prompts = prompts

    def __len__(self):
        return len(self.prompts)

    def order(self, seed):
        return SampleOrder(len(self), seed)

    def source_of(self, index):
        return None

    def images_column(self, indices):
        return {}


def make_model(path, arguments):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=arguments.hidden,
        intermediate_size=3 * arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // 32,
        num_key_value_heads=arguments.hidden // 64,
    )
    LlamaForCausalLM(config).save_pretrained(path)


def config_of(directory, steps, staleness):
    values = {
        "output_dir": f"{directory}/out_{staleness}",
        "model": {"path": f"{directory}/model"},
        "data": {"train": "unused", "max_sequence_length": 3 + NEW_TOKENS},
        "optimizer": {"lr": 1e-4},
        "trainer": {"max_steps": steps},
        "grpo": {
            "num_prompts_per_step": PROMPTS,
            "num_generations_per_prompt": GROUP,
            "max_new_tokens": NEW_TOKENS,
            "max_staleness": staleness,
            # The stub's log-probabilities are constants; with filtered tokens they are not compared with the policy's.
            "top_k": VOCABULARY,
            "num_logged_samples": 0,
        },
        "loss": {"use_importance_sampling_correction": True, "truncated_importance_sampling_ratio": 2.0},
        "generation": {"backend": "vllm"},
    }
    return resolve(build_config(GRPOConfig, values, [], "this benchmark"))


if __name__ == "__main__":
    sys.exit(main())
