"""Table of a benchmark: print it, check it, and write it as JSON and as a picture in docs/benchmarks/.

    python scripts/benchmarks/bench_results.py

This command redraws the pictures from the JSON files.

A row may have a bound and a floor. The bound is what was expected before the first measurement. It stays as it is,
whether it is met or missed. The floor guards against regressions: a benchmark fails below it. Without a floor it fails
if the bound is missed.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

RESULTS = Path(__file__).parent.parent.parent / "docs" / "benchmarks"
BAR, LEFT, WIDTH = 22, 250, 360
LETTER = 6.5  # average width of a letter of a name


@dataclass(frozen=True)
class Row:
    """A row of a benchmark's table.

    ours, peer: values in the unit of the table.
    ratio: value that is checked.
    at_least, at_most: bounds of the ratio; None without a bound.
    floor: the worst ratio with which the benchmark succeeds; None if it must meet the bounds. With both bounds, the
        ratio must be between `floor` and 1 / `floor`.

    `figure` returns a row without a comparison: ratio is then the figure itself, in the unit of the row.
    """

    name: str
    ours: float | None
    peer: float | None
    ratio: float
    at_least: float | None = None
    at_most: float | None = None
    unit: str = ""
    floor: float | None = None

    @classmethod
    def figure(
        cls,
        name: str,
        value: float,
        unit: str,
        at_least: float | None = None,
        at_most: float | None = None,
        floor: float | None = None,
    ) -> Row:
        return cls(name, None, None, value, at_least, at_most, unit, floor)

    @property
    def shown(self) -> str:
        return f"{self.ratio:,.4g} {self.unit}" if self.unit else f"{self.ratio:.2f}"

    @property
    def is_missed(self) -> bool:
        return (self.at_least is not None and not self.ratio >= self.at_least) or (
            self.at_most is not None and not self.ratio <= self.at_most
        )  # NaN misses each bound

    @property
    def fails(self) -> bool:
        """Whether the benchmark fails: the ratio is worse than the floor or, without a floor, misses a bound."""
        if self.floor is None:
            return self.is_missed
        if self.at_least is not None and self.at_most is not None:
            return not self.floor <= self.ratio <= 1 / self.floor
        return not (self.ratio >= self.floor if self.at_least is not None else self.ratio <= self.floor)

    @property
    def bound(self) -> str:
        parts = [f"≥ {self.at_least:g}"] if self.at_least is not None else []
        parts += [f"≤ {self.at_most:g}"] if self.at_most is not None else []
        parts += [f"(floor {self.floor:g})"] if self.floor is not None else []
        return " ".join(parts)


def finish(
    name: str,
    title: str,
    columns: tuple[str, str, str],
    rows: Sequence[Row],
    keep: bool = True,
    directory: Path | None = None,
) -> int:
    """Print the table, write it to files, and return the exit status: 1 if a row fails.

    Args:
        columns: titles of `ours`, `peer` and `ratio`.
        keep: whether to write JSON and SVG; False for runs that are shorter than those in the documentation.
        directory: directory of the files; by default, that of the documentation.
    """
    width = max(len(row.name) for row in rows) + 2
    print(f"\n{title}\n{'':<{width}}" + "".join(f"{column:>22}" for column in columns) + "   bound")
    for row in rows:
        values = "".join(f"{'' if value is None else f'{value:,.4g}':>22}" for value in (row.ours, row.peer))
        print(f"{row.name:<{width}}{values}{row.shown:>22}   {row.bound}{'  MISSED' if row.is_missed else ''}")
    if keep:
        directory = directory or RESULTS
        directory.mkdir(parents=True, exist_ok=True)
        run = this_run()
        table = {"title": title, "run": run, "columns": columns, "rows": [asdict(row) for row in rows]}
        (directory / f"{name}.json").write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n")
        (directory / f"{name}.svg").write_text(picture(title, run, columns, rows))
    return int(any(row.fails for row in rows))


PACKAGES = ("torch", "megatron-core", "transformers", "transformer-engine", "trl")


def this_run() -> dict[str, str]:
    """Return the date, commit, machine, processors and versions, on which the figures depend."""
    commit = _git("describe", "--always")
    if commit and _git("status", "--porcelain", "--untracked-files=no", ":/", ":(top,exclude)docs/benchmarks"):
        commit += "-dirty"  # benchmarks that ran before have written their tables
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "date": date.today().isoformat(),
        "commit": commit or "unknown",
        "machine": f"{machine()}, {os.cpu_count()} processors",
        "versions": ", ".join(f"{name} {number}" for name, number in versions.items()),
    }


def _git(*arguments: str) -> str:
    """Return what git prints; "" without git or outside a repository."""
    try:
        asked = subprocess.run(["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:
        return ""
    return asked.stdout.strip()


def machine() -> str:
    """Return the GPU's name if torch sees one, otherwise the processor's."""
    import torch

    return str(torch.cuda.get_device_name()) if torch.cuda.is_available() else processor()


def processor() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def picture(title: str, run: dict[str, str], columns: Sequence[str], rows: Sequence[Row]) -> str:
    """Draw a bar for each row's ratio and a line for its bound; rows of the same unit share a scale."""
    from make_drawings import COLORS, PADDING, text  # imports this package, which TRL's environment does not have

    longest: dict[str, float] = {}
    for row in rows:
        of_row = row.ratio, row.at_least or 0, row.at_most or 0, row.floor or 0
        longest[row.unit] = max(longest.get(row.unit, 0), *of_row)
    left = max(LEFT, 24 + int(LETTER * max(len(row.name) for row in rows)))
    parts = [text(16, 24, title, weight="bold"), text(16, 42, columns[2], color="#666666")]
    for number, row in enumerate(rows):
        y, scale = 58 + number * (BAR + 8), WIDTH / (longest[row.unit] or 1)
        parts.append(text(left - 8, y + 15, row.name, anchor="end"))
        parts.append(f'<rect x="{left}" y="{y}" width="{WIDTH}" height="{BAR}" rx="2" fill="{PADDING}" opacity="0.4"/>')
        color = COLORS[4] if row.is_missed else COLORS[0]
        bar = f'width="{max(row.ratio, 0) * scale:.1f}" height="{BAR}"'
        parts.append(f'<rect x="{left}" y="{y}" {bar} rx="2" fill="{color}"/>')
        for bound in (row.at_least, row.at_most):
            if bound is not None:
                x = left + bound * scale
                parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y - 3}" y2="{y + BAR + 3}" stroke="#222222"/>')
        parts.append(text(left + WIDTH + 8, y + 15, f"{row.shown}  {row.bound}"))
    bottom = 58 + len(rows) * (BAR + 8)
    told = ", ".join(run.values())
    parts.append(text(16, bottom + 12, told, color="#666666"))
    size = f"{max(left + WIDTH + 190, 32 + int(LETTER * len(told)))} {bottom + 24}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-family="sans-serif" font-size="12">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#ffffff"/>', *parts, "</svg>"]) + "\n"


def kept(path: Path) -> tuple[str, dict[str, str], list[str], list[Row]]:
    """Read a table's JSON file; return its title, its run (see `this_run`), the columns' titles, and the rows."""
    table = json.loads(path.read_text())
    return table["title"], table["run"], table["columns"], [Row(**row) for row in table["rows"]]


if __name__ == "__main__":
    for path in RESULTS.glob("*.json"):
        path.with_suffix(".svg").write_text(picture(*kept(path)))
