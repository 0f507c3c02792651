"""How evenly a step's tokens went to the experts: metrics, and the biases that even it out without a gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mcore_rl import platform
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.distributed.collectives import all_reduce
from mcore_rl.distributed.own_rows import share_of
from mcore_rl.models.megatron.build import BuiltModel
from mcore_rl.models.megatron.families.mixture import Mixture
from mcore_rl.models.megatron.router import Router, RouterLoad

from megatron.core.transformer.moe.moe_layer import MoELayer


def routers_of(model: BuiltModel) -> list[Router]:
    """This rank's, in the order of their layers."""
    return [module for chunk in model.chunks for module in chunk.modules() if isinstance(module, Router)]


def begin_step(model: BuiltModel, data: BatchedDataDict[Any]) -> int:
    """Let the routers note the load of a global batch, and know its numbers of sequences and tokens; the latter.

    Collective, of a replica's own rows.
    """
    mask = data["sample_mask"].double()  # exact beyond 2^24 tokens
    counted = float(mask.sum()), float((mask * data["input_lengths"]).sum())
    sequences, tokens = torch.tensor(share_of(data).sum(*counted), dtype=torch.float64)
    for layer in (module for chunk in model.chunks for module in chunk.modules() if isinstance(module, MoELayer)):
        counts = (count.clamp(min=1).to(platform.device()) for count in (sequences, tokens))
        layer.router.load = layer.experts.load = RouterLoad(*counts)
    return int(tokens)


class GlobalLoad:
    """The load of a whole step, on every rank. Collective.

    tokens: [sparse layers, experts] that were sent to each expert, of the sequences that count.
    dropped: [sparse layers] of the choices of these tokens, those that reached no expert.
    means: [sparse layers, 3] entropy of the scores (nats), balance loss and z-loss, without their coefficients.

    Args:
        num_tokens: of the sequences that count.
    """

    def __init__(self, model: BuiltModel, num_tokens: int) -> None:
        assert isinstance(model.family, Mixture), "only mixtures route"
        experts, topology = model.family.experts, model.topology
        local = torch.zeros(
            sum(experts.sparse_layers), experts.count + 4, dtype=torch.float64, device=platform.device()
        )
        for router in routers_of(model):
            load = router.load
            if load is not None and isinstance(load.tokens, Tensor):
                # Every rank of an expert's tensor parallelism receives all of its tokens.
                reached = load.received / topology.expert_tensor.size - load.uncounted
                rest = [torch.as_tensor(x).to(local) for x in (load.entropy, load.balance, load.z, reached)]
                local[router.index] = torch.cat((load.tokens.double(), torch.stack(rest)))
        dimensions = [topology.context, topology.data, topology.pipeline]
        if topology.sequence_parallel:
            dimensions.append(topology.tensor)
        for dimension in dimensions:
            local = all_reduce(local, dimension.group)
        self.tokens, self.means = local[:, : experts.count], local[:, experts.count : -1]
        self.dropped = num_tokens * experts.topk - local[:, -1]
        self.balances = bool(model.chunks[0].config.moe_aux_loss_coeff)
        self.layers = [layer for layer, sparse in enumerate(experts.sparse_layers) if sparse]

    def metrics(self) -> dict[str, float]:
        """Return the fullest expert over the mean one, dropped choices and entropy by layer, and the summed losses."""
        fullest = (self.tokens.amax(1) / self.tokens.mean(1).clamp(min=1e-30)).tolist()
        entropy, balance, z = self.means.unbind(1)
        return {
            **{f"moe_load/layer_{layer}": x for layer, x in zip(self.layers, fullest, strict=True)},
            **{f"moe_dropped/layer_{layer}": x for layer, x in zip(self.layers, self.dropped.tolist(), strict=True)},
            **{f"moe_entropy/layer_{layer}": x for layer, x in zip(self.layers, entropy.tolist(), strict=True)},
            **({"moe_aux_loss": float(balance.sum())} if self.balances else {}),
            "moe_z_loss": float(z.sum()),
        }

    def update_biases(self, model: BuiltModel, rate: float) -> None:
        """Move the bias of experts with fewer tokens than the mean up by `rate`, of others down (arXiv:2408.15664)."""
        for router in routers_of(model):
            tokens = self.tokens[router.index]
            router.expert_bias += rate * torch.sign(tokens.mean() - tokens).to(router.expert_bias)
