"""The report of runs as one HTML page, with findings at the top."""

from __future__ import annotations

import datetime
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from mcore_rl.report.curves import Section, ranges, sections
from mcore_rl.report.runs import Run
from mcore_rl.run.directory import REPORT_MARK
from mcore_rl.utils.console import size_text

SUSPICIOUS_MISMATCH = 1.05
"""Limit of `token_mult_prob_error` if the configuration sets none: a difference of 5 % between two probabilities."""
NEAR = 0.8
"""Fraction of the distance from 1 (sampler and trainer agree) to the bound, above which a finding is reported."""


def findings(run: Run) -> Iterator[str]:
    """Yield findings as sentences, the most serious first."""
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
    """Yield findings about skipped updates and samples that could not be judged."""
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
    """Format steps as `step 3` or `17 steps (1, 4, 5, …)`."""
    if len(steps) == 1:
        return f"step {steps[0]}"
    return f"{len(steps):,} steps ({', '.join(map(str, steps[:5]))}{', …' if len(steps) > 5 else ''})"


MAX_CHARACTERS = 4000
"""Maximum number of characters shown of a message; the page states the number of omitted characters."""
SIZES = {
    "tensor": "parallel.tensor_model_parallel_size",
    "pipeline": "parallel.pipeline_model_parallel_size",
    "virtual pipeline": "parallel.virtual_pipeline_model_parallel_size",
    "context": "parallel.context_parallel_size",
    "expert": "parallel.expert_model_parallel_size",
}


def page(runs: Sequence[Run]) -> str:
    """Return the whole HTML text. All content from the runs' files is escaped."""
    charts = sections(runs)
    environment = Environment(
        loader=PackageLoader("mcore_rl.report", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    here = resources.files("mcore_rl.report")
    return environment.get_template("page.html").render(
        mark=Markup(REPORT_MARK),
        title=" · ".join(run.label for run in runs),
        written=f"{datetime.datetime.now():%Y-%m-%d %H:%M}",
        style=Markup((here / "page.css").read_text()),
        script=Markup((here / "page.js").read_text()),
        plotly=Markup((here / "plotly-basic.min.js").read_text()),
        figures=_figures(charts),
        runs=[_overview(run) for run in runs],
        sections=charts,
        validation=list(_validation(runs)),
        samples=sample_rows(runs),
        sampled=[_sampled(run) for run in runs if run.samples],
        checkpoints=[(run.label, run.checkpoints) for run in runs if run.checkpoints],
        configuration=configuration_rows(runs),
        several=len(runs) > 1,
        size_text=size_text,
    )


def _figures(charts: Sequence[Section]) -> Markup:
    """Return the JSON of every chart in the order of the page, escaped so that it cannot contain `</script>`."""
    figures = (chart.figure.to_json() for section in charts for chart in section.charts)
    return Markup(f"[{','.join(figures)}]".replace("<", "\\u003c"))


def _overview(run: Run) -> dict[str, Any]:
    """Return the content of the run's card."""
    tokens, seconds = run.total("num_tokens"), run.total("step_seconds")
    sizes = [f"{name} {run.config[key]}" for name, key in SIZES.items() if run.config.get(key, 1) not in (None, 1)]
    facts = {
        "algorithm": run.algorithm or "not told",
        "model": str(run.config.get("model.path", "not told")),
        "layout": " × ".join(sizes) or ("no model parallelism" if run.config else "not told"),
        "steps": "none" if run.last_step is None else f"{run.last_step:,}",
        "tokens": f"{tokens:,.0f}",
        "time in steps": str(datetime.timedelta(seconds=round(seconds))),
        "tokens/s": f"{tokens / seconds:,.0f}" if seconds else "none",
        "checkpoints": f"{len(run.checkpoints)}"
        + (f", of step {run.checkpoints[-1].step} last" if run.checkpoints else ""),
    }
    return {"label": run.label, "path": str(run.path), "state": run.state, "facts": facts, "findings": [*findings(run)]}


def _validation(runs: Sequence[Run]) -> Iterator[tuple[str, ...]]:
    """Yield rows of the validation table: metric, run, first, last, lowest, highest."""
    for name, label, series in ranges(runs):
        found = list(series.finite())
        if found:
            ends = (found[0], found[-1], min(found, key=lambda p: p[1]), max(found, key=lambda p: p[1]))
            plain = name.removeprefix("validation_")
            yield (plain, label, *(f"{value:.5g} (step {step})" for step, value in ends))


@dataclass
class SampleRow:
    """
    prompt: messages before the first response.
    cells: sample of each run; None if the run has no such sample.
    """

    step: int
    prompt: list[dict[str, str]]
    cells: list[dict[str, Any] | None]


def sample_rows(runs: Sequence[Run]) -> list[SampleRow]:
    """Return rows with samples of the same step and prompt; the n-th sample of a run is in a row with the n-th of
    others."""
    rows: dict[tuple[int, str, int], SampleRow] = {}
    for column, run in enumerate(runs):
        seen = Counter[tuple[int, str]]()
        for sample in run.samples:
            messages = [_message(message) for message in sample.get("messages") or []]
            roles = [message["role"] for message in messages]
            start = roles.index("assistant") if "assistant" in roles else len(roles)
            key = (sample["step"], json.dumps(messages[:start]))
            row = rows.setdefault((*key, seen[key]), SampleRow(sample["step"], messages[:start], [None] * len(runs)))
            seen[key] += 1
            row.cells[column] = {
                "reward": _number(sample.get("reward")),
                "facts": [
                    f"{name.replace('_', ' ')} {text}"
                    for name in ("advantage", "ground_truth")
                    if (text := _fact(sample.get(name)))
                ],
                "parts": [f"{name} {_number(value)}" for name, value in (sample.get("rewards") or {}).items()],
                "error": sample.get("error"),
                "messages": messages[start:],
            }
    return sorted(rows.values(), key=lambda row: row.step)


def _message(message: Any) -> dict[str, str]:
    role, content = (
        (message.get("role", ""), message.get("content", "")) if isinstance(message, dict) else ("", message)
    )
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    if len(text) > MAX_CHARACTERS:
        text = f"{text[:MAX_CHARACTERS]} … ({len(text) - MAX_CHARACTERS:,} more characters)"
    return {"role": str(role), "text": text}


def _fact(value: Any) -> str:
    """Format a number or a text; "" for None."""
    return "" if value is None else _number(value) if isinstance(value, int | float) else str(value)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "none"


def _sampled(run: Run) -> str:
    """Return a sentence about the number of samples shown of the run."""
    everything = run.steps_with_samples == run.sampled_steps
    steps = f"all {run.sampled_steps:,}" if everything else f"{run.sampled_steps:,} of {run.steps_with_samples:,}"
    return f"{run.label}: {len(run.samples):,} samples, of {steps} steps that have some"


def configuration_rows(runs: Sequence[Run]) -> list[tuple[str, list[str], bool]]:
    """Return (key, its value in each run, whether the values differ), differing keys first."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    rows = [(key, [_value(run, key) for run in runs]) for key in keys]
    told = [(key, values, len(set(values)) > 1) for key, values in rows]
    return sorted(told, key=lambda row: not row[2])


def _value(run: Run, key: str) -> str:
    return json.dumps(run.config[key], ensure_ascii=False) if key in run.config else "—"
