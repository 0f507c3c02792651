"""Statistics of a training step over the whole model: the routing of tokens, and the loss of further tokens (MTP)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mcore_rl import platform
from mcore_rl.distributed.batched_data_dict import BatchedDataDict, batch_share
from mcore_rl.distributed.collectives import all_reduce
from mcore_rl.models.megatron.families.mixtures import Mixture
from mcore_rl.models.megatron.layers.packs import weights_of_predictions
from mcore_rl.models.megatron.moe.router import Router, RouterStatistics

from megatron.core.transformer.moe.moe_layer import MoELayer

if TYPE_CHECKING:
    from mcore_rl.models.megatron.model.gpt_model import ModelShard


def routers_of(model: ModelShard) -> list[Router]:
    """Return this rank's routers in the order of their layers, without those of layers that predict further tokens."""
    return [module for chunk in model.chunks for module in chunk.decoder.modules() if isinstance(module, Router)]


def reset_router_statistics(model: ModelShard, data: BatchedDataDict[Any]) -> int:
    """Start new statistics of all routers for a global batch; return the number of its unmasked tokens. Collective.

    Args:
        data: this replica's rows of the global batch.
    """
    mask = data["sample_mask"].double()  # exact beyond 2^24 tokens
    counted = float(mask.sum()), float((mask * data["input_lengths"]).sum())
    totals = torch.tensor(batch_share(data).sum(*counted), dtype=torch.float64)
    sequences, tokens = platform.sent(totals.clamp(min=1), platform.device()).unbind()
    for layer in (m for chunk in model.chunks for m in chunk.decoder.modules() if isinstance(m, MoELayer)):
        layer.router.load = layer.experts.load = RouterStatistics(sequences, tokens)
    return int(totals[1])


class StepRouterStatistics:
    """The routing statistics of a training step, summed over all ranks. The constructor is collective.

    Only sequences that are not masked are included. "layers" are those layers that have experts.
    tokens: [layers, experts], number of tokens that were sent to each expert.
    dropped: [layers], number of choices that reached no expert.
    means: [layers, 3], entropy of the scores (nats), balance loss and z-loss, without coefficients.

    Args:
        num_tokens: number of tokens of the sequences that are not masked.
    """

    def __init__(self, model: ModelShard, num_tokens: int) -> None:
        assert isinstance(model.family, Mixture), "only mixtures route"
        experts, topology = model.family.experts, model.topology
        local = torch.zeros(
            sum(experts.sparse_layers), experts.count + 4, dtype=torch.float64, device=platform.device()
        )
        for router in routers_of(model):
            load = router.load
            if load is not None and isinstance(load.tokens, Tensor):
                # Every rank of an expert's tensor-parallel group receives all of the expert's tokens.
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
        """Return the metrics of the routers.

        For each layer: the highest load of an expert divided by the mean load, the number of dropped choices, and the
        entropy. For the whole model: balance loss and z-loss, each summed over the layers.
        """
        fullest = self.tokens.amax(1) / self.tokens.mean(1).clamp(min=1e-30)
        values = torch.stack((fullest, self.dropped, *self.means.unbind(1)))  # the host waits for the device once
        load, dropped, entropy, balance, z = values.tolist()
        of_layers = {"moe_load": load, "moe_dropped": dropped, "moe_entropy": entropy}
        return {
            **{
                f"{name}/layer_{layer}": x
                for name, column in of_layers.items()
                for layer, x in zip(self.layers, column, strict=True)
            },
            **({"moe_aux_loss": sum(balance)} if self.balances else {}),
            "moe_z_loss": sum(z),
        }

    def update_biases(self, model: ModelShard, rate: float) -> None:
        """Update the biases for the choice of experts (arXiv:2408.15664).

        If an expert gets fewer tokens than the mean, its bias rises by `rate`; if it gets more, its bias falls by
        `rate`.
        """
        for router in routers_of(model):
            if router.token_experts is not None:
                continue
            tokens = self.tokens[router.index]
            router.expert_bias += rate * torch.sign(tokens.mean() - tokens).to(router.expert_bias)


def begin_prediction(model: ModelShard, data: BatchedDataDict[Any]) -> None:
    """Begin a training step of a model that trains layers that predict further tokens. Collective.

    If the first pipeline stage has the embedding, it sends its shard to the `table` of the last.

    Args:
        data: this replica's rows of the global batch.
    """
    depth, pipeline, last = model.family.mtp_depth, model.topology.pipeline, model.chunks[-1].prediction
    if pipeline.size > 1 and not model.family.ties_embeddings:
        model.finish_param_gather()
        if model.topology.is_first_stage:
            weight = model.chunks[0].embedding.word_embeddings.weight.detach()
            torch.distributed.send(weight, group=pipeline.group, group_dst=pipeline.size - 1)
        elif last is not None:
            assert last.table is not None, "made when the model was built"
            torch.distributed.recv(last.table, group=pipeline.group, group_src=0)
    own = [float(weights_of_predictions(data, k).double().sum()) for k in range(1, depth + 1)]
    total = torch.tensor(batch_share(data).sum(*own), dtype=torch.float64).clamp(min=1e-30)
    if last is not None:
        last.begin(platform.sent(total.float(), platform.device()))


def prediction_metrics(model: ModelShard) -> dict[str, float]:
    """Return `mtp_loss`, the mean −log p (nats) of the tokens that were predicted in the last step. Collective."""
    last, topology = model.chunks[-1].prediction, model.topology
    losses = last.losses if last is not None else None
    losses = torch.zeros(model.family.mtp_depth, device=platform.device()) if losses is None else losses
    for dimension in (topology.context, topology.data, topology.pipeline):
        losses = all_reduce(losses, dimension.group)
    return {"mtp_loss": float(losses.mean())}
