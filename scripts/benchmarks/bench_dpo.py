"""Compare the tokens per second of a DPO step with TRL's DPOTrainer, measured within one run.

    python scripts/benchmarks/bench_dpo.py

Both train SmolLM2-135M-Instruct and a Llama of 7 million parameters on the same records, in fp32, with two threads in
all, on the CPU: TRL with one process, this package with one and, for the small model, with two (data-parallel). Each
side is a separate program that trains one epoch. The programs take turns, and the medians of the steps' speeds are
compared.

For the small model, the benchmark also reports the rate of operations of this package's training (without the
operations of scoring by a swapped reference, but with its time), relative to the rate of torch's matrix products, which
is measured right after it. TRL comes from this interpreter's environment, or from `.venv-trl`, which is created. Exits
with 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench_results import Row, finish
from bench_trl import (
    SMOLLM,
    VOCABULARY,
    Figures,
    make_model,
    our_program,
    parser_of,
    python_with_trl,
    run,
    smollm_words,
    taking_turns,
)

PAIRS_A_STEP, PAIRS_AT_ONCE = 8, 4


@dataclass(frozen=True)
class Case:
    """A model and a treatment of the reference.

    mode: "swapped" (computed in each step) or "precomputed".
    median_prompt, median_response: tokens.
    """

    model: str
    mode: str
    median_prompt: int
    median_response: int
    warm_up: int
    most_memory: float


CASES = {
    "SmolLM2-135M, reference swapped": Case("smollm", "swapped", 30, 45, 1, 0.5),
    "SmolLM2-135M, reference precomputed": Case("smollm", "precomputed", 30, 45, 1, 0.5),
    "Llama 7M, reference swapped": Case("model", "swapped", 60, 90, 2, 0.6),
    "Llama 7M, reference precomputed": Case("model", "precomputed", 60, 90, 2, 0.6),
}
BOUNDS = {
    ("SmolLM2-135M, reference swapped", 1): (1.8, 1.3),
    ("SmolLM2-135M, reference precomputed", 1): (2.3, 1.3),
    ("Llama 7M, reference swapped", 1): (5.0, 2.0),
    ("Llama 7M, reference swapped", 2): (7.5, 2.0),
    ("Llama 7M, reference precomputed", 1): (5.0, 2.0),
    ("Llama 7M, reference precomputed", 2): (7.5, 2.0),
}
"""Bound and floor of the rate relative to TRL's, by case and number of processes."""
OF_PRODUCTS, FLOOR_OF_PRODUCTS = 0.55, 0.2
"""Bound and floor of the rate of training, relative to the rate of matrix products."""


def main() -> int:
    parser = parser_of(__doc__, steps=4, warm_up="one or two")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side == "trl":
        train_with_trl(arguments.directory, CASES[arguments.case])
        return 0
    speed, memory, reached = measure(arguments.steps, arguments.rounds)
    rows = [
        Row(
            f"{case}, {processes} process{'es'[: 2 * processes - 2]}",
            speed[case, processes],
            speed[case, 0],
            speed[case, processes] / speed[case, 0],
            bound,
            floor=floor,
        )
        for (case, processes), (bound, floor) in BOUNDS.items()
    ]
    label = "of the rate of matrix products, Llama 7M, 1 process"
    rows.append(Row.figure(label, reached, "reached", OF_PRODUCTS, None, FLOOR_OF_PRODUCTS))
    heavier = [
        Row(name, *sizes, sizes[0] / sizes[1], None, case.most_memory, floor=0.7)
        for name, case in CASES.items()
        for sizes in [(memory[name, 1], memory[name, 0])]
    ]
    columns = ("ours, tokens/s", "TRL, tokens/s", "ours / TRL")
    whole = arguments.steps >= 4
    missed = finish("dpo", "DPO: real tokens a second", columns, rows, whole)
    columns = ("ours, MB", "TRL, MB", "ours / TRL")
    return missed | finish("dpo_memory", "DPO: most resident memory, one process", columns, heavier, whole)


def measure(steps: int, rounds: int) -> tuple[Figures, Figures, float]:
    """Return median tokens per second and megabytes of each program, and the fraction of the rate of matrix products
    that one process of this package reaches with the small model."""
    python = python_with_trl()
    reached: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        make_model(directory / "model")
        (directory / "smollm").symlink_to(SMOLLM)
        words = {"model": [f"w{number}" for number in range(VOCABULARY - 2)], "smollm": smollm_words()}

        def run_side(name: str, processes: int) -> tuple[list[float], float]:
            case = CASES[name]
            make_records(directory / "pairs.jsonl", case, words[case.model], PAIRS_A_STEP * (steps + case.warm_up))
            if not processes:
                return run_trl(python, directory, name)
            lines, most = run_ours(directory, case, processes)
            if processes == 1 and case.model == "model":
                rate = product_rate(threads=2)
                reached.extend(line["tflops_per_second"] / rate for line in lines)
            return [line["tokens_per_second"] for line in lines], most

        return *taking_turns(BOUNDS, rounds, run_side), statistics.median(reached)


