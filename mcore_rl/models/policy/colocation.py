"""A policy that shares its devices with an inference engine: memory given up, weights handed over."""

from __future__ import annotations

from typing import Any

import torch

from mcore_rl.models.megatron.offload import Offload, gradient_buffers, optimizer_tensors
from mcore_rl.models.megatron.weights import export_hf_weights
from mcore_rl.models.policy.interfaces import ColocatablePolicyInterface
from mcore_rl.models.policy.refit import RefitGroup, RefitInfo, SharedBucket, plan_buckets, send_weights
from mcore_rl.models.policy.scoring import ScoringModel

BUCKET_BYTES = 512 * 1024**2


class Colocation(ScoringModel, ColocatablePolicyInterface):
    """The part of the Megatron policy that an inference engine beside it needs."""

    optimizer: Any
    is_trained: bool

    def init_colocation(self) -> None:
        """Nothing is away, nobody is connected."""
        self.optimizer_away, self.gradients_away = Offload(keep=True), Offload(keep=False)
        self._has_collective = False
        self._refit_group: RefitGroup | None = None
        self._shared_bucket: SharedBucket | None = None

    # ------------------------------------------------------------ memory

    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Bring back what was offloaded."""
        for offload in (self.weights_away, self.optimizer_away, self.gradients_away):
            offload.restore()
        for chunk in self.chunks:
            chunk.train()

    def finish_training(self, *args: Any, **kwargs: Any) -> None:
        """Release gradient buffers and optimizer state until `prepare_for_training`."""
        self.offload_before_refit()
        for chunk in self.chunks:
            chunk.eval()

    def offload_before_refit(self) -> int:
        """Move the optimizer's state to the host and drop the gradient buffers; returns the device bytes freed."""
        if not self.is_trained:
            return 0
        freed = self.gradients_away.offload(gradient_buffers(self.chunks))
        return freed + self.optimizer_away.offload(optimizer_tensors(self.optimizer, self.parameters()))

    def offload_after_refit(self) -> int:
        """Move the weights to the host too; returns the device bytes freed."""
        self.release_shared_bucket()
        return self.offload_before_refit() + self.weights_away.offload(self.parameters())

    # ------------------------------------------------------------ refit

    def prepare_refit_info(self) -> RefitInfo:
        dtype, family = next(iter(self.parameters())).dtype, self.model.family
        wide = family.float32_tensors()
        return {name: (shape, torch.float32 if name in wide else dtype) for name, shape in family.shapes().items()}

    def init_collective(self, ip: str, port: int, world_size: int) -> None:
        """Open a group with the engine's processes, ranks 1 … world_size − 1 of it.

        Raises:
            RuntimeError: they did not come within `parallel.timeout_seconds`.
        """
        if self.is_writer:
            self._refit_group = RefitGroup.join(ip, port, 0, world_size, self.config.parallel.timeout_seconds)
        self._has_collective = True

    def broadcast_weights_for_collective(self, bucket_bytes: int = BUCKET_BYTES) -> None:
        """Send all weights, gathered one at a time, in buckets of at most `bucket_bytes`. Collective.

        Raises:
            RuntimeError: `init_collective` was not called, or the weights are offloaded.
        """
        if not self._has_collective:
            raise RuntimeError("broadcast_weights_for_collective: call init_collective first")
        self.require("broadcast_weights_for_collective", self.weights_away)
        tensors = export_hf_weights(self.model, copies=False)
        send_weights(tensors, self.prepare_refit_info(), self._refit_group, bucket_bytes)

    def prepare_weights_for_ipc(self, bucket_bytes: int = BUCKET_BYTES) -> list[list[str]]:
        """Keys in groups of at most `bucket_bytes`, to be asked for one group after the other."""
        return plan_buckets(self.prepare_refit_info(), bucket_bytes)

    def get_weights_ipc_handles(self, keys: list[str]) -> dict[str, Any]:
        """One block of shared memory with the tensors `keys`; the block of the call before is released.

        Collective; the first rank holds the block, the others return an empty dictionary.

        Raises:
            ValueError: a key that the model does not have.
            RuntimeError: the weights are offloaded.
        """
        self.require("get_weights_ipc_handles", self.weights_away)
        info = self.prepare_refit_info()
        if unknown := sorted(set(keys) - set(info)):
            raise ValueError(f"get_weights_ipc_handles: the model has no {', '.join(unknown)}")
        self.release_shared_bucket()
        if self.is_writer:
            self._shared_bucket = SharedBucket({key: info[key] for key in keys})
        for name, tensor in export_hf_weights(self.model, names=keys, copies=False):
            if self._shared_bucket is not None:
                self._shared_bucket.write(name, tensor)
        return {} if self._shared_bucket is None else self._shared_bucket.handle()

    def release_shared_bucket(self) -> None:
        """Let go of the last block of shared memory."""
        if self._shared_bucket is not None:
            self._shared_bucket.release()
        self._shared_bucket = None
