"""The policy's weights for an inference engine, as Hugging Face tensors, bucket by bucket.

By collective: the policy's first rank and the engine's processes share a group of their own. Each bucket is
a header (number of tensors, bytes), the tensors' numbers in the refit info, and their bytes one after the
other. By IPC: each bucket is one block of shared memory on every GPU of the policy, or of the host where there is
none. Peak extra memory is a bucket and the largest tensor.
"""

from __future__ import annotations

import inspect
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from multiprocessing import resource_tracker, shared_memory
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from mcore_rl import platform

RefitInfo = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Name → shape and precision; a tensor's number is its place in it."""

HEADER_NUMBERS = 2


def encode_refit_info(info: RefitInfo) -> dict[str, Any]:
    """Convert to values that JSON can hold."""
    return {name: [list(shape), str(dtype).removeprefix("torch.")] for name, (shape, dtype) in info.items()}


def decode_refit_info(encoded: Mapping[str, Any]) -> RefitInfo:
    """The inverse of `encode_refit_info`."""
    return {name: (tuple(shape), getattr(torch, dtype)) for name, (shape, dtype) in encoded.items()}


class RefitStore:
    """Where the processes of a group find each other. The first rank listens, on `ip` alone.

    Args:
        port: that the first rank listens on; 0 for any that is free.
    """

    def __init__(self, ip: str, port: int, rank: int, timeout: float) -> None:
        self.rank, self.limit = rank, timedelta(seconds=timeout)
        self.ip = local_address(ip)
        options: dict[str, Any] = {"is_master": False}
        if rank == 0:
            listener = socket.create_server((ip, port))
            port = listener.getsockname()[1]
            options = {"is_master": True, "master_listen_fd": listener.detach(), "wait_for_workers": False}
        self.port = port
        self.store = torch.distributed.TCPStore(ip, port, timeout=self.limit, **options)


def local_address(ip: str) -> str:
    """The address of this machine by which it is reached from `ip`; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((ip, 9))
        return str(probe.getsockname()[0])


class RefitGroup:
    """A process group beside the default one: the policy's first rank is rank 0, the engine's processes follow.

    Collective over all of them.

    Args:
        on_host: send tensors in the host's memory, by gloo. NCCL takes no two processes on one GPU.

    Raises:
        RuntimeError: not all processes came within the store's time, which every broadcast has too.
    """

    def __init__(self, store: RefitStore, world_size: int, on_host: bool = False) -> None:
        self.group: Any
        if platform.has_gpu() and not on_host:
            options = torch.distributed.ProcessGroupNCCL.Options()
            options._timeout = store.limit
            self.group = torch.distributed.ProcessGroupNCCL(store.store, store.rank, world_size, options)
        else:
            # Without a device gloo takes the address of the host's name, which others often cannot reach.
            gloo: Any = torch.distributed.ProcessGroupGloo
            options = gloo._Options()
            options._timeout = store.limit
            options._devices = [gloo.create_device(hostname=store.ip)]
            self.group = gloo(store.store, store.rank, world_size, options)

    @classmethod
    def join(cls, ip: str, port: int, rank: int, world_size: int, timeout: float = 600) -> RefitGroup:
        """Meet the other ranks at the first one's address; `timeout` in seconds."""
        return cls(RefitStore(ip, port, rank, timeout), world_size)

    def begin_broadcast(self, tensor: Tensor) -> Any:
        """Start a `broadcast`; the result's `wait()` ends it."""
        return self.group.broadcast(tensor, 0)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """From rank 0, in place."""
        self.begin_broadcast(tensor).wait()
        return tensor


