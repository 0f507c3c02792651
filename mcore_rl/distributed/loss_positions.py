"""The positions of a pack whose hidden states predict tokens that count: what a loss needs of the LM head."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_rl import platform
from mcore_rl.distributed.collectives import all_reduce_forward_all_reduce_backward
from mcore_rl.distributed.pack_layout import PackLayout


@dataclass(frozen=True)
class CountedPositions:
    """The positions of one context-parallel rank that the loss counts.

    n ≥ 1, so that collectives match: a rank without such positions keeps a dummy.

    All tensors are on the host until `on` sends them.

    layout: of the pack.
    index, counted: [N, S − 1]; where in the pack the tokens are that rows predict, and which of them count.
    tokens: [n] pack positions of counted tokens whose predictor this rank holds.
    predictors: [n] places of these predictors in this rank's hidden states.
    is_dummy: the one position stands for none.
    """

    layout: PackLayout
    index: Int[Tensor, "rows predicted"]
    counted: Bool[Tensor, "rows predicted"]
    tokens: Int[Tensor, " n"]
    predictors: Int[Tensor, " n"]
    is_dummy: bool

    @classmethod
    def of(cls, layout: PackLayout, mask: Float[Tensor, "rows predicted"], cp_rank: int) -> CountedPositions:
        """Return the positions that `mask` [N, S − 1] counts."""
        index, there = layout.token_table(mask.shape[1] + 1)
        index, counted = index[:, 1:], there[:, 1:] & (mask > 0)
        wanted = torch.zeros(layout.total, dtype=torch.bool)  # of the tokens that are predicted
        wanted[index[counted]] = True
        held = layout.local_positions(cp_rank)
        place = torch.full((layout.total + 1,), -1)  # of each position on this rank; the last: of no position
        place[held] = torch.arange(len(held))
        tokens = (wanted & (place[layout.predictor] >= 0)).nonzero().flatten()
        is_dummy = not len(tokens)
        tokens = torch.zeros(1, dtype=torch.long) if is_dummy else tokens
        return cls(layout, index, counted, tokens, place[layout.predictor[tokens]].clamp(min=0), is_dummy)

    def on(self, device: torch.device, *others: Tensor) -> tuple[CountedPositions, list[Tensor]]:
        """The same for values that are on `device`; and `others` of the host there, all by one copy."""
        own = self.index, self.counted, self.tokens, self.predictors
        index, counted, tokens, predictors, *there = platform.sent_together((*own, *others), device)
        return replace(self, index=index, counted=counted, tokens=tokens, predictors=predictors), there

    def pick(self, hidden: Float[Tensor, "local_tokens hidden"]) -> Float[Tensor, "n hidden"]:
        """Hidden states of the predictors; of a dummy zeros, whatever the model made of it, that pass gradients on."""
        picked = hidden[self.predictors]
        return picked.masked_fill(torch.ones_like(picked, dtype=torch.bool), 0) if self.is_dummy else picked

    def targets(self, input_ids: Int[Tensor, "rows seq"]) -> Int[Tensor, " n"]:
        """The tokens that are predicted; all on the host."""
        return self.layout.pack_rows(input_ids)[self.tokens]

    def inputs(self) -> Int[Tensor, " n"]:
        """Places of the predictors in the flattened rows [N·S]; all on the host, which a mask on the device would make
        wait."""
        index, there = self.layout.token_table(self.index.shape[1] + 1)
        place = torch.zeros(self.layout.total, dtype=torch.long)  # of each pack position in the rows
        place[index[there]] = there.flatten().nonzero().flatten()
        return place[self.layout.predictor[self.tokens].clamp(min=0)]

    def spread(
        self, values: Float[Tensor, n * rest], context_parallel_group: ProcessGroup | None
    ) -> Float[Tensor, rows * predicted_and_rest]:
        """[n, …] → [N, S − 1, …], whole on every context-parallel rank; 0 where nothing counts.

        Forward and backward: an all-reduce (see `gather_context_parallel` for what that means for the loss).
        """
        values = values * 0 if self.is_dummy else values
        packed = values.new_zeros(self.layout.total, *values.shape[1:])
        packed = packed.index_copy(0, self.tokens, values)
        packed = all_reduce_forward_all_reduce_backward(packed, context_parallel_group)
        counted = self.counted.view(*self.counted.shape, *(1,) * (values.ndim - 1))
        return torch.where(counted, packed[self.index], 0)