def product_rate(threads: int, size: int = 2048, seconds: float = 3.0) -> float:
    """Return the TFLOP/s of products of square matrices in fp32."""
    import torch

    torch.set_num_threads(threads)
    left, right = torch.randn(size, size), torch.randn(size, size)
    count, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds:
        left @ right
        count += 1
    return count * 2 * size**3 / elapsed / 1e12


# ------------------------------------------------------------ records


def make_records(path: Path, case: Case, words: Sequence[str], count: int) -> None:
    """Write records with log-normal lengths, as in chat data: many short records, some long ones."""
    generator = random.Random(0)

    def text(median: float) -> str:
        length = min(768, max(4, int(median * generator.lognormvariate(0, 0.9))))
        return "".join(" " + words[generator.randrange(len(words))] for _ in range(length))

    def record() -> dict[str, str]:
        prompt, chosen, rejected = (text(median) for median in (case.median_prompt, *2 * [case.median_response]))
        return {"prompt": prompt.lstrip(), "chosen": chosen, "rejected": rejected}

    path.write_text("".join(json.dumps(record()) + "\n" for _ in range(count)))


# ------------------------------------------------------------ ours


def run_ours(directory: Path, case: Case, processes: int) -> tuple[list[dict[str, float]], float]:
    """Return the metrics of each step after the warm-up steps, and the peak memory in megabytes."""
    output = directory / "ours"
    reference = {"swapped": "swap", "precomputed": "precompute"}[case.mode]
    command = [
        *our_program("train_dpo.py", processes),
        *("--model", str(directory / case.model), "--data", str(directory / "pairs.jsonl"), "--output", str(output)),
        *(f"batch.global_batch_size={PAIRS_A_STEP}", "data.max_sequence_length=1536", "batch.tokens_per_pack=4096"),
        *("batch.share_prefixes=true", f"dpo.reference={reference}", "trainer.max_epochs=1"),
        *("checkpoint.resume=none", "checkpoint.overwrite=true", "checkpoint.export_hf=false"),
    ]
    most = run(command, threads=2 // processes)
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["step"] > case.warm_up], most


# ------------------------------------------------------------ TRL


def run_trl(python: str, directory: Path, name: str) -> tuple[list[float], float]:
    command = [python, str(Path(__file__).resolve()), "--side", "trl", "--directory", str(directory), "--case", name]
    run(command, threads=2)
    found = json.loads((directory / "trl.json").read_text())
    return found["speeds"], found["megabytes"]


def train_with_trl(directory: Path, case: Case) -> None:
    """Train one epoch with DPOTrainer; write the speed of each step to `trl.json`."""
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    class Counting(DPOTrainer):
        tokens = 0

        def compute_loss(self, model, inputs, *args, **kwargs):
            self.tokens += int(inputs["attention_mask"].sum())
            return super().compute_loss(model, inputs, *args, **kwargs)

    speeds: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            self.started, trainer.tokens = time.perf_counter(), 0

        def on_step_end(self, *args, **kwargs):
            speeds.append(trainer.tokens / (time.perf_counter() - self.started))

    settings = DPOConfig(
        str(directory / "trl"),
        per_device_train_batch_size=PAIRS_AT_ONCE,
        gradient_accumulation_steps=PAIRS_A_STEP // PAIRS_AT_ONCE,
        num_train_epochs=1, learning_rate=1e-6, max_length=1536, use_cpu=True, bf16=False,
        precompute_ref_log_probs=case.mode == "precomputed",
        gradient_checkpointing=False, save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(directory / case.model, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(directory / case.model)
    data = load_dataset("json", data_files=str(directory / "pairs.jsonl"), split="train", cache_dir=directory / "cache")
    trainer = Counting(model=model, args=settings, train_dataset=data, processing_class=tokenizer, callbacks=[Clock()])
    trainer.train()
    megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    (directory / "trl.json").write_text(json.dumps({"speeds": speeds[case.warm_up :], "megabytes": megabytes}))


if __name__ == "__main__":
    sys.exit(main())
