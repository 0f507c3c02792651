"""The sections that all configurations share."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from mcore_rl.errors import UserError


def refuse_bool(value: Any) -> Any:
    """YAML's true would pass for 1."""
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")
    return value


def refuse_empty(value: Any) -> Any:
    """An empty path would be the current directory."""
    if value is None or (isinstance(value, str) and not value.strip()):
        raise ValueError("must not be empty")
    return value


Seed = Annotated[int, BeforeValidator(refuse_bool), Field(ge=0, lt=2**31)]
Directory = Annotated[Path, BeforeValidator(refuse_empty)]
Name = Annotated[str, BeforeValidator(refuse_empty)]
Positive = Annotated[int, BeforeValidator(refuse_bool), Field(ge=1)]
Count = Annotated[int, BeforeValidator(refuse_bool), Field(ge=0)]
NonNegative = Annotated[float, BeforeValidator(refuse_bool), Field(ge=0)]
AboveZero = Annotated[float, BeforeValidator(refuse_bool), Field(gt=0)]
BelowOne = Annotated[float, BeforeValidator(refuse_bool), Field(ge=0, lt=1)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)


class LoRAConfig(Section):
    """Low-rank adapters (arXiv:2106.09685) on linear layers, in fp32; they alone are trained."""

    rank: Positive | None = None
    """16 if not given, or that of `path`."""
    alpha: AboveZero | None = None
    """The adapters' product is multiplied with alpha / rank; 32 if not given, or that of `path`."""
    dropout: BelowOne = 0.0
    """Share of an adapter's inputs that are left out while training."""
    target_modules: tuple[Name, ...] = ()
    """Projections by their names in the Hugging Face model (`q_proj`, …); if none is given, those of `path`, or all
    of attention and MLP, but for experts."""
    path: Directory | None = None
    """A PEFT adapter to begin from."""


class ModelConfig(Section):
    """The model directory and how it is held."""

    path: Directory
    dtype: Literal["float32", "bfloat16"] = "float32"
    head: Literal["lm", "reward"] = "lm"
    """reward: one number a sequence, from its last token, in place of the vocabulary."""
    trust_remote_code: bool = False
    lora: LoRAConfig | None = None
    """Train adapters; the model's own weights stay as they are."""
    recompute_activations: bool = False
    """Keep only each layer's input for the backward pass and compute the layer again."""
    moe_aux_loss_coeff: NonNegative = 0.0
    """Of the loss that balances the experts within each sequence, which no cut of the batch changes."""
    moe_z_loss_coeff: NonNegative = 0.0
    """Of the loss that keeps the routers' logits small."""
    moe_router_replay: bool = False
    """Send tokens to the experts that they went to while sampling, in log-probabilities and training
    (arXiv:2510.11370); for GRPO."""
    moe_router_bias_update_rate: NonNegative = 0.0
    """How far each step moves the biases that experts are chosen with, in families that have them."""


