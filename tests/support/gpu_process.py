"""Functions in a separate process, on a GPU or on the CPU, independent of the devices that the test process sees."""

import functools
import multiprocessing
import os
import pickle
import subprocess
import sys
import traceback

import pytest

SEEN = "MCORE_RL_TEST_DEVICES"
"""Variable with the CUDA_VISIBLE_DEVICES with which the tests were started; `every` if it was not set."""


def hide_gpus():
    """Hide GPUs from this process and from those that it starts, except those that run on a GPU."""
    os.environ.setdefault(SEEN, os.environ.get("CUDA_VISIBLE_DEVICES", "every"))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def visible_to(kind):
    """Return the environment variables of a process on this kind of device."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if kind == "cuda":
        seen = environment.get(SEEN, "every")
        environment.pop("CUDA_VISIBLE_DEVICES")
        environment.update({} if seen == "every" else {"CUDA_VISIBLE_DEVICES": seen})
    return environment


@functools.cache
def no_gpu():
    """Return why functions cannot run on a GPU here; "" if they can."""
    asked = "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.is_available())"
    answer = subprocess.run(
        [sys.executable, "-c", asked], env=visible_to("cuda"), capture_output=True, text=True, timeout=120
    )
    if answer.returncode:
        return f"torch cannot be asked for a GPU: {answer.stderr.strip().splitlines()[-1]}"
    version, cuda, is_there = answer.stdout.split()
    if cuda == "None":
        return f"torch {version} is built without CUDA"
    return "" if is_there == "True" else f"torch {version} sees no GPU"


DEVICES = [pytest.param("cpu", marks=pytest.mark.long), pytest.param("cuda", marks=pytest.mark.gpu)]


def run_on(kind, function, *arguments, timeout=300):
    """Run `function(*arguments)`, which must be importable by name, on this kind of device, and return its result.

    An error there is an AssertionError here, with its traceback. The process is ended after `timeout` seconds.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(theirs, kind, function, arguments))
    environment = visible_to(kind)
    with pytest.MonkeyPatch.context() as patch:  # a process starts with its parent's environment
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        for name, value in environment.items():
            patch.setenv(name, value)
        process.start()
    theirs.close()
    try:
        assert ours.poll(timeout), f"{function.__name__} took longer than {timeout} s"
        failure, result = pickle.loads(ours.recv_bytes())
    except EOFError:
        process.join(10)
        failure, result = f"{function.__name__}: the process ended with {process.exitcode}", None
    finally:
        process.kill()
        process.join(10)
        ours.close()
    assert not failure, failure
    return result


def _work(connection, kind, function, arguments):
    try:
        import torch

        from mcore_rl import platform

        torch.set_num_threads(1)
        platform.initialize_platform()
        assert platform.device().type == kind, f"on {platform.device()}"
        outcome = "", function(*arguments)
    except BaseException:
        outcome = traceback.format_exc(), None
    connection.send_bytes(pickle.dumps(outcome))  # not `send`: the memory it shares ends with this process
