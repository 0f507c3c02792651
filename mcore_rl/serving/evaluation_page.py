"""The page of an evaluation: metrics with intervals, by source, and all samples, in one HTML file."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

MOST_SHOWN = 2000
"""Maximum number of samples on the page; samples.jsonl has all."""

SCRIPT = """
const search = document.getElementById("search"), rows = [...document.querySelectorAll("#rows .row")];
search.addEventListener("input", () => {
  const wanted = search.value.toLowerCase();
  for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
});
"""
STYLE = """
.bar { position: relative; display: inline-block; width: 12rem; height: 0.9rem; vertical-align: middle;
  border-bottom: 1px solid var(--line); }
.bar i { position: absolute; top: 0.35rem; height: 0.2rem; background: var(--accent); opacity: 0.5; }
.bar b { position: absolute; top: 0; width: 0.2rem; height: 0.9rem; background: var(--accent); }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0.2rem 0; font: inherit; }
#rows .row { display: block; }
"""


def evaluation_page(result: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> str:
    """Return the page.

    Args:
        result: content of eval.json.
        entries: all samples, in order.
    """
    name, metrics = html.escape(str(result["model"])), result["metrics"]
    facts = "".join(
        f"<dt>{html.escape(key)}</dt><dd>{html.escape(str(value))}</dd>" for key, value in result["settings"].items()
    )
    css = files("mcore_rl.report").joinpath("page.css").read_text()
    shown = "".join(map(_row, entries[:MOST_SHOWN]))
    more = f"<p class='quiet'>{MOST_SHOWN} of {len(entries)} samples</p>" if len(entries) > MOST_SHOWN else ""
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>Evaluation of {name}</title><style>{css}{STYLE}</style></head><body>"
        f"<header><h1>Evaluation of {name}</h1></header><main>"
        f"<div class='card'><dl>{facts}</dl></div>"
        f"<h2>Rewards</h2>{_intervals(metrics, result.get('baseline'))}"
        f"<h2>All metrics</h2>{_metrics(metrics)}"
        f"<h2>Samples</h2><input id='search' type='search' placeholder='Search samples' aria-label='Search samples'>"
        f"{more}<div id='rows'>{shown}</div></main><script>{SCRIPT}</script></body></html>\n"
    )


def _intervals(metrics: Mapping[str, Any], baseline: Mapping[str, Any] | None) -> str:
    """Return a table of means with their confidence intervals."""
    found = {name.removesuffix("_interval"): one for name, one in metrics.items() if name.endswith("_interval")}
    if baseline is not None:
        found[f"difference from {baseline['model']}"] = baseline["difference"]
    ends = [value for one in found.values() for value in one.values() if value is not None]
    low, high = min([0.0, *ends]), max([1.0, *ends])
    rows = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{_number(one['mean'])}</td>"
        f"<td>{_number(one['low'])} to {_number(one['high'])}</td><td>{_bar(one, low, high)}</td></tr>"
        for name, one in found.items()
    )
    head = "<thead><tr><th></th><th>mean</th><th>95 % interval</th><th></th></tr></thead>"
    return f"<div class='card scroll'><table>{head}<tbody>{rows}</tbody></table></div>"


def _bar(one: Mapping[str, float | None], low: float, high: float) -> str:
    mean, first, last = one["mean"], one["low"], one["high"]
    if mean is None:
        return ""

    def place(value: float) -> str:
        return f"{100 * (value - low) / (high - low):.2f}%"

    width = ""
    if first is not None and last is not None:
        width = f"<i style='left:{place(first)};width:calc({place(last)} - {place(first)})'></i>"
    return f"<span class='bar' title='from {low:g} to {high:g}'>{width}<b style='left:{place(mean)}'></b></span>"


def _metrics(metrics: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{_number(value)}</td></tr>"
        for name, value in metrics.items()
        if not name.endswith("_interval")
    )
    return f"<div class='card scroll'><table><tbody>{rows}</tbody></table></div>"


def _row(entry: Mapping[str, Any]) -> str:
    judged = "not judged" if entry["reward"] is None else f"reward {_number(entry['reward'])}"
    source = f" · {html.escape(entry['source'])}" if entry["source"] else ""
    error = f"<p class='error'>{html.escape(entry['error'])}</p>" if entry["error"] else ""
    length = f"{entry['response_length']} tokens{', truncated' if entry['truncated'] else ''}"
    messages = "".join(
        f"<p class='role'>{html.escape(str(message.get('role')))}</p><pre>{html.escape(_text(message))}</pre>"
        for message in entry["messages"]
    )
    return (
        f"<div class='row'><p><span class='reward'>{judged}</span> <span class='quiet'>prompt {entry['prompt']}, "
        f"sample {entry['sample']}{source} · {length}</span></p>{error}{messages}</div>"
    )


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else str(content or "")


def _number(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else html.escape(str(value))
