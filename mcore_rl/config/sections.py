"""Sections of the configuration that all algorithms share."""

from __future__ import annotations

import math
import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from mcore_rl.config.base import (
    Columns,
    Count,
    Directory,
    FractionBelowOne,
    Name,
    NamedSources,
    NonNegative,
    PositiveFloat,
    PositiveInt,
    Section,
    Seed,
    Sources,
    refuse_bool,
)
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.errors import UserError
from mcore_rl.utils.model_directory import is_repository_name


class LoRAConfig(Section):
    """Low-rank adapters (arXiv:2106.09685) on linear layers, in fp32; they alone are trained."""

    rank: PositiveInt | None = None
    """16 if not given, or that of `path`."""
    alpha: PositiveFloat | None = None
    """The adapters' product is multiplied with alpha / rank; 32 if not given, or that of `path`."""
    lr_ratio: PositiveFloat = 1.0
    """Learning rate of the matrices B (which begin as zeros) by that of the matrices A (LoRA+, arXiv:2402.12354)."""
    dropout: FractionBelowOne = 0.0
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


class DataConfig(Section):
    """Where records come from and what happens to long ones."""

    train: Sources
    """A .jsonl, .json or .parquet file, a directory of them, or NAME or NAME:SPLIT of a dataset on the hub. Or several,
    each with the weight of its samples: `{chat.jsonl: 3, math.jsonl: 1}`; one that is used up begins again. An epoch is
    as many samples as they have together."""
    validation: NamedSources | None = None
    """The same, for validation: one source, or several by the names that their metrics get, as
    `{math: math_test.jsonl}`."""
    max_sequence_length: PositiveInt = 1024
    """Tokens of a sequence, prompt and response together."""
    overlong: Literal["drop", "truncate"] = "drop"
    """What becomes of longer records: left out, or cut at their end."""
    chat_template: str | None = None
    """A Jinja template in place of the tokenizer's, or the path of a file with one; the exported model has it too."""
    columns: Columns = Field(default={})
    """Names of columns, of all sources and sets, by those wanted: `{prompt: question, completion: answer}`. Or by
    source: `{math.jsonl: {prompt: question, completion: answer}}`, the others' being right."""
    max_samples: PositiveInt | None = None
    """Only the first records of each source of `train` are read."""
    cache_dir: Path | None = None
    """Where tokenized data is kept for later runs; `$MCORE_RL_CACHE` or ~/.cache/mcore_rl if not given."""

    @model_validator(mode="after")
    def _template_is_there(self) -> DataConfig:
        self.read_chat_template()
        return self

    @model_validator(mode="after")
    def _sets_have_plain_names(self) -> DataConfig:
        for name in self.validation_sets:
            if name and not re.fullmatch(r"[\w.-]+", name):
                raise ValueError(f"validation: the set's name {name!r} must be of letters, digits, '_', '.' and '-'")
        return self

    @model_validator(mode="after")
    def _sources_are_there_once(self) -> DataConfig:
        found: dict[str, str] = {}
        for source in self.train_sources:
            other = found.setdefault(os.path.realpath(source), source)
            if other != source:
                raise ValueError(f"train: {other} and {source} are one source; leave one out, and add up their weights")
        for path, source in found.items():
            for directory in Path(path).parents:
                if str(directory) in found:
                    whole = found[str(directory)]
                    raise ValueError(f"train: {source} is one of the files in {whole}; leave one out")
        return self

    @model_validator(mode="after")
    def _weights_have_a_sum(self) -> DataConfig:
        if not isinstance(self.train, str) and math.isinf(sum(self.train.values())):
            raise ValueError("train: the sum of the weights is too large for a number")
        return self

    @model_validator(mode="after")
    def _columns_are_of_something(self) -> DataConfig:
        sources = {*self.train_sources, *self.validation_sets.values()}
        for key, names in self.columns.items():
            if not isinstance(names, str) and key not in sources:
                raise ValueError(f"columns: {key} is no source of train or validation ({', '.join(sorted(sources))})")
        for source in sources:
            wanted: dict[str, str] = {}
            for name, column in self.columns_of(source).items():
                if (other := wanted.setdefault(column, name)) != name:
                    raise ValueError(f"columns: {column} cannot be both {other} and {name}")
        return self

    def columns_of(self, source: str) -> dict[str, str]:
        """A source's names of columns, by those wanted."""
        by_source = {key: names for key, names in self.columns.items() if not isinstance(names, str)}
        if by_source:
            return by_source.get(source, {})
        return {name: column for name, column in self.columns.items() if isinstance(column, str)}

    @property
    def train_sources(self) -> list[str]:
        """All that is trained on."""
        return [self.train] if isinstance(self.train, str) else list(self.train)

    @property
    def validation_sets(self) -> dict[str, str]:
        """What is validated on, by name; the only one has none."""
        if self.validation is None or isinstance(self.validation, str):
            return {} if self.validation is None else {"": self.validation}
        return self.validation

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


