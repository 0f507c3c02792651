"""The process that writes a rank's part (shard) of each checkpoint while training continues.

It is a new Python process, not a fork: it has no device, no communicator, and none of the trainer's threads. It is
started early and serves one save after the other. Over a socket, the trainer sends it two file descriptors: a job, and
a block of shared memory with the tensors. The trainer never waits for the process. The process answers each job with a
`Report`.

Each process also writes a report file next to its shard. The first rank's process waits for the report files of all
ranks, and then commits the checkpoint. A checkpoint is therefore complete as soon as all its shards are, whatever the
training processes do. The process ends when its trainer ends.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import mmap
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_rl.utils.checkpoint_store import CheckpointStore
from mcore_rl.utils.files import FileDigests, digests_of, naming_full_disk
from mcore_rl.utils.parent_process import signal_at_end_of

if TYPE_CHECKING:
    import torch

POLL_SECONDS = 0.05
REPORT_POLL_SECONDS = 1.0
"""Maximum interval at which the first rank's process looks for the reports of the other ranks' processes."""
FILES_BESIDE = ("common.pt", "config.yaml", "metadata.json", ".metadata")
"""Files of a checkpoint other than its shards."""
RUN_CONFIG_FILE = "run_config.yaml"
"""File of a checkpoint in which Megatron-Bridge looks for the layout and the model. Checkpoints of adapters lack it."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
MESSAGE_BYTES = 1 << 15
READY, WRITTEN = b"ready", b"written"
"""Messages of the process: READY after its imports; WRITTEN when the shard of a job is on disk, before the commit."""
KILL_SECONDS = 5.0
"""Maximum time to wait for the end of a killed process. It takes longer only if the file system hangs."""


@dataclass(frozen=True)
class StagedTensor:
    """A tensor of a job: its entry in torch's save plan (a `WriteItem`), and its place in the shared memory."""

    item: Any
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Written:
    """Describes the files that a rank has written: PyTorch's write results, and the digests of the files."""

    results: list[Any]
    digests: FileDigests


def write_index(directory: Path, metadata: Any, results: list[list[Any]], aliases: Mapping[str, str]) -> None:
    """Write torch's index of a checkpoint.

    Python 3.13 pickles the class of paths under a name that other versions do not know. So the index has no paths, only
    strings, and every version of Python can read it.

    Args:
        metadata: torch's metadata of the whole checkpoint.
        results: torch's write results of each rank.
        aliases: further names of entries, each with the entry's own name. The index names their bytes twice.
    """
    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.checkpoint.metadata import StorageMeta

    class IndexWriter(FileSystemWriter):
        def storage_meta(self) -> StorageMeta:
            return StorageMeta(checkpoint_id=str(directory), save_id=self.save_id)

    entries = metadata.state_dict_metadata
    others: dict[str, list[str]] = {}
    for name, own in aliases.items():
        others.setdefault(own, []).append(name)
    again = [
        replace(result, index=replace(result.index, fqn=name))
        for of_rank in results
        for result in of_rank
        for name in others.get(result.index.fqn, ())
    ]
    named = {**entries, **{name: entries[own] for name, own in aliases.items()}}
    IndexWriter(directory).finish(replace(metadata, state_dict_metadata=named), [*results, again])


@dataclass(frozen=True)
class Commit:
    """The end of a save, on the first rank: write index and manifest, rename the directory, remove old checkpoints.

    partial: the directory in which all ranks have written.
    metadata: torch's metadata of the whole checkpoint.
    aliases: see `write_index`.
    keep_last, keep_every, best: see `CheckpointStore.prune`.
    """

    store: CheckpointStore
    step: int
    partial: Path
    metadata: Any
    aliases: Mapping[str, str]
    keep_last: int | None
    keep_every: int | None
    best: int | None

    def __call__(self, written: Sequence[Written]) -> None:
        """Commit the checkpoint, given what each rank has written."""
        write_index(self.partial, self.metadata, [of_rank.results for of_rank in written], self.aliases)
        named = {name: digest for of_rank in written for name, digest in of_rank.digests.items()}
        named.update(digests_of(self.partial, self._files_beside()))
        self.store.commit(self.step, self.partial, named)
        self.store.prune(self.keep_last, self.keep_every, self.best)

    def _files_beside(self) -> tuple[str, ...]:
        return (*FILES_BESIDE, *(path.name for path in self.partial.glob(RUN_CONFIG_FILE)))


