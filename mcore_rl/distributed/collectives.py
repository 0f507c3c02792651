"""Collectives: with gradients, of Python objects, and between replicas.

Autograd does not see the operations of `torch.distributed`: in a differentiable computation, the results of these
operations are right, but the gradients are wrong. Each differentiable function here is named after its forward and its
backward operation.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from jaxtyping import Int, Shaped
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_rl import platform
from mcore_rl.distributed.topology import ParallelDimension, Topology
from mcore_rl.errors import WorkerError

T = TypeVar("T")


def group_size(group: ProcessGroup | None) -> int:
    """Return the number of processes in `group`; 1 for None."""
    return 1 if group is None else torch.distributed.get_world_size(group)


def group_rank(group: ProcessGroup | None) -> int:
    """Return the rank of this process in `group`; 0 for None."""
    return 0 if group is None else torch.distributed.get_rank(group)


def gather_objects(value: Any, group: ProcessGroup | None = None) -> list[Any]:
    """Gather every rank's `value` (small, picklable) on every rank of `group`; None means all processes."""
    values: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(values, value, group=group)
    return values


def gather_objects_on_rank_zero(value: Any) -> list[Any]:
    """Gather every process's `value` (picklable) on rank 0; return [] on all other ranks. Collective."""
    values: list[Any] = [None] * torch.distributed.get_world_size() if torch.distributed.get_rank() == 0 else []
    torch.distributed.gather_object(value, values or None)
    return values


class InternedObjects:
    """An all-gather of small objects for repeated calls: a value that was gathered before is not sent again.

    All ranks must create this object and call `gather` equally often: each call is collective over all processes.
    """

    def __init__(self) -> None:
        self._known: dict[int, Any] = {}

    def gather(self, value: Any) -> list[Any]:
        """Gather every rank's `value`. If all values were gathered before, each rank sends only eight bytes.

        Values with the same `repr` are regarded as equal.
        """
        digest = int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], signed=True)
        own = platform.to_device([digest])
        digests: list[int] = all_gather(own, torch.distributed.group.WORLD)[:, 0].tolist()
        # All ranks take part in all calls, so they have seen the same values.
        if not all(digest in self._known for digest in digests):
            self._known.update(zip(digests, gather_objects(value), strict=True))
        return [self._known[digest] for digest in digests]


def gather_objects_along(value: T, *dimensions: ParallelDimension) -> list[T]:
    """Gather `value` (picklable) from all ranks along `dimensions`; every rank gets the list of values."""
    values = [value]
    for dimension in dimensions:
        if dimension.size > 1:
            values = [one for part in gather_objects(values, dimension.group) for one in part]
    return values


def broadcast_object(value: Any) -> Any:
    """Broadcast rank 0's `value` (small, picklable) to every process."""
    box = [value]
    torch.distributed.broadcast_object_list(box, src=0)
    return box[0]


def all_ranks_true(*flags: bool) -> list[bool]:
    """Return, for each of the `flags`, whether it is True on every process. Collective."""
    own = torch.tensor(flags, dtype=torch.int32, device=platform.device())
    return list(map(bool, all_reduce(own, torch.distributed.group.WORLD, torch.distributed.ReduceOp.MIN).tolist()))


def broadcast_result(work: Future[T] | None, seconds: float) -> T:
    """Return the result of rank 0's `work` on every process. If the work raises an exception, every process raises it.

    Args:
        work: the future, on rank 0; None on other ranks.
        seconds: the processes communicate at this interval until the work is done; it must be well below the timeout
            of collectives.

    Raises:
        WorkerError: the work was cancelled, its result or exception cannot be sent, or its exception is neither of a
            built-in class nor of a class of this package.
    """
    while True:
        if work is not None:
            wait([work], seconds)
        outcome = None
        if work is not None and work.done():
            error = _failure(work, sends_result=True)
            outcome = (error, None if error is not None else work.result())
        outcome = broadcast_object(outcome)
        if outcome is not None:
            if outcome[0] is not None:
                raise outcome[0]
            result: T = outcome[1]
            return result


def _failure(work: Future[Any] | None, sends_result: bool = False) -> BaseException | None:
    """Return the exception of `work` in a form that every process can unpickle; None if the work has not failed.

    An exception of another package becomes a WorkerError with the exception's name and text: its class may not exist on
    another node.

    Args:
        sends_result: whether a result that cannot be pickled is a failure too.
    """
    if work is None:
        return None
    where = f"rank {torch.distributed.get_rank()}"
    try:
        error = work.exception()
    except CancelledError:
        return WorkerError(f"{where}: the work was cancelled before its end")
    try:
        pickle.loads(pickle.dumps(work.result() if error is None and sends_result else error))
    except Exception as unsent:
        if error is None:
            return WorkerError(f"{where}: the result cannot be sent to other ranks: {type(unsent).__name__}: {unsent}")
        return WorkerError(f"{where}: {type(error).__name__}: {error}")
    known = type(error).__module__.partition(".")[0] in ("builtins", "mcore_rl")
    return error if error is None or known else WorkerError(f"{where}: {type(error).__name__}: {error}")