class CheckpointConfig(Section):
    """When checkpoints are written, which stay, and where a run begins."""

    save_interval: PositiveInt | None = None
    """Steps between checkpoints; the end of the run always saves one."""
    save_minutes: PositiveFloat | None = 30.0
    """Minutes after which one is saved in any case; it goes when a later one is there, unless `keep_last` keeps it."""
    keep_last: PositiveInt | None = None
    """How many of the newest checkpoints stay; all if not given."""
    keep_every: PositiveInt | None = None
    """Checkpoints at multiples of this many steps stay whatever `keep_last` says."""
    on_failure: Literal["stop", "continue"] = "stop"
    """Whether training goes on when a checkpoint cannot be written."""
    asynchronous: bool = True
    """Whether training goes on while a checkpoint is being written."""
    timeout_seconds: PositiveInt = 1800
    """Writing that takes longer is a failure."""
    allow_partial: bool = False
    """Whether to go on from a checkpoint that lacks optimizer, schedule, random states or data position."""
    resume: str = "auto"
    """auto: the newest checkpoint in output_dir; none: start afresh; or a directory, to begin from if there is
    no checkpoint in output_dir yet, or to go back to if it is one of them."""
    overwrite: bool = False
    """With resume=none: whether what an earlier run left in output_dir is removed; without it, that is refused."""
    best_metric: Name | None = None
    """A metric of the validations, as `loss` or, of one of several sets, `math/accuracy`: whenever it is better than
    ever before a checkpoint is saved, and retention keeps the best."""
    best_mode: Literal["min", "max"] | None = None
    """Whether the least or the greatest best_metric is the best; if not given, the least of losses and errors, the
    greatest of accuracies, rewards and margins."""
    export_best: bool = False
    """Export the weights of the best checkpoint instead of the last ones."""
    export_hf: bool = True
    """Whether the trained model is written to output_dir/hf at the end, and adapters, if any, to output_dir/adapter."""
    push_to_hub: Name | None = None
    """OWNER/NAME on the Hugging Face hub, to which what is in output_dir/hf is uploaded at the end; private, if it is
    new. Needs `hf auth login` or $HF_TOKEN; whether one may write there is found out before training."""

    @model_validator(mode="after")
    def _consistent(self) -> CheckpointConfig:
        if self.overwrite and self.resume != "none":
            raise ValueError("overwrite: removes an earlier run; it goes with resume=none alone")
        if self.keep_every is not None and self.keep_last is None:
            raise ValueError("keep_every: without keep_last all checkpoints stay; give both, or leave it out")
        if self.best_metric is None and (self.best_mode is not None or self.export_best):
            raise ValueError("best_mode, export_best: need best_metric")
        if self.best_metric is not None and self.best_is_highest is None:
            raise ValueError(f"best_mode: say whether the least (min) or the greatest (max) {self.best_metric} is best")
        if self.export_best and not self.export_hf:
            raise ValueError("export_best: nothing is exported with export_hf=false")
        if self.push_to_hub is not None and not is_repository_name(self.push_to_hub):
            raise ValueError(f"push_to_hub: must read OWNER/NAME, got {self.push_to_hub}")
        if self.push_to_hub is not None and not self.export_hf:
            raise ValueError("push_to_hub: nothing is exported with export_hf=false")
        return self

    @property
    def best_is_highest(self) -> bool | None:
        """Whether the greatest best_metric is the best; None where nobody has said so and its name does not tell."""
        return greatest_is_best(self.best_metric or "") if self.best_mode is None else self.best_mode == "max"


def greatest_is_best(metric: str) -> bool | None:
    """Whether more of a metric is better than less, as its name tells; None where it does not."""
    if metric.endswith(("loss", "error")):
        return False
    return True if re.search("accuracy|reward|margin|explained_variance", metric) else None


class BatchConfig(Section):
    """One optimizer step's batch and its cutting into microbatches."""

    global_batch_size: PositiveInt = 32
    """Records (pairs, for preferences) of an optimizer step, over all processes."""
    packing: bool = True
    """Put several sequences in a row of tokens_per_pack tokens; otherwise rows are padded."""
    tokens_per_pack: PositiveInt | None = None
    """Width of a pack in tokens; max_sequence_length if not given (twice that for pairs)."""
    micro_batch_size: PositiveInt = 1
    """Rows (or pairs) per microbatch without packing."""
    share_prefixes: bool = False
    """What the responses of a pair or group have in common at their beginning, their prompt, stands in a pack once."""
    min_shared_tokens: PositiveInt = 32
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

    lr: FractionBelowOne = 1e-6
    """Learning rate, after warm-up. Adapters (LoRA) want about ten times as much."""
    min_lr: NonNegative = 0.0
    """Learning rate at the last step; inverse_square_root: the least."""
    embedding_lr: FractionBelowOne | None = None
    """Learning rate of the embedding and of the projection onto the vocabulary; `lr` if not given."""
    weight_decay: NonNegative = 0.0
    """Decoupled (AdamW); not of biases and norms."""
    adam_beta1: FractionBelowOne = 0.9
    """Decay of the mean of gradients."""
    adam_beta2: FractionBelowOne = 0.999
    """Decay of the mean of squared gradients."""
    adam_eps: PositiveFloat = 1e-8
    """Added to the root of the mean square."""
    clip_grad: NonNegative = 1.0
    """Largest norm of the whole gradient; 0 does not clip."""
    warmup_steps: Count = 0
    """Steps in which the learning rate rises from 0."""
    warmup_ratio: FractionBelowOne = 0.0
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

    max_steps: PositiveInt | None = None
    """Steps of the run."""
    max_epochs: PositiveInt | None = None
    """Passes over the data; 1 if max_steps is not given either."""
    validation_interval: PositiveInt | None = None
    """Steps between validations; none if not given."""
    validate_at_start: bool = False
    """Validate before the first step as well, as step 0."""
    validate_at_end: bool = False
    """Validate after the last step whatever the interval."""
    early_stopping_patience: PositiveInt | None = None
    """So many validations on end without a better checkpoint.best_metric end the run."""
    log_interval: PositiveInt = 1
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

    interval: PositiveInt = 512
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
