"""Functions in a separate process, on a GPU or on the CPU, independent of the devices that the test process sees; and
configurations for each kind of device."""

import multiprocessing
import pickle
import traceback
from importlib.machinery import PathFinder

import pytest

from mcore_rl.testing.gpus import environment_of, no_gpu

DEVICES = [pytest.param("cpu", marks=pytest.mark.exhaustive), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def kind(request):
    if request.param == "cuda" and (reason := no_gpu()):
        pytest.skip(reason)
    return request.param


def changed(config, **sections):
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    )


IMPLEMENTATIONS = ["local", "transformer_engine"]


def built_by(implementation, kind, config, exact=False):
    """Return the configuration with these layers; skip those that this device lacks, and those that are not exact."""
    if implementation == "transformer_engine":
        package = PathFinder.find_spec("transformer_engine")  # also one that is hidden from this process on the CPU
        is_stand_in = package is not None and "te_stand_in" in str(package.origin)
        if package is None or (kind == "cpu") != is_stand_in:
            pytest.skip("Transformer Engine is not installed for this device")
        if exact and kind == "cuda":
            pytest.skip("Transformer Engine multiplies float32 with TF32's precision")
    return changed(config, model={"transformer_impl": implementation})


def run_on(kind, function, *arguments, timeout=300):
    """Run `function(*arguments)`, which must be importable by name, on this kind of device, and return its result.

    An error there is an AssertionError here, with its traceback. The process is ended after `timeout` seconds.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(theirs, kind, function, arguments))
    with environment_of(kind):  # a process starts with its parent's environment
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
