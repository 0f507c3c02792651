"""A benchmark that misses a bound says so and fails."""

import json
import xml.etree.ElementTree as ET

import bench_results
import pytest
from bench_results import Row


@pytest.mark.parametrize(
    ("row", "missed"),
    [
        (Row("a", 5, 1, 5.0, at_least=5), False),
        (Row("a", 4.9, 1, 4.9, at_least=5), True),
        (Row("a", 1, 2, 0.5, at_most=0.6), False),
        (Row("a", 1, 1.5, 0.67, at_most=0.6), True),
        (Row("a", 1, 1, 1.0), False),
    ],
)
def test_bounds(row, missed, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_results, "RESULTS", tmp_path / "results")
    status = bench_results.finish("name", "A title", ("ours", "peer", "ratio"), [row, Row("other", 1, 1, 1.0)])
    assert (status, "MISSED" in capsys.readouterr().out) == (int(missed), missed)
    assert json.loads((tmp_path / "results" / "name.json").read_text())["rows"][0]["ratio"] == row.ratio
    assert ET.parse(tmp_path / "results" / "name.svg").getroot().tag.endswith("svg")