def settle(work: Future[T] | None, seconds: float) -> T | None:
    """Wait until the work of all ranks is done; return the result of this rank's `work`, or None without work.

    While a rank waits, it communicates with the others once per `seconds` seconds. If the work of a rank fails, all
    ranks raise its exception. If the work of several ranks fails, they raise the exception of the lowest of them.
    """
    while True:
        if work is not None:
            wait([work], seconds)
        is_done = work is None or work.done()  # called once, because the work may end between two calls
        error = _failure(work) if is_done else None
        done, well = all_ranks_true(is_done, error is None)
        if done:
            break
    if not well:
        raise next(error for error in gather_objects(error) if error is not None)
    return None if work is None else work.result()


def all_gather(x: Shaped[Tensor, "*shape"], group: ProcessGroup | None) -> Shaped[Tensor, ranks * shape]:
    """Stack the tensors [n, …] of the P ranks of a group in rank order; every rank gets [P, n, …]. No gradient."""
    if group_size(group) == 1:
        return x.unsqueeze(0)
    out = x.new_empty((group_size(group), *x.shape))
    torch.distributed.all_gather_into_tensor(out.view(-1), x.contiguous().view(-1), group=group)
    return out


def gather_rows(x: Shaped[Tensor, "own *rest"], *dimensions: ParallelDimension) -> Shaped[Tensor, "all *rest"]:
    """Gather the rows of all ranks along `dimensions`; ranks may have different numbers of rows. No gradient.

    The rows are in rank order: by the rank in the last dimension, then by the rank in the dimension before it, and so
    on. The result is on the device of `x`. Collective.
    """
    rows = x
    for dimension in dimensions:
        if dimension.size > 1:
            rows = rows.to(platform.device())
            count = torch.tensor([len(rows)], device=rows.device)
            counts = all_gather(count, dimension.group)[:, 0].tolist()
            padded = rows.new_zeros(max(counts), *rows.shape[1:])
            padded[: len(rows)] = rows
            everyone = all_gather(padded, dimension.group) if padded.numel() else [padded] * len(counts)
            rows = torch.cat([part[:n] for part, n in zip(everyone, counts, strict=True)])
    return rows.to(x.device)


def broadcast_from_holder(held: Shaped[Tensor, "*shape"] | None) -> Shaped[Tensor, "*shape"]:
    """Broadcast a tensor to all processes from the lowest rank on which `held` is not None. Collective."""
    described = gather_objects(None if held is None else (tuple(held.shape), held.dtype))
    source = next(rank for rank, one in enumerate(described) if one is not None)
    shape, dtype = described[source]
    is_source = torch.distributed.get_rank() == source
    out = held if is_source and held is not None else torch.empty(shape, dtype=dtype, device=platform.device())
    torch.distributed.broadcast(out.contiguous() if is_source else out, src=source)
    return out


def fetch_rows(held: Mapping[str, Tensor], numbers: Sequence[int], wanted: Sequence[int]) -> dict[str, Tensor]:
    """Return the rows `wanted` of tensors. The tensors' rows are distributed over all processes. Collective.

    Rows are identified by numbers. A row is sent only to processes that want it and do not hold it. No gradient.

    Args:
        held: the rows that this process holds, by the name of the tensor. Other processes may hold the same rows.
        numbers: number of each row in `held`.
        wanted: numbers of the rows to return, in this order. At least one process must hold each of these rows.
    """
    rank, everyone = torch.distributed.get_rank(), gather_objects((list(numbers), list(wanted)))
    holders: dict[int, list[int]] = {}
    for holder, (theirs, _) in enumerate(everyone):
        for number in theirs:
            holders.setdefault(number, []).append(holder)

    def source(number: int, receiver: int) -> int:
        of_row = holders[number]
        return receiver if receiver in of_row else of_row[receiver % len(of_row)]

    place = {number: row for row, number in enumerate(numbers)}
    sent = [[place[n] for n in wants if source(n, to) == rank] for to, (_, wants) in enumerate(everyone)]
    sources = [source(number, rank) for number in wanted]
    sizes_in, sizes_out = [sources.count(holder) for holder in range(len(everyone))], list(map(len, sent))
    order = sorted(range(len(sources)), key=lambda place: sources[place])  # the received rows are sorted by source
    found = {}
    for name, values in held.items():
        rows = values.to(platform.device())[[row for rows in sent for row in rows]].contiguous()
        received = rows.new_empty(len(sources), *rows.shape[1:])
        torch.distributed.all_to_all_single(received, rows, output_split_sizes=sizes_in, input_split_sizes=sizes_out)
        result = torch.empty_like(received)
        result[order] = received
        found[name] = result.to(values.device)
    return found


