"""Device memory of training: offloading between steps and while an inference engine uses the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from mcore_rl import platform
from mcore_rl.models.megatron.optimizer import Offload, gradient_buffers, optimizer_tensors


class TrainingMemory:
    """The device memory that a policy can release temporarily.

    Args:
        weights: offload of the policy's weights.
        parameters: function that returns the weights.
        optimizer: the policy's optimizer; None for a policy that is not trained.
        offloads_optimizer: keep the optimizer's state on the host outside of `optimizer_on_device`.
    """

    def __init__(
        self,
        weights: Offload,
        parameters: Callable[[], Iterable[Tensor]],
        chunks: Sequence[Any],
        optimizer: Any,
        offloads_optimizer: bool = False,
    ) -> None:
        self.weights, self.parameters, self.chunks, self.trained_by = weights, parameters, chunks, optimizer
        self.optimizer, self.gradients = Offload(keep=True), Offload(keep=False)
        # A simulated storage cannot be emptied; the simulation computes the saving afterwards.
        self.offloads_optimizer = offloads_optimizer and optimizer is not None and not platform.simulates()
        self.between_steps = Offload(keep=True)
        with self.optimizer_on_device():
            pass  # the state is offloaded before the first step too

    @contextmanager
    def optimizer_on_device(self) -> Iterator[None]:
        """Keep the optimizer's state on the device inside the context, unless `offload_training_state` has moved it."""
        self.between_steps.restore()
        try:
            yield
        finally:
            if self.offloads_optimizer:
                self.between_steps.offload(optimizer_tensors(self.trained_by, self.parameters()))

    def restore(self) -> None:
        """Restore everything to the device."""
        for offload in (self.weights, self.optimizer, self.gradients):
            offload.restore()

    def offload_training_state(self) -> int:
        """Move the optimizer's state to the host and drop the gradient buffers; return the device bytes freed."""
        if self.trained_by is None:
            return 0
        freed = self.gradients.offload(gradient_buffers(self.chunks))
        return freed + self.optimizer.offload(optimizer_tensors(self.trained_by, self.parameters()))

    def offload_all(self) -> int:
        """Move the weights to the host too; return the device bytes freed."""
        return self.offload_training_state() + self.weights.offload(self.parameters())
