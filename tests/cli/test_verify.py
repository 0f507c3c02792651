"""Tests of `mcore-rl verify`: whole checks over gloo, failing and hanging parts, several nodes, and wrong commands."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from argparse import Namespace
from contextlib import closing, suppress
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from forked_programs import run_forked
from ports import free_port
from small_models import make_model

from mcore_rl.cli.verify import Check, Nodes, _begin, _parser, _plan
from mcore_rl.cli.verify_process import Ended, Interrupted, Signals, first_error, run_process
from mcore_rl.config import SFTConfig
from mcore_rl.errors import UserError
from mcore_rl.report.verification import Anonymous, page, write_results
from mcore_rl.testing.cluster.inputs import speed_config, speed_sequences
from mcore_rl.testing.cluster.plan import CheckDirectory, Plan, resume_configs
from mcore_rl.testing.cluster.verdicts import Outcome

ENVIRONMENT = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
SECONDS = 240


def start(*arguments):
    command = [sys.executable, "-m", "mcore_rl", "verify", *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, start_new_session=True
    )


def finish(process):
    """Return the output of a check; kill it and its descendants after a time limit."""
    try:
        return process.communicate(timeout=SECONDS)
    finally:
        for one in descendants(process.pid):
            with suppress(psutil.NoSuchProcess):
                one.kill()
        process.kill()


def descendants(pid):
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def ranks_of(process, part, count):
    """Wait until all ranks of a part run, and return them in their order."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        found = {}
        for one in descendants(process.pid):
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if part in one.cmdline() and "--nproc-per-node" not in one.cmdline():
                    found[one.environ().get("RANK")] = one
        if len(found) == count and None not in found:
            return [found[str(rank)] for rank in range(count)]
        time.sleep(0.1)
    raise AssertionError(f"no ranks of {part}: {finish(process)}")


def rows_of(text):
    """Return the lines of the table by part: (verdict, figures)."""
    found = re.findall(r"^(\w+) +(passed|FAILED|left out|NOT RUN|no time) +\d+  (.+)$", text, re.MULTILINE)
    return {part: (verdict, figures) for part, verdict, figures in found}


def results_of(directory):
    whole = json.loads((directory / "verify.json").read_text())
    return whole, {part["part"]: part for part in whole["parts"]}


@pytest.mark.exhaustive
@pytest.mark.long
def test_check_of_two_processes_measures_collectives_refit_and_speed(tmp_path):
    process = start("--nproc-per-node", 2, "--output", tmp_path / "out", "--only", "speed,collectives,refit")
    out, err = finish(process)
    assert process.returncode == 0, out + err
    assert list(rows_of(out)) == ["collectives", "refit", "speed"]
    assert {verdict for verdict, _ in rows_of(out).values()} == {"passed"}
    whole, parts = results_of(tmp_path / "out")
    assert [row["right"] for row in parts["collectives"]["figures"]["rows"]] == [True] * 12
    refit, speed = parts["refit"]["figures"], parts["speed"]["figures"]
    assert (refit["different"], refit["engines"]) == ([], 1) and refit["bytes"] > 10**5
    assert 0.9 < speed["memory_ratio"] < 1.1 and "speed_ratio" not in speed
    text = json.dumps(whole) + (tmp_path / "out" / "verify.html").read_text()
    assert str(tmp_path) not in text and os.uname().nodename not in text
    assert len(whole["launches"]) == 5 and not whole["failed"]
    assert not (tmp_path / "out" / "models").exists(), "a check without failures keeps no models"


@pytest.mark.long
def test_check_of_two_processes_resumes_and_runs_grpo(tmp_path):
    process = start("--nproc-per-node", 2, "--output", tmp_path / "out", "--only", "resume,grpo")
    out, err = finish(process)
    assert process.returncode == 0, out + err
    assert {verdict for verdict, _ in rows_of(out).values()} == {"passed"}
    _, parts = results_of(tmp_path / "out")
    before, after = parts["resume"]["figures"]["losses"]
    assert list(before) == ["1", "2", "3", "4"] and list(after) == ["3", "4"]
    assert all(after[step] == pytest.approx(before[step], abs=1e-5) for step in after)
    steps = parts["grpo"]["figures"]["steps"]
    assert len(steps) == 10 and len({step["reward_mean"] for step in steps}) > 5


