"""Writing the shards of a checkpoint in a process of its own, while training goes on.

The process is forked, so it sees the tensors as they were at that moment, whatever training does to
them afterwards. Tensors of a GPU are first copied to the host, while the host goes on; the process is forked when the
copies are there. It can fail or die without taking the run
with it: whoever waits looks at the process too, not only for its message.

Each process leaves a report beside its shard. The first rank's process waits for the reports of all ranks and then
commits the checkpoint, so a checkpoint is complete as soon as its shards are, whatever the training processes do.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import queue
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from mcore_rl.distributed.collectives import broadcast_object, gather_objects
from mcore_rl.models.megatron.checkpoint.host_staging import HostStaging
from mcore_rl.models.megatron.checkpoint.internals import shards_by_key
from mcore_rl.utils.checkpoint_store import FileDigests, digests_of

from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    mcore_to_pyt_state_dict,
)

POLL_SECONDS = 0.05
REPORT_POLL_SECONDS = 1.0
"""How often, at the least, the first rank's process looks for the reports of the others."""
COMMIT_SECONDS = 60.0
"""How long after the time limit for writing the first rank's process may still wait and commit."""
FAILED = "failed"
"""A file in the directory that is being written: some rank could not write its part."""


class SaveError(RuntimeError):
    """A checkpoint could not be written; raised on every rank. Earlier checkpoints are untouched."""


@dataclass(frozen=True)
class Written:
    """The result of a rank's writing: Megatron's results and the digests of the files."""

    results: list[Any]
    digests: FileDigests


Commit = Callable[[Sequence[Written]], Any]
"""Gives the directory its name, from what every rank has written."""


@dataclass(frozen=True)
class PlannedShards:
    """The shards that each rank is to write, as Megatron planned them; only rank 0 has `metadata`."""

    storage: OneFileWriter
    metadata: Any

    @classmethod
    def of(
        cls,
        state: ShardedStateDict,
        own: Iterable[tuple[WriteItem, torch.Tensor]],
        directory: Path,
        group: ProcessGroup,
    ) -> PlannedShards:
        """Collective.

        Args:
            state: shards that all ranks of `group` hold alike; they are shared out over them.
            own: parts that this rank alone holds.
        """
        strategy = TorchDistSaveShardedStrategy("torch_dist", 1)
        FullyParallelSaveStrategyWrapper(strategy, group).apply_saving_parallelization(state)
        planned, *_ = save_state_dict_async_plan(
            mcore_to_pyt_state_dict(shards_by_key(state, strategy), False),
            OneFileWriter(directory),
            None,
            coordinator_rank=0,
            planner=_Planner(own),
        )
        storage, metadata, _ = planned
        return cls(storage, metadata)


class _Planner(MCoreSavePlanner):
    """Megatron's planner, with parts that are planned already. Torch checks that all fit together."""

    def __init__(self, own: Iterable[tuple[WriteItem, torch.Tensor]]) -> None:
        super().__init__(dedup_replicated_tensors=False, flatten_state_dict=False)
        self.own = {item.index: (item, tensor) for item, tensor in own}

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self.plan = replace(plan, items=[*plan.items, *(item for item, _ in self.own.values())])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.index in self.own:
            return self.own[write_item.index][1]
        return super().resolve_data(write_item)


class OneFileWriter(FileSystemWriterAsync):
    """A rank's tensors and objects, in one file."""

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        self.file_name = f"{plan.storage_data.prefix}0.distcp"
        resolved: list[tuple[WriteItem, Any]] = [(item, planner.resolve_data(item)) for item in plan.items]
        self.objects = [(item, data) for item, data in resolved if item.type == WriteItemType.BYTE_IO]
        self.tensors = [(item, data.detach()) for item, data in resolved if item.type != WriteItemType.BYTE_IO]

    def stage(self, staging: HostStaging) -> None:
        """Copy to the host what is on a GPU, and whatever else could change before the copies are there."""
        items, tensors = [item for item, _ in self.tensors], [tensor for _, tensor in self.tensors]
        if any(tensor.device.type != "cpu" for tensor in tensors):
            self.tensors = list(zip(items, staging.copy(tensors), strict=True))

    def write(self, tensors: Iterable[tuple[WriteItem, torch.Tensor]] | None = None) -> list[Any]:
        """Write and flush the file; returns what the index needs to know.

        Args:
            tensors: the values of `self.tensors`, in their order, if they come from elsewhere.
        """
        if not self.objects and not self.tensors:
            return []
        outcomes: queue.SimpleQueue[Any] = queue.SimpleQueue()
        unfinished: queue.Queue[int] = queue.Queue()
        unfinished.put(0)
        own = ((item, _own_storage(tensor)) for item, tensor in tensors or self.tensors)
        bucket = (str(Path(self.checkpoint_dir) / self.file_name), self.file_name, (self.objects, own))
        transforms = [self.transforms] if hasattr(self, "transforms") else []  # depends on torch's version
        self.write_preloaded_data(transforms, 0, bucket, outcomes, unfinished, True)
        _, outcome = outcomes.get()
        if isinstance(outcome, Exception):
            raise outcome
        results: list[Any] = outcome
        return results


