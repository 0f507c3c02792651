"""Tests of the ends of runs: trained steps and started checkpoints are kept, and the end is reported in one line."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
import yaml
from programs import ROOT, run
from small_models import make_model

from mcore_rl.config import SFTConfig
from mcore_rl.run.metrics import JsonLinesLog, MetricsReporter, OptionalLog, read_step_log
from mcore_rl.utils.checkpoint_store import CheckpointStore, digest_problems
from mcore_rl.utils.console import RunConsole

BREAKING = """
import os, signal, threading, torch
from mcore_rl.platform import initialize_platform
initialize_platform()
from mcore_rl.algorithms.sft import train_sft
from mcore_rl.algorithms.supervised import SupervisedTrainer
from mcore_rl.cli.entry_point import run_script
from mcore_rl.config import SFTConfig
from mcore_rl.utils.shard_process import ShardProcess

step, submit = SupervisedTrainer.train_step, ShardProcess.submit

def step_or_break(self, number):
    if number == 3 and str(torch.distributed.get_rank()) in os.environ["BROKEN_RANKS"].split():
        raise RuntimeError("something breaks")
    return step(self, number)

def write_slowly(self, job, block):
    seconds = dict(entry.split("=") for entry in os.environ["WRITING_SECONDS"].split())
    if "iter_0000002" in str(job.directory):
        os.kill(self.pid, signal.SIGSTOP)
        timer = threading.Timer(float(seconds[str(job.rank)]), os.kill, (self.pid, signal.SIGCONT))
        timer.daemon = True
        timer.start()
    submit(self, job, block)

