"""Tests of an evaluation's statistics, files and page."""

import json
import math
import random
import re
import statistics
import subprocess
import sys

import pytest

from mcore_rl.errors import UserError
from mcore_rl.serving.evaluation import (
    EvaluationFiles,
    check_baseline,
    compare,
    described,
    fingerprint_of,
    interval_of,
    metrics_of,
    paired_difference,
    read_entries,
    read_result,
)

Z = 1.959963984540054


def entry(prompt, sample, reward=1.0, **more):
    return {
        "prompt": prompt, "sample": sample, "source": None, "reward": reward, "rewards": {}, "error": None,
        "answer": None, "truncated": False, "turns": 1, "response_length": 5, "messages": [], **more,
    }  # fmt: skip


def test_an_interval_of_single_values_is_that_of_their_mean():
    generator = random.Random(1)
    values = [generator.gauss(0.1, 3.0) for _ in range(40)]
    found = interval_of([[value] for value in values])
    error = statistics.stdev(values) / math.sqrt(len(values))
    assert found.mean == pytest.approx(statistics.mean(values), abs=1e-12)
    assert (found.low, found.high) == pytest.approx((found.mean - Z * error, found.mean + Z * error), abs=1e-12)


def test_equal_samples_of_a_prompt_count_once():
    """With equal values in each group, the interval is that of one value of each group."""
    values = [0.3, 1.0, 0.1, 0.7, 0.7]
    assert vars(interval_of([[value] * 6 for value in values])) == pytest.approx(
        vars(interval_of([[value] for value in values])), abs=1e-12
    )


def test_the_interval_covers_the_mean_as_often_as_it_says():
    generator, covered = random.Random(2), 0
    for _ in range(1000):
        groups = []
        for _ in range(50):
            ability = generator.random()
            groups.append([float(generator.random() < ability) for _ in range(generator.choice([1, 4]))])
        found = interval_of(groups)
        covered += found.low <= 0.5 <= found.high
    assert 0.925 <= covered / 1000 <= 0.97


@pytest.mark.parametrize(("groups", "mean"), [([], None), ([[]], None), ([[1.0, 0.0]], 0.5)])
def test_too_few_prompts_have_no_interval(groups, mean):
    told = interval_of(groups).to_json()
    assert told == {"mean": mean, "low": None, "high": None}


def test_paired_differences_are_over_common_prompts():
    own = [entry(0, 0, 1.0), entry(0, 1, 0.0), entry(1, 0, 1.0), entry(2, 0, 0.2), entry(3, 0, None, error="x")]
    other = [entry(0, 0, 0.0), entry(1, 0, 0.5), entry(2, 0, 0.1), entry(3, 0, 1.0), entry(4, 0, 1.0)]
    found, prompts = paired_difference(own, other)
    differences = [0.5, 0.5, 0.1]
    assert prompts == 3 and found.mean == pytest.approx(statistics.mean(differences))
    half = Z * statistics.stdev(differences) / math.sqrt(3)
    assert found.high - found.low == pytest.approx(2 * half)


def test_metrics_of_samples_and_sources():
    entries = [
        entry(prompt, sample, float(sample < prompt), source="ab"[prompt % 2], answer=str(sample < prompt))
        for prompt in range(4)
        for sample in range(3)
    ]
    found = metrics_of(entries, 3)
    passed = [1 - math.comb(3 - c, 2) / math.comb(3, 2) for c in (0, 1, 2, 3)]
    assert found["reward_mean"] == 0.5 and found["pass@2"] == pytest.approx(statistics.mean(passed))
    assert {name for name in found if name.startswith("pass@")} == {"pass@1", "pass@2", "pass@3"}
    assert found["a/reward_mean"] == pytest.approx(2 / 6) and found["b/reward_interval"]["mean"] == pytest.approx(4 / 6)
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_metrics_without_a_judged_sample():
    found = metrics_of([entry(0, 0, None, error="no judge")], 1)
    assert found["reward_mean"] is None and found["failed_fraction"] == 1.0
    assert found["reward_interval"] == {"mean": None, "low": None, "high": None}


