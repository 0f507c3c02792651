"""Measure a rank's time and memory in a step on one long sequence with context parallelism (CP) 1, 2 and 4.

    OMP_NUM_THREADS=1 python scripts/benchmarks/bench_context_parallel.py

Both are compared with 1 / CP of those without CP. Time is the CPU time of a rank, not wall-clock time, because there
may be fewer cores than ranks. Memory is the peak of a rank minus its memory between steps (weights, gradients,
optimizer state). Both are those of the most expensive rank, medians of interleaved repetitions. Exits with 1 if a bound
is missed.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from bench_prefix import make_model
from bench_results import Row, finish
from peak_memory import PeakMemory

from mcore_rl.config import SFTConfig
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.testing.processes import run_processes
from mcore_rl.utils.console import quiet_libraries

VOCABULARY, TOKENS = 1024, 16_384
# Bounds as fractions of the values of CP 1; 1 / CP is ideal.
TIME_BOUNDS, MEMORY_BOUNDS = {2: 0.57, 4: 0.32}, {2: 0.6, 4: 0.4}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    arguments = parser.parse_args()
    quiet_libraries()
    sizes = (1, *TIME_BOUNDS)
    seconds, megabytes = ({size: [] for size in sizes} for _ in range(2))
    with tempfile.TemporaryDirectory() as directory:
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
        others = {"vocab_size": VOCABULARY, "num_hidden_layers": 4, "max_position_embeddings": TOKENS}
        make_model(Path(directory), **heads, **others)
        for _ in range(arguments.repetitions):
            for size in sizes:
                ranks = run_processes(
                    take_a_step, Path(directory), size, arguments.tokens, world_size=size, timeout=300
                )
                seconds[size].append(max(rank[0] for rank in ranks))
                megabytes[size].append(max(rank[1] for rank in ranks))
                print(f"CP {size}: {seconds[size][-1]:.1f} s, {megabytes[size][-1]:.0f} MB", flush=True)
    rows = []
    for what, measured, bounds in (("s of CPU", seconds, TIME_BOUNDS), ("MB", megabytes, MEMORY_BOUNDS)):
        one = statistics.median(measured[1])
        for size, bound in bounds.items():
            taken = statistics.median(measured[size])
            rows.append(Row(f"{what} of a rank, CP {size}", taken, one, taken / one, at_most=bound))
    title = f"A step of one sequence of {arguments.tokens:,} tokens"
    is_whole = arguments.tokens == TOKENS and arguments.repetitions >= 3
    return finish("context_parallel", title, ("CP", "CP 1", "CP / CP 1"), rows, keep=is_whole)


def take_a_step(directory, cp_size, tokens):
    """Return the CPU seconds and megabytes of this rank in a step that is not the first."""
    from mcore_rl.losses.common import NLLLoss
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    torch.set_num_threads(1)
    config = SFTConfig.model_validate(
        {
            "output_dir": directory / "unused",
            "model": {"path": directory},
            "data": {"train": "unused", "max_sequence_length": tokens},
            "batch": {"global_batch_size": 1, "tokens_per_pack": tokens},
            "parallel": {"context_parallel_size": cp_size},
            "optimizer": {"lr": 1e-5},
            "trainer": {"max_steps": 2},
            "checkpoint": {"export_hf": False},
        }
    )
    policy = MegatronPolicy(config, total_steps=1000)
    policy.train(make_batch(64), NLLLoss())
    data, started = make_batch(tokens), time.process_time()
    with PeakMemory() as peak:
        policy.train(data, NLLLoss())
    return time.process_time() - started, peak.bytes / 1e6


def make_batch(tokens):
    ids = torch.randint(0, VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(0))
    ones = torch.ones(ids.shape)
    return BatchedDataDict(
        input_ids=ids, token_mask=ones, input_lengths=torch.tensor([tokens]), sample_mask=torch.ones(1)
    )


if __name__ == "__main__":
    sys.exit(main())
