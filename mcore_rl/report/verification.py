"""The results of `mcore-rl verify`: one JSON file, and one page that can be sent to others."""

from __future__ import annotations

import contextlib
import getpass
import html
import ipaddress
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
OPEN = ("left out", "no time")
"""Verdicts on parts that neither passed nor failed."""
SHORTEST_NAME = 3
_ADDRESS = re.compile(r"\b(?!127\.0\.0\.1\b)\d{1,3}(?:\.\d{1,3}){3}\b")
_IPV6 = re.compile(r"(?<![\w:.])[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){2,7}(?:(?:\.\d{1,3}){3})?(?![\w:])")
_OPTION = re.compile(
    r"(--(?:rdzv[-_]endpoint|master[-_]addr|local[-_]addr)[ =])(?!localhost\b|127\.0\.0\.1\b)(?:\[[^\]\s]*\]|[^\s:]+)"
)
"""An option of torchrun whose value is a host, without its port."""
_NAME = r"[^\s/:;,=()<>\[\]{}'\"]"
_HOME = re.compile(rf"(?<![\w.~])/(?:home|Users)/{_NAME}+")
_PATH = re.compile(rf"(?<![\w.~])/(?:{_NAME}+/)+({_NAME}*)")


class Anonymous:
    """Removes names of hosts and users, addresses and paths of this machine from texts.

    Args:
        output: the output directory, which is written as OUTPUT.
        hosts: names of the nodes' hosts, in the order of the nodes.
        addresses: other names of hosts, such as that of the rendezvous.
    """

    def __init__(self, output: Path, hosts: Sequence[str], addresses: Sequence[str] = ()) -> None:
        paths = {
            str(output): "OUTPUT",
            str(Path(mcore_rl.__file__).parent): "mcore_rl",
            sys.prefix: "PYTHON",
            sys.base_prefix: "PYTHON",
            str(Path.cwd()): ".",
            str(Path.home()): "~",
        }
        self._paths = {path: name for path, name in paths.items() if len(path) > 1}
        self._names, domains = [], set[str]()
        known = [
            *((host, f"node{number}") for number, host in enumerate(hosts)),
            *((one, "ADDRESS") for one in addresses),
        ]
        for host, name in known:
            if host == "localhost" or is_ip_address(host):
                continue
            short, _, domain = host.partition(".")
            # The short name may be followed by a domain that the host itself does not know.
            self._names.append((rf"{re.escape(short)}(?:\.[A-Za-z][\w-]*)*", short, name))
            domains.update([domain] if "." in domain else [])
        self._names += [(rf"(?:[\w-]+\.)*{re.escape(domain)}", domain, "ADDRESS") for domain in sorted(domains)]
        with contextlib.suppress(OSError, KeyError):  # a container may have no name for its user
            user = getpass.getuser()
            self._names.append((re.escape(user), user, "USER"))

    def text(self, text: str) -> str:
        """Return `text` without these names and addresses. Of a path outside known directories, the last part stays."""
        for path, name in sorted(self._paths.items(), key=lambda item: -len(item[0])):
            text = re.sub(rf"(?<![\w.~-]){re.escape(path)}(?![\w-]|\.\w)", name, text)
        text = _PATH.sub(r"…/\1", _HOME.sub("~", text))
        text = _OPTION.sub(r"\1ADDRESS", _IPV6.sub(_without_ipv6, text))
        for pattern, own, name in self._names:
            if len(own) >= SHORTEST_NAME:
                text = re.sub(rf"(?<![\w-]){pattern}(?![\w-])", name, text)
        return _ADDRESS.sub("ADDRESS", text)

    def command(self, words: Sequence[str]) -> str:
        """Return a command line without these names, in which each absolute path is reduced to its last part."""
        return self.text(
            " ".join(_PATH.sub(r"\1", Path(word).name if word.startswith("/") else word) for word in words)
        )

    def cleaned(self, value: Any) -> Any:
        """Return a JSON value without these names in its texts; numbers that are not finite become texts.

        Keys stay: they are names that this package chooses.
        """
        if isinstance(value, Mapping):
            return {str(key): self.cleaned(part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [self.cleaned(part) for part in value]
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        return self.text(value) if isinstance(value, str) else value


def is_ip_address(text: str) -> bool:
    """Return whether `text` is an address of IPv4 or IPv6."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _without_ipv6(found: re.Match[str]) -> str:
    """Return ADDRESS for an IPv6 address of a machine; times and C++ names look alike, and stay."""
    if not is_ip_address(found[0]):
        return found[0]
    address = ipaddress.ip_address(found[0])
    return found[0] if address.is_loopback or address.is_unspecified else "ADDRESS"


def write_results(directory: Path, whole: Mapping[str, Any]) -> str:
    """Write `verify.json`, then `verify.html` to `directory`. A reader never sees half of a file.

    Args:
        whole: the results, without names of this machine.

    Returns:
        Why the page cannot be written; "" if it has been written.
    """
    _replace(directory / "verify.json", json.dumps(whole, indent=1, ensure_ascii=False) + "\n")
    try:
        _replace(directory / "verify.html", page(whole))
    except Exception as error:  # the figures of all parts are worth more than their page
        return f"{type(error).__name__}: {error}"
    return ""


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8", errors="backslashreplace")
    partial.replace(path)


def page(whole: Mapping[str, Any]) -> str:
    """Return the page of a check as HTML, without scripts and references to other files."""
    parts = whole["parts"]
    verdicts = [part["verdict"] for part in parts]
    others = [f", {number} {verdict}" for verdict in OPEN if (number := verdicts.count(verdict))]
    counts = f"{verdicts.count('passed')} of {len(parts)} parts passed" + "".join(others)
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
        f"<header><h1>mcore-rl verify: {counts}</h1></header><main>",
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
    kind = "good" if verdict == "passed" else "warm" if verdict in OPEN else "bad"
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
                   _number(row["seconds"], ".3g", 1e3), _number(row["gb_per_second"], ".3g")]
                  for row in rows]  # fmt: skip
        titles = ["collective", "MiB", "right values", "milliseconds", "GB/s of a link"]
        shown += ["<h2>Collectives</h2>", _table(titles, values)]
    if of_layouts := found.get("layouts", {}).get("rows"):
        titles = [
            "layout",
            "loss",
            "scores",
            "gradients",
            "weights",
            "bfloat16: worst quantity",
            "times one process",
            "at most",
            "agrees",
        ]
        told = (
            "Float32: relative difference from one process. Bfloat16: the quantity whose distance from one process in "
            "float32 is largest, as a multiple of the distance of one process in bfloat16, and its limit."
        )
        layouts = [_layout_row(name, row) for name, row in of_layouts.items()]
        shown += ["<h2>Layouts</h2>", f'<p class="quiet">{told}</p>', _table(titles, layouts)]
    if (speed := found.get("speed")) and "simulated" in speed:
        shown += ["<h2>Speed and memory</h2>", _table(["", "measured", "simulated"], _speed_rows(speed))]
    if steps := found.get("grpo", {}).get("steps"):
        names = ["step", "loss", "reward_mean", "grad_norm", "generation_seconds", "training_seconds", "step_seconds"]
        values = [[_number(step.get(name, ""), ".4g") for name in names] for step in steps]
        shown += ["<h2>GRPO</h2>", _table([name.replace("_", " ") for name in names], values)]
    return shown


def _layout_row(name: str, row: Mapping[str, Any]) -> list[str]:
    if "error" in row:
        return [name, *[""] * 7, row["error"]]
    exact, rounded = row["float32"], row["bfloat16"]
    return [
        name,
        *(_number(exact[kind], ".1e") for kind in ("loss", "scores", "gradients", "weights")),
        rounded["worst_quantity"],
        *(_number(rounded[kind], ".2f") for kind in ("ratio", "ratio_limit")),
        "yes" if row["right"] else "NO",
    ]


def _speed_rows(speed: Mapping[str, Any]) -> list[list[str]]:
    simulated = speed["simulated"]
    seconds, tokens = simulated["seconds"], speed["tokens"]
    per_second = tokens / seconds if _is_number(seconds) and seconds else ""
    peaks = [
        size_text(peak) if _is_number(peak) else str(peak) for peak in (speed["peak_bytes"], simulated["peak_bytes"])
    ]
    return [
        ["seconds per step", _number(speed["seconds"], ".3g"), _number(seconds or "not for this device", ".3g")],
        ["tokens per second", _number(speed["tokens_per_second"], ",.0f"), _number(per_second, ",.0f")],
        ["peak memory of a rank", *peaks],
    ]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _number(value: Any, form: str, factor: float = 1) -> str:
    """Return a number in the format `form`. `Anonymous.cleaned` has made a text of a number that is not finite."""
    return f"{factor * value:{form}}" if _is_number(value) else str(value)
