"""The charts of a report: grouping of metrics, curves, stacked phases."""

from __future__ import annotations

import html
import itertools
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from mcore_rl.report.runs import Run, Series

COLORS = ("#4c82d8", "#e07b39", "#2aa17a", "#cf5a86", "#9273d0", "#b5902a", "#35a3bd", "#8c95a3")
DASHES = ("solid", "dash", "dashdot", "longdash", "longdashdot")
"""Lines of a chart's curves. With one run, each metric has a color. With several runs, each run has a color and each
metric a dash. Validation is dotted."""
MAX_POINTS = 1000
"""Maximum number of points of a curve. With more steps, the least and the greatest value of each interval are drawn."""
MAX_MARKED_STEPS = 8
"""Maximum number of steps of a chart that marks each of them."""
MAX_PHASE_POINTS = 300
"""Maximum number of points of stacked phases. With more steps, the means of intervals are drawn, because extremes do
not add up."""

GROUPS = {
    "Loss": {
        "loss": r"loss|preference_loss(_\w+)?|sft_loss|((positive|observation)_)?nll_loss",
        "balance of experts": r"moe_(aux|z)_loss",
    },
    "Rewards": {
        "reward": r"reward_mean",
        "deviation of rewards": r"reward_std",
        "rewards of pairs": r"rewards_(chosen|rejected)_mean|rewards_(desirable|undesirable)_(mean|sum)",
        "margin": r"reward_margin",
        "log-probabilities": r"logprobs_(chosen|rejected)_mean",
        "accuracy": r"accuracy|reward_positive_fraction",
        "several responses": r"(pass|maj)@\d+",
    },
    "KL": {
        "KL": r"kl_penalty|forward_kl|reverse_kl|js|kl_reference_point",
        "entropy": r"approx_entropy",
    },
    "Critic": {
        "value loss": r"value_loss",
        "explained variance": r"explained_variance",
        "values and returns": r"values_mean|returns_(mean|std)",
        "clipped values": r"value_clip_fraction",
        "gradient norm of the critic": r"critic_grad_norm",
        "learning rate of the critic": r"critic_lr",
    },
    "Responses": {
        "length (tokens)": r"response_length_.*",
        "fractions": r"truncated_fraction|failed_fraction|kept_fraction",
        "turns": r"turns_mean",
    },
    "Mismatch between sampler and trainer": {
        "token_mult_prob_error": r"token_mult_prob_error",
        "errors in KL": r"gen_kl_error|policy_kl_error|js_divergence_error",
        "importance ratio": r"sampling_importance_ratio",
        "staleness": r"staleness.*",
    },
    "Update": {
        "probability ratio": r"probs_ratio(_.*)?",
        "clipped": r"clip_fraction_.*|off_policy_mask_fraction",
        "gradient norm": r"grad_norm",
        "learning rate": r"lr",
    },
    "Speed": {
        "tokens/s": r"tokens_per_second",
        "tokens/s of phases": r".*_tokens_per_second",
        "TFLOP/s": r"tflops_per_second",
        "memory": r".*(memory|_gib|_bytes).*",
    },
}
"""Metrics by section and chart. Names are complete, without `validation_` and `SET/`. Each other metric has a chart in
`Other`."""

CHOSEN, REJECTED = "rewards_chosen_mean", "rewards_rejected_mean"


@dataclass
class Chart:
    title: str
    figure: go.Figure
    note: str = ""


@dataclass
class Section:
    title: str
    charts: list[Chart] = field(default_factory=list)


def sections(runs: Sequence[Run]) -> list[Section]:
    """Return the sections for all metrics of the runs."""
    names = list(dict.fromkeys(name for run in runs for name in _series(run)))
    places: dict[str, dict[str, list[str]]] = {
        title: {chart: [] for chart in charts} for title, charts in GROUPS.items()
    }
    for name in names:
        section, chart = _place(name)
        places.setdefault(section, {}).setdefault(chart, []).append(name)
    found = []
    for section, charts in places.items():
        drawn = [_chart(title, metrics, runs) for title, metrics in charts.items() if metrics]
        if section == "Speed":
            drawn += [phases(run, f"seconds of a step{f', {run.label}' if len(runs) > 1 else ''}") for run in runs]
        if shown := [chart for chart in drawn if chart.figure.data]:
            found.append(Section(section, shown))
    return found


def _place(name: str) -> tuple[str, str]:
    """Return the section and the chart of a metric."""
    plain = name.removeprefix("validation_")
    of_one_set = plain.partition("/")[2] if plain != name else ""
    for section, charts in GROUPS.items():
        for chart, pattern in charts.items():
            if re.fullmatch(pattern, plain) or (of_one_set and re.fullmatch(pattern, of_one_set)):
                return section, chart
    if plain.endswith("_seconds"):
        return "Speed", "seconds"
    return "Other", plain.partition("/")[0]


