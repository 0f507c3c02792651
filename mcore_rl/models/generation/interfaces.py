"""What a generation backend takes and gives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NotRequired, TypedDict

import torch

from mcore_rl.distributed.batched_data_dict import BatchedDataDict


class GenerationDatumSpec(TypedDict):
    """Prompts.

    input_ids: [B, S] right-padded.
    input_lengths: [B].
    sample_ids: [B] integers that tell samples apart: with the seed they fix the random numbers of each,
        whatever the layout and whatever else is in the batch. The row numbers, if left out.
    """

    input_ids: torch.Tensor
    input_lengths: torch.Tensor
    sample_ids: NotRequired[torch.Tensor]


class GenerationOutputSpec(TypedDict):
    """Prompts with their responses.

    output_ids: [B, S'] prompt and response, right-padded; a stop token is part of the response.
    logprobs: [B, S'] of the response's tokens under the sampling temperature and the whole vocabulary
        (before top-k, top-p and min-p), aligned with `output_ids`; 0 elsewhere.
    generation_lengths: [B] tokens of each response, at least 1.
    unpadded_sequence_lengths: [B] tokens of prompt and response.
    truncated: [B] True where the limit of new tokens ended the response.
    routed_experts: [B, S', layers with experts, topk] int16, the experts of each token that was fed to the model, −1
        elsewhere, such as at the last token of a response; if they are recorded.
    """

    output_ids: torch.Tensor
    logprobs: torch.Tensor
    generation_lengths: torch.Tensor
    unpadded_sequence_lengths: torch.Tensor
    truncated: torch.Tensor
    routed_experts: NotRequired[torch.Tensor]


class GenerationInterface(ABC):
    """Something that continues prompts; every call is made on all ranks with the same prompts."""

    @abstractmethod
    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """A response to each row."""

    @abstractmethod
    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Make ready for `generate`; True if all went well."""

    @abstractmethod
    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Release what only generation needs; True if all went well."""
