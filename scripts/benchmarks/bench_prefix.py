"""Measure the time saved by computing a shared prompt once, within one run.

    OMP_NUM_THREADS=1 python scripts/benchmarks/bench_prefix.py

A training step, with the optimizer, of a 7-million-parameter model: CPU time without sharing over CPU time with it,
medians of interleaved repetitions. Exits with 1 if a bound is missed.
"""

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from bench_results import Row, finish
from transformers import Qwen2Config, Qwen2ForCausalLM

from mcore_rl.config import DPOConfig
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.platform import initialize_platform
from mcore_rl.utils.console import quiet_libraries

VOCABULARY = 8192
# name, rows of a group, tokens of prompt and of each response, groups in a batch, bound on the ratio
CASES = [
    ("pairs, prompt : response 1 : 1", 2, 256, 256, 4, None),
    ("pairs, 2 : 1", 2, 512, 256, 4, 1.25),
    ("pairs, 4 : 1", 2, 512, 128, 4, None),
    ("groups of 8, 1 : 1", 8, 128, 128, 2, None),
    ("groups of 8, 2 : 1", 8, 256, 128, 2, None),
    ("groups of 8, 4 : 1", 8, 512, 128, 2, 2.2),
    ("nothing shared", 2, 0, 384, 4, 0.97),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    quiet_libraries()
    initialize_platform()
    of_tokens, of_steps = [], []
    with tempfile.TemporaryDirectory() as directory:
        make_model(Path(directory))
        policy = make_policy(Path(directory))
        for name, rows, prompt, response, groups, bound in CASES:
            tokens, seconds = measure(policy, rows, prompt, response, groups, arguments.repetitions)
            print(f"{name}: {seconds[0]:.2f} s, {seconds[1]:.2f} s with sharing", flush=True)
            of_tokens.append(Row(name, *tokens, tokens[0] / tokens[1]))
            of_steps.append(Row(name, *seconds, seconds[0] / seconds[1], at_least=bound))
    is_whole = arguments == parser.parse_args([])
    finish("prefix_tokens", "Tokens of a step", ("without sharing", "with", "without / with"), of_tokens, is_whole)
    columns = ("without sharing, s", "with, s", "without / with")
    return finish("prefix", "CPU time of a training step", columns, of_steps, is_whole)


def make_model(directory, **changes):
    """Write a model with random weights; other benchmarks change its configuration."""
    torch.manual_seed(0)
    values = {
        "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6,
        "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }  # fmt: skip
    Qwen2ForCausalLM(Qwen2Config(**values | changes)).save_pretrained(directory)


def make_policy(directory):
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    config = DPOConfig.model_validate(
        {
            "output_dir": directory / "unused",
            "model": {"path": directory},
            "data": {"train": "unused", "max_sequence_length": 2048},
            "batch": {"global_batch_size": 4, "tokens_per_pack": 4096},
            "optimizer": {"lr": 1e-5},
            "trainer": {"max_steps": 1},
            "checkpoint": {"export_hf": False},
        }
    )
    return MegatronPolicy(config, total_steps=1000)


def measure(policy, rows, prompt, response, groups, repetitions):
    """Return the tokens of a step without and with sharing, and the CPU seconds of both."""
    from mcore_rl.losses.options import DPOOptions
    from mcore_rl.losses.policy_gradient import ClippedPGLossFn
    from mcore_rl.losses.policy_options import ClippedPGOptions
    from mcore_rl.losses.preference import DPOLossFn

    data = make_batch(rows, prompt, response, groups)
    loss_fn = DPOLossFn(DPOOptions()) if rows == 2 else ClippedPGLossFn(ClippedPGOptions())
    planner = replace(policy.batching, rows_per_unit=2 if rows == 2 else 1)
    apart, sharing = (replace(planner, rows_per_group=shared) for shared in (0, rows))
    seconds = {apart: [], sharing: []}
    for _ in range(repetitions + 1):
        for batching, times in seconds.items():
            policy.batching = batching
            started = time.process_time()
            policy.train(data, loss_fn)
            times.append(time.process_time() - started)
    tokens = [sum(batching.pieces(data)[0]) for batching in (apart, sharing)]
    return tokens, [statistics.median(times[1:]) for times in seconds.values()]  # the first is a warm-up


def make_batch(rows, prompt, response, groups):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (groups, rows, prompt + response), generator=generator)
    ids[:, :, :prompt] = ids[:, :1, :prompt]
    ids = ids.flatten(0, 1)
    mask = torch.zeros(ids.shape)
    mask[:, prompt:] = 1
    noise = torch.randn(3, *ids.shape, generator=generator) * 0.1 - 9
    return BatchedDataDict(
        input_ids=ids, token_mask=mask, input_lengths=torch.full((len(ids),), prompt + response),
        sample_mask=torch.ones(len(ids)), reference_policy_logprobs=noise[0], prev_logprobs=noise[1],
        generation_logprobs=noise[2], advantages=torch.randn(len(ids), 1, generator=generator).expand(ids.shape),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
