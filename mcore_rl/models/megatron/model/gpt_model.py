"""The model of this rank: Megatron's GPTModel that returns hidden states, and the chunks of a pipeline stage.

The caller multiplies the hidden states with the LM head: `mcore_rl.distributed.logprobs` computes log-probabilities
from them and the shard of the LM head, without storing logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from mcore_rl.config.fp8 import FP8Config
from mcore_rl.distributed.topology import ParallelDimension, Topology
from mcore_rl.models.megatron.families import Family
from mcore_rl.models.megatron.layers.per_layer_inputs import PerLayerInputs, split_inputs, with_inputs
from mcore_rl.models.megatron.layers.transformer_layer import without_gradient_of
from mcore_rl.models.megatron.layers.vision import VisionTower, build_tower
from mcore_rl.models.megatron.model.lora import LoRA
from mcore_rl.models.megatron.model.token_prediction import TokenPrediction

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class PendingGather(Protocol):
    """Interface of `ParameterGather`: it gathers updated weights from other replicas in the background."""

    def settle(self) -> None: ...

    def wait_for(self, weight: Tensor) -> None: ...


class HiddenStateGPTModel(GPTModel):
    """A GPTModel whose last stage returns its final hidden states, [T / CP (/ TP with SP), hidden]."""

    gather: PendingGather | None = None
    """Gathers updated weights from the other replicas; None if the optimizer step itself gathers them."""
    tower: VisionTower | None = None
    """The vision tower, in the first chunk of a model that reads images. Its module is the chunk's child `visual`.
    (A class attribute of this name would hide the child.)"""

    per_layer_inputs: PerLayerInputs | None = None
    """Description of the layers' own inputs; None if they have none."""

    def set_tower(self, tower: VisionTower, config: Any, recompute: bool) -> None:
        """Build the tower's module as a child of this chunk.

        Args:
            config: transformers' configuration of the tower.
            recompute: keep only the input of each of its layers for the backward pass.
        """
        module: Any = build_tower(config, self.config.params_dtype)
        module.requires_grad_(tower.is_trained)
        if recompute and tower.is_trained:
            module.gradient_checkpointing_enable({"use_reentrant": False})  # pixels need no gradient
        self.visual, self.tower, tower.module = module, tower, module

    def forward(self, input_ids: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        images = getattr(kwargs.get("packed_seq_params"), "images", None)
        if images is not None and self.pre_process:
            if self.gather is not None:  # on all ranks, also those without images: waiting may start a collective
                for weight in images.tower.parameters():
                    self.gather.wait_for(weight)
            embedded = self.embedding(input_ids=input_ids, position_ids=position_ids)
            kwargs["decoder_input"] = images.put_into(embedded)
        pack: Any = kwargs.get("packed_seq_params")
        if (inputs := self.per_layer_inputs) is not None and self.pre_process:
            embedded = self.embedding(input_ids=input_ids, position_ids=position_ids)
            kwargs["decoder_input"], pack.per_layer = embedded, self.embedding.per_layer(input_ids, embedded)
        elif inputs is not None:
            hidden, pack.per_layer = split_inputs(self.decoder.input_tensor, self.config.num_layers, inputs.size)
            self.decoder.set_input_tensor(hidden)
        output: Tensor = super().forward(input_ids, position_ids, *args, **kwargs)
        if inputs is not None and not self.post_process:
            rows = inputs.rows(self.config.num_layers, self.config.hidden_size)
            output = with_inputs(output, pack.per_layer, rows)
        if pack is not None:  # the pack outlives the chunk's graph
            pack.shared.clear()
            pack.per_layer = None
        return output

    @property
    def prediction(self) -> TokenPrediction | None:
        """The layers that predict further tokens, in the last chunk of a model that trains them."""
        return cast("TokenPrediction | None", self._modules.get("mtp"))

    def embedding_weight(self) -> Tensor:
        """Return the shard of the embedding [Vp, hidden] that `prediction` reads."""
        assert self.prediction is not None, "only the last chunk reads it"
        if self.pre_process:
            return cast(Tensor, self.embedding.word_embeddings.weight)
        return self.lm_head_weight() if self.prediction.table is None else self.prediction.table

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        pack = kwargs.get("packed_seq_params")
        if self.prediction is not None and pack is not None and pack.later:
            weights = self.embedding_weight(), self.lm_head_weight()
            hidden_states = self.prediction.attach(hidden_states, *weights, kwargs["rotary_pos_emb"], pack)
        return hidden_states.squeeze(1) if self.post_process else hidden_states

    def set_reward_head(self, config: TransformerConfig) -> None:
        """Replace the LM head by a head with one output per token."""
        self.output_layer = RewardHead(config)

    def lm_head_weight(self) -> Tensor:
        """Return this rank's shard of the LM head, [Vp, hidden], for the padded vocabulary.

        With tied weights it is the embedding.
        """
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        if self.gather is not None:
            self.gather.wait_for(weight)
        return weight


class RewardHead(MegatronModule):
    """A linear layer with one output, replicated on every tensor-parallel rank."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config=config)
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden states [T, hidden] to outputs [T], computed in fp32."""
        return (hidden.float() @ self.weight.float().T).squeeze(-1)


@dataclass(frozen=True)
class ModelShard:
    """The model chunks of one pipeline stage, with their family, topology and adapters."""

    chunks: list[HiddenStateGPTModel]
    family: Family
    topology: Topology
    stages: tuple[int, ...]
    """Pipeline stage of each layer of the whole model."""
    lora: LoRA | None = None
    """Adapters of the model. If there are adapters, only they are trained."""
    tower: VisionTower | None = None
    """The vision tower of a model that reads images, on every rank; only the first stage has its module."""
    logits_bytes: float = 0.0
    """Memory for the logits of a microbatch: `model.logits_memory_gib` in bytes."""
    fp8: FP8Config | None = None
    """How products of linear layers are computed in FP8; None if they are not."""

    @property
    def vocab_size(self) -> int:
        return self.family.vocab_size

    @property
    def num_ids(self) -> int:
        """Number of ids that have a probability; see `Family`."""
        return self.family.num_ids

    def finish_param_gather(self) -> None:
        """Wait for a pending all-gather of the weights. Collective over the replicas.

        Training waits for the weights itself. Call this method before any other code reads them.
        """
        for chunk in self.chunks:
            if chunk.gather is not None:
                chunk.gather.settle()

    def layer_numbers(self) -> list[int]:
        """Return the indices that this rank's layers have in the whole model, chunk after chunk."""
        return [int(layer.layer_number) - 1 for chunk in self.chunks for layer in chunk.decoder.layers]

    @property
    def first_expert(self) -> int:
        """Index of this rank's first expert among all experts of a layer."""
        return self.topology.expert.rank * self.experts_per_rank

    @property
    def row_multiple(self) -> int:
        """Multiple to which each rank's tokens must be padded in a pass without gradient; 1 without FP8."""
        if self.fp8 is None:
            return 1
        return self.fp8.token_multiple if self.topology.sequence_parallel else self.fp8.size_multiple

    @property
    def experts_per_rank(self) -> int:
        """Number of experts of a layer on each expert-parallel rank; 0 for a model without experts."""
        return (self.chunks[0].config.num_moe_experts or 0) // self.topology.expert.size


def hold_padding_row(
    module: Any, inputs: Any, named: dict[str, Any], embedded: Tensor, token: int, ranks: ParallelDimension
) -> Tensor:
    """Forward hook of the embedding that sets the gradient of one token's row to 0; see `without_gradient_of`."""
    return without_gradient_of(token, embedded, named["input_ids"], ranks)
