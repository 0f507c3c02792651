"""Device memory given up for a while: weights, gradient buffers, optimizer state.

A tensor keeps its identity, shape and views; only its storage is emptied, and filled again.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from mcore_rl import platform
from mcore_rl.models.megatron.checkpoint.optimizer_shards import optimizers_with_parameters

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer


class Offload:
    """Storages of one kind, in place or given up.

    Args:
        keep: copy the contents to the host and back; otherwise they come back as zeros.
    """

    def __init__(self, keep: bool) -> None:
        self.keep = keep
        self._away: list[tuple[Tensor, Tensor | int]] = []

    @property
    def is_away(self) -> bool:
        return bool(self._away)

    def offload(self, tensors: Iterable[Tensor]) -> int:
        """Give up the storages behind `tensors`; returns the bytes of device memory that this frees."""
        if self.is_away:
            return 0
        for whole in _storages(tensors):
            host: Tensor | int = whole.numel()
            if self.keep:
                host = torch.empty(whole.shape, dtype=torch.uint8, pin_memory=platform.has_gpu()).copy_(whole)
            self._away.append((whole, host))
        freed = 0
        for whole, _ in self._away:
            freed += whole.untyped_storage().nbytes()
            whole.untyped_storage().resize_(0)
        platform.release_cached_memory()
        return freed

    def restore(self) -> None:
        """Bring everything back."""
        for whole, host in self._away:
            whole.untyped_storage().resize_(host if isinstance(host, int) else host.numel())
            if isinstance(host, int):
                whole.zero_()
            else:
                whole.copy_(host, non_blocking=True)
        self._away = []


def _storages(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Each storage behind `tensors` once, seen as bytes."""
    found: dict[int, Tensor] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            found.setdefault(platform.storage_id(tensor), whole)
    return list(found.values())


def gradient_buffers(chunks: Iterable[DistributedDataParallel]) -> list[Tensor]:
    """The buffers that gradients are accumulated and reduced in."""
    return [buffer.grad_data for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]


def optimizer_tensors(optimizer: MegatronOptimizer, weights: Iterable[Tensor]) -> list[Tensor]:
    """Moments and fp32 parameters, except what shares the memory of the weights themselves."""
    shared = {platform.storage_id(weight) for weight in weights}
    tensors = []
    for inner in optimizers_with_parameters(optimizer):
        for group in inner.optimizer.param_groups:
            tensors += group["params"]
        for state in inner.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor) and value.ndim]
    return [tensor for tensor in tensors if platform.storage_id(tensor) not in shared]
