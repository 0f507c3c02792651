"""Tests of the Slurm scripts under Slurm: a controller and two nodes of two GPUs each, on this machine (GPUs of Slurm's
accounts only: training runs on the CPU)."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress

import pytest
import yaml
from ports import free_port
from programs import ROOT, SUPPORT, metrics_of
from recipes import LARGE, PROCESSES, shrunk_run
from small_models import make_model
from stand_in_vllm import calls
from vllm_cases import vllm_python

pytestmark = pytest.mark.slurm
SCRIPTS = ROOT / "scripts" / "slurm"
NODES = ("node1", "node2")

CONFIGURATION = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
SwitchType=switch/none
SlurmdParameters=config_overrides
GresTypes=gpu
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def slurm(*command):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Start Slurm; return the directory of its jobs, with a virtual environment and data."""
    assert shutil.which("slurmctld") and shutil.which("slurmd"), "Slurm is missing (Debian: slurm-wlm)"
    root = tmp_path_factory.mktemp("slurm")
    (root / "state").mkdir()
    line = "NodeName={0} NodeHostname={1} NodeAddr=127.0.0.1 Port={2} CPUs=2 Gres=gpu:2"
    nodes = "\n".join(line.format(node, socket.gethostname(), free_port()) for node in NODES)
    (root / "slurm.conf").write_text(CONFIGURATION.format(root=root, nodes=nodes, port=free_port()))
    for index in range(2):
        (root / f"gpu{index}").touch()
    (root / "gres.conf").write_text(f"AutoDetect=off\nName=gpu File={root}/gpu[0-1]\n")
    make_model("llama", root / "model")
    records = [{"prompt": f"say {i} ", "completion": "ab" * (i + 1), "answer": "ab"} for i in range(8)]
    (root / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (root / "venv" / "bin").mkdir(parents=True)
    (root / "names").mkdir()
    (root / "venv" / "bin" / "activate").write_text(f'PATH="{root}/venv/bin:$PATH"\n')
    # Two lines stand for the cluster's name service: both nodes are this machine. Servers count Slurm's GPUs.
    counting = f'{SUPPORT / "on_gpus.py"} "${{PROCESSES_PER_NODE:-2}}" 127.0.0.1 "$@"'
    program(
        root / "venv" / "bin" / "mcore-rl",
        f'[ "$1" != vllm-servers ] || exec {sys.executable} {counting}\n'
        f'exec {sys.executable} -m mcore_rl "${{@/#node?:/127.0.0.1:}}"',
    )
    program(root / "names" / "getent", "echo 127.0.0.1 $2")
    program(root / "venv" / "bin" / "python", f'exec {sys.executable} "$@"')
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"SLURM_CONF": root / "slurm.conf", "VENV": root / "venv", "PYTHONPATH": ROOT}.items():
            patch.setenv(name, str(value))
        patch.setenv("PATH", str(root / "names"), prepend=os.pathsep)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("RENDEZVOUS_PORT", str(free_port()))
        commands = [["slurmctld", "-D", "-c"], *(["slurmd", "-D", "-N", node] for node in NODES)]
        log = open(root / "daemons.log", "w")  # noqa: SIM115
        daemons = [subprocess.Popen(command, stdout=log, stderr=log) for command in commands]
        try:
            until(
                lambda: slurm("sinfo", "--noheader", "-o", "%T %D").split() == ["idle", "2"], 20, root / "daemons.log"
            )
            yield root
        finally:
            subprocess.run(["scancel", "--user", "root"], timeout=60, check=False)
            for daemon in reversed(daemons):
                daemon.terminate()
            for daemon in daemons:
                daemon.wait(60)


def program(path, body):
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


def until(reached, seconds, log):
    deadline = time.monotonic() + seconds
    while True:
        with suppress(AssertionError):  # the controller does not answer yet
            if reached():
                return
        assert time.monotonic() < deadline, log.read_text()[-4000:] if log.exists() else f"no {log}"
        time.sleep(0.5)


class Job:
    def __init__(self, root, script, *arguments):
        options = ["--parsable", "--nodes", 2, "--gpus-per-node", 2, "--output", f"{root}/job-%j.log", "--chdir", ROOT]
        self.id = slurm("sbatch", *options, SCRIPTS / script, *arguments).strip()
        self.log = root / f"job-{self.id}.log"

    def told(self, key):
        return re.search(rf"\b{key}=(\S+)", slurm("scontrol", "show", "job", self.id))[1]

    def wait(self, seconds=240):
        until(
            lambda: self.told("JobState") not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"), seconds, self.log
        )
        return self.told("JobState"), self.told("ExitCode"), self.log.read_text()


def sft(root, name, *overrides):
    arguments = ["sft", "--model", root / "model", "--data", root / "data.jsonl", "--output", root / name]
    layout = ["parallel.tensor_model_parallel_size=2", "batch.global_batch_size=4", "data.max_sequence_length=48"]
    return [*arguments, *layout, *overrides]


