"""The directory of SmolLM2-135M-Instruct, a published model, for tests: made once in outputs/smollm."""

import contextlib
import fcntl
import importlib.util
import shutil
import subprocess
import sys
import tempfile

import pytest
from programs import ROOT

DIRECTORY = ROOT / "outputs" / "smollm"


@contextlib.contextmanager
def alone():
    """Wait until no other worker uses the model: a run takes up to 8 GB of memory."""
    DIRECTORY.parent.mkdir(exist_ok=True)
    with DIRECTORY.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def smollm_directory():
    """Return the model's directory; make it if it is missing. Skip the test if the model cannot be downloaded."""
    with alone():
        if not (DIRECTORY / "model" / "model.safetensors").is_file():
            make()
    return DIRECTORY / "model"


def make():
    if importlib.util.find_spec("gguf") is None:
        pytest.skip("gguf is missing, which reads the model's file: make .venv/installed-smollm")
    with tempfile.TemporaryDirectory(dir=DIRECTORY.parent) as name:
        command = [sys.executable, ROOT / "scripts" / "make_smollm_data.py", f"{name}/smollm"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if "pip could not download" in done.stderr:
            pytest.skip(done.stderr.strip())
        assert done.returncode == 0, done.stderr
        shutil.rmtree(DIRECTORY, ignore_errors=True)
        shutil.move(f"{name}/smollm", DIRECTORY)  # only a complete directory gets the name
