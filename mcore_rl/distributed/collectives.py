"""Collectives: those that autograd passes through, those of Python objects, and those between replicas.

`torch.distributed` operations are invisible to autograd: a bare one inside a differentiable path gives right values and
wrong gradients. Each function here is named by its forward and its backward operation.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, wait
from typing import Any, TypeVar

import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_rl import platform
from mcore_rl.distributed.topology import ParallelDimension, Topology
from mcore_rl.errors import WorkerError

T = TypeVar("T")


def group_size(group: ProcessGroup | None) -> int:
    """Number of processes in `group`; 1 for None."""
    return 1 if group is None else torch.distributed.get_world_size(group)


def group_rank(group: ProcessGroup | None) -> int:
    """Rank of this process in `group`; 0 for None."""
    return 0 if group is None else torch.distributed.get_rank(group)


def gather_objects(value: Any, group: ProcessGroup | None = None) -> list[Any]:
    """Every rank's `value` (small, picklable), on every rank; of all processes if no group is named."""
    values: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(values, value, group=group)
    return values


def gather_objects_on_rank_zero(value: Any) -> list[Any]:
    """Every process's `value` (picklable), on the first; [] elsewhere."""
    values: list[Any] = [None] * torch.distributed.get_world_size() if torch.distributed.get_rank() == 0 else []
    torch.distributed.gather_object(value, values or None)
    return values


class InternedObjects:
    """Small objects of every rank, of which only those are sent that nobody has sent before.

    Every rank makes one at the same time, and each call is collective over all processes.
    """

    def __init__(self) -> None:
        self._known: dict[int, Any] = {}

    def gather(self, value: Any) -> list[Any]:
        """Gather a value that is identified by its `repr`; eight bytes a rank if all ranks know all values."""
        digest = int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], signed=True)
        own = torch.tensor([digest], device=platform.device())
        digests: list[int] = all_gather(own, torch.distributed.group.WORLD)[:, 0].tolist()
        # Every rank knows what the others do: it has been in all calls.
        if not all(digest in self._known for digest in digests):
            self._known.update(zip(digests, gather_objects(value), strict=True))
        return [self._known[digest] for digest in digests]


def gather_objects_along(value: T, *dimensions: ParallelDimension) -> list[T]:
    """The `value` (picklable) of every rank along these dimensions of parallelism, on each of them."""
    values = [value]
    for dimension in dimensions:
        if dimension.size > 1:
            values = [one for part in gather_objects(values, dimension.group) for one in part]
    return values


def broadcast_object(value: Any) -> Any:
    """Rank 0's `value` (small, picklable), on every process."""
    box = [value]
    torch.distributed.broadcast_object_list(box, src=0)
    return box[0]


def all_ranks_true(*flags: bool) -> list[bool]:
    """Return for each flag whether every process has set it."""
    own = torch.tensor(flags, dtype=torch.int32, device=platform.device())
    return list(map(bool, all_reduce(own, torch.distributed.group.WORLD, torch.distributed.ReduceOp.MIN).tolist()))


def broadcast_result(work: Future[T] | None, seconds: float) -> T:
    """Return the result of `work`, which only rank 0 has, on every process; raise its exception on all of them.

    They meet every `seconds`, well below the timeout of collectives, however long it takes.

    Raises:
        WorkerError: the exception is of another class than Python's and this package's, or cannot be sent; or the
            work was cancelled, or its result cannot be sent.
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
    """Why it has failed, in a form that every process can read; None if it has not.

    Classes of other modules may not be there on another node: their name and text are sent.

    Args:
        sends_result: whether the result must be one that can be sent.
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
            return WorkerError(f"{where}: the result cannot be sent: {type(unsent).__name__}: {unsent}")
        return WorkerError(f"{where}: {type(error).__name__}: {error}")
    known = type(error).__module__.partition(".")[0] in ("builtins", "mcore_rl")
    return error if error is None or known else WorkerError(f"{where}: {type(error).__name__}: {error}")


def settle(work: Future[T] | None, seconds: float) -> T | None:
    """Return the result of this rank's `work` once the work of all ranks is done; None on ranks without work.

    They meet every `seconds`; of exceptions the first rank's is raised, on all of them, as in `broadcast_result`.
    """
    while True:
        if work is not None:
            wait([work], seconds)
        is_done = work is None or work.done()  # asked once: it may end between two questions
        error = _failure(work) if is_done else None
        done, well = all_ranks_true(is_done, error is None)
        if done:
            break
    if not well:
        raise next(error for error in gather_objects(error) if error is not None)
    return None if work is None else work.result()


