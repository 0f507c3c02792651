"""Tests of functions on several processes: they form a group although some fail at first, and failures are reported."""

import multiprocessing
import os
import time

import pytest
import torch

from mcore_rl.errors import TimeLimitError, WorkerError
from mcore_rl.testing.gpus import HIDDEN, VISIBLE, environment_for, environment_of, hide_gpus
from mcore_rl.testing.processes import MEETINGS, Start, run_cases, run_processes


def leave_at_once():
    """A rank that finishes before others have joined would close their connections."""
    rank = torch.distributed.get_rank()
    torch.distributed.destroy_process_group()
    return rank


class FailsToMeet:
    """In the process of rank 1, unpickling this prevents the process group for the first `times`."""

    def __init__(self, directory, times):
        self.directory, self.times = directory, times

    def __setstate__(self, state):
        self.__dict__ = state
        made = torch.distributed.init_process_group

        def init(*args, **options):
            if options["rank"] == 1:
                (self.directory / f"meeting{len(list(self.directory.iterdir()))}").touch()
                if len(list(self.directory.iterdir())) <= self.times:
                    raise RuntimeError("Gloo connectFullMesh failed")
            made(*args, **options)

        torch.distributed.init_process_group = init


def note(argument):
    (argument.directory.parent / f"called by {torch.distributed.get_rank()}").touch()
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    return int(total)


@pytest.mark.parametrize("times", [2, 3])
def test_run_processes_retries_failed_meeting(tmp_path, times):
    (tmp_path / "meetings").mkdir()
    argument = FailsToMeet(tmp_path / "meetings", times)
    if times < MEETINGS:
        assert run_processes(note, argument, world_size=3) == [3, 3, 3]
    else:
        with pytest.raises(WorkerError, match=r"rank 1: [\s\S]*Gloo connectFullMesh failed"):
            run_processes(note, argument, world_size=3)
        assert not list(tmp_path.glob("called by *"))
    assert len(list((tmp_path / "meetings").iterdir())) == 3


def test_run_processes_returns_when_ranks_leave_at_once():
    for _ in range(3):
        assert run_processes(leave_at_once, world_size=4) == [0, 1, 2, 3]


def fail(rank):
    if torch.distributed.get_rank() == rank:
        raise ValueError("this one")
    torch.distributed.barrier()


def test_run_processes_tells_a_time_limit_from_a_failure():
    with pytest.raises(TimeLimitError, match=r"ranks \[0, 1\] took longer than 0.5 s"):
        run_processes(time.sleep, 60, world_size=2, timeout=0.5)


def test_run_cases_returns_results_by_case_and_rank():
    cases = [(world_and_sum, 1), (leave_and_sum, 10), (world_and_sum, 100)]
    assert run_cases(cases, world_size=2) == [[(2, 2)] * 2, [(2, 20)] * 2, [(2, 200)] * 2]


def test_run_cases_refuses_more_cases_than_gloo_threads_allow():
    with pytest.raises(ValueError, match="can run at most 8 cases, got 9"):
        run_cases([(world_and_sum, 1)] * 9, world_size=2)


def world_and_sum(value):
    total = torch.tensor(value)
    torch.distributed.all_reduce(total)
    return torch.distributed.get_world_size(), int(total)


def leave_and_sum(value):
    """Shut down the process group, as a policy does; the group no longer exists at the end of the case."""
    results = world_and_sum(value)
    torch.distributed.destroy_process_group()
    return results


def test_run_processes_reports_rank_of_failure():
    with pytest.raises(WorkerError, match=r"rank 1: [\s\S]*ValueError: this one"):
        run_processes(fail, 1, world_size=2, timeout=30)


# ------------------------------------------------------------ devices and backends


def describe(value):
    total = torch.full((3,), float(value + torch.distributed.get_rank()))
    torch.distributed.all_reduce(total)
    return torch.distributed.get_backend(), multiprocessing.get_start_method(allow_none=True), total


@pytest.mark.parametrize("backend", ["gloo", "host", "host_copying"])
def test_run_cases_uses_the_backend_of_the_start(backend):
    for of_case, value in zip(
        run_cases([(describe, 1), (describe, 5)], world_size=2, start=Start(backend=backend)), (1, 5), strict=True
    ):
        assert [name for name, *_ in of_case] == [backend] * 2
        assert all(total.tolist() == [2 * value + 1] * 3 for *_, total in of_case)


@pytest.mark.long
def test_ranks_that_are_not_forked_return_tensors():
    """Each process imports everything itself, as on a GPU."""
    start = Start(backend="host", spawns=True)
    for backend, method, total in run_processes(describe, 1, world_size=2, timeout=120, start=start):
        assert (backend, method, total.tolist()) == ("host", "spawn", [3.0] * 3)


@pytest.mark.long
def test_ranks_for_a_gpu_refuse_the_cpu(monkeypatch):
    monkeypatch.setenv(HIDDEN, "")
    message = r"WorkerError: Start\('cuda'\): the rank runs on cpu, because it sees no GPU"
    with pytest.raises(WorkerError, match=message):
        run_processes(describe, 1, world_size=1, timeout=120, start=Start("cuda"))


@pytest.mark.parametrize(("before", "seen"), [("0,3", "0,3"), (None, None), ("", "")])
def test_hidden_gpus_are_visible_to_processes_on_gpus(before, seen, monkeypatch):
    monkeypatch.delenv(HIDDEN, raising=False)
    monkeypatch.delenv(VISIBLE, raising=False)
    if before is not None:
        monkeypatch.setenv(VISIBLE, before)
    assert environment_for("cuda").get(VISIBLE) == seen
    monkeypatch.setenv(HIDDEN, "unused")  # restores what hide_gpus sets
    monkeypatch.delenv(HIDDEN)
    hide_gpus()
    hide_gpus()
    assert os.environ[VISIBLE] == environment_for("cpu")[VISIBLE] == ""
    assert environment_for("cuda").get(VISIBLE) == seen
    with environment_of("cuda"):
        assert os.environ.get(VISIBLE) == seen
    assert os.environ[VISIBLE] == ""
