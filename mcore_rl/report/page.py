"""The report of runs as one HTML page: findings, overview and samples of the runs, and charts of their metrics."""

from __future__ import annotations

import datetime
import html
import itertools
import json
import math
import re
from array import array
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from numpy.typing import NDArray

from mcore_rl.agents.messages import parts_of, text_of
from mcore_rl.data.chat import has_images
from mcore_rl.data.images import thumbnail
from mcore_rl.report.runs import Run, Series
from mcore_rl.run.directory import REPORT_MARK
from mcore_rl.run.metric_meanings import Metric, meaning_of
from mcore_rl.utils.console import size_text

SUSPICIOUS_MISMATCH = 1.05
"""If no bound is configured, the report warns of a `token_mult_prob_error` above this value; 1 means no difference."""
NEAR = 0.8
"""If a bound is configured, the report warns of a `token_mult_prob_error` above 1 + NEAR · (bound − 1)."""


def findings(run: Run) -> Iterator[str]:
    """Yield sentences about problems of a run, the most serious problems first."""
    if run.state == "killed":
        yield "the run was killed: its lock is still there, its process is not"
    if run.state == "stopped":
        patience = run.config.get("trainer.early_stopping_patience")
        reason = "" if patience is None else f"; trainer.early_stopping_patience={patience} can be the reason"
        yield f"the run stopped before its last step: {run.last_step or 0:,} of {run.planned_steps:,} steps{reason}"
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
        yield f"{name}: its last line is incomplete and left out here"


def _of_samples(run: Run) -> Iterator[str]:
    """Yield sentences about skipped updates, and about samples that could not be judged."""
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
    """Return the HTML text of a report of `runs`. All content that comes from the runs' files is escaped."""
    hidden = left_out(runs)
    charts = sections(runs, hidden)
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
        left_out=list(_left_out_lines(hidden)),
        validation=list(_validation(runs)),
        samples=sample_rows(runs),
        sampled=[_sampled(run) for run in runs if run.samples],
        checkpoints=[(run.label, run.checkpoints) for run in runs if run.checkpoints],
        configuration=configuration_rows(runs),
        several=len(runs) > 1,
        size_text=size_text,
    )


def _figures(charts: Sequence[Section]) -> Markup:
    """Return the JSON of all charts, in the order of the page; `<` is escaped, so that it cannot end the script."""
    figures = (chart.figure.to_json() for section in charts for chart in section.charts)
    return Markup(f"[{','.join(figures)}]".replace("<", "\\u003c"))


def _overview(run: Run) -> dict[str, Any]:
    """Return the content of a run's card on the page: label, path, state, facts and findings."""
    tokens, seconds = run.total("num_tokens"), run.total("step_seconds")
    sizes = [f"{name} {run.config[key]}" for name, key in SIZES.items() if run.config.get(key, 1) not in (None, 1)]
    facts = {
        "algorithm": run.algorithm or "not told",
        "model": str(run.config.get("model.path", "not told")),
        "layout": " × ".join(sizes) or ("no model parallelism" if run.config else "not told"),
        "steps": ("none" if run.last_step is None else f"{run.last_step:,}")
        + (f" of {run.planned_steps:,}" if run.planned_steps else ""),
        "tokens": f"{tokens:,.0f}",
        "time in steps": str(datetime.timedelta(seconds=round(seconds))),
        "tokens/s": f"{tokens / seconds:,.0f}" if seconds else "none",
        "checkpoints": f"{len(run.checkpoints)}"
        + (f", of step {run.checkpoints[-1].step} last" if run.checkpoints else ""),
    }
    return {"label": run.label, "path": str(run.path), "state": run.state, "facts": facts, "findings": [*findings(run)]}


def _validation(runs: Sequence[Run]) -> Iterator[tuple[str, ...]]:
    """Yield rows of the validation table: metric, run, and the metric's first, last, lowest and highest value."""
    for name, label, series in ranges(runs):
        found = list(series.finite())
        if found:
            ends = (found[0], found[-1], min(found, key=lambda p: p[1]), max(found, key=lambda p: p[1]))
            plain = name.removeprefix("validation_")
            yield (plain, label, *(f"{value:.5g} (step {step})" for step, value in ends))


