"""Transfer of the policy's weights to an inference engine, as Hugging Face tensors in buckets.

A bucket contains several tensors, up to a number of bytes. There are two ways of transfer:

- By collective. One or several ranks of the policy send; each has a process group with the engine's processes. For each
  bucket three tensors are broadcast: a header (number of tensors, number of bytes), the tensors' indices in the result
  of the policy's `prepare_refit_info`, and the tensors' concatenated bytes. A sender fills a bucket while it sends
  another; the engine receives a bucket while it loads another. In a group that shares memory, the place of the bytes is
  broadcast instead of the bytes, and a barrier tells the sender when they were read.
- By handles alone (IPC), which the caller transports. Each bucket is one block of shared memory on every GPU of the
  policy, or on the host if there is no GPU.

The additional memory is at most two buckets and the largest tensor.
"""

from __future__ import annotations

import functools
import json
import socket
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import accumulate, islice
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mcore_rl import platform
from mcore_rl.errors import TrainingError
from mcore_rl.models.refit.delta import DeltaEncoder, RefusedUpdate
from mcore_rl.models.refit.host_copy import SHARED_DIRECTORY, HostCopy, K, Places, lay_out, nbytes_of
from mcore_rl.models.refit.shared_block import SharedBlock, decode_handle, encode_handle, open_block, sees_probe

RefitInfo = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Map from name to shape and precision; a tensor's number is its index in the map."""

BUCKET_BYTES = 512 * 1024**2
"""Size of a bucket, unless a caller chooses another one."""

HEADER_NUMBERS = 3
"""Numbers in the header of a bucket: of tensors, of bytes, and of characters of the handle in a group that shares."""
KEPT_BLOCKS = 2
"""Blocks of a sender that a receiver keeps open: a sender fills two in turn."""


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
            listener = listen(ip, port)
            port = listener.getsockname()[1]
            options = {"is_master": True, "master_listen_fd": listener.detach(), "wait_for_workers": False}
        self.port = port
        self.store = torch.distributed.TCPStore(ip, port, timeout=self.limit, **options)


def local_address(ip: str) -> str:
    """Return this machine's own address for connections to `ip`, without sending anything.

    Args:
        ip: an address of IPv4 or IPv6, or the name of a host. If the name has addresses of both kinds, IPv4 is used.

    Raises:
        OSError: the name is not known, or there is no way to the address.
    """
    found = socket.getaddrinfo(ip, 9, type=socket.SOCK_DGRAM)
    family, *_, address = min(found, key=lambda one: one[0] != socket.AF_INET)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def listen(ip: str, port: int) -> socket.socket:
    """Return a socket that listens on `ip`, an address of IPv4 or IPv6, and on `port`; 0 for a free one.

    Raises:
        OSError: the address is not of this machine, or the port is taken.
    """
    kinds = {found[0] for found in socket.getaddrinfo(ip, port, type=socket.SOCK_STREAM)}
    return socket.create_server((ip, port), family=socket.AF_INET if socket.AF_INET in kinds else socket.AF_INET6)


