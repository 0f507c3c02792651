"""Tokens that go to experts in equal shares, where only shapes are known: in a simulation.

What a rank sends and receives, multiplies and keeps depends on what is routed where, which a router without values
cannot tell. Megatron's dispatcher runs as it stands, with its collectives; it is told the shares instead of the counts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mcore_rl.models.megatron.parallel_state import process_groups

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher


class BalancedDispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's dispatcher, with as many tokens for each expert as for any other (to one, where that is a fraction).

    Ranks that share experts hold as many tokens as this one.
    """

    def preprocess(self, routing_map: Tensor) -> Tensor:
        """[T, experts] → [this rank's experts] tokens for each, from all ranks; on the host, as all counts are."""
        super().preprocess(routing_map).cpu()  # Megatron counts, ranks tell each other, and the host waits for it
        choices, ranks = len(routing_map) * self.config.moe_router_topk, self.tp_size * self.ep_size
        shares = (torch.arange(self.num_experts + 1, device="cpu") * choices // self.num_experts).diff()
        own = shares[self.local_expert_indices]
        self.input_splits = shares.view(self.ep_size, -1).sum(1)
        self.output_splits = own.sum().expand(self.ep_size)
        self.output_splits_tp = self.output_splits.sum().expand(self.tp_size)
        self.num_global_tokens_per_local_expert = own.expand(ranks, -1)
        return own * ranks


_kernels: list[torch.library.Library] = []
"""A kernel is there as long as its library is."""


def balance_routing(chunk: torch.nn.Module) -> None:
    """From now on the chunk's experts get equal shares of the tokens, whatever its routers choose.

    In this process a mask [experts, T] selects topk entries for each token: torch has no `masked_select` without
    values, whose number it could not know.
    """
    for layer in (module for module in chunk.modules() if isinstance(module, MoELayer)):
        layer.token_dispatcher = BalancedDispatcher(
            layer.num_local_experts, layer.local_expert_indices, layer.config, process_groups()
        )
        if not _kernels:
            _kernels.append(_selection(layer.config.moe_router_topk))


def _selection(topk: int) -> torch.library.Library:
    def masked_select(values: Tensor, mask: Tensor) -> Tensor:
        mask.any().item()  # a GPU tells the host how many they are
        return values.new_empty(mask.shape[-1] * topk)

    library: Any = torch.library.Library("aten", "IMPL")
    library.impl("masked_select", masked_select, "Meta")
    return library
