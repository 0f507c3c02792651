"""Tests of a benchmark's table: bounds, floors, and what the figures depend on."""

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from importlib.metadata import version

import bench_results
import pytest
from bench_results import RESULTS, Row, kept, picture
from programs import run


@pytest.mark.parametrize(
    ("row", "missed"),
    [
        (Row("a", 5, 1, 5.0, at_least=5), False),
        (Row("a", 4.9, 1, 4.9, at_least=5), True),
        (Row("a", 1, 2, 0.5, at_most=0.6), False),
        (Row("a", 1, 1.5, 0.67, at_most=0.6), True),
        (Row("a", 1, 1, 1.0), False),
        (Row.figure("a", 199.9, "MB", at_most=200), False),
        (Row.figure("a", 200.1, "MB", at_most=200), True),
    ],
)
def test_a_missed_bound_is_said_and_fails(row, missed, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_results, "RESULTS", tmp_path / "results")
    status = bench_results.finish("name", "A title", ("ours", "peer", "ratio"), [row, Row("other", 1, 1, 1.0)])
    assert (status, "MISSED" in capsys.readouterr().out) == (int(missed), missed)
    assert json.loads((tmp_path / "results" / "name.json").read_text())["rows"][0]["ratio"] == row.ratio
    assert ET.parse(tmp_path / "results" / "name.svg").getroot().tag.endswith("svg")


@pytest.mark.parametrize(
    ("row", "status"),
    [
        (Row("a", 4, 1, 4.0, at_least=5, floor=3), 0),
        (Row("a", 2.9, 1, 2.9, at_least=5, floor=3), 1),
        (Row("a", 1.6, 1, 1.6, at_most=1.4, floor=1.7), 0),
        (Row.figure("a", 1.8, "s", at_most=1.4, floor=1.7), 1),
        (Row("a", 1.16, 1, 1.16, at_least=0.9, at_most=1.1, floor=0.85), 0),
        (Row("a", 1.2, 1, 1.2, at_least=0.9, at_most=1.1, floor=0.85), 1),
        (Row("a", 0.8, 1, 0.8, at_least=0.9, at_most=1.1, floor=0.85), 1),
    ],
)
def test_a_missed_bound_with_a_floor_fails_only_below_the_floor(row, status, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_results, "RESULTS", tmp_path)
    assert bench_results.finish("name", "A title", ("ours", "peer", "ratio"), [row]) == status
    assert "MISSED" in capsys.readouterr().out


@pytest.mark.parametrize("bounds", [{"at_least": 5}, {"at_most": 5}, {"at_most": 5, "floor": 6}])
def test_nan_misses_every_bound(bounds):
    row = Row("a", 1, 1, float("nan"), **bounds)
    assert row.is_missed and row.fails


def test_a_table_says_what_its_figures_depend_on(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_results, "RESULTS", tmp_path)
    bench_results.finish("name", "A title", ("ours", "peer", "ratio"), [Row("a", 1, 1, 1.0)])
    run = json.loads((tmp_path / "name.json").read_text())["run"]
    assert set(run) == {"date", "commit", "machine", "versions"}
    assert f"torch {version('torch')}" in run["versions"] and f"{os.cpu_count()} processors" in run["machine"]
    assert all(part in (tmp_path / "name.svg").read_text() for part in run.values())


def test_a_machine_without_git_keeps_its_figures(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert bench_results.this_run()["commit"] == "unknown"


def test_a_figure_is_shown_in_its_own_unit_and_scale(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_results, "RESULTS", tmp_path)
    rows = [Row("faster", 6, 3, 2.0, at_least=1.5), Row.figure("memory", 41.27, "MB", at_most=200)]
    bench_results.finish("name", "A title", ("ours", "peer", "ratio"), rows)
    faster, memory = capsys.readouterr().out.splitlines()[-2:]
    assert faster.split() == ["faster", "6", "3", "2.00", "≥", "1.5"]
    assert memory.split() == ["memory", "41.27", "MB", "≤", "200"]
    svg = (tmp_path / "name.svg").read_text()
    widths = [float(width) for width in re.findall(r'<rect x="\d+" y="\d+" width="([\d.]+)"', svg)]
    assert "41.27 MB  ≤ 200" in svg
    assert widths == [360, 360, 360, round(360 * 41.27 / 200, 1)]  # each row's ground, and its bar


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_kept_tables_hold_their_floors_and_are_shown(path):
    title, run, columns, rows = kept(path)
    assert not [row.name for row in rows if row.fails]
    assert run["date"] and run["commit"] and run["machine"]
    assert path.with_suffix(".svg").read_text() == picture(title, run, columns, rows), (
        "run scripts/benchmarks/bench_results.py"
    )
    shown = re.findall(r"!\[[^\]]+\]\(benchmarks/(\w+)\.svg\)", (RESULTS.parent / "benchmarks.md").read_text())
    assert path.stem in shown


def test_the_tables_of_bfloat16_are_those_of_its_run():
    cells = {}
    for row in kept(RESULTS / "bf16.json")[3]:
        kind, case = row.name.rsplit(":", 1)[0].split(", ", 1)
        is_sampler = kind.startswith("Sampler")
        shown = f"{row.ours:.2g} ({row.shown})" if is_sampler else row.shown
        cells.setdefault((is_sampler, case), []).append(shown)
    lines = (RESULTS.parent / "benchmarks.md").read_text().splitlines()
    for (_, case), shown in cells.items():
        assert f"| {case} | {' | '.join(shown)} |" in lines


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "sizes", "row"),
    [
        ("benchmarks/bench_async.py", "--steps 2 --hidden 64 --layers 1", "rollouts one step ahead "),
        (
            "benchmarks/bench_generation.py",
            "--hidden 64 --layers 1 --prompts 8 --new-tokens 12 --repetitions 1",
            "groups of 8, ",
        ),
        ("benchmarks/bench_answers.py", "--responses 4 --tokens 100", "CPU seconds of the trainer"),
        ("benchmarks/bench_images.py", "--rows 4 --repetitions 1", "share of a tower: trained"),
    ],
)
def test_benchmarks_run_on_small_sizes(script, sizes, row):
    """Small sizes may miss the bounds (exit status 1), and are not kept."""
    done = run(script, *sizes.split(), check=False)
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr_text, done.stderr_text
    assert any(line.startswith(row) for line in done.stdout_text.splitlines())


def test_every_picture_has_its_table():
    assert {path.stem for path in RESULTS.glob("*.svg")} == {path.stem for path in RESULTS.glob("*.json")}


def test_benchmarks_beside_trl_start_without_this_package():
    """TRL's own environment runs their other side."""
    code = "import sys; sys.modules['mcore_rl'] = None; import bench_bf16, bench_dpo, bench_grpo"
    scripts = RESULTS.parents[1] / "scripts" / "benchmarks"
    done = subprocess.run([sys.executable, "-c", code], cwd=scripts, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
