"""The device under Megatron: CUDA with NCCL, the CPU with gloo, or neither: shapes without memory, in a simulation.

Megatron-Core asks `torch.cuda` for devices, streams and random states, and spells `device="cuda"`
in a few places. A program calls `initialize_platform()` where it starts, before anything that uses
Megatron is imported. With a GPU it only selects the device; without one it installs the stand-ins
of `cuda_stand_ins`, which answer those calls on the CPU. No other file of the package asks `torch.cuda`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor

from mcore_rl.errors import UserError
from mcore_rl.platform import cuda_stand_ins
from mcore_rl.utils import torchrun

_installed = False
_simulates = False


def has_gpu() -> bool:
    """True where a CUDA device is used."""
    return torch.cuda.is_available() and not _simulates


def simulates() -> bool:
    """True where tensors have shapes alone, and collectives nobody to talk to."""
    return _simulates


def device() -> torch.device:
    """The device that holds model and data."""
    if _simulates:
        return torch.device("meta")
    return torch.device("cuda", torch.cuda.current_device()) if has_gpu() else torch.device("cpu")


def device_id(of: torch.device | None = None) -> str:
    """A name that processes on the same device have in common, whatever number each gives it: a GPU's UUID, or "cpu".

    Args:
        of: `device()` if left out.
    """
    of = of or device()
    return str(torch.cuda.get_device_properties(of).uuid) if of.type == "cuda" else of.type


def device_index(of: torch.device) -> int:
    """The number that this process gives a GPU; its current one's if it is named without."""
    return torch.cuda.current_device() if of.index is None else of.index