if __name__ == "__main__":
    SupervisedTrainer.train_step, ShardProcess.submit = step_or_break, write_slowly
    run_script("sft", SFTConfig, train_sft, "")
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("ends")
    make_model("llama", root / "model", initializer_range=0.05)
    records = [{"prompt": f"say {i} ", "completion": "abcdefgh"[: 2 + i % 6]} for i in range(16)]
    (root / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    config = {
        "output_dir": "set below",
        "model": {"path": str(root / "model")},
        "data": {"train": str(root / "data.jsonl"), "max_sequence_length": 48},
        "batch": {"global_batch_size": 4},
        "trainer": {"max_steps": 4},
        "checkpoint": {"save_interval": 1, "export_hf": False},
        "parallel": {"timeout_seconds": 40},
    }
    (root / "sft.yaml").write_text(yaml.safe_dump(config))
    (root / "breaking.py").write_text(BREAKING)
    prompts = [{"prompt": f"say {letter} ", "answer": letter} for letter in "abcdefgh"]
    (root / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return root


def saved(out):
    """Return the names of the checkpoints; check that all are complete and that there are no partial files."""
    store = CheckpointStore(out / "checkpoints")
    assert not list(store.directory.glob(".*")), list(store.directory.iterdir())
    assert [problem for path in store.iterations() for problem in digest_problems(path)] == []
    return [path.name for path in store.iterations()]


@pytest.mark.parametrize(
    ("processes", "broken", "writing"),
    [
        (1, "0", "0=1"),
        pytest.param(2, "1", "0=2 1=0", marks=pytest.mark.exhaustive),
        pytest.param(2, "1", "0=0 1=2", marks=pytest.mark.exhaustive),
        pytest.param(2, "0", "0=0 1=2", marks=pytest.mark.exhaustive),
        pytest.param(2, "0 1", "0=0 1=2", marks=pytest.mark.long),
    ],
)
def test_failed_run_finishes_checkpoint_in_progress(processes, broken, writing, files, monkeypatch):
    """Whichever rank ends, and whichever is the slowest to write."""
    out = files / f"broken_{broken}_{writing}".replace(" ", "_")
    monkeypatch.setenv("BROKEN_RANKS", broken)
    monkeypatch.setenv("WRITING_SECONDS", writing)
    ended = run(
        files / "breaking.py",
        files / "sft.yaml",
        f"output_dir={out}",
        processes=processes,
        check=False,
        launcher=processes > 1,
    )
    assert ended.returncode == 1 and "RuntimeError: something breaks" in ended.stderr_text, ended.stderr_text
    assert saved(out) == ["iter_0000001", "iter_0000002"]
    assert CheckpointStore(out / "checkpoints").tracked_step() == 2


@pytest.mark.long
def test_failed_run_discards_checkpoint_after_time_limit(files, monkeypatch):
    out = files / "too_slow"
    monkeypatch.setenv("BROKEN_RANKS", "0")
    monkeypatch.setenv("WRITING_SECONDS", "0=1000")
    overrides = (f"output_dir={out}", "checkpoint.timeout_seconds=8")
    ended = run(files / "breaking.py", files / "sft.yaml", *overrides, check=False)
    assert ended.returncode == 1 and "RuntimeError: something breaks" in ended.stderr_text, ended.stderr_text
    assert saved(out) == ["iter_0000001"]


HANGING = """
import os, shutil, signal, threading
from mcore_rl.platform import initialize_platform
initialize_platform()
from mcore_rl.algorithms.sft import train_sft
from mcore_rl.algorithms.supervised import SupervisedTrainer
from mcore_rl.cli.entry_point import run_script
from mcore_rl.config import SFTConfig
from mcore_rl.utils.checkpoint_store import CheckpointStore
from mcore_rl.utils.shard_process import ShardProcess

step, begin, submit, remove = SupervisedTrainer.train_step, CheckpointStore.begin, ShardProcess.submit, shutil.rmtree
case = os.environ["CASE"]

def hang():
    threading.Event().wait()

def begin_or_hang(self, number):
    return hang() if number == 2 else begin(self, number)

def submit_and_stop(self, job, block):
    if "iter_0000002" in str(job.directory):
        os.kill(self.pid, signal.SIGSTOP)
        if case == "the writer dies":
            threading.Timer(2.0, os.kill, (self.pid, signal.SIGKILL)).start()
    submit(self, job, block)

def step_or_break(self, number):
    if number == 3:
        raise RuntimeError("something breaks")
    return step(self, number)

def remove_or_hang(path, **options):
    return hang() if ".partial" in str(path) else remove(path, **options)

if __name__ == "__main__":
    if case == "a directory cannot be made":
        CheckpointStore.begin = begin_or_hang
    else:
        ShardProcess.submit = submit_and_stop
    if case == "nothing can be removed":
        SupervisedTrainer.train_step, shutil.rmtree = step_or_break, remove_or_hang
    run_script("sft", SFTConfig, train_sft, "")
"""


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.long)])
def test_save_on_hung_file_system_fails_after_time_limit(processes, files, monkeypatch):
    (files / "hanging.py").write_text(HANGING)
    monkeypatch.setenv("CASE", "a directory cannot be made")
    overrides = (f"output_dir={files / f'hung_{processes}'}", "checkpoint.timeout_seconds=3")
    ended = run(files / "hanging.py", files / "sft.yaml", *overrides, processes=processes, check=False)
    assert ended.returncode == 3, ended.stderr_text
    told = (
        "error: step 2: the checkpoint could not be written: rank 0: TimeoutError: the file system has not answered "
        "within 3 s; if it is only slow, raise checkpoint.timeout_seconds"
    )
    assert told in ended.stderr_text
    assert saved(files / f"hung_{processes}") == ["iter_0000001"]


@pytest.mark.long
def test_run_ends_although_file_system_hangs(files, monkeypatch):
    """The checkpoint of the second step cannot be written, and then not be removed."""
    (files / "hanging.py").write_text(HANGING)
    monkeypatch.setenv("CASE", "nothing can be removed")
    overrides = (f"output_dir={files / 'hung_at_end'}", "checkpoint.timeout_seconds=3")
    started = time.monotonic()
    ended = run(files / "hanging.py", files / "sft.yaml", *overrides, check=False)
    assert ended.returncode == 1 and "RuntimeError: something breaks" in ended.stderr_text, ended.stderr_text
    assert time.monotonic() - started < 60
    assert [path.name for path in CheckpointStore(files / "hung_at_end" / "checkpoints").iterations()] == [
        "iter_0000001"
    ]


