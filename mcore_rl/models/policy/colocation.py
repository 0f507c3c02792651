"""How a policy that shares its devices with an inference engine is asked for its weights and its memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mcore_rl.models.generation.refit import RefitInfo
from mcore_rl.models.policy.interfaces import ColocatablePolicyInterface
from mcore_rl.models.policy.memory import TrainingMemory
from mcore_rl.models.policy.refit_sender import WeightHandover
from mcore_rl.models.policy.scoring import ScoringModel

BUCKET_BYTES = 512 * 1024**2


class ColocatablePolicy(ScoringModel, ColocatablePolicyInterface):
    """The interface, answered by the policy's `memory` and its `handover`."""

    memory: TrainingMemory
    handover: WeightHandover

    # ------------------------------------------------------------ memory

    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Bring back what was offloaded."""
        self.memory.restore()
        for chunk in self.chunks:
            chunk.train()

    def finish_training(self, *args: Any, **kwargs: Any) -> None:
        """Release gradient buffers and optimizer state until `prepare_for_training`."""
        self.memory.give_up_training()
        for chunk in self.chunks:
            chunk.eval()

    def offload_before_refit(self) -> int:
        """Move the optimizer's state to the host and drop the gradient buffers; returns the device bytes freed."""
        return self.memory.give_up_training()

    def offload_after_refit(self) -> int:
        """Move the weights to the host too; returns the device bytes freed."""
        self.handover.release()
        return self.memory.give_up_all()

    @contextmanager
    def brought_back(self) -> Iterator[None]:
        """Ready for training inside; if its weights were away, everything goes away again afterwards."""
        was_away = self.weights_away.is_away
        self.prepare_for_training()
        try:
            yield
        finally:
            if was_away:
                self.offload_after_refit()

    # ------------------------------------------------------------ refit

    def prepare_refit_info(self, adapters_only: bool = False) -> RefitInfo:
        """
        Args:
            adapters_only: of the adapters alone, under their names in PEFT's files.

        Raises:
            RuntimeError: the model has no adapters.
        """
        return self.handover.info(adapters_only)

    def adapter_settings(self) -> dict[str, Any]:
        """Return the arguments of PEFT's `LoraConfig` for the adapters: `r`, `lora_alpha`, `target_modules`, …

        Raises:
            RuntimeError: the model has no adapters.
        """
        return self.handover.adapter_settings()

    def init_collective(self, ip: str, port: int, world_size: int) -> None:
        """Open a group with the engine's processes, ranks 1 … world_size − 1 of it.

        Raises:
            RuntimeError: they did not come within `parallel.timeout_seconds`.
        """
        self.handover.connect(ip, port, world_size)

    def broadcast_weights_for_collective(self, bucket_bytes: int = BUCKET_BYTES, adapters_only: bool = False) -> None:
        """Send all weights, gathered one at a time, in buckets of at most `bucket_bytes`. Collective.

        Args:
            adapters_only: send the adapters as they are, not the model's weights with adapters merged into them; as
                the receivers were told by `prepare_refit_info`.

        Raises:
            RuntimeError: `init_collective` was not called, the weights are offloaded, or there are no adapters.
        """
        self.require_weights("broadcast_weights_for_collective")
        self.handover.broadcast(bucket_bytes, adapters_only)

    def prepare_weights_for_ipc(self, bucket_bytes: int = BUCKET_BYTES, adapters_only: bool = False) -> list[list[str]]:
        """Keys in groups of at most `bucket_bytes`, to be asked for one group after the other."""
        return self.handover.buckets(bucket_bytes, adapters_only)

    def get_weights_ipc_handles(self, keys: list[str]) -> dict[str, Any]:
        """A block of shared memory on every device with the tensors `keys`, of the model's or of the adapters'; those
        of the call before are released.

        Collective. An engine's process takes the block of the device that it runs on.

        Returns:
            Device (a GPU's UUID, or "cpu", which one block serves) → handle: on the first rank of all devices, on
            another of its own, if it holds that one's block.

        Raises:
            ValueError: a key that the model does not have.
            RuntimeError: the weights are offloaded.
        """
        self.require_weights("get_weights_ipc_handles")
        return self.handover.share(keys)

    def release_shared_bucket(self) -> None:
        """Let go of this rank's last block of shared memory."""
        self.handover.release()
