"""Transfer of the policy's weights to an inference engine, as Hugging Face tensors in buckets.

A bucket contains several tensors, up to a number of bytes. There are two ways of transfer:

- By collective. The policy's first rank and the engine's processes share a process group. For each bucket three tensors
  are broadcast: a header (number of tensors, number of bytes), the tensors' indices in the result of the policy's
  `prepare_refit_info`, and the tensors' concatenated bytes.
- By shared memory (IPC). Each bucket is one block of shared memory on every GPU of the policy, or on the host if there
  is no GPU.

The additional memory is at most one bucket and the largest tensor.
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
"""Map from name to shape and precision; a tensor's number is its index in the map."""

HEADER_NUMBERS = 2


def encode_refit_info(info: RefitInfo) -> dict[str, Any]:
    """Convert `info` to values that JSON can represent."""
    return {name: [list(shape), str(dtype).removeprefix("torch.")] for name, (shape, dtype) in info.items()}


def decode_refit_info(encoded: Mapping[str, Any]) -> RefitInfo:
    """Convert the result of `encode_refit_info` back."""
    return {name: (tuple(shape), getattr(torch, dtype)) for name, (shape, dtype) in encoded.items()}


class RefitStore:
    """The store through which the processes of a group find each other. Rank 0 listens on the address `ip` only.

    Args:
        port: port on which rank 0 listens; if 0, rank 0 chooses a free port.
        timeout: time limit in seconds.
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
    """Return this machine's own address for connections to `ip`, without sending anything."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((ip, 9))
        return str(probe.getsockname()[0])


class RefitGroup:
    """A process group: the policy's first rank is rank 0, the other ranks are the engine's processes.

    The group is independent of PyTorch's default group. Its methods are collective over all processes of the group.

    Args:
        on_host: use gloo, with tensors in host memory, even if there is a GPU. This is needed if the policy and the
            engine use the same GPU, because NCCL does not connect two processes on one GPU.

    Raises:
        RuntimeError: some processes did not join within the store's time limit. Every broadcast has the same limit.
    """

    def __init__(self, store: RefitStore, world_size: int, on_host: bool = False) -> None:
        self.group: Any
        if platform.has_gpu() and not on_host:
            options = torch.distributed.ProcessGroupNCCL.Options()
            options._timeout = store.limit
            self.group = torch.distributed.ProcessGroupNCCL(store.store, store.rank, world_size, options)
        else:
            # Without a device gloo uses the address of the host's name, which other machines often cannot reach.
            gloo: Any = torch.distributed.ProcessGroupGloo
            options = gloo._Options()
            options._timeout = store.limit
            options._devices = [gloo.create_device(hostname=store.ip)]
            self.group = gloo(store.store, store.rank, world_size, options)

    @classmethod
    def join(cls, ip: str, port: int, rank: int, world_size: int, timeout: float = 600) -> RefitGroup:
        """Join the group as `rank`; `ip` and `port` are the address of rank 0, `timeout` is in seconds."""
        return cls(RefitStore(ip, port, rank, timeout), world_size)

    def begin_broadcast(self, tensor: Tensor) -> Any:
        """Start a `broadcast`; call `wait()` on the result to complete it."""
        return self.group.broadcast(tensor, 0)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Broadcast the tensor of rank 0 into the tensors of all other ranks; return the tensor."""
        self.begin_broadcast(tensor).wait()
        return tensor


class RefitGroups:
    """The groups of several engines. A tensor is broadcast to all groups concurrently.

    If a broadcast to a group fails, the group gets no further tensors, and its error is in `failures`. Another thread
    may call `leave_out` even during a broadcast.

    Args:
        groups: map from an engine's name to its group.
    """

    def __init__(self, groups: Mapping[str, RefitGroup]) -> None:
        self.groups, self.failures = dict(groups), dict[str, Exception]()
        self._lock = Lock()

    def leave_out(self, name: str) -> None:
        """Send no more tensors to the group `name`, if there is one."""
        with self._lock:
            self.groups.pop(name, None)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Broadcast `tensor` to all groups. This process is rank 0 of each group."""
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
"""Map from name to first byte, shape and precision of each tensor in a buffer."""


def lay_out(info: Iterable[tuple[str, tuple[tuple[int, ...], torch.dtype]]]) -> tuple[Places, int]:
    """Arrange all tensors of `info` in one block; return each (byte offset, shape, dtype), and the block's size."""
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
        # The copy has an aligned address, from which every precision can be read.
        yield name, buffer[start : start + size].clone().view(dtype).view(shape)


class Bucket:
    """Collects tensors in a buffer of `budget` bytes, to broadcast them together."""

    def __init__(self, budget: int) -> None:
        self.budget, self.filled = budget, 0
        self.numbers: list[int] = []
        self.buffer = torch.empty(0, dtype=torch.uint8)

    def has_room(self, tensor: Tensor) -> bool:
        return self.filled + tensor.nbytes <= self.budget

    def add(self, number: int, tensor: Tensor) -> None:
        """Copy `tensor` into the bucket. The caller must first check that the bucket `has_room` for it.

        `number` is the tensor's index in the result of `prepare_refit_info`.
        """
        if not self.buffer.numel():
            self.buffer = torch.empty(self.budget, dtype=torch.uint8, device=tensor.device)
        _put(self.buffer, self.filled, tensor)
        self.numbers.append(number)
        self.filled += tensor.nbytes

    def send(self, group: Broadcasts) -> None:
        """Broadcast the bucket's tensors, if there are any, and empty the bucket."""
        if self.numbers:
            _send(self.numbers, self.buffer[: self.filled], group)
        self.numbers, self.filled = [], 0