@pytest.mark.long
@pytest.mark.exhaustive
def test_layouts_of_a_given_model_are_compared(tmp_path):
    make_model("qwen3", tmp_path / "model")
    (tmp_path / "sft.yaml").write_text(f"output_dir: none\nmodel: {{path: {tmp_path / 'model'}}}\n")
    words = [tmp_path / "sft.yaml", "model.recompute_activations=true", "--algorithm", "sft"]
    process = start("--nproc-per-node", 2, *words, "--output", tmp_path / "out", "--only", "layouts")
    out, err = finish(process)
    assert process.returncode == 0, out + err
    assert rows_of(out)["layouts"][1].startswith("4 of 4 layouts agree with one process")
    _, parts = results_of(tmp_path / "out")
    rows = parts["layouts"]["figures"]["rows"]
    assert list(rows) == ["dp2", "tp2 sp", "pp2", "cp2"]
    assert all(1e-3 < row["bfloat16"]["gradients"] < 0.1 for row in rows.values())
    differences = {name: row["float32"]["gradients"] for name, row in rows.items()}
    assert min(differences["tp2 sp"], differences["cp2"]) > 1e-8, "sums in another order differ in the last digits"
    assert max(differences.values()) < 1e-4


@pytest.mark.exhaustive
def test_check_of_four_processes_passes(tmp_path):
    process = start("--nproc-per-node", 4, "--output", tmp_path / "out", "--only", "layouts,refit")
    out, err = finish(process)
    assert process.returncode == 0, out + err
    assert rows_of(out)["layouts"][1].startswith("8 of 8 layouts agree with one process")


@pytest.mark.long
@pytest.mark.exhaustive
def test_killed_rank_is_reported_and_the_next_part_runs(tmp_path):
    process = start("--nproc-per-node", 2, "--output", tmp_path / "out", "--only", "collectives,refit")
    ranks_of(process, "collectives", 2)[1].kill()
    out, err = finish(process)
    assert process.returncode == 1 and not err, out + err
    assert rows_of(out)["collectives"] == ("FAILED", "rank 1 was ended by SIGKILL")
    assert rows_of(out)["refit"][0] == "passed"
    assert "Traceback" not in out and "failed: collectives; logs: " in out
    assert (tmp_path / "out" / "models").exists(), "a failed command can be run again"
    assert "rank 1 was ended by SIGKILL" in (tmp_path / "out" / "verify.html").read_text()


@pytest.mark.exhaustive
@pytest.mark.long
def test_hanging_ranks_are_cut_off_and_the_next_part_runs(tmp_path, monkeypatch, capsys):
    """The clock of the time limit jumps when the ranks hang, so that no machine is too slow for the other steps."""
    clock, ranks = SimpleNamespace(ahead=0.0), []

    def hang():
        ranks.extend(ranks_of(SimpleNamespace(pid=os.getpid(), poll=lambda: None), "collectives", 2))
        for rank in ranks:
            rank.suspend()
        clock.ahead = 10_000.0

    hangs = threading.Thread(target=hang)

    def start_to_hang(*arguments, **options):
        if hangs.ident is None and "collectives" in arguments[0]:
            hangs.start()
        return run_process(*arguments, **options)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("mcore_rl.cli.verify.Signals", lambda: SimpleNamespace(check=lambda: None))
    monkeypatch.setattr("mcore_rl.cli.verify.run_process", start_to_hang)
    real = SimpleNamespace(monotonic=lambda: time.monotonic() + clock.ahead, sleep=time.sleep)
    monkeypatch.setattr("mcore_rl.cli.verify_process.time", real)
    words = ["--only", "collectives,refit", "--output", str(tmp_path / "out")]
    with closing(CheckDirectory(tmp_path / "out")) as directory:
        assert _begin(_parser("mcore-rl verify").parse_args(words), ["--nproc-per-node", "2"], directory).run() == 1
    hangs.join()
    rows = rows_of(capsys.readouterr().out)
    assert rows["collectives"][0] == "FAILED" and re.fullmatch(r"took longer than its \d+ s", rows["collectives"][1])
    assert rows["refit"][0] == "passed"
    assert not any(rank.is_running() for rank in ranks)