def all_reduce(
    x: Shaped[Tensor, "*shape"], group: ProcessGroup | None, op: Any = torch.distributed.ReduceOp.SUM
) -> Shaped[Tensor, "*shape"]:
    """Return the sum (or `op`) of `x` over the group, as a new tensor. No gradient."""
    if group_size(group) == 1:
        return x
    out = x.clone(memory_format=torch.contiguous_format)
    torch.distributed.all_reduce(out, op=op, group=group)
    return out


class _CopyForwardAllReduceBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, ctx.group), None


class _AllGatherForwardReduceScatterBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return all_gather(x, group).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        rows = grad.shape[0] // group_size(ctx.group)
        out = grad.new_empty((rows, *grad.shape[1:]))
        torch.distributed.reduce_scatter_tensor(out.view(-1), grad.contiguous().view(-1), group=ctx.group)
        return out, None


class _AllGatherForwardSplitBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return all_gather(x, group).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(group_size(ctx.group))[group_rank(ctx.group)].contiguous(), None


class _AllReduceForwardAllReduceBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, ctx.group), None


def all_reduce_forward_all_reduce_backward(
    x: Shaped[Tensor, "*shape"], group: ProcessGroup | None
) -> Shaped[Tensor, "*shape"]:
    """Sum `x` over the group. Each rank uses the sum, so the gradient of `x` is the sum of all ranks' gradients."""
    return x if group_size(group) == 1 else _AllReduceForwardAllReduceBackward.apply(x, group)


def copy_forward_all_reduce_backward(
    x: Shaped[Tensor, "*shape"], group: ProcessGroup | None
) -> Shaped[Tensor, "*shape"]:
    """Return `x` unchanged; in the backward pass, sum its gradient over the group.

    Use it for an input that is the same on every rank if each rank multiplies it with its own shard of a weight.
    """
    return x if group_size(group) == 1 else _CopyForwardAllReduceBackward.apply(x, group)


def all_gather_forward_reduce_scatter_backward(
    x: Shaped[Tensor, rows * rest], group: ProcessGroup | None
) -> Shaped[Tensor, all_rows * rest]:
    """Concatenate the tensors [n, …] of all ranks to [P·n, …]; the gradient of a row is summed over all ranks.

    Use it if each rank uses the gathered rows for a different computation (with its shard of a weight, or with its own
    queries).
    """
    return x if group_size(group) == 1 else _AllGatherForwardReduceScatterBackward.apply(x, group)


@dataclass(frozen=True)
class RowExchange:
    """Which rows the ranks of a group send to each other, as this rank sees it.

    rows: number of rows of all ranks together, in rank order.
    sent: numbers of this rank's rows that it sends, for one receiver after the other; on the device.
    sent_counts: how many of them each rank receives.
    received: numbers of the rows that this rank receives, among those of all ranks; on the device.
    received_counts: how many of them each rank sends.
    """

    rows: int
    sent: Int[Tensor, " sent"]
    sent_counts: list[int]
    received: Int[Tensor, " received"]
    received_counts: list[int]


