"""Megatron's GPTModel, ending at the hidden states.

The vocabulary projection is left to the caller: log-probabilities are computed from hidden states
and the LM-head shard without the logits (`mcore_rl.distributed.linear_logprobs`), and who needs
logits multiplies explicitly.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from mcore_rl import platform
from mcore_rl.config import ModelConfig, ParallelConfig
from mcore_rl.distributed.topology import ParallelDimension, Topology
from mcore_rl.models.megatron.balanced_routing import balance_routing
from mcore_rl.models.megatron.families import Family, family_of
from mcore_rl.models.megatron.hf_config import transformer_config
from mcore_rl.models.megatron.layer_spec import block_spec
from mcore_rl.models.megatron.lora import LoRA
from mcore_rl.models.megatron.parallel_state import process_groups
from mcore_rl.models.megatron.rope import PackedRotaryEmbedding
from mcore_rl.models.megatron.weight_mapping import padded_vocab_size

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class PendingGather(Protocol):
    """Weights that may still be on their way from other replicas; as `ParameterGather`."""

    def settle(self) -> None: ...

    def wait_for(self, weight: Tensor) -> None: ...


class HiddenStateGPTModel(GPTModel):
    """A GPTModel whose last stage returns its final hidden states, [T / CP (/ TP with SP), hidden]."""

    gather: PendingGather | None = None
    """Brings its updated weights from the other replicas, if that is not done by the optimizer step."""

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states.squeeze(1) if self.post_process else hidden_states

    def set_reward_head(self, config: TransformerConfig) -> None:
        """Replace the vocabulary's logits by a number for each token."""
        self.output_layer = RewardHead(config)

    def lm_head_weight(self) -> Tensor:
        """[Vp, hidden] of the padded vocabulary; the embedding itself where the two are tied."""
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        if self.gather is not None:
            self.gather.wait_for(weight)
        return weight


class RewardHead(MegatronModule):
    """hidden → 1, whole on every tensor-parallel rank."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config=config)
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        """[T, hidden] → [T] fp32."""
        return (hidden.float() @ self.weight.float().T).squeeze(-1)


@dataclass(frozen=True)
class BuiltModel:
    """The chunks of one pipeline stage, and what they were built from."""

    chunks: list[HiddenStateGPTModel]
    family: Family
    topology: Topology
    stages: tuple[int, ...]
    """The pipeline stage of each layer of the whole model."""
    lora: LoRA | None = None
    """The adapters, which alone are trained where there are some."""

    @property
    def vocab_size(self) -> int:
        return self.family.vocab_size

    def settle_weights(self) -> None:
        """Make the weights whole on every rank, before anything but training takes them; collective over replicas."""
        for chunk in self.chunks:
            if chunk.gather is not None:
                chunk.gather.settle()

    def layer_numbers(self) -> list[int]:
        """Numbers in the whole model of this rank's layers, chunk after chunk."""
        return [int(layer.layer_number) - 1 for chunk in self.chunks for layer in chunk.decoder.layers]

    @property
    def first_expert(self) -> int:
        """Number of this rank's first expert."""
        return self.topology.expert.rank * self.experts_per_rank

    @property
    def experts_per_rank(self) -> int:
        """Experts of a layer that every rank of the expert-parallel group holds; 0 where there are none."""
        return (self.chunks[0].config.num_moe_experts or 0) // self.topology.expert.size


def build_model(
    hf: Any, model: ModelConfig, parallel: ParallelConfig, topology: Topology, memory: bool = True
) -> BuiltModel:
    """This rank's part of the model, its weights not yet set, on the run's device.

    Without `memory` its parameters have shapes alone (torch's meta device), as on a simulated device. Made elsewhere
    and moved there they would lose the marks that Megatron sets on them.
    """
    memory = memory and not platform.simulates()
    family = family_of(hf)
    config = transformer_config(family, model, parallel)
    count = parallel.chunks_per_stage
    chunks = []
    for index in range(count):
        spec = block_spec(config, family, topology.pipeline.rank, index if count > 1 else None)
        with nullcontext() if memory else torch.device("meta"):
            chunk = _build_chunk(family, config, spec, topology, index, count)
        if platform.simulates():
            balance_routing(chunk)
        chunk.rotary_pos_emb = PackedRotaryEmbedding(family.ropes(), process_groups())
        chunks.append(chunk.to(platform.device()) if memory else chunk)
    # Megatron 0.19 builds norms of queries and keys only with this; with this it also sums their gradients over
    # tensor-parallel ranks, which is wrong where each holds a part of the weight.
    config.qk_layernorm = family.has_qk_norm
    return BuiltModel(chunks, family, topology, tuple(parallel.stages_of_layers(family.num_layers)))


class _MaskedGradient(torch.autograd.Function):
    """Identity whose gradient is 0 where `keep` is False."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Tensor) -> Tensor:
        ctx.save_for_backward(keep)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (keep,) = ctx.saved_tensors
        return grad * keep, None


def _hold_padding_row(
    module: Any, inputs: Any, named: dict[str, Any], embedded: Tensor, token: int, ranks: ParallelDimension
) -> Tensor:
    """Give the padding token's embedding no gradient as an input, as `padding_idx` does in transformers.

    Args:
        embedded: [T or T / TP (sequence parallelism), 1, hidden].
    """
    if not embedded.requires_grad:
        return embedded
    ids = named["input_ids"].T  # [T, 1]
    if len(embedded) != len(ids):
        ids = ids.chunk(ranks.size)[ranks.rank]
    return _MaskedGradient.apply(embedded, (ids != token)[..., None].to(embedded.dtype))


def _build_chunk(
    family: Family, config: TransformerConfig, spec: Any, topology: Topology, index: int, count: int
) -> HiddenStateGPTModel:
    """Chunk `index` of the `count` of this pipeline stage."""
    chunk = HiddenStateGPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=padded_vocab_size(family.vocab_size, topology.tensor.size),
        max_sequence_length=family.hf.max_position_embeddings,
        pre_process=topology.is_first_stage and index == 0,
        post_process=topology.is_last_stage and index == count - 1,
        share_embeddings_and_output_weights=family.ties_embeddings,
        position_embedding_type="rope",
        pg_collection=process_groups(),
        vp_stage=index if count > 1 else None,
    )
    if chunk.post_process and family.has_reward_head:
        chunk.set_reward_head(config)
    if chunk.pre_process and family.padding_token is not None:
        hold = functools.partial(_hold_padding_row, token=family.padding_token, ranks=topology.tensor)
        chunk.embedding.register_forward_hook(hold, with_kwargs=True)
    if chunk.pre_process and family.embedding_scale != 1:
        scale = torch.tensor(family.embedding_scale, dtype=config.params_dtype, device="cpu").item()
        chunk.embedding.register_forward_hook(lambda module, inputs, embedded: embedded * scale)
    return chunk
