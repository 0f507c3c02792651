"""Compare the sampled tokens per second of a GRPO step with TRL's GRPOTrainer, measured within one run.

    python scripts/benchmarks/bench_grpo.py

Both train SmolLM2-135M-Instruct and a Llama of 7 million parameters in fp32, with two threads in all, on the CPU. On
both sides the training processes sample groups of 8 responses, the same function judges them, and each step has one
update. Prompts have log-normal lengths. A response of the small model ends with probability 1/64 at each of its tokens,
or after 256 tokens; one of SmolLM2 after 64 tokens or earlier. TRL runs with one process, this package with one and,
for the small model, with two (data-parallel). Each side is a separate program. The programs take turns,
and the medians of the steps' speeds are compared. Run nothing else meanwhile: because threads wait for each other, a
small load has a large effect. TRL comes from this interpreter's environment, or from `.venv-trl`, which is created.
Exits with 1 if a bound is missed.
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

PROMPTS, GROUP, AT_ONCE, WARM_UP, END = 4, 8, 8, 1, 1 / 64
PROMPT_LIMIT = 1024


@dataclass(frozen=True)
class Case:
    """A model, the median length of its prompts, the limit of its responses and our size of packs, in tokens."""

    model: str
    median_prompt: int
    response_limit: int
    tokens_per_pack: int


CASES = {
    "SmolLM2-135M, prompts of about 64 tokens": Case("smollm", 64, 64, 1536),
    "Llama 7M, prompts of about 64 tokens": Case("model", 64, 256, 4096),
    "Llama 7M, prompts of about 512 tokens": Case("model", 512, 256, 4096),
}
BOUNDS = {
    ("SmolLM2-135M, prompts of about 64 tokens", 1): 2.5,
    ("Llama 7M, prompts of about 64 tokens", 1): 2.0,
    ("Llama 7M, prompts of about 64 tokens", 2): 3.0,
    ("Llama 7M, prompts of about 512 tokens", 1): 2.0,
    ("Llama 7M, prompts of about 512 tokens", 2): 3.0,
}
FLOORS = {
    ("SmolLM2-135M, prompts of about 64 tokens", 1): 2.0,
    ("Llama 7M, prompts of about 64 tokens", 2): 2.7,
}
"""Lowest ratios that are accepted where a bound is missed."""
MOST_MEMORY = 0.75
REWARD = "def reward(completions, **columns):\n    return [text.count('7') / 10 for text in completions]\n"


def main() -> int:
    parser = parser_of(__doc__, steps=2, warm_up="one")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side == "trl":
        train_with_trl(arguments.directory, CASES[arguments.case], arguments.steps)
        return 0
    speeds, memory = measure(arguments.steps, arguments.rounds)
    whole = arguments.steps >= 2
    rows = [
        Row(
            f"{case}, {n} process{'es'[: 2 * n - 2]}",
            speeds[case, n],
            trl,
            speeds[case, n] / trl,
            bound,
            floor=FLOORS.get((case, n)),
        )
        for (case, n), bound in BOUNDS.items()
        for trl in [speeds[case, 0]]
    ]
    heavier = [
        Row(case, *sizes, sizes[0] / sizes[1], None, MOST_MEMORY)
        for case in CASES
        for sizes in [(memory[case, 1], memory[case, 0])]
    ]
    missed = finish("grpo", "GRPO: sampled tokens a second", ("ours", "TRL", "ours / TRL"), rows, whole)
    columns = ("ours, MB", "TRL, MB", "ours / TRL")
    return missed | finish("grpo_memory", "GRPO: most resident memory, one process", columns, heavier, whole)


def measure(steps: int, rounds: int) -> tuple[Figures, Figures]:
    """Return median sampled tokens per second, and peak megabytes, of each program."""
    python = python_with_trl()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        make_model(directory / "model", END)
        (directory / "smollm").symlink_to(SMOLLM)
        (directory / "rewards.py").write_text(REWARD)
        words = {"model": [f"w{number}" for number in range(VOCABULARY - 2)], "smollm": smollm_words()}

        def run_side(name: str, processes: int) -> tuple[list[float], float]:
            case = CASES[name]
            prompts = directory / "prompts.jsonl"
            make_prompts(prompts, case.median_prompt, words[case.model], PROMPTS * (steps + WARM_UP))
            return run_ours(processes, directory, case, steps) if processes else run_trl(python, directory, name, steps)

        return taking_turns(BOUNDS, rounds, run_side)


def make_prompts(path: Path, median: float, words: Sequence[str], count: int) -> None:
    generator = random.Random(0)
    lengths = [min(PROMPT_LIMIT, max(4, int(median * generator.lognormvariate(0, 0.5)))) for _ in range(count)]
    texts = (" ".join(words[generator.randrange(len(words))] for _ in range(length)) for length in lengths)
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))


# ------------------------------------------------------------ ours


def run_ours(processes: int, directory: Path, case: Case, steps: int) -> tuple[list[float], float]:
    output = directory / "ours"
    command = [
        *our_program("train_grpo.py", processes),
        *("--model", str(directory / case.model), "--data", str(directory / "prompts.jsonl"), "--output", str(output)),
        *(f"grpo.num_prompts_per_step={PROMPTS}", f"grpo.num_generations_per_prompt={GROUP}"),
        f"grpo.max_new_tokens={case.response_limit}",
        f"data.max_sequence_length={PROMPT_LIMIT + case.response_limit}",
        *(
            f"batch.tokens_per_pack={case.tokens_per_pack}",
            "checkpoint.asynchronous=false",
            "batch.share_prefixes=true",
            "loss.reference_policy_kl_penalty=0",
        ),
        *("environment.name=trl", "environment.function=rewards:reward", "environment.num_workers=1"),
        *(f"trainer.max_steps={steps + WARM_UP}", "trainer.max_epochs=null"),
        *("checkpoint.resume=none", "checkpoint.overwrite=true", "checkpoint.export_hf=false"),
    ]
    most = run(command, threads=2 // processes, modules=directory)
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    sampled = [line["response_length_mean"] * PROMPTS * GROUP / line["step_seconds"] for line in lines]
    return sampled[WARM_UP:], most


# ------------------------------------------------------------ TRL


def run_trl(python: str, directory: Path, name: str, steps: int) -> tuple[list[float], float]:
    command = [python, str(Path(__file__).resolve()), "--side", "trl", "--directory", str(directory)]
    command += ["--case", name, "--steps", str(steps)]
    run(command, threads=2, modules=directory)
    found = json.loads((directory / "trl.json").read_text())
    assert 40 < statistics.mean(found["lengths"]) < 90, f"responses of {found['lengths']} tokens"
    return found["speeds"], found["megabytes"]


def train_with_trl(directory: Path, case: Case, steps: int) -> None:
    """Train `steps` steps with GRPOTrainer; write the speed of each step to `trl.json`."""
    from datasets import load_dataset
    from rewards import reward
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    seconds: list[float] = []
    lengths: list[int] = []

    def judge(completions, completion_ids, **columns):
        lengths.extend(map(len, completion_ids))
        return reward(completions)

    class Clock(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            self.started = time.perf_counter()

        def on_step_end(self, *args, **kwargs):
            seconds.append(time.perf_counter() - self.started)

    settings = GRPOConfig(
        str(directory / "trl"), per_device_train_batch_size=AT_ONCE,
        gradient_accumulation_steps=PROMPTS * GROUP // AT_ONCE,
        num_generations=GROUP, max_completion_length=case.response_limit, max_steps=steps + WARM_UP, beta=0.0,
        learning_rate=1e-6, temperature=1.0, use_vllm=False, use_cpu=True, bf16=False, gradient_checkpointing=False,
        save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(directory / case.model, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(directory / case.model, padding_side="left")
    data = load_dataset(
        "json", data_files=str(directory / "prompts.jsonl"), split="train", cache_dir=directory / "cache"
    )
    trainer = GRPOTrainer(
        model, judge, args=settings, train_dataset=data, processing_class=tokenizer, callbacks=[Clock()]
    )
    trainer.train()
    megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    sampled = [sum(lengths[first : first + PROMPTS * GROUP]) for first in range(0, len(lengths), PROMPTS * GROUP)]
    speeds = [count / taken for count, taken in zip(sampled, seconds, strict=True)][WARM_UP:]
    (directory / "trl.json").write_text(json.dumps({"speeds": speeds, "megabytes": megabytes, "lengths": lengths}))


if __name__ == "__main__":
    sys.exit(main())