class RefitGroup:
    """A process group: the policy's first rank is rank 0, the other ranks are the engine's processes.

    The group is independent of PyTorch's default group. Its methods are collective over all processes of the group.

    Args:
        on_host: use gloo, with tensors in host memory, even if there is a GPU. This is needed if the policy and the
            engine use the same GPU, because NCCL does not connect two processes on one GPU.
        shares: the engine's processes read the bytes of buckets from shared memory.

    Raises:
        RuntimeError: some processes did not join within the store's time limit. Every broadcast has the same limit.
    """

    def __init__(self, store: RefitStore, world_size: int, on_host: bool = False, shares: bool = False) -> None:
        self.group: Any
        self.shares, self.is_on_host = shares, on_host and not shares
        if platform.has_gpu() and not (on_host or shares):
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

    def begin_send(self, bucket: FilledBucket, only: Collection[str] | None = None) -> Callable[[], Any]:
        """Start to send a bucket from rank 0; return a function that waits until it was received."""
        told, payload = bucket.handle.encode(), bucket.payload.cpu() if self.is_on_host else bucket.payload
        header = torch.tensor([len(bucket.numbers), payload.numel(), len(told)])
        parts = [header, torch.tensor(bucket.numbers)]
        if self.shares:
            parts.append(torch.frombuffer(bytearray(told), dtype=torch.uint8))
        else:
            parts = [*(part.to(payload.device) for part in parts), payload]
        waits = [self.begin_broadcast(part) for part in parts]
        if self.shares:
            waits.append(self.group.barrier().wait)

        def finish() -> None:
            for wait in waits:
                wait()
            parts.clear()  # until here, the tensors must live

        return finish

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Broadcast the tensor of rank 0 into the tensors of all other ranks; return the tensor."""
        self.begin_broadcast(tensor)()
        return tensor


class RefitGroups:
    """The groups of several engines. A bucket is sent to all groups concurrently.

    If sending to a group fails, the group gets no further buckets, and its error is in `failures`. Another thread may
    call `leave_out` even while a bucket is being sent.

    Args:
        groups: map from an engine's name to its group.
    """

    def __init__(self, groups: Mapping[str, RefitGroup]) -> None:
        self.groups, self.failures = dict(groups), dict[str, Exception]()
        self._lock = Lock()

    def leave_out(self, name: str) -> None:
        """Send no more buckets to the group `name`, if there is one."""
        with self._lock:
            self.groups.pop(name, None)

    def begin_send(self, bucket: FilledBucket, only: Collection[str] | None = None) -> Callable[[], Any]:
        """Start to send a bucket to all groups, or to those named in `only`; return a function that waits for the end.

        This process is rank 0 of each group.
        """
        with self._lock:
            groups = [(name, group) for name, group in self.groups.items() if only is None or name in only]
        begun = [(name, self._try(name, group.begin_send, bucket)) for name, group in groups]

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


Receivers = RefitGroup | RefitGroups


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


class FilledBucket(NamedTuple):
    """A bucket to send.

    numbers: the tensors' indices in the result of `prepare_refit_info`.
    payload: their bytes, or an update of them (`DeltaEncoder`), [n] uint8.
    handle: where a process that shares memory finds the bytes, see `encode_handle`; "" if no process does.
    is_lent: whether the payload is memory of a tensor, which is valid only until the next tensor is asked for.
    """

    numbers: list[int]
    payload: Tensor
    handle: str = ""
    is_lent: bool = False


class BucketMemory:
    """Memory for two buckets, in turn: one is filled while the other is being sent.

    A thread may release or close the memory while another one uses a bucket: the bucket then stays valid for its user.

    Args:
        shares: other processes read the buckets (`SharedBlock`).
        on_host: keep the buckets in host memory.
    """

    def __init__(self, shares: bool = False, on_host: bool = False) -> None:
        self.shares, self.on_host = shares, on_host
        self._blocks: list[SharedBlock | Tensor | None] = [None, None]
        self._is_closed, self._lock = False, Lock()

    def take(self, nbytes: int) -> Tensor:
        """Return `nbytes` bytes of the bucket that was taken less recently.

        Raises:
            TrainingError: the host has too little shared memory; the message says what the user can do.
            RuntimeError: the memory is closed.
        """
        with self._lock:
            self._check_open()
            self._blocks.reverse()
            block = self._blocks[0]
            if block is None or _buffer_of(block).numel() < nbytes:
                self._blocks[0] = None
                self._free(block)
                block = self._blocks[0] = self._new_block(nbytes)
            return _buffer_of(block)[:nbytes]

    def _new_block(self, nbytes: int) -> SharedBlock | Tensor:
        if not self.shares:
            device = torch.device("cpu") if self.on_host else platform.device()
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        try:
            return SharedBlock(nbytes, self.on_host)
        except OSError as error:
            raise TrainingError(
                f"a bucket of weights needs {nbytes / 1e9:.2g} GB of shared memory ({SHARED_DIRECTORY}), but there is "
                f"too little: {error.strerror or error}; give a container more by --shm-size or --ipc=host"
            ) from None

    def reserve(self, nbytes: int) -> None:
        """Take both buckets with `nbytes` bytes: taking as many or fewer later needs no more memory, and cannot fail.

        Raises:
            TrainingError, RuntimeError: see `take`.
        """
        for _ in range(len(self._blocks)):
            self.take(nbytes)

    @property
    def handle(self) -> str:
        """Handle of the bucket that was taken last; "" if it is not shared.

        Raises:
            RuntimeError: the memory is closed.
        """
        with self._lock:
            self._check_open()
            block = self._blocks[0]
        return encode_handle(block.handle) if isinstance(block, SharedBlock) else ""

    @property
    def is_taken(self) -> bool:
        return any(block is not None for block in self._blocks)

    def release(self) -> None:
        """Release the memory; `take` takes new memory."""
        with self._lock:
            blocks, self._blocks = self._blocks, [None, None]
            for block in blocks:
                self._free(block)

    def close(self) -> None:
        """Release the memory; `take` then fails."""
        self._is_closed = True
        self.release()

    def _check_open(self) -> None:
        if self._is_closed:  # nobody would remove a new block
            raise RuntimeError("the memory of buckets is closed")

    @staticmethod
    def _free(block: SharedBlock | Tensor | None) -> None:
        if isinstance(block, SharedBlock):
            block.release()


def _buffer_of(block: SharedBlock | Tensor) -> Tensor:
    return block.buffer if isinstance(block, SharedBlock) else block


class BucketSender:
    """Sends buckets of tensors. While a bucket is being sent, the next one is filled.

    Args:
        encoder: makes each bucket the differences from what it has encoded before, in host memory; None to send the
            tensors as they are.
        memory: memory of the buckets.
    """

    def __init__(
        self, group: Receivers, encoder: DeltaEncoder | None = None, memory: BucketMemory | None = None
    ) -> None:
        self._group, self._encoder = group, encoder
        self.memory = memory or BucketMemory(on_host=encoder is not None)
        self._filling = BucketMemory(on_host=True) if encoder is not None else self.memory
        self._pending: Callable[[], Any] | None = None
        self.bytes_sent = 0

    def send_together(self, tensors: Iterable[tuple[int, Tensor]], nbytes: int) -> None:
        """Send `tensors` (with their indices in the result of `prepare_refit_info`), of `nbytes` in all, as one bucket.

        It returns when the bucket before has been sent.
        """
        bucket = self.filled(tensors, nbytes)
        self.send(bucket)
        if bucket.is_lent:
            self.wait()

    def filled(self, tensors: Iterable[tuple[int, Tensor]], nbytes: int) -> FilledBucket:
        """Return a bucket with `tensors`, or with their differences from the versions that were sent last."""
        buffer, start = None, 0
        numbers, sizes = list[int](), list[tuple[int, int]]()
        for number, tensor in tensors:
            numbers.append(number)
            sizes.append((tensor.nbytes, tensor.itemsize))
            if tensor.nbytes == nbytes and not self._filling.shares:  # the only one: it is not copied on its device
                buffer = (tensor.cpu() if self._filling.on_host else tensor).contiguous().view(-1).view(torch.uint8)
                break
            buffer = self._filling.take(nbytes) if buffer is None else buffer
            _put(buffer, start, tensor)
            start += tensor.nbytes
        assert buffer is not None, "a bucket contains at least one tensor"
        if self._encoder is None:
            return FilledBucket(numbers, buffer, self._filling.handle, is_lent=not start)
        starts = accumulate((nbytes for nbytes, _ in sizes), initial=0)
        return self.placed(numbers, self._encoder.encode(
            (number, buffer[start : start + nbytes].numpy(), itemsize)
            for number, start, (nbytes, itemsize) in zip(numbers, starts, sizes, strict=False)
        ))  # fmt: skip

    def placed(self, numbers: list[int], payload: Tensor) -> FilledBucket:
        """Return a bucket with bytes that lie elsewhere. They are copied if other processes read them."""
        if not self.memory.shares:
            return FilledBucket(numbers, payload)
        return FilledBucket(numbers, self.memory.take(payload.numel()).copy_(payload), self.memory.handle)

    def send(self, bucket: FilledBucket, only: Collection[str] | None = None) -> None:
        """Begin to send a bucket, after the bucket before has been sent.

        Args:
            only: names of the groups to which it is sent, if this sender has `RefitGroups`; None for all.
        """
        self.wait()
        if self.memory.shares:
            platform.synchronize_stream()  # other processes read what this one has written
        self._pending = self._group.begin_send(bucket, only)
        self.bytes_sent += bucket.payload.numel()

    def wait(self) -> None:
        """Wait until all is sent."""
        if self._pending is not None:
            self._pending()
        self._pending = None


def send_weights(tensors: Iterable[tuple[str, Tensor]], info: RefitInfo, group: Receivers | None, budget: int) -> None:
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
        self._block = SharedBlock(size)

    def write(self, name: str, tensor: Tensor) -> None:
        _put(self._block.buffer, self.places[name][0], tensor)

    def handle(self) -> dict[str, Any]:
        """Return a handle for `RefitReceiver.update_weights_from_ipc_handles`. First `write` all tensors."""
        platform.synchronize()
        return {**self._block.handle, "tensors": self.places}

    def release(self) -> None:
        """Release the block of memory. A process that has the block open can read it until the process closes it."""
        self._block.release()


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
        on_host: receive collectives in host memory, because the policy may use the same GPU.
    """

    def __init__(
        self,
        load_weights: LoadWeights,
        info: RefitInfo,
        device: torch.device | str | None = None,
        copy: HostCopy | None = None,
        on_host: bool = False,
    ) -> None:
        self.load_weights, self.info, self.copy = load_weights, info, copy
        self.device = platform.device() if device is None else torch.device(device)
        self.is_on_host = on_host or copy is not None or self.device.type == "cpu"
        self.groups: list[RefitGroup] = []
        self.order: list[int] = []

    def init_collective(
        self, ip: str, port: int, rank: int, world_size: int, timeout: float = 600, shares: bool = False
    ) -> None:
        """Join the process group that a sending rank and the engine's processes form; call it once for each sender.

        `rank` is this process's rank in the group. It is at least 1, because the sender has rank 0. `ip` and `port` are
        the sender's address. With `shares`, this process reads buckets from the sender's shared memory.
        """
        self.groups.append(RefitGroup(RefitStore(ip, port, rank, timeout), world_size, self.is_on_host, shares))

    def join_routes(
        self, store: tuple[str, int], probes: Sequence[dict[str, str]], index: int, timeout: float = 600
    ) -> None:
        """Tell the policy's first rank whose memory this process can read, and join the groups that it then names.

        Args:
            store: address of a store of the first rank.
            probes: for each rank of the policy, what its `Probe.told` returns.
            index: number of this process among those of its engine.
            timeout: time limit in seconds.

        Raises:
            RuntimeError: the first rank does not answer, or names no groups because its run ends.
        """
        meeting = RefitStore(*store, rank=1, timeout=timeout).store
        seen = [rank for rank, told in enumerate(probes) if sees_probe(told, self.device)]
        meeting.set(f"sees/{index}", json.dumps(seen))
        if (plan := json.loads(meeting.get("plan"))) is None:
            raise RuntimeError("the trainer sends no weights, because it ends")
        self.order = plan["orders"][index]
        for ip, port, members, shares in plan["routes"]:
            if index in members:
                self.init_collective(ip, port, 1 + members.index(index), 1 + len(members), timeout, shares)

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
        # A shared bucket is used before the next one is received, because its sender waits for that.
        shares = any(group.shares for group in self.groups)
        for numbers, payload in self._buckets(expected) if shares else self._ahead(expected):
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
        device = torch.device("cpu") if self.is_on_host else self.device
        received, order = 0, iter(self.order)
        blocks = [OrderedDict[str, Tensor]() for _ in self.groups]
        while received < expected:
            number = next(order, 0)
            group = self.groups[number]
            at = torch.device("cpu") if group.shares else device
            header = torch.zeros(HEADER_NUMBERS, dtype=torch.long, device=at)
            count, size, length = group.broadcast(header).tolist()
            numbers = group.broadcast(torch.empty(count, dtype=torch.long, device=at)).tolist()
            payload = group.broadcast(torch.empty(length if group.shares else size, dtype=torch.uint8, device=at))
            if group.shares:
                yield numbers, _opened(blocks[number], payload.numpy().tobytes().decode(), self.device)[:size]
                platform.synchronize(self.device)
                group.group.barrier().wait()
            else:
                yield numbers, payload
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
        self.load_weights(_cut(open_block(handle, self.device), handle["tensors"]))
        platform.synchronize(self.device)


def _opened(blocks: OrderedDict[str, Tensor], handle: str, device: torch.device) -> Tensor:
    """Return the block with this handle; open it if it is not in `blocks`, which keeps those that were used last."""
    if handle not in blocks:
        blocks[handle] = open_block(decode_handle(handle), device)
    blocks.move_to_end(handle)
    while len(blocks) > KEPT_BLOCKS:
        blocks.popitem(last=False)
    return blocks[handle]
