"""Tests of faults (killed ranks, full disks, hangs): no checkpoint is lost, and the numbers are those of a run without
faults.

pytest -m faults --kills 50     # `make faults`; the short form is part of the ordinary suite
"""

import contextlib
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from programs import ROOT
from safetensors.torch import load_file
from small_models import make_model

from mcore_rl.testing.processes import run_processes
from mcore_rl.utils.checkpoint_store import CheckpointStore, digest_problems

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("faults")
    make_model("llama", root / "model", initializer_range=0.05)
    records = [{"prompt": f"say {i} ", "completion": "abcdefgh"[: 2 + i % 6] * (1 + i % 3)} for i in range(30)]
    (root / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    config = {
        "output_dir": "set below",
        "model": {"path": str(root / "model")},
        "data": {"train": str(root / "data.jsonl"), "max_sequence_length": 48},
        "batch": {"global_batch_size": 8},
        "optimizer": {"lr": 3e-3, "schedule": "constant"},
        "trainer": {"max_steps": 8},
        "checkpoint": {"save_interval": 1, "keep_last": 3},
    }
    (root / "sft.yaml").write_text(yaml.safe_dump(config))
    return root


def start(files, out, *arguments, restarts=0, processes=2, script=None, **options):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    launcher += ["--max-restarts", str(restarts), "--monitor-interval", "0.1"]
    command = [sys.executable, *launcher, script or ROOT / "scripts" / "train_sft.py", files / "sft.yaml"]
    log = Path(f"{out}.log")  # not a pipe, which would fill up without a reader
    process = subprocess.Popen(
        list(map(str, [*command, f"output_dir={out}", *arguments])),
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        **options,
    )
    process.log = log
    return process


def finish(process, timeout=300):
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        pytest.fail(f"no end in {timeout} s: {kill_all(process)}")
    return process.log.read_text()


def kill_all(launcher):
    """End torchrun and its ranks, which have separate sessions; return their output."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in (launcher, *psutil.Process(launcher.pid).children(recursive=True)):
            process.kill()
    return launcher.log.read_text()


def losses(out):
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["grad_norm"], line["num_tokens"]) for line in lines]


def steps_seen(out):
    path = out / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def tracked(out):
    return CheckpointStore(out / "checkpoints").tracked_step() or 0


def workers(launcher):
    """The ranks' processes."""
    found = []
    for child in psutil.Process(launcher.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [child] if "train_sft.py" in " ".join(child.cmdline()) else []
    return found


def test_killed_ranks_lose_nothing(files, request):
    """Send SIGKILL to a random rank at a random time, every second time while a checkpoint is being written.

    torchrun starts the ranks again, and they go on from the newest checkpoint by themselves.
    """
    kills, generator = request.config.getoption("--kills"), random.Random(1)
    steps = f"trainer.max_steps={8 * kills + 8}"
    undisturbed, out = files / "undisturbed", files / "killed"
    reference = start(files, undisturbed, steps, "checkpoint.save_interval=1000")
    text = finish(reference, timeout=600)
    assert reference.returncode == 0, text
    process = start(files, out, steps, restarts=kills)
    try:
        lost, during_saving, from_the_start = [], 0, 0
        for kill in range(kills):
            before, deadline = steps_seen(out), time.monotonic() + 120
            while process.poll() is None and steps_seen(out) <= before:  # the restarted run has begun to train
                assert time.monotonic() < deadline, "no progress after a restart"
                time.sleep(0.02)
            time.sleep(generator.uniform(0, 0.5))
            while kill % 2 and process.poll() is None and not list((out / "checkpoints").glob(".iter_*.partial")):
                time.sleep(0.001)
            during_saving += bool(list((out / "checkpoints").glob(".iter_*.partial")))
            committed = tracked(out)
            from_the_start += not committed
            generator.choice(workers(process)).kill()
            time.sleep(0.3)
            store = CheckpointStore(out / "checkpoints")
            newest = store.candidates()[0]
            if tracked(out) < committed or (committed and not newest) or (newest and digest_problems(newest[0])):
                lost.append((kill, committed, newest))
    except BaseException:
        print(kill_all(process))
        raise
    text = finish(process, timeout=600)
    assert process.returncode == 0, text
    assert not lost
    assert text.count("resumed from") >= kills - from_the_start  # a kill may come before the first checkpoint
    assert losses(out) == losses(undisturbed)
    ours, theirs = (load_file(run / "hf" / "model.safetensors") for run in (out, undisturbed))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    print(f"{kills} kills, {during_saving} while a checkpoint was being written; nothing lost")


def test_ranks_save_and_end_after_a_killed_launcher(files):
    """They are orphans then: nothing would end them, and the next start would be refused while they train on."""
    out, steps = files / "orphans", "trainer.max_steps=100000"
    process = start(files, out, steps, "checkpoint.save_interval=1000000")
    deadline, ranks = time.monotonic() + 120, []
    try:
        while steps_seen(out) < 2:
            assert process.poll() is None and time.monotonic() < deadline, process.log.read_text()
            time.sleep(0.02)
        ranks = workers(process)
        assert len(ranks) == 2
        process.kill()
        _, alive = psutil.wait_procs(ranks, timeout=60)
        assert not alive, process.log.read_text()
    finally:
        for rank in (process, *ranks):
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.kill()
    text = process.log.read_text()
    assert text.count("the launcher has ended: finishing the step and saving") == 1, text
    saved = tracked(out)
    assert saved == steps_seen(out) >= 2
    again = start(files, out, f"trainer.max_steps={saved + 1}", "checkpoint.export_hf=false")
    assert f"iter_{saved:07d}" in finish(again) and again.returncode == 0, again.log.read_text()


def save_with_a_writer_that(fate, config, directory):
    """Run two saves on each rank; in the first, the writer process of rank 1 has this `fate`."""
    from layout_cases import make_data

    from mcore_rl.algorithms.loss_functions import NLLLoss
    from mcore_rl.models.megatron.checkpoint import save
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy
    from mcore_rl.utils.shard_process import ShardProcess

    policy = MegatronPolicy(config, total_steps=5)
    policy.train(make_data(), NLLLoss())
    submit, seconds = ShardProcess.submit, time.monotonic()

    def submit_to_its_fate(self, job, block):
        self.start()
        while not self.is_ready:
            self.poll()
            time.sleep(0.05)
        if fate == "has no room":
            resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        submit(self, job, block)
        if fate != "has no room":
            os.kill(self.pid, signal.SIGKILL if fate == "is killed" else signal.SIGSTOP)

    if torch.distributed.get_rank() == 1:
        ShardProcess.submit = submit_to_its_fate
    error = None
    try:
        policy.save_checkpoint(directory, 1, {})
    except save.SaveError as failure:
        error = str(failure)
    seconds = time.monotonic() - seconds
    ShardProcess.submit = submit
    second = policy.save_checkpoint(directory, 2, {})
    policy.shutdown()
    return error, seconds, second


@pytest.mark.parametrize(
    ("fate", "seconds_to_write", "message"),
    [
        ("is killed", 120, r"rank 1: the process that wrote died \(exit status -9\)"),
        ("hangs", 20, "rank 1: writing took longer than checkpoint.timeout_seconds=20"),
        (
            "has no room",
            120,
            r"rank 1: DiskFullError: \S+ cannot be written \(File too large, .* GiB free\); make room there",
        ),
    ],
)
def test_a_writing_process_that(fate, seconds_to_write, message, files, tmp_path):
    from mcore_rl.config import SFTConfig, load_config

    overrides = [f"output_dir={tmp_path}", f"checkpoint.timeout_seconds={seconds_to_write}"]
    overrides += ["data.max_sequence_length=64"]
    config = load_config(SFTConfig, files / "sft.yaml", overrides)
    for error, seconds, second in run_processes(save_with_a_writer_that, fate, config, tmp_path, world_size=2):
        assert re.fullmatch(message, error)
        assert fate != "has no room" or str(tmp_path) in error
        assert seconds < seconds_to_write + 60
        assert digest_problems(second) == []
    assert [path.name for path in CheckpointStore(tmp_path).iterations()] == ["iter_0000002"]


def limit_files():
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))


