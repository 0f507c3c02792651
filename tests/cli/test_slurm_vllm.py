"""Tests of the Slurm script with vLLM servers, with stand-ins for Slurm's commands."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest
import yaml
from programs import ROOT

SCRIPT = ROOT / "scripts" / "slurm" / "grpo_vllm.sbatch"
CONFIG = {
    "output_dir": "out",
    "model": {"path": "model"},
    "data": {"train": "data.jsonl"},
    "generation": {"vllm": {"tensor_parallel_size": 2}},
}
STAND_INS = {
    "getent": 'echo "10.0.0.${2#n}  $2"',
    "scontrol": """[ "$1" = requeue ] && echo "queued again: $2" >> "$STARTED"
printf 'n1\nn2\nn3\n'""",
    "srun": """[ -n "$REFUSED" ] && case "$*" in
*--print-urls*) ;;
*--node-rank\\ $REFUSED*) until [ "$(grep -c ready "$STARTED")" = 2 ]; do sleep 0.1; done; exit 2 ;;
esac
case "$*" in
*--print-urls*) while [ "$1" != vllm-servers ]; do shift; done; exec "$PYTHON" -m mcore_rl "$@" ;; esac
echo "$*" >> "$STARTED"
case "$*" in
*vllm-servers*) trap 'echo servers ended >> "$STARTED"; exit 0' TERM ;;
*) trap 'echo saved >> "$STARTED"; exit 138' USR1
   for _ in $(seq 200); do [ -n "$FAILS" ] && ! grep -q ready "$STARTED" && sleep 0.1; done
   [ -z "$FAILS" ] || exit 3 ;;
esac
echo ready >> "$STARTED"
for _ in $(seq 600); do sleep 0.1; done""",
}


def job(tmp_path, *words, **variables):
    """Start the script with the stand-ins; return its process and the file of what they were called with."""
    for name, body in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    started = tmp_path / "started"
    environment = {
        **os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "STARTED": str(started), "FAILS": "", "REFUSED": "",
        "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "4", "SLURM_CPUS_ON_NODE": "32",
        "VENV": "", "PYTHON": sys.executable, **variables,
    }  # fmt: skip
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(CONFIG))
    command = ["bash", SCRIPT, tmp_path / "c.yaml", *words]
    return subprocess.Popen(command, env=environment, start_new_session=True, cwd=ROOT, stderr=subprocess.PIPE), started


@pytest.mark.long
@pytest.mark.every_case
@pytest.mark.parametrize(
    ("fails", "nodes"), [("yes", 1), ("", 1), ("", 2)], ids=["the trainer fails", "time is up", "two nodes serve"]
)
def test_servers_and_trainer_are_started_and_end_together(fails, nodes, tmp_path):
    words = ["seed=1", *(["generation.vllm.num_servers=1"] if fails else [])]
    process, started = job(tmp_path, *words, FAILS=fails, SERVER_NODES=str(nodes))
    try:
        deadline = time.monotonic() + 20
        while not fails and not (started.exists() and started.read_text().count("ready") == nodes + 1):
            assert time.monotonic() < deadline, "servers and trainer do not start"
            time.sleep(0.05)
        if not fails:
            process.send_signal(signal.SIGUSR1)
        assert process.wait(30) == (3 if fails else 138)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    said = started.read_text().splitlines()
    *serving, training = sorted((line for line in said if "c.yaml" in line), key=lambda line: "train grpo" in line)
    hosts = [f"10.0.0.{index + 1}" for index in range(nodes)]
    assert sorted(line.split()[line.split().index("--nodelist") + 1] for line in serving) == ["n1", "n2"][:nodes]
    for line in serving:
        words = line.split()
        node = words[words.index("--nodelist") + 1]
        assert f"--hosts {','.join(hosts)} --node-rank {int(node[1:]) - 1} --gpus-per-node 4" in line
    words = training.split()
    assert words[words.index("--nnodes") + 1] == str(3 - nodes) and words[words.index("--nproc-per-node") + 1] == "4"
    assert words[words.index("--exclude") + 1] == ",".join(["n1", "n2"][:nodes])
    assert words[words.index("--rdzv-endpoint") + 1] == f"n{nodes + 1}:29500"
    assert said.count("servers ended") == nodes
    assert ("saved" in said) == ("queued again: 7" in said) == (not fails)
    # By default the servers, of two GPUs each, use all four of their node; a key on the command line goes before that.
    urls = ",".join(f"http://{host}:{8100 + index}" for host in hosts for index in range(1 if fails else 2))
    assert words[-1] == f"generation.vllm.urls=[{urls}]"


@pytest.mark.long
@pytest.mark.parametrize("node", [0, 1])
def test_a_job_whose_servers_are_refused_ends_at_once(node, tmp_path):
    """The trainer would wait generation.vllm.start_seconds for them."""
    process, started = job(tmp_path, SERVER_NODES="2", REFUSED=str(node))
    try:
        _, error = process.communicate(timeout=40)
        assert process.returncode == 2 and error.decode().endswith("servers did not start: the job ends\n")
        assert started.read_text().splitlines().count("servers ended") == 1  # those of the other node
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_a_job_in_which_all_nodes_would_serve_is_refused(tmp_path):
    (tmp_path / "scontrol").write_text("#!/bin/bash\nprintf 'n1\\nn2\\n'\n")
    (tmp_path / "scontrol").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "n[1-2]"}
    environment |= {"SERVER_NODES": "2", "SLURM_GPUS_ON_NODE": "4", "SLURM_CPUS_ON_NODE": "32"}
    done = subprocess.run(["bash", SCRIPT, "c.yaml"], env=environment, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2 and done.stderr == "2 nodes serve and at least one trains: give more --nodes\n"