@dataclass
class SampleRow:
    """A row of the table of samples: samples of the same step and prompt.

    prompt: messages before the first response.
    cells: the sample of each run, or None if the run has no such sample; in a report of one run, one or two samples.
    """

    step: int
    prompt: list[dict[str, Any]]
    cells: list[dict[str, Any] | None]


def sample_rows(runs: Sequence[Run]) -> list[SampleRow]:
    """Return the rows of the table of samples.

    In a report of one run, a row has two samples of the same step and prompt. In a report of several runs, the n-th
    samples of a step and prompt are in the same row.
    """
    rows: dict[tuple[int, str, int], SampleRow] = {}
    for column, run in enumerate(runs):
        seen = Counter[tuple[int, str]]()
        for sample in run.samples:
            prompt, content = _of_sample(sample)
            # The first requests of agents' sessions may differ. Other runs may have another dataset.
            own = sample.get("prompt") if len(runs) == 1 else None
            key = (sample["step"], json.dumps(prompt if own is None else own))
            place, seen[key] = seen[key], seen[key] + 1
            if len(runs) == 1:
                row = rows.setdefault((*key, place // 2), SampleRow(sample["step"], prompt, []))
                row.cells.append(content)
            else:
                row = rows.setdefault((*key, place), SampleRow(sample["step"], prompt, [None] * len(runs)))
                row.cells[column] = content
            for first in content["session"][:1]:
                if first[0].context == row.prompt:
                    first[0].context = []
    return sorted(rows.values(), key=lambda row: row.step)


def _of_sample(sample: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the messages of a sample before the first response, and the content of its cell."""
    is_trained = not sample.get("error") and sample.get("advantage", 0.0) is not None
    session = _session(sample.get("session"), is_trained)
    messages = [_message(message) for message in sample.get("messages") or []]
    roles = [message["role"] for message in messages]
    start = roles.index("assistant") if "assistant" in roles else len(roles)
    prompt = session[0][0].context if session else messages[:start]
    facts = [
        f"{name.replace('_', ' ')} {text}"
        for name in ("advantage", "ground_truth")
        if (text := _fact(sample.get(name)))
    ]
    return prompt, {
        "reward": _number(sample.get("reward")),
        "facts": facts,
        "parts": [f"{name} {_number(value)}" for name, value in (sample.get("rewards") or {}).items()],
        "error": sample.get("error"),
        "messages": [] if session else messages[start:],
        "session": session,
    }


@dataclass
class TurnView:
    """A request of an agent's session, and the response to it.

    facts: numbers of tokens, and how the response ended and is trained on.
    context: the messages since the turn that this one continues; all messages if it begins a conversation.
    said: pairs (kind, text) of the response: its thought, its content and its tool calls.
    is_trained: False if the response carries no loss.
    branches: other continuations of this turn than the one that follows in the list.
    """

    facts: str
    context: list[dict[str, Any]]
    said: list[tuple[str, str]]
    is_trained: bool
    branches: list[list[TurnView]] = field(default_factory=list)


def _session(turns: Any, is_trained: bool) -> list[list[TurnView]]:
    """Return the conversations of a session, each a list of turns of which each continues the one before.

    Of several continuations, the one with most turns continues the list. Branches are therefore nested at most
    log2(turns) deep.
    """
    if not isinstance(turns, list) or not all(map(_is_turn, turns)):
        return []
    children: dict[int | None, list[int]] = {}
    for number, turn in enumerate(turns):
        parent = turn.get("parent")
        children.setdefault(parent if isinstance(parent, int) and parent < number else None, []).append(number)
    sizes = [1] * len(turns)
    for number in reversed(range(len(turns))):  # children come after their parents
        sizes[number] += sum(sizes[child] for child in children.get(number, ()))

    def chain(number: int) -> list[TurnView]:
        views = []
        while True:
            views.append(_turn(number, turns[number], is_trained))
            following = children.get(number)
            if not following:
                return views
            number = max(following, key=lambda child: (sizes[child], child))
            views[-1].branches = [chain(child) for child in following if child != number]

    return [chain(root) for root in children.get(None, [])]


def _is_turn(turn: Any) -> bool:
    messages = turn.get("messages") if isinstance(turn, dict) else None
    numbers = [turn.get(name, 0) for name in ("prompt_tokens", "sampled_tokens")] if isinstance(turn, dict) else [None]
    is_whole = all(isinstance(number, int) for number in numbers) and isinstance(turn.get("row"), int | None)
    return is_whole and isinstance(messages, list) and bool(messages) and all(isinstance(m, dict) for m in messages)


def _turn(number: int, turn: Mapping[str, Any], is_trained: bool) -> TurnView:
    *context, reply = turn["messages"]
    row, rewrites = turn.get("row"), turn.get("parent") is not None and not turn.get("extends", True)
    facts = [
        f"turn {number + 1}",
        f"{turn.get('prompt_tokens', 0):,} + {turn.get('sampled_tokens', 0):,} tokens",
        *(["earlier turns rewritten"] if rewrites else []),
        "not delivered" if row is None else f"row {row + 1}",
        *([] if is_trained and row is not None else ["not trained"]),
        *(["cut off"] if not turn.get("ended", True) else []),
    ]
    said = [(kind, _shortened(text)) for kind, text in parts_of(reply)]
    return TurnView(" · ".join(facts), [_message(message) for message in context], said, is_trained and row is not None)


def _message(message: Any) -> dict[str, Any]:
    """Return role, text and thumbnails of a message."""
    message = message if isinstance(message, dict) else {"content": message}
    images: list[str] = []
    if has_images(message) and all(isinstance(part, dict) for part in message["content"]):
        paths = [part.get("image") for part in message["content"] if part.get("type") == "image"]
        images = [url for path in paths if (url := thumbnail(str(path)))]
        parts = (str(part.get("text", f"[{Path(str(part.get('image'))).name}]")) for part in message["content"])
        message = {**message, "content": "".join(parts)}
    return {"role": str(message.get("role", "")), "text": _shortened(text_of(message)), "images": images}


def _shortened(text: str) -> str:
    if len(text) <= MAX_CHARACTERS:
        return text
    return f"{text[:MAX_CHARACTERS]} … ({len(text) - MAX_CHARACTERS:,} more characters)"


def _fact(value: Any) -> str:
    """Return a number or a text as text; "" for None."""
    return "" if value is None else _number(value) if isinstance(value, int | float) else str(value)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "none"


def _sampled(run: Run) -> str:
    """Return text that says how many samples of the run are shown, and of how many steps."""
    everything = run.steps_with_samples == run.sampled_steps
    steps = f"all {run.sampled_steps:,}" if everything else f"{run.sampled_steps:,} of {run.steps_with_samples:,}"
    return f"{run.label}: {len(run.samples):,} samples, of {steps} steps that have some"


def configuration_rows(runs: Sequence[Run]) -> list[tuple[str, list[str], bool]]:
    """Return (key, value in each run, whether the values differ) for all configuration keys, differing keys first."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    rows = [(key, [_value(run, key) for run in runs]) for key in keys]
    told = [(key, values, len(set(values)) > 1) for key, values in rows]
    return sorted(told, key=lambda row: not row[2])


def _value(run: Run, key: str) -> str:
    return json.dumps(run.config[key], ensure_ascii=False) if key in run.config else "—"


COLORS = ("#4c82d8", "#e07b39", "#2aa17a", "#cf5a86", "#9273d0", "#b5902a", "#35a3bd", "#8c95a3")
DASHES = ("solid", "dash", "dashdot", "longdash", "longdashdot")
"""Line styles of a chart of several runs: each run has a color, and each metric a line style. With one run, each metric
has a color. Validation is dotted; with one run, it has the color of the metric in training."""
SYMBOLS = ("circle", "square", "diamond", "cross", "x")
"""Markers of validation sets, in order, in a chart of one run."""
MAX_POINTS = 1000
"""Maximum number of points of a curve. With more steps, the least and the greatest value of each interval are drawn."""
MAX_MARKED_STEPS = 8
"""A chart with at most this many steps marks every step."""
MAX_PHASE_POINTS = 300
"""Maximum number of points in a chart of stacked phases. With more steps, each point is the mean of an interval: the
extremes of the phases would not add up to an extreme of the step."""

GROUPS = {
    "Loss": {
        "loss": r"loss|preference_loss(_\w+)?|sft_loss|((positive|observation)_)?nll_loss",
        "balance of experts": r"moe_(aux|z)_loss",
    },
    "Rewards": {
        "reward": r"reward_mean",
        "deviation of rewards": r"reward_std",
        "rewards of pairs": r"rewards_(chosen|rejected)_mean",
        "sums of rewards": r"rewards_(desirable|undesirable)_sum",
        "margin": r"reward_margin",
        "log-probabilities": r"logprobs_(chosen|rejected)_mean",
        "accuracy": r"accuracy",
        "fraction of positive rewards": r"reward_positive_fraction",
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
        "fractions": r"truncated_fraction|failed_fraction",
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
"""Patterns of the metrics in each chart of each section. A pattern matches a metric's whole name without `validation_`
and `SET/`. The charts of all other metrics are in the section `Other`."""

CHOSEN, REJECTED = "rewards_chosen_mean", "rewards_rejected_mean"


@dataclass
class Chart:
    """A chart of the page.

    note: how the curves are thinned; "" if they are not.
    meanings: pairs (names, meaning) of the metrics.
    """

    title: str
    figure: go.Figure
    note: str = ""
    meanings: Sequence[tuple[str, str]] = ()


@dataclass
class Section:
    title: str
    charts: list[Chart] = field(default_factory=list)


def sections(runs: Sequence[Run], hidden: Container[str]) -> list[Section]:
    """Return those sections of the page that have charts; the charts cover all metrics but the hidden ones."""
    names = [name for name in dict.fromkeys(name for run in runs for name in _series(run)) if name not in hidden]
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


def left_out(runs: Sequence[Run]) -> dict[str, str]:
    """Return the metrics that no chart shows: for each, the metric of its section that has the same curves.

    The value is "" for a metric that is always 0. If a metric differs from another one in any run, it is drawn. Metrics
    of a validation set are only compared with each other.
    """
    found, first = dict[str, str](), dict[tuple[object, ...], str]()
    of_runs = [_series(run) for run in runs]
    for name in dict.fromkeys(name for series in of_runs for name in series):
        curves = [(number, series[name]) for number, series in enumerate(of_runs) if name in series]
        if not any(value for _, curve in curves for value in curve.values):
            found[name] = ""
            continue
        points = ((number, curve.steps.tobytes(), curve.values.tobytes()) for number, curve in curves)
        validated_on = name.removesuffix(_of_training(name))
        same = first.setdefault((_place(name)[0], validated_on, *points), name)
        if same != name:
            found[name] = same
    return found


def _left_out_lines(hidden: Mapping[str, str]) -> Iterator[str]:
    """Yield the sentences of the page about the metrics that `left_out` returns."""
    if zero := [name for name, same in hidden.items() if not same]:
        yield f"Always 0: {', '.join(zero)}."
    if equal := [f"{name} (as {same})" for name, same in hidden.items() if same]:
        yield f"Equal to another curve: {', '.join(equal)}."


def _place(name: str) -> tuple[str, str]:
    """Return the titles of the section and of the chart in which the metric `name` is drawn."""
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
    """Return the metrics of the run that are drawn as curves, by name.

    The seconds of phases are left out. The reward margin between chosen and rejected responses is added.
    """
    shown = {name: series for name, series in run.metrics.items() if name not in _phases(run)}
    for prefix in [name.removesuffix(CHOSEN) for name in run.metrics if name.endswith(CHOSEN)]:
        chosen, rejected = (run.metrics.get(f"{prefix}{name}") for name in (CHOSEN, REJECTED))
        if chosen and rejected and chosen.steps == rejected.steps:
            margins = array("d", np.asarray(chosen.values) - np.asarray(rejected.values))
            shown[f"{prefix}reward_margin"] = Series(chosen.steps, margins)
    return shown


def _chart(title: str, names: Sequence[str], runs: Sequence[Run]) -> Chart:
    figure, longest = go.Figure(), 0
    curves = list(dict.fromkeys(map(_of_training, names)))
    sets = list(dict.fromkeys(name.removesuffix(_of_training(name)) for name in names if _is_validation(name)))
    for number, run in enumerate(runs):
        series = _series(run)
        for place, name in ((place, name) for place, name in enumerate(names) if name in series):
            steps, values = thinned(series[name])
            longest = max(longest, len(series[name].steps) if len(steps) < len(series[name].steps) else 0)
            validation, curve = _is_validation(name), curves.index(_of_training(name))
            symbol = SYMBOLS[sets.index(name.removesuffix(curves[curve])) % len(SYMBOLS)] if validation else "circle"
            dash = "dot" if validation else DASHES[place % len(DASHES)] if len(runs) > 1 else "solid"
            color = COLORS[(number if len(runs) > 1 else curve) % len(COLORS)]
            figure.add_scatter(
                x=steps,
                y=values,
                name=html.escape(_label(run, name, names, runs)),
                mode="lines+markers" if validation or len(steps) < 20 else "lines",
                line={"width": 1.6, "dash": dash, "color": color},
                marker={"symbol": symbol},
            )
    if title == "token_mult_prob_error":
        for bound in {run.config.get("generation.max_token_mult_prob_error") for run in runs} - {None}:
            figure.add_hline(y=bound, line_dash="dash", line_width=1, annotation_text="bound")
    _set_axes(figure)
    per_point = longest // (MAX_POINTS // 2)
    thin = (
        f"{longest:,} steps: of every {per_point} or so the least and the greatest value are drawn" if longest else ""
    )
    return Chart(title, figure, thin, list(_meanings(curves)))


def _meanings(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield pairs (names, meaning) of those metrics that have a description; metrics with the same one are together."""
    described: dict[Metric, list[str]] = {}
    for name in names:
        if (metric := meaning_of(name)) is not None:
            described.setdefault(metric, []).append(name)
    for metric, fitting in described.items():
        good = f" A good run: {metric.good}." if metric.good else ""
        yield ", ".join(fitting), f"{metric.meaning}. Unit: {metric.unit}.{good}"


def _is_validation(name: str) -> bool:
    return name.startswith("validation_")


def _of_training(name: str) -> str:
    """Return the name of the training metric that a metric of validation (`validation_[SET/]NAME`) corresponds to."""
    plain = name.removeprefix("validation_")
    return plain.partition("/")[2] or plain if _is_validation(name) else name


def _label(run: Run, name: str, names: Sequence[str], runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        return name
    return run.label if len(names) == 1 else f"{run.label}: {name}"


def _set_axes(figure: go.Figure) -> None:
    """Set the axes of a chart: ticks at whole steps only, and a narrow y-axis if all values are equal.

    By default, the y-axis would span ±1, so that a constant learning rate would look like 0.
    """
    steps = np.concatenate([trace.x for trace in figure.data] or [[0]])
    if np.ptp(steps) <= MAX_MARKED_STEPS:
        figure.update_xaxes(dtick=1)
    found = np.concatenate([trace.y for trace in figure.data] or [[]])
    found = np.unique(found[np.isfinite(found)])
    if len(found) == 1 and found[0]:
        figure.update_yaxes(range=sorted([0.5 * found[0], 1.5 * found[0]]))


def thinned(series: Series) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the steps and values of a curve, thinned to at most `MAX_POINTS` points.

    If there are more steps, they are divided into intervals, and the lowest and the highest value of each interval are
    kept.
    """
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
    """Return the names of the run's metrics that are durations, in seconds, of a step or of a phase of it."""
    return [name for name in run.metrics if name.endswith("_seconds") and not name.startswith("validation_")]


def phases(run: Run, title: str) -> Chart:
    """Return a chart in which the seconds of each phase of a step are stacked."""
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
    """Yield (metric, label of the run, series) for all validation metrics of all runs."""
    for name in dict.fromkeys(name for run in runs for name in run.metrics if name.startswith("validation_")):
        yield from ((name, run.label, run.metrics[name]) for run in runs if name in run.metrics)
