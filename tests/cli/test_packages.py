"""Tests that packages which do not fit are told in one line with a remedy, before they are imported."""

import os
import subprocess
import sys

import pytest
from programs import ROOT

from mcore_rl.errors import UserError
from mcore_rl.utils import packages
from mcore_rl.utils.packages import check_packages, is_own_build, package_problems, requirements


@pytest.fixture
def pretend(monkeypatch):
    """A function that lets packages seem to have these versions; None for one that is not installed."""

    def change(**versions):
        named = {name.replace("_", "-"): version for name, version in versions.items()}
        real = packages.version_of
        monkeypatch.setattr(packages, "version_of", lambda name: named[name] if name in named else real(name))

    return change


def test_installed_packages_fit():
    assert {"torch", "megatron-core", "transformers"} <= {one.name for one in requirements()}
    assert not list(package_problems())


@pytest.mark.parametrize(
    ("versions", "problem"),
    [
        (
            {"torch": "2.5.1+cu124"},
            "torch 2.5.1+cu124 is installed, but mcore_rl needs torch>=2.6: pip install 'torch>=2.6'",
        ),
        ({"torch": "2.4.0a0+3bcc3cddb5.nv24.7"}, "needs torch>=2.6: use a container of a newer release"),
        (
            {"megatron_core": "0.15.3"},
            "mcore_rl needs megatron-core<0.20,>=0.16.1: pip install 'megatron-core<0.20,>=0.16.1'",
        ),
        ({"megatron_core": "0.20.0"}, "megatron-core 0.20.0 is installed, but mcore_rl needs megatron-core<0.20"),
        ({"transformers": "4.40.0", "datasets": "2.1"}, "transformers>=4.57'; datasets 2.1 is installed"),
    ],
)
def test_version_that_does_not_fit_is_told_with_its_remedy(versions, problem, pretend):
    pretend(**versions)
    with pytest.raises(UserError) as refusal:
        check_packages()
    assert problem in str(refusal.value)


@pytest.mark.parametrize("version", ["2.6.0", "2.10.0a0+b4e4ee81d3.nv25.12", "2.14.1+cu130", "2.13.0+cpu"])
def test_supported_torch_is_accepted(version, pretend):
    pretend(torch=version)
    assert not list(package_problems())


def test_package_on_the_path_without_metadata_is_accepted(pretend, monkeypatch):
    """Megatron-LM's folder on PYTHONPATH is such a package."""
    pretend(megatron_core=None)
    assert not list(package_problems())
    monkeypatch.setitem(packages.MODULES, "megatron-core", "megatron.no_such_module")
    assert list(package_problems()) == ["megatron-core is not installed: pip install 'megatron-core<0.20,>=0.16.1'"]


@pytest.mark.parametrize(
    ("version", "is_own"),
    [("2.9.0", False), ("2.13.0+cpu", False), ("2.11.0+cu130", False), ("2.5.0+f05f12c", True), (None, False),
     ("2.10.0a0+b4e4ee81d3.nv25.12", True)],
)  # fmt: skip
def test_builds_from_sources_are_recognized(version, is_own):
    assert is_own_build(version) == is_own


@pytest.fixture
def old_torch(tmp_path):
    """Environment in which the metadata of an old torch, and no torch at all, come first on the path."""
    info = tmp_path / "torch-2.5.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.5.1\n")
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    return {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}


def test_doctor_and_launches_tell_before_torch_is_imported(old_torch, tmp_path):
    def call(*arguments):
        command = [sys.executable, "-m", "mcore_rl", *arguments]
        return subprocess.run(command, env=old_torch, capture_output=True, text=True, timeout=60)

    problem = "torch 2.5.1 is installed, but mcore_rl needs torch>=2.6: pip install 'torch>=2.6'"
    done = call("doctor")
    assert done.returncode == 1 and done.stdout.endswith(f"\nMEND THIS: {problem}\n") and not done.stderr
    done = call("train", "sft", "--nproc-per-node", "2", "sft.yaml")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {problem}\n")


@pytest.fixture
def broken_torch(tmp_path):
    """Environment in which torch fails when it is imported, as a build for another CUDA does."""
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.11: cannot open shared object file')")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    return {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize(
    "arguments",
    [["doctor"], ["train", "sft", "--nproc-per-node", "2", "sft.yaml"], ["verify", "--nproc-per-node", "2"]],
)
def test_torch_that_cannot_be_imported_is_told_without_a_traceback(arguments, broken_torch):
    command = [sys.executable, "-m", "mcore_rl", *arguments]
    done = subprocess.run(command, env=broken_torch, capture_output=True, text=True, timeout=60)
    told = done.stdout if arguments == ["doctor"] else done.stderr
    assert done.returncode == (1 if arguments == ["doctor"] else 2)
    assert "cannot be imported (ImportError: libcudart.so.11: cannot open shared object file)" in told.splitlines()[-1]
    assert "Traceback" not in done.stdout + done.stderr


def test_start_of_a_program_tells_before_torch_is_imported(old_torch, model_of, tmp_path):
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    command = [
        sys.executable,
        "scripts/train_sft.py",
        f"--model={model_of('llama')}",
        f"--data={tmp_path / 'data.jsonl'}",
    ]
    command.append(f"--output={tmp_path / 'out'}")
    done = subprocess.run(command, env=old_torch, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: torch 2.5.1 is installed") and done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
