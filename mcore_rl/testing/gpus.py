"""The GPUs of this machine, for a process that hides them from itself and shows them to processes that it starts."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Iterator

VISIBLE = "CUDA_VISIBLE_DEVICES"
HIDDEN = "MCORE_RL_HIDDEN_DEVICES"
"""Variable with the CUDA_VISIBLE_DEVICES of the time before `hide_gpus`; `every` if it was not set."""


def hide_gpus() -> None:
    """Hide GPUs from this process and from those that it starts, except those that run on a GPU.

    Call it before torch asks for GPUs for the first time: CUDA reads the variable only once.
    """
    os.environ.setdefault(HIDDEN, os.environ.get(VISIBLE, "every"))
    os.environ[VISIBLE] = ""


def environment_for(device: str) -> dict[str, str]:
    """Return the environment variables of a process on the device `cpu` or `cuda`."""
    environment = dict(os.environ)
    if device == "cuda" and (before := environment.get(HIDDEN)) is not None:
        environment[VISIBLE] = before
        if before == "every":
            del environment[VISIBLE]
    return environment


@contextlib.contextmanager
def environment_of(device: str) -> Iterator[None]:
    """Context in which this process has the environment of processes on the device `cpu` or `cuda`, to start them."""
    before = os.environ.get(VISIBLE)
    _set(environment_for(device).get(VISIBLE))
    try:
        yield
    finally:
        _set(before)


def _set(visible: str | None) -> None:
    os.environ.pop(VISIBLE, None)
    if visible is not None:
        os.environ[VISIBLE] = visible


@functools.cache
def no_gpu() -> str:
    """Return why processes cannot run on a GPU of this machine; "" if they can."""
    asked = "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.is_available())"
    answer = subprocess.run(
        [sys.executable, "-c", asked], env=environment_for("cuda"), capture_output=True, text=True, timeout=120
    )
    if answer.returncode:
        return f"torch cannot be asked for a GPU: {answer.stderr.strip().splitlines()[-1]}"
    version, cuda, is_there = answer.stdout.split()
    if cuda == "None":
        return f"torch {version} is built without CUDA"
    return "" if is_there == "True" else f"torch {version} sees no GPU"
