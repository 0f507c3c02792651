"""Memory of the host in which a device's tensors wait for a process that writes them."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from mcore_rl import platform
from mcore_rl.platform.byte_blocks import bytes_for, views_of


class HostStaging:
    """A block of the host's memory that forked processes share, for one copy of some tensors at a time.

    It is page-locked, so that the host need not wait for copies, and kept from one time to the next: locking it takes
    longer than filling it. A process forked before the copies are there would wait for them in vain: it has no device.
    """

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)
        self._copied: platform.Event | None = None

    def copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The same tensors on the host, whose values are there when `is_done`.

        What the device is told to do from now on comes after the copies. The block's last contents are lost.
        """
        size = bytes_for(tensors)
        if size > len(self._block):
            platform.release_page_lock(self._block)
            # Anonymous, not a file in /dev/shm, which containers keep small.
            self._block = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
            platform.page_lock(self._block)
        copies = views_of(self._block, tensors)
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        self._copied = platform.record_event()
        return copies

    @property
    def is_done(self) -> bool:
        """Whether the last copies are there."""
        return self._copied is None or self._copied.query()
