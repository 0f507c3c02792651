"""The reference in the policy's place: its weights, kept or the model without its adapters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from mcore_rl import platform


class Reference(Protocol):
    """The reference that the policy is compared with."""

    def in_place(self) -> AbstractContextManager[None]:
        """Inside, the model computes what the reference does; afterwards what it did, whatever happens."""
        ...

    def describe(self) -> str:
        """Describe the reference and its part in this rank's memory."""
        ...


class KeptWeights:
    """Copies in host memory, page-locked where there is a GPU, of this rank's tensors as they are now."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.tensors = list(tensors)
        self.kept = copies_on_host(self.tensors)
        self.has_moved = False
        """Whether they are not those of the model's directory, so that checkpoints must hold them."""
        self._what = "the weights that training began from"

    @torch.no_grad()
    def move(self, alpha: float) -> None:
        """reference ← (1 − alpha) · reference + alpha · current, as in arXiv:2404.09656."""
        for kept, tensor in zip(self.kept, self.tensors, strict=True):
            # In fp32: a small alpha would be lost in bfloat16's rounding of each product.
            kept.copy_(torch.lerp(kept.float(), tensor.to(kept.device).float(), alpha))
        self.has_moved, self._what = True, "moved weights"

    def describe(self) -> str:
        return f"{self._what}, {sum(kept.nbytes for kept in self.kept) / 2**30:.2f} GiB a rank in the host's memory"

    def by_tensor(self) -> dict[int, Tensor]:
        """The reference's value of each of the model's tensors, by its `id`."""
        return {id(tensor): kept for tensor, kept in zip(self.tensors, self.kept, strict=True)}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        exchanged = list[tuple[Tensor, Tensor]]()
        try:
            for tensor, kept in zip(self.tensors, self.kept, strict=True):
                exchange(tensor, kept)
                exchanged.append((tensor, kept))
            yield
        finally:
            for tensor, kept in reversed(exchanged):
                exchange(tensor, kept)
            platform.synchronize_stream()  # a checkpoint reads what is kept without asking the device


@torch.no_grad()
def exchange(tensor: Tensor, kept: Tensor) -> None:
    """The values of each go to the other, one tensor more on the device meanwhile."""
    current = tensor.clone()
    tensor.copy_(kept, non_blocking=True)
    kept.copy_(current, non_blocking=True)


@torch.no_grad()
def copies_on_host(tensors: list[Tensor]) -> list[Tensor]:
    """Page-locked where there is a GPU."""
    copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=platform.has_gpu()) for t in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor)
    return copies


class AdaptersOff:
    """The model without its adapters, which began from nothing."""

    def __init__(self, adapters: Iterable[Any]) -> None:
        self.adapters = list(adapters)

    def describe(self) -> str:
        return "the policy without its adapters, no copy"

    @contextmanager
    def in_place(self) -> Iterator[None]:
        try:
            self._enable(False)
            yield
        finally:
            self._enable(True)

    def _enable(self, enabled: bool) -> None:
        for adapter in self.adapters:
            adapter.enabled = enabled
