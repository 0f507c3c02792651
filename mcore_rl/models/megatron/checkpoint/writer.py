"""Planning the shards of a checkpoint, and handing them to the process that writes them beside training.

All tensors are first copied to a block of the host's memory that the writing process shares, so what is written is
their values of that moment. The host goes on while a GPU's tensors are copied; the job is handed over when the copies
are there. The writing process (`mcore_rl.utils.shard_process`) can fail or die without taking the run with it: whoever
waits looks at the process too, not only for its report.
"""

from __future__ import annotations

import contextlib
import queue
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from mcore_rl.distributed.collectives import broadcast_object, gather_objects
from mcore_rl.models.megatron.checkpoint.host_staging import HostStaging
from mcore_rl.models.megatron.checkpoint.internals import shards_by_key
from mcore_rl.utils.shard_process import POLL_SECONDS, Commit, Report, ShardJob, StagedTensor, report_file

from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    mcore_to_pyt_state_dict,
)

START_SECONDS = 60.0
"""How long the writing process may take to start before the time limit for writing begins."""
COMMIT_SECONDS = 60.0
"""How long after the time limit for writing the first rank's process may still wait and commit."""
FAILED = "failed"
"""A file in the directory that is being written: some rank could not write its part."""


class SaveError(RuntimeError):
    """A checkpoint could not be written; raised on every rank. Earlier checkpoints are untouched."""


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
        self.prefix, self.file_name = plan.storage_data, f"{plan.storage_data.prefix}0.distcp"
        resolved: list[tuple[WriteItem, Any]] = [(item, planner.resolve_data(item)) for item in plan.items]
        self.objects = [(item, data) for item, data in resolved if item.type == WriteItemType.BYTE_IO]
        self.tensors = [(item, data.detach()) for item, data in resolved if item.type != WriteItemType.BYTE_IO]

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
    """A save of this rank's shards, which a process of its own writes to disk.

    Args:
        planned: what to write.
        timeout: seconds after which the save is given up.
        staging: memory and process; nobody else may use them before the file is written.
        commit: on the first rank: done by its process, once all ranks have written.
    """

    def __init__(self, planned: PlannedShards, timeout: float, staging: HostStaging, commit: Commit | None) -> None:
        storage, self.staging = planned.storage, staging
        self.directory, self._rank = Path(storage.checkpoint_dir), torch.distributed.get_rank()
        self._timeout, self._begun = timeout, time.monotonic()
        self._deadline = self._begun + timeout
        self._report: Report | None = None
        self._is_submitted = False
        self._process = staging.process
        self._process.start()
        places = staging.copy([tensor for _, tensor in storage.tensors])
        tensors = [
            StagedTensor(item, offset, tensor.dtype, tuple(tensor.shape))
            for (item, tensor), offset in zip(storage.tensors, places, strict=True)
        ]
        objects = [(item, data.getvalue()) for item, data in storage.objects]
        ranks = torch.distributed.get_world_size()
        self._job = ShardJob(self.directory, storage.prefix, self._rank, ranks, objects, tensors, commit)
        self._submit_if_staged()

    def _submit_if_staged(self) -> bool:
        """Whether the process has been given its job."""
        if not self._is_submitted and self.staging.is_done:
            self._process.submit(self._job, self.staging.descriptor)
            self._is_submitted = True
        return self._is_submitted

    def poll(self) -> Report | None:
        """Return the report of the writing process; None while it writes."""
        if self._report is None:
            self._report = self._look()
        return self._report

    def _look(self) -> Report | None:
        try:
            if not self._submit_if_staged():
                return self._given_up()
        except Exception as error:  # the device's, or that no process can be started; other ranks must hear of it
            return Report(error=f"{type(error).__name__}: {error}")
        return self._process.poll() or self._given_up()

    def _given_up(self) -> Report | None:
        """Return a report with an error if the time is over; None while there is time left."""
        now = time.monotonic()
        if self._is_submitted and not self._process.is_ready and now < self._begun + START_SECONDS:
            self._deadline = now + self._timeout
        waits_for_others = self._rank == 0 and report_file(self.directory, 0).exists()
        if now <= self._deadline + (COMMIT_SECONDS if waits_for_others else 0.0):
            return None
        self.abandon()
        return Report(error="writing took longer than checkpoint.timeout_seconds")

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
        """Stop writing; the next save starts another process."""
        if self._report is None or self._report.error is not None:
            self._process.kill()


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
