"""What a controller may ask of a policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypedDict

import torch

from mcore_rl.algorithms.interfaces import LossFunction
from mcore_rl.distributed.batched_data_dict import BatchedDataDict


class LogprobOutputSpec(TypedDict):
    """`logprobs` [B, S]: entry (b, t) of token `input_ids[b, t]`; column 0 is 0."""

    logprobs: torch.Tensor


class ReferenceLogprobOutputSpec(TypedDict):
    """`reference_logprobs` [B, S], aligned like `logprobs`."""

    reference_logprobs: torch.Tensor


class PolicyInterface(ABC):
    """A model that can score and learn; every call is made on all ranks with the same global batch."""

    @abstractmethod
    def get_logprobs(self, data: BatchedDataDict[Any]) -> BatchedDataDict[LogprobOutputSpec]:
        """Log-probabilities of the rows' own tokens.

        Args:
            data: `input_ids` [B, S], right-padded, and `input_lengths` [B].
        """

    @abstractmethod
    def get_reference_policy_logprobs(self, data: BatchedDataDict[Any]) -> BatchedDataDict[ReferenceLogprobOutputSpec]:
        """The same under the weights that training began from."""

    @abstractmethod
    def train(self, data: BatchedDataDict[Any], loss_fn: LossFunction) -> dict[str, Any]:
        """One optimizer step on a global batch; returns the loss's metrics, `grad_norm` and `lr`."""

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
