"""Multi-token prediction (MTP): layers after the model that predict further tokens (arXiv:2412.19437, section 2.2).

Layer k, from 1, reads the states h_k−1 of the layer before it (of the model, for k = 1) and the embeddings of later
tokens, and predicts the token after those:

    h_k(i) = norm(block(projection · [norm(embedding(t(i + k))); norm(h_k−1(i))])),    t(i + k + 1) ~ LM head · h_k(i)

Embedding and LM head are those of the model. The loss is scaling factor / depth · Σ_k (mean of −log p over the counted
tokens of the global batch). It trains only the weights of these layers: the states of the model, its embedding and its
LM head get no gradient from it, so the model is trained as it would be without these layers.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_rl import platform
from mcore_rl.data.batching import Microbatch
from mcore_rl.distributed.batched_data_dict import BatchedDataDict, batch_share
from mcore_rl.distributed.collectives import all_reduce
from mcore_rl.distributed.logprobs import gather_hidden_states, linear_logprobs
from mcore_rl.distributed.packs import slice_context_parallel
from mcore_rl.distributed.topology import Topology
from mcore_rl.models.megatron.attention import PackParams
from mcore_rl.models.megatron.layers import AttachedLoss, ReplicatedLinear, recomputed
from mcore_rl.models.megatron.moe import RoutedTokens

from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

if TYPE_CHECKING:
    from mcore_rl.models.megatron.build import ModelShard


@dataclass(frozen=True)
class LaterTokens:
    """The tokens that a pack's hidden states lead to, for one layer that predicts tokens, on this rank.

    embedded: [T / CP], the token whose embedding the layer reads; any token where the row ends before it.
    predicted: [T / CP], the token that it predicts.
    weight: [T / CP], fp32, the token's factor in the loss; 0 where the row ends before it.
    """

    embedded: Tensor
    predicted: Tensor
    weight: Tensor

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return all tensors in the order of the constructor's arguments."""
        return self.embedded, self.predicted, self.weight


def later_tokens(microbatch: Microbatch, depth: int, topology: Topology) -> list[LaterTokens]:
    """Return the later tokens for layers 1 to `depth`, in host memory."""
    data, layout = microbatch.data, microbatch.layout

    def own(rows: Tensor) -> Tensor:
        return slice_context_parallel(layout.pack_rows(rows), layout, topology.context.rank)

    ids = data["input_ids"]
    return [
        LaterTokens(own(_ahead(ids, k)), own(_ahead(ids, k + 1)), own(weights_of_predictions(data, k)))
        for k in range(1, depth + 1)
    ]


def _ahead(rows: Tensor, count: int) -> Tensor:
    """Return for each place of the rows [N, S] the value `count` places later; 0 beyond the last column."""
    return F.pad(rows[:, count:], (0, min(count, rows.shape[1])))


def weights_of_predictions(data: BatchedDataDict[Any], k: int) -> Tensor:
    """Return for each token of the rows, [N, S] fp32, the factor of the token that layer `k` predicts there.

    It is the product of that token's `token_mask` and of its row's `sample_mask`; 0 if the row ends before.
    """
    mask = _ahead(data["token_mask"].float(), k + 1) * data["sample_mask"].float()[:, None]
    places = torch.arange(mask.shape[1]) + k + 1
    return mask * (places < data["input_lengths"][:, None])


class PredictionLayer(MegatronModule):
    """A layer that predicts a further token. It has one transformer layer, whose layer number is 1."""

    def __init__(
        self, config: TransformerConfig, norm: Any, block: ModuleSpec, vp_stage: int | None, groups: Any
    ) -> None:
        super().__init__(config=config)
        size, eps = config.hidden_size, config.layernorm_epsilon
        self.enorm, self.hnorm, self.final_layernorm = (norm(config, hidden_size=size, eps=eps) for _ in range(3))
        self.eh_proj = ReplicatedLinear(config, 2 * size, size)
        # Megatron adds the number of the layers before this stage.
        number = 1 - get_transformer_layer_offset(config, vp_stage, groups.pp.rank())
        self.transformer_layer = build_module(
            block, config=config, layer_number=number, vp_stage=vp_stage, pg_collection=groups
        )

    @property
    def mtp_model_layer(self) -> Any:
        """The transformer layer.

        The schedules of Megatron-Core 0.19 read it under this name, those of 0.16 as `transformer_layer`, which is also
        its name in checkpoints.
        """
        return self.transformer_layer

    def forward(self, hidden: Tensor, embedded: Tensor, rotary: Any, pack: PackParams) -> Tensor:
        """Return the layer's states [T / CP (/ TP with SP), 1, hidden].

        Args:
            hidden: states of the layer before. embedded: embeddings of later tokens; both have the result's shape.
            rotary: Megatron's `rotary_pos_emb` for the block.
        """

        def states(hidden: Tensor, embedded: Tensor) -> Tensor:
            joined = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), -1))
            out, _ = self.transformer_layer(joined, attention_mask=None, rotary_pos_emb=rotary, packed_seq_params=pack)
            normed: Tensor = self.final_layernorm(out)
            return normed

        if self.config.recompute_granularity == "full":
            again: Tensor = recomputed(states, hidden, embedded)
            return again
        return states(hidden, embedded)


