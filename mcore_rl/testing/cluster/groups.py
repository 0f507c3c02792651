"""The processes of a launch, which form one process group after the other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from mcore_rl import platform
from mcore_rl.utils import torchrun


class Processes:
    """The processes of a launch by torchrun. They exchange values through its store.

    Args:
        seconds: time limit for all processes to meet, and for each collective.
        backend: `parallel.backend` of the process groups.
    """

    def __init__(self, seconds: float, backend: str = "auto") -> None:
        self.limit, self._backend = timedelta(seconds=seconds), backend
        self.rank, self.size, self._groups = torchrun.rank(), torchrun.world_size(), 0
        if torchrun.is_launched():
            store, _, _ = next(torch.distributed.rendezvous("env://", timeout=self.limit))
            self.store: Any = torch.distributed.PrefixStore(f"check-{torchrun.restarts()}", store)
        else:
            self.store = torch.distributed.HashStore()
        self.store.set_timeout(self.limit)

    def meet(self, name: str) -> None:
        """Wait until all processes have called this method with the same `name`."""
        self.store.set(f"{name}/{self.rank}", "")
        self.store.wait([f"{name}/{rank}" for rank in range(self.size)])

    @contextmanager
    def group(self, size: int | None = None) -> Iterator[bool]:
        """Context in which the first `size` processes (default: all) are the ranks of the default process group.

        In it, models and collectives work as in a run of these processes. All processes of the launch enter the context
        together. It yields whether this process is one of the ranks. At the end, the processes meet, and the group is
        destroyed.
        """
        size = size or self.size
        self._groups += 1
        name, is_member = f"group-{self._groups}", self.rank < size
        before = {key: os.environ.get(key) for key in ("RANK", "WORLD_SIZE")}
        if is_member:
            os.environ.update(RANK=str(self.rank), WORLD_SIZE=str(size))
            # Another prefix, because the store still has the addresses of the last group's ranks.
            store = torch.distributed.PrefixStore(name, self.store)
            backend = platform.backend(self._backend)
            options: dict[str, Any] = {"device_id": platform.device()} if backend == "nccl" else {}
            torch.distributed.init_process_group(
                backend, store=store, rank=self.rank, world_size=size, timeout=self.limit, **options
            )
        try:
            yield is_member
        finally:
            for key, value in before.items():
                if value is None:
                    os.environ.pop(key, None)
                else:
                    os.environ[key] = value
        self.meet(f"end-{name}")  # no process closes its connections while others still use them
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
