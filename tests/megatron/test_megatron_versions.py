"""Tests that the oldest and the newest supported Megatron-Core compute the same and read each other's checkpoints.

`make test-megatron` runs them with the newest version laid over the installed one.
"""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from float32 import EPSILON, FORWARD
from megatron_results import FAMILIES
from packaging.version import Version
from programs import ROOT

LIMIT = FORWARD * EPSILON
"""Largest relative difference of a metric, or of a tensor's norm: the versions may add in another order."""

pytestmark = pytest.mark.megatron


def installed_alone():
    """Return the environment without the Megatron that is laid over the installed one."""
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    others = [path for path in paths if not (Path(path) / "megatron").is_dir()]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(others)}


@pytest.fixture(scope="module")
def results(model_of, tmp_path_factory):
    """Results of the installed version and of the one laid over it, which also resumes the former's checkpoints."""
    root = tmp_path_factory.mktemp("versions")
    (root / "models").mkdir()
    for family in FAMILIES:
        (root / "models" / family).symlink_to(model_of(family))
    environments = {"installed": installed_alone(), "laid over": dict(os.environ), "installed again": installed_alone()}
    before = {"laid over": "installed", "installed again": "laid over"}
    for name, environment in environments.items():
        (root / name).mkdir()
        environment["PYTHONPATH"] = os.pathsep.join(
            [environment.get("PYTHONPATH", ""), str(ROOT), str(ROOT / "tests" / "support"), str(ROOT / "scripts")]
        ).lstrip(os.pathsep)
        other = [str(root / before[name])] if name in before else []
        other += ["--resume-only"] if name == "installed again" else []
        command = [sys.executable, "tests/support/megatron_results.py", str(root / "models"), str(root / name), *other]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr
    return [torch.load(root / name / "results.pt", weights_only=False) for name in environments]


def test_suite_runs_with_another_version_than_the_installed_one(results):
    installed, laid_over, again = (Version(one["version"]) for one in results)
    assert installed == again != laid_over == Version(version("megatron-core"))


def test_three_steps_are_equal(results):
    installed, laid_over, _ = results
    assert len(installed["outcomes"]) == 10
    for name, one in installed["outcomes"].items():
        other = laid_over["outcomes"][name]
        for number, (ours, theirs) in enumerate(zip(one.steps, other.steps, strict=True)):
            for metric, value in ours.items():
                assert theirs[metric] == pytest.approx(value, rel=LIMIT, abs=LIMIT), (name, number, metric)
        for kind in ("gradients", "weights"):
            mine, others = getattr(one, kind), getattr(other, kind)
            assert mine.keys() == others.keys() and mine
            whole = max(float(tensor.double().norm()) for tensor in mine.values())
            for key, tensor in mine.items():
                distance = float((tensor.double() - others[key].double()).norm())
                assert distance <= LIMIT * max(float(tensor.double().norm()), 1e-3 * whole), (name, kind, key)


def test_checkpoints_of_the_other_version_resume_bit_for_bit(results):
    for one in results[1:]:
        assert one["resumed other"].keys() == one["resumed"].keys() == set(FAMILIES)
        for family, (metrics, weights) in one["resumed"].items():
            other_metrics, other_weights = one["resumed other"][family]
            assert [x["loss"] for x in metrics] == [x["loss"] for x in other_metrics], family
            assert [x["grad_norm"] for x in metrics] == [x["grad_norm"] for x in other_metrics], family
            for name, tensor in weights.items():
                assert torch.equal(tensor, other_weights[name]), (family, name)