class ParallelConfig(Section):
    """Sizes of the parallel layout; data parallelism takes the processes that are left."""

    tensor_model_parallel_size: Positive = 1
    pipeline_model_parallel_size: Positive = 1
    virtual_pipeline_model_parallel_size: Positive = 1
    """Chunks of layers on each pipeline stage, whose passes interleave."""
    num_layers_in_first_pipeline_stage: Positive | None = None
    num_layers_in_last_pipeline_stage: Positive | None = None
    """Layers of the stages that also have the embedding, and the vocabulary's projection; an even share if not
    given. The other stages share the rest evenly."""
    context_parallel_size: Positive = 1
    expert_model_parallel_size: Positive = 1
    """Processes that share out the experts of a mixture; taken from data, context and tensor parallelism."""
    expert_tensor_parallel_size: Positive | None = None
    """Processes that share out each expert's weights; as `tensor_model_parallel_size` if not given."""
    sequence_parallel: bool = False
    timeout_seconds: Positive = 600
    """A collective that takes longer ends the run instead of hanging it."""

    @model_validator(mode="after")
    def _supported(self) -> ParallelConfig:
        if self.pipeline_model_parallel_size == 1:
            if self.virtual_pipeline_model_parallel_size > 1:
                raise ValueError("virtual_pipeline_model_parallel_size: needs pipeline_model_parallel_size > 1")
            if self.num_layers_in_first_pipeline_stage or self.num_layers_in_last_pipeline_stage:
                raise ValueError("num_layers_in_first/last_pipeline_stage: need pipeline_model_parallel_size > 1")
        # Megatron would reduce the gradients of whole experts over the wrong ranks, without a word.
        if self.expert_model_parallel_size == 1 and self.expert_tensor_size != self.tensor_model_parallel_size:
            raise ValueError(
                "expert_tensor_parallel_size: other than tensor_model_parallel_size it needs "
                "expert_model_parallel_size > 1"
            )
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ValueError("sequence_parallel: needs tensor_model_parallel_size > 1")
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
    def sequence_multiple(self) -> int:
        """Every packed sequence is padded to a multiple of this many tokens.

        Context parallelism cuts a sequence into 2·CP chunks; sequence parallelism cuts what is left
        into TP parts.
        """
        zigzag = 2 * self.context_parallel_size if self.context_parallel_size > 1 else 1
        return zigzag * (self.tensor_model_parallel_size if self.sequence_parallel else 1)

    @property
    def microbatch_multiple(self) -> int:
        """The number of microbatches is a multiple of this: interleaved chunks run in rounds of all stages."""
        return self.pipeline_model_parallel_size if self.virtual_pipeline_model_parallel_size > 1 else 1

    def layers_of_stages(self, layers: int) -> list[int]:
        """How many of a model's layers each pipeline stage has.

        Raises:
            UserError: they cannot be shared out so.
        """
        size, chunks = self.pipeline_model_parallel_size, self.virtual_pipeline_model_parallel_size
        stages = [0] * size
        stages[0] = self.num_layers_in_first_pipeline_stage or 0
        stages[-1] = self.num_layers_in_last_pipeline_stage or stages[-1]
        open_stages = [stage for stage, count in enumerate(stages) if not count]
        left = layers - sum(stages)
        if left < len(open_stages) or (left % len(open_stages) if open_stages else left):
            given = f" beside the {sum(stages)} of the first or last stage" if sum(stages) else ""
            raise UserError(
                f"parallel.pipeline_model_parallel_size={size}: the model's {layers} layers cannot be shared out "
                f"evenly{given}; set num_layers_in_first_pipeline_stage or num_layers_in_last_pipeline_stage"
            )
        for stage in open_stages:
            stages[stage] = left // len(open_stages)
        if any(count % chunks for count in stages):
            raise UserError(
                f"parallel.virtual_pipeline_model_parallel_size={chunks}: must divide the layers of every stage "
                f"({', '.join(map(str, stages))})"
            )
        return stages

    def data_parallel_size(self, world_size: int) -> int:
        """Replicas in `world_size` processes.

        Raises:
            UserError: the layout does not divide the processes.
        """
        if world_size % self.model_parallel_size:
            raise UserError(
                f"parallel: tensor {self.tensor_model_parallel_size} x pipeline "
                f"{self.pipeline_model_parallel_size} x context {self.context_parallel_size} = "
                f"{self.model_parallel_size} must divide the number of processes ({world_size}); "
                f"start torchrun with --nproc-per-node {self.model_parallel_size} or a multiple"
            )
        experts = self.expert_model_parallel_size * self.expert_tensor_size * self.pipeline_model_parallel_size
        if world_size % experts:
            raise UserError(
                f"parallel: expert {self.expert_model_parallel_size} x expert tensor {self.expert_tensor_size} x "
                f"pipeline {self.pipeline_model_parallel_size} = {experts} must divide the number of processes "
                f"({world_size})"
            )
        return world_size // self.model_parallel_size