def test_pass_at_k_tells_over_how_many_prompts_it_is():
    lost = entry(0, 2, None, error="no judge")
    entries = [entry(0, 0), entry(0, 1, 0.0), lost, *(entry(1, sample, 0.0) for sample in range(3))]
    found = metrics_of(entries, 3)
    assert (found["pass@1"], found["pass@1_prompts"]) == (0.25, 2)
    assert (found["pass@2"], found["pass@2_prompts"]) == (0.5, 2)
    assert (found["pass@3"], found["pass@3_prompts"]) == (0.0, 1)
    assert "pass@1_prompts" not in metrics_of(entries[3:], 3)


SETTINGS = {"model": "m", "data": "d", "samples": 2, "judge": {"name": "math"}, "fingerprint": "f"}


def finished(directory, rewards, **settings):
    files = EvaluationFiles(directory, {**SETTINGS, **settings})
    files.add(
        [entry(prompt, sample, reward) for prompt, own in enumerate(rewards) for sample, reward in enumerate(own)]
    )
    files.finish("m", 2)
    return directory


def test_an_evaluation_goes_on_where_it_was_stopped(tmp_path):
    files = EvaluationFiles(tmp_path, SETTINGS)
    files.add([entry(1, 0, 0.25), entry(0, 1, None, error="judge died"), entry(0, 0, 1.0)])
    with open(tmp_path / "samples.jsonl", "a") as file:
        file.write('{"prompt": 7, "sam')  # killed while it wrote
    files._lock.release()
    with EvaluationFiles(tmp_path, SETTINGS) as again:
        assert set(again.entries) == {(1, 0), (0, 0)}, "what was not judged is judged again"
        again.add([entry(0, 1, 0.5), entry(1, 1, 0.75)])
        again.finish("m", 2)
    assert [(e["prompt"], e["sample"], e["reward"]) for e in read_entries(tmp_path)] == [
        (0, 0, 1.0), (0, 1, 0.5), (1, 0, 0.25), (1, 1, 0.75),
    ]  # fmt: skip
    assert read_result(tmp_path)["metrics"]["num_samples"] == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["eval.html", "eval.json", "samples.jsonl"]


def test_other_settings_are_refused_unless_replaced(tmp_path):
    finished(tmp_path, [[1.0, 0.0]])
    with pytest.raises(UserError, match=r"has an evaluation with other settings \(judge, samples\); choose another"):
        EvaluationFiles(tmp_path, {**SETTINGS, "samples": 3, "judge": {"name": "exact_match"}})
    assert len(read_entries(tmp_path)) == 2
    files = EvaluationFiles(tmp_path, {**SETTINGS, "samples": 3}, overwrite=True)
    assert files.entries == {} and read_entries(tmp_path) == []


HOLDER = """
import sys
from pathlib import Path
from mcore_rl.utils.lock_file import LockFile
lock = LockFile(Path(sys.argv[1]) / "eval.lock")
lock.take()
print("taken", flush=True)
sys.stdin.read()
"""


