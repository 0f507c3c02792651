"""Tests of the watchdog: each rank reports what it is doing on request, and writes nothing before."""

import os
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from ports import free_port

from mcore_rl.run import watchdog
from mcore_rl.testing.processes import run_processes


def wait_for(holds, seconds=20):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def asked_twice(root, port):
    """Each rank has a separate directory, so requests arrive only through the store."""
    rank = torch.distributed.get_rank()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    server = torch.distributed.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    if rank == 1:  # as a rank that waits for another one blocks its connection
        threading.Thread(target=server.wait, args=(["never"], timedelta(seconds=60)), daemon=True).start()
    directory = root / str(rank)
    watchdog.start(directory, rank)
    file = directory / f"rank_0000{rank}.txt"
    for step in range(3):
        watchdog.enter(f"step {step}: training")
    time.sleep(2 * watchdog.POLL_SECONDS)
    before = file.read_text()
    torch.distributed.barrier()  # until the other rank has read its file, too
    if rank == 0:
        (directory / "requested").touch()
    wait_for(file.read_text)
    first = file.read_text()
    torch.distributed.barrier()
    watchdog.enter("step 3: validation")
    told = watchdog.explain(RuntimeError("Timed out waiting"), "a traceback\n") if rank == 1 else ""
    wait_for(lambda: "step 3" in file.read_text())
    second = file.read_text()
    torch.distributed.barrier()
    watchdog.stop()
    return before, first, second, told, directory.exists()


@pytest.mark.long
def test_all_ranks_are_asked_over_the_store(tmp_path):
    both = run_processes(asked_twice, tmp_path, free_port(), world_size=2)
    for rank, (before, first, second, told, exists) in enumerate(both):
        assert before == "" and not exists
        assert first.startswith(f"rank {rank}, step 2: training, since ") and "in asked_twice" in first
        assert second.startswith(f"rank {rank}, step 3: validation, since ")
        assert ("a traceback" in second) == (rank == 1)
        assert (f"what each rank was doing is in {tmp_path / '1'}" in told) == (rank == 1)


@pytest.mark.parametrize("others", [0, 150])
def test_a_process_that_is_alone_answers_too(others, tmp_path):
    """The report has the main thread, whatever the number of other threads."""
    ends = threading.Event()
    threads = [threading.Thread(target=ends.wait, daemon=True) for _ in range(others)]
    for thread in threads:
        thread.start()
    watchdog.start(tmp_path / "stacks", 0)
    try:
        watchdog.enter("step 1: training")
        (tmp_path / "stacks" / "requested").touch()
        name = "in test_a_process_that_is_alone_answers_too"
        wait_for(lambda: name in (tmp_path / "stacks" / "rank_00000.txt").read_text())
    finally:
        ends.set()
        watchdog.stop()
    assert not Path(tmp_path / "stacks").exists()


def test_watchdog_answers_after_file_system_failed(tmp_path, monkeypatch):
    exists, failures = Path.exists, []

    def fails_once(self):
        if self.name == "requested" and not failures:
            failures.append(self)
            raise OSError(116, "Stale file handle")
        return exists(self)

    monkeypatch.setattr(Path, "exists", fails_once)
    watchdog.start(tmp_path / "stacks", 0)
    try:
        wait_for(lambda: failures)
        (tmp_path / "stacks" / "requested").touch()
        wait_for((tmp_path / "stacks" / "rank_00000.txt").read_text)
    finally:
        watchdog.stop()
