"""Runs of two steps with each configuration for large models, shrunk by one rule (`recipes.shrunk`)."""

import math
import os
import signal
from contextlib import contextmanager

import pytest
from forked_programs import ForkedProgram, run_forked
from ports import free_port
from programs import ROOT, SUPPORT, metrics_of
from recipes import PROCESSES, RECIPES, shrunk_run
from stand_in_vllm import calls
from vllm_cases import vllm_python

pytestmark = [pytest.mark.long, pytest.mark.every_case]
SECONDS = 240


def environment():
    path = os.pathsep.join(filter(None, (str(SUPPORT), str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def train(words, out):
    """Train to the end on a node that counts as one with `PROCESSES` GPUs; return the metrics of both steps."""
    command = ["-m", "on_gpus", PROCESSES, "127.0.0.1", "train", *words]
    done = run_forked(command, environment(), PROCESSES, ROOT, SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = metrics_of(out)
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert math.isfinite(step["loss"]) and math.isfinite(step["grad_norm"]) and step["grad_norm"] > 0
    assert (out / "checkpoints" / "latest_checkpointed_iteration.txt").read_text().strip() == "2"
    return steps


@contextmanager
def servers(words):
    """Start the servers on a node of their own, as `grpo_vllm.sbatch` does; return the override for the trainer.

    A machine without GPUs refuses to start servers for `model.moe_router_replay`, as vLLM's build for the CPU cannot
    report experts. The servers get the key as false: the stand-in has an option of its own for it.
    """
    command = ["-m", "on_gpus", PROCESSES, "127.0.0.2", "vllm-servers", "--hosts", "127.0.0.2"]
    command += ["--gpus-per-node", PROCESSES, *words, "model.moe_router_replay=false"]
    printed = run_forked([*command, "--print-urls"], environment(), cwd=ROOT)
    assert printed.returncode == 0, printed.stderr
    serving = ForkedProgram(command, environment(), cwd=ROOT)
    try:
        yield printed.stdout.strip()
        assert serving.poll() is None, serving.communicate()
    finally:
        serving.send_signal(signal.SIGTERM)
        try:
            serving.communicate(timeout=30)
        finally:
            serving.kill()


ROLLOUTS = [path for path in RECIPES if path.stem.startswith("grpo")]
OTHERS = [path for path in RECIPES if path not in ROLLOUTS]


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.stem)
def test_two_steps_of_pairs_and_answers(path, tmp_path, monkeypatch):
    config, words = shrunk_run(path, tmp_path, monkeypatch)
    steps = train(words, tmp_path / "out")
    if config.algorithm == "dpo":
        assert steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-2)


@pytest.mark.parametrize("path", ROLLOUTS, ids=lambda path: path.stem)
def test_two_steps_of_rollouts(path, tmp_path, monkeypatch):
    """A stand-in takes vLLM's place. With `model.moe_router_replay` it has experts of its own and reports them."""
    config, words = shrunk_run(path, tmp_path, monkeypatch)
    options = ["--sleeps"] * config.generation.offload + ["--experts"] * config.model.moe_router_replay
    words += [f"generation.vllm.python={vllm_python(tmp_path, *options)}", f"generation.vllm.port={free_port()}"]
    if config.generation.offload:
        steps = train(words, tmp_path / "out")
    else:
        with servers(words[1:]) as urls:
            steps = train([*words, urls, f"generation.vllm.start_seconds={SECONDS / 2}"], tmp_path / "out")
    for step in steps:
        assert step["token_mult_prob_error"] == pytest.approx(1, abs=0.05)  # rounding of bfloat16
    places = [tuple(line.split()) for line in (tmp_path / "places").read_text().splitlines()]
    assert sorted(devices for *_, devices in places) == ["0,1", "2,3"]
    for host, port, _ in places:
        paths = [path for _, path in calls(tmp_path / f"{host}:{port}.log")]
        assert paths.count("/init_weight_transfer_engine") == 1
        assert paths.count("/finish_weight_update") == 2 and "/mcore_rl/generate" in paths
