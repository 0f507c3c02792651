"""The sections that all configurations share."""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from mcore_rl.config.base import (
    AboveZero,
    BelowOne,
    Count,
    Directory,
    Name,
    NonNegative,
    Positive,
    Section,
    Seed,
    refuse_bool,
)
from mcore_rl.config.checkpoint import CheckpointConfig
from mcore_rl.config.data import DataConfig
from mcore_rl.config.model import ModelConfig, ParallelConfig
from mcore_rl.errors import UserError


class BatchConfig(Section):
    """One optimizer step's batch and its cutting into microbatches."""

    global_batch_size: Positive = 32
    """Records (pairs, for preferences) of an optimizer step, over all processes."""
    packing: bool = True
    """Put several sequences in a row of tokens_per_pack tokens; otherwise rows are padded."""
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
    """AdamW and its schedule, whose steps are the optimizer's."""

    lr: BelowOne = 1e-6
    """Learning rate, after warm-up. Adapters (LoRA) want about ten times as much."""
    min_lr: NonNegative = 0.0
    """Learning rate at the last step; inverse_square_root: the least."""
    embedding_lr: BelowOne | None = None
    """Learning rate of the embedding and of the projection onto the vocabulary; `lr` if not given."""
    weight_decay: NonNegative = 0.0
    """Decoupled (AdamW); not of biases and norms."""
    adam_beta1: BelowOne = 0.9
    """Decay of the mean of gradients."""
    adam_beta2: BelowOne = 0.999
    """Decay of the mean of squared gradients."""
    adam_eps: AboveZero = 1e-8
    """Added to the root of the mean square."""
    clip_grad: NonNegative = 1.0
    """Largest norm of the whole gradient; 0 does not clip."""
    warmup_steps: Count = 0
    """Steps in which the learning rate rises from 0."""
    warmup_ratio: BelowOne = 0.0
    """The same, as a share of all steps."""
    schedule: Literal["constant", "linear", "cosine", "inverse_square_root", "wsd"] = "cosine"
    """How the learning rate comes down to min_lr; wsd (warm-up, stable, decay) in the last steps alone."""
    decay_ratio: Annotated[float, Field(gt=0, le=1), BeforeValidator(refuse_bool)] = 0.1
    """wsd: share of all steps in which it comes down."""
    decay_shape: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "linear"
    """wsd: how."""
    offload: bool = False
    """Keep moments, and bfloat16's fp32 weights, in the host's memory but for the optimizer's own step."""

    def steps_of_warmup(self, total: int) -> int:
        """Of a run of so many steps; at most all but the last, which trains with `lr`."""
        return min(self.warmup_steps or round(self.warmup_ratio * total), max(total - 1, 0))

    @model_validator(mode="after")
    def _ordered(self) -> OptimizerConfig:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr: must be at most lr ({self.lr}), got {self.min_lr}")
        if self.min_lr and self.schedule == "constant":
            raise ValueError("min_lr: schedule=constant never comes down to it; leave it out")
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError("warmup_ratio: give it or warmup_steps, not both")
        for name in ("decay_ratio", "decay_shape"):
            if self.schedule != "wsd" and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name}: goes with schedule=wsd alone, not with {self.schedule}")
        return self