def describe_gpus() -> list[str]:
    """A line for each GPU that torch can use, with its name and memory."""
    gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count() if has_gpu() else 0))
    return [f"GPU {n}: {gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for n, gpu in enumerate(gpus)]


def synchronize(of: torch.device | None = None) -> None:
    """Wait until a GPU (the current one if left out) has done all that it was told; nothing without one."""
    if has_gpu():
        torch.cuda.synchronize(of)


def synchronize_stream() -> None:
    """Wait for the work of the current stream."""
    if has_gpu():
        torch.cuda.current_stream().synchronize()


class Event(Protocol):
    """A moment of the device's work."""

    def query(self) -> bool:
        """Whether it has come."""
        ...

    def synchronize(self) -> None:
        """Wait until it has."""
        ...


def record_event() -> Event:
    """The moment when all that the current stream was told until now is done; without a GPU it has come."""
    event: Any = torch.cuda.Event() if has_gpu() else cuda_stand_ins.Inert()
    event.record()
    recorded: Event = event
    return recorded


def random_state() -> torch.Tensor | None:
    """Return the state of the GPU's generator; None without a GPU."""
    return torch.cuda.get_rng_state() if has_gpu() else None


def set_random_state(state: torch.Tensor) -> None:
    """The inverse of `random_state`."""
    torch.cuda.set_rng_state(state)


def release_cached_memory() -> None:
    """Give memory that no tensor uses back to the device, for other processes; the allocator keeps it otherwise."""
    torch.cuda.empty_cache()


def storage_id(tensor: torch.Tensor) -> int:
    """Of the storage behind a tensor, as long as it lives; one that is emptied or simulated has no address to know it
    by."""
    return int(tensor.untyped_storage()._cdata)


def page_lock(block: torch.Tensor) -> None:
    """Lock a tensor of the host in memory, where there is a GPU to copy from; if that is refused, copies are slower."""
    if not (has_gpu() and block.numel()):
        return
    cudart = torch.cuda.cudart()
    status = cudart.cudaHostRegister(block.data_ptr(), block.nbytes, 0)
    if status != cudart.cudaError.success:
        told = f"{block.nbytes:,} bytes of the host cannot be page-locked ({status}): copies to them are slower"
        warnings.warn(told, stacklevel=2)
        with contextlib.suppress(RuntimeError):  # which the next launch would raise: the thread's last error is kept
            torch.zeros(1, device=device())


def release_page_lock(block: torch.Tensor) -> None:
    """Undo `page_lock`."""
    if has_gpu() and block.numel():
        torch.cuda.cudart().cudaHostUnregister(block.data_ptr())


def is_asynchronous() -> bool:
    """True where the host goes on while the device computes, and waits where it asks for a value."""
    return has_gpu() or _simulates


def to_device(values: Any, dtype: torch.dtype = torch.long) -> torch.Tensor:
    """Numbers of the host (lists of one length, an array, a tensor) on the device; the host does not wait."""
    return sent(torch.as_tensor(values, dtype=dtype), device())


def sent(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on `device`; the host does not wait, as it would for memory that is not page-locked."""
    leaves_host = values.device.type == "cpu" and device.type == "cuda"
    return (values.pin_memory() if leaves_host else values).to(device, non_blocking=True)


def sent_together(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Tensors of the host on `device`, as `sent`, by one copy: of small ones the number counts, not the bytes."""
    if device.type == "cpu":
        return list(tensors)
    block = torch.empty(bytes_for(tensors), dtype=torch.uint8, device="cpu")
    for place, tensor in zip(views_of(block, tensors), tensors, strict=True):
        place.copy_(tensor)
    return views_of(sent(block, device), tensors)


class HostCopy:
    """A copy on the host of a tensor that nobody writes to any more, begun without waiting for the device."""

    def __init__(self, of: torch.Tensor) -> None:
        self._event: Event | None = None
        if of.is_cuda:
            self._host = torch.empty(of.shape, dtype=of.dtype, pin_memory=True).copy_(of, non_blocking=True)
            self._event = record_event()
        else:
            self._host = torch.zeros(of.shape, dtype=of.dtype, device="cpu") if of.is_meta else of

    def read(self) -> torch.Tensor:
        """The values, 0 in a simulation; waits for what was under way when the copy was begun, nothing later."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


def backend() -> str:
    """The torch.distributed backend for `device()`."""
    if _simulates:
        return "fake"
    return "nccl" if has_gpu() else "gloo"


def is_initialized() -> bool:
    """Whether this process has chosen its device."""
    return _installed


def initialize_platform(simulate: bool = False) -> None:
    """Select the GPU of this process, or install the stand-ins: of the CPU, or of a simulated device. Idempotent.

    To be called where a program starts; `mcore_rl.cli.entry_point.run_script` and the `mcore-rl` command do.

    Raises:
        RuntimeError: `megatron.core` was imported first (it binds some names at import).
    """
    global _installed, _simulates
    if _installed:
        return
    _simulates = simulate
    if has_gpu():
        torch.cuda.set_device(torchrun.local_rank())
    else:
        if "megatron.core" in sys.modules:
            raise RuntimeError("initialize_platform() must be called before megatron.core is imported")
        cuda_stand_ins.install(device())
    _installed = True


DETERMINISTIC_ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
    "NCCL_ALGO": ("^NVLS", "Ring", "Tree"),
}
"""What cuBLAS, Transformer Engine and NCCL must be told to give the same sums each time; the first is set here."""


def make_deterministic() -> None:
    """Take deterministic kernels alone from now on; to be called before anything runs on the device.

    An operation that has none raises RuntimeError when it is met, and is named.

    Raises:
        UserError: the environment asks for the contrary.
    """
    for name, right in DETERMINISTIC_ENVIRONMENT.items():
        value = os.environ.setdefault(name, right[0])
        if value not in right:
            raise UserError(f"deterministic: the environment has {name}={value}; with it, one of {', '.join(right)}")
    torch.use_deterministic_algorithms(True)


def initialize_process_group(timeout: timedelta) -> None:
    """Join the process group that torchrun described, or a group of one without torchrun.

    `timeout` bounds every collective: a stuck one raises instead of hanging.

    Raises:
        UserError: not all processes have come within `timeout`, or another program listens on MASTER_PORT.
    """
    if torch.distributed.is_initialized():
        return
    try:
        torch.distributed.init_process_group(**_group_options(timeout))
    except (torch.distributed.DistStoreError, torch.distributed.DistNetworkError) as error:
        if "EADDRINUSE" in str(error) or "already in use" in str(error):
            raise UserError(
                f"MASTER_PORT={os.environ.get('MASTER_PORT')}: another program listens on this port; choose a free one"
            ) from None
        size = torchrun.world_size()
        raise UserError(
            f"parallel.timeout_seconds={timeout.total_seconds():.0f}: not all {size} processes have come within this "
            "time; what another node has printed says why"
        ) from None


def _group_options(timeout: timedelta) -> dict[str, Any]:
    """Return the arguments of `init_process_group`."""
    kwargs: dict[str, Any] = {"backend": backend(), "timeout": timeout}
    if has_gpu():
        kwargs["device_id"] = device()
    if _simulates:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        rank, world_size = torchrun.rank(), torchrun.world_size()
        kwargs.update(rank=rank, world_size=world_size, store=FakeStore())
    elif not torchrun.is_launched():
        kwargs.update(rank=0, world_size=1, store=torch.distributed.HashStore())
    elif attempt := torchrun.restarts():
        # torchrun keeps its store when it starts the ranks again: without a prefix of their own they would
        # find the addresses of those that died.
        store, rank, world_size = next(torch.distributed.rendezvous("env://", timeout=timeout))
        store = torch.distributed.PrefixStore(f"attempt_{attempt}", store)
        kwargs.update(rank=rank, world_size=world_size, store=store)
    return kwargs


ALIGNMENT = 64
"""Bytes; where a tensor may begin, whatever its dtype."""


def bytes_for(tensors: Sequence[Tensor]) -> int:
    """How large a block must be to hold them."""
    return sum(map(_room, tensors))


def views_of(block: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The places of `tensors` in a block (uint8, at least `bytes_for` them), of their shapes and dtypes."""
    parts = block[: bytes_for(tensors)].split([_room(tensor) for tensor in tensors])
    return [
        part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)
    ]


def _room(tensor: Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
