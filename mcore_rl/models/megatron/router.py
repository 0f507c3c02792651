"""The router of a mixture's layer: which experts a token goes to, and with which weights.

In fp32 whatever the precision of the model, as small differences of scores choose other experts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_rl.models.megatron.attention import PackParams
from mcore_rl.models.megatron.families.mixture import Experts

from megatron.core.transformer.moe.moe_layer import MoELayer  # isort: skip
from megatron.core.transformer.moe.router import TopKRouter  # isort: skip
from megatron.core.transformer.transformer_config import TransformerConfig  # isort: skip
from megatron.core.transformer.transformer_layer import TransformerLayer  # isort: skip


class PackLayer(TransformerLayer):
    """Megatron's layer, whose router is told which pack its tokens are of, also when they are computed again."""

    def forward(self, *args: Any, packed_seq_params: PackParams | None = None, **kwargs: Any) -> Any:
        if isinstance(self.mlp, MoELayer):
            self.mlp.router.pack = packed_seq_params
        return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)


class Router(TopKRouter):
    """Megatron's router with the scores and the choice of the family's experts.

    pack: what the tokens are of.
    """

    pack: PackParams | None = None

    def __init__(self, config: TransformerConfig, experts: Experts, **kwargs: Any) -> None:
        super().__init__(config=config, **kwargs)
        self.experts = experts

    def gating(self, input: Tensor) -> Tensor:
        """[T, 1, hidden] → [T, 1, experts] logits in fp32."""
        return F.linear(input.float(), self.weight.float())

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Weights [T, experts] in fp32, 0 where an expert is not chosen, and whether it is."""
        logits = logits.flatten(0, -2)
        chosen = self._choose(logits.detach())
        weights = self._weights(logits, chosen)
        spread = torch.zeros_like(logits).scatter(1, chosen, weights)
        routing_map = torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True)
        return spread, routing_map

    def _choose(self, logits: Tensor) -> Tensor:
        """[T, topk] the experts with the best scores, from the groups with the best pairs of them."""
        experts = self.experts
        scores = logits.sigmoid() if experts.score == "sigmoid" else logits.softmax(-1)
        if experts.selection_bias:
            scores = scores + self.expert_bias
        if experts.groups > 1:
            grouped = scores.unflatten(1, (experts.groups, -1))
            best = grouped.topk(2, dim=-1).values.sum(-1).topk(experts.group_topk, dim=-1).indices
            kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, True)
            scores = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1)
        return scores.topk(experts.topk, dim=-1).indices

    def _weights(self, logits: Tensor, chosen: Tensor) -> Tensor:
        """[T, topk] of the chosen experts."""
        experts = self.experts
        if experts.score == "softmax":
            normaliser = logits.gather(1, chosen) if experts.normalise else logits
            weights = (logits.gather(1, chosen) - normaliser.logsumexp(-1, keepdim=True)).exp()
        else:
            weights = logits.gather(1, chosen).sigmoid()
            if experts.normalise:
                weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights if experts.scale is None else weights * experts.scale