class TrainerConfig(Section):
    """How long to train: whichever of the limits comes first."""

    max_steps: Positive | None = None
    """Steps of the run."""
    max_epochs: Positive | None = None
    """Passes over the data; 1 if max_steps is not given either."""
    validation_interval: Positive | None = None
    """Steps between validations; none if not given."""
    validate_at_start: bool = False
    """Validate before the first step as well, as step 0."""
    validate_at_end: bool = False
    """Validate after the last step whatever the interval."""
    early_stopping_patience: Positive | None = None
    """So many validations on end without a better checkpoint.best_metric end the run."""
    log_interval: Positive = 1
    """Steps between lines on the console; metrics.jsonl has every step."""

    @property
    def validates(self) -> bool:
        """Whether there is a validation at any time."""
        return self.validation_interval is not None or self.validate_at_start or self.validate_at_end

    @model_validator(mode="before")
    @classmethod
    def _bounded(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("max_steps") is None and values.get("max_epochs") is None:
            return {**values, "max_epochs": 1}
        return values


class LoggingConfig(Section):
    """Where metrics go beside the console and metrics.jsonl."""

    tensorboard: bool = False
    """Write metrics to output_dir/tensorboard as well; needs the `tensorboard` extra."""
    wandb: Name | None = None
    """Project on Weights & Biases; needs the `wandb` extra. A run that goes on is the same run there."""
    wandb_tags: tuple[Name, ...] = ()
    """Of the run there."""
    mlflow: Name | None = None
    """Experiment on the MLflow server that `MLFLOW_TRACKING_URI` names; needs the `mlflow` extra."""
    run_name: Name | None = None
    """Of the run on Weights & Biases and MLflow; they make one up if not given."""

    @model_validator(mode="after")
    def _installed(self) -> LoggingConfig:
        for name in ("tensorboard", "wandb", "mlflow"):
            if getattr(self, name) not in (None, False) and find_spec(name) is None:
                raise ValueError(f"{name}: install the {name} extra (pip install 'mcore_rl[{name}]')")
        if self.wandb_tags and self.wandb is None:
            raise ValueError("wandb_tags: need wandb, the project")
        if self.run_name is not None and self.wandb is None and self.mlflow is None:
            raise ValueError("run_name: is for wandb and mlflow, of which none is given")
        return self


class ReferenceSyncConfig(Section):
    """The reference follows the policy (arXiv:2404.09656): every `interval` steps it becomes
    (1 − alpha) · reference + alpha · policy. A small alpha at each step is an exponential average."""

    interval: Positive = 512
    """Steps between."""
    alpha: Annotated[float, Field(gt=0, le=1), BeforeValidator(refuse_bool)] = 0.6
    """The policy's share. With adapters, whose products do not mix, 1 alone."""


class TrainingConfig(Section):
    """What every algorithm shares."""

    algorithm: ClassVar[str]
    """Its usual name."""
    seed: Seed = 0
    """Of the order of the data, dropout and sampling."""
    deterministic: bool = False
    """Take kernels alone, of torch, Megatron, cuBLAS, NCCL and Transformer Engine, that give the same bits each time;
    an operation that has none ends the run, named."""
    dry_run: bool = False
    """Check everything, tell what would be done, and stop (`--dry-run`)."""
    output_dir: Directory
    """Where everything that the run writes goes; the same directory goes on with the run."""
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    data: DataConfig
    batch: BatchConfig = BatchConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    trainer: TrainerConfig = TrainerConfig(max_epochs=1)
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()

    @model_validator(mode="after")
    def _validates_something(self) -> TrainingConfig:
        trainer = self.trainer
        for key in ("validation_interval", "validate_at_start", "validate_at_end"):
            asked = getattr(trainer, key) and not type(trainer).model_fields[key].default
            if asked and self.data.validation is None:
                raise ValueError(f"trainer.{key}: there is nothing to validate on; give data.validation")
        if trainer.early_stopping_patience is not None and self.checkpoint.best_metric is None:
            raise ValueError("trainer.early_stopping_patience: needs checkpoint.best_metric")
        best = self.checkpoint.best_metric
        if best is not None and trainer.validation_interval is None:
            raise ValueError("checkpoint.best_metric: is never measured; give trainer.validation_interval")
        sets = [name for name in self.data.validation_sets if name]
        if best is not None and sets and best.partition("/")[0] not in sets:
            raise ValueError(
                f"checkpoint.best_metric: must be of one of the sets of data.validation ({', '.join(sets)}), as "
                f"{sets[0]}/{best.rpartition('/')[2]}"
            )
        return self

    @model_validator(mode="after")
    def _trains_embeddings(self) -> TrainingConfig:
        if self.optimizer.embedding_lr is not None and self.model.lora is not None:
            raise ValueError("optimizer.embedding_lr: adapters alone are trained with model.lora; leave it out")
        return self

    @model_validator(mode="after")
    def _mixes_weights(self) -> TrainingConfig:
        sync = self.reference_sync_of
        if sync is not None and sync.alpha != 1 and self.model.lora is not None:
            raise ValueError("reference_sync.alpha: with model.lora it must be 1: mixed adapters are no mixed weights")
        return self

    @model_validator(mode="after")
    def _replays(self) -> TrainingConfig:
        if self.model.moe_router_replay and not self.samples:
            raise ValueError(
                "model.moe_router_replay: goes with GRPO and PPO alone, whose samples tell where tokens went"
            )
        return self

    @property
    def reference_sync_of(self) -> ReferenceSyncConfig | None:
        """How the reference follows the policy, in algorithms that have one; None: it stays as it was."""
        return getattr(self, "reference_sync", None)

    @property
    def samples(self) -> bool:
        """Whether it trains on rollouts."""
        return False

    @property
    def max_answer_length(self) -> int | None:
        """Tokens at most of the policy's own answers in a sequence that it is trained on; None: it gives none."""
        return None

    @property
    def keeps_reference(self) -> bool:
        """Whether the policy is compared with the weights that it begins from."""
        return False

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

    @property
    def samples_per_step(self) -> int:
        """Records, or prompts to answer, of a step over all processes."""
        return self.batch.global_batch_size

    def total_steps(self, num_samples: int) -> int:
        """Of a run on so many: the smaller of max_steps and max_epochs; the last batch may be smaller."""
        limits = [self.trainer.max_steps or math.inf]
        if self.trainer.max_epochs:
            limits.append(math.ceil(self.trainer.max_epochs * num_samples / self.samples_per_step))
        return int(min(limits))

    def check_steps(self, steps: int) -> None:
        """Raises UserError if a run of so many steps would never train what it is for."""

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
