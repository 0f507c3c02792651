"""How full packs are, how even ranks, how long planning takes, on log-normal lengths; fails where a bound is missed."""

from __future__ import annotations

import random
import sys
import time
from itertools import product

FILL, UNEVENNESS, SECONDS = 0.97, 1.03, 0.1
CAPACITY = 16_384


def main() -> int:
    from mcore_rl.data.packing import Batching

    print(f"{'sequences':>9} {'ranks':>6} {'multiple':>8} {'packs':>6} {'fill':>7} {'costliest':>10} {'seconds':>8}")
    missed = []
    for count, ranks, multiple in product((10_000, 16_384), (1, 8), (1, 16)):
        generator = random.Random(7)
        lengths = [min(CAPACITY, max(8, int(generator.lognormvariate(6.2, 0.9)))) for _ in range(count)]
        batching = Batching(True, CAPACITY, 1, 1, ranks, multiple=multiple, attention_length=50_000)
        started = time.perf_counter()
        plan = batching.plan(lengths)
        seconds = time.perf_counter() - started
        padded = [-(-n // multiple) * multiple for n in lengths]
        packs = sum(map(len, plan))
        fill = sum(padded) / (packs * CAPACITY)
        costs = [sum(padded[r] * (1 + padded[r] / 50_000) for rows in shard for r in rows) for shard in plan]
        unevenness = max(costs) / (sum(costs) / ranks)
        print(f"{count:>9} {ranks:>6} {multiple:>8} {packs:>6} {fill:>7.4f} {unevenness:>10.4f} {seconds:>8.3f}")
        for name, value, bound in (
            ("fill", -fill, -FILL),
            ("costliest", unevenness, UNEVENNESS),
            ("s", seconds, SECONDS),
        ):
            if value > bound:
                missed.append(f"{name} {abs(value):.4f} (bound {abs(bound)}) at {count} x {ranks} x {multiple}")
    print("\n".join(missed) or f"all within: fill >= {FILL}, costliest rank <= {UNEVENNESS} x mean, {SECONDS} s")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
