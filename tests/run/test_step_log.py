"""Tests of the logs of a run's steps: continued logs, removed entries, and files that are not logs."""

import pytest

from mcore_rl.run.metrics import JsonLinesLog, read_step_log


def test_lines_that_are_of_no_step_are_refused(tmp_path):
    for line in ('{"loss": 1}', "[1]"):
        (tmp_path / "metrics.jsonl").write_text(line + "\n")
        with pytest.raises(ValueError, match="not an object with an integer step"):
            read_step_log(tmp_path / "metrics.jsonl")


def test_a_step_log_goes_on_from_any_of_its_steps(tmp_path):
    path = tmp_path / "log.jsonl"
    log = JsonLinesLog(path)
    log.append(0, {"a": 1})
    for step in (1, 2, 3):
        log.append(step, {"a": step}, {"a": -step})
    with open(path, "a") as file:
        file.write('{"step": 4, "a"')
    assert [entry["a"] for entry in read_step_log(path)] == [1, 1, -1, 2, -2, 3, -3]
    again = JsonLinesLog(path)
    again.append(3, {"a": 30})
    again.append(4, {"a": 40})
    assert [(entry["step"], entry["a"]) for entry in read_step_log(path)] == [
        (0, 1), (1, 1), (1, -1), (2, 2), (2, -2), (3, 30), (4, 40)
    ]  # fmt: skip
    JsonLinesLog(path).append(1)
    assert path.read_bytes() == b""
