"""Measure the gated delta rule on the CPU against torch's attention of as many heads.

    OMP_NUM_THREADS=1 python scripts/benchmarks/bench_delta_rule.py

One sequence, 4 key heads with 2 value heads each (8 query heads in attention), of size 128, fp32. Forward and backward
include the convolution before the rule, and the second forward pass of a layer, whose intermediate results are not
kept. The table shows medians of interleaved repetitions. Exits with 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

from mcore_rl.platform import initialize_platform

initialize_platform()

import torch
import torch.nn.functional as F
from bench_results import Row, finish
from torch import Tensor

from mcore_rl.distributed.packs import PackLayout
from mcore_rl.models.megatron.kernels.delta_rule import causal_conv, delta_rule, plan_of
from mcore_rl.models.megatron.recurrent.gated_delta_net import DeltaWeights, GatedDeltaNet, recomputed

NET = GatedDeltaNet(hidden=1, heads=4, repeats=2, key_dim=128, value_dim=128, width=4)
BOUNDS = {2048: 3.0, 8192: 1.0}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for tokens, bound in BOUNDS.items():
        passes = {"rule": rule_of(tokens), "attention": attention_of(tokens)}
        taken: dict[str, list[float]] = {name: [] for name in passes}
        for _ in range(arguments.repetitions + 1):
            for name, run in passes.items():
                started = time.perf_counter()
                run().sum().backward()
                taken[name].append(time.perf_counter() - started)
        ours, theirs = (statistics.median(seconds[1:]) for seconds in taken.values())
        rows.append(Row(f"{tokens:,} tokens", ours, theirs, ours / theirs, at_most=bound))
    title = "Seconds of forward and backward of a layer's delta rule"
    return finish("delta_rule", title, ("rule", "attention", "rule / attention"), rows, keep=arguments.repetitions >= 5)


def rule_of(tokens: int) -> Callable[[], Tensor]:
    """Return a function that computes the rule over one sequence."""
    plan, size = plan_of(PackLayout.pack((tokens,)), NET.width, torch.device("cpu")), NET.convolved_size
    inputs = torch.randn(tokens, NET.heads, size + 2 * NET.repeats, requires_grad=True)
    of_heads = torch.randn(2, NET.heads, NET.repeats, requires_grad=True)
    convolution = torch.randn(NET.heads, size, NET.width, requires_grad=True)

    def mixed(rows: Tensor, convolution: Tensor, log_decay: Tensor, shift: Tensor) -> Tensor:
        weights = DeltaWeights(convolution, log_decay, shift)
        convolved = causal_conv(rows[..., :size], convolution, plan.before)
        return delta_rule(*NET.rule_inputs(convolved, rows[..., size:], weights), plan)[0]

    return lambda: recomputed(mixed, inputs, convolution, *of_heads)


def attention_of(tokens: int) -> Callable[[], Tensor]:
    """Return a function that computes causal attention over one sequence."""
    shape = 1, NET.heads * NET.repeats, tokens, NET.value_dim
    query, key, value = (torch.randn(shape, requires_grad=True) for _ in range(3))
    return lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True)


if __name__ == "__main__":
    sys.exit(main())
