"""The results of `mcore-rl verify`: one JSON file, and one page that can be sent to others."""

from __future__ import annotations

import contextlib
import getpass
import html
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mcore_rl
from mcore_rl.utils.console import counted, size_text

STYLE = Path(__file__).parent / "page.css"
SHORTEST_NAME = 3
_ADDRESS = re.compile(r"\b(?!127\.0\.0\.1\b)\d{1,3}(?:\.\d{1,3}){3}\b")


class Anonymous:
    """Removes names of hosts and users, addresses and paths of this machine from texts.

    Args:
        output: the output directory, which is written as OUTPUT.
        hosts: names of the nodes' hosts, in the order of the nodes.
    """

    def __init__(self, output: Path, hosts: Sequence[str]) -> None:
        paths = {
            str(output): "OUTPUT",
            str(Path(mcore_rl.__file__).parent): "mcore_rl",
            sys.prefix: "PYTHON",
            sys.base_prefix: "PYTHON",
            str(Path.cwd()): ".",
            str(Path.home()): "~",
        }
        self._paths = {path: name for path, name in paths.items() if len(path) > 1}
        self._names = [(host, f"node{number}") for number, host in enumerate(hosts)]
        with contextlib.suppress(OSError, KeyError):  # a container may have no name for its user
            self._names.append((getpass.getuser(), "USER"))

    def text(self, text: str) -> str:
        """Return `text` without these names, addresses and paths."""
        for path, name in sorted(self._paths.items(), key=lambda item: -len(item[0])):
            text = text.replace(path, name)
        for own, name in self._names:
            if len(own) >= SHORTEST_NAME:
                text = re.sub(rf"(?<![\w-]){re.escape(own)}(?![\w-])", name, text)
        return _ADDRESS.sub("ADDRESS", text)

    def command(self, words: Sequence[str]) -> str:
        """Return a command line in which each absolute path is reduced to its last part."""
        return " ".join(Path(word).name if word.startswith("/") else word for word in words)

    def cleaned(self, value: Any) -> Any:
        """Return a JSON value without these names in its texts and keys; numbers that are not finite become texts."""
        if isinstance(value, Mapping):
            return {self.text(str(key)): self.cleaned(part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [self.cleaned(part) for part in value]
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        return self.text(value) if isinstance(value, str) else value


def write_page(directory: Path, whole: Mapping[str, Any]) -> None:
    """Write `verify.json` and `verify.html` to `directory`. A reader never sees half of a file.

    Args:
        whole: the results, without names of this machine.
    """
    texts = {"verify.json": json.dumps(whole, indent=1, ensure_ascii=False) + "\n", "verify.html": page(whole)}
    for name, text in texts.items():
        partial = directory / f"{name}.partial"
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")
        partial.replace(directory / name)


def page(whole: Mapping[str, Any]) -> str:
    """Return the page of a check as HTML, without scripts and references to other files."""
    parts = whole["parts"]
    right = [part for part in parts if part["verdict"] in ("passed", "left out")]
    devices = sorted({gpu for node in whole["nodes"] for gpu in node["gpus"]}) or ["CPU"]
    versions = ", ".join(f"{name} {value}" for name, value in whole["nodes"][0]["versions"].items())
    described = {
        "command": whole["command"],
        "devices": f"{', '.join(devices)}; {whole['processes']} processes on {counted(len(whole['nodes']), 'node')}",
        "backend": whole["backend"],
        "versions": versions,
        "time": f"{whole['seconds']:.0f} s",
    }
    overview = [[part["part"], _verdict(part["verdict"]), f"{part['seconds']:.0f}", part["figure"]] for part in parts]
    body = [
        f"<header><h1>mcore-rl verify: {len(right)} of {len(parts)} parts passed</h1></header><main>",
        '<div class="card"><dl>',
        *(f"<dt>{_shown(name)}</dt><dd>{_shown(value)}</dd>" for name, value in described.items()),
        "</dl></div>",
        "<h2>Parts</h2>",
        _table(["part", "verdict", "seconds", "figures"], overview),
        *_details(parts),
        "<h2>Commands</h2>",
        _table(
            ["name", "end", "seconds", "command"],
            [[one["name"], one["reason"] or "ended well", f"{one['seconds']:.0f}", one["command"]]
             for one in whole["launches"]],
        ),
        *(f"<h2>End of {_shown(name)}.log</h2><pre>{_shown(chr(10).join(lines))}</pre>"
          for name, lines in whole["ends_of_logs"].items()),
        "</main>",
    ]  # fmt: skip
    more = "pre { overflow-x: auto; } th, td { text-align: left; padding: 0.2rem 0.8rem; vertical-align: top; }"
    head = f'<meta charset="utf-8"><title>mcore-rl verify</title><style>{STYLE.read_text()}{more}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(body)}</body></html>\n'


class Markup(str):
    """Text that is already HTML."""


def _verdict(verdict: str) -> Markup:
    kind = "good" if verdict == "passed" else "warm" if verdict == "left out" else "bad"
    return Markup(f'<strong style="color: var(--{kind})">{_shown(verdict)}</strong>')


def _shown(value: Any) -> str:
    return value if isinstance(value, Markup) else html.escape(str(value))


def _table(titles: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    head = "".join(f"<th>{_shown(title)}</th>" for title in titles)
    lines = "".join("<tr>" + "".join(f"<td>{_shown(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def _details(parts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the tables of the parts that have more figures than the overview shows."""
    found = {part["part"]: part["figures"] for part in parts if part["figures"]}
    shown = []
    if rows := found.get("collectives", {}).get("rows"):
        values = [[row["collective"], f"{row['bytes'] / 2**20:g}", "yes" if row["right"] else "NO",
                   f"{1e3 * row['seconds']:.3g}", f"{row['gb_per_second']:.3g}"] for row in rows]  # fmt: skip
        titles = ["collective", "MiB", "right values", "milliseconds", "GB/s of a link"]
        shown += ["<h2>Collectives</h2>", _table(titles, values)]
    if of_layouts := found.get("layouts", {}).get("rows"):
        titles = [
            "layout",
            "loss",
            "scores",
            "gradients",
            "weights",
            "bfloat16: scores",
            "gradients",
            "weights",
            "agrees",
        ]
        told = (
            "Float32: relative difference from one process. Bfloat16: distance from one process in float32, as a "
            "multiple of the distance of one process in bfloat16."
        )
        layouts = [_layout_row(name, row) for name, row in of_layouts.items()]
        shown += ["<h2>Layouts</h2>", f'<p class="quiet">{told}</p>', _table(titles, layouts)]
    if (speed := found.get("speed")) and "simulated" in speed:
        shown += ["<h2>Speed and memory</h2>", _table(["", "measured", "simulated"], _speed_rows(speed))]
    if steps := found.get("grpo", {}).get("steps"):
        names = ["step", "loss", "reward_mean", "grad_norm", "generation_seconds", "training_seconds", "step_seconds"]
        values = [[_number(step.get(name, "")) for name in names] for step in steps]
        shown += ["<h2>GRPO</h2>", _table([name.replace("_", " ") for name in names], values)]
    return shown


def _layout_row(name: str, row: Mapping[str, Any]) -> list[str]:
    if "error" in row:
        return [name, *[""] * 7, row["error"]]
    exact, rounded = row["float32"], row["bfloat16"]
    return [
        name,
        *(f"{exact[kind]:.1e}" for kind in ("loss", "scores", "gradients", "weights")),
        *(f"{rounded[f'{kind}_ratio']:.2f}" for kind in ("scores", "gradients", "weights")),
        "yes" if row["right"] else "NO",
    ]


def _speed_rows(speed: Mapping[str, Any]) -> list[list[str]]:
    simulated = speed["simulated"]
    seconds = simulated["seconds"]
    return [
        ["seconds per step", f"{speed['seconds']:.3g}", f"{seconds:.3g}" if seconds else "not for this device"],
        [
            "tokens per second",
            f"{speed['tokens_per_second']:,.0f}",
            f"{speed['tokens'] / seconds:,.0f}" if seconds else "",
        ],
        ["peak memory of a rank", size_text(speed["peak_bytes"]), size_text(simulated["peak_bytes"])],
    ]


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
