"""Layers with scaled outputs, and with inputs of their own: embeddings of the tokens that each layer has (Gemma 4).

After its MLP, a layer adds the product of such an input with a gate. The inputs of all layers are computed at once,
from a table with the columns of all layers, and from the model's own embedding.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from mcore_rl.distributed.topology import ParallelDimension
from mcore_rl.models.megatron.layers.transformer_layer import (
    PackLayer,
    ReplicatedLinear,
    RMSNorm,
    recomputed,
    without_gradient_of,
)
from mcore_rl.models.megatron.parallel_state import process_groups
from mcore_rl.models.megatron.weight_mapping import padded_vocab_size

from megatron.core.tensor_parallel import VocabParallelEmbedding
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig

if TYPE_CHECKING:
    from mcore_rl.models.megatron.layers.packs import PackParams


@dataclass(frozen=True)
class PerLayerInputs:
    """Describes the layers' own inputs.

    size: size of a layer's input. vocab_size: number of tokens in the table.
    padding_token: token whose row of the table gets no gradient; None if there is none.
    """

    size: int
    vocab_size: int
    padding_token: int | None

    def rows(self, layers: int, hidden: int) -> int:
        """Return the number of rows [hidden] that the inputs of all layers take for a token."""
        return -(-layers * self.size // hidden)


def with_inputs(
    hidden: Float[Tensor, "tokens 1 hidden"], inputs: Float[Tensor, "tokens 1 layers size"], rows: int
) -> Float[Tensor, "tokens all_rows hidden"]:
    """Return a message to the next pipeline stage: hidden states, and the layers' inputs, padded to `rows` rows."""
    flat = inputs.flatten(1)
    padded = F.pad(flat, (0, rows * hidden.shape[-1] - flat.shape[1]))
    return torch.cat((hidden, padded.unflatten(1, (rows, -1))), dim=1)


def split_inputs(
    message: Float[Tensor, "tokens all_rows hidden"], layers: int, size: int
) -> tuple[Float[Tensor, "tokens 1 hidden"], Float[Tensor, "tokens 1 layers size"]]:
    """Return the hidden states and the layers' inputs of a message that `with_inputs` has made."""
    flat = message[:, 1:].flatten(1)[:, : layers * size]
    return message[:, :1].contiguous(), flat.unflatten(1, (1, layers, size))


class PerLayerEmbedding(MegatronModule):
    """Computes the layers' own inputs.

    The table is divided over tensor-parallel ranks by its rows, as the model's embedding is; the projection is on each
    rank.
    """

    def __init__(self, config: TransformerConfig, inputs: PerLayerInputs, ranks: ParallelDimension) -> None:
        super().__init__(config=config)
        self.inputs, self.ranks = inputs, ranks
        width, dtype = config.num_layers * inputs.size, config.params_dtype
        self.table = VocabParallelEmbedding(
            padded_vocab_size(inputs.vocab_size, ranks.size),
            width,
            init_method=config.init_method,
            reduce_scatter_embeddings=config.sequence_parallel,
            config=config,
            tp_group=process_groups().tp,
        )
        self.projection = ReplicatedLinear(config, config.hidden_size, width)
        self.norm = RMSNorm(config, inputs.size, config.layernorm_epsilon)
        self.projection_scale = config.hidden_size**-0.5
        # transformers has this factor in the precision of the model.
        self.table_scale = torch.tensor(inputs.size**0.5, dtype=dtype, device="cpu").item()

    def forward(
        self, input_ids: Int[Tensor, "1 tokens"], embedded: Float[Tensor, "local_tokens 1 hidden"]
    ) -> Float[Tensor, "local_tokens 1 layers size"]:
        """Return (norm(projection · embedding / √hidden) + √size · table[token]) / √2 for each layer.

        Args:
            embedded: the model's embedding of the tokens, [T / CP (/ TP with SP), 1, hidden].
        """
        own = self.table(input_ids)
        own = own if self.table.reduce_scatter_embeddings else own.transpose(0, 1)
        if (token := self.inputs.padding_token) is not None:
            own = without_gradient_of(token, own, input_ids, self.ranks)
        projected = (self.projection(embedded) * self.projection_scale).unflatten(-1, (-1, self.inputs.size))
        return (self.norm(projected) + (own * self.table_scale).view_as(projected)) * 2.0**-0.5


class ScaledLayer(PackLayer):
    """A transformer layer whose output is multiplied by a constant of the layer.

    Args:
        input_size: size of the layer's own input; 0 if it has none.
    """

    def __init__(self, config: TransformerConfig, *args: Any, input_size: int = 0, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.layer_scalar = torch.nn.Parameter(torch.ones(1, dtype=config.params_dtype), requires_grad=False)
        self.input_size, self.recomputes = input_size, False
        if input_size:
            self.input_gate = ReplicatedLinear(config, config.hidden_size, input_size)
            self.input_projection = ReplicatedLinear(config, input_size, config.hidden_size)
            self.input_norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)

    def recompute(self) -> None:
        """Keep only the layer's inputs for the backward pass, and compute the layer again there.

        Megatron's own recomputation passes on gradients of the hidden states only, not those of the layer's own input
        and of keys and values that layers share.
        """
        self.recomputes = True
        self.self_attention.core_attention.keeps_gathered = True

    def _blocks(self, hidden_states: Tensor, *args: Any, packed_seq_params: PackParams, **kwargs: Any) -> Any:
        pack, mixer = packed_seq_params, self.self_attention.mixer
        own = None
        if self.input_size:
            assert pack.per_layer is not None, "the chunk computes the layers' inputs"
            own = pack.per_layer[:, :, self.layer_number - 1]
        if not self.recomputes:
            return self._compute(hidden_states, own, pack, *args, **kwargs), None

        def compute(hidden_states: Tensor, own: Tensor | None, *shared: Tensor) -> Any:
            of_layer = copy.copy(pack)
            of_layer.shared = {mixer.source: (shared[0], shared[1])} if shared else {}
            if isinstance(self.mlp, MoELayer):  # in the backward pass, the router may have another pack
                self.mlp.router.pack = pack
            hidden = self._compute(hidden_states, own, of_layer, *args, **kwargs)
            return hidden, *of_layer.shared.get(self.layer_number - 1, ())

        shared = () if mixer.source is None else pack.shared[mixer.source]
        hidden_states, *shared = recomputed(compute, hidden_states, own, *shared)
        if shared:
            pack.shared[self.layer_number - 1] = tuple(shared)
        return hidden_states, None

    def _compute(self, hidden: Tensor, own: Tensor | None, pack: PackParams, *args: Any, **kwargs: Any) -> Tensor:
        """Return the layer's output for hidden states and the layer's own input, if it has one."""
        hidden, _ = super()._blocks(hidden, *args, packed_seq_params=pack, **kwargs)
        if own is not None:
            gated = self.config.activation_func(self.input_gate(hidden)) * own
            hidden = hidden + self.input_norm(self.input_projection(gated))
        return hidden * self.layer_scalar
