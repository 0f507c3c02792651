"""Measure how full packs are, how balanced ranks are, and how long planning takes, on log-normal lengths.

    python scripts/benchmarks/bench_packing.py

Cases: one rank and eight ranks, exact lengths and lengths rounded up to multiples of 16. The table shows the worst
case. Exits with 1 if a bound is missed.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from itertools import product

from bench_results import Row, finish

from mcore_rl.data.batching import MicrobatchPlanner

FILL, UNEVENNESS, SECONDS = 0.97, 1.03, 0.1
CAPACITY = 16_384
REPETITIONS = 3  # the garbage collector may run during one of them


def main() -> int:
    rows = []
    for count in (10_000, 16_384):
        cases = [plan(count, ranks, multiple) for ranks, multiple in product((1, 8), (1, 16))]
        fills, costliest, seconds = zip(*cases, strict=True)
        rows.append(row(f"{count:,} sequences: tokens / places in packs", min(fills, key=ratio), at_least=FILL))
        rows.append(row(f"{count:,} sequences: costliest rank / mean", max(costliest, key=ratio), at_most=UNEVENNESS))
        rows.append(Row.figure(f"{count:,} sequences: planning", max(seconds), "s", at_most=SECONDS))
    columns = ("tokens, work", "beside", "ratio, or seconds")
    return finish("packing", f"Packs of {CAPACITY:,} tokens from log-normal lengths", columns, rows)


def plan(count: int, ranks: int, multiple: int) -> tuple[tuple[float, float], tuple[float, float], float]:
    """Return (tokens, capacity), (work of the most loaded rank, mean work), and median seconds of planning."""
    generator = random.Random(7)
    lengths = [min(CAPACITY, max(8, int(generator.lognormvariate(6.2, 0.9)))) for _ in range(count)]
    batching = MicrobatchPlanner(True, CAPACITY, 1, 1, ranks, multiple=multiple, attention_length=50_000)
    taken = []
    for _ in range(REPETITIONS):
        started = time.perf_counter()
        shards = batching.plan(lengths)
        taken.append(time.perf_counter() - started)
    seconds = statistics.median(taken)
    padded = [-(-n // multiple) * multiple for n in lengths]
    packs = sum(map(len, shards))
    costs = [sum(padded[r] * (1 + padded[r] / 50_000) for rows in shard for r in rows) for shard in shards]
    fill, costliest = (sum(padded), packs * CAPACITY), (max(costs), sum(costs) / ranks)
    case = f"{count:,} sequences, {ranks} ranks, multiples of {multiple}"
    print(f"{case}: {packs} packs, fill {ratio(fill):.4f}, costliest {ratio(costliest):.4f}, {seconds:.3f} s")
    return fill, costliest, seconds


def ratio(pair: tuple[float, float]) -> float:
    return pair[0] / pair[1]


def row(name: str, pair: tuple[float, float], **bounds: float) -> Row:
    return Row(name, *pair, ratio(pair), **bounds)


if __name__ == "__main__":
    sys.exit(main())
