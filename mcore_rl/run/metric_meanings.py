"""The meaning of each metric that a run writes, from metric_meanings.yaml; the report and docs/metrics.md show it."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

import yaml


@dataclass(frozen=True)
class Metric:
    """One metric, or several metrics with the same meaning.

    names: names of the metrics. A word in capitals stands for any text.
    unit: unit of the values.
    meaning: what is measured, with its formula.
    good: values of a good run; "" if the values do not tell.
    """

    names: tuple[str, ...]
    unit: str
    meaning: str
    good: str

    def fits(self, name: str) -> bool:
        """Return whether `name` is one of the names."""
        return any(re.fullmatch(re.sub(r"[A-Z]+", r"\\w+", re.escape(own)), name) for own in self.names)


@functools.cache
def metrics() -> dict[str, list[Metric]]:
    """Return the descriptions of all metrics, by the title of their group."""
    groups = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return {
        title: [Metric(tuple(one["names"].split()), one["unit"], one["meaning"], one.get("good", "")) for one in group]
        for title, group in groups.items()
    }


def meaning_of(name: str) -> Metric | None:
    """Return the description of a metric; None if no description fits.

    The metric may be of a validation set (`validation_NAME`, `validation_SET/NAME`) or of a source of the data
    (`SOURCE/NAME`).
    """
    parts = name.removeprefix("validation_").split("/")
    candidates = ["/".join(parts[start:]) for start in range(len(parts))]
    described = [metric for group in metrics().values() for metric in group]
    return next((metric for own in candidates for metric in described if metric.fits(own)), None)