class RefitGroups:
    """Several engines' groups, by name, sent to at the same time. One that fails is left out from then on.

    Other threads may take groups out meanwhile.
    """

    def __init__(self, groups: Mapping[str, RefitGroup]) -> None:
        self.groups, self.failures = dict(groups), dict[str, Exception]()
        self._lock = Lock()

    def leave_out(self, name: str) -> None:
        """Send nothing more to this one, if it is there."""
        with self._lock:
            self.groups.pop(name, None)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """From this process, rank 0 of all of them."""
        with self._lock:
            groups = list(self.groups.items())
        begun = [(name, self._try(name, group.begin_broadcast, tensor)) for name, group in groups]
        for name, work in begun:
            if work is not None:
                self._try(name, work.wait)
        for name in self.failures:
            self.leave_out(name)
        return tensor

    def _try(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except RuntimeError as error:
            self.failures[name] = error
            return None


Broadcasts = RefitGroup | RefitGroups

Places = dict[str, tuple[int, tuple[int, ...], torch.dtype]]
"""Name → first byte, shape and precision of each tensor in a buffer."""


def lay_out(info: Iterable[tuple[str, tuple[tuple[int, ...], torch.dtype]]]) -> tuple[Places, int]:
    """Tensors one after the other: their places, and the bytes they take."""
    places, size = {}, 0
    for name, (shape, dtype) in info:
        places[name] = (size, shape, dtype)
        size += torch.Size(shape).numel() * dtype.itemsize
    return places, size


def _put(buffer: Tensor, start: int, tensor: Tensor) -> None:
    buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _cut(buffer: Tensor, places: Places) -> Iterator[tuple[str, Tensor]]:
    for name, (start, shape, dtype) in places.items():
        size = torch.Size(shape).numel() * dtype.itemsize
        # A copy begins at an address that every precision can be read from.
        yield name, buffer[start : start + size].clone().view(dtype).view(shape)


class Bucket:
    """Tensors' bytes, one after the other in a buffer of `budget` bytes."""

    def __init__(self, budget: int) -> None:
        self.budget, self.filled = budget, 0
        self.numbers: list[int] = []
        self.buffer = torch.empty(0, dtype=torch.uint8)

    def has_room(self, tensor: Tensor) -> bool:
        return self.filled + tensor.nbytes <= self.budget

    def add(self, number: int, tensor: Tensor) -> None:
        """A copy of the tensor, for which there must be room."""
        if not self.buffer.numel():
            self.buffer = torch.empty(self.budget, dtype=torch.uint8, device=tensor.device)
        _put(self.buffer, self.filled, tensor)
        self.numbers.append(number)
        self.filled += tensor.nbytes

    def send(self, group: Broadcasts) -> None:
        """Broadcast what is in it, if anything; it is empty afterwards."""
        if self.numbers:
            _send(self.numbers, self.buffer[: self.filled], group)
        self.numbers, self.filled = [], 0


def _send(numbers: list[int], payload: Tensor, group: Broadcasts) -> None:
    group.broadcast(torch.tensor([len(numbers), payload.numel()], device=payload.device))
    group.broadcast(torch.tensor(numbers, device=payload.device))
    group.broadcast(payload)


def send_weights(tensors: Iterable[tuple[str, Tensor]], info: RefitInfo, group: Broadcasts | None, budget: int) -> None:
    """Broadcast every tensor; where `group` is None, only take part in producing them."""
    bucket, numbers = Bucket(budget), {name: number for number, name in enumerate(info)}
    for name, tensor in tensors:
        if group is None:
            continue
        if not bucket.has_room(tensor):
            bucket.send(group)
        if bucket.has_room(tensor):
            bucket.add(numbers[name], tensor)
        else:  # larger than a bucket: it goes as it is
            _send([numbers[name]], tensor.contiguous().view(-1).view(torch.uint8), group)
    if group is not None:
        bucket.send(group)


def plan_buckets(info: RefitInfo, budget: int) -> list[list[str]]:
    """Names of the tensors of each bucket of at most `budget` bytes."""
    buckets: list[list[str]] = []
    room = 0
    for name, (shape, dtype) in info.items():
        size = torch.Size(shape).numel() * dtype.itemsize
        if not buckets or size > room:
            buckets.append([])
            room = budget
        buckets[-1].append(name)
        room -= size
    return buckets


class SharedBucket:
    """Named tensors in one block of shared memory, each written when it is there.

    Raises:
        ValueError: `info` is empty.
    """

    def __init__(self, info: RefitInfo) -> None:
        self.places, size = lay_out(info.items())
        if not size:
            raise ValueError("a bucket of no tensors cannot be shared")
        self._memory: shared_memory.SharedMemory | None = None
        if platform.has_gpu():
            from torch.multiprocessing.reductions import reduce_tensor

            self._buffer = torch.empty(size, dtype=torch.uint8, device=platform.device())
            self._where: dict[str, Any] = {"cuda": reduce_tensor(self._buffer)}
        else:
            self._memory = shared_memory.SharedMemory(create=True, size=size)
            self._buffer = torch.frombuffer(self._memory.buf, dtype=torch.uint8)[:size]
            self._where = {"shared_memory": self._memory.name}

    def write(self, name: str, tensor: Tensor) -> None:
        _put(self._buffer, self.places[name][0], tensor)

    def handle(self) -> dict[str, Any]:
        """Return the handles for `RefitReceiver.update_weights_from_ipc_handles`, once all tensors are written."""
        platform.synchronize()
        return {**self._where, "tensors": self.places}

    def release(self) -> None:
        """The memory; whoever still reads it on this host keeps it until then."""
        del self._buffer
        if self._memory is not None:
            self._memory.close()
            self._memory.unlink()


LoadWeights = Callable[[Iterable[tuple[str, Tensor]]], Any]
"""Takes (Hugging Face name, tensor) pairs; the tensors are gone afterwards."""


class RefitReceiver:
    """The engine's side, in one of its processes.

    Args:
        load_weights: sets the engine's weights, such as vLLM's `model.load_weights`.
        info: what the policy's `prepare_refit_info` gave.
        device: that the weights come to; the process's current GPU, or the CPU, if left out.
    """

    def __init__(self, load_weights: LoadWeights, info: RefitInfo, device: torch.device | str | None = None) -> None:
        self.load_weights, self.info = load_weights, info
        self.device = platform.device() if device is None else torch.device(device)
        self.group: RefitGroup | None = None

    def init_collective(self, ip: str, port: int, rank: int, world_size: int, timeout: float = 600) -> None:
        """Join the policy's group; ranks begin at 1, the policy is 0."""
        on_host = self.device.type == "cpu"
        self.group = RefitGroup(RefitStore(ip, port, rank, timeout), world_size, on_host)

    def update_weights_from_collective(self) -> None:
        """Receive all weights; runs beside the policy's `broadcast_weights_for_collective`.

        Raises:
            RuntimeError: `init_collective` was not called.
        """
        if self.group is None:
            raise RuntimeError("update_weights_from_collective: call init_collective first")
        entries, received = list(self.info.items()), 0
        while received < len(self.info):
            header = torch.zeros(HEADER_NUMBERS, dtype=torch.long, device=self.device)
            count, size = self.group.broadcast(header).tolist()
            numbers = self.group.broadcast(torch.empty(count, dtype=torch.long, device=self.device)).tolist()
            payload = self.group.broadcast(torch.empty(size, dtype=torch.uint8, device=self.device))
            self.load_weights(_cut(payload, lay_out(entries[number] for number in numbers)[0]))
            received += count

    def update_weights_from_ipc_handles(self, handles: Mapping[str, Any]) -> None:
        """Take one bucket from the shared memory of this process's device.

        Args:
            handles: what the policy's first rank got from `get_weights_ipc_handles`.

        Raises:
            ValueError: there is none on this device.
        """
        own = platform.device_id(self.device)
        if own not in handles:
            raise ValueError(
                f"update_weights_from_ipc_handles: no weights on this process's device {own}; there are on "
                f"{', '.join(handles) or 'none (handles are those of the first rank)'}"
            )
        handle = handles[own]
        if "cuda" in handle:
            self.load_weights(_cut(_open_on(self.device, *handle["cuda"]), handle["tensors"]))
            platform.synchronize(self.device)
            return
        memory = shared_memory.SharedMemory(handle["shared_memory"])
        # Attaching registers the block here too; it is its maker's to remove.
        resource_tracker.unregister(memory._name, "shared_memory")  # type: ignore[attr-defined]
        self.load_weights(_cut(torch.frombuffer(memory.buf, dtype=torch.uint8), handle["tensors"]))
        memory.close()


def _open_on(device: torch.device, rebuild: Callable[..., Tensor], arguments: tuple[Any, ...]) -> Tensor:
    """Another process's block; its number of the device may be another."""
    call = inspect.signature(rebuild).bind(*arguments)
    call.arguments["storage_device"] = platform.device_index(device)
    return rebuild(*call.args, **call.kwargs)
