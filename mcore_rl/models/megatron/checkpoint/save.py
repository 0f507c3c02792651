"""Saves checkpoints in Megatron's distributed format while training continues.

Tensors are copied to a block of shared memory; a separate process writes them to files. This process is started early.
A checkpoint contains model, optimizer and schedule (also of a second trained model), random states, the state of the
training loop, and `config.yaml`. `mcore_rl.utils.checkpoint_store` ensures that a checkpoint on disk is either complete
or absent.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from mcore_rl import __version__, platform
from mcore_rl.config import TrainingConfig, resolved_yaml
from mcore_rl.distributed.collectives import (
    all_ranks_true,
    broadcast_object,
    gather_objects,
    gather_objects_on_rank_zero,
)
from mcore_rl.models.megatron.checkpoint import state
from mcore_rl.models.megatron.checkpoint.interchange import (
    common_entries,
    random_object,
    run_config,
    schedule_in_samples,
)
from mcore_rl.models.megatron.checkpoint.names import aliases
from mcore_rl.models.megatron.checkpoint.state import METADATA, TrainingState
from mcore_rl.models.megatron.internals import shards_by_key
from mcore_rl.models.megatron.parallel_state import process_groups, random_states
from mcore_rl.platform import bytes_for, offsets_of, views_of
from mcore_rl.platform.cpu import return_freed_memory
from mcore_rl.utils import shard_process
from mcore_rl.utils.checkpoint_store import CheckpointStore
from mcore_rl.utils.files import naming_full_disk
from mcore_rl.utils.shard_process import (
    POLL_SECONDS,
    RUN_CONFIG_FILE,
    Commit,
    Report,
    ShardJob,
    ShardProcess,
    StagedTensor,
)

from megatron.core.dist_checkpointing.core import (
    CheckpointingConfig,
    save_config,
)
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    mcore_to_pyt_state_dict,
)

T = TypeVar("T")


class HostStaging:
    """A block of shared host memory. A checkpoint's tensors are copied to it, and a process writes them to files.

    A thread allocates the block, because page faults take longer than the copies. The thread also copies tensors that
    are on the host. On machines with a GPU the block is page-locked, so that the host need not wait for copies. The
    block is kept for later saves.
    """

    def __init__(self) -> None:
        self._file = shard_process.shared_file()
        self._block = torch.empty(0, dtype=torch.uint8)
        self._size = self._end = 0
        """Bytes of the block: how many are requested (`_size`), and how many are in use (`_end`)."""
        self._is_locked = False
        self._beside, self._work = ThreadPoolExecutor(1, "staging"), list[Future[None]]()
        self._copied: platform.Event | None = None

    @cached_property
    def process(self) -> ShardProcess:
        """The process that writes the tensors in the block to files."""
        return shard_process.take()

    @property
    def descriptor(self) -> int:
        """File descriptor of the block of shared memory, for the writing process."""
        return int(self._file.fileno())

    def reserve(self, size: int) -> None:
        """Start to enlarge the block of shared memory to at least `size` bytes; its contents are kept."""
        if size > self._size:
            if self._is_locked:
                platform.synchronize()
                platform.release_page_lock(self._block)
            self._size, self._is_locked = size, False
            self._work.append(self._beside.submit(self._allocate, size))

    def _allocate(self, size: int) -> None:
        return_freed_memory()  # of activations, for example: makes room
        self._file.truncate(size)
        block = torch.frombuffer(mmap.mmap(self.descriptor, size), dtype=torch.uint8)
        known = len(self._block)
        ctypes.memset(block.data_ptr() + known, 0, size - known)  # without the interpreter's lock, unlike MAP_POPULATE
        self._block = block

    def release(self) -> None:
        """Give the block of shared memory back. No save may be pending."""
        if self._is_locked:
            platform.release_page_lock(self._block)
        self._block = torch.empty(0, dtype=torch.uint8)
        self._size, self._end, self._is_locked = 0, 0, False
        self._file.truncate(0)

    def clear(self) -> None:
        """Mark the whole block of shared memory as free, for the next save."""
        self._end = 0

    def add(self, tensors: Sequence[Tensor]) -> list[int]:
        """Start to copy `tensors` into the block of shared memory; return the byte at which each tensor begins there.

        Tensors on the device may be changed at once, because later work of the device runs after the copies. Tensors on
        the host must stay unchanged until `settle` has returned.
        """
        start = self._end
        self._end += bytes_for(tensors)
        self.reserve(self._end)
        if not platform.is_asynchronous():
            self._work.append(self._beside.submit(self._copy, start, tensors))
        elif not any(work.exception() for work in self._work):  # otherwise `settle` raises the error
            if not self._is_locked:
                platform.page_lock(self._block)
                self._is_locked = True
            self._copy(start, tensors)
            self._copied = platform.record_event()
        return offsets_of(tensors, start)

    def _copy(self, start: int, tensors: Sequence[Tensor]) -> None:
        if tensors:
            # One call: between several calls the thread would wait for the interpreter's lock.
            torch._foreach_copy_(views_of(self._block[start:], tensors), [t.detach() for t in tensors], True)

    def settle(self) -> None:
        """Wait until the background thread has finished all copies from host memory; raise its error, if any.

        Copies from the device may still run; they are complete when `is_done` is True.
        """
        work, self._work = self._work, []
        wait(work)
        try:
            for one in work:
                one.result()
        except BaseException:
            self._size = len(self._block)  # the next save allocates it again
            raise

    def read(self, place: int, like: Tensor) -> Tensor:
        """Return the tensor at byte `place` of the block of shared memory; it has the shape and dtype of `like`."""
        return self._block[place : place + like.nbytes].view(like.dtype).view(like.shape)

    @property
    def is_done(self) -> bool:
        """Whether the copies that were started last are complete."""
        return self._copied is None or self._copied.query()


START_SECONDS = 60.0
"""Maximum time in seconds for the start of the writing process. This time does not count as time for writing."""
COMMIT_SECONDS = 60.0
"""Seconds that rank 0 has, after the time limit for writing, to wait for all ranks and to commit."""
DISCARD_SECONDS = 10.0
"""Time limit in seconds for the removal of a checkpoint that could not be completed."""
FAILED = "failed"
"""Name of a file in the partial directory. It exists if some rank could not write its shards."""


class SaveError(RuntimeError):
    """A checkpoint could not be written. The error is raised on every rank; earlier checkpoints are not changed."""


def within(seconds: float, action: Callable[[], T]) -> T:
    """Run `action`, which uses a file system, with a time limit in seconds; return its result.

    Raises:
        TimeoutError: the action takes longer, for example because the file system hangs. It continues in its thread.
    """
    done: Future[T] = Future()

    def act() -> None:
        try:
            done.set_result(action())
        except BaseException as error:  # raised by `done.result`
            done.set_exception(error)

    threading.Thread(target=act, name="checkpoint files", daemon=True).start()
    wait([done], seconds)
    if not done.done():
        raise TimeoutError(
            f"the file system has not answered within {seconds:g} s; if it is only slow, raise "
            "checkpoint.timeout_seconds, and parallel.timeout_seconds to at least twice as much"
        )
    return done.result()


@dataclass(frozen=True)
class PlannedShards:
    """Megatron's plan of a checkpoint: the shards that this rank writes, and on rank 0 the index (`metadata`)."""

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
        """Plan the shards that each rank writes. Collective.

        Args:
            state: shards that all ranks of `group` have. The plan divides them over these ranks.
            own: shards that only this rank has, with their places in the checkpoint.
            directory: directory of the checkpoint.
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
    """Megatron's planner for a checkpoint, which also adds the shards `own` to the plan.

    PyTorch checks that the shards of all ranks together make whole tensors.

    Args:
        own: shards that only this rank has: for each, the write item (its place in the checkpoint) and the values.
    """

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
    """Writes all tensors and objects of a rank into one file."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged.

        The directory exists already. The overridden method would create it again, and a rank could hang in this call.
        """
        return plan

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        self.prefix, self.file_name = plan.storage_data, f"{plan.storage_data.prefix}0.distcp"
        resolved: list[tuple[WriteItem, Any]] = [(item, planner.resolve_data(item)) for item in plan.items]
        self.objects = [(item, data) for item, data in resolved if item.type == WriteItemType.BYTE_IO]
        self.tensors = [(item, data.detach()) for item, data in resolved if item.type != WriteItemType.BYTE_IO]

    def write(self, tensors: Iterable[tuple[WriteItem, torch.Tensor]] | None = None) -> list[Any]:
        """Write the file and flush it to disk; return its entries for the index.

        Args:
            tensors: tensors to write instead of `self.tensors`, in the same order.
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
    """Return `tensor`, or a copy if it is a view of a larger storage: PyTorch would write the whole storage."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size() else tensor.clone()


class ShardWriter:
    """Lets a separate process write this rank's shards.

    Args:
        planned: the shards to write.
        timeout: time limit in seconds for writing.
        staging: the shared memory and the process. No other save may use them before the file is written.
        staged: the tensors that are already in the shared memory: a map from a tensor's index in the plan to its first
            byte.
        commit: what rank 0's process does after all ranks have written; None on other ranks.
    """

    def __init__(
        self,
        planned: PlannedShards,
        timeout: float,
        staging: HostStaging,
        staged: Mapping[Any, int],
        commit: Commit | None,
    ) -> None:
        storage, self.staging = planned.storage, staging
        self.directory, self._rank = Path(storage.checkpoint_dir), torch.distributed.get_rank()
        self._timeout, self._begun = timeout, time.monotonic()
        self._deadline = self._begun + timeout
        self._report: Report | None = None
        self._is_submitted = False
        self._process = staging.process
        self._process.start()
        others = [tensor for item, tensor in storage.tensors if item.index not in staged]
        places = iter(staging.add(others))
        tensors = [
            StagedTensor(
                item,
                staged[item.index] if item.index in staged else next(places),
                tensor.dtype,
                tuple(tensor.shape),
            )
            for item, tensor in storage.tensors
        ]
        staging.settle()
        objects = [(item, data.getvalue()) for item, data in storage.objects]
        ranks = torch.distributed.get_world_size()
        self._job = ShardJob(self.directory, storage.prefix, self._rank, ranks, objects, tensors, commit)
        self._submit_if_staged()

    def _submit_if_staged(self) -> bool:
        """If the tensors are copied, give the job to the process; return whether the process has the job."""
        if not self._is_submitted and self.staging.is_done:
            self._process.submit(self._job, self.staging.descriptor)
            self._is_submitted = True
        return self._is_submitted

    def poll(self) -> Report | None:
        """Return the report of the writing process, or None as long as it writes."""
        if self._report is None:
            self._report = self._look()
        return self._report

    def _look(self) -> Report | None:
        try:
            if not self._submit_if_staged():
                return self._given_up()
        except Exception as error:  # a device error, or the process could not start; other ranks must get the error
            return Report(error=f"{type(error).__name__}: {error}")
        return self._process.poll() or self._given_up()

    def _given_up(self) -> Report | None:
        """Return a report with an error if the time limit is exceeded; otherwise None."""
        now = time.monotonic()
        if self._is_submitted and not self._process.is_ready and now < self._begun + START_SECONDS:
            self._deadline = now + self._timeout
        # Until the job is submitted, `has_written` is about an earlier checkpoint.
        waits_for_others = self._rank == 0 and self._is_submitted and self._process.has_written
        if now <= self._deadline + (COMMIT_SECONDS if waits_for_others else 0.0):
            return None
        self.abandon()
        return Report(error=f"writing took longer than checkpoint.timeout_seconds={self._timeout:g}")

    def finish_alone(self, seconds: float) -> bool:
        """Wait until the checkpoint is committed and return True; if that takes too long, discard it and return False.

        Not collective. If the file system hangs, the files cannot be removed.

        Args:
            seconds: maximum time to wait. The time limit for writing applies as well.
        """
        limit = min(seconds, self._deadline + COMMIT_SECONDS - time.monotonic())
        try:
            return within(max(limit, 0.0) + DISCARD_SECONDS, lambda: self._finish_alone(limit))
        except TimeoutError:
            self.abandon()
            return False

    def _finish_alone(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
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
        """End the writing process, unless it has finished successfully. The next save starts another process."""
        if self._report is None or self._report.error is not None:
            self._process.kill()


def on_every_rank(action: Callable[[], Any]) -> Any:
    """Run `action` on every rank and return its result; if it fails on any rank, raise SaveError on all. Collective."""
    result, error = None, None
    try:
        result = action()
    except Exception as failure:  # the other ranks must get any error
        error = f"{type(failure).__name__}: {' '.join(str(failure).split())[:500]}"
    raise_on_all_ranks(error)
    return result


def run_on_rank_zero(action: Callable[[], Any]) -> Any:
    """Run `action` on rank 0 and return its result on all ranks; if it fails, raise SaveError on all. Collective."""
    return broadcast_object(on_every_rank(action if torch.distributed.get_rank() == 0 else lambda: None))


def raise_on_all_ranks(error: str | None) -> None:
    """Raise SaveError on every rank if any rank has an error. Collective."""
    errors = gather_objects(error)
    if any(errors):
        raise SaveError("; ".join(f"rank {rank}: {text}" for rank, text in enumerate(errors) if text))


VERSIONS = {"mcore_rl": __version__, **{name: version(name) for name in ("torch", "megatron-core")}}


# ------------------------------------------------------------------ saving


def _described(run: TrainingState) -> TrainingConfig:
    """Return the run's configuration with the rank, alpha and modules of its adapters filled in.

    A run may have read these settings from an adapter directory, which may no longer exist when the checkpoint is
    loaded.
    """
    lora, asked = run.model.lora, run.config.model.lora
    if lora is None or asked is None:
        return run.config
    told = {"rank": lora.rank, "alpha": lora.alpha, "target_modules": lora.target_modules}
    model = run.config.model.model_copy(update={"lora": asked.model_copy(update=told)})
    return run.config.model_copy(update={"model": model})


class PendingSave:
    """A checkpoint that is being written in the background. Every method except `finish_alone` is collective.

    Raises (in the constructor and in all methods):
        SaveError: the checkpoint cannot be written: the disk is full, a writing process has ended, …
    """

    def __init__(
        self, store: CheckpointStore, step: int, run: TrainingState, state: dict[str, Any], staging: HostStaging
    ) -> None:
        self.store, self.step = store, step
        # Other ranks wait meanwhile in a collective, whose time limit must be longer.
        self._file_seconds = min(run.config.checkpoint.timeout_seconds, run.config.parallel.timeout_seconds / 2)
        weights = run.policy.weights()
        weights_beside = {part.name: part.weights() for part in run.beside}
        own = list(run.policy.optimizer_shards(weights))
        for part in run.beside:
            own += part.optimizer_shards(weights_beside[part.name])
        # Most bytes belong to the optimizer, and only this rank has them: they are copied while the save is planned.
        staging.clear()
        staged = dict(zip((item.index for item, _ in own), staging.add([tensor for _, tensor in own]), strict=True))
        self.partial: Path = self._on_rank_zero(lambda: store.begin(step))
        random = random_states()
        of_megatron_lm = random_object(random, run.model) if run.model.lora is None else None
        shards, common = save_preprocess(
            {
                **({} if of_megatron_lm is None else {"rng_state": of_megatron_lm}),
                **weights,
                **_reference_part(run, weights),
                **run.policy.common(),
                **{part.name: {**weights_beside[part.name], **part.common()} for part in run.beside},
                "state": {**state, "step": step},
                "versions": VERSIONS,
                "content_metadata": METADATA,
            }
        )
        # Added after Megatron has checked that the state is the same on all ranks: only rank 0 has all random states.
        common["random"] = {"layout": run.layout, "states": gather_objects_on_rank_zero(random)}
        described, has_random = None, of_megatron_lm is not None
        if run.model.lora is None:  # the other programs have no adapters under these names
            schedule = schedule_in_samples(common["scheduler"], run.config)
            common |= common_entries(run.model, step, int(state.get("consumed_samples", 0)), schedule, has_random)
            described = run_config(run.model, has_random=has_random)
        self._on_rank_zero(lambda: write_common(common, resolved_yaml(_described(run)), self.partial, described))
        planned = PlannedShards.of(shards, own, self.partial, process_groups().dp_cp)
        asked, best = run.config.checkpoint, state.get("best", {}).get("step")
        commit = None
        if torch.distributed.get_rank() == 0:
            named = {} if run.model.lora else aliases(planned.metadata.state_dict_metadata)
            commit = Commit(store, step, self.partial, planned.metadata, named, asked.keep_last, asked.keep_every, best)
        try:
            self._writer = on_every_rank(lambda: ShardWriter(planned, asked.timeout_seconds, staging, staged, commit))
        except SaveError:
            staging.process.kill()  # a process that has begun would answer the next save with this one's report
            raise

    def _on_rank_zero(self, action: Callable[[], T]) -> T:
        """Run the file operation `action` on rank 0 with a time limit; return its result on all ranks."""

        def write() -> T:
            with naming_full_disk(self.store.directory):
                return within(self._file_seconds, action)

        result: T = run_on_rank_zero(write)
        return result

    @property
    def final(self) -> Path:
        """Directory of the checkpoint after it is committed."""
        return self.store.iteration(self.step)

    def is_written(self, wait: bool = False) -> bool:
        """Return whether the shards of all ranks are written and the checkpoint is committed; with `wait`, wait for it.

        If the checkpoint cannot be written, it is discarded and SaveError is raised.
        """
        while True:
            report = self._writer.poll()
            well, done = all_ranks_true(report is None or report.error is None, report is not None)
            if not well:
                self._writer.abandon()
                self._discard(None if report is None else report.error)
            if done:
                return True
            if not wait:
                return False
            time.sleep(POLL_SECONDS)

    def _discard(self, error: str | None) -> None:
        """Remove the partial checkpoint and raise SaveError on every rank. Call it after the writing has been ended."""
        try:
            raise_on_all_ranks(error)
        finally:
            if torch.distributed.get_rank() == 0:
                with contextlib.suppress(TimeoutError):
                    within(DISCARD_SECONDS, lambda: shutil.rmtree(self.partial, ignore_errors=True))

    def finish_alone(self, seconds: float) -> bool:
        """Return True once the checkpoint is committed; if that fails or takes too long, discard it and return False.

        Not collective.
        """
        return self._writer.finish_alone(seconds)


def _reference_part(run: TrainingState, weights: dict[str, Any]) -> dict[str, Any]:
    if run.reference is None or not run.reference.has_moved:
        return {}
    return {state.KEY: state.reference_state(weights, run.reference.by_tensor())}


def write_common(common: dict[str, Any], config: str, directory: Path, described: str | None) -> None:
    """Write those files of a checkpoint that are neither shards nor the index.

    Args:
        common: the state that is the same on all ranks.
        config: text of config.yaml.
        described: text of run_config.yaml; None if Megatron-Bridge cannot read the checkpoint.
    """
    if described is not None:
        (directory / RUN_CONFIG_FILE).write_text(described)
    torch.save(common, directory / "common.pt")
    (directory / "config.yaml").write_text(config)
    save_config(CheckpointingConfig("torch_dist"), str(directory))


# ------------------------------------------------------------------ loading
