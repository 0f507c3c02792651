"""Fixtures: small models of each family."""

import gc
import os
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("PYTHONUNBUFFERED", None)  # processes that the tests start must print their lines without it
CACHE = tempfile.TemporaryDirectory()  # of tokenized data: for this run of the tests, and the processes that it starts
os.environ["MCORE_RL_CACHE"] = CACHE.name
os.environ["VLLM_API_KEY"] = "the-key-of-this-run"  # servers and runs of tests have different directories

from mcore_rl.testing.gpus import hide_gpus

hide_gpus()

# Before anything of the package is imported: shapes in signatures are checked while the tests run.
import shape_checks  # noqa: F401  # isort: skip

import fork_server
import hypothesis
import pytest

pytest_plugins = ["suite_record"]

# The same examples in every run, so that a failure is the change's own; `--hypothesis-profile=default` draws others.
hypothesis.settings.register_profile("repeatable", derandomize=True, max_examples=30, deadline=None)
hypothesis.settings.register_profile("thorough", derandomize=True, max_examples=200, deadline=None)


def pytest_addoption(parser):
    parser.addoption("--composition", type=int, help="seed of the one random composition that is tried")
    parser.addoption(
        "--tenth", type=int, choices=range(10), help="number from 0 to 9: run every tenth test, beginning with this one"
    )
    parser.addoption("--trees", type=int, help="how many trees tests/testing/test_random_trees.py tries in each layout")
    parser.addoption("--kills", type=int, default=2, help="how many ranks tests/end_to_end/test_faults.py kills")


def pytest_configure(config):
    if not config.getoption("hypothesis_profile", None):
        selects_long = config.getoption("markexpr").split(" ")[0] in ("long", "exhaustive")
        hypothesis.settings.load_profile("thorough" if selects_long else "repeatable")
    # With --numprocesses this process only distributes tests; its workers import PyTorch and Megatron.
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        fork_server.serve_workers()
        return
    from mcore_rl.utils.console import quiet_libraries

    quiet_libraries()
    gc.disable()  # collecting would visit everything that is imported, again and again
    fork_server.serve()
    import torch
    from forked_writer import fork_writers

    from mcore_rl.platform import initialize_platform

    fork_writers()
    initialize_platform()
    torch.set_num_threads(1)  # of two workers on two cores, threads would wait for each other


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config, items):
    """Make all long cases of a test but the first exhaustive, unless it has the mark `every_case`.

    Folders with slow tests come first: a slow test that comes last would run alone.
    """
    have_long_case = set()
    for item in items:
        name = item.nodeid.partition("[")[0]
        if item.get_closest_marker("long") and not any(map(item.get_closest_marker, ("exhaustive", "every_case"))):
            if name in have_long_case:
                item.add_marker("exhaustive")
            have_long_case.add(name)
    items.sort(key=lambda item: item.path.parent.name not in ("end_to_end", "docs", "simulation", "gpu"))
    result = yield  # pytest itself selects by marks
    if (tenth := config.getoption("tenth")) is not None:
        kept = items[tenth::10]
        config.hook.pytest_deselected(items=[item for number, item in enumerate(items) if number % 10 != tenth])
        items[:] = kept
    return result


def pytest_collection_finish():
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def model_of(tmp_path_factory):
    """A function from a family's name to the directory of a small model of it."""
    from small_models import models_below

    return models_below(tmp_path_factory.mktemp)
