"""Test that every command of `mcore-rl` works where only the wheel is installed, without a checkout."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from programs import ROOT
from small_models import make_model

from mcore_rl.cli.main import COMMANDS

COMMAND_SECONDS = 240


def call(*command, cwd, environment=None):
    return subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=environment,
        input="hello\n",  # what a person says to `mcore-rl chat`
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS,
    )


def built_wheel(directory):
    """Return the wheel, built in a copy of the sources: a build leaves files beside them."""
    sources = directory / "sources"
    shutil.copytree(ROOT / "mcore_rl", sources / "mcore_rl", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources / name)
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", directory]
    done = call(sys.executable, "-m", "pip", "wheel", *options, sources, cwd=directory)
    assert done.returncode == 0, done.stderr
    (wheel,) = directory.glob("*.whl")
    return wheel


def environment_with(wheel, directory):
    """Return the folder of programs of a new virtual environment that has the wheel, and this one's other packages."""
    done = call(sys.executable, "-m", "venv", "--without-pip", directory, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    python = directory / "bin" / "python"
    options = ["--quiet", "--no-deps", "--no-index"]
    install = [sys.executable, "-m", "pip", "--python", python, "install", *options, wheel]
    done = call(*install, cwd=directory, environment=without_checkout())
    assert done.returncode == 0, done.stderr
    # Last, because pip would take the checkout that is installed here for an earlier version. These folders come after
    # the environment's own, and what their own .pth files name, such as the checkout, is not added.
    (own,) = directory.glob("lib/python*/site-packages")
    others = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (own / "packages.pth").write_text("".join(f"{path}\n" for path in others))
    return directory / "bin"


def without_checkout():
    """Return this process's environment variables without those that lead to the checkout."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


def write_inputs(root):
    make_model("llama", root / "model")
    pairs = [{"prompt": f"say {i} ", "chosen": "ab" * (1 + i % 3), "rejected": "no"} for i in range(8)]
    (root / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    common = {
        "output_dir": "out",
        "model": {"path": "model"},
        "data": {"train": "pairs.jsonl", "max_sequence_length": 48},
        "trainer": {"max_steps": 1},
    }
    dpo = {**common, "batch": {"global_batch_size": 4}}
    servers = {"backend": "vllm", "vllm": {"python": sys.executable}}
    grpo = {**common, "grpo": {"max_new_tokens": 8}, "generation": servers}
    for name, config in (("dpo", dpo), ("grpo", grpo)):
        (root / f"{name}.yaml").write_text(yaml.safe_dump(config))
    prompts = [{"prompt": f"say {i} ", "answer": str(i)} for i in range(4)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    (root / "trl.sh").write_text("trl dpo --model_name_or_path m --dataset_name d.jsonl --beta 0.2 --output_dir o\n")


RUNS = [
    ("doctor", "^a run can start$"),
    ("schema dpo", '^ "title": "DPOConfig"'),
    ("port trl.sh", "^ *reference_policy_kl_penalty: 0.2$"),
    ("train dpo --nproc-per-node 2 dpo.yaml parallel.tensor_model_parallel_size=2", "^Hugging Face model: out/hf$"),
    ("report out", r"^out/report\.html$"),
    ("convert inspect out/checkpoints", "lm_head|output_layer"),
    ("convert to-hf out/checkpoints converted", "^Hugging Face model: converted$"),
    ("convert from-hf converted weights", "^Megatron checkpoint: weights/iter_0000001$"),
    ("eval out --data prompts.jsonl --judge exact_match --output judged grpo.max_new_tokens=4", "^  reward_mean "),
    ("chat out --max-tokens 4", r"^out \(/help lists the commands\)$"),  # it starts `mcore-rl serve`
    ("serve --help", "^usage: mcore-rl serve "),
    ("simulate dpo.yaml --algorithm dpo --world-size 2 --lengths 40", "^estimate: "),
    ("layouts dpo.yaml --layouts tp=2 --steps 1", r"^tp2 .*\de[+-]\d\d$"),
    ("vllm-servers grpo.yaml --dry-run --gpus-per-node 1", r"^  0     127\.0\.0\.1  8100  0$"),
    ("verify --nproc-per-node 2 --only collectives --minutes 3 --output verified", "^collectives +passed"),
]
"""Arguments of `mcore-rl`, and a line of what it prints; each may use what those before it have written."""


@pytest.mark.long
def test_every_command_works_where_the_wheel_is_installed(tmp_path):
    programs = environment_with(built_wheel(tmp_path), tmp_path / "environment")
    work = tmp_path / "work"
    work.mkdir()
    write_inputs(work)
    environment = {**without_checkout(), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

    found = call(
        programs / "python", "-c", "import mcore_rl; print(*mcore_rl.__path__)", cwd=work, environment=environment
    )
    assert Path(found.stdout.strip()).is_relative_to(tmp_path / "environment"), found.stdout + found.stderr
    listed = call(programs / "mcore-rl", "--help", cwd=work, environment=environment)
    assert listed.returncode == 0 and all(f"\n    {name} " in listed.stdout for name in COMMANDS), listed.stderr
    assert {arguments.split()[0] for arguments, _ in RUNS} == set(COMMANDS), "each command has its line above"
    for arguments, line in RUNS:
        done = call(programs / "mcore-rl", *arguments.split(), cwd=work, environment=environment)
        told = f"mcore-rl {arguments}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        assert done.returncode == 0, told
        assert re.search(line, done.stdout, re.MULTILINE), told
        assert str(ROOT) not in done.stdout + done.stderr, told