class DataConfig(Section):
    """Where records come from and what happens to long ones."""

    train: Name
    validation: Name | None = None
    max_sequence_length: Positive
    overlong: Literal["drop", "truncate"] = "drop"
    chat_template: str | None = None
    """A Jinja template in place of the tokenizer's, or the path of a file with one; the exported model has it too."""
    columns: dict[Name, Name] = {}
    """Names of the source's columns by those that are wanted: `{prompt: question, completion: answer}`."""
    max_samples: Positive | None = None
    """Only the first records of `train` are read."""
    cache_dir: Path | None = None
    """Where tokenized data is kept for later runs; `$MCORE_RL_CACHE` or ~/.cache/mcore_rl if not given."""

    @model_validator(mode="after")
    def _template_is_there(self) -> DataConfig:
        self.read_chat_template()
        return self

    def read_chat_template(self) -> str | None:
        """The template's text."""
        return read_chat_template(self.chat_template)


def read_chat_template(template: str | None) -> str | None:
    """The text of a template that is given as such, or as a file's path.

    Raises:
        UserError: neither.
    """
    if template is None or "{" in template:
        return template
    try:
        return Path(template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise UserError(f"chat_template: {template} is neither a template nor a file with one") from None


class BatchConfig(Section):
    """One optimizer step's batch and its cutting into microbatches."""

    global_batch_size: Positive
    packing: bool = True
    tokens_per_pack: Positive | None = None
    """Width of a pack in tokens; max_sequence_length if not given (twice that for pairs)."""
    micro_batch_size: Positive = 1
    """Rows (or pairs) per microbatch without packing."""
    share_prefixes: bool = False
    """What the responses of a pair or group have in common at their beginning, their prompt, stands in a pack once."""
    min_shared_tokens: Positive = 32
    """Beginnings of fewer tokens are repeated."""

    @model_validator(mode="after")
    def _used(self) -> BatchConfig:
        if self.share_prefixes and not self.packing:
            raise ValueError("share_prefixes: needs packing=true")
        if not self.share_prefixes and self.min_shared_tokens != type(self).model_fields["min_shared_tokens"].default:
            raise ValueError("min_shared_tokens: nothing is shared with share_prefixes=false; leave it out")
        if self.packing and self.micro_batch_size != 1:
            raise ValueError("micro_batch_size: packs are filled to tokens_per_pack; it goes with packing=false alone")
        if not self.packing and self.tokens_per_pack is not None:
            raise ValueError("tokens_per_pack: nothing is packed with packing=false; leave it out")
        return self


class OptimizerConfig(Section):
    """AdamW and its schedule; the unit of `warmup_steps` is optimizer steps."""

    lr: BelowOne
    min_lr: NonNegative = 0.0
    weight_decay: NonNegative = 0.0
    adam_beta1: BelowOne = 0.9
    adam_beta2: BelowOne = 0.999
    adam_eps: AboveZero = 1e-8
    clip_grad: NonNegative = 1.0
    warmup_steps: Count = 0
    schedule: Literal["constant", "linear", "cosine"] = "cosine"

    @model_validator(mode="after")
    def _ordered(self) -> OptimizerConfig:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr: must be at most lr ({self.lr}), got {self.min_lr}")
        if self.min_lr and self.schedule == "constant":
            raise ValueError("min_lr: schedule=constant never comes down to it; leave it out")
        return self


class TrainerConfig(Section):
    """How long to train; whichever of the two limits comes first."""

    max_steps: Positive | None = None
    max_epochs: Positive | None = None
    validation_interval: Positive | None = None
    log_interval: Positive = 1

    @model_validator(mode="after")
    def _bounded(self) -> TrainerConfig:
        if self.max_steps is None and self.max_epochs is None:
            raise ValueError("give max_steps, max_epochs or both")
        return self


class CheckpointConfig(Section):
    save_interval: Positive | None = None
    """Steps between checkpoints; the end of the run always saves one."""
    save_minutes: AboveZero | None = 30.0
    """Minutes after which one is saved in any case; it goes when a later one is there, unless `keep_last` keeps it."""
    keep_last: Positive | None = None
    """How many of the newest checkpoints stay; all if not given."""
    keep_every: Positive | None = None
    """Checkpoints at multiples of this many steps stay whatever `keep_last` says."""
    on_failure: Literal["stop", "continue"] = "stop"
    """Whether training goes on when a checkpoint cannot be written."""
    asynchronous: bool = True
    """Whether training goes on while a checkpoint is being written."""
    timeout_seconds: Positive = 1800
    """Writing that takes longer is a failure."""
    allow_partial: bool = False
    """Whether to go on from a checkpoint that lacks optimizer, schedule, random states or data position."""
    resume: str = "auto"
    """auto: the newest checkpoint in output_dir; none: start afresh; or a directory, to begin from if there is
    no checkpoint in output_dir yet, or to go back to if it is one of them."""
    overwrite: bool = False
    """With resume=none: whether what an earlier run left in output_dir is removed; without it, that is refused."""
    export_hf: bool = True
    """Whether the trained model is written to output_dir/hf at the end, and adapters, if any, to output_dir/adapter."""

    @model_validator(mode="after")
    def _consistent(self) -> CheckpointConfig:
        if self.overwrite and self.resume != "none":
            raise ValueError("overwrite: removes an earlier run; it goes with resume=none alone")
        if self.keep_every is not None and self.keep_last is None:
            raise ValueError("keep_every: without keep_last all checkpoints stay; give both, or leave it out")
        return self


class LoggingConfig(Section):
    tensorboard: bool = False
    wandb: str | None = None
    """Project name on Weights & Biases; needs the `wandb` extra."""

    @model_validator(mode="after")
    def _installed(self) -> LoggingConfig:
        if self.wandb is not None and find_spec("wandb") is None:
            raise ValueError("wandb: install the wandb extra (pip install 'mcore_rl[wandb]')")
        return self


class TrainingConfig(Section):
    """What every algorithm shares."""

    seed: Seed = 0
    deterministic: bool = False
    """Ask torch for deterministic kernels."""
    output_dir: Directory
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    data: DataConfig
    batch: BatchConfig
    optimizer: OptimizerConfig
    trainer: TrainerConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()

    @model_validator(mode="after")
    def _validates_something(self) -> TrainingConfig:
        if self.trainer.validation_interval is not None and self.data.validation is None:
            raise ValueError("trainer.validation_interval: there is nothing to validate on; give data.validation")
        return self

    @property
    def rows_per_unit(self) -> int:
        """Sequences that must share a microbatch."""
        return 1

    @property
    def rows_per_group(self) -> int:
        """Neighbouring rows of a batch that begin alike."""
        return self.rows_per_unit

    @model_validator(mode="after")
    def _shares(self) -> TrainingConfig:
        if self.batch.share_prefixes and self.rows_per_group < 2:
            raise ValueError("batch.share_prefixes: rows of this algorithm have no prompt in common; leave it out")
        return self

    def pack_width(self, rows_per_unit: int) -> int:
        """Tokens of a pack, which holds the longest record of so many sequences.

        Raises:
            UserError: batch.tokens_per_pack is less.
        """
        longest = rows_per_unit * -(-self.data.max_sequence_length // self.parallel.sequence_multiple)
        longest *= self.parallel.sequence_multiple
        width = self.batch.tokens_per_pack
        if width is not None and width < longest:
            raise UserError(
                f"batch.tokens_per_pack={width}: must hold the longest record, {longest} tokens "
                f"({rows_per_unit} x data.max_sequence_length={self.data.max_sequence_length}, padded)"
            )
        return width or longest
