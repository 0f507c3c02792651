"""Which token of a microbatch each token at a router is: for losses of routing, and experts chosen earlier."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_rl.data.batching import Microbatch
from mcore_rl.distributed.context_parallel import slice_context_parallel
from mcore_rl.distributed.topology import Topology

ROUTED_EXPERTS = "routed_experts"
"""Entry [B, S, sparse layers, topk] of a batch: the experts of each input token; −1 where they are not known."""


@dataclass(frozen=True)
class RoutedTokens:
    """The tokens [t] that this rank's routers see of a pack.

    sequence: [t] of each token, N where it is padding. weight: [t] its sequence's sample mask, 0 where it is padding.
    lengths: [N + 1] tokens of each sequence; 1 for padding.
    experts: [t, sparse layers, topk] chosen earlier, −1 where none were; None to choose anew.
    """

    sequence: Tensor
    weight: Tensor
    lengths: Tensor
    experts: Tensor | None = None

    @property
    def num_sequences(self) -> int:
        return len(self.lengths) - 1

    @classmethod
    def of(cls, microbatch: Microbatch, topology: Topology) -> RoutedTokens:
        """This rank's, under context and sequence parallelism; on the host."""
        layout, data = microbatch.layout, microbatch.data
        rows, width = data["input_ids"].shape
        place = layout.pack_rows(torch.arange(rows * width).view(rows, width), fill=-1)
        place = slice_context_parallel(place, layout, topology.context.rank)
        if topology.sequence_parallel:
            place = place.chunk(topology.tensor.size)[topology.tensor.rank]
        sequence = torch.where(place < 0, rows, place // width)
        mask = (
            torch.cat((data["sample_mask"].float(), torch.zeros(1))) if "sample_mask" in data else torch.zeros(rows + 1)
        )
        experts = None
        if ROUTED_EXPERTS in data:
            earlier = data[ROUTED_EXPERTS].flatten(0, 1)[place.clamp(min=0)].long()
            experts = torch.where((place < 0)[:, None, None], -1, earlier)
        return cls(sequence, mask[sequence], torch.tensor((*layout.lengths, 1), dtype=torch.float32), experts)

    def tensors(self) -> list[Tensor]:
        """Return the existing tensors in the order of the constructor."""
        return [self.sequence, self.weight, self.lengths, *([] if self.experts is None else [self.experts])]
