"""Shared memory of the host in which tensors wait for the process that writes them."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from mcore_rl import platform
from mcore_rl.platform.byte_blocks import bytes_for, views_of
from mcore_rl.utils import shard_process
from mcore_rl.utils.shard_process import ShardProcess


class HostStaging:
    """A block of the host's memory that the writing process maps, for one copy of some tensors at a time.

    It is page-locked, so that the host need not wait for copies, and kept from one time to the next: locking it takes
    longer than filling it. The process may read it once the copies are there.
    """

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)
        self._file = shard_process.shared_file()
        self._copied: platform.Event | None = None

    @cached_property
    def process(self) -> ShardProcess:
        """The process that writes what is staged."""
        return shard_process.take()

    @property
    def descriptor(self) -> int:
        """File descriptor of the block, to be sent to the process."""
        return int(self._file.fileno())

    def copy(self, tensors: Sequence[Tensor]) -> list[int]:
        """Copy tensors into the block and return their places, in bytes. The values are there when `is_done`.

        What the device is told to do from now on comes after the copies. The block's last contents are lost.
        """
        size = bytes_for(tensors)
        if size > len(self._block):
            platform.release_page_lock(self._block)
            self._block = torch.empty(0, dtype=torch.uint8)
            self._file.truncate(size)
            # Its pages are there at once: to meet them one by one takes longer than the copies.
            populate = getattr(mmap, "MAP_POPULATE", 0)
            memory = mmap.mmap(self.descriptor, size, flags=mmap.MAP_SHARED | populate)
            self._block = torch.frombuffer(memory, dtype=torch.uint8)
            platform.page_lock(self._block)
        copies = views_of(self._block, tensors)
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor.detach(), non_blocking=True)
        self._copied = platform.record_event()
        return [copy.data_ptr() - self._block.data_ptr() for copy in copies]

    def read(self, place: int, like: Tensor) -> Tensor:
        """Return the staged value at a place, of a tensor's shape and dtype."""
        return self._block[place : place + like.nbytes].view(like.dtype).view(like.shape)

    @property
    def is_done(self) -> bool:
        """Whether the last copies are there."""
        return self._copied is None or self._copied.query()