class TokenPrediction(MegatronModule):
    """The layers that predict further tokens, in the last chunk of the model.

    table: [Vp, hidden], a copy of this rank's shard of the embedding, if the first stage has it; otherwise None.
    total: [depth], sums of the weights of all predictions of the global batch; None outside of a training step.
    losses: [depth], fp32, this rank's parts of the mean −log p in the training step.

    Args:
        blocks: spec of the block of each layer.
    """

    table: Tensor | None
    total: Tensor | None = None
    losses: Tensor | None = None

    def __init__(
        self,
        config: TransformerConfig,
        norm: Any,
        blocks: list[ModuleSpec],
        scaling_factor: float,
        topology: Topology,
        num_ids: int,
        vp_stage: int | None,
        groups: Any,
    ) -> None:
        super().__init__(config=config)
        self.layers: Any = torch.nn.ModuleList(
            [PredictionLayer(config, norm, spec, vp_stage, groups) for spec in blocks]
        )
        self.scaling_factor, self.topology, self.num_ids = scaling_factor, topology, num_ids
        self.register_buffer("table", None, persistent=False)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Return Megatron's sharded state dict of all layers."""
        described: dict[str, Any] = {}
        for k, layer in enumerate(self.layers):
            described |= layer.sharded_state_dict(f"{prefix}layers.{k}.", sharded_offsets, metadata)
        return described

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len(self.layers)

    def begin(self, total: Tensor) -> None:
        """Begin a training step, in whose global batch the weights of each layer's predictions sum to `total`."""
        self.total, self.losses = total, torch.zeros_like(total, dtype=torch.float32)

    def attach(self, hidden: Tensor, embedding: Tensor, head: Tensor, rotary: Any, pack: PackParams) -> Tensor:
        """Return the model's last states `hidden`, [T / CP (/ TP with SP), 1, hidden], unchanged.

        When their gradient is computed, this rank's part of the loss is differentiated too.

        Args:
            embedding, head: this rank's shards of the embedding and the LM head, [Vp, hidden].
        """
        assert self.total is not None and self.losses is not None, "a training step has begun"
        routed = replace(pack.routed, experts=None) if isinstance(pack.routed, RoutedTokens) else None
        states, loss = hidden.detach(), hidden.new_zeros((), dtype=torch.float32)
        for k, (layer, tokens) in enumerate(zip(self.layers, pack.later, strict=True)):
            # Each block chooses keys and experts of its own, and has number 1.
            own = copy.copy(pack)
            own.chosen, own.recorded, own.routed = {}, {}, routed
            states = layer(states, self._embedded(tokens.embedded, embedding), rotary, own)
            mean = self._negative_logprobs(states, tokens, head.detach()) / self.total[k]
            self.losses[k] += mean.detach()
            loss = loss + mean
        attached: Tensor = AttachedLoss.apply(hidden, self.scaling_factor / self.depth * loss)
        return attached

    @torch.no_grad()
    def _embedded(self, ids: Tensor, embedding: Tensor) -> Tensor:
        """Return the embeddings of `ids` [T / CP], [T / CP (/ TP with SP), 1, hidden], of all vocabulary shards."""
        tensor, own = self.topology.tensor, ids - self.topology.tensor.rank * len(embedding)
        here = (own >= 0) & (own < len(embedding))
        found = F.embedding(own.clamp(0, len(embedding) - 1), embedding) * here[:, None].to(embedding.dtype)
        found = all_reduce(found, tensor.group)
        if self.topology.sequence_parallel:
            found = found.chunk(tensor.size)[tensor.rank]
        return found[:, None]

    def _negative_logprobs(self, states: Tensor, tokens: LaterTokens, head: Tensor) -> Tensor:
        """Return the weighted sum of −log p of the predicted tokens on this context-parallel rank.

        Only states whose weight is not 0 are multiplied with the LM head; at least one, so that all ranks call the same
        collectives.
        """
        tensor = self.topology.tensor
        states = gather_hidden_states(states.squeeze(1), tensor.group, self.topology.sequence_parallel)
        places = tokens.weight.nonzero()[:, 0]
        places = places if len(places) else places.new_zeros(1)
        logprobs, _ = linear_logprobs(states[places], head, tokens.predicted[places], tensor.group, self.num_ids)
        return -(logprobs * tokens.weight[places]).sum()


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