def all_gather(x: Shaped[Tensor, "*shape"], group: ProcessGroup | None) -> Shaped[Tensor, ranks * shape]:
    """[n, …] on each of P ranks → [P, n, …] in rank order on all of them. No gradient."""
    if group_size(group) == 1:
        return x.unsqueeze(0)
    out = x.new_empty((group_size(group), *x.shape))
    torch.distributed.all_gather_into_tensor(out.view(-1), x.contiguous().view(-1), group=group)
    return out


def gather_rows(x: Shaped[Tensor, "own *rest"], *dimensions: ParallelDimension) -> Shaped[Tensor, "all *rest"]:
    """The rows of every rank along these dimensions of parallelism, each of which may have another number; in rank
    order, the last dimension's ranks outermost. Where `x` is. Collective, no gradient."""
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


def all_reduce(
    x: Shaped[Tensor, "*shape"], group: ProcessGroup | None, op: Any = torch.distributed.ReduceOp.SUM
) -> Shaped[Tensor, "*shape"]:
    """Sum (or `op`) of `x` over the group, as a new tensor. No gradient."""
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
    """Sum over the group; each rank's gradient is the sum of all ranks', each of which uses the sum."""
    return x if group_size(group) == 1 else _AllReduceForwardAllReduceBackward.apply(x, group)


def copy_forward_all_reduce_backward(
    x: Shaped[Tensor, "*shape"], group: ProcessGroup | None
) -> Shaped[Tensor, "*shape"]:
    """Identity; the gradient is summed over the group.

    For an input that every rank holds whole and multiplies with its own shard of a weight.
    """
    return x if group_size(group) == 1 else _CopyForwardAllReduceBackward.apply(x, group)


def all_gather_forward_reduce_scatter_backward(
    x: Shaped[Tensor, rows * rest], group: ProcessGroup | None
) -> Shaped[Tensor, all_rows * rest]:
    """[n, …] per rank → [P·n, …]; each rank's gradient is the sum of all ranks' for its rows.

    For rows that every rank then uses for something of its own (a weight shard, other queries).
    """
    return x if group_size(group) == 1 else _AllGatherForwardReduceScatterBackward.apply(x, group)


def all_gather_forward_split_backward(
    x: Shaped[Tensor, rows * rest], group: ProcessGroup | None
) -> Shaped[Tensor, all_rows * rest]:
    """[n, …] per rank → [P·n, …]; each rank's gradient is its own rows' part of the local one.

    For rows from which every rank then computes the *same* scalar: summing the P equal gradients
    would count the loss P times.
    """
    return x if group_size(group) == 1 else _AllGatherForwardSplitBackward.apply(x, group)


def broadcast_object_in_replica(value: Any, topology: Topology) -> Any:
    """The `value` (picklable) of a replica's first rank, on all of the replica's ranks. Collective."""
    return _first_to_all(value, topology, _broadcast_object)


def broadcast_in_replica(values: Tensor, topology: Topology) -> Tensor:
    """Broadcast a replica's first rank's values to all of the replica's ranks, in place. Collective.

    Args:
        values: of the same shape and precision on all of them; other ranks' are written over.
    """
    if not values.numel():
        return values
    return _first_to_all(values.to(platform.device()), topology, _broadcast).to(values.device)


def broadcast_lists_in_replica(lists: Sequence[Sequence[int]], count: int, topology: Topology) -> list[list[int]]:
    """`count` lists of whole numbers, those of a replica's first rank, on all of the replica's ranks. Collective.

    Args:
        lists: not looked at on other ranks.
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
    """Each replica's `value` (small, picklable), that of its first rank, on every rank. Collective."""
    found = gather_objects_along(value, topology.data) if topology.leads_replica else None
    gathered: list[T] = broadcast_object_in_replica(found, topology)
    return gathered


def gather_items_on_rank_zero(own: Mapping[int, T], wanted: Sequence[int], topology: Topology) -> list[T]:
    """The items of these numbers, in this order, on the very first rank; [] on the others. Collective.

    Args:
        own: by number, what the first rank of each replica has.
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
    """`broadcast` from the first rank of a dimension to the others, along each dimension in a replica."""
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