def _series(run: Run) -> dict[str, Series]:
    """Return the run's metrics that are drawn as curves: without the phases, with the margin of a preference."""
    shown = {name: series for name, series in run.metrics.items() if name not in _phases(run)}
    for prefix in [name.removesuffix(CHOSEN) for name in run.metrics if name.endswith(CHOSEN)]:
        chosen, rejected = (run.metrics.get(f"{prefix}{name}") for name in (CHOSEN, REJECTED))
        if chosen and rejected and chosen.steps == rejected.steps:
            margins = array("d", np.asarray(chosen.values) - np.asarray(rejected.values))
            shown[f"{prefix}reward_margin"] = Series(chosen.steps, margins)
    return shown


def _chart(title: str, names: Sequence[str], runs: Sequence[Run]) -> Chart:
    figure, longest = go.Figure(), 0
    for number, run in enumerate(runs):
        series = _series(run)
        for place, name in ((place, name) for place, name in enumerate(names) if name in series):
            steps, values = thinned(series[name])
            longest = max(longest, len(series[name].steps) if len(steps) < len(series[name].steps) else 0)
            validation = name.startswith("validation_")
            dash = "dot" if validation else DASHES[place % len(DASHES)] if len(runs) > 1 else "solid"
            color = COLORS[(number if len(runs) > 1 else place) % len(COLORS)]
            figure.add_scatter(
                x=steps,
                y=values,
                name=html.escape(_label(run, name, names, runs)),
                mode="lines+markers" if validation or len(steps) < 20 else "lines",
                line={"width": 1.6, "dash": dash, "color": color},
            )
    if title == "token_mult_prob_error":
        for bound in {run.config.get("generation.max_token_mult_prob_error") for run in runs} - {None}:
            figure.add_hline(y=bound, line_dash="dash", line_width=1, annotation_text="bound")
    _set_axes(figure)
    per_point = longest // (MAX_POINTS // 2)
    thin = (
        f"{longest:,} steps: of every {per_point} or so the least and the greatest value are drawn" if longest else ""
    )
    return Chart(title, figure, thin)


def _label(run: Run, name: str, names: Sequence[str], runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        return name
    return run.label if len(names) == 1 else f"{run.label}: {name}"


def _set_axes(figure: go.Figure) -> None:
    """Mark whole steps only, and widen the range of equal values. By default it would span ±1, and a learning rate
    would look like 0."""
    steps = np.concatenate([trace.x for trace in figure.data] or [[0]])
    if np.ptp(steps) <= MAX_MARKED_STEPS:
        figure.update_xaxes(dtick=1)
    found = np.concatenate([trace.y for trace in figure.data] or [[]])
    found = np.unique(found[np.isfinite(found)])
    if len(found) == 1 and found[0]:
        figure.update_yaxes(range=sorted([0.5 * found[0], 1.5 * found[0]]))


def thinned(series: Series) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return at most `MAX_POINTS` (step, value): the least and the greatest value of each interval of steps, in
    order."""
    steps, values = np.array(series.steps), np.array(series.values)
    values[~np.isfinite(values)] = np.nan
    if len(steps) <= MAX_POINTS:
        return steps, values
    edges = np.linspace(0, len(steps), MAX_POINTS // 2 + 1).astype(int)
    kept: list[int] = []
    for start, end in itertools.pairwise(edges):
        stretch = values[start:end]
        if np.isnan(stretch).all():
            kept.append(start)
        else:
            kept += sorted({start + int(np.nanargmin(stretch)), start + int(np.nanargmax(stretch))})
    return steps[kept], values[kept]


def _phases(run: Run) -> list[str]:
    """Return the names of the metrics that are the seconds of a step's phases."""
    return [name for name in run.metrics if name.endswith("_seconds") and not name.startswith("validation_")]


def phases(run: Run, title: str) -> Chart:
    """Return a chart of the seconds of a step by phase, stacked."""
    total = run.metrics.get("step_seconds")
    figure = go.Figure()
    if total is None:
        return Chart(title, figure)
    steps = np.array(total.steps)
    rest = np.array(total.values)
    stack: list[tuple[str, NDArray[np.float64]]] = []
    for name in _phases(run):
        if name != "step_seconds":
            series = run.metrics[name]
            of_step = dict(zip(series.steps, series.values, strict=True))
            seconds = np.array([of_step.get(step, 0.0) for step in total.steps])
            rest = rest - seconds
            stack.append((name.removesuffix("_seconds"), seconds))
    stack.append(("other" if stack else "step", np.maximum(rest, 0.0)))  # phases may overlap
    parts = min(len(steps), MAX_PHASE_POINTS)
    edges = np.linspace(0, len(steps), parts + 1).astype(int)[:-1]
    widths = np.diff([*edges, len(steps)])
    for name, seconds in stack:
        means = np.add.reduceat(seconds, edges) / widths
        figure.add_scatter(
            x=steps[edges], y=means, name=html.escape(name), mode="lines", stackgroup="step", line={"width": 0.5}
        )
    figure.update_layout(colorway=COLORS)
    _set_axes(figure)
    note = f"{len(steps):,} steps: means of {parts} stretches" if parts < len(steps) else ""
    return Chart(title, figure, note)


def ranges(runs: Sequence[Run]) -> Iterator[tuple[str, str, Series]]:
    """Yield (metric, label of the run, series) of all validations."""
    for name in dict.fromkeys(name for run in runs for name in run.metrics if name.startswith("validation_")):
        yield from ((name, run.label, run.metrics[name]) for run in runs if name in run.metrics)