@pytest.mark.long
def test_failed_save_is_reported_with_its_own_step(files, monkeypatch):
    """The process that writes dies while later steps are trained."""
    (files / "hanging.py").write_text(HANGING)
    monkeypatch.setenv("CASE", "the writer dies")
    overrides = (f"output_dir={files / 'own_step'}", "checkpoint.save_interval=2", "checkpoint.on_failure=continue")
    ended = run(files / "hanging.py", files / "sft.yaml", *overrides, "trainer.max_steps=3")
    (told,) = [line for line in ended.stdout_text.splitlines() if "could not be written" in line]
    assert told.startswith("step 2: the checkpoint could not be written: rank 0: the process that wrote died")
    assert saved(files / "own_step") == ["iter_0000003"]


JUDGE = """
from pathlib import Path

def judge(message_log, record):
    with Path(__file__).with_name("calls").open("ab", buffering=0) as file:
        file.write(b"x")
        number = file.tell()  # of this call; others may have begun
    if number > 8:
        raise RuntimeError("the judge is down")
    return float(number)  # never the same in a group
"""


def test_run_saves_checkpoint_when_judge_fails(files, monkeypatch):
    """All samples of two steps are judged, those of the third are not."""
    out = files / "judge_down"
    (files / "falling_judge.py").write_text(JUDGE)
    monkeypatch.setenv("PYTHONPATH", str(files), prepend=os.pathsep)
    overrides = [f"output_dir={out}", f"model.path={files / 'model'}", f"data.train={files / 'prompts.jsonl'}"]
    overrides += ["data.max_sequence_length=32", "trainer.max_steps=5", "checkpoint.export_hf=false"]
    overrides += ["environment.name=function", "environment.function=falling_judge:judge", "environment.num_workers=1"]
    overrides += ["grpo.num_prompts_per_step=2", "grpo.num_generations_per_prompt=2", "grpo.max_new_tokens=4"]
    (files / "calls").unlink(missing_ok=True)
    ended = run("train_grpo.py", *overrides, "environment.max_failed_steps=1", check=False)
    assert ended.returncode == 3, ended.stdout_text + ended.stderr_text
    assert "no sample could be judged in 1 step; the last error: RuntimeError: the judge is down" in ended.stderr_text
    (name,) = saved(out)
    state = torch.load(out / "checkpoints" / name / "common.pt", weights_only=False)["state"]
    step = int(name.removeprefix("iter_"))
    assert step >= 1 and state["consumed_samples"] == 2 * step


FADING_JUDGE = """
from pathlib import Path

def judge(message_log, record):
    with Path(__file__).with_name("calls_of_fading").open("ab", buffering=0) as file:
        file.write(b"x")
        number = file.tell()  # of this call; others may have begun
    if number > 9 and number % 4:
        raise RuntimeError("the judge is overloaded")
    return float(number)  # never the same in a group
"""


@pytest.mark.long
def test_run_saves_checkpoint_when_judge_fails_on_most_samples(files, monkeypatch):
    """All samples of two steps are judged, and one in four of the later steps."""
    out = files / "judge_fading"
    (files / "fading_judge.py").write_text(FADING_JUDGE)
    monkeypatch.setenv("PYTHONPATH", str(files), prepend=os.pathsep)
    overrides = [f"output_dir={out}", f"model.path={files / 'model'}", f"data.train={files / 'prompts.jsonl'}"]
    overrides += ["data.max_sequence_length=32", "trainer.max_steps=20", "checkpoint.export_hf=false"]
    overrides += ["environment.name=function", "environment.function=fading_judge:judge", "environment.num_workers=1"]
    overrides += ["grpo.num_prompts_per_step=2", "grpo.num_generations_per_prompt=2", "grpo.max_new_tokens=4"]
    (files / "calls_of_fading").unlink(missing_ok=True)
    ended = run("train_grpo.py", *overrides, check=False)
    assert ended.returncode == 3, ended.stdout_text + ended.stderr_text
    told = "more than environment.max_failed_fraction=0.5 of the samples could not be judged in 3 consecutive steps"
    assert f"{told}; the last error: RuntimeError: the judge is overloaded" in ended.stderr_text
    (step,) = re.findall(r"error: step (\d+): ", ended.stderr_text)
    assert saved(out) == [f"iter_{int(step) - 1:07d}"]


