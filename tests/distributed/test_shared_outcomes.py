"""Tests that the result or failure of one rank's work reaches all ranks, also if it cannot be pickled."""

from concurrent.futures import Future

import torch

from mcore_rl.distributed.collectives import broadcast_result
from mcore_rl.errors import TrainingError
from mcore_rl.testing.processes import run_processes


class Unsendable(Exception):
    def __init__(self, one, other):
        super().__init__(f"{one} and {other}")


class Foreign(Exception):
    """Can be sent, but another node may not have its module."""


FAILURES = {
    "unsendable": (Unsendable("this", "that"), "WorkerError: rank 0: Unsendable: this and that"),
    "foreign": (Foreign("odd"), "WorkerError: rank 0: Foreign: odd"),
    "built in": (ValueError("no"), "ValueError: no"),
    "ours": (TrainingError("no server is left"), "TrainingError: no server is left"),
}
ENDS = {
    **{kind: told for kind, (_, told) in FAILURES.items()},
    "cancelled": "WorkerError: rank 0: the work was cancelled before its end",
    "unsendable result": "WorkerError: rank 0: the result cannot be sent t",
    "result": "done",
}


def shared():
    """Return the outcome of each kind on this rank; rank 0 runs the work."""
    heard = {}
    for kind in ENDS:
        work = Future()
        if kind == "cancelled":
            work.cancel()
            work.set_running_or_notify_cancel()
        elif kind in FAILURES:
            work.set_exception(FAILURES[kind][0])
        else:
            work.set_result("done" if kind == "result" else lambda: None)
        try:
            heard[kind] = broadcast_result(work if torch.distributed.get_rank() == 0 else None, 0.1)
        except Exception as error:
            heard[kind] = f"{type(error).__name__}: {error}"
    return heard


def test_all_ranks_are_told_the_same():
    first, other = run_processes(shared, world_size=2, timeout=30)
    assert first == other
    assert {kind: told[: len(ENDS[kind])] for kind, told in first.items()} == ENDS
