"""Live bytes of tensors: each storage is counted from its first appearance until it is freed."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mcore_rl import platform


class LiveBytes(TorchDispatchMode):
    """While it is entered: `live` bytes on these kinds of device, and the `peaks` of each phase."""

    def __init__(self, *devices: str) -> None:
        super().__init__()
        self.devices, self.phase = devices, ""
        self.live = 0
        self.peaks: dict[str, int] = {}
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.device.type in self.devices:
                self.see(leaf)
        return out

    def see(self, tensor: Tensor) -> None:
        """Count a tensor's storage, if it is new."""
        storage = tensor.untyped_storage()
        key, size = platform.storage_id(tensor), storage.nbytes()
        if key in self._known or not size:
            return
        self._known.add(key)
        self.live += size
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), self.live)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Of the tensors' storages, each counted once."""
    return sum({platform.storage_id(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())
