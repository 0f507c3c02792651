"""Several tensors in one block of bytes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

ALIGNMENT = 64
"""Bytes; where a tensor may begin, whatever its dtype."""


def bytes_for(tensors: Sequence[Tensor]) -> int:
    """How large a block must be to hold them."""
    return sum(map(_room, tensors))


def views_of(block: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The places of `tensors` in a block (uint8, at least `bytes_for` them), of their shapes and dtypes."""
    parts = block[: bytes_for(tensors)].split([_room(tensor) for tensor in tensors])
    return [
        part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)
    ]


def _room(tensor: Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
