"""The verdict on each part of a check, from the files that its processes have written."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mcore_rl.run.directory import STEP_LOGS
from mcore_rl.run.metrics import read_step_log
from mcore_rl.testing.cluster.plan import GRPO_STEPS, RESUME_STEPS, SAVED_STEP, Plan
from mcore_rl.utils.console import counted, size_text

PASSED, FAILED, LEFT_OUT, NOT_RUN, NO_TIME = "passed", "FAILED", "left out", "NOT RUN", "no time"
NO_TIME_STATUS = 4
"""Exit status of a check in which nothing failed, but which had no time for some parts or layouts."""
LOSS_LIMIT = 1e-4
"""Largest difference of two losses in float32 after updates under two layouts, relative to the loss, or to 1."""


@dataclass
class Outcome:
    """The outcome of a part.

    verdict: `PASSED`, `FAILED`, `LEFT_OUT`, `NOT_RUN` or `NO_TIME`.
    figure: the most important figures, or the reason of the verdict, in one line.
    figures: all figures, as JSON values.
    """

    part: str
    verdict: str
    figure: str
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def has_failed(self) -> bool:
        return self.verdict in (FAILED, NOT_RUN)


Judged = tuple[str, str, dict[str, Any]]
"""Why a part has failed ("" if it has not), its most important figures in one line, and all its figures. The figure
"no_time" lists what the time limit has left open."""


def judge_part(plan: Plan, part: str) -> Outcome:
    """Return the verdict on a part all of whose processes have ended well."""
    judges = {
        "collectives": _collectives, "layouts": _layouts, "refit": _refit, "resume": _resume, "speed": _speed,
        "grpo": _grpo,
    }  # fmt: skip
    problem, figure, figures = judges[part](plan)
    verdict = FAILED if problem else NO_TIME if figures.get("no_time") else PASSED
    return Outcome(part, verdict, problem or figure, figures=figures)


def _not_finite(value: Any) -> str:
    """Return which number in a JSON value is NaN or infinite; "" if all are finite."""
    name = next(_bad_numbers(value, ""), "")
    return f"{name} is not finite" if name else ""


def _bad_numbers(value: Any, name: str) -> Iterator[str]:
    if isinstance(value, Mapping | list):
        for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _bad_numbers(part, f"{name} {key}".strip())
    elif isinstance(value, float) and not math.isfinite(value):
        yield name


def _collectives(plan: Plan) -> Judged:
    figures = plan.read_result("collectives")
    wrong = list(dict.fromkeys(row["collective"] for row in figures["rows"] if not row["right"]))
    reduced = [row for row in figures["rows"] if row["collective"] == "all-reduce"][-1]
    figure = f"all-reduce of {reduced['bytes'] / 2**20:.0f} MiB at {reduced['gb_per_second']:.3g} GB/s"
    if plan.world_size == 1:
        figure = "right values; there is no link between processes to measure"
    return f"wrong values: {', '.join(wrong)}" if wrong else _not_finite(figures), figure, figures


def _layouts(plan: Plan) -> Judged:
    figures = plan.read_result("layouts")
    rows: dict[str, Any] = figures.get("rows", {})
    problems = [f"{name}: {what}" for name, row in rows.items() if (what := _problem_of_layout(row))]
    right = len(rows) - len(problems)
    agreeing = f"{right} of {counted(len(plan.cases), 'layout')} agree with one process"
    if open_cases := [str(case) for case in plan.cases if str(case) not in rows]:
        figures["no_time"] = open_cases
        agreeing += f"; no time for {', '.join(open_cases)}"
    if problems:
        return f"{agreeing}; {'; '.join(problems)}", "", figures
    if open_cases:
        return "", agreeing, figures
    worst = max(row["float32"]["gradients"] for row in rows.values())
    rounded = max((row["bfloat16"] for row in rows.values()), key=lambda found: found["ratio"] / found["ratio_limit"])
    figure = (
        f"{agreeing}; gradients differ by {worst:.0e}, in "
        f"bfloat16 {rounded['worst_quantity']} by {rounded['ratio']:.2f} × the rounding of one process, at most "
        f"{rounded['ratio_limit']:g}"
    )
    return "", figure, figures


def _problem_of_layout(row: Mapping[str, Any]) -> str:
    if "error" in row:
        return str(row["error"])
    wrong = [dtype for dtype in ("float32", "bfloat16") if not row[dtype]["right"]]
    return f"differs in {' and '.join(wrong)}" if wrong else _not_finite(row)


def _refit(plan: Plan) -> Judged:
    figures = plan.read_result("refit")
    problem = _not_finite(figures)
    if bad := figures["not_finite"]:
        problem = f"{counted(len(bad), 'tensor')} with values that are not finite, the first is {bad[0]}"
    if different := figures["different"]:
        problem = f"{counted(len(different), 'tensor')} differ, the first is {different[0]}"
    figure = (
        f"{counted(figures['tensors'], 'tensor')} equal in {counted(figures['engines'], 'engine')}; "
        f"{figures['bytes'] / 1e6:,.1f} MB at {figures['gb_per_second']:.3g} GB/s"
    )
    return problem, figure, figures


def _resume(plan: Plan) -> Judged:
    losses = [
        {entry["step"]: entry["loss"] for entry in _steps(plan, f"resume/{name}")}
        for name in ("uninterrupted", "resumed")
    ]
    steps = range(SAVED_STEP + 1, RESUME_STEPS + 1)
    figures: dict[str, Any] = {"losses": [{str(step): loss for step, loss in run.items()} for run in losses]}
    if list(losses[1]) != list(steps) or not set(steps) <= losses[0].keys():
        return "the runs do not have the expected steps", "", figures
    if bad := [n for n in steps if not all(math.isfinite(run[n]) for run in losses)]:
        return f"the loss of step {bad[0]} is not finite", "", figures
    difference = max(abs(losses[1][n] - losses[0][n]) / max(abs(losses[0][n]), 1.0) for n in steps)
    figures |= {"difference": difference, "layouts": [str(plan.first_layout), str(plan.second_layout)]}
    layouts = f"saved under {plan.first_layout}, resumed under {plan.second_layout}"
    if plan.first_layout == plan.second_layout:
        layouts = f"saved and resumed under the same layout ({plan.first_layout})"
    figure = f"{layouts}: losses differ by {difference:.0e}"
    return "" if difference <= LOSS_LIMIT else figure, figure, figures


def _speed(plan: Plan) -> Judged:
    measured, simulated = plan.read_result("speed"), plan.read_result("simulation")
    figures: dict[str, Any] = {**measured}
    if problem := _not_finite({"measured": measured, "simulated": simulated}):
        return problem, "", figures
    memory = measured["peak_bytes"]
    figure = f"{measured['tokens_per_second']:,.0f} tokens/s, {size_text(memory)}"
    if not simulated:
        return f"{figure}; the simulation failed", "", figures
    figures |= {"simulated": simulated, "memory_ratio": memory / simulated["peak_bytes"]}
    speed = "speed is not simulated for this device"
    if simulated["seconds"]:
        figures["speed_ratio"] = simulated["seconds"] / measured["seconds"]
        speed = f"{figures['speed_ratio']:.2f} × the simulated speed"
    figure += f" ({speed}, {figures['memory_ratio']:.2f} × the simulated memory)"
    return "", f"{figure}; {plan.note}" if plan.note else figure, figures


def _grpo(plan: Plan) -> Judged:
    steps = _steps(plan, "grpo")
    figures: dict[str, Any] = {"steps": steps}
    if len(steps) != GRPO_STEPS:
        return f"{len(steps)} of {GRPO_STEPS} steps", "", figures
    names = ("loss", "grad_norm", "reward_mean")
    if bad := [entry["step"] for entry in steps if not all(math.isfinite(entry[name]) for name in names)]:
        return f"loss, gradient norm or reward is not finite in steps {bad}", "", figures
    rewards = [entry["reward_mean"] for entry in steps]
    median = {
        name.removesuffix("_seconds"): sorted(entry.get(name, 0.0) for entry in steps)[len(steps) // 2]
        for name in steps[-1]
        if name.endswith("_seconds") and name != "step_seconds"
    }
    figures["median_seconds"] = median
    largest = sorted(median.items(), key=lambda item: -item[1])[:3]
    times = ", ".join(f"{name} {seconds:.2g} s" for name, seconds in largest)
    return "", f"{GRPO_STEPS} steps; reward {rewards[0]:.3f} to {rewards[-1]:.3f}; {times}", figures


def _steps(plan: Plan, run: str) -> list[dict[str, Any]]:
    """Return the entries of a run's step log; [] if it has none."""
    path = plan.directory / run / STEP_LOGS[0]
    return read_step_log(path) if path.is_file() else []


TABLE_HEADER = f"{'part':<13}{'verdict':<10}{'seconds':>8}  figures"


def table_row(outcome: Outcome) -> str:
    """Return the line of a part in the table, below `TABLE_HEADER`."""
    return f"{outcome.part:<13}{outcome.verdict:<10}{outcome.seconds:>8.0f}  {outcome.figure}"
