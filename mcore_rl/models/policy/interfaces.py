"""The interface of a policy for controllers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypedDict

import torch

from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.losses.common import LossFunction


class LogprobOutputSpec(TypedDict):
    """`logprobs` [B, S]: entry (b, t) of token `input_ids[b, t]`; column 0 is 0."""

    logprobs: torch.Tensor


class ReferenceLogprobOutputSpec(TypedDict):
    """`reference_logprobs` [B, S], aligned like `logprobs`."""

    reference_logprobs: torch.Tensor


class PolicyInterface(ABC):
    """A model that can score and learn; every call is made on all ranks with the same global batch."""

    @abstractmethod
    def get_logprobs(
        self, data: BatchedDataDict[Any], micro_batch_size: int | None = None
    ) -> BatchedDataDict[LogprobOutputSpec]:
        """Log-probabilities of the rows' own tokens.

        Args:
            data: `input_ids` [B, S], right-padded, and `input_lengths` [B].
            micro_batch_size: rows at a time, where they are not packed.
        """

    @abstractmethod
    def get_reference_policy_logprobs(
        self, data: BatchedDataDict[Any], micro_batch_size: int | None = None
    ) -> BatchedDataDict[ReferenceLogprobOutputSpec]:
        """The same under the weights that training began from."""

    @abstractmethod
    def train(
        self,
        data: BatchedDataDict[Any],
        loss_fn: LossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        """Make a step for each `gbs` rows; returns the loss's metrics, `grad_norm`, `lr`, `all_mb_metrics`."""

    @abstractmethod
    def prepare_for_lp_inference(self, *args: Any, **kwargs: Any) -> None:
        """Make ready for scoring."""

    @abstractmethod
    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Make ready for `train`."""

    @abstractmethod
    def finish_training(self, *args: Any, **kwargs: Any) -> None:
        """Release what only training needs."""

    @abstractmethod
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Write weights and training state."""

    @abstractmethod
    def shutdown(self) -> bool:
        """Release processes and groups; True if all went well."""


class ColocatablePolicyInterface(PolicyInterface):
    """A policy that shares its devices with an inference engine, and hands its weights over.

    By collective: `prepare_refit_info`, `init_collective`, then `broadcast_weights_for_collective` after every
    update. By shared memory: `offload_before_refit`, `prepare_weights_for_ipc`, `get_weights_ipc_handles` for
    each group of keys, `offload_after_refit`; `prepare_for_training` brings everything back.
    """

    @abstractmethod
    def init_collective(self, ip: str, port: int, world_size: int) -> Any:
        """Open a group with the engine's processes.

        Args:
            world_size: the engine's processes and one more, the policy's first rank, which is rank 0.
        """

    @abstractmethod
    def offload_before_refit(self) -> Any:
        """Give up the device memory that only training needs: gradient buffers and optimizer state."""

    @abstractmethod
    def offload_after_refit(self) -> Any:
        """Give up the weights' device memory too."""

    @abstractmethod
    def prepare_refit_info(self) -> dict[str, Any] | None:
        """Hugging Face name → (shape, dtype) of every tensor, in the order in which they are sent."""

    @abstractmethod
    def prepare_weights_for_ipc(self, *args: Any, **kwargs: Any) -> list[list[str]]:
        """Groups of keys, each to be asked for at once."""

    @abstractmethod
    def get_weights_ipc_handles(self, keys: list[str]) -> dict[str, Any]:
        """Device → a handle on shared memory there that holds these tensors, until the next call."""

    @abstractmethod
    def broadcast_weights_for_collective(self) -> Any:
        """Send all weights to the engine's processes."""
