"""The verdict on each part of a check, from the files that its processes have written."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcore_rl.run.directory import STEP_LOGS
from mcore_rl.run.metrics import read_step_log
from mcore_rl.testing.cluster.plan import GRPO_STEPS, RESUME_STEPS, SAVED_STEP, Plan
from mcore_rl.utils.console import counted, size_text

PASSED, FAILED, LEFT_OUT, NOT_RUN = "passed", "FAILED", "left out", "NOT RUN"
LOSS_LIMIT = 1e-4
"""Largest difference of two losses in float32 after updates under two layouts, relative to the loss, or to 1."""


@dataclass
class Outcome:
    """The outcome of a part.

    verdict: `PASSED`, `FAILED`, `LEFT_OUT` or `NOT_RUN`.
    figure: the most important figures, or the reason of the verdict, in one line.
    figures: all figures, as JSON values.
    """

    part: str
    verdict: str
    figure: str
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def is_right(self) -> bool:
        return self.verdict in (PASSED, LEFT_OUT)


def judge_part(plan: Plan, part: str) -> Outcome:
    """Return the verdict on a part all of whose processes have ended well."""
    judges = {
        "collectives": _collectives, "layouts": _layouts, "refit": _refit, "resume": _resume, "speed": _speed,
        "grpo": _grpo,
    }  # fmt: skip
    return judges[part](plan)


def is_finite(value: Any) -> bool:
    """Return whether a JSON value is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def not_finite(value: Any, name: str = "") -> Iterator[str]:
    """Yield the names of the numbers in a JSON value that are NaN or infinite."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from not_finite(part, f"{name} {key}".strip())
    elif isinstance(value, list):
        for number, part in enumerate(value):
            yield from not_finite(part, f"{name} {number}".strip())
    elif isinstance(value, float) and not math.isfinite(value):
        yield name


def _problem_of_numbers(figures: Any) -> str:
    """Return which number in `figures` is not finite; "" if all are finite."""
    name = next(not_finite(figures), "")
    return f"{name} is not finite" if name else ""


def _outcome(part: str, problem: str, figure: str, figures: dict[str, Any]) -> Outcome:
    return Outcome(part, FAILED if problem else PASSED, problem or figure, figures=figures)


def _collectives(plan: Plan) -> Outcome:
    figures = plan.read_result("collectives")
    wrong = list(dict.fromkeys(row["collective"] for row in figures["rows"] if not row["right"]))
    reduced = [row for row in figures["rows"] if row["collective"] == "all-reduce"][-1]
    figure = f"all-reduce of {reduced['bytes'] / 2**20:.0f} MiB at {reduced['gb_per_second']:.3g} GB/s"
    if plan.world_size == 1:
        figure = "right values; there is no link between processes to measure"
    problem = f"wrong values: {', '.join(wrong)}" if wrong else _problem_of_numbers(figures)
    return _outcome("collectives", problem, figure, figures)


def _layouts(plan: Plan) -> Outcome:
    figures = plan.read_result("layouts")
    figures.pop("running", None)
    rows: dict[str, Any] = figures.get("rows", {})
    problems = [f"{name}: {what}" for name, row in rows.items() if (what := _problem_of_layout(row))]
    whole = [row for row in rows.values() if "error" not in row]
    right = len(rows) - len(problems)
    figure = f"{right} of {counted(len(plan.cases), 'layout')} agree with one process"
    if whole:
        worst = max(row["float32"]["gradients"] for row in whole)
        rounded = max((row["bfloat16"] for row in whole), key=lambda found: found["ratio"] / found["ratio_limit"])
        figure += (
            f"; gradients differ by {worst:.0e}, in bfloat16 {rounded['worst_quantity']} by {rounded['ratio']:.2f} × "
            f"the rounding of one process, at most {rounded['ratio_limit']:g}"
        )
    missing = [str(case) for case in plan.cases if str(case) not in rows]
    problems += [f"{name}: not run" for name in missing]
    if problems:
        figure = f"{right} of {len(plan.cases)} layouts agree with one process; {'; '.join(problems)}"
    return Outcome("layouts", FAILED if problems else PASSED, figure, figures=figures)


def _problem_of_layout(row: Mapping[str, Any]) -> str:
    if "error" in row:
        return str(row["error"])
    wrong = [dtype for dtype in ("float32", "bfloat16") if not row[dtype]["right"]]
    return f"differs in {' and '.join(wrong)}" if wrong else _problem_of_numbers(row)


def _refit(plan: Plan) -> Outcome:
    figures = plan.read_result("refit")
    different = figures["different"]
    problem = _problem_of_numbers(figures)
    if bad := figures["not_finite"]:
        problem = f"{counted(len(bad), 'tensor')} with values that are not finite, the first is {bad[0]}"
    if different:
        problem = f"{counted(len(different), 'tensor')} differ, the first is {different[0]}"
    figure = (
        f"{counted(figures['tensors'], 'tensor')} equal in {counted(figures['engines'], 'engine')}; "
        f"{figures['bytes'] / 1e6:,.1f} MB at {figures['gb_per_second']:.3g} GB/s"
    )
    return _outcome("refit", problem, figure, figures)


def _resume(plan: Plan) -> Outcome:
    runs = [_steps(plan.directory / "resume" / name) for name in ("uninterrupted", "resumed")]
    losses = [{entry["step"]: entry["loss"] for entry in run} for run in runs]
    steps = range(SAVED_STEP + 1, RESUME_STEPS + 1)
    figures: dict[str, Any] = {"losses": [{str(step): loss for step, loss in run.items()} for run in losses]}
    if list(losses[1]) != list(steps) or not set(steps) <= losses[0].keys():
        return _outcome("resume", "the runs do not have the expected steps", "", figures)
    if bad := [n for n in steps if not (is_finite(losses[0][n]) and is_finite(losses[1][n]))]:
        return _outcome("resume", f"the loss of step {bad[0]} is not finite", "", figures)
    difference = max(abs(losses[1][n] - losses[0][n]) / max(abs(losses[0][n]), 1.0) for n in steps)
    figures |= {"difference": difference, "layouts": [str(plan.first_layout), str(plan.second_layout)]}
    layouts = f"saved under {plan.first_layout}, resumed under {plan.second_layout}"
    if plan.first_layout == plan.second_layout:
        layouts = f"saved and resumed under the same layout ({plan.first_layout})"
    figure = f"{layouts}: losses differ by {difference:.0e}"
    return _outcome("resume", "" if difference <= LOSS_LIMIT else figure, figure, figures)


def _speed(plan: Plan) -> Outcome:
    figures, simulated = plan.read_result("speed"), plan.read_result("simulation")
    if problem := _problem_of_numbers({"measured": figures, "simulated": simulated}):
        return Outcome("speed", FAILED, problem, figures=figures)
    memory = figures["peak_bytes"]
    figure = f"{figures['tokens_per_second']:,.0f} tokens/s, {size_text(memory)}"
    if not simulated:
        figure += "; the simulation failed"
        return Outcome("speed", FAILED, figure, figures=figures)
    compared: dict[str, Any] = {"memory_ratio": memory / simulated["peak_bytes"]}
    if simulated["seconds"]:
        compared["speed_ratio"] = simulated["seconds"] / figures["seconds"]
        figure += f" ({compared['speed_ratio']:.2f} × the simulated speed"
    else:
        figure += " (speed is not simulated for this device"
    figure += f", {compared['memory_ratio']:.2f} × the simulated memory)"
    figure += f"; {plan.note}" if plan.note else ""
    return Outcome("speed", PASSED, figure, figures={**figures, "simulated": simulated, **compared})


def _grpo(plan: Plan) -> Outcome:
    steps = _steps(plan.directory / "grpo")
    figures = {"steps": steps}
    if len(steps) != GRPO_STEPS:
        return _outcome("grpo", f"{len(steps)} of {GRPO_STEPS} steps", "", figures)
    names = ("loss", "grad_norm", "reward_mean")
    bad = [entry["step"] for entry in steps if not all(is_finite(entry.get(name)) for name in names)]
    if bad:
        return _outcome("grpo", f"loss, gradient norm or reward is not finite in steps {bad}", "", figures)
    rewards = [entry["reward_mean"] for entry in steps]
    median = {
        name.removesuffix("_seconds"): sorted(entry.get(name, 0.0) for entry in steps)[len(steps) // 2]
        for name in steps[-1]
        if name.endswith("_seconds") and name != "step_seconds"
    }
    largest = sorted(median.items(), key=lambda item: -item[1])[:3]
    times = ", ".join(f"{name} {seconds:.2g} s" for name, seconds in largest)
    figure = f"{GRPO_STEPS} steps; reward {rewards[0]:.3f} to {rewards[-1]:.3f}; {times}"
    return _outcome("grpo", "", figure, {**figures, "median_seconds": median})


def _steps(directory: Path) -> list[dict[str, Any]]:
    path = directory / STEP_LOGS[0]
    return read_step_log(path) if path.is_file() else []


TABLE_HEADER = f"{'part':<13}{'verdict':<10}{'seconds':>8}  figures"


def table_row(outcome: Outcome) -> str:
    """Return the line of a part in the table, below `TABLE_HEADER`."""
    return f"{outcome.part:<13}{outcome.verdict:<10}{outcome.seconds:>8.0f}  {outcome.figure}"
