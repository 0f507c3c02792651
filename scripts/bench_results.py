"""A benchmark's table: printed, checked against its bounds, kept as JSON and as a picture in docs/benchmarks/."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from make_drawings import COLORS, PADDING, text

RESULTS = Path(__file__).parent.parent / "docs" / "benchmarks"
BAR, LEFT, WIDTH = 22, 250, 360


@dataclass(frozen=True)
class Row:
    """
    ours, peer: in the table's unit. ratio: what is bounded. at_least, at_most: its bounds, if it has some.
    """

    name: str
    ours: float
    peer: float
    ratio: float
    at_least: float | None = None
    at_most: float | None = None

    @property
    def is_missed(self) -> bool:
        return (self.at_least is not None and self.ratio < self.at_least) or (
            self.at_most is not None and self.ratio > self.at_most
        )

    @property
    def bound(self) -> str:
        parts = [f"≥ {self.at_least:g}"] if self.at_least is not None else []
        return " ".join(parts + ([f"≤ {self.at_most:g}"] if self.at_most is not None else []))


def finish(name: str, title: str, columns: tuple[str, str, str], rows: Sequence[Row], keep: bool = True) -> int:
    """Print the table, write it down, and return the exit status: 1 where a bound is missed.

    Args:
        columns: what `ours`, `peer` and `ratio` are.
        keep: write JSON and SVG; not for a run that is shorter than what the documentation shows.
    """
    width = max(len(row.name) for row in rows) + 2
    print(f"\n{title}\n{'':<{width}}" + "".join(f"{column:>22}" for column in columns) + "   bound")
    for row in rows:
        values = f"{row.ours:>22,.4g}{row.peer:>22,.4g}{row.ratio:>22.2f}"
        print(f"{row.name:<{width}}{values}   {row.bound}{'  MISSED' if row.is_missed else ''}")
    if keep:
        RESULTS.mkdir(exist_ok=True)
        table = {"title": title, "columns": columns, "rows": [asdict(row) for row in rows]}
        (RESULTS / f"{name}.json").write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n")
        (RESULTS / f"{name}.svg").write_text(picture(title, columns, rows))
    return int(any(row.is_missed for row in rows))


def picture(title: str, columns: tuple[str, str, str], rows: Sequence[Row]) -> str:
    """A bar for each row's ratio, a line for its bound."""
    longest = max(max(row.ratio, row.at_least or 0, row.at_most or 0) for row in rows)
    parts = [text(16, 24, title, weight="bold"), text(16, 42, columns[2], color="#666666")]
    for number, row in enumerate(rows):
        y, bar = 58 + number * (BAR + 8), row.ratio / longest * WIDTH
        parts.append(text(LEFT - 8, y + 15, row.name, anchor="end"))
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH}" height="{BAR}" rx="2" fill="{PADDING}" opacity="0.4"/>')
        color = COLORS[4] if row.is_missed else COLORS[0]
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{bar:.1f}" height="{BAR}" rx="2" fill="{color}"/>')
        for bound in (row.at_least, row.at_most):
            if bound is not None:
                x = LEFT + bound / longest * WIDTH
                parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y - 3}" y2="{y + BAR + 3}" stroke="#222222"/>')
        parts.append(text(LEFT + WIDTH + 8, y + 15, f"{row.ratio:.2f}  {row.bound}"))
    size = f"{LEFT + WIDTH + 110} {58 + len(rows) * (BAR + 8) + 8}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-family="sans-serif" font-size="12">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#ffffff"/>', *parts, "</svg>"]) + "\n"
