"""The model, and how it is shared out over processes."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from mcore_rl.config.base import AboveZero, BelowOne, Directory, Name, NonNegative, Positive, Section
from mcore_rl.config.pipeline import PipelineConfig
from mcore_rl.errors import UserError


class LoRAConfig(Section):
    """Low-rank adapters (arXiv:2106.09685) on linear layers, in fp32; they alone are trained."""

    rank: Positive | None = None
    """16 if not given, or that of `path`."""
    alpha: AboveZero | None = None
    """The adapters' product is multiplied with alpha / rank; 32 if not given, or that of `path`."""
    lr_ratio: AboveZero = 1.0
    """Learning rate of the matrices B (which begin as zeros) by that of the matrices A (LoRA+, arXiv:2402.12354)."""
    dropout: BelowOne = 0.0
    """Share of an adapter's inputs that are left out while training."""
    target_modules: tuple[Name, ...] = ()
    """Projections by their names in the Hugging Face model (`q_proj`, …; of mixtures' routed experts
    `experts.gate_up_proj`, `experts.down_proj`); if none is given, those of `path`, or all of attention and MLP (of
    mixtures of experts, of attention alone)."""
    path: Directory | None = None
    """A PEFT adapter to begin from."""


class ModelConfig(Section):
    """The model directory and how it is held."""

    path: Directory
    """A Hugging Face model directory, with its weights in safetensors and its tokenizer; or NAME or NAME@REVISION of
    a model on the hub, which is downloaded to its cache."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and activations; gradients and optimizer are in fp32."""
    head: Literal["lm", "reward"] = "lm"
    """reward: one number a sequence, from its last token, in place of the vocabulary."""
    trust_remote_code: bool = False
    """Run code that comes with the model's configuration and tokenizer."""
    lora: LoRAConfig | None = None
    """Train adapters; the model's own weights stay as they are."""
    recompute_activations: bool = False
    """Keep only each layer's input for the backward pass and compute the layer again."""
    recompute_modules: tuple[Literal["mlp", "moe", "shared_experts"], ...] = ()
    """Instead: parts of each layer that are computed again, where the rest is kept. mlp is that of layers without
    experts, moe the whole of one with experts, of which shared_experts are a part. Attention's scores are never kept,
    so that there is nothing to gain by its core."""
    moe_aux_loss_coeff: NonNegative = 0.0
    """Of the loss that balances the experts within each sequence, which no cut of the batch changes."""
    moe_z_loss_coeff: NonNegative = 0.0
    """Of the loss that keeps the routers' logits small."""
    moe_grouped_gemm: bool = False
    """Compute a layer's experts in one product per linear layer instead of one after the other; for GPUs."""
    moe_router_replay: bool = False
    """Send tokens to the experts that they went to while sampling, in log-probabilities and training
    (arXiv:2510.11370); for GRPO and PPO."""
    moe_router_bias_update_rate: NonNegative = 0.0
    """How far each step moves the biases that experts are chosen with, in families that have them."""

    @property
    def begins_with_dropout(self) -> bool:
        """Whether already the first step trains another function than what scores: adapters that begin from nothing
        drop out nothing before they have been trained."""
        return self.lora is not None and self.lora.path is not None and self.lora.dropout > 0

    @model_validator(mode="after")
    def _recomputes_once(self) -> ModelConfig:
        if self.recompute_activations and self.recompute_modules:
            raise ValueError("recompute_modules: recompute_activations=true computes whole layers again; choose one")
        if len(set(self.recompute_modules)) < len(self.recompute_modules):
            raise ValueError(f"recompute_modules: {list(self.recompute_modules)} names a module twice")
        if {"moe", "shared_experts"} <= set(self.recompute_modules):
            raise ValueError("recompute_modules: shared_experts are a part of moe; choose one")
        return self


class ParallelConfig(PipelineConfig):
    """Sizes of the parallel layout; data parallelism takes the processes that are left."""

    tensor_model_parallel_size: Positive = 1
    """Processes that share out each layer's weights; within a node."""
    context_parallel_size: Positive = 1
    """Processes that share out the tokens of each sequence."""
    expert_model_parallel_size: Positive = 1
    """Processes that share out the experts of a mixture; taken from data, context and tensor parallelism."""
    expert_tensor_parallel_size: Positive | None = None
    """Processes that share out each expert's weights; as `tensor_model_parallel_size` if not given."""
    sequence_parallel: bool = False
    """Share out the norms' activations over the tensor-parallel processes; the numbers stay."""
    overlap_grad_reduce: bool = False
    """Sum gradients over the replicas bucket by bucket, while the backward pass goes on; the numbers stay."""
    overlap_param_gather: bool = False
    """Gather updated weights from the replicas bucket by bucket, while the next training step's forward pass goes on;
    the numbers stay."""
    timeout_seconds: Positive = 600
    """A collective that takes longer ends the run instead of hanging it."""

    @model_validator(mode="after")
    def _supported(self) -> ParallelConfig:
        # Megatron would reduce the gradients of whole experts over the wrong ranks, without a word.
        if self.expert_model_parallel_size == 1 and self.expert_tensor_size != self.tensor_model_parallel_size:
            raise ValueError(
                "expert_tensor_parallel_size: other than tensor_model_parallel_size it needs "
                "expert_model_parallel_size > 1"
            )
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ValueError("sequence_parallel: needs tensor_model_parallel_size > 1")
        if self.overlap_param_gather and not self.overlap_grad_reduce:
            raise ValueError("overlap_param_gather: needs overlap_grad_reduce=true, which makes the buckets")
        return self

    @property
    def expert_tensor_size(self) -> int:
        """Processes that share out each expert's weights."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def model_parallel_size(self) -> int:
        """Processes that hold one replica of the model."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def meeting_seconds(self) -> float:
        """How often ranks meet that wait for something beside, so that no collective times out."""
        return min(5.0, self.timeout_seconds / 4)

    @property
    def sequence_multiple(self) -> int:
        """Every packed sequence is padded to a multiple of this many tokens.

        Context parallelism cuts a sequence into 2·CP chunks; sequence parallelism cuts what is left
        into TP parts.
        """
        zigzag = 2 * self.context_parallel_size if self.context_parallel_size > 1 else 1
        return zigzag * (self.tensor_model_parallel_size if self.sequence_parallel else 1)

    def data_parallel_size(self, world_size: int) -> int:
        """Replicas in `world_size` processes.

        Raises:
            UserError: the layout does not divide the processes.
        """
        if world_size % self.model_parallel_size:
            raise UserError(
                f"parallel: tensor {self.tensor_model_parallel_size} x pipeline "
                f"{self.pipeline_model_parallel_size} x context {self.context_parallel_size} = "
                f"{self.model_parallel_size} must divide the number of processes ({world_size}); start "
                f"{self.model_parallel_size} or a multiple (torchrun --nproc-per-node, or --world-size)"
            )
        experts = self.expert_model_parallel_size * self.expert_tensor_size * self.pipeline_model_parallel_size
        if world_size % experts:
            raise UserError(
                f"parallel: expert {self.expert_model_parallel_size} x expert tensor {self.expert_tensor_size} x "
                f"pipeline {self.pipeline_model_parallel_size} = {experts} must divide the number of processes "
                f"({world_size})"
            )
        return world_size // self.model_parallel_size