@dataclass(frozen=True)
class ShardJob:
    """A rank's part of a save. The rank's writing process executes it.

    prefix: torch's prefix for the names of the rank's files.
    objects: for each object that is not a tensor, its entry in torch's save plan (a `WriteItem`), and its bytes.
    commit: on the first rank, what to do after all ranks have written; otherwise None.
    """

    directory: Path
    prefix: Any
    rank: int
    ranks: int
    objects: list[tuple[Any, bytes]]
    tensors: list[StagedTensor]
    commit: Commit | None

    def run(self, block: memoryview, say_written: Callable[[], object]) -> None:
        """Write and flush the shard, read it to compute its digest, and write the report file.

        If the job has a `commit`, then wait for all ranks and commit.

        Args:
            block: shared memory that contains the tensors.
            say_written: function that is called when the shard is on disk.
        """
        with naming_full_disk(self.directory.parent):
            results = self._write(block)
            names = sorted({result.storage_data.relative_path for result in results})
            written = Written(results, digests_of(self.directory, names))
            temporary = self.directory / f"rank_{self.rank:05d}.partial"
            temporary.write_bytes(pickle.dumps(written))
            temporary.rename(report_file(self.directory, self.rank))
            say_written()
            if self.commit is not None:
                self.commit(_everyone_written(self.directory, self.ranks))

    def _write(self, block: memoryview) -> list[Any]:
        from torch.distributed.checkpoint import FileSystemWriter, SavePlan

        if not self.objects and not self.tensors:
            return []
        values = {item.index: io.BytesIO(data) for item, data in self.objects}
        values |= {staged.item.index: _tensor_in(block, staged) for staged in self.tensors}
        items = [*(item for item, _ in self.objects), *(staged.item for staged in self.tensors)]
        writer = FileSystemWriter(self.directory, single_file_per_rank=True, sync_files=True, thread_count=1)
        plan = SavePlan(items, storage_data=self.prefix)
        results: list[Any] = writer.write_data(plan, _Resolved(values)).wait()  # type: ignore[arg-type]
        return results


@dataclass(frozen=True)
class _Resolved:
    """Replaces torch's save planner: it gives torch's file writer the value to write for each entry."""

    values: dict[Any, Any]

    def resolve_data(self, item: Any) -> Any:
        return self.values[item.index]


def _tensor_in(block: memoryview, staged: StagedTensor) -> torch.Tensor:
    import torch

    count = 1
    for size in staged.shape:
        count *= size
    if count == 0:
        return torch.empty(staged.shape, dtype=staged.dtype)
    return torch.frombuffer(block, dtype=staged.dtype, count=count, offset=staged.offset).view(staged.shape)


def report_file(directory: Path, rank: int) -> Path:
    return directory / f"rank_{rank:05d}.report"


def _everyone_written(directory: Path, ranks: int) -> list[Written]:
    """Wait until all ranks have written their report files; delete the files and return their contents."""
    files, seconds = {report_file(directory, rank) for rank in range(ranks)}, POLL_SECONDS / 4
    while not files <= set(directory.iterdir()):  # a listing, because network file systems cache missing files
        time.sleep(seconds)
        seconds = min(seconds * 1.5, REPORT_POLL_SECONDS)
    written = [pickle.loads(file.read_bytes()) for file in sorted(files)]
    for file in files:
        file.unlink()
    return written


# ------------------------------------------------------------------ the trainer's end


@dataclass(frozen=True)
class Report:
    """Report of the process about a finished job: `error` is an error message, or None after success."""

    error: str | None = None


def launch(trainer: socket.socket) -> subprocess.Popen[bytes]:
    """Start a writing process, to which `trainer` belongs."""
    code = "from mcore_rl.utils.shard_process import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", code, str(os.getpid()), str(trainer.fileno())],
        stdin=subprocess.DEVNULL,
        pass_fds=[trainer.fileno()],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    )


