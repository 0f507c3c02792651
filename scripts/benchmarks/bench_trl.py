"""Shared parts of the benchmarks against TRL: a model, programs that run in turn, an environment for TRL."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
TRL = "trl>=1.0,<2"
VOCABULARY, LIMIT_SECONDS = 8192, 900
SMOLLM = ROOT / "outputs" / "smollm" / "model"
"""SmolLM2-135M-Instruct, as `make outputs/smollm/model/config.json` writes it."""


def make_model(directory: Path, end_probability: float | None = None) -> None:
    """Write a Llama of 7 million parameters, and a tokenizer of words.

    Args:
        end_probability: approximate probability of the end token at every position; the LM head is then untied.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<pad>", "<end>", *(f"w{number}" for number in range(VOCABULARY - 2))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>").save_pretrained(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=704, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=2048, tie_word_embeddings=end_probability is None,
        bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if end_probability is not None:
        with torch.no_grad():
            head = model.lm_head.weight
            model.model.embed_tokens.weight[:, 0], head[:, 0] = 1.0, 0.0  # a component of all states, of no word's row
            states = model.model(torch.randint(2, VOCABULARY, (4, 128))).last_hidden_state.flatten(0, 1)
            others = (states @ head.T).logsumexp(-1).mean()
            head[1] = 0.0
            head[1, 0] = (others + math.log(end_probability / (1 - end_probability))) / states[:, 0].mean()
    model.save_pretrained(directory)


def smollm_words() -> list[str]:
    """Return words of SmolLM2's vocabulary that are one token each, after a space."""
    if not (SMOLLM / "config.json").is_file():
        sys.exit(f"{SMOLLM} does not exist; write it by: make {(SMOLLM / 'config.json').relative_to(ROOT)}")
    vocabulary = json.loads((SMOLLM / "tokenizer.json").read_text())["model"]["vocab"]
    return sorted(token[1:] for token in vocabulary if token[0] == "Ġ" and token[1:].isascii() and token[1:].isalpha())


def parser_of(description: str | None, steps: int, warm_up: str) -> argparse.ArgumentParser:
    """Return a parser with the options of a benchmark. With its hidden options, the benchmark starts itself as the
    program that trains with TRL."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=steps, help=f"of each program, beside {warm_up} to warm up")
    parser.add_argument("--rounds", type=int, default=2, help="how often each program has its turn")
    parser.add_argument("--side", choices=("trl",), help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    return parser


Program = tuple[str, int]
"""A case and the number of processes; 0 processes stand for TRL."""
Figures = dict[Program, float]


def taking_turns(
    ours: Iterable[Program], rounds: int, run_side: Callable[[str, int], tuple[list[float], float]]
) -> tuple[Figures, Figures]:
    """Return median tokens per second and peak megabytes of this package's programs, and of TRL in each case.

    Args:
        run_side: (case, number of processes of this package or 0) → tokens per second of each step, and megabytes.
    """
    speeds: dict[Program, list[float]] = {}
    megabytes: Figures = {}
    counts: dict[str, list[int]] = {}
    for case, processes in ours:
        counts.setdefault(case, [0]).append(processes)
    for round_ in range(rounds):
        for case, processes in ((case, count) for case, programs in counts.items() for count in programs):
            found, most = run_side(case, processes)
            speeds.setdefault((case, processes), []).extend(found)
            megabytes[case, processes] = max(most, megabytes.get((case, processes), 0.0))
            side = f"ours, {processes} process(es)" if processes else "TRL"
            print(f"round {round_ + 1}, {case}, {side}: {statistics.median(found):,.0f} tokens/s", flush=True)
    return {key: statistics.median(values) for key, values in speeds.items()}, megabytes


def our_program(script: str, processes: int) -> list[str]:
    """Return the first words of a command that runs a training script."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [sys.executable, *(launcher if processes > 1 else []), str(ROOT / "scripts" / script)]


def run(command: list[str], threads: int, modules: Path | None = None) -> float:
    """Run a command to its end; returns the peak memory of its largest process, in MB.

    Args:
        modules: directory that the command may import modules from.

    Raises:
        SystemExit: the command failed; the message has its output.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    if modules is not None:
        environment["PYTHONPATH"] = str(modules)
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, env=environment, stdout=said, stderr=subprocess.STDOUT, text=True)
        usage = wait(process)
        if process.returncode:
            said.seek(0)
            sys.exit(f"{' '.join(command)}\n{said.read()[-4000:]}")
    return usage / 1000  # ru_maxrss is in kB on Linux


def wait(process: subprocess.Popen[str]) -> int:
    """Wait until the process has ended; return its peak resident set, or that of its largest child if larger."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < deadline:
        found, status, usage = os.wait4(process.pid, os.WNOHANG)
        if found:
            process.returncode = os.waitstatus_to_exitcode(status)
            return usage.ru_maxrss
        time.sleep(0.05)
    process.kill()
    process.wait()
    sys.exit(f"{process.args} did not end within {LIMIT_SECONDS} s")


def python_with_trl() -> str:
    if importlib.util.find_spec("trl") is not None:
        return sys.executable
    directory = ROOT / ".venv-trl"
    if not (directory / "installed").is_file():
        subprocess.run([sys.executable, "-m", "venv", "--system-site-packages", str(directory)], check=True)
        subprocess.run([str(directory / "bin" / "pip"), "install", "--quiet", TRL], check=True)
        (directory / "installed").touch()
    return str(directory / "bin" / "python")
