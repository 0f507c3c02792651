"""Find what needs attention in a run's files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from mcore_rl.report.runs import Run

SUSPICIOUS_MISMATCH = 1.05
"""Of `token_mult_prob_error` where the configuration sets no bound: 5 % between two probabilities of a token."""
NEAR = 0.8
"""Of the way from 1, where sampler and trainer agree, to the bound."""


def findings(run: Run) -> Iterator[str]:
    """Sentences, the gravest first."""
    if run.state == "killed":
        yield "the run was killed: its lock is still there, its process is not"
    if run.stacks and run.state != "going on":
        phases = "; ".join(sorted({line.partition(", ")[2] for line in run.stacks})[:3])
        yield f"it did not end well: stacks/ tells what each of {len(run.stacks)} ranks was doing ({phases})"
    if run.last_step is None:
        yield "no step has been finished"
    for name, series in run.metrics.items():
        bad = [step for step, value in zip(series.steps, series.values, strict=True) if not math.isfinite(value)]
        if bad:
            yield f"{name} is NaN or infinite at {_steps(bad)}"
    yield from _of_samples(run)
    yield from _mismatch(run)
    for checkpoint in run.checkpoints:
        if checkpoint.problem:
            yield f"checkpoint of step {checkpoint.step}: {checkpoint.problem}"
    for name in run.cut_short:
        yield f"{name}: its last line is cut short, and left out here"


def _of_samples(run: Run) -> Iterator[str]:
    """Updates that were skipped, samples that could not be judged."""
    if skipped := _where(run, "skipped_update", 0.0):
        yield f"no update at {_steps(skipped)}: there was nothing to learn from"
    if failed := _where(run, "failed_fraction", 0.0):
        errors = [str(sample["error"]) for sample in run.samples if sample.get("error")]
        last = f"; the last error among the samples: {errors[-1][:300]}" if errors else ""
        yield f"samples could not be judged at {_steps(failed)}{last}"


def _mismatch(run: Run) -> Iterator[str]:
    bound = run.config.get("generation.max_token_mult_prob_error")
    limit = SUSPICIOUS_MISMATCH if bound is None else 1 + NEAR * (bound - 1)
    if steps := _where(run, "token_mult_prob_error", limit):
        name = "no bound is configured" if bound is None else f"generation.max_token_mult_prob_error={bound:g}"
        yield f"token_mult_prob_error is above {limit:.4g} at {_steps(steps)} ({name})"


def _where(run: Run, name: str, above: float) -> list[int]:
    series = run.metrics.get(name)
    return [step for step, value in series.finite() if value > above] if series else []


def _steps(steps: Sequence[int]) -> str:
    """`step 3`, or `17 steps (1, 4, 5, …)`."""
    if len(steps) == 1:
        return f"step {steps[0]}"
    return f"{len(steps):,} steps ({', '.join(map(str, steps[:5]))}{', …' if len(steps) > 5 else ''})"