DYING_JUDGE = """
import os
from pathlib import Path

calls = Path(__file__).with_name("calls_of_dying")
if calls.exists() and calls.stat().st_size > 8:
    raise RuntimeError("the judge is gone")

def judge(message_log, record):
    with calls.open("a") as file:
        file.write("x")
    if calls.stat().st_size > 8:
        os._exit(1)
    return float(calls.stat().st_size)  # never the same in a group
"""


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.long)])
def test_run_saves_offloaded_state_when_judge_is_lost(processes, files, monkeypatch):
    """The judge's process dies while the responses of the third step are judged, and it does not start again."""
    out = files / f"judge_lost_{processes}"
    (files / "dying_judge.py").write_text(DYING_JUDGE)
    monkeypatch.setenv("PYTHONPATH", str(files), prepend=os.pathsep)
    overrides = [f"output_dir={out}", f"model.path={files / 'model'}", f"data.train={files / 'prompts.jsonl'}"]
    overrides += ["data.max_sequence_length=32", "trainer.max_steps=5", "checkpoint.export_hf=false"]
    overrides += ["environment.name=function", "environment.function=dying_judge:judge", "environment.num_workers=1"]
    overrides += ["grpo.num_prompts_per_step=2", "grpo.num_generations_per_prompt=2", "grpo.max_new_tokens=4"]
    overrides += ["generation.offload=true", "environment.max_failed_steps=100", "parallel.timeout_seconds=60"]
    overrides += [f"parallel.tensor_model_parallel_size={processes}"]
    (files / "calls_of_dying").unlink(missing_ok=True)
    ended = run("train_grpo.py", *overrides, processes=processes, check=False)
    assert ended.returncode == 3, ended.stdout_text + ended.stderr_text
    assert "a judging process has ended, and starting it again failed" in ended.stderr_text
    assert "RuntimeError: the judge is gone" in ended.stderr_text
    (name,) = saved(out)
    state = torch.load(out / "checkpoints" / name / "common.pt", weights_only=False)["state"]
    step = int(name.removeprefix("iter_"))
    assert step >= 1 and state["consumed_samples"] == 2 * step


POISONED = """
import torch
from mcore_rl.platform import initialize_platform
initialize_platform()
from mcore_rl.algorithms.sft import train_sft
from mcore_rl.algorithms.supervised import SupervisedTrainer
from mcore_rl.cli.entry_point import run_script
from mcore_rl.config import SFTConfig

validate_on = SupervisedTrainer.validate_on

def validate_poisoned(self, name, dataset, step):
    with torch.no_grad():
        for parameter in self.policy.parameters():
            parameter.fill_(float("nan") if step == 3 else 0.01)
    return validate_on(self, name, dataset, step)

if __name__ == "__main__":
    SupervisedTrainer.validate_on = validate_poisoned
    run_script("sft", SFTConfig, train_sft, "")
"""


@pytest.mark.exhaustive
@pytest.mark.long
def test_nan_in_validation_ends_run_without_restart(files):
    (files / "poisoned.py").write_text(POISONED)
    out = files / "nan"
    overrides = [f"output_dir={out}", f"data.validation={files / 'data.jsonl'}", "trainer.validation_interval=1"]
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2")
    command = [sys.executable, *launcher, files / "poisoned.py", files / "sft.yaml", *overrides]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=200, env=environment, check=False
    )
    text = ended.stdout + ended.stderr
    assert ended.returncode == 1 and re.search(r"exitcode +: 3", text), text
    assert text.count("train: 16 records") == 1, "it began once"
    told = f"step 3: validation: the loss is nan.*; the last checkpoint is {out / 'checkpoints' / 'iter_0000002'}"
    assert re.search(f"error: {told}$", text, re.MULTILINE), text
    assert re.search(
        f"error: {told}; a restart would end in the same way, so the run is not restarted$", text, re.MULTILINE
    ), text
    assert saved(out) == ["iter_0000001", "iter_0000002"]