def test_training_on_two_nodes_of_two_gpus(cluster):
    state, code, said = Job(cluster, "train.sbatch", *sft(cluster, "plain", "trainer.max_steps=2")).wait()
    assert (state, code) == ("COMPLETED", "0:0"), said
    assert "tensor 2 x pipeline 1 x context 1 x data 2" in said
    assert metrics_of(cluster / "plain")[-1]["step"] == 2


def test_a_mistake_ends_the_job(cluster):
    state, code, said = Job(cluster, "train.sbatch", *sft(cluster, "wrong", "optimizer.rate=1")).wait()
    assert state == "FAILED" and code in ("2:0", "143:0"), said  # 143: the other node's task was ended first
    assert "unknown key optimizer.rate" in said


def test_a_job_whose_time_is_up_saves_and_goes_on(cluster):
    """The batch shell gets the signal as from `#SBATCH --signal`; the job is queued again and goes on."""
    steps = 150
    job = Job(
        cluster, "train.sbatch", *sft(cluster, "long", f"trainer.max_steps={steps}", "checkpoint.export_hf=false")
    )
    metrics = cluster / "long" / "metrics.jsonl"
    until(lambda: metrics.exists() and metrics_of(cluster / "long")[-1]["step"] >= 3, 240, job.log)
    slurm("scancel", "--batch", "--signal", "USR1", job.id)
    until(lambda: job.told("Restarts") == "1" and job.told("JobState") == "PENDING", 120, job.log)
    assert "stopped by SIGUSR1 after step" in job.log.read_text()
    assert 3 <= metrics_of(cluster / "long")[-1]["step"] < steps
    slurm("scontrol", "update", f"JobId={job.id}", "StartTime=now+5")  # seconds; by itself Slurm waits two minutes
    state, code, said = job.wait(400)
    assert (state, code) == ("COMPLETED", "0:0"), said
    assert [entry["step"] for entry in metrics_of(cluster / "long")] == list(range(1, steps + 1))


def test_servers_on_one_node_and_trainers_on_the_other(cluster):
    """vLLM's place is taken by a stand-in, a server of transformers; two servers fill the two GPUs of their node."""
    stand_in = ROOT / "tests" / "support" / "stand_in_vllm.py"
    body = f'export PYTHONPATH={ROOT}; exec {sys.executable} {stand_in} "$4" "${{10}}" {cluster}/calls-${{10}}.log'
    program(cluster / "vllm_python", body)
    port = max(free_port(), free_port())
    config = {
        "output_dir": str(cluster / "grpo"),
        "model": {"path": str(cluster / "model")},
        "data": {"train": str(cluster / "data.jsonl"), "max_sequence_length": 48},
        "trainer": {"max_steps": 2},
        "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 4, "max_new_tokens": 6},
        "environment": {"name": "exact_match"},
        "generation": {"vllm": {"python": str(cluster / "vllm_python"), "port": port}},
    }
    (cluster / "grpo.yaml").write_text(yaml.safe_dump(config))
    job = Job(cluster, "grpo_vllm.sbatch", cluster / "grpo.yaml", "checkpoint.export_hf=false")
    state, code, said = job.wait(400)
    assert (state, code) == ("COMPLETED", "0:0"), said
    assert metrics_of(cluster / "grpo")[-1]["step"] == 2
    assert "data 2" in said
    calls = [(cluster / f"calls-{port + index}.log").read_text() for index in range(2)]
    assert all("generate" in text for text in calls)


def test_a_shipped_configuration_on_two_nodes(cluster, tmp_path, monkeypatch):
    _, words = shrunk_run(LARGE / "sft_235b_a22b_128gpu.yaml", tmp_path, monkeypatch)
    state, code, said = Job(cluster, "train.sbatch", *words).wait(400)
    assert (state, code) == ("COMPLETED", "0:0"), said
    assert [step["step"] for step in metrics_of(tmp_path / "out")] == [1, 2]


def test_a_shipped_configuration_with_engines_on_a_node_of_their_own(cluster, tmp_path, monkeypatch):
    """The smallest layout needs four processes, more than a node has GPUs: each node counts as one of four."""
    monkeypatch.setenv("PROCESSES_PER_NODE", str(PROCESSES))
    _, (_, *words) = shrunk_run(LARGE / "grpo_70b_64gpu.yaml", tmp_path, monkeypatch)
    port = max(free_port(), free_port())
    words += [f"generation.vllm.python={vllm_python(tmp_path)}", f"generation.vllm.port={port}"]
    state, code, said = Job(cluster, "grpo_vllm.sbatch", *words).wait(400)
    assert (state, code) == ("COMPLETED", "0:0"), said
    assert [step["step"] for step in metrics_of(tmp_path / "out")] == [1, 2]
    places = [tuple(line.split()) for line in (tmp_path / "places").read_text().splitlines()]
    assert sorted(devices for *_, devices in places) == ["0,1", "2,3"]
    for host, port, _ in places:
        assert "/mcore_rl/generate" in [path for _, path in calls(tmp_path / f"{host}:{port}.log")]
