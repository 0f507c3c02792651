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
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_rl.distributed.collectives import all_reduce
from mcore_rl.distributed.logprobs import gather_hidden_states, linear_logprobs
from mcore_rl.distributed.topology import Topology
from mcore_rl.models.megatron.layers.packs import LaterTokens, PackParams, RoutedTokens
from mcore_rl.models.megatron.layers.parameters import ShardedModuleList
from mcore_rl.models.megatron.layers.transformer_layer import AttachedLoss, ReplicatedLinear, recomputed

from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset


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
        self.layers: Any = ShardedModuleList([PredictionLayer(config, norm, spec, vp_stage, groups) for spec in blocks])
        self.scaling_factor, self.topology, self.num_ids = scaling_factor, topology, num_ids
        self.register_buffer("table", None, persistent=False)

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
