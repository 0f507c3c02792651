"""Tensors in one block of bytes: where each begins. Imported inside vLLM too, so only PyTorch is imported here."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

K = TypeVar("K")
Shape = tuple[int, ...]

Places = dict[K, tuple[int, Shape, torch.dtype]]
"""Map from key to first byte, shape and precision of each tensor in a block."""


def nbytes_of(shape: Shape, dtype: torch.dtype) -> int:
    """Return the number of bytes of a tensor."""
    return torch.Size(shape).numel() * dtype.itemsize


def lay_out(
    info: Iterable[tuple[K, tuple[Shape, torch.dtype]]], start: int = 0, alignment: int = 1
) -> tuple[Places[K], int]:
    """Arrange the tensors of `info` in one block; return their places, and the block's size in bytes.

    Args:
        start: first byte of the first tensor.
        alignment: each tensor takes a multiple of this number of bytes.
    """
    places, size = {}, start
    for key, (shape, dtype) in info:
        places[key] = (size, shape, dtype)
        size += -(-nbytes_of(shape, dtype) // alignment) * alignment
    return places, size


def path_of_shared(name: str) -> Path:
    """Return the file of the block of shared memory `name`."""
    return Path("/dev/shm") / name


def open_shared(name: str) -> Tensor:
    """Open the block of shared memory `name`, which another process has created; return its bytes.

    As a file, because `SharedMemory(name)` registers the block for removal in this process too. Processes of one
    program share the tracker of such blocks; if one of them takes the block out, the tracker later writes a KeyError
    to the log, and does not remove the block if its creator is killed.
    """
    with path_of_shared(name).open("r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
