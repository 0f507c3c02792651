"""Tensors that the backward pass makes again instead of keeping them from the forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jaxtyping import Shaped
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from mcore_rl import platform


@contextmanager
def remade_in_backward(tensor: Shaped[Tensor, "..."], make: Callable[[], Tensor]) -> Iterator[None]:
    """Inside, autograd keeps nothing of `tensor` or of its views: a backward pass gets their like from `make()`.

    `make` gives a tensor of the same shape, strides and numbers, and is called once for each backward pass that needs
    it, where this is first asked for: the same place on all ranks, so it may be a collective. What it gave is let go
    when all that was kept has been asked for.
    """
    remade = _Remade(make)
    storage = platform.storage_id(tensor)

    def keep(saved: Tensor) -> Any:
        if platform.storage_id(saved) == storage:
            return remade.part(saved)
        return saved.detach()  # a node that kept its own output as it is would keep itself

    with saved_tensors_hooks(keep, lambda kept: kept.cut() if isinstance(kept, _Part) else kept):
        yield


class _Remade:
    def __init__(self, make: Callable[[], Tensor]) -> None:
        self.make, self.parts, self.asked = make, 0, 0
        self.again: Tensor | None = None

    def part(self, saved: Tensor) -> _Part:
        self.parts += 1
        return _Part(self, tuple(saved.shape), saved.stride(), int(saved.storage_offset()))

    def ask(self) -> Tensor:
        again = self.make() if self.again is None else self.again
        self.asked += 1
        self.again = None if self.asked % self.parts == 0 else again
        return again


@dataclass(frozen=True)
class _Part:
    remade: _Remade
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def cut(self) -> Tensor:
        return self.remade.ask().as_strided(self.shape, self.stride, self.offset)