def _send(numbers: list[int], payload: Tensor, group: Broadcasts) -> None:
    group.broadcast(torch.tensor([len(numbers), payload.numel()], device=payload.device))
    group.broadcast(torch.tensor(numbers, device=payload.device))
    group.broadcast(payload)


def send_weights(tensors: Iterable[tuple[str, Tensor]], info: RefitInfo, group: Broadcasts | None, budget: int) -> None:
    """Broadcast all `tensors` to `group`, in buckets of `budget` bytes.

    If `group` is None, this rank sends nothing; it only iterates over `tensors`, because all ranks produce them
    together.
    """
    bucket, numbers = Bucket(budget), {name: number for number, name in enumerate(info)}
    for name, tensor in tensors:
        if group is None:
            continue
        if not bucket.has_room(tensor):
            bucket.send(group)
        if bucket.has_room(tensor):
            bucket.add(numbers[name], tensor)
        else:  # larger than a bucket: it is sent alone
            _send([numbers[name]], tensor.contiguous().view(-1).view(torch.uint8), group)
    if group is not None:
        bucket.send(group)


def plan_buckets(info: RefitInfo, budget: int) -> list[list[str]]:
    """Divide the tensors of `info` into buckets of at most `budget` bytes; return the tensors' names in each bucket.

    A tensor that is larger than `budget` has a bucket of its own.
    """
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
    """A block of shared memory for all tensors of `info`. The method `write` copies the tensors into the block.

    Raises:
        ValueError: `info` is empty.
    """

    def __init__(self, info: RefitInfo) -> None:
        self.places, size = lay_out(info.items())
        if not size:
            raise ValueError("a bucket must contain at least one tensor")
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
        """Return a handle for `RefitReceiver.update_weights_from_ipc_handles`. First `write` all tensors."""
        platform.synchronize()
        return {**self._where, "tensors": self.places}

    def release(self) -> None:
        """Release the block of memory. A process that has the block open can read it until the process closes it."""
        del self._buffer
        if self._memory is not None:
            self._memory.close()
            self._memory.unlink()


LoadWeights = Callable[[Iterable[tuple[str, Tensor]]], Any]
"""Function of (Hugging Face name, tensor) pairs; the tensors are invalid after the call."""


class RefitReceiver:
    """Receives the policy's weights in one process of the engine.

    Args:
        load_weights: function that sets the engine's weights, such as vLLM's `model.load_weights`.
        info: result of the policy's `prepare_refit_info`.
        device: device on which the weights are received. Default: the process's current GPU, or the CPU without GPU.
    """

    def __init__(self, load_weights: LoadWeights, info: RefitInfo, device: torch.device | str | None = None) -> None:
        self.load_weights, self.info = load_weights, info
        self.device = platform.device() if device is None else torch.device(device)
        self.group: RefitGroup | None = None

    def init_collective(self, ip: str, port: int, rank: int, world_size: int, timeout: float = 600) -> None:
        """Join the process group that the policy and the engine's processes form.

        `rank` is this process's rank in the group. It is at least 1, because the policy has rank 0. `ip` and `port` are
        the policy's address.
        """
        on_host = self.device.type == "cpu"
        self.group = RefitGroup(RefitStore(ip, port, rank, timeout), world_size, on_host)

    def update_weights_from_collective(self) -> None:
        """Receive all weights while the policy runs `broadcast_weights_for_collective`.

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
        """Load the weights of one bucket, from the block of shared memory on this process's device.

        Args:
            handles: result of `get_weights_ipc_handles` on the policy's first rank.

        Raises:
            ValueError: there is no handle for this device.
        """
        own = platform.device_id(self.device)
        if own not in handles:
            raise ValueError(
                f"update_weights_from_ipc_handles: no handle is for this process's device {own}; "
                + (f"there are handles for {', '.join(handles)}" if handles else "pass the handles of the first rank")
            )
        handle = handles[own]
        if "cuda" in handle:
            self.load_weights(_cut(_open_on(self.device, *handle["cuda"]), handle["tensors"]))
            platform.synchronize(self.device)
            return
        memory = shared_memory.SharedMemory(handle["shared_memory"])
        # Attaching also registers the block here, but only its creator may remove it.
        resource_tracker.unregister(memory._name, "shared_memory")  # type: ignore[attr-defined]
        self.load_weights(_cut(torch.frombuffer(memory.buf, dtype=torch.uint8), handle["tensors"]))
        memory.close()


def _open_on(device: torch.device, rebuild: Callable[..., Tensor], arguments: tuple[Any, ...]) -> Tensor:
    """Open a block of GPU memory that another process has shared.

    Args:
        device: the GPU, in this process's numbering; the other process may number the GPUs differently.
        rebuild, arguments: function and arguments, as PyTorch's `reduce_tensor` has returned them in the other process.
    """
    call = inspect.signature(rebuild).bind(*arguments)
    call.arguments["storage_device"] = platform.device_index(device)
    return rebuild(*call.args, **call.kwargs)
