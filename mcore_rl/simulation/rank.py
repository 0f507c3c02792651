"""The stand-ins of a simulated rank for weights, a flash kernel, and a host that waits for its device."""

from __future__ import annotations

import math
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mcore_rl.models.megatron.attention import Kernel, VisibleKeys

SIMULATION, PACKAGE = Path(__file__).parent, Path(__file__).parents[1]


class ShapesOnly:
    """The tensors of a model directory without a file: `SafetensorsDirectory` by its configuration alone."""

    def __init__(self, path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
        self.path, self._shapes = path, shapes

    def names(self) -> set[str]:
        return set(self._shapes)

    def shape(self, name: str) -> list[int]:
        return list(self._shapes[name])

    def dtype(self, name: str) -> torch.dtype:
        return torch.float32

    def read(self, name: str, rows: slice = slice(None), columns: slice | None = None) -> Tensor:
        whole = torch.empty(self._shapes[name], device="meta")
        return whole[rows] if columns is None else whole[rows, columns]


@dataclass
class HostReads:
    """The places where the host reads a value from the device, which stops it until the device is done."""

    phase: str = ""
    places: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(phase, file:line of this package) → how often."""

    def note(self) -> None:
        where = "elsewhere"
        for frame in reversed(traceback.extract_stack()):
            file = Path(frame.filename)
            if PACKAGE in file.parents and SIMULATION not in file.parents:
                where = f"{file.name}:{frame.lineno}"
                break
        self.places[self.phase, where] += 1


def note_host_reads(reads: HostReads) -> None:
    """From now on a value of a simulated tensor is 1 wherever the host asks for it, and the place is noted."""
    tensor_class: Any = Tensor

    def replaced(name: str, value: Any) -> None:
        plain = getattr(tensor_class, name)

        def read(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.device.type != "meta":
                return plain(self, *args, **kwargs)
            reads.note()
            return value(self)

        setattr(tensor_class, name, read)

    def ones(tensor: Tensor) -> Tensor:
        return torch.ones(tensor.shape, dtype=tensor.dtype, device="cpu")

    def number(tensor: Tensor) -> Any:
        return 1.0 if tensor.dtype.is_floating_point else 1

    replaced("item", number)
    replaced("__float__", lambda tensor: 1.0)
    replaced("__int__", lambda tensor: 1)
    replaced("__bool__", lambda tensor: True)
    replaced("tolist", lambda tensor: ones(tensor).tolist())
    replaced("cpu", ones)


class AttentionFlops:
    """Multiplications of attention, which the stand-in kernel does not do: `total`, forward and backward."""

    def __init__(self) -> None:
        self.total = 0

    @staticmethod
    def forward(query_lengths: tuple[int, ...], key_lengths: tuple[int, ...], window: int | None, width: int) -> int:
        """Two products over every visible pair of a query and a key; `width` is heads × head_dim."""
        pairs = 0
        for queries, keys in zip(query_lengths, key_lengths, strict=True):
            seen = range(keys - queries + 1, keys + 1)  # by each query, without a window
            pairs += sum(min(n, window) for n in seen) if window else (seen[0] + seen[-1]) * queries // 2
        return 4 * pairs * width


def flash_stand_in(flops: AttentionFlops) -> Kernel:
    """A kernel on a device without memory: a flash kernel's output and saved tensors, and its operations."""
    from mcore_rl.models.megatron.attention import Kernel

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, count: int) -> Tensor:
            out = query.new_empty((*query.shape[:-1], value.shape[-1]))
            logsumexp = query.new_empty(query.shape[:-1], dtype=torch.float32)
            ctx.save_for_backward(query, key, value, out, logsumexp)
            ctx.count = count
            flops.total += count
            return out

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
            query, key, value, _, _ = ctx.saved_tensors
            flops.total += ctx.count * 5 // 2  # five products, the first of which is done again
            return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None

    def attend(
        query: Tensor, key: Tensor, value: Tensor, visible: VisibleKeys, scale: float | None, window: int | None
    ) -> Tensor:
        width = math.prod(query.shape[1:])
        count = AttentionFlops.forward(visible.query_lengths, visible.key_lengths, window, width)
        return Attention.apply(query, key, value, count)

    return Kernel(attend)


def alike(reduced: Any) -> Any:
    """`own_rows.reduced` where other replicas, which are not there, are taken to have what this one has."""

    def of_all(values: Tensor, replicas: Any, op: Any = torch.distributed.ReduceOp.SUM) -> Tensor:
        reduced(values, replicas, op)  # its transfer, and that the host waits for it
        return values * replicas.size if op == torch.distributed.ReduceOp.SUM else values

    return of_all


def untouched_copies(tensors: list[Tensor]) -> list[Tensor]:
    """`reference_weights.copies_on_host`, of memory that nobody writes to and that is never taken therefore."""
    return [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]


def exchange_stand_in(tensor: Tensor, kept: Tensor) -> None:
    """`reference_weights.exchange`: what it takes of the device meanwhile."""
    tensor.clone()


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value` meanwhile."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
