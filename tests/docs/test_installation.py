"""Tests of the installation: the constraints, the recipe in README and docs, and the versions that pip would take."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import make_version_table
import pytest
from packaging.requirements import Requirement
from programs import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = ("3.11", "3.12", "3.13")


def pins(python):
    """Return the pinned version of each package for a version of Python, by the package's name."""
    files = [ROOT / name for name in ("constraints.txt", "constraints-gpu.txt")]
    lines = (line for file in files for line in file.read_text().splitlines() if not line.startswith(("#", "-c")))
    environment = {"python_version": python, "python_full_version": f"{python}.0"}
    fit = [one for one in map(Requirement, lines) if one.marker is None or one.marker.evaluate(environment)]
    assert len({one.name for one in fit}) == len(fit), "a package is pinned twice"
    return {one.name.lower(): str(one.specifier).removeprefix("==") for one in fit}


@pytest.mark.parametrize("python", PYTHONS)
def test_constraints_pin_every_package_that_tests_install(python):
    extras = PROJECT["optional-dependencies"].items()
    not_tested = ("gpu", "wandb", "mlflow")
    lines = PROJECT["dependencies"] + [line for name, extra in extras if name not in not_tested for line in extra]
    for wanted in map(Requirement, lines):
        if wanted.name != "mcore_rl":
            name = wanted.name.lower()
            assert name in pins(python) and wanted.specifier.contains(pins(python)[name]), name


def test_constraints_of_gpu_nodes_leave_the_container_its_packages():
    named = {
        Requirement(line).name for line in (ROOT / "constraints-gpu.txt").read_text().splitlines() if line[0] != "#"
    }
    assert not named & {"torch", "numpy", "transformer-engine", "triton"}


def test_recipe_is_the_same_everywhere():
    """The Dockerfile is the recipe's last line alone: the image has an environment, torch and numpy."""
    readme, page = ((ROOT / name).read_text() for name in ("README.md", "docs/several_nodes.md"))
    (recipe,) = re.findall(r"```\n(unset PIP_CONSTRAINT.*?)\n```", readme, re.DOTALL)
    lines = recipe.splitlines()
    assert len(lines) == 3 and all(f"   {line}\n" in page for line in lines)
    last = lines[-1].removesuffix(" && mcore-rl doctor")
    assert f"RUN {last}\n" in (ROOT / "Dockerfile").read_text()
    assert "PIP_CONSTRAINT= " in (ROOT / "Dockerfile").read_text()


def instructions():
    """Return the instructions of the Dockerfile as (name, words)."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if line and not line.startswith("#")]
    return [(line.split()[0], line.split()[1:]) for line in lines]


def test_image_has_what_its_steps_need(tmp_path):
    """Each COPY finds its files in Git, and those before RUN are enough to build the package; CMD starts."""
    assert {name for name, _ in instructions()} <= {"ARG", "FROM", "WORKDIR", "ENV", "COPY", "RUN", "CMD"}
    names = [name for name, _ in instructions()]
    for _, words in [one for one in instructions()[: names.index("RUN")] if one[0] == "COPY"]:
        for source in words[:-1]:
            kept = subprocess.run(["git", "ls-files", source], cwd=ROOT, capture_output=True, text=True, check=True)
            assert kept.stdout, source
            target = tmp_path / (words[-1] if len(words) == 2 else f"{words[-1]}/{source}")
            is_directory = (ROOT / source).is_dir()
            (shutil.copytree if is_directory else shutil.copy)(ROOT / source, target)
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--no-deps",
        "--no-build-isolation",
        "--editable",
        ".",
    ]
    done = subprocess.run(install, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (command,) = [json.loads(" ".join(words)) for name, words in instructions() if name == "CMD"]
    assert command[0] in PROJECT["scripts"]


def builder():
    """Return the command that builds images here: of Docker, if its daemon answers, or of buildah; None without one."""
    for name, question in (
        ("docker", ["docker", "info", "--format", "{{.ServerVersion}}"]),
        ("buildah", ["buildah", "info"]),
    ):
        if shutil.which(name) and subprocess.run(question, capture_output=True, timeout=30).returncode == 0:
            return name
    return None


@pytest.mark.long
@pytest.mark.skipif(builder() is None, reason="no Docker daemon and no buildah")
def test_image_builds():
    command = [builder(), "build", "--build-arg", "BASE=python:3.12-slim", "--tag", "mcore_rl-test", "."]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-2000:]


def versions_run():
    """Return all versions of each package that a suite ran with, without local labels such as "+cpu"."""
    found = {}
    for record in make_version_table.records():
        for name, version in record["versions"].items():
            found.setdefault(name, set()).add(version.removeprefix("stand-in for ").partition("+")[0])
    return found


def resolved(python, lines, *options):
    """Return the versions that a resolver takes for these requirements, by name; it downloads metadata only."""
    command = [str(Path(sys.executable).with_name("uv")), "pip", "compile", "--quiet", "--no-header", "--no-annotate"]
    done = subprocess.run(
        [*command, "--python-version", python, *options, "-"], input="\n".join(lines), cwd=ROOT, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(line.split("==") for line in done.stdout.splitlines())


@pytest.mark.long
@pytest.mark.parametrize("python", PYTHONS)
def test_recipe_installs_versions_that_a_suite_ran_with(python):
    lines = PROJECT["dependencies"]
    taken = resolved(python, lines, "--constraint", "constraints.txt")
    for name in ("torch", "megatron-core", "transformers"):
        assert taken[name] in versions_run()[name], (name, taken[name])


@pytest.mark.long
@pytest.mark.parametrize("python", PYTHONS[1:])
def test_installation_without_constraints_takes_a_tested_megatron(python):
    """Without constraints, the newest versions are installed that pyproject.toml allows."""
    taken = resolved(python, [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["gpu"]])
    for name in ("megatron-core", "transformer-engine"):
        assert taken[name] in versions_run()[name], (name, taken[name])


def test_table_of_versions_is_made_of_the_records():
    assert make_version_table.main(["--check"]) == 0
    for path in make_version_table.KEPT.glob("*.json"):
        record = json.loads(path.read_text())
        assert record["passed"] and not record["failed"] and not record["error"], path.name