class ShardProcess:
    """The trainer's handle of its writing process. If the process has ended, the next job starts a new one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self.is_ready = False
        """Whether the process has reported the end of its imports to `poll`."""
        self.has_written = False
        """Whether the process has reported to `poll` that the job's shard is on disk."""
        atexit.register(self.kill)

    @property
    def pid(self) -> int | None:
        """Id of the process; None before it is started and after `kill`."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process, unless it is running; do not wait until its imports are done.

        Raises:
            OSError: the system has not enough memory or process ids for another process.
        """
        if self._process is not None and self._process.poll() is None:
            return
        self.kill()
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own.setblocking(False)
        earlier = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # until the process ignores them
        try:
            self._process = launch(other)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, earlier)
            other.close()
        self._socket = own

    def submit(self, job: ShardJob, block: int) -> None:
        """Send a job to the process; `poll` returns its report. Only one job may run at a time.

        Args:
            block: file descriptor of the shared memory that contains the job's tensors.
        """
        self.start()
        assert self._socket is not None
        self.has_written = False
        with shared_file() as file:
            file.write(pickle.dumps(job))
            file.flush()
            socket.send_fds(self._socket, [b"job"], [file.fileno(), block])

    def poll(self) -> Report | None:
        """Return the report of the submitted job; None while the process is working on it."""
        assert self._socket is not None and self._process is not None
        try:
            while (message := self._socket.recv(MESSAGE_BYTES)) in (READY, WRITTEN):
                self.is_ready, self.has_written = True, message == WRITTEN
        except BlockingIOError:
            return None
        except OSError:
            message = b""
        if message:
            return Report(json.loads(message)["error"])
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        return Report(f"the process that wrote died (exit status {self._process.returncode})")

    def kill(self) -> None:
        """End the process, even while it is writing.

        If the process is in a call to a file system that hangs, it ends only when this call returns. This method does
        not wait for that end.
        """
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(KILL_SECONDS)
        if self._socket is not None:
            self._socket.close()
        self._process, self._socket, self.is_ready = None, None, False


_spare: ShardProcess | None = None


def start_early() -> None:
    """Start a writing process before the first save needs it. The first call of `take` returns its handle."""
    global _spare
    if _spare is None:
        _spare = ShardProcess()
    _spare.start()


def take() -> ShardProcess:
    """Return the handle of a writing process that no other caller uses.

    The first call after `start_early` returns the handle of the process that `start_early` has started. Any other call
    returns the handle of a new process, which starts when it gets its first job.
    """
    global _spare
    taken, _spare = _spare, None
    return taken or ShardProcess()


def shared_file() -> Any:
    """Return a file in memory that another process can map; on a system without memfd, a temporary file on disk.

    The file is not in /dev/shm, because /dev/shm is small in containers.
    """
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("mcore_rl"), "w+b")
    return tempfile.TemporaryFile()


# ------------------------------------------------------------------ the writing process


def main() -> None:
    """Run the writing process: execute the jobs that the trainer submits, until the trainer ends."""
    parent, descriptor = map(int, sys.argv[1:3])
    ignore_stop_signals()
    signal_at_end_of(parent)
    with socket.socket(fileno=descriptor) as trainer:
        serve(trainer)


def serve(trainer: socket.socket) -> None:
    """Execute the jobs that come through the socket `trainer`, until the trainer closes its end."""
    import torch
    import torch.distributed.checkpoint

    torch.set_num_threads(1)
    os.nice(5)  # gives the trainer priority
    trainer.send(READY)
    while True:
        _, files, *_ = socket.recv_fds(trainer, MESSAGE_BYTES, 2)
        if not files:  # the trainer has closed its end
            return
        job, block = files
        error = _outcome(job, block, lambda: trainer.send(WRITTEN))
        trainer.send(json.dumps({"error": error}).encode())


def _outcome(job: int, block: int, say_written: Callable[[], object]) -> str | None:
    """Run a job; return an error message, or None after success.

    Args:
        job: file descriptor of the pickled job.
        block: file descriptor of the shared memory that contains the job's tensors.
    """
    try:
        with open(job, "rb") as file, open(block, "rb") as shared:
            file.seek(0)
            size = os.fstat(block).st_size
            memory = mmap.mmap(shared.fileno(), size) if size else b""
            pickle.load(file).run(memoryview(memory), say_written)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:1000]}"
    return None


def ignore_stop_signals() -> None:
    """Ignore the signals that the trainer handles, which a terminal or a launcher also sends to this process."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
