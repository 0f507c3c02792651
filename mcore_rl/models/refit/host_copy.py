"""An engine's copy of the weights in host memory, to which updates by differences are applied.

Imported inside vLLM too, so only PyTorch, NumPy and zstd are imported here.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterable
from multiprocessing import shared_memory
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from mcore_rl.models.refit.delta import RefusedUpdate, decode

RefitShapes = Iterable[tuple[tuple[int, ...], torch.dtype]]

SHARED_DIRECTORY = Path("/dev/shm")
_ALIGNMENT = 16
_POLL_SECONDS = 0.001
_BUCKETS_PER_UPDATE = 10**9


class HostCopy:
    """The weights of one version, shared by the processes of one server that run on the same machine.

    Each process applies its part of every bucket, and waits for the parts of the others.

    Args:
        shapes: shape and precision of each tensor, in the order of the policy's `prepare_refit_info`.
        name: name of the shared block, the same in all processes; None if the copy belongs to this process alone.
        timeout: seconds to wait for the other processes.
        index: number of this process among those that share the copy.
        count: number of processes that share the copy.

    Raises:
        RuntimeError: there is too little shared memory for the weights.
    """

    def __init__(
        self, shapes: RefitShapes, name: str | None = None, timeout: float = 600, index: int = 0, count: int = 1
    ) -> None:
        self.version: int | None = None
        self.timeout, self._index, self._count = timeout, index, count
        self._update, self._buckets = 0, 0
        # The block begins with two numbers of each process: the last bucket to which it has applied its part, and the
        # last update that it has refused.
        header = 2 * count * torch.long.itemsize
        places, size = lay_out(enumerate(shapes), header, _ALIGNMENT)
        self._created = _create_block(name, size) if name else None
        if self._created is not None:
            block = self._created.buffer
        else:
            block = torch.zeros(size, dtype=torch.uint8) if name is None else _open_block(name, size, timeout)
        self._applied, self._refused = block[:header].view(torch.long).view(2, count)
        self.tensors = {
            number: block[start : start + nbytes_of(shape, dtype)].view(dtype).view(shape)
            for number, (start, shape, dtype) in places.items()
        }

    def begin(self, base: int | None) -> None:
        """Begin an update from version `base`, or a whole update if `base` is None.

        Raises:
            RefusedUpdate: the copy has another version.
        """
        had, self.version = self.version, None
        self._update, self._buckets = self._update + 1, 0
        if base is not None and base != had:
            raise RefusedUpdate(f"the update begins from version {base}, but this engine has version {had}")

    def update(self, numbers: list[int], payload: Tensor) -> list[tuple[int, Tensor]]:
        """Apply a bucket of differences, and return the bucket's tensors with their numbers.

        Raises:
            RefusedUpdate: the bucket is damaged, or does not begin from what the copy contains.
            RuntimeError: another process that shares the copy does not answer.
        """
        self._buckets += 1
        own = slice(self._index, None, self._count)
        try:
            if list(decode(payload, self.tensors, own)) != numbers[own]:
                raise RefusedUpdate("the bucket has other tensors than its header says")
        except RefusedUpdate:
            self._refused[self._index] = self._update
            raise
        bucket = self._update * _BUCKETS_PER_UPDATE + self._buckets
        self._applied[self._index] = bucket
        deadline = time.monotonic() + self.timeout
        while bool((self._applied < bucket).any()):
            if bool((self._refused == self._update).any()):
                raise RefusedUpdate("another process of this server has refused the update")
            if time.monotonic() > deadline:
                raise RuntimeError(f"a process of this server did not apply the update within {self.timeout:g} s")
            time.sleep(_POLL_SECONDS)
        return [(number, self.tensors[number]) for number in numbers]

    def end(self, version: int | None) -> None:
        """End an update: the copy now has `version`."""
        self.version = version

    def close(self) -> None:
        """Release the memory. A tensor that is still in use stays valid."""
        self.tensors.clear()
        self._applied = self._refused = torch.zeros(0, dtype=torch.long)
        if self._created is not None:
            self._created.release()
        self._created = None


def _create_block(name: str, size: int) -> CreatedBlock | None:
    """Create the shared block `name`; return None if another process has created it."""
    try:
        return CreatedBlock(size, name)
    except FileExistsError:
        return None
    except OSError as error:
        raise RuntimeError(_too_little(size, error)) from None


def _too_little(size: int, error: OSError) -> str:
    return (
        f"the copy of the weights needs {size / 1e9:.1f} GB of shared memory (/dev/shm): {error.strerror}; give a "
        "container more by --shm-size or --ipc=host, or set generation.vllm.weight_updates=whole"
    )


def _open_block(name: str, size: int, seconds: float) -> Tensor:
    """Open the shared block `name` that another process creates; wait until its creator has set the size."""
    path, deadline = path_of_shared(name), time.monotonic() + seconds
    while path.stat().st_size < size:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{path} did not reach {size} bytes within {seconds:g} s")
        time.sleep(_POLL_SECONDS)
    return open_shared(name)


K = TypeVar("K")
Shape = tuple[int, ...]

Places = dict[K, tuple[int, Shape, torch.dtype]]
"""Map from key to first byte, shape and precision of each tensor in a block."""


def nbytes_of(shape: Shape, dtype: torch.dtype) -> int:
    """Return the number of bytes of a tensor."""
    return torch.Size(shape).numel() * dtype.itemsize


def lay_out(
    info: Iterable[tuple[K, tuple[Shape, torch.dtype]]], start: int = 0, alignment: int = 1
) -> tuple[Places[K], int]:
    """Arrange the tensors of `info` in one block; return their places, and the block's size in bytes.

    Args:
        start: first byte of the first tensor.
        alignment: each tensor takes a multiple of this number of bytes.
    """
    places, size = {}, start
    for key, (shape, dtype) in info:
        places[key] = (size, shape, dtype)
        size += -(-nbytes_of(shape, dtype) // alignment) * alignment
    return places, size


def path_of_shared(name: str) -> Path:
    """Return the file of the block of shared memory `name`."""
    return SHARED_DIRECTORY / name


class CreatedBlock:
    """A block of shared memory that this process creates.

    buffer: its bytes, [size] uint8. They stay valid as long as a tensor of them is in use, also after `release`:
        another thread may be reading or writing them.

    Args:
        size: number of bytes.
        name: name of the block; None for a new name.

    Raises:
        FileExistsError: there is a block with this name.
        OSError: the host has too little shared memory.
    """

    def __init__(self, size: int, name: str | None = None) -> None:
        memory = shared_memory.SharedMemory(name, create=True, size=size)
        self._memory, self.name = memory, memory.name
        try:
            # Take the memory now: a write beyond the limit of /dev/shm would end the process without a message.
            os.posix_fallocate(memory._fd, 0, size)  # type: ignore[attr-defined]
            self.buffer = open_shared(self.name)[:size]
        except OSError:
            memory.unlink()
            raise
        finally:
            memory.close()  # its own mapping, which would end although tensors use it

    def release(self) -> None:
        """Remove the name. The memory is free when no tensor uses it, and no process has it open."""
        del self.buffer
        self._memory.unlink()


def open_shared(name: str) -> Tensor:
    """Open the block of shared memory `name`, which another process has created; return its bytes.

    As a file, because `SharedMemory(name)` registers the block for removal in this process too. Processes of one
    program share the tracker of such blocks; if one of them takes the block out, the tracker later writes a KeyError
    to the log, and does not remove the block if its creator is killed.
    """
    with path_of_shared(name).open("r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
