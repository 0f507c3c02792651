"""Transfer of the policy's weights to an inference engine, as Hugging Face tensors in buckets.

A bucket contains several tensors, up to a number of bytes. There are two ways of transfer:

- By collective. One or several ranks of the policy send; each has a process group with the engine's processes. For each
  bucket three tensors are broadcast: a header (number of tensors, number of bytes), the tensors' indices in the result
  of the policy's `prepare_refit_info`, and the tensors' concatenated bytes. A sender fills a bucket while it sends
  another; the engine receives a bucket while it loads another.
- By shared memory (IPC). Each bucket is one block of shared memory on every GPU of the policy, or on the host if there
  is no GPU.

The additional memory is at most two buckets and the largest tensor.
"""

from __future__ import annotations

import functools
import inspect
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import accumulate, islice
from multiprocessing import shared_memory
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from mcore_rl import platform
from mcore_rl.models.refit.delta import DeltaEncoder, RefusedUpdate
from mcore_rl.models.refit.host_copy import HostCopy, K, Places, lay_out, nbytes_of, open_shared

RefitInfo = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Map from name to shape and precision; a tensor's number is its index in the map."""

BUCKET_BYTES = 512 * 1024**2
"""Size of a bucket, unless a caller chooses another one."""

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

    def begin_broadcast(self, tensor: Tensor) -> Callable[[], Any]:
        """Start a `broadcast` and return a function that waits for its end."""
        wait: Callable[[], Any] = self.group.broadcast(tensor, 0).wait
        return wait

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Broadcast the tensor of rank 0 into the tensors of all other ranks; return the tensor."""
        self.begin_broadcast(tensor)()
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

    def begin_broadcast(self, tensor: Tensor) -> Callable[[], Any]:
        """Start to broadcast `tensor` to all groups; return a function that waits for the end.

        This process is rank 0 of each group.
        """
        with self._lock:
            groups = list(self.groups.items())
        begun = [(name, self._try(name, group.begin_broadcast, tensor)) for name, group in groups]

        def finish() -> None:
            for name, wait in begun:
                if wait is not None and name not in self.failures:
                    self._try(name, wait)
            for name in self.failures:
                self.leave_out(name)

        return finish

    def _try(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except RuntimeError as error:
            self.failures[name] = error
            return None


Broadcasts = RefitGroup | RefitGroups


def _put(buffer: Tensor, start: int, tensor: Tensor) -> None:
    room = buffer[start : start + tensor.nbytes]
    if start % tensor.itemsize:  # numbers of this precision cannot begin here
        room.copy_(tensor.contiguous().view(-1).view(torch.uint8))
    else:
        room.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _cut(buffer: Tensor, places: Places[str]) -> Iterator[tuple[str, Tensor]]:
    for name, (start, shape, dtype) in places.items():
        size = nbytes_of(shape, dtype)
        # The copy has an aligned address, from which every precision can be read.
        yield name, buffer[start : start + size].clone().view(dtype).view(shape)


class Bucket:
    """Collects tensors in a buffer, to broadcast them together.

    Args:
        on_host: keep the buffer in host memory, instead of on the tensors' device.
    """

    def __init__(self, budget: int, on_host: bool = False) -> None:
        self.budget, self.on_host = budget, on_host
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self.reset(budget)

    def reset(self, budget: int) -> None:
        """Empty the bucket, and make room for `budget` bytes."""
        self.budget, self.filled = max(self.budget, budget), 0
        self.numbers: list[int] = []
        self.sizes: list[tuple[int, int]] = []

    def add(self, number: int, tensor: Tensor) -> None:
        """Copy `tensor` into the bucket, which must have room for it.

        `number` is the tensor's index in the result of `prepare_refit_info`.
        """
        if self.buffer.numel() < self.budget:
            self.buffer = torch.empty(self.budget, dtype=torch.uint8, device="cpu" if self.on_host else tensor.device)
        _put(self.buffer, self.filled, tensor)
        self.numbers.append(number)
        self.sizes.append((tensor.nbytes, tensor.itemsize))
        self.filled += tensor.nbytes


class BucketSender:
    """Sends buckets of tensors. While a bucket is being sent, the next one is filled.

    Args:
        encoder: makes each bucket the differences from what it has encoded before, in host memory; None to send the
            tensors as they are.
        on_host: send from host memory.
    """

    def __init__(self, group: Broadcasts, encoder: DeltaEncoder | None = None, on_host: bool = False) -> None:
        self._group, self._encoder = group, encoder
        self._on_host = on_host or encoder is not None
        self._filling, self._sending = (Bucket(0, self._on_host) for _ in range(2))
        self._pending: list[tuple[Tensor, Callable[[], Any]]] = []
        self.bytes_sent = 0

    def send_together(self, tensors: Iterable[tuple[int, Tensor]], nbytes: int) -> None:
        """Send `tensors` (with their indices in the result of `prepare_refit_info`), of `nbytes` in all, as one bucket.

        It returns when the bucket before has been sent.
        """
        bucket = self._filling
        bucket.reset(nbytes)
        for number, tensor in tensors:
            if tensor.nbytes == nbytes:  # the only one: it is not copied on its device
                data = (tensor.cpu() if self._on_host else tensor).contiguous().view(-1).view(torch.uint8)
                self.send([number], self._encoded([number], [(nbytes, tensor.itemsize)], data))
                self.wait()
                return
            bucket.add(number, tensor)
        self.send(bucket.numbers, self._encoded(bucket.numbers, bucket.sizes, bucket.buffer[: bucket.filled]))
        self._filling, self._sending = self._sending, bucket

    def send(self, numbers: list[int], payload: Tensor) -> None:
        """Begin to send the tensors `numbers`, whose bytes are `payload`, after the bucket before has been sent."""
        self.wait()
        for tensor in (torch.tensor([len(numbers), payload.numel()]), torch.tensor(numbers), payload):
            there = tensor.to(payload.device)
            self._pending.append((there, self._group.begin_broadcast(there)))  # the tensor must live until the end
        self.bytes_sent += payload.numel()

    def wait(self) -> None:
        """Wait until all is sent."""
        for _, wait in self._pending:
            wait()
        self._pending.clear()

    def _encoded(self, numbers: Sequence[int], sizes: Sequence[tuple[int, int]], data: Tensor) -> Tensor:
        if self._encoder is None:
            return data
        starts = accumulate((nbytes for nbytes, _ in sizes), initial=0)
        return self._encoder.encode(
            (number, data[start : start + nbytes].numpy(), itemsize)
            for number, start, (nbytes, itemsize) in zip(numbers, starts, sizes, strict=False)
        )


def send_weights(tensors: Iterable[tuple[str, Tensor]], info: RefitInfo, group: Broadcasts | None, budget: int) -> None:
    """Broadcast all `tensors` to `group`, in buckets of `budget` bytes.

    If `group` is None, this rank sends nothing; it only iterates over `tensors`, because all ranks produce them
    together.
    """
    numbers = {name: number for number, name in enumerate(info)}
    sizes = {name: nbytes_of(*entry) for name, entry in info.items()}
    sender, coming = None if group is None else BucketSender(group), iter(tensors)
    for names in pack_by_size(sizes, budget):
        part = islice(coming, len(names))
        if sender is None:
            deque(part, maxlen=0)
        else:
            sender.send_together(((numbers[name], tensor) for name, tensor in part), sum(sizes[n] for n in names))
    if sender is not None:
        sender.wait()


def pack_by_size(sizes: Mapping[K, int], budget: int) -> list[list[K]]:
    """Divide keys, in their order, into lists whose sizes add up to `budget` at most, or that have one key."""
    lists: list[list[K]] = []
    room = 0
    for key, size in sizes.items():
        if not lists or size > room:
            lists.append([])
            room = budget
        lists[-1].append(key)
        room -= size
    return lists


def plan_buckets(info: RefitInfo, budget: int) -> list[list[str]]:
    """Divide the tensors of `info` into buckets of at most `budget` bytes; return the tensors' names in each bucket.

    A tensor that is larger than `budget` has a bucket of its own.
    """
    return pack_by_size({name: nbytes_of(*entry) for name, entry in info.items()}, budget)


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

    Attributes:
        order: of several senders, the index of the one that sends each bucket.

    Args:
        load_weights: function that sets the engine's weights, such as vLLM's `model.load_weights`.
        info: result of the policy's `prepare_refit_info`.
        device: device on which the weights are received. Default: the process's current GPU, or the CPU without GPU.
        copy: the engine's copy of the weights in host memory, if the policy sends differences; otherwise None.
    """

    def __init__(
        self,
        load_weights: LoadWeights,
        info: RefitInfo,
        device: torch.device | str | None = None,
        copy: HostCopy | None = None,
    ) -> None:
        self.load_weights, self.info, self.copy = load_weights, info, copy
        self.device = platform.device() if device is None else torch.device(device)
        self.groups: list[RefitGroup] = []
        self.order: list[int] = []

    def init_collective(self, ip: str, port: int, rank: int, world_size: int, timeout: float = 600) -> None:
        """Join the process group that a sending rank and the engine's processes form; call it once for each sender.

        `rank` is this process's rank in the group. It is at least 1, because the sender has rank 0. `ip` and `port` are
        the sender's address.
        """
        on_host = self.device.type == "cpu" or self.copy is not None
        self.groups.append(RefitGroup(RefitStore(ip, port, rank, timeout), world_size, on_host))

    def update_weights_from_collective(
        self, base: int | None = None, version: int | None = None, count: int | None = None
    ) -> None:
        """Receive all weights while the policy runs `broadcast_weights_for_collective`.

        Args:
            base: version of the weights from which differences begin; None if all weights are sent whole.
            version: version of the weights that are sent.
            count: number of tensors that are sent; None for all. The engine keeps its values of the others.

        Raises:
            RuntimeError: `init_collective` was not called.
            RefusedUpdate: the engine does not have the version `base`, or the differences are damaged. Nothing was
                loaded then. The next update must be whole.
        """
        if not self.groups:
            raise RuntimeError("update_weights_from_collective: call init_collective first")
        expected = len(self.info) if count is None else count
        if self.copy is None:
            self._receive(self._load, expected)
            return
        failure, changed, copy = None, list[tuple[int, Tensor]](), self.copy
        try:
            copy.begin(base)
        except RefusedUpdate as error:
            failure = error
        self._receive(lambda numbers, payload: changed.extend(copy.update(numbers, payload)), expected, failure)
        names = list(self.info)
        # Only now, because an engine cannot end an update of which it has loaded a part.
        self.load_weights((names[number], tensor.to(self.device)) for number, tensor in changed)
        copy.end(version)

    def _receive(
        self, use: Callable[[list[int], Tensor], Any], expected: int, failure: Exception | None = None
    ) -> None:
        """Receive an update of `expected` tensors; call `use` with each bucket: the tensors' numbers, and their bytes.

        If there is a `failure`, or `use` fails, the rest is still received, because the senders wait for that.
        """
        for numbers, payload in self._ahead(expected):
            if failure is None:
                try:
                    use(numbers, payload)
                except Exception as error:
                    failure = error
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Leave the process groups and release the copy of the weights."""
        self.groups.clear()
        if self.copy is not None:
            self.copy.close()

    def _load(self, numbers: list[int], payload: Tensor) -> None:
        entries = list(self.info.items())
        self.load_weights(_cut(payload, lay_out(entries[number] for number in numbers)[0]))

    def _ahead(self, expected: int) -> Iterator[tuple[list[int], Tensor]]:
        """Yield the buckets of an update; while one is used, the next one is received."""
        buckets = self._buckets(expected)
        use = functools.partial(platform.use_device, self.device)
        with ThreadPoolExecutor(1, "refit", initializer=use) as beside:
            coming = beside.submit(next, buckets, None)
            while (bucket := coming.result()) is not None:
                coming = beside.submit(next, buckets, None)
                yield bucket

    def _buckets(self, expected: int) -> Iterator[tuple[list[int], Tensor]]:
        """Receive buckets until `expected` tensors have come; yield each bucket's numbers and bytes."""
        device = torch.device("cpu") if self.copy is not None else self.device
        received, order = 0, iter(self.order)
        while received < expected:
            group = self.groups[next(order, 0)]
            header = torch.zeros(HEADER_NUMBERS, dtype=torch.long, device=device)
            count, size = group.broadcast(header).tolist()
            numbers = group.broadcast(torch.empty(count, dtype=torch.long, device=device)).tolist()
            yield numbers, group.broadcast(torch.empty(size, dtype=torch.uint8, device=device))
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
        self.load_weights(_cut(open_shared(handle["shared_memory"]), handle["tensors"]))


def _open_on(device: torch.device, rebuild: Callable[..., Tensor], arguments: tuple[Any, ...]) -> Tensor:
    """Open a block of GPU memory that another process has shared.

    Args:
        device: the GPU, in this process's numbering; the other process may number the GPUs differently.
        rebuild, arguments: function and arguments, as PyTorch's `reduce_tensor` has returned them in the other process.
    """
    call = inspect.signature(rebuild).bind(*arguments)
    call.arguments["storage_device"] = platform.device_index(device)
    return rebuild(*call.args, **call.kwargs)
