"""A backend of torch.distributed that communicates through host memory, so that several ranks can share one GPU.

NCCL refuses two ranks on the same device. The backend `host` copies each tensor to host memory, gloo communicates the
copy, and the `wait()` of the operation's work copies the result back, on the stream that is current at that time. The
host waits for the device in each of these copies, so the backend is for tests only.

gloo has neither averages nor exchanges of lists, and refuses all-gathers and reduce-scatters of unequal sizes; this
backend has all of these. It moves tensors as bytes, so it moves every dtype. Sums have the precision of gloo's sums:
each partial sum is rounded to the dtype of the tensor, as with NCCL. Averages of floating-point numbers are sums of
numbers that were divided before, as with NCCL, so that they do not overflow.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Backend, ProcessGroup, ReduceOp, Work

NAME = "host"
COPYING = "host_copying"
"""Name of the backend that copies CPU tensors too: in tests, the CPU takes the place of a GPU."""

NO_LIMIT = timedelta(0)
"""A timeout of an operation that means the timeout of its group."""
SECONDS_AT_EXIT = 5.0
"""Seconds that a process which ends waits for its messages to be received."""


def register() -> None:
    """Make `host` and `host_copying` known to torch.distributed. Further calls do nothing."""
    if NAME not in Backend.backend_list:
        Backend.register_backend(NAME, HostGroup, devices=["cpu", "cuda"])
        Backend.register_backend(COPYING, partial(HostGroup, copies_cpu=True), devices=["cpu", "cuda"])


class HostWork(Work):
    """An operation that gloo has started. Its results are in the tensors of the caller after `wait()`, not before."""

    def __init__(self, started: Sequence[Work], results: Sequence[tuple[Tensor, Tensor]], finish: Callable[[], None]):
        """Take the works of gloo, pairs of a caller's tensor and the host tensor with its result, and a callback.

        `finish` is called between gloo's end and the copies to the callers' tensors.
        """
        super().__init__()
        self._started, self._results, self._finish = list(started), list(results), finish
        self._outputs = [target for target, _ in results]
        self.is_finished = False

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        """Wait for gloo, then copy the results to the caller's tensors. Further calls do nothing.

        Raises:
            RuntimeError: a rank has ended, or the operation took longer than `timeout` or its group's timeout.
        """
        if not self.is_finished:
            for work in self._started:
                work.wait(timeout)
            self._finish()
            for target, host in self._results:
                if target is not host:
                    # Autograd must not see the write, as it does not with NCCL: the tensor may be a leaf.
                    target.data.copy_(host)
            self._results, self._finish = [], _nothing  # the buffers are no longer needed
            self.is_finished = True
        return True

    def is_completed(self) -> bool:
        """Return whether the results are in the caller's tensors. If gloo has ended, copy them now."""
        if not self.is_finished and all(work.is_completed() for work in self._started):
            self.wait()
        return self.is_finished

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        """Return the tensors that the operation writes."""
        return self._outputs

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Wait for the operation; return a completed future with the tensors that the operation writes."""
        self.wait()
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self._outputs)
        return future

    def source_rank(self) -> int:
        """Return the rank that has sent what `recv_anysource` received."""
        return int(self._started[0]._source_rank())

    _source_rank = source_rank


def _nothing() -> None:
    pass


class SendWork(HostWork):
    """A message that gloo sends. If it is deleted before anyone has waited for it, `_MESSAGES` waits for it.

    gloo drops a message if its work is deleted before the message is sent; NCCL does not.
    """

    def __del__(self) -> None:
        if not self.is_finished:
            _MESSAGES.wait_for(self._started)


class Messages:
    """Waits in a thread for messages that the program does not wait for, and then frees their memory.

    A thread, because gloo tells only a caller who waits that a message has been sent.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[None] = SimpleQueue()
        self._works: list[list[Work]] = []
        self._thread: threading.Thread | None = None

    def wait_for(self, works: list[Work]) -> None:
        """Keep gloo's works until they have ended, at most until the timeout of their group."""
        self._works.append(works)
        self._queue.put(None)
        if self._thread is None or not self._thread.is_alive():  # a forked process has no threads
            self._thread = threading.Thread(target=self._run, name="messages", daemon=True)
            self._thread.start()
            atexit.register(self._end)

    def _run(self) -> None:
        while True:
            self._queue.get()
            self._wait_for_first()
            del self._works[0]

    def _wait_for_first(self, limit: timedelta = NO_LIMIT) -> None:
        for work in self._works[0]:
            with contextlib.suppress(RuntimeError):  # a rank has ended, or the time
                work.wait(limit)

    def _end(self) -> None:
        """Give messages time to be received; then end the wait. Python would abort if gloo's wait ended after Python.

        gloo closes the connections of a group after a timeout, so the other messages of the group end too.
        """
        deadline = time.monotonic() + SECONDS_AT_EXIT
        while self._works:
            time.sleep(0.01)
            if time.monotonic() > deadline:
                with contextlib.suppress(IndexError):  # the thread has just removed the last one
                    self._wait_for_first(timedelta(milliseconds=1))


