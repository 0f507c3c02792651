"""Measure attention that reads only chosen keys against attention to all earlier keys, on the CPU.

    OMP_NUM_THREADS=1 python scripts/benchmarks/bench_sparse_attention.py

A row of 32,768 tokens, of which every 16th part of the queries is computed: those of the first of 16 context-parallel
ranks, with the keys of all of them. Each query sees 2,048 random keys of its row, fp32, forward and backward. The table
shows the fastest of interleaved repetitions. Exits with 1 if a ratio is above its floor.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

from mcore_rl.platform import initialize_platform

initialize_platform()

import torch
from bench_results import Row, finish
from torch import Tensor

from mcore_rl.distributed.packs import PackLayout
from mcore_rl.models.megatron.kernels.packed_attention import AttentionPattern, packed_attention
from mcore_rl.models.megatron.kernels.selected_attention import selected_attention

TOKENS, RANKS, SEEN, BOUND = 32_768, 16, 2048, 0.25
SHAPES = {
    # query heads, key-value heads, size of a head, keys in a block; floor
    "blocks of 128 keys, 16 heads a group": (16, 1, 128, 128, 0.3),
    "keys, 64 heads a group": (64, 1, 128, 1, 0.35),
    "keys, 32 heads a group": (32, 1, 128, 1, 0.45),
    "keys, 16 heads a group": (16, 1, 128, 1, 0.65),
    "keys, each head its own (latent attention)": (8, 8, 192, 1, 2.5),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, (heads, groups, dim, size, floor) in SHAPES.items():
        passes = passes_of(heads, groups, dim, size)
        taken: dict[str, list[float]] = {which: [] for which in passes}
        for _ in range(arguments.repetitions):
            for which, run in passes.items():
                started = time.perf_counter()
                run().sum().backward()
                taken[which].append(time.perf_counter() - started)
        ours, dense = min(taken["chosen"]), min(taken["all"])
        rows.append(Row(name, ours, dense, ours / dense, at_most=BOUND, floor=floor))
    title = f"Seconds of attention to {SEEN:,} of up to {TOKENS:,} keys"
    return finish("sparse_attention", title, ("chosen", "all", "chosen / all"), rows, keep=arguments.repetitions >= 3)


def passes_of(heads: int, groups: int, dim: int, size: int) -> dict[str, Callable[[], Tensor]]:
    """Return functions that compute attention to the chosen keys, and to all."""
    visible = AttentionPattern(PackLayout.pack((TOKENS,), cp_size=RANKS), 0)
    queries = sum(visible.query_lengths)
    query, key, value = (
        torch.randn(count, of, dim, requires_grad=True)
        for count, of in ((queries, heads), (TOKENS, groups), (TOKENS, groups))
    )
    ends = visible.key_ranges(query.device)[1]
    topk, sets = SEEN // size, groups if size > 1 else 1
    chosen = torch.full((queries, sets, topk), -1, dtype=torch.int32)
    for t, end in enumerate(ends.tolist()):
        for s in range(sets):
            own = (end - 1) // size
            found = torch.randperm(own)[: topk - 1]
            chosen[t, s, : len(found) + 1] = torch.cat((found, torch.tensor([own])))
    choice, scale = chosen if size > 1 else chosen[:, 0], dim**-0.5
    return {
        "chosen": lambda: selected_attention(query, key, value, visible, choice, scale, None, size),
        "all": lambda: packed_attention(query, key, value, visible, scale),
    }


if __name__ == "__main__":
    sys.exit(main())