@pytest.mark.parametrize("problem", ["", "differs in float32"])
def test_layouts_that_are_cut_off_had_no_time(problem, tmp_path, monkeypatch, capsys):
    check = check_of(tmp_path, 4, ["layouts", "refit"])
    monkeypatch.setattr(check, "_prepare", lambda: "")
    first, *others = map(str, check.plan.cases)
    row = layouts_with(1.0)["figures"]["rows"]["dp2"]
    row["float32"]["right"], row["bfloat16"]["right"] = not problem, True

    def run_ranks(name, *words):
        check.plan.write_result("layouts", {"rows": {first: row}})
        check.deadline = time.monotonic()
        return Ended(None, 9.0, "took longer than its 9 s", is_cut_off=True)

    monkeypatch.setattr(check, "_run_ranks", run_ranks)
    assert check.run() == (1 if problem else 4)
    out = capsys.readouterr().out
    figure = f"{0 if problem else 1} of 8 layouts agree with one process; no time for {', '.join(others)}"
    expected = ("FAILED", f"{figure}; {first}: {problem}") if problem else ("no time", figure)
    assert rows_of(out) == {"layouts": expected, "refit": ("no time", "the time was over")}
    told = "failed: layouts; logs: " if problem else "no time for layouts, refit: give more by --minutes"
    assert out.splitlines()[-1].startswith(told)
    assert f", {1 if problem else 2} no time</h1>" in (tmp_path / "verify.html").read_text()


@pytest.mark.long
@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.exhaustive)],
    ids=lambda number: number.name,
)
def test_check_told_to_end_leaves_no_processes(number, tmp_path):
    process = start("--nproc-per-node", 2, "--output", tmp_path / "out", "--only", "refit,grpo")
    members = [*ranks_of(process, "refit", 2), *descendants(process.pid)]
    os.killpg(process.pid, number)
    out, err = finish(process)
    assert process.returncode == 128 + number, out + err
    assert err == f"error: ended by {number.name}\n"
    _, alive = psutil.wait_procs(members, timeout=10)
    assert not alive
    assert json.loads((tmp_path / "out" / "verify.json").read_text())["parts"] == []


@pytest.mark.exhaustive
def test_killed_check_leaves_no_processes(tmp_path):
    process = start("--nproc-per-node", 2, "--output", tmp_path / "out", "--only", "grpo")
    deadline = time.monotonic() + SECONDS
    while not (tmp_path / "out" / "grpo" / "metrics.jsonl").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.2)
    members = descendants(process.pid)
    assert len(members) >= 3, "the launcher and two ranks"
    process.kill()
    _, alive = psutil.wait_procs(members, timeout=30)
    finish(process)
    for one in alive:
        one.kill()
    assert not alive


@pytest.mark.exhaustive  # long tests have other runs on two nodes
@pytest.mark.parametrize("kind", ["c10d", "static"])
def test_two_nodes_check_together(kind, tmp_path):
    port = free_port()
    common = ["--nnodes", 2, "--nproc-per-node", 1]
    if kind == "c10d":
        common += ["--rdzv-id", "a", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}"]
    else:
        common += ["--master-addr", "127.0.0.1", "--master-port", port]
    nodes = [
        start(*common, *(["--node-rank", node] if kind == "static" else []), "--output", tmp_path / "out", "--only",
              "collectives,refit")
        for node in range(2)
    ]  # fmt: skip
    texts = [finish(node) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], texts
    for out, _ in texts:
        assert [verdict for verdict, _ in rows_of(out).values()] == ["passed", "passed"]
    assert sum("to send: " in out for out, _ in texts) == 1, "one node writes the results"
    whole, _ = results_of(tmp_path / "out")
    assert whole["processes"] == 2 and len(whole["nodes"]) == 2


