"""Live bytes of tensors: each storage is counted from its first appearance until it is freed."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mcore_rl import platform

STATE, LOGITS, COMMUNICATION, ACTIVATIONS = "state", "logits", "communication buffers", "activations, workspace"
"""Kinds of storages: of weights, gradients and optimizers; what is made of hidden states and the LM head; what other
ranks' values come to; all else."""


class LiveBytes(TorchDispatchMode):
    """While it is entered: `live` bytes on these kinds of device, the `peaks` of each phase, and what they are made of
    in bytes by kind, `at_peak`.

    Args:
        kind_now: of a storage that appears.
    """

    def __init__(self, *devices: str, kind_now: Callable[[], str] = lambda: ACTIVATIONS) -> None:
        super().__init__()
        self.devices, self.phase = devices, ""
        self.live = 0
        self.peaks: dict[str, int] = {}
        self.at_peak: dict[str, Counter[str]] = {}
        self._kind_now = kind_now
        self._kinds: dict[int, str] = {}
        self._of_kind = Counter[str]()

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
        if key in self._kinds or not size:
            return
        kind = self._kinds[key] = self._kind_now()
        self._of_kind[kind] += size
        self.live += size
        if self.live > self.peaks.get(self.phase, 0):
            self._note_peak()
        weakref.finalize(storage, self._forget, key, size)

    def is_state(self, tensor: Tensor) -> bool:
        """Whether its storage belongs to weights, gradients or an optimizer."""
        return self._kinds.get(platform.storage_id(tensor)) == STATE

    def receives(self, tensor: Tensor) -> None:
        """Other ranks' values come to its storage, which is a buffer of communication from now on, if not state."""
        key, size = platform.storage_id(tensor), tensor.untyped_storage().nbytes()
        if key not in self._kinds or self.is_state(tensor):
            return
        self._of_kind[self._kinds[key]] -= size
        self._of_kind[COMMUNICATION] += size
        self._kinds[key] = COMMUNICATION
        if self.live == self.peaks.get(self.phase):  # the peak that its appearance made, maybe
            self._note_peak()

    def _note_peak(self) -> None:
        self.peaks[self.phase] = self.live
        self.at_peak[self.phase] = self._of_kind.copy()

    def _forget(self, key: int, size: int) -> None:
        self._of_kind[self._kinds.pop(key)] -= size
        self.live -= size


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' storages, each counted once."""
    return sum({platform.storage_id(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())