def _all_to_all(out: Tensor, x: Tensor, out_counts: list[int], counts: list[int], group: ProcessGroup) -> None:
    torch.distributed.all_to_all_single(out, x, output_split_sizes=out_counts, input_split_sizes=counts, group=group)


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: RowExchange, group: ProcessGroup) -> Tensor:
        ctx.exchange, ctx.group, ctx.own = exchange, group, x.shape[0]
        rows = x.new_empty((len(exchange.received), *x.shape[1:]))
        _all_to_all(rows, x[exchange.sent], exchange.received_counts, exchange.sent_counts, group)
        return x.new_zeros((exchange.rows, *x.shape[1:])).index_copy_(0, exchange.received, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        exchange = ctx.exchange
        rows = grad.new_empty((len(exchange.sent), *grad.shape[1:]))
        _all_to_all(rows, grad[exchange.received], exchange.sent_counts, exchange.received_counts, ctx.group)
        return grad.new_zeros((ctx.own, *grad.shape[1:])).index_add_(0, exchange.sent, rows), None, None


def exchange_rows(
    x: Shaped[Tensor, rows * rest], exchange: RowExchange, group: ProcessGroup | None
) -> Shaped[Tensor, all_rows * rest]:
    """Concatenate the tensors [n, …] of all ranks to [P·n, …], with zeros in rows that `exchange` does not name.

    The gradient of a row is summed over the ranks that receive it. Gradients of the zeros are ignored.
    """
    return _ExchangeRows.apply(x, exchange, group)


def all_gather_forward_split_backward(
    x: Shaped[Tensor, rows * rest], group: ProcessGroup | None
) -> Shaped[Tensor, all_rows * rest]:
    """Concatenate the tensors [n, …] of all ranks to [P·n, …]; gradients are not summed over the ranks.

    From its gradient of all rows, each rank takes the part for its own rows. Use the function if every rank computes
    the *same* scalar from all rows: a sum of the P equal gradients would count the loss P times.
    """
    return x if group_size(group) == 1 else _AllGatherForwardSplitBackward.apply(x, group)


def broadcast_object_in_replica(value: Any, topology: Topology) -> Any:
    """Broadcast `value` (picklable) from the first rank of this replica to all ranks of the replica. Collective."""
    return _first_to_all(value, topology, _broadcast_object)


def broadcast_in_replica(values: Tensor, topology: Topology) -> Tensor:
    """Broadcast `values` from the first rank of this replica to all ranks of the replica. Collective.

    Args:
        values: a tensor with the same shape and precision on all ranks. On ranks other than the first, its contents are
            ignored and may be overwritten.
    """
    if not values.numel():
        return values
    return _first_to_all(values.to(platform.device()), topology, _broadcast).to(values.device)


def broadcast_lists_in_replica(lists: Sequence[Sequence[int]], count: int, topology: Topology) -> list[list[int]]:
    """Broadcast `count` lists of integers from the first rank of this replica to all its ranks. Collective.

    Args:
        lists: the lists, on the replica's first rank; ignored on the other ranks.
    """
    sizes = torch.zeros(count, dtype=torch.long)
    if topology.leads_replica:
        sizes = torch.tensor([len(some) for some in lists], dtype=torch.long)
    sizes = broadcast_in_replica(sizes, topology)
    numbers = torch.zeros(int(sizes.sum()), dtype=torch.long)
    if topology.leads_replica:
        numbers = torch.tensor([number for some in lists for number in some], dtype=torch.long)
    return [part.tolist() for part in broadcast_in_replica(numbers, topology).split(sizes.tolist())]


def gather_from_replicas(value: T, topology: Topology) -> list[T]:
    """Gather `value` (small, picklable) from the first rank of each replica; every rank gets the list. Collective."""
    found = gather_objects_along(value, topology.data) if topology.leads_replica else None
    gathered: list[T] = broadcast_object_in_replica(found, topology)
    return gathered


def gather_items_on_rank_zero(own: Mapping[int, T], wanted: Sequence[int], topology: Topology) -> list[T]:
    """Gather the items `wanted` on rank 0, in this order; return [] on other ranks. Collective.

    Args:
        own: items by number, given on the first rank of each replica; ignored on other ranks.
        wanted: numbers of the items.
    """
    if not topology.leads_replica:
        return []
    parts = [{number: own[number] for number in wanted if number in own}]
    if topology.data.size > 1:
        received: list[Any] = [None] * topology.data.size if topology.data.rank == 0 else []
        first = torch.distributed.get_global_rank(topology.data.group, 0)  # type: ignore[arg-type]
        torch.distributed.gather_object(parts[0], received or None, dst=first, group=topology.data.group)
        parts = received
    found = {number: item for part in parts for number, item in part.items()}
    return [found[number] for number in wanted] if parts else []


def _first_to_all(value: T, topology: Topology, broadcast: Callable[[T, ParallelDimension], T]) -> T:
    """Send `value` from a replica's first rank to all its ranks, by `broadcast` along each dimension in turn."""
    pipeline, context, tensor = topology.pipeline, topology.context, topology.tensor
    if tensor.rank == context.rank == 0:
        value = broadcast(value, pipeline)
    if tensor.rank == 0:
        value = broadcast(value, context)
    return broadcast(value, tensor)


def _broadcast(values: Tensor, dimension: ParallelDimension) -> Tensor:
    if dimension.size > 1:
        torch.distributed.broadcast(values, group=dimension.group, group_src=0)
    return values


def _broadcast_object(value: Any, dimension: ParallelDimension) -> Any:
    if dimension.size == 1:
        return value
    box = [value]
    first = torch.distributed.get_global_rank(dimension.group, 0)  # type: ignore[arg-type]
    torch.distributed.broadcast_object_list(box, src=first, group=dimension.group)
    return box[0]