WRONG = [
    (["--only", "speed,nothing"], "--only speed,nothing: unknown part 'nothing'; the parts are collectives, "),
    (["--minutes", "0"], "argument --minutes: must be a number above 0, got '0'"),
    (["seed=1"], "seed=1: changes a key of a configuration; name the file first"),
    (["{root}/c.yaml", "model.nothing=1"], "command line: unknown key model.nothing; "),
    (["{root}/c.yaml"], "model.path: {root}/model does not exist"),
    (["{root}/none.yaml"], "{root}/none.yaml: cannot be read"),
    (["{root}/c.yaml", "--nproc-per-node", "2"], "--nproc-per-node: options of the launch come first: mcore-rl verify"),
    (["--nnodes", "1:4"], "--nnodes 1:4: must be a single number of at least 1 here"),
    (["--nproc-per-node", "0"], "--nproc-per-node 0: must be at least 1"),
    (["--nproc-per-node", "-1"], "--nproc-per-node -1: must be at least 1"),
    (["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:abc"],
     "--rdzv-endpoint localhost:abc: must be HOST or HOST:PORT, with a port of 1 to 65535"),
    (["--nproc-per-node", "two"], "--nproc-per-node: Unsupported nproc_per_node value: two"),
    (["--output", "{root}"], "--output {root}: contains files that no check has written (c.yaml); name another"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[" ".join(words) for words, _ in WRONG])
def test_wrong_command_is_refused_in_one_line(arguments, message, tmp_path):
    (tmp_path / "c.yaml").write_text(f"output_dir: none\nmodel: {{path: {tmp_path / 'model'}}}\n")
    words = [word.format(root=tmp_path) for word in arguments]
    words += [] if "--output" in words else ["--output", str(tmp_path / "out")]
    done = run_forked(["-m", "mcore_rl", "verify", *words], ENVIRONMENT)
    assert done.returncode == 2, done.stdout
    assert message.format(root=tmp_path) in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "out").exists()


def test_second_check_in_a_directory_is_refused_at_once(tmp_path):
    with closing(CheckDirectory(tmp_path / "out")) as directory:
        directory.claim()
        done = run_forked(["-m", "mcore_rl", "verify", "--output", str(tmp_path / "out")], ENVIRONMENT)
        assert done.returncode == 2, done.stdout
        assert f"is being written by another check (pid {os.getpid()} on " in done.stderr
        assert done.stderr.count("\n") == 1 and (tmp_path / "out" / "verify.lock").exists()


def test_check_under_torchrun_is_refused(tmp_path):
    done = run_forked(["-m", "mcore_rl", "verify", "--output", str(tmp_path / "out")], {**ENVIRONMENT, "RANK": "0"})
    assert done.returncode == 2 and "launches its own processes: run it without torchrun" in done.stderr
    assert not (tmp_path / "out").exists()


def nodes(count, options, described=(), **parsed):
    defaults = {"rdzv_id": "none", "rdzv_backend": "static", "rdzv_endpoint": "", "master_port": None}
    return Nodes(count, 8, options, Namespace(**defaults | parsed), described=list(described))


def test_launches_of_several_nodes_meet_at_different_places():
    own = nodes(2, ["--nnodes", "2"], rdzv_backend="c10d", rdzv_endpoint="first:4000", rdzv_id="a")
    launches = [own.options_of_launch("collectives"), own.options_of_launch("nodes", per_node=1)]
    assert launches == [
        ["--nnodes", "2", "--nproc-per-node", "8", "--rdzv-id", "a-collectives", "--rdzv-endpoint", "first:4001"],
        ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-id", "a-nodes", "--rdzv-endpoint", "first:4000"],
    ]
    own = nodes(2, [], rdzv_backend="c10d", rdzv_endpoint="[fd00::1]:4000", rdzv_id="a")
    assert own.options_of_launch("refit")[-1] == "[fd00::1]:4002"
    static = nodes(2, [], master_port=7000)
    names = [
        "nodes",
        "collectives",
        "refit",
        "resume_1",
        "resume_2",
        "speed",
        "grpo",
        *(f"layouts_{n}" for n in range(8)),
    ]
    ports = [static.options_of_launch(name)[-1] for name in names]
    assert len(set(ports)) == len(ports) and set(map(int, ports)) <= set(range(7000, 7016))
    given = nodes(1, ["--nproc_per_node=8", "--max-restarts", "2", "--nproc-per-node", "8"])
    assert given.options_of_launch("grpo", per_node=3) == ["--max-restarts", "2", "--nproc-per-node", "3"]
    assert nodes(1, ["--standalone"]).options_of_launch("grpo") == ["--standalone", "--nproc-per-node", "8"]


