"""A batch: a dictionary of tensors (and lists) that share their first dimension."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch

DictT = TypeVar("DictT")


class BatchedDataDict(UserDict, Generic[DictT]):
    """Tensors [B, …] and lists of length B under one roof.

    Values that are neither are kept as they are and shared by every slice.
    """

    @property
    def size(self) -> int:
        """B, the number of rows; 0 for an empty dictionary.

        Raises:
            ValueError: entries of different lengths.
        """
        sizes = {key: len(value) for key, value in self.data.items() if _is_batched(value)}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"entries differ in their number of rows: {sizes}")
        return next(iter(sizes.values()), 0)

    def select_indices(self, indices: Sequence[int] | torch.Tensor) -> BatchedDataDict[DictT]:
        """The rows `indices`, in that order."""
        rows = torch.as_tensor(indices, dtype=torch.long)
        order = rows.tolist()
        selected: BatchedDataDict[DictT] = BatchedDataDict()
        for key, value in self.data.items():
            if isinstance(value, torch.Tensor) and value.ndim:
                selected[key] = value[rows.to(value.device)]
            else:
                selected[key] = [value[i] for i in order] if isinstance(value, list) else value
        return selected

    def slice(self, start: int, end: int) -> BatchedDataDict[DictT]:
        """Rows start … end − 1."""
        return self.select_indices(range(start, min(end, self.size)))

    def to(self, device: torch.device | str) -> BatchedDataDict[DictT]:
        """All tensors on `device`."""
        return BatchedDataDict({k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in self.data.items()})


def _is_batched(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, torch.Tensor) and value.ndim > 0)