def test_nan_in_validation_prints_one_line(files):
    (files / "poisoned.py").write_text(POISONED)
    out = files / "nan_alone"
    overrides = [f"output_dir={out}", f"data.validation={files / 'data.jsonl'}", "trainer.validation_interval=1"]
    ended = run(files / "poisoned.py", files / "sft.yaml", *overrides, check=False)
    assert ended.returncode == 3, ended.stderr_text
    assert re.fullmatch(r"error: step 3: validation: the loss is nan.*iter_0000002\n", ended.stderr_text)
    assert saved(out) == ["iter_0000001", "iter_0000002"]


WANDB = """
import json
from pathlib import Path

def init(**options):
    with Path(__file__).with_name("begun.jsonl").open("a") as file:
        file.write(json.dumps([options["id"], options["resume"]]) + "\\n")
    return Run()

class Run:
    def log(self, metrics, step):
        raise ConnectionError("the server is down")

    def finish(self):
        raise ConnectionError("the server is down")
"""

MLFLOW = """
def set_experiment(name):
    raise OSError(28, "No space left on device")
"""


@pytest.mark.exhaustive
@pytest.mark.long
def test_failing_trackers_are_reported_once(files, tmp_path, monkeypatch):
    """The training continues; after a restart, it is the same run on Weights & Biases."""
    (tmp_path / "wandb.py").write_text(WANDB)
    (tmp_path / "mlflow.py").write_text(MLFLOW)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    for steps in (2, 3):
        overrides = [f"output_dir={tmp_path / 'out'}", f"trainer.max_steps={steps}", "checkpoint.save_interval=null"]
        ended = run("train_sft.py", files / "sft.yaml", *overrides, "logging.wandb=project", "logging.mlflow=trials")
        told = [line for line in ended.stdout_text.splitlines() if line.startswith("warning: ")]
        assert told == [
            "warning: MLflow fails and is left out from now on (OSError: [Errno 28] No space left on device); "
            "metrics.jsonl goes on",
            "warning: Weights & Biases fails and is left out from now on (ConnectionError: the server is down); "
            "metrics.jsonl goes on",
        ]
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == 3
    first, second = map(json.loads, (tmp_path / "begun.jsonl").read_text().splitlines())
    assert first == second == [(tmp_path / "out" / "wandb.id").read_text(), "allow"]


def test_console_prints_once_that_it_cannot_print(capsys):
    with open("/dev/full", "w") as full:
        console = RunConsole(file=full)
        for _ in range(3):
            console.print("a line")
    told = "warning: standard output cannot be written (No space left on device); nothing more is printed to it\n"
    assert capsys.readouterr() == ("", told)


def test_console_prints_escapes_for_characters_that_it_does_not_have():
    printed = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    RunConsole(file=printed).print("loss 1 → 2 \ud83d", markup=False)
    assert printed.buffer.getvalue() == rb"loss 1 \u2192 2 \ud83d" + b"\n"


@pytest.mark.long
@pytest.mark.parametrize("output", ["full disk", "closed pipe"])
def test_run_goes_on_without_standard_output(output, files, tmp_path):
    """It exports, and its exit status is 0, also as Python flushes the output at the end."""
    overrides = [f"output_dir={tmp_path / 'out'}", "checkpoint.export_hf=true", "trainer.max_steps=3"]
    command = [sys.executable, ROOT / "scripts" / "train_sft.py", files / "sft.yaml", *overrides]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    reading, writing = os.pipe()
    os.close(reading)
    with open("/dev/full", "w") as full, os.fdopen(writing, "w") as pipe:
        out = full if output == "full disk" else pipe
        ended = subprocess.run(
            list(map(str, command)),
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            timeout=200,
            env=environment,
            check=False,
        )
    reason = "No space left on device" if output == "full disk" else "Broken pipe"
    told = f"warning: standard output cannot be written ({reason}); nothing more is printed to it\n"
    assert (ended.returncode, ended.stderr) == (0, told)
    assert saved(tmp_path / "out")[-1] == "iter_0000003" and (tmp_path / "out" / "hf" / "config.json").exists()