@pytest.mark.parametrize("tp", [2, 4])
def test_speed_uses_the_given_layout_if_it_fits(tp, tmp_path, model_of):
    path = model_of("qwen3_moe")
    parallel = {"tensor_model_parallel_size": tp, "sequence_parallel": True, "backend": "host"}
    given = SFTConfig.model_validate({
        "output_dir": "none", "model": {"path": path, "recompute_activations": True}, "parallel": parallel,
        "data": {"train": "x", "max_sequence_length": 100}, "batch": {"tokens_per_pack": 1000},
    })  # fmt: skip
    own = nodes(1, [], described=[{"gpus": [], "gpu_gib": 0}])
    own.per_node = 2
    plan = _plan(given, own, tmp_path, minutes=30)
    assert plan.backend == "host" and resume_configs(plan)[0].parallel.backend == "host"
    assert plan.has_experts and plan.model["recompute_activations"] and plan.collective_seconds == 120
    config = speed_config(plan)
    assert config.parallel.tensor_model_parallel_size == 2
    if tp == 2:
        assert not plan.note and config.model.path == path and config.batch.tokens_per_pack == 1000
        lengths = speed_sequences(config).lengths
        assert len(lengths) == 32 and max(lengths) <= 100
    else:
        assert plan.note.startswith("measured with the check's own model and layout: parallel: tensor 4 x ")
        assert config.model.path == plan.models / "mixture"


LOST = """[rank 0] Traceback (most recent call last):
  File "x.py", line 1, in f
    g()

RuntimeError: connection closed by peer
error: rank 1 was ended by SIGKILL
"""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (LOST, "rank 1 was ended by SIGKILL"),
        (LOST.replace("error: rank 1 was ended by SIGKILL\n", ""), "rank 0: RuntimeError: connection closed by peer"),
        ("step 1\n[rank 3] error: data.train: no such file\nmore\n", "data.train: no such file"),
        ("step 1\n", ""),
    ],
)
def test_first_error_is_the_cause_of_a_failure(text, reason):
    assert first_error(text) == reason


