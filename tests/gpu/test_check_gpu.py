"""Tests of `make gpu`: each part has a result, is not run twice, and ends under all circumstances."""

import json
import os
import re
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import check_gpu
import psutil
import pytest
from check_gpu import NOT_ALL, PARTS, Part, run_all
from programs import ROOT

HERE = {"device": "none", "code": "abc"}


def options(**changes):
    return Namespace(**{"again": False, "seconds": 100, "rehearse": False, **changes})


def part(name, program):
    return Part(name, ["-c", program], ["-c", program])


def test_what_ended_well_is_not_run_again(tmp_path, capsys):
    counted = f"open({str(tmp_path / 'runs')!r}, 'a').write('x'); print('a figure')"
    fails = f"import os, sys; sys.exit(not os.path.exists({str(tmp_path / 'mended')!r}))"
    parts = [part("good", counted), part("bad", fails)]
    assert run_all(parts, tmp_path, HERE, options()) == 1
    assert "did not end well: bad" in capsys.readouterr().out
    (tmp_path / "mended").touch()
    assert run_all(parts, tmp_path, HERE, options()) == 0
    assert (tmp_path / "runs").read_text() == "x"
    result = json.loads((tmp_path / "good.json").read_text())
    assert result["output"] == ["a figure"] and result["device"] == "none" and result["status"] == 0
    whole, page = json.loads((tmp_path / "results.json").read_text()), (tmp_path / "results.md").read_text()
    assert [one["part"] for one in whole["parts"]] == ["good", "bad"] and whole["device"] == "none"
    assert re.search(r"\n\| good \| ended well \| \d+ \|\n\| bad \| ended well \| \d+ \|\n", page)
    assert "```\na figure\n```" in page
    run_all(parts, tmp_path, {**HERE, "code": "other"}, options())
    run_all(parts, tmp_path, {**HERE, "code": "other"}, options(again=True))
    assert (tmp_path / "runs").read_text() == "xxx"


@pytest.mark.long
def test_a_part_that_hangs_is_cut_off_with_what_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr(check_gpu, "SECONDS", 3)
    child = f"import os, time; open({str(tmp_path / 'child')!r}, 'w').write(str(os.getpid())); time.sleep(100)"
    hangs = f"import subprocess, sys; print('so far', flush=True); subprocess.run([sys.executable, '-c', {child!r}])"
    assert run_all([part("hangs", hangs)], tmp_path, HERE, options()) == 1
    result = json.loads((tmp_path / "hangs.json").read_text())
    assert (result["status"], result["ended"]) == (None, "cut off after 3 s") and result["output"] == ["so far"]
    pid, deadline = (tmp_path / "child").read_text(), time.monotonic() + 10
    while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.monotonic() < deadline, "its child lives on"
        time.sleep(0.1)


@pytest.mark.long
def test_the_time_that_is_given_is_kept(tmp_path, capsys):
    """A part that takes longer is cut off, and the next time those come first that have not begun."""
    parts = [part("first", "import time; time.sleep(60)"), part("second", "")]
    assert run_all(parts, tmp_path, HERE, options(seconds=2)) == NOT_ALL
    printed = capsys.readouterr().out
    assert "first: cut off after 2 s" in printed and "second: not begun" in printed
    assert run_all(parts, tmp_path, HERE, options(seconds=4)) == 1
    assert "second: ended well" in capsys.readouterr().out


@pytest.mark.long
def test_a_part_that_fails_keeps_no_other_from_its_turn(tmp_path, capsys):
    parts = [part("bad", "import sys; sys.exit(5)"), part("slow", "import time; time.sleep(60)"), part("good", "")]
    assert run_all(parts, tmp_path, HERE, options(seconds=3)) == NOT_ALL
    assert "did not end well: bad, slow" in capsys.readouterr().out
    assert run_all(parts, tmp_path, HERE, options(seconds=5)) == 1
    assert json.loads((tmp_path / "good.json").read_text())["ended"] == "ended well"
    assert json.loads((tmp_path / "bad.json").read_text())["ended"] == "status 5"
    assert "\n| bad | status 5 | " in (tmp_path / "results.md").read_text()


@pytest.mark.long
def test_a_check_that_is_ended_ends_its_part(tmp_path):
    """SIGTERM arrives, as from `timeout` or a batch system."""
    checking = subprocess.Popen(
        [sys.executable, "scripts/check_gpu.py", "--rehearse", "--output", str(tmp_path), "--only", "tests"], cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not (children := psutil.Process(checking.pid).children()) or not (tmp_path / "tests.log").exists():
        assert time.monotonic() < deadline and checking.poll() is None
        time.sleep(0.1)
    checking.terminate()
    assert checking.wait(30) == 128 + 15
    assert not psutil.wait_procs(children, 10)[1]


def check(*arguments):
    return subprocess.run(
        [sys.executable, "scripts/check_gpu.py", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=1500,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "sees no GPU; install a torch for CUDA, or add --rehearse"),
        (
            ["--only", "smok"],
            "--only smok: there is no such check; the checks are doctor, smoke, tests, layouts, trace",
        ),
    ],
)
def test_refusals(arguments, message, tmp_path):
    ended = check("--output", str(tmp_path / "out"), *arguments)
    assert ended.returncode == 2 and message in ended.stderr and len(ended.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.exhaustive
def test_a_rehearsal_of_the_benchmarks(tmp_path):
    """All parts except the tests, which run separately."""
    names = [p.name for p in PARTS if p.name not in ("smoke", "tests", "layouts")]
    ended = check("--rehearse", "--output", str(tmp_path), "--only", *names)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for name in names:
        result = json.loads((tmp_path / f"{name}.json").read_text())
        assert result["status"] == 0 and result["output"], name
    tables = {path.stem for path in tmp_path.glob("gpu_*.svg")}
    assert tables == {f"gpu_{name}" for name in names if name != "doctor"}
    again = check("--rehearse", "--output", str(tmp_path), "--only", *names)
    assert again.stdout.count("ended well before") == len(names)
