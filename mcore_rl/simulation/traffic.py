"""Collectives that only count: what a rank would have sent, by operation and group."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from mcore_rl.simulation.memory import LiveBytes

Tensors = Tensor | Sequence[Tensor]


class Transfer(NamedTuple):
    """Kind of a collective: `ranks` of its group, of a message the two that it is between; in which phase of the step;
    and whether what it gathers, scatters or reduces is where weights or gradients are."""

    operation: str
    ranks: tuple[int, ...]
    phase: str
    of_state: bool = False


class _Done:
    """A work handle of something that has happened."""

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


@dataclass
class Traffic:
    """Bytes and calls of every kind of transfer.

    Of a gather and a scatter the bytes of the whole (all ranks' parts), of an all-reduce and a broadcast those of the
    tensor, of a message its own.
    """

    bytes: Counter[Transfer] = field(default_factory=Counter)
    calls: Counter[Transfer] = field(default_factory=Counter)
    phase: str = ""
    memory: LiveBytes | None = None
    """Knows the storages of what is sent, and is told of those that receive."""

    def add(self, operation: str, ranks: tuple[int, ...], whole: Tensors, received: Tensors) -> None:
        if len(ranks) == 1:
            return
        of_state = self.memory is not None and all(map(self.memory.is_state, _each(whole)))
        kind = Transfer(operation, ranks, self.phase, of_state)
        self.bytes[kind] += sum(tensor.numel() * tensor.element_size() for tensor in _each(whole))
        self.calls[kind] += 1
        if self.memory is not None:
            for tensor in _each(received):
                self.memory.receives(tensor)


class Operation(NamedTuple):
    """The meaning of a function of torch.distributed, by the names of its arguments.

    whole: holds all ranks' parts. received: made for other ranks' values; empty where it is what somebody computed.
    peer: of a message, the other rank.
    """

    name: str
    whole: str
    received: str = ""
    peer: str = ""


OPERATIONS = {
    "all_reduce": Operation("all_reduce", "tensor"),
    "broadcast": Operation("broadcast", "tensor"),
    "all_gather_into_tensor": Operation("all_gather", "output_tensor", "output_tensor"),
    "_all_gather_base": Operation("all_gather", "output_tensor", "output_tensor"),
    "all_gather": Operation("all_gather", "tensor_list", "tensor_list"),
    "reduce_scatter_tensor": Operation("reduce_scatter", "input", "output"),
    "_reduce_scatter_base": Operation("reduce_scatter", "input", "output"),
    "reduce_scatter": Operation("reduce_scatter", "input_list", "output"),
    "all_to_all_single": Operation("all_to_all", "input", "output"),
    "send": Operation("send", "tensor", peer="dst"),
    "isend": Operation("send", "tensor", peer="dst"),
    "recv": Operation("recv", "tensor", "tensor", peer="src"),
    "irecv": Operation("recv", "tensor", "tensor", peer="src"),
}
"""Operations by the functions' names."""


def _ranks(arguments: Mapping[str, Any], peer: str) -> tuple[int, ...]:
    """The group's, or of a message the two that it is between.

    Args:
        arguments: of a function of torch.distributed.
        peer: the one that names the other rank of a message; behind `group_` it is that rank's place in the group.
    """
    group = arguments.get("group") or torch.distributed.group.WORLD
    ranks = tuple(torch.distributed.get_process_group_ranks(group))
    if not peer:
        return ranks
    place = arguments.get(f"group_{peer}")
    return tuple(sorted((torch.distributed.get_rank(), arguments[peer] if place is None else ranks[place])))


def _each(tensors: Tensors) -> Sequence[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else tensors


def count_traffic(perform: bool = False) -> Traffic:
    """From now on every collective of this process is counted; and done, if `perform`, as in a real run.

    Must come before `megatron.core` is imported, which binds some of their names.
    """
    traffic = Traffic()

    def counted(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        operation = OPERATIONS[name]
        signature = inspect.signature(plain)

        @functools.wraps(plain)
        def collective(*args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind(*args, **kwargs).arguments
            received = arguments[operation.received] if operation.received else ()
            traffic.add(operation.name, _ranks(arguments, operation.peer), arguments[operation.whole], received)
            return plain(*args, **kwargs) if perform else _Done()

        return collective

    for name in OPERATIONS:
        replacement = counted(name, getattr(c10d, name))
        setattr(torch.distributed, name, replacement)
        setattr(c10d, name, replacement)
    if not perform:
        _have_no_peers()
    return traffic


def _have_no_peers() -> None:
    """Objects are what this rank says, and groups of whatever backend are fake ones."""
    distributed: Any = torch.distributed

    def all_gather_object(values: list[Any], value: Any, group: Any = None) -> None:
        values[:] = [value] * len(values)

    new_group = c10d.new_group
    distributed.new_group = lambda *args, **kwargs: new_group(*args, **{**kwargs, "backend": "fake"})
    distributed.all_gather_object = all_gather_object
    distributed.broadcast_object_list = lambda *_, **__: None
    distributed.barrier = lambda *_, **__: None
    distributed.batch_isend_irecv = lambda messages: [
        message.op(message.tensor, message.peer, group=message.group) for message in messages
    ]
