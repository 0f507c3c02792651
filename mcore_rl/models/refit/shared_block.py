"""Blocks of memory that processes share: of a GPU, by CUDA IPC, or of the host, by POSIX shared memory.

Imported inside vLLM too, so only PyTorch and NumPy are imported here.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
from typing import Any

import torch
from torch import Tensor

from mcore_rl import platform
from mcore_rl.models.refit.host_copy import SHARED_DIRECTORY, CreatedBlock, open_shared

Handle = dict[str, Any]
"""Place of a block: `shared_memory`, the name of a block of the host, or `cuda`, arguments of PyTorch's function that
opens a block of a GPU."""

NOT_TOLD = ("tensor_cls", "storage_cls", "dtype", "storage_device")
"""Arguments of this function that the opening process knows."""


class SharedBlock:
    """A block of memory of this process that others can open by its `handle`.

    Args:
        nbytes: size of the block.
        on_host: take memory of the host, even if there is a GPU.

    Raises:
        OSError: the host has too little shared memory.
    """

    def __init__(self, nbytes: int, on_host: bool = False) -> None:
        self._created: CreatedBlock | None = None
        self.handle: Handle
        if platform.has_gpu() and not on_host:
            self.buffer = torch.empty(nbytes, dtype=torch.uint8, device=platform.device())
            self.handle = {"cuda": _arguments(self.buffer)}
            return
        self._created = CreatedBlock(nbytes)
        self.buffer = self._created.buffer
        self.handle = {"shared_memory": self._created.name}

    def release(self) -> None:
        """Release the block; no process can open it any more.

        A thread that uses `buffer`, and a process that has the block open, can use it until they have ended.
        """
        del self.buffer
        if self._created is not None:
            self._created.release()
        self._created = None


def _arguments(buffer: Tensor) -> dict[str, Any]:
    """Return the named arguments with which another process opens a GPU's `buffer`, without those it knows."""
    import inspect

    from torch.multiprocessing.reductions import reduce_tensor

    rebuild, arguments = reduce_tensor(buffer)
    named = inspect.signature(rebuild).bind(*arguments).arguments
    return {name: value for name, value in named.items() if name not in NOT_TOLD}


def open_block(handle: Handle, device: torch.device) -> Tensor:
    """Open a block that another process has shared; return its bytes.

    Args:
        device: the block's device, in this process's numbering; the other process may number the GPUs differently.

    Raises:
        OSError: there is no such block of the host.
        RuntimeError: the block of the GPU cannot be opened.
    """
    if "cuda" not in handle:
        return open_shared(handle["shared_memory"])
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    opened: Tensor = rebuild_cuda_tensor(
        tensor_cls=torch.Tensor, storage_cls=torch.UntypedStorage, dtype=torch.uint8,
        storage_device=platform.device_index(device), **handle["cuda"],
    )  # fmt: skip
    return opened


def encode_handle(handle: Handle) -> str:
    """Convert a handle to JSON; not by pickle, which would let the sender run code in the engine."""

    def told(value: Any) -> Any:
        return {"base64": base64.b64encode(value).decode()} if isinstance(value, bytes) else value

    (kind, where), *_ = handle.items()
    told_where = {name: told(value) for name, value in where.items()} if isinstance(where, dict) else where
    return json.dumps({kind: told_where})


def decode_handle(encoded: str) -> Handle:
    """Convert the result of `encode_handle` back."""

    def meant(value: Any) -> Any:
        if isinstance(value, dict):
            return base64.b64decode(value["base64"])
        return tuple(value) if isinstance(value, list) else value

    ((kind, where),) = json.loads(encoded).items()
    return {kind: {name: meant(value) for name, value in where.items()} if isinstance(where, dict) else where}


PROBE_BYTES = 16
NO_PROBE = {"device": "none", "handle": "", "bytes": ""}
"""Result of `Probe.told` for a process that can share no memory, for example because there is no /dev/shm."""


class Probe:
    """A small block with random bytes. A process that reads them can also open other blocks of this process.

    Another container on the same machine, for example, may have a /dev/shm of its own.
    """

    def __init__(self, on_host: bool) -> None:
        self._block = SharedBlock(PROBE_BYTES, on_host)
        self._expected = secrets.token_bytes(PROBE_BYTES)
        self._block.buffer.copy_(torch.frombuffer(bytearray(self._expected), dtype=torch.uint8))
        platform.synchronize()

    def told(self) -> dict[str, str]:
        """Return what another process needs for `sees_probe`, as values that JSON can represent."""
        device = platform.device_id() if "cuda" in self._block.handle else "host"
        return {"device": device, "handle": encode_handle(self._block.handle), "bytes": self._expected.hex()}

    def release(self) -> None:
        self._block.release()


def sees_probe(told: dict[str, str], device: torch.device) -> bool:
    """Return whether this process, on `device`, can open blocks of the process whose `Probe` has `told` this."""
    if told["device"] not in ("host", platform.device_id(device)):
        return False
    try:
        found = open_block(decode_handle(told["handle"]), device)[:PROBE_BYTES].cpu()
    except (OSError, RuntimeError):
        return False
    return bytes(found.tolist()).hex() == told["bytes"]


def free_shared_memory() -> int:
    """Return the bytes of shared memory that this host (or container) has left.

    Raises:
        OSError: it has none.
    """
    about = os.statvfs(SHARED_DIRECTORY)
    return about.f_bavail * about.f_frsize
