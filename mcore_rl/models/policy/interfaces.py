"""The policy interface that controllers use."""

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
    """A model that scores and learns. Every method is called on all ranks with the same global batch."""

    @abstractmethod
    def get_logprobs(
        self, data: BatchedDataDict[Any], micro_batch_size: int | None = None
    ) -> BatchedDataDict[LogprobOutputSpec]:
        """Return the log-probability of each token of the rows.

        Args:
            data: `input_ids` [B, S], right-padded, and `input_lengths` [B].
            micro_batch_size: rows per microbatch, when rows are not packed.
        """

    @abstractmethod
    def get_reference_policy_logprobs(
        self, data: BatchedDataDict[Any], micro_batch_size: int | None = None
    ) -> BatchedDataDict[ReferenceLogprobOutputSpec]:
        """Return the log-probability of each token of the rows under the initial weights."""

    @abstractmethod
    def train(
        self,
        data: BatchedDataDict[Any],
        loss_fn: LossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        """Make one optimizer step per `gbs` rows; return the loss's metrics, `grad_norm`, `lr`, `all_mb_metrics`."""

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
    """A policy that shares its devices with an inference engine and sends its weights to it.

    Weights are sent in one of two ways. With a collective: `prepare_refit_info`, `init_collective`, then
    `broadcast_weights_for_collective` after every update. With shared memory: `offload_before_refit`,
    `prepare_weights_for_ipc`, `get_weights_ipc_handles` for each group of keys, `offload_after_refit`;
    `prepare_for_training` then restores everything to the device.
    """

    @abstractmethod
    def init_collective(self, ip: str, port: int, world_size: int) -> Any:
        """Open a process group with the engine's processes.

        Args:
            world_size: number of the engine's processes plus one for the policy's first rank, which is rank 0.
        """

    @abstractmethod
    def offload_before_refit(self) -> Any:
        """Release the device memory that only training needs: gradient buffers and optimizer state."""

    @abstractmethod
    def offload_after_refit(self) -> Any:
        """Release the device memory of the weights too."""

    @abstractmethod
    def prepare_refit_info(self) -> dict[str, Any] | None:
        """Return a map from Hugging Face name to (shape, dtype) of every tensor, in the order of sending."""

    @abstractmethod
    def prepare_weights_for_ipc(self, *args: Any, **kwargs: Any) -> list[list[str]]:
        """Return groups of keys; the tensors of one group are requested together."""

    @abstractmethod
    def get_weights_ipc_handles(self, keys: list[str]) -> dict[str, Any]:
        """Return a map from device to a handle of shared memory that holds these tensors until the next call."""

    @abstractmethod
    def broadcast_weights_for_collective(self) -> Any:
        """Send all weights to the engine's processes."""
