"""Measure the memory of a rank with a million tokenized records, and the time until its first batch.

    python scripts/benchmarks/bench_data.py [--records 1000000] [--tokens 512]

Bounds: at most 1 GiB resident in a process, and 10 s from its start to a first batch of 512 records. The same bounds
hold for a run of `train_sft.py` on as many short records, tokenized before, until the end of its first step. The cost
of the order of samples must not depend on the number of records. Exits with 1 if a bound is missed. Needs 5 bytes of
disk per token, and some minutes.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from bench_results import Row, finish

from mcore_rl.cli.entry_point import Parser, count
from mcore_rl.data.token_store import SampleOrder, TokenizedChunk, collect

MAX_RESIDENT_GIB, MAX_SECONDS = 1.0, 10.0
MAX_SLOWDOWN = 5.0
"""Bound on the time of an order of records, relative to a hundredth of the records. A position is enciphered at most 4
times on average, and once if the number of records is just below a power of 4."""
BATCH = 512

RANK = """
import json, resource, sys, time
started = time.perf_counter()
from pathlib import Path
from mcore_rl.data.batching import collate
from mcore_rl.data.token_store import SampleOrder
from mcore_rl.data.token_store import TokenStore

store = TokenStore.open(Path(sys.argv[1]))
order = SampleOrder(len(store), 0)
first = collate([store[i] for i in order.indices(0, int(sys.argv[2]))], 0)
seconds = time.perf_counter() - started
for step in range(1, 20):
    collate([store[i] for i in order.indices(step * int(sys.argv[2]), int(sys.argv[2]))], 0)
private = sum(int(line.split()[1]) for line in open("/proc/self/smaps_rollup") if line.startswith("Private"))
print(json.dumps([seconds, private * 1024]))
"""


RUN = (
    "trainer.max_steps=1",
    "data.max_sequence_length=512",
    "batch.tokens_per_pack=4096",
    "checkpoint.export_hf=false",
)
SECONDS = 1800


def main() -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=count, default=1_000_000)
    parser.add_argument("--tokens", type=count, default=512, help="mean length of a record")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        started = time.perf_counter()
        store = collect(invented(arguments.records, arguments.tokens), 1, Path(directory))
        print(f"{len(store):,} records, {store.num_tokens:,} tokens, written in {time.perf_counter() - started:.0f} s")
        rank = [sys.executable, "-c", RANK, directory, str(BATCH)]
        done = subprocess.run(rank, check=True, capture_output=True, text=True, timeout=300)
        seconds, resident = json.loads(done.stdout)
    with tempfile.TemporaryDirectory() as directory:
        first_step, of_run = real_run(arguments.records, Path(directory))
    all_, few = order_seconds(arguments.records), order_seconds(arguments.records // 100)
    rows = [
        Row.figure("first batch, from the start of the process", seconds, "s", at_most=MAX_SECONDS),
        Row.figure("resident after 20 batches", resident / (1 << 30), "GiB", at_most=MAX_RESIDENT_GIB),
        Row.figure("first step of training, from its program's start", first_step, "s", at_most=MAX_SECONDS),
        Row.figure("resident until then", of_run / (1 << 30), "GiB", at_most=MAX_RESIDENT_GIB),
        Row("order of samples / of a hundredth of the records", all_, few, all_ / few, at_most=MAX_SLOWDOWN),
    ]
    columns = ("s", "beside, s", "ratio, or figure")
    is_whole = arguments == parser.parse_args([])
    title = f"{arguments.records:,} tokenized records of {arguments.tokens} tokens"
    return finish("data", title, columns, rows, keep=is_whole)


def invented(records: int, tokens: int) -> Iterator[TokenizedChunk]:
    generator = np.random.default_rng(0)
    for start in range(0, records, 1000):
        lengths = generator.integers(tokens // 2, tokens * 3 // 2, min(1000, records - start)).tolist()
        total = sum(lengths)
        ids = generator.integers(0, 150_000, total).tolist()
        yield TokenizedChunk(ids, bytearray(generator.integers(0, 2, total, np.uint8).tobytes()), lengths)


def real_run(records: int, directory: Path) -> tuple[float, int]:
    """Return the seconds from the start of a training program to the end of its first step, with records tokenized
    before; and the peak of its private memory until then, in bytes."""
    scripts, chosen = Path(__file__).parent.parent, random.Random(0)
    subprocess.run([sys.executable, scripts / "make_demo_data.py", directory / "demo"], check=True, timeout=SECONDS)
    data, out = directory / "train.jsonl", directory / "run"
    with open(data, "w") as file:
        for number in range(records):
            words = " ".join(chosen.choices(("one", "two", "three", "and", "a half"), k=chosen.randrange(5, 15)))
            file.write(json.dumps({"prompt": f"Say {number}. ", "completion": words}) + "\n")
    command = [sys.executable, scripts / "train_sft.py", "--model", directory / "demo" / "model", "--data", data]
    command += ["--output", out, *RUN]
    environment = {**os.environ, "MCORE_RL_CACHE": str(directory / "cache")}
    subprocess.run([*command, "--dry-run"], check=True, timeout=SECONDS, env=environment)
    started, most = time.perf_counter(), 0
    with subprocess.Popen(command, env=environment) as run:
        try:
            while not (out / "metrics.jsonl").is_file():
                if run.poll() is not None or time.perf_counter() - started > SECONDS:
                    raise RuntimeError("the run has ended, or hangs, without a first step")
                most = max(most, private_bytes(run.pid))
                time.sleep(0.02)
            seconds = time.perf_counter() - started
        finally:
            run.kill()
    return seconds, most


def private_bytes(process: int) -> int:
    """Return the private memory of a process in bytes, without the page cache; 0 if the process has ended."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private"))


def order_seconds(records: int) -> float:
    order = SampleOrder(records, 1)
    times = []
    for part in range(5):
        started = time.perf_counter()
        order.indices(part * records // 5, 2000)
        times.append(time.perf_counter() - started)
    return sorted(times)[2]


if __name__ == "__main__":
    sys.exit(main())
