"""Measure how time and memory grow with sequence length, vocabulary, group size and ranks.

    OMP_NUM_THREADS=1 python scripts/benchmarks/bench_growth.py

Each point is measured in separate processes: CPU time, and the growth of memory to its peak. The growth of a curve is
the slope of the line through its points on logarithmic axes. The table shows it with the expected value and the
bounds. Writes a picture of each curve. Exits with 1 if a slope is out of its bounds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import log
from pathlib import Path

import torch
from bench_prefix import make_model
from bench_results import RESULTS, Row, finish
from make_drawings import COLORS, text
from peak_memory import PeakMemory

from mcore_rl.config import GRPOConfig
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.testing.processes import run_processes
from mcore_rl.utils.console import quiet_libraries

VOCABULARY, PROMPT, RESPONSE, WIDTH, HEIGHT = 1024, 512, 64, 460, 220
PICTURES = RESULTS / "growth"
Point = tuple[float, float]
"""CPU seconds and megabytes."""


Slope = tuple[float, float | None, float]
"""A slope as (expected, lower bound, upper bound)."""


@dataclass(frozen=True)
class Curve:
    """Time and memory as functions of one size.

    sizes: values of the size at which both are measured.
    measure: function (model, size) → seconds and megabytes.
    seconds, megabytes: expected slope and its bounds; None if the slope is not checked.
    """

    name: str
    sizes: Sequence[int]
    measure: Callable[[Path, int], Point]
    seconds: Slope | None
    megabytes: Slope | None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--curves", nargs="*", choices=[curve.name for curve in CURVES], help="all, if left out")
    arguments = parser.parse_args()
    quiet_libraries()
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        sizes = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "num_attention_heads": 4}
        make_model(Path(directory), **sizes, max_position_embeddings=32_768)
        for curve in CURVES:
            if not arguments.curves or curve.name in arguments.curves:
                rows += measured(curve, Path(directory), keep=not arguments.curves)
    columns = ("slope", "expected", "slope")
    return finish("growth", "Growth: slopes on logarithmic axes", columns, rows, keep=not arguments.curves)


def measured(curve: Curve, model: Path, keep: bool) -> list[Row]:
    points = []
    for size in curve.sizes:
        points.append(curve.measure(model, size))
        print(f"{curve.name} {size:>7,}: {points[-1][0]:8.3f} s, {points[-1][1]:8.1f} MB", flush=True)
    rows = []
    for unit, values, expected in zip(
        ("s", "MB"), zip(*points, strict=True), (curve.seconds, curve.megabytes), strict=True
    ):
        if expected is not None:
            slope = slope_of(curve.sizes, values)
            name = f"{'time' if unit == 's' else 'memory'} by {curve.name}"
            rows.append(Row(name, slope, expected[0], slope, *expected[1:]))
            if keep:
                points_of = {"title": name, "unit": unit, "sizes": curve.sizes, "values": values, "slope": expected[0]}
                PICTURES.mkdir(parents=True, exist_ok=True)
                file = PICTURES / f"{name.replace(' ', '_')}.json"
                file.write_text(json.dumps(points_of) + "\n")
                file.with_suffix(".svg").write_text(picture(**points_of))
    return rows


def slope_of(sizes: Sequence[int], values: Sequence[float]) -> float:
    """Return the slope of the least-squares line through the logarithms."""
    x, y = ([log(value) for value in numbers] for numbers in (sizes, values))
    x_mean, y_mean = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - x_mean) * (b - y_mean) for a, b in zip(x, y, strict=True))
    return covariance / sum((a - x_mean) ** 2 for a in x)


def picture(title: str, unit: str, sizes: Sequence[int], values: Sequence[float], slope: float) -> str:
    """Draw the points on logarithmic axes, with a line of the expected slope through their middle."""
    x, y = ([log(value) for value in numbers] for numbers in (sizes, values))
    x_mean, y_mean = sum(x) / len(x), sum(y) / len(y)
    line = [y_mean + slope * (a - x_mean) for a in x]
    low, high = min(*y, *line), max(*y, *line)

    def at(a: float, b: float) -> tuple[float, float]:
        across, up = (a - x[0]) / (x[-1] - x[0]), (b - low) / (high - low or 1)
        return 70 + across * (WIDTH - 110), HEIGHT - 40 - up * (HEIGHT - 90)

    (x1, y1), (x2, y2) = at(x[0], line[0]), at(x[-1], line[-1])
    parts = [text(16, 24, title, weight="bold"), text(16, 42, f"line: slope {slope:.2f}", color="#666666")]
    parts.append(
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#888888" stroke-dasharray="4"/>'
    )
    for size, value, a, b in zip(sizes, values, x, y, strict=True):
        across, down = at(a, b)
        parts.append(f'<circle cx="{across:.1f}" cy="{down:.1f}" r="4" fill="{COLORS[0]}"/>')
        parts.append(text(round(across), HEIGHT - 16, f"{size:,}", anchor="middle"))
        parts.append(text(round(across), round(down) - 9, f"{value:.3g} {unit}", anchor="middle"))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
    head += ' font-size="11">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#ffffff"/>', *parts, "</svg>"]) + "\n"


# ------------------------------------------------------------ measurements


def by_length(model: Path, tokens: int) -> Point:
    return run_processes(a_step, model, tokens, 1, 0, world_size=1, timeout=300)[0]


def by_group(model: Path, responses: int) -> Point:
    return run_processes(a_step, model, PROMPT + RESPONSE, responses, PROMPT, world_size=1, timeout=300)[0]


def by_ranks(model: Path, ranks: int) -> Point:
    taken = run_processes(a_step, model, 1024, 16, 0, world_size=ranks, timeout=300)
    return sum(rank[0] for rank in taken), sum(rank[1] for rank in taken)


def by_vocabulary(model: Path, vocabulary: int) -> Point:
    return run_processes(a_head, vocabulary, world_size=1, timeout=300)[0]


def a_step(model: Path, tokens: int, rows: int, shared: int) -> Point:
    """Measure a training step on `rows` rows whose first `shared` tokens are the same; it is not the first step."""
    from mcore_rl.algorithms.loss_functions import ClippedPGLossFn
    from mcore_rl.losses.policy_options import ClippedPGOptions
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    torch.set_num_threads(1)
    config = GRPOConfig.model_validate(
        {
            "output_dir": model / "unused",
            "model": {"path": model},
            "data": {"train": "unused", "max_sequence_length": tokens},
            "batch": {"tokens_per_pack": max(tokens, 4096), "share_prefixes": shared > 0},
            "grpo": {"num_prompts_per_step": 1, "num_generations_per_prompt": max(2, rows), "max_new_tokens": 1},
            "optimizer": {"lr": 1e-5},
            "trainer": {"max_steps": 2},
            "checkpoint": {"export_hf": False},
        }
    )
    policy, loss_fn = MegatronPolicy(config, total_steps=10), ClippedPGLossFn(ClippedPGOptions())
    policy.batching = replace(policy.batching, rows_per_group=rows if shared else 0)
    policy.train(make_batch(8, torch.distributed.get_world_size(), 0), loss_fn)
    data, started = make_batch(tokens, rows, shared), time.process_time()
    with PeakMemory() as peak:
        policy.train(data, loss_fn)
    return time.process_time() - started, peak.bytes / 1e6


def make_batch(tokens: int, rows: int, shared: int) -> BatchedDataDict:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (rows, tokens), generator=generator)
    ids[:, :shared] = ids[0, :shared].clone()
    mask = torch.ones(ids.shape)
    mask[:, :shared] = 0
    noise = torch.randn(2, *ids.shape, generator=generator) * 0.1 - 7
    return BatchedDataDict(
        input_ids=ids, token_mask=mask, input_lengths=torch.full((rows,), tokens), sample_mask=torch.ones(rows),
        prev_logprobs=noise[0], generation_logprobs=noise[1],
        advantages=torch.randn(rows, 1, generator=generator).expand(ids.shape).contiguous(),
    )  # fmt: skip


def a_head(vocabulary: int) -> Point:
    """Measure log-probabilities of 512 tokens from hidden states, forward and backward; memory without weight and
    gradients."""
    from mcore_rl.distributed.logprobs import linear_logprobs

    torch.set_num_threads(1)
    hidden = torch.randn(512, 256, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(vocabulary, 256))
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight), False  # as in Megatron
    targets = torch.randint(0, vocabulary, (512,))
    linear_logprobs(hidden, weight, targets)[0].sum().backward()
    weight.grad, started = None, time.process_time()
    with PeakMemory() as peak:
        linear_logprobs(hidden, weight, targets)[0].sum().backward()
    return time.process_time() - started, peak.bytes / 1e6


GROUPS = (1, 2, 4, 8, 16, 32)
TOKENS_OF_GROUPS = round(slope_of(GROUPS, [PROMPT + RESPONSE * n for n in GROUPS]), 2)
CURVES = (
    # The cost of projections grows with the number of tokens, that of attention with the number of pairs.
    Curve("sequence length", (1024, 2048, 4096, 8192, 16384, 32768), by_length, (1.5, 1.0, 2.0), (1.0, 0.75, 1.1)),
    Curve("vocabulary", (8192, 16384, 32768, 65536, 131072, 262144), by_vocabulary, (1.0, 0.9, 1.1), (0.0, None, 0.2)),
    # The prompt is computed once, so the number of tokens is that of the prompt plus the responses.
    Curve("group size", GROUPS, by_group, (TOKENS_OF_GROUPS, 0.2, 0.65), (TOKENS_OF_GROUPS, 0.1, 0.65)),
    # Sum over all ranks, which train on 16 sequences together.
    Curve("ranks", (1, 2, 4, 8), by_ranks, (0.0, None, 0.3), None),
)


if __name__ == "__main__":
    sys.exit(main())