FAMILY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("end", [pytest.param("limit", marks=pytest.mark.long), "other", "signal"])
def test_process_is_killed_with_descendants_in_other_sessions(end, tmp_path):
    signals, started = Signals.__new__(Signals), time.monotonic()
    signals.received = 0
    log = tmp_path / "log"

    def is_over():
        begun = log.exists() and log.read_text().strip() and time.monotonic() - started > 0.5
        if begun and end == "signal":
            signals.received = signal.SIGTERM
        return bool(begun) and end == "other"

    if end == "signal":
        with pytest.raises(Interrupted, match="SIGTERM"):
            run_process(["-c", FAMILY], log, 30, signals, is_over)
    else:
        ended = run_process(["-c", FAMILY], log, 5.0 if end == "limit" else 30, signals, is_over)
        assert ended.status is None and ended.is_cut_off == (end == "limit")
        assert ended.reason == {"limit": "took longer than its 5 s", "other": "failed on another node"}[end]
    child = int(log.read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.texts = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        assert not {"src", "href"} & {name for name, _ in attrs}, "the page refers to no other file"

    def handle_data(self, data):
        self.texts.append(data)


def test_page_shows_every_part_and_escapes_texts():
    parts = [
        {"part": "collectives", "verdict": "passed", "figure": "fast", "seconds": 3.2, "figures": {
            "rows": [{"collective": "all-reduce", "bytes": 2**20, "right": False, "seconds": 2e-3,
                      "gb_per_second": 0.5}]}},
        {"part": "layouts", "verdict": "FAILED", "figure": "<script>", "seconds": 9.0, "figures": {
            "rows": {"tp2 sp": {"error": "rank 1 was ended by SIGKILL"}}}},
    ]  # fmt: skip
    whole = {
        "command": "mcore-rl verify", "processes": 2, "backend": "gloo", "seconds": 12.3, "parts": parts,
        "nodes": [{"gpus": [], "versions": {"torch": "2.6"}}], "failed": ["layouts"],
        "launches": [{"name": "layouts_0", "reason": "", "seconds": 9.0, "command": "python"}],
        "ends_of_logs": {"layouts_0": ["last line"]},
    }  # fmt: skip
    read = Tags()
    read.feed(page(whole))
    assert "script" not in read.tags and "<script>" in read.texts
    for text in ("mcore-rl verify: 1 of 2 parts passed", "all-reduce", "NO", "rank 1 was ended by SIGKILL", "torch 2.6",
                 "last line"):  # fmt: skip
        assert text in read.texts, text


def results(parts):
    return {
        "command": "mcore-rl verify", "processes": 2, "backend": "gloo", "seconds": 12.3, "parts": parts, "failed": [],
        "nodes": [{"gpus": [], "versions": {"torch": "2.6"}}], "launches": [], "ends_of_logs": {},
    }  # fmt: skip


def layouts_with(loss):
    exact = {"loss": loss, "scores": 1e-7, "gradients": 1e-6, "weights": 1e-6}
    rounded = {"worst_quantity": "all weights", "ratio": loss, "ratio_limit": 1.5}
    rows = {"dp2": {"float32": exact, "bfloat16": rounded, "right": False}}
    return {"part": "layouts", "verdict": "FAILED", "figure": "", "seconds": 1.0, "figures": {"rows": rows}}


def test_page_shows_numbers_that_are_not_finite(tmp_path):
    whole = Anonymous(tmp_path, []).cleaned(results([layouts_with(float("nan"))]))
    assert write_results(tmp_path, whole) == ""
    text = (tmp_path / "verify.html").read_text()
    assert text.count("<td>nan</td>") == 2 and "<td>1.0e-06</td>" in text


def test_figures_are_written_although_the_page_cannot_be_made(tmp_path):
    broken = {**layouts_with(1.0), "figures": {"rows": {"dp2": {}}}}
    assert write_results(tmp_path, results([broken])) == "KeyError: 'float32'"
    assert results_of(tmp_path)[1]["layouts"] == broken


def test_keys_are_not_renamed(tmp_path, monkeypatch):
    monkeypatch.setattr("getpass.getuser", lambda: "seconds")
    assert Anonymous(tmp_path, []).cleaned({"seconds": "of seconds"}) == {"seconds": "of USER"}


def check_of(directory, processes, parts):
    (directory / "logs").mkdir(exist_ok=True)
    own = nodes(1, [], described=[{"host": "gpu-a17", "gpus": [], "versions": {}}], master_addr="", local_addr=None)
    plan = Plan(directory, 1, processes, 0, "", 20)
    return Check(plan, own, parts, time.monotonic() + 60, None)


def test_parts_left_out_are_not_counted_as_passed(tmp_path, monkeypatch, capsys):
    check = check_of(tmp_path, 1, ["refit"])
    monkeypatch.setattr(check, "_prepare", lambda: "")
    assert check.run() == 1
    assert "nothing was checked: 1 part left out" in capsys.readouterr().out
    assert "mcore-rl verify: 0 of 1 parts passed, 1 left out" in (tmp_path / "verify.html").read_text()
    check.outcomes.append(Outcome("collectives", "passed", ""))
    assert check._finish() == 0
    assert "1 of 2 parts passed, 1 left out" in capsys.readouterr().out


def full_disk(*args, **options):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_full_disk_fails_the_check_without_a_traceback(tmp_path, monkeypatch, capsys):
    """The disk is full from the first part on; then from the start."""
    check = check_of(tmp_path, 2, ["resume", "refit"])
    monkeypatch.setattr(check, "_prepare", lambda: "")
    monkeypatch.setattr(check, "_run_ranks", full_disk)
    monkeypatch.setattr("mcore_rl.report.verification._replace", full_disk)
    assert check.run() == 1
    out, err = capsys.readouterr()
    told = "the output directory cannot be written (No space left on device)"
    assert rows_of(out) == {"resume": ("FAILED", told), "refit": ("FAILED", told)}
    assert "the results cannot be written\n" in out and "to send" not in out
    assert err == "warning: verify.json cannot be written (No space left on device)\n"
    monkeypatch.setattr(Plan, "write", full_disk)
    check = check_of(tmp_path, 2, ["resume"])
    assert check.run() == 1 and list(rows_of(capsys.readouterr().out).values()) == [("FAILED", told)]
    check.outcomes = [Outcome("resume", "passed", "")]
    assert check._finish() == 1, "without results, the check has not passed"


def test_page_that_cannot_be_written_is_not_named(tmp_path, monkeypatch, capsys):
    check = check_of(tmp_path, 1, [])
    check.outcomes = [Outcome("resume", "passed", "")]
    monkeypatch.setattr("mcore_rl.report.verification.page", full_disk)
    check._write()
    assert check._finish() == 0, "all figures are written"
    out, err = capsys.readouterr()
    assert out.startswith(f"all figures: {tmp_path / 'verify.json'}\n") and "verify.html cannot be written" in err


def test_other_nodes_end_with_a_node_that_a_signal_ends(tmp_path, monkeypatch, capsys):
    first, second = (check_of(tmp_path, 1, ["collectives", "resume"]) for _ in range(2))
    first.nodes.count = second.nodes.count = 2
    second.nodes.number = 1
    first.signals, second.signals = (Signals.__new__(Signals) for _ in range(2))
    first.signals.received, second.signals.received = 0, signal.SIGTERM
    with pytest.raises(Interrupted):
        second.run()
    started = time.monotonic()
    monkeypatch.setattr(first, "_prepare", lambda: "")
    ended = first._start("collectives", ["-c", "import time; time.sleep(50)"], 60)
    assert ended.reason == "failed on another node"
    assert first.run() == 1 and time.monotonic() - started < 20
    told = ("NOT RUN", "the check on node 1 was ended")
    assert rows_of(capsys.readouterr().out) == {"collectives": told, "resume": told}


def test_signals_end_the_program_at_once_until_the_configuration_is_read(monkeypatch):
    found = []

    def given(parsed):
        found.append([signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)])
        raise UserError("no model")

    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    monkeypatch.setattr("mcore_rl.cli.verify._given", given)
    with pytest.raises(UserError, match="no model"):
        _begin(Namespace(only=None), ["--nproc-per-node", "1"], None)
    assert found == [before]