def test_two_evaluations_do_not_write_into_one_directory(tmp_path):
    command = [sys.executable, "-c", HOLDER, tmp_path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "taken\n"
        with pytest.raises(UserError, match=rf"another evaluation writes there \(pid {holder.pid} on "):
            EvaluationFiles(tmp_path, SETTINGS)
        holder.communicate("", timeout=20)


def test_samples_of_a_run_are_not_replaced(tmp_path):
    (tmp_path / "samples.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=r"samples.jsonl: exists, but there is no eval.json"):
        EvaluationFiles(tmp_path, SETTINGS)
    assert (tmp_path / "samples.jsonl").read_text() == "{}\n"


def test_a_baseline_is_compared(tmp_path):
    own = finished(tmp_path / "own", [[1.0, 0.0], [1.0, 1.0]])
    other = finished(tmp_path / "other", [[0.0, 0.0], [1.0, 0.0]], model="older")
    compare(own, other)
    told = read_result(own)["baseline"]
    assert told["difference"]["mean"] == 0.5 and told["prompts"] == 2
    lines = "\n".join(described(own))
    assert "difference from m: 0.5  (95 % interval: 0.5 to 0.5) over 2 prompts" in lines
    assert "difference from m" in (own / "eval.html").read_text()
    for change, what in (({"fingerprint": "g"}, "prompts"), ({"judge": {"name": "verl"}}, "judges")):
        wrong = finished(tmp_path / what, [[1.0]], **change)
        with pytest.raises(UserError, match=f"is an evaluation with other {what}"):
            compare(own, wrong)
    assert check_baseline({**SETTINGS, "samples": 3, "temperature": 0.5, "seed": 1}, other) == [
        "samples",
        "temperature",
    ]
    unfinished = EvaluationFiles(tmp_path / "unfinished", SETTINGS)
    with pytest.raises(UserError, match="the evaluation was not finished"):
        compare(own, unfinished.directory)
    with pytest.raises(UserError, match="is not the result of mcore-rl eval"):
        compare(own, tmp_path)


def test_prompts_that_were_not_evaluated_are_told(tmp_path):
    files = EvaluationFiles(tmp_path, SETTINGS)
    files.add([entry(0, 0), entry(0, 1, None, error="no judge")])
    files.finish("m", 2, dropped=7)
    lines = "\n".join(described(tmp_path))
    assert "7 prompts were too long, and were not evaluated" in lines
    assert (
        re.search(r"pass@1 +1  \(over 1 prompts\)", lines) and read_result(tmp_path)["metrics"]["dropped_prompts"] == 7
    )


@pytest.mark.parametrize("had", [False, True], ids=["new", "goes on"])
def test_what_fails_before_the_first_sample_leaves_nothing(had, tmp_path):
    if had:
        finished(tmp_path / "out", [[1.0, 0.0]])
    with pytest.raises(UserError, match="wrong key"), EvaluationFiles(tmp_path / "out", SETTINGS) as files:
        (files.directory / "judge.log").write_text("")
        raise UserError("wrong key")
    assert (tmp_path / "out").exists() is had
    if had:
        assert len(read_entries(tmp_path / "out")) == 2 and not (tmp_path / "out" / "eval.lock").exists()


def test_directories_that_cannot_be_used_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file: cannot be written"):
        EvaluationFiles(tmp_path / "file", SETTINGS)
    finished(tmp_path / "out", [[1.0]])
    (tmp_path / "out" / "samples.jsonl").write_text('{"text": 1}\n')
    with pytest.raises(UserError, match="has lines that mcore-rl eval has not written"):
        EvaluationFiles(tmp_path / "out", SETTINGS)


def test_the_page_escapes_texts(tmp_path):
    files = EvaluationFiles(tmp_path, {**SETTINGS, "model": "<m>"})
    hostile = "</div><script>alert(1)</script>\ud83d"
    messages = [{"role": "user", "content": hostile}, {"role": "assistant", "content": None}]
    files.add([entry(0, 0, 1.0, messages=messages, source="<s>"), entry(0, 1, None, error="<e>")])
    files.finish("<m>", 2)
    page = (tmp_path / "eval.html").read_text()
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page and "<m>" not in page and "<e>" not in page


def test_the_fingerprint_is_of_texts_alone():
    class Prompt:
        def __init__(self, content, **record):
            self.content, self.record = content, record

    same = fingerprint_of([Prompt("a", x=1, y=2)])
    assert same == fingerprint_of([Prompt("a", y=2, x=1)]) != fingerprint_of([Prompt("a", x=1)])