@pytest.mark.long
def test_run_that_prints_nowhere_is_stopped_by_a_signal(files, tmp_path):
    """Standard output and error are a pipe whose reader ends first, as `tee` after Ctrl-C."""
    overrides = [f"output_dir={tmp_path / 'out'}", "trainer.max_steps=100000", "checkpoint.save_interval=null"]
    command = [sys.executable, ROOT / "scripts" / "train_sft.py", files / "sft.yaml", *overrides]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        for line in process.stdout:
            if line.startswith("step 3/"):
                break
        process.stdout.close()
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130
    assert len(saved(tmp_path / "out")) == 1


def test_full_disk_loses_metrics_and_not_the_run(tmp_path, monkeypatch, capsys):
    """The line that was cut short is gone once there is room again."""
    values = {"output_dir": tmp_path, "model": {"path": "m"}, "data": {"train": "d"}}
    reporter, append = MetricsReporter(SFTConfig.model_validate(values), True, 1, 5), JsonLinesLog.append

    def append_half(self, step, *entries):
        append(self, step, *entries)
        if step in (2, 3):
            os.truncate(self.path, self.path.stat().st_size - 5)
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(JsonLinesLog, "append", append_half)
    for step in range(1, 6):
        reporter.record(step, {"loss": 1.0})
    assert [entry["step"] for entry in read_step_log(tmp_path / "metrics.jsonl")] == [1, 4, 5]
    printed = capsys.readouterr().out
    assert printed.count("metrics.jsonl cannot be written") == 1
    assert re.search(r"metrics\.jsonl cannot be written \(No space left on device, [\d,.]+ GiB free\)", printed)


@pytest.mark.parametrize("odd", [b"\0\0\0\n", b'{"loss": 1}\n', b'\xff\xfe{"step": 2}\n', b"\0" * 9 + b'{"step": 2}\n'])
def test_unreadable_lines_of_log_are_removed_and_reported_once(odd, tmp_path):
    """A crash of the machine leaves them; the run that resumes keeps all other lines."""
    path, said = tmp_path / "metrics.jsonl", list[str]()
    (first, second), again = [b'{"step": %d, "loss": 1.0}\n' % step for step in (1, 2)], b'{"step": 3, "loss": 1.0}\n'
    path.write_bytes(first + odd + second + odd + again + b"\0\0")
    log = OptionalLog(path, said.append)
    for step in (3, 4):
        log.append(step, {"loss": 1.0})
    assert path.read_bytes() == first + second + again + again.replace(b"3", b"4")
    assert said == [f"warning: {path}: unreadable lines are removed (2); the others are kept"]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.long
def test_run_resumes_after_crash_that_damaged_its_logs(files):
    out = files / "damaged_logs"
    for steps in (1, 2):
        ended = run("train_sft.py", files / "sft.yaml", f"output_dir={out}", f"trainer.max_steps={steps}")
        assert ("unreadable lines are removed (1)" in ended.stdout_text) == (steps == 2), ended.stdout_text
        with open(out / "metrics.jsonl", "ab") as file:
            file.write(b"\0" * 512 + b"\n")
    assert saved(out)[-1] == "iter_0000002"


@pytest.mark.long
def test_samples_that_cannot_be_written_are_reported_once(files):
    """The run goes on without them."""
    out, samples = files / "no_samples", files / "no_samples" / "samples.jsonl"
    overrides = [f"output_dir={out}", f"model.path={files / 'model'}", f"data.train={files / 'prompts.jsonl'}"]
    overrides += ["data.max_sequence_length=32", "checkpoint.export_hf=false", "environment.name=exact_match"]
    overrides += ["grpo.num_prompts_per_step=2", "grpo.num_generations_per_prompt=2", "grpo.max_new_tokens=4"]
    run("train_grpo.py", *overrides, "trainer.max_steps=1")
    samples.unlink()
    samples.mkdir()
    ended = run("train_grpo.py", *overrides, "trainer.max_steps=3")
    assert ended.stdout_text.count(f"warning: {samples} cannot be written (Is a directory)") == 1, ended.stdout_text
    assert saved(out)[-1] == "iter_0000003"
