"""The interfaces of a policy, for training programs that control it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypedDict

import torch

from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.losses.common import LossFunction


class LogprobOutputSpec(TypedDict):
    """`logprobs` [B, S]: entry (b, t) is the log-probability of token `input_ids[b, t]`; column 0 is 0."""

    logprobs: torch.Tensor


class ReferenceLogprobOutputSpec(TypedDict):
    """`reference_logprobs` [B, S], aligned like `logprobs`."""

    reference_logprobs: torch.Tensor


class PolicyInterface(ABC):
    """A model that is scored and trained. Call every method on all ranks, with the same global batch."""

    @abstractmethod
    def get_logprobs(
        self, data: BatchedDataDict[Any], micro_batch_size: int | None = None
    ) -> BatchedDataDict[LogprobOutputSpec]:
        """Return the log-probability of each token in the rows of `data`.

        Args:
            data: `input_ids` [B, S], right-padded, and `input_lengths` [B].
            micro_batch_size: number of rows per microbatch; only used if rows are not packed.
        """

    @abstractmethod
    def get_reference_policy_logprobs(
        self, data: BatchedDataDict[Any], micro_batch_size: int | None = None
    ) -> BatchedDataDict[ReferenceLogprobOutputSpec]:
        """Return the log-probability of each token in the rows of `data` under the reference model."""

    @abstractmethod
    def train(
        self,
        data: BatchedDataDict[Any],
        loss_fn: LossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        """Make one optimizer step for each `gbs` rows of `data`.

        Returns:
            The loss's metrics, `grad_norm`, `lr`, and `all_mb_metrics` (each metric's values in all microbatches).
        """

    @abstractmethod
    def prepare_for_lp_inference(self, *args: Any, **kwargs: Any) -> None:
        """Prepare the model for scoring."""

    @abstractmethod
    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Prepare the model for `train`."""

    @abstractmethod
    def finish_training(self, *args: Any, **kwargs: Any) -> None:
        """Release the memory that only training needs."""

    @abstractmethod
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Write the weights and the training state."""

    @abstractmethod
    def shutdown(self) -> bool:
        """Release processes and groups; return True on success."""


class ColocatablePolicyInterface(PolicyInterface):
    """A policy that shares its devices with an inference engine and sends its weights to the engine.

    Weights are sent in one of two ways:

    - By a collective. Call `prepare_refit_info` and `init_collective` once, and `broadcast_weights_for_collective`
      after every update.
    - By shared memory. Call `offload_before_refit`, `prepare_weights_for_ipc`, `get_weights_ipc_handles` for each group
      of keys, and `offload_after_refit`. Later, `prepare_for_training` moves everything back to the device.
    """

    @abstractmethod
    def init_collective(self, ip: str, port: int, world_size: int) -> Any:
        """Create a process group of the policy's first rank and the engine's processes.

        Args:
            world_size: size of the group: the engine's processes, and the policy's first rank as rank 0.
        """

    @abstractmethod
    def offload_before_refit(self) -> Any:
        """Release the device memory that only training needs: gradient buffers and optimizer state."""

    @abstractmethod
    def offload_after_refit(self) -> Any:
        """Release the device memory of the weights, in addition to what `offload_before_refit` releases."""

    @abstractmethod
    def prepare_refit_info(self) -> dict[str, Any] | None:
        """Return a map from each tensor's Hugging Face name to its (shape, dtype), in the order of sending."""

    @abstractmethod
    def prepare_weights_for_ipc(self, *args: Any, **kwargs: Any) -> list[list[str]]:
        """Return the tensors' names in groups; `get_weights_ipc_handles` is called for one group at a time."""

    @abstractmethod
    def get_weights_ipc_handles(self, keys: list[str]) -> dict[str, Any]:
        """Write the tensors `keys` to shared memory; return a map from each device to the handle of its memory.

        The memory is valid until the next call.
        """

    @abstractmethod
    def broadcast_weights_for_collective(self) -> Any:
        """Send all weights to the engine's processes."""
