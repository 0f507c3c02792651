"""Tests of the Slurm script, with stand-ins for Slurm's commands that start its tasks on this machine."""

import json
import os
import stat
import subprocess
import sys

import pytest
from ports import free_port
from programs import ROOT, metrics_of
from small_models import make_model

SCRIPT = ROOT / "scripts" / "slurm" / "train.sbatch"

SRUN = """#!/bin/bash
while [ "$1" != bash ]; do shift; done
for node in 0 1; do SLURM_NODEID=$node "$@" & tasks+=($!); done
status=0
for task in "${tasks[@]}"; do wait "$task" || status=$?; done
exit $status
"""
COMMANDS = {"srun": SRUN, "scontrol": "#!/bin/bash\nprintf '127.0.0.1\\nother\\n'\n"}


@pytest.mark.long
def test_two_nodes_of_two_processes(tmp_path):
    make_model("llama", tmp_path / "model")
    records = [{"prompt": f"say {i} ", "completion": "ab" * (i + 1)} for i in range(8)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for name, text in {**COMMANDS, "mcore-rl": f'#!/bin/bash\nexec {sys.executable} -m mcore_rl "$@"\n'}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(stat.S_IRWXU)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": os.getcwd(),
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_NNODES": "2",
        "SLURM_JOB_ID": "4711",
        "SLURM_CPUS_ON_NODE": "2",
        "SLURM_GPUS_ON_NODE": "2",
        "VENV": "",
        "RENDEZVOUS_PORT": str(free_port()),
        "CUDA_VISIBLE_DEVICES": "",
    }
    arguments = ["sft", "--model", tmp_path / "model", "--data", tmp_path / "data.jsonl", "--output", tmp_path / "out"]
    arguments += ["trainer.max_steps=2", "data.max_sequence_length=48", "parallel.tensor_model_parallel_size=2"]
    arguments += ["batch.global_batch_size=4"]
    done = subprocess.run(
        ["bash", SCRIPT, *map(str, arguments)], capture_output=True, text=True, timeout=150, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert len(metrics_of(tmp_path / "out")) == 2
    assert "tensor 2 x pipeline 1 x context 1 x data 2" in done.stdout
