"""Collectives that only count: what a rank would have sent, by operation and group."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.distributed import ProcessGroup


class Transfer(NamedTuple):
    """Kind of a collective: `ranks` of its group, and in which phase of the step."""

    operation: str
    ranks: tuple[int, ...]
    phase: str


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

    bytes: Counter[Transfer]
    calls: Counter[Transfer]
    phase: str = ""

    def add(self, operation: str, group: ProcessGroup | None, size: int) -> None:
        ranks = tuple(torch.distributed.get_process_group_ranks(group or torch.distributed.group.WORLD))
        if len(ranks) > 1:
            kind = Transfer(operation, ranks, self.phase)
            self.bytes[kind] += size
            self.calls[kind] += 1


OPERATIONS = {
    "all_reduce": ("all_reduce", "tensor"),
    "broadcast": ("broadcast", "tensor"),
    "all_gather_into_tensor": ("all_gather", "output_tensor"),
    "_all_gather_base": ("all_gather", "output_tensor"),
    "all_gather": ("all_gather", "tensor_list"),
    "reduce_scatter_tensor": ("reduce_scatter", "input"),
    "_reduce_scatter_base": ("reduce_scatter", "input"),
    "reduce_scatter": ("reduce_scatter", "input_list"),
    "all_to_all_single": ("all_to_all", "input"),
    "send": ("send", "tensor"),
    "isend": ("send", "tensor"),
    "recv": ("recv", "tensor"),
    "irecv": ("recv", "tensor"),
}
"""Functions of torch.distributed: what they do, and the argument that holds the whole."""


def _size(tensors: Tensor | Sequence[Tensor]) -> int:
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(_size, tensors))


def count_traffic(perform: bool = False) -> Traffic:
    """From now on every collective of this process is counted; and done, if `perform`, as in a real run.

    Must come before `megatron.core` is imported, which binds some of their names.
    """
    traffic = Traffic(Counter(), Counter())

    def counted(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        operation, whole = OPERATIONS[name]
        signature = inspect.signature(plain)

        @functools.wraps(plain)
        def collective(*args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind(*args, **kwargs).arguments
            traffic.add(operation, arguments.get("group"), _size(arguments[whole]))
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