@pytest.mark.parametrize(("on_failure", "status"), [("stop", 3), ("continue", 0)])
def test_a_disk_that_is_full(files, on_failure, status):
    """The disk has no space for the shards; earlier checkpoints stay."""
    out = files / f"full_{on_failure}"
    first = start(files, out, "trainer.max_steps=2", processes=1)
    assert "checkpoint: " in finish(first)
    arguments = ("trainer.max_steps=4", f"checkpoint.on_failure={on_failure}", "checkpoint.export_hf=false")
    process = start(files, out, *arguments, processes=1, preexec_fn=limit_files)
    text = finish(process)
    assert "the checkpoint could not be written: rank 0: " in text
    assert "resumed from" in text
    assert (process.returncode == 0) == (status == 0), text
    assert len(losses(out)) >= 3  # a failure is reported at the end of the step during which it happened
    candidates, _ = CheckpointStore(out / "checkpoints").candidates()
    assert [path.name for path in candidates] == ["iter_0000002", "iter_0000001"]
    assert digest_problems(candidates[0]) == []


STUCK = """
import time, torch
from mcore_rl.platform import initialize_platform
initialize_platform()
from mcore_rl.algorithms.sft import train_sft
from mcore_rl.config import SFTConfig
from mcore_rl.cli.entry_point import run_script
from mcore_rl.models.policy.megatron_policy import MegatronPolicy

forward_backward = MegatronPolicy.forward_backward

def train_or_sleep(self, *args, **kwargs):
    if torch.distributed.get_rank() == 1 and self.scheduler.num_steps == 2:
        time.sleep(50)
    return forward_backward(self, *args, **kwargs)

if __name__ == "__main__":
    MegatronPolicy.forward_backward = train_or_sleep
    run_script("sft", SFTConfig, train_sft, "")
"""


def test_a_stuck_collective_ends_and_tells_where_each_rank_was(files):
    script, out = files / "stuck_train_sft.py", files / "stuck"
    script.write_text(STUCK)
    process = start(files, out, "parallel.timeout_seconds=25", "checkpoint.save_interval=null", script=script)
    text = finish(process)
    assert process.returncode != 0
    assert "a collective took longer than parallel.timeout_seconds; what each rank was doing is in" in text
    sleeping, waiting = ((out / "stacks" / f"rank_0000{rank}.txt").read_text() for rank in (1, 0))
    assert sleeping.startswith("rank 1, step 3: training, since ")
    assert waiting.startswith("rank 0, step 3: training, since ")
    assert "in train_or_sleep" in sleeping
    assert "in train_or_sleep" in waiting and "Timed out waiting" in waiting