def test_results_name_no_host_user_address_or_path(tmp_path, monkeypatch):
    monkeypatch.setattr("getpass.getuser", lambda: "alice")
    names = Anonymous(tmp_path / "out", ["gpu-a17", "gpu-a18"])
    given = {
        "text": f"{tmp_path}/out/logs: gpu-a18 at 10.1.2.3, 127.0.0.1: /data/alice/x, {sys.prefix}/lib",
        "n": float("nan"),
    }
    assert names.cleaned(given) == {
        "text": "OUTPUT/logs: node1 at ADDRESS, 127.0.0.1: …/x, PYTHON/lib",
        "n": "nan",
    }
    assert names.command(["verify", "/secret/place/c.yaml", "seed=1"]) == "verify c.yaml seed=1"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("--rdzv-endpoint head.acme.com:29500 x", "--rdzv-endpoint ADDRESS:29500 x"),
        ("--master_addr=head --rdzv-endpoint=localhost:1", "--master_addr=ADDRESS --rdzv-endpoint=localhost:1"),
        ("--rdzv-endpoint [fd00::1]:29500", "--rdzv-endpoint ADDRESS:29500"),
        ("from fd00::a:1, 12:30:45, ::1, std::begin", "from ADDRESS, 12:30:45, ::1, std::begin"),
        ("gpu-a17.acme.com or gpu-b.cloud.test", "node0 or ADDRESS"),
        ("meets at head.acme.org: no", "meets at ADDRESS: no"),
        ("/tmp/out/x /tmp/outsecretcorp /tmp/out.", "OUTPUT/x …/outsecretcorp OUTPUT."),
        ("model.path=/home/bob/x at /home/bob: file:///srv/bob/y", "model.path=~/x at ~: file://…/y"),
        ("1/2 tokens/s", "1/2 tokens/s"),
    ],
)
def test_texts_are_made_anonymous(text, expected):
    names = Anonymous(Path("/tmp/out"), ["gpu-a17", "gpu-a18.cloud.test"], ["head.acme.org"])
    assert names.text(text) == expected


def test_command_has_no_path_within_its_keys():
    names = Anonymous(Path("/tmp/out"), [])
    words = ["verify", "model.path=/home/bob/x", "data.train=[/srv/acme/a,/srv/b]", "--output=/tmp/outsecretcorp"]
    assert names.command(words) == "verify model.path=x data.train=[a,b] --output=outsecretcorp"