_MESSAGES = Messages()


_Interface: Any = ProcessGroup
"""The base class without its types: torch declares further forms of the methods that torch.distributed never calls."""


class HostGroup(_Interface):
    """A process group of the backend `host`.

    torch.distributed calls the methods with the arguments of the C++ class ProcessGroup: lists of tensors, and an
    object of options. Some methods have two names, because torch 2.13 renamed them.
    """

    takes_unequal_sizes = True
    """All-gathers and reduce-scatters take tensors of unequal sizes; `mcore_rl.platform` asks for it."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, copies_cpu: bool = False) -> None:
        """Create the group and its gloo group. Collective over the members.

        Args:
            timeout: time limit of each operation.
            copies_cpu: whether tensors on the CPU are copied too. Otherwise gloo gets them without a copy if they are
                contiguous.
        """
        super().__init__(rank, size)
        self._rank, self._size, self._copies_cpu = rank, size, copies_cpu
        self._gloo: Any = _gloo_group(store, rank, size, timeout)
        self._all_to_all = getattr(self._gloo, "all_to_all_single", None) or self._gloo.alltoall_base
        self._coalesced: list[HostWork] | None = None

    def getBackendName(self) -> str:
        return COPYING if self._copies_cpu else NAME

    def _get_backend(self, device: torch.device) -> HostGroup:
        """Return the group itself: since torch 2.14, `batch_isend_irecv` asks for the backend of a device."""
        return self

    # ------------------------------------------------------------ operations that move tensors

    def broadcast(self, tensors: list[Tensor], opts: Any) -> HostWork:
        (tensor,) = tensors
        is_root = self._rank == opts.rootRank
        host = self._on_host(tensor, reads=is_root)
        started = [self._gloo.broadcast([_bytes(host)], opts)] if host.numel() else []
        return self._work(started, [] if is_root else [(tensor, host)])

    def allgather(self, output_lists: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> HostWork:
        (outputs,), (tensor,) = output_lists, inputs
        return self._gather_to_all(outputs, [self._on_host(one, reads=False) for one in outputs], tensor)

    def _allgather_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> HostWork:
        host = self._on_host(output, reads=False)
        parts = host.view(self._size, tensor.numel()).unbind()
        return self._gather_to_all([output], [host], tensor, parts)

    all_gather_single = _allgather_base

    def allgather_coalesced(self, output_lists: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> HostWork:
        pairs = zip(output_lists, inputs, strict=True)
        return self._together(self.allgather([outputs], [tensor]) for outputs, tensor in pairs)

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> HostWork:
        pairs = zip(outputs, inputs, strict=True)
        return self._together(self._allgather_base(output, tensor) for output, tensor in pairs)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def _gather_to_all(
        self, outputs: Sequence[Tensor], hosts: Sequence[Tensor], tensor: Tensor, parts: Sequence[Tensor] | None = None
    ) -> HostWork:
        """Gather `tensor` of each rank into `parts`, one host tensor for each rank (default: `hosts`)."""
        parts = hosts if parts is None else parts
        own = self._on_host(tensor)
        if len({part.numel() for part in parts}) == 1:
            targets = [_bytes(part) for part in parts]
            started = [self._gloo.allgather([targets], [_bytes(own)])] if own.numel() else []
        else:
            parts[self._rank].view(-1).copy_(own.view(-1))
            started = [self._send_to_all(part, source) for source, part in enumerate(parts) if part.numel()]
        return self._work(started, list(zip(outputs, hosts, strict=True)))

    def _send_to_all(self, host: Tensor, source: int) -> Work:
        opts = torch.distributed.BroadcastOptions()
        opts.rootRank = source
        work: Work = self._gloo.broadcast([_bytes(host)], opts)
        return work

    def gather(self, output_lists: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> HostWork:
        (tensor,), outputs = inputs, output_lists[0] if output_lists else []
        own, hosts = self._on_host(tensor), [self._on_host(one, reads=False) for one in outputs]
        targets = [[_bytes(host) for host in hosts]] if hosts else []
        started = [self._gloo.gather(targets, [_bytes(own)], opts)] if own.numel() else []
        return self._work(started, list(zip(outputs, hosts, strict=True)))

    def scatter(self, outputs: list[Tensor], input_lists: list[list[Tensor]], opts: Any) -> HostWork:
        (output,) = outputs
        host = self._on_host(output, reads=False)
        sources = [[_bytes(self._on_host(one)) for one in some] for some in input_lists]
        started = [self._gloo.scatter([_bytes(host)], sources, opts)] if host.numel() else []
        return self._work(started, [(output, host)])

    def alltoall_base(
        self, output: Tensor, tensor: Tensor, output_rows: Sequence[int], input_rows: Sequence[int], opts: Any = None
    ) -> HostWork:
        """Exchange rows: slices of dimension 0.

        Args:
            output_rows: number of rows from each rank, as a list or a tensor; empty for equal numbers.
            input_rows: number of rows for each rank, in the same form.
        """
        host, sizes = self._on_host(output, reads=False), self._bytes_of_rows(output, output_rows)
        own_sizes = self._bytes_of_rows(tensor, input_rows)
        return self._exchange([(output, host)], _bytes(host), sizes, _bytes(self._on_host(tensor)), own_sizes)

    all_to_all_single = alltoall_base

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> HostWork:
        sizes, own_sizes = [one.nbytes for one in outputs], [one.nbytes for one in inputs]
        own = torch.cat([_bytes(self._on_host(one)) for one in inputs])
        received = own.new_empty(sum(sizes))
        parts = zip(outputs, received.split(sizes), strict=True)
        results = [(output, part.view(output.dtype).view(output.shape)) for output, part in parts]
        return self._exchange(results, received, sizes, own, own_sizes)

    def _bytes_of_rows(self, tensor: Tensor, rows: Sequence[int] | Tensor) -> list[int]:
        numbers: list[int] = rows.tolist() if isinstance(rows, Tensor) else list(map(int, rows))
        count = len(tensor)
        numbers = numbers or [count // self._size] * self._size
        if sum(numbers) != count or len(numbers) != self._size:
            raise ValueError(f"all_to_all: {count} rows cannot be divided into {numbers} for {self._size} ranks")
        return [number * (tensor.nbytes // count) if count else 0 for number in numbers]

    def _exchange(
        self, results: list[tuple[Tensor, Tensor]], received: Tensor, sizes: list[int], sent: Tensor, own: list[int]
    ) -> HostWork:
        """Exchange bytes; `sizes` of `received` come from the ranks, and `own` of `sent` go to them."""
        return self._work([self._all_to_all(received, sent, sizes, own)], results)

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> HostWork:
        (tensor,) = tensors
        host = self._on_host(tensor)
        started = [self._gloo.send([_bytes(host)], rank, tag)] if host.numel() else []
        return self._noted(SendWork(started, [], _nothing))

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> HostWork:
        (tensor,) = tensors
        host = self._on_host(tensor, reads=False)
        return self._work([self._gloo.recv([_bytes(host)], rank, tag)] if host.numel() else [], [(tensor, host)])

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> HostWork:
        (tensor,) = tensors
        host = self._on_host(tensor, reads=False)
        return self._work([self._gloo.recv_anysource([_bytes(host)], tag)], [(tensor, host)])

    # ------------------------------------------------------------ operations that compute

    def allreduce(self, tensors: list[Tensor], opts: Any) -> HostWork:
        (tensor,) = tensors
        host = self._on_host(tensor)
        return self._reduce_on_all(host, opts.reduceOp, [(tensor, host)])

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> HostWork:
        return self._together(self.allreduce([tensor], opts) for tensor in tensors)

    def reduce(self, tensors: list[Tensor], opts: Any) -> HostWork:
        (tensor,) = tensors
        host, own = self._on_host(tensor), torch.distributed.ReduceOptions()
        own.rootRank, own.reduceOp = opts.rootRank, _without_average(opts.reduceOp)
        results = [(tensor, host)] if self._rank == opts.rootRank else []
        if not results and host is tensor:
            host = tensor.clone()  # gloo uses the memory of all ranks
        finish = self._average(host, opts.reduceOp)
        started = [self._gloo.reduce([host], own)] if host.numel() else []
        return self._work(started, results, finish if results else _nothing)

    def reduce_scatter(self, outputs: list[Tensor], input_lists: list[list[Tensor]], opts: Any) -> HostWork:
        (output,), (inputs,) = outputs, input_lists
        whole = torch.cat([self._on_host(one).view(-1) for one in inputs])
        part = whole.split([one.numel() for one in inputs])[self._rank]
        return self._reduce_on_all(whole, opts.reduceOp, [(output, part.view(output.shape))])

    def _reduce_scatter_base(self, output: Tensor, tensor: Tensor, opts: Any) -> HostWork:
        return self.reduce_scatter([output], [list(tensor.reshape(self._size, output.numel()).unbind())], opts)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> HostWork:
        pairs = zip(outputs, inputs, strict=True)
        return self._together(self._reduce_scatter_base(output, tensor, opts) for output, tensor in pairs)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _reduce_on_all(self, host: Tensor, op: Any, results: list[tuple[Tensor, Tensor]]) -> HostWork:
        own = torch.distributed.AllreduceOptions()
        own.reduceOp = _without_average(op)
        finish = self._average(host, op)
        started = [self._gloo.allreduce([host], own)] if host.numel() else []
        return self._work(started, results, finish)

    def _average(self, host: Tensor, op: Any) -> Callable[[], None]:
        """Prepare `host` for an average, if `op` is one; return the function to call after gloo has summed.

        Floating-point numbers are divided before the sum, and integers after it.
        """
        if op == ReduceOp.AVG and host.is_floating_point():
            host.div_(self._size)
        elif op == ReduceOp.AVG:
            return partial(_divide, host, self._size)
        return _nothing

    # ------------------------------------------------------------ further parts of the interface

    def barrier(self, opts: Any = None) -> HostWork:
        own = torch.distributed.BarrierOptions()  # the caller's may name a device, for which gloo has no backend
        if opts is not None:
            own.timeout = opts.timeout
        return self._work([self._gloo.barrier(own)], [])

    def _start_coalescing(self, device: Any = None) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: Any = None) -> HostWork:
        works, self._coalesced = self._coalesced or [], None
        return self._together(works)

    # ------------------------------------------------------------ helpers

    def _work(
        self, started: Sequence[Work], results: Sequence[tuple[Tensor, Tensor]], finish: Callable[[], None] = _nothing
    ) -> HostWork:
        return self._noted(HostWork(started, results, finish))

    def _noted(self, work: HostWork) -> HostWork:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _together(self, works: Iterable[HostWork]) -> HostWork:
        return HostWork(list(works), [], _nothing)

    def _on_host(self, tensor: Tensor, reads: bool = True) -> Tensor:
        """Return a contiguous host tensor of the same shape; with the same values if `reads`.

        It is `tensor` itself if gloo can use its memory.
        """
        if tensor.device.type == "cpu" and tensor.is_contiguous() and not self._copies_cpu:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        return host.copy_(tensor.detach()) if reads else host


def _gloo_group(store: Any, rank: int, size: int, timeout: timedelta) -> ProcessGroup:
    gloo = torch.distributed.ProcessGroupGloo(store, rank, size, timeout=timeout)
    gloo._set_sequence_number_for_group()
    group = ProcessGroup(store, rank, size)
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
    return group


def _bytes(host: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as uint8 [bytes]."""
    return host.detach().view(-1).view(torch.uint8)


def _divide(total: Tensor, count: int) -> None:
    total.div_(count, rounding_mode="trunc")


def _without_average(op: Any) -> Any:
    return ReduceOp.SUM if op == ReduceOp.AVG else op