def _own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """A view is written with all of the storage behind it; a copy is not."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size() else tensor.clone()


class ShardWriter:
    """The process that writes a rank's shards to disk.

    Args:
        planned: what to write.
        timeout: seconds after which the process is given up.
        staging: memory for what is on a GPU; nobody else may use it before the file is written.
        commit: called in the writing process of the first rank, once all ranks have written.
    """

    def __init__(self, planned: PlannedShards, timeout: float, staging: HostStaging, commit: Commit) -> None:
        self.storage, self.staging = planned.storage, staging
        self.directory, self._rank = Path(self.storage.checkpoint_dir), torch.distributed.get_rank()
        self._deadline = time.monotonic() + timeout
        self._report: _Report | None = None
        context = multiprocessing.get_context("fork")
        self._receiver, self._sender = context.Pipe(duplex=False)
        ranks = torch.distributed.get_world_size()
        arguments = (self._sender, self.storage, os.getpid(), self._rank, ranks, commit)
        self._process = context.Process(target=_write, args=arguments, daemon=True)
        self.storage.stage(staging)
        self._start_if_staged()

    def _start_if_staged(self) -> bool:
        """Whether the process has been started."""
        if self._process.pid is None and self.staging.is_done:
            self._process.start()
            self._sender.close()
        return self._process.pid is not None

    def poll(self) -> _Report | None:
        """Return the report of the writing process; None while it writes."""
        if self._report is None:
            self._report = self._look()
        return self._report

    def _look(self) -> _Report | None:
        try:
            if not self._start_if_staged():
                return self._given_up()
        except Exception as error:  # the device's, or that no process can be started; other ranks must hear of it
            return _Report(error=f"{type(error).__name__}: {error}")
        if self._receiver in wait([self._receiver, self._process.sentinel], timeout=0) or self._receiver.poll():
            try:
                report: _Report = self._receiver.recv()
            except (EOFError, OSError):
                return self._died()
            self._process.join()
            return report
        if not self._process.is_alive():
            return self._died()
        return self._given_up()

    def _given_up(self) -> _Report | None:
        """Return a report with an error if the time is over; None while there is time left."""
        waits_for_others = self._rank == 0 and _report_file(self.directory, 0).exists()
        if time.monotonic() <= self._deadline + (COMMIT_SECONDS if waits_for_others else 0.0):
            return None
        self.abandon()
        return _Report(error="writing took longer than checkpoint.timeout_seconds")

    def _died(self) -> _Report:
        self._process.join(1)
        return _Report(error=f"the process that wrote died (exit status {self._process.exitcode})")

    def finish_alone(self, seconds: float) -> bool:
        """Wait, without other ranks, until the checkpoint is committed; whether it is. Otherwise it is discarded.

        Args:
            seconds: to wait at most; in no case longer than the time limit for writing.
        """
        deadline = min(time.monotonic() + seconds, self._deadline + COMMIT_SECONDS)
        while (report := self.poll()) is None or report.error is None:
            if report is not None and not self.directory.exists():
                return True
            if time.monotonic() > deadline or (self.directory / FAILED).exists():
                break
            time.sleep(POLL_SECONDS)
        with contextlib.suppress(OSError):
            (self.directory / FAILED).touch()
        self.abandon()
        if self._rank == 0:
            shutil.rmtree(self.directory, ignore_errors=True)
        return False

    def abandon(self) -> None:
        """Stop writing."""
        if self._process.pid is None:
            self._sender.close()
            return
        self._process.kill()
        self._process.join()


@dataclass(frozen=True)
class _Report:
    """The end of a writing process: what went wrong, or None."""

    error: str | None = None


def _report_file(directory: Path, rank: int) -> Path:
    return directory / f"rank_{rank:05d}.report"


def _everyone_written(directory: Path, ranks: int) -> list[Written]:
    """Wait for the reports of all ranks, and take them away."""
    files, seconds = {_report_file(directory, rank) for rank in range(ranks)}, POLL_SECONDS / 4
    while not files <= set(directory.iterdir()):  # listed: a network file system remembers what was not there
        time.sleep(seconds)
        seconds = min(seconds * 1.5, REPORT_POLL_SECONDS)
    written = [pickle.loads(file.read_bytes()) for file in sorted(files)]
    for file in files:
        file.unlink()
    return written


def _write(sender: Connection, storage: OneFileWriter, parent: int, rank: int, ranks: int, commit: Commit) -> None:
    """Write and flush the file, read it back for its digest, report; the first rank then commits."""
    _live_and_die_with(parent)
    torch.set_num_threads(1)  # the parent's OpenMP threads do not exist here
    directory = Path(storage.checkpoint_dir)
    try:
        results = storage.write()
        written = Written(results, digests_of(directory, [storage.file_name] if results else []))
        temporary = directory / f"rank_{rank:05d}.partial"
        temporary.write_bytes(pickle.dumps(written))
        temporary.rename(_report_file(directory, rank))
        if rank == 0:
            commit(_everyone_written(directory, ranks))
        report = _Report()
    except Exception as error:
        report = _Report(error=f"{type(error).__name__}: {error}")
    sender.send(report)
    sender.close()


def _live_and_die_with(parent: int) -> None:
    """Let signals to stop be the parent's to answer, end when it ends, and leave it the processor."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>
    ctypes.CDLL(None).prctl(die_with_parent, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    os.nice(5)


def on_every_rank(action: Callable[[], Any]) -> Any:
    """`action()`; if it fails on any rank, SaveError on all of them."""
    result, error = None, None
    try:
        result = action()
    except Exception as failure:  # whatever it was, the other ranks must hear of it
        error = f"{type(failure).__name__}: {' '.join(str(failure).split())[:500]}"
    raise_together(error)
    return result


def on_first_rank(action: Callable[[], Any]) -> Any:
    """`action()` on rank 0; its result, or SaveError, on all ranks."""
    return broadcast_object(on_every_rank(action if torch.distributed.get_rank() == 0 else lambda: None))


def raise_together(error: str | None) -> None:
    """SaveError on every rank if any has an error."""
    errors = gather_objects(error)
    if any(errors):
        raise SaveError("; ".join(f"rank {rank}: {text}" for rank, text in enumerate(errors) if text))
