"""Sections of the configuration that all algorithms share."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

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
from mcore_rl.config.fp8 import FP8Config
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.errors import UserError
from mcore_rl.utils.model_directory import is_repository_name


class LoRAConfig(Section):
    """Low-rank adapters (LoRA, arXiv:2106.09685) on linear layers, in fp32. Only the adapters are trained."""

    rank: PositiveInt | None = None
    """Rank of the adapters. The default is the rank of the adapters in `path`, or 16 without `path`."""
    alpha: PositiveFloat | None = None
    """The adapters' outputs are multiplied by alpha / rank. Default: the alpha of `path`, or 32 without `path`."""
    lr_ratio: PositiveFloat = 1.0
    """Ratio of the learning rate of the B matrices, which start as zeros, to that of the A matrices (LoRA+,
    arXiv:2402.12354)."""
    dropout: FractionBelowOne = 0.0
    """Fraction of an adapter's inputs that dropout sets to zero during training."""
    target_modules: tuple[Name, ...] = ()
    """Projections to adapt, by their names in the Hugging Face model (`q_proj`, …; for routed experts
    `experts.gate_up_proj` or, without gates, `experts.up_proj`, and `experts.down_proj`; for a trained vision tower
    `attn.qkv`, `attn.proj`, `mlp.linear_fc1`, `mlp.linear_fc2`). The default is the projections of `path`. Without
    `path`, it is all projections of attention and, except in MoE models, of the MLP, and those of a trained vision
    tower."""
    path: Directory | None = None
    """A PEFT adapter directory to start from."""


class ModelConfig(Section):
    """The model: its directory, its precision, and which activations the backward pass recomputes."""

    path: Directory
    """A Hugging Face model directory with weights in safetensors and a tokenizer. Or NAME or NAME@REVISION of a model
    on the hub, which is downloaded to the hub's cache. Or a checkpoint of this package, of Megatron-LM or of
    Megatron-Bridge, which is converted once, into the cache of `data.cache_dir`'s default."""
    config_path: Directory | None = None
    """If `path` is a checkpoint: directory, or name on the hub, with the model's config.json and tokenizer. It needs no
    weights. null: the directory from which the checkpoint was trained, which checkpoints of other programs lack."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of weights and activations. Gradients and optimizer state are in fp32. auto: bfloat16 on GPUs, float32
    on the CPU."""
    transformer_impl: Literal["auto", "transformer_engine", "local"] = "auto"
    """Implementation of the layers: transformer_engine, or local (PyTorch only). auto: transformer_engine if it is
    installed, there is a GPU, and the dtype is bfloat16. In float32, Transformer Engine's matrix products have only the
    precision of TF32 (about 3 digits). Both implementations use the same checkpoints."""
    fp8: FP8Config | None = None
    """Compute the matrix products of linear layers in FP8; requires Transformer Engine's layers."""
    head: Literal["lm", "reward"] = "lm"
    """reward: the model predicts one number per sequence, at its last token that is not padding, instead of logits."""
    trust_remote_code: bool = False
    """Run code that comes with the model's configuration and tokenizer."""
    vision_tower: Literal["frozen", "trained"] = "frozen"
    """Whether the vision tower of a model that reads images is trained too; with `lora`, it then gets adapters. The
    features of images are kept if it is frozen."""
    lora: LoRAConfig | None = None
    """Train adapters; the model's own weights are frozen."""
    recompute_activations: bool = False
    """Keep only the input of each layer for the backward pass, and recompute the layer."""
    recompute_modules: tuple[Literal["mlp", "moe", "shared_experts"], ...] = ()
    """Recompute only these parts of each layer and keep the rest. mlp: the MLP of layers without experts. moe: the
    whole MLP of layers with experts. shared_experts: only the shared experts of that MLP. Attention scores are never
    kept, so recomputing core attention would save nothing."""
    logits_memory_gib: NonNegative | Literal["auto"] = "auto"
    """Memory of each process for logits of the LM head in training, in GiB. If the fp32 logits of a microbatch, at the
    tokens that the loss reads, fit into it, they are kept for the backward pass. Otherwise they are computed twice,
    which takes four matrix products instead of three. Results do not change. auto: 2 on GPUs, 0.25 on the CPU."""
    moe_aux_loss_coeff: NonNegative = 0.0
    """Coefficient of the loss that balances experts within each sequence. This loss does not depend on how the batch is
    divided."""
    moe_z_loss_coeff: NonNegative = 0.0
    """Coefficient of the loss that keeps router logits small."""
    moe_grouped_gemm: bool | Literal["auto", "if_possible"] = "auto"
    """Compute all experts of a layer in one product per linear layer instead of one after the other. if_possible: if
    the model has experts whose sizes fit the kernels. auto: if_possible on GPUs in bfloat16, otherwise false."""
    moe_router_replay: bool = False
    """In log-probabilities and training, send tokens to the experts that they were sent to during sampling
    (arXiv:2510.11370); for GRPO and PPO."""
    indexer_replay: bool = False
    """In log-probabilities and training, attend to the keys that the indexers of sparse attention chose during
    sampling; for GRPO and PPO with generation.backend=megatron. A token takes 4 bytes of memory for each key that is
    chosen in each layer with an indexer."""
    moe_router_bias_update_rate: NonNegative = 0.0
    """Amount by which each update raises or lowers the router's expert biases, in model families that have them."""

    mtp_loss_scaling_factor: NonNegative = 0.0
    """More than 0: also train the layers of the directory that predict further tokens (MTP), with this factor of their
    loss. Only their own weights are trained by it. 0: they are exported unchanged."""

    def for_device(self, on_gpu: bool, te_problem: str | None, simulates: bool) -> Self:
        """Return this section with each `auto` replaced. A simulation always gets transformer_impl=local.

        Args:
            on_gpu: whether the run is on GPUs.
            te_problem: end of a sentence that begins with "Transformer Engine" and says why it cannot be used; None if
                it can be used.
            simulates: whether the run is simulated.

        Raises:
            UserError: the section requires Transformer Engine, but Transformer Engine cannot be used.
        """
        if self.transformer_impl == "transformer_engine" and te_problem is not None and not simulates:
            # Only what is missing is installed: pip would replace a container's build, which fits its torch.
            missing = on_gpu and te_problem == "is not installed"
            remedy = "choose versions that fit (docs/several_nodes.md), or " if on_gpu and not missing else ""
            install = "install it with pip install 'mcore_rl[gpu]', or " if missing else remedy
            raise UserError(
                f"model.transformer_impl=transformer_engine: Transformer Engine {te_problem}; {install}"
                "set model.transformer_impl=local"
            )
        choices: dict[str, Any] = {}
        if self.dtype == "auto":
            choices["dtype"] = "bfloat16" if on_gpu else "float32"
        if self.logits_memory_gib == "auto":
            choices["logits_memory_gib"] = 2.0 if on_gpu else 0.25
        if self.moe_grouped_gemm == "auto":
            fits = on_gpu and choices.get("dtype", self.dtype) == "bfloat16"
            choices["moe_grouped_gemm"] = "if_possible" if fits else False
        if self.transformer_impl == "auto" or simulates:
            in_float32 = choices.get("dtype", self.dtype) == "float32"
            takes_te = on_gpu and te_problem is None and not (in_float32 or simulates)
            choices["transformer_impl"] = "transformer_engine" if takes_te else "local"
        return self.model_copy(update=choices) if choices else self

    def check_fp8(self, on_gpu: bool, te_problem: str | None) -> None:
        """Raise UserError if this section, without `auto`, asks for FP8 with layers or a precision that lack it.

        The arguments are those of `for_device`.
        """
        if self.fp8 is None:
            return
        if on_gpu and self.dtype == "float32":
            raise UserError(
                "model.fp8: requires model.dtype=bfloat16 on a GPU, because all other operations would be in float32; "
                "set model.dtype=bfloat16, or leave model.fp8 out"
            )
        if self.transformer_impl == "local":
            set_te = "set model.transformer_impl=transformer_engine"
            remedy = set_te if te_problem is None else f"Transformer Engine {te_problem}; leave model.fp8 out"
            raise UserError(f"model.fp8: requires Transformer Engine's layers; the local layers have no FP8; {remedy}")

    @property
    def in_float32(self) -> bool:
        """True if no product rounds its factors to bfloat16 or FP8. Only then do all passes compute equal numbers."""
        return self.dtype == "float32" and self.fp8 is None

    @property
    def begins_with_dropout(self) -> bool:
        """True if dropout changes the outputs of the first step, because existing adapters are loaded.

        New adapters compute zeros, so their dropout has no effect before the first update."""
        return self.lora is not None and self.lora.path is not None and self.lora.dropout > 0

    @model_validator(mode="after")
    def _recomputes_once(self) -> ModelConfig:
        if self.recompute_activations and self.recompute_modules:
            raise ValueError(
                "recompute_modules: must be left out with recompute_activations=true, which recomputes whole layers"
            )
        if len(set(self.recompute_modules)) < len(self.recompute_modules):
            raise ValueError(f"recompute_modules: {list(self.recompute_modules)} names a module twice")
        if {"moe", "shared_experts"} <= set(self.recompute_modules):
            raise ValueError("recompute_modules: shared_experts are already a part of moe; leave out one of the two")
        return self


class DataConfig(Section):
    """Sources of records, and the handling of long ones."""

    train: Sources
    """A .jsonl, .json or .parquet file, a directory of such files, or NAME or NAME:SPLIT of a dataset on the hub. Or
    a list of these, whose records are one source: `[a.jsonl, b.parquet]`. Or several sources, each with its weight in
    the mixture: `{chat.jsonl: 3, math.jsonl: 1}`. A source of a mixture that is exhausted starts again. An epoch has as
    many samples as all sources together."""
    validation: NamedSources | None = None
    """A source for validation, a list of files that are one source, or several sources by name:
    `{math: math_test.jsonl}`. The names appear in the metrics."""
    max_sequence_length: PositiveInt = 1024
    """Maximum number of tokens of a sequence, prompt and response together. The default is smaller for a model with
    fewer positions: their number."""
    overlong: Literal["drop", "truncate"] = "drop"
    """Drop records longer than max_sequence_length, or truncate them at the end."""
    chat_template: str | None = None
    """A Jinja template that replaces the tokenizer's chat template, or the path of a file that contains one. It is
    exported with the model."""
    columns: Columns = Field(default={})
    """Column of each field, for all sources: `{prompt: question, completion: answer}` reads `prompt` from the column
    `question`. Or for single sources: `{math.jsonl: {prompt: question, completion: answer}}`. The columns of other
    sources keep their names."""
    max_samples: PositiveInt | None = None
    """Read only this many records of each source of `train`, also of each in a list."""
    cache_dir: Path | None = None
    """Directory of tokenized data, which later runs reuse; the default is `$MCORE_RL_CACHE` or ~/.cache/mcore_rl."""

    @model_validator(mode="after")
    def _template_is_there(self) -> DataConfig:
        self.read_chat_template()
        return self

    @model_validator(mode="after")
    def _sets_have_plain_names(self) -> DataConfig:
        for name in self.validation_sets:
            if name and not re.fullmatch(r"[\w.-]+", name):
                raise ValueError(
                    f"validation: the name {name!r} of a set may contain only letters, digits, '_', '.' and '-'"
                )
        return self

    @model_validator(mode="after")
    def _sources_are_there_once(self) -> DataConfig:
        _check_once("train", self.train_sources, isinstance(self.train, dict))
        for source in self.validation_sets.values():
            _check_once("validation", _sources_in(source))
        return self

    @model_validator(mode="after")
    def _weights_have_a_sum(self) -> DataConfig:
        if isinstance(self.train, dict) and math.isinf(sum(self.train.values())):
            raise ValueError("train: the sum of the weights is infinite; use smaller weights")
        return self

    @model_validator(mode="after")
    def _columns_are_of_something(self) -> DataConfig:
        sources = set(self.sources)
        for key, names in self.columns.items():
            if not isinstance(names, str) and key not in sources:
                raise ValueError(
                    f"columns: {key} is not a source of train or validation; the sources are "
                    f"{', '.join(sorted(sources))}"
                )
        for source in sources:
            wanted: dict[str, str] = {}
            for name, column in self.columns_of(source).items():
                if (other := wanted.setdefault(column, name)) != name:
                    raise ValueError(f"columns: the column {column} cannot be both {other} and {name}")
        return self

    def columns_of(self, source: str) -> dict[str, str]:
        """Return a map from the fields of a record to the names of the source's columns."""
        by_source = {key: names for key, names in self.columns.items() if not isinstance(names, str)}
        if by_source:
            return by_source.get(source, {})
        return {name: column for name, column in self.columns.items() if isinstance(column, str)}

    @property
    def train_sources(self) -> list[str]:
        """All sources of training data."""
        return _sources_in(self.train)

    @property
    def validation_sets(self) -> Mapping[str, str | tuple[str, ...]]:
        """Sources of validation data by name; a single source, or a list of sources, has the name ""."""
        if self.validation is None:
            return {}
        return self.validation if isinstance(self.validation, dict) else {"": self.validation}

    @property
    def validation_sources(self) -> list[str]:
        """All sources of validation data."""
        return [name for source in self.validation_sets.values() for name in _sources_in(source)]

    @property
    def sources(self) -> list[str]:
        """All sources of data."""
        return [*self.train_sources, *self.validation_sources]

    def read_chat_template(self) -> str | None:
        """Return the text of the chat template."""
        return read_chat_template(self.chat_template)


def _check_once(key: str, sources: Iterable[str], weighted: bool = False) -> None:
    """Raise ValueError if records would be read twice, because sources are the same or one is a part of another."""
    found: dict[str, str] = {}
    for source in sources:
        path = os.path.realpath(source)
        if path in found:
            sum_up = ", and add up their weights" if weighted else ""
            raise ValueError(f"{key}: {found[path]} and {source} are the same source; leave one out{sum_up}")
        found[path] = source
    for path, source in found.items():
        for directory in Path(path).parents:
            if str(directory) in found:
                whole = found[str(directory)]
                raise ValueError(f"{key}: {source} is one of the files in {whole}; leave one of the two out")


def _sources_in(source: str | Iterable[str]) -> list[str]:
    return [source] if isinstance(source, str) else list(source)


def read_chat_template(template: str | None) -> str | None:
    """Return the text of a template; `template` is the text itself, or the path of a file.

    Raises:
        UserError: `template` is neither of these.
    """
    if template is None or "{" in template:
        return template
    try:
        return Path(template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise UserError(f"chat_template: {template} is neither a template nor the path of a template file") from None


class CheckpointConfig(Section):
    """When checkpoints are written, which ones are kept, and what a run resumes."""

    save_interval: PositiveInt | None = None
    """Steps between checkpoints. A checkpoint is always saved at the end of the run."""
    save_minutes: PositiveFloat | None = 30.0
    """Also save a checkpoint when the last one is older than this many minutes. This additional checkpoint is
    removed once a later one exists, unless `keep_last` keeps it."""
    keep_last: PositiveInt | None = None
    """Number of newest checkpoints to keep; the default is all."""
    keep_every: PositiveInt | None = None
    """Always keep checkpoints at multiples of this many steps."""
    on_failure: Literal["stop", "continue"] = "stop"
    """Stop or continue training when a checkpoint cannot be written."""
    asynchronous: bool = True
    """Continue training while a checkpoint is being written. For this, the host keeps memory for a copy of weights and
    optimizer state during the whole run. false: only while it writes."""
    timeout_seconds: PositiveInt = 1800
    """Time limit for writing a checkpoint; a longer write fails."""
    allow_partial: bool = False
    """Resume a checkpoint that lacks optimizer, schedule, random states or data position."""
    resume: str = "auto"
    """auto: the newest checkpoint in output_dir. none: start a new run. A checkpoint directory in output_dir:
    go back to it. Another directory: start from its checkpoint if output_dir has none yet."""
    overwrite: bool = False
    """Remove the files of an earlier run from output_dir; needs resume=none. Otherwise such a directory is refused."""
    best_metric: Name | None = None
    """A validation metric, such as `loss`. If data.validation has several sets, write SET/METRIC, such as
    `math/reward_mean`. A checkpoint is saved at each new best value, and the best checkpoint is always kept."""
    best_mode: Literal["min", "max"] | None = None
    """Whether the lowest or the highest best_metric is best; the default is min for losses and errors, max for
    accuracies, rewards and margins."""
    export_best: bool = False
    """Export the weights of the best checkpoint instead of the last weights."""
    export_hf: bool = True
    """Write the trained model to output_dir/hf at the end, and adapters to output_dir/adapter."""
    export_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the exported model. auto: each tensor has the precision that it has in model.path."""
    push_to_hub: Name | None = None
    """OWNER/NAME on the Hugging Face hub, to which output_dir/hf is uploaded at the end. A new repository is private.
    This needs `hf auth login` or $HF_TOKEN; write access is checked before training."""

    @model_validator(mode="after")
    def _consistent(self) -> CheckpointConfig:
        if self.overwrite and self.resume != "none":
            raise ValueError("overwrite: removes an earlier run, which then cannot be resumed; set resume=none")
        if self.keep_every is not None and self.keep_last is None:
            raise ValueError(
                "keep_every: has an effect only with keep_last; give keep_last too, or leave keep_every out"
            )
        if self.best_metric is None and (self.best_mode is not None or self.export_best):
            raise ValueError("best_mode, export_best: have no effect without best_metric; set best_metric too")
        if self.best_metric is not None and self.best_is_highest is None:
            raise ValueError(
                f"best_mode: must say whether the lowest (min) or the highest (max) {self.best_metric} is best"
            )
        if self.export_best and not self.export_hf:
            raise ValueError("export_best: export_hf=false exports nothing; leave out one of the two keys")
        if self.push_to_hub is not None and not is_repository_name(self.push_to_hub):
            raise ValueError(f"push_to_hub: must have the form OWNER/NAME, got {self.push_to_hub}")
        if self.push_to_hub is not None and not self.export_hf:
            raise ValueError("push_to_hub: export_hf=false exports nothing; leave out one of the two keys")
        return self

    @property
    def best_is_highest(self) -> bool | None:
        """True if the highest best_metric is best; None if best_mode is not set and the metric's name does not show
        it."""
        return greatest_is_best(self.best_metric or "") if self.best_mode is None else self.best_mode == "max"


def greatest_is_best(metric: str) -> bool | None:
    """Return whether a higher value of a metric is better, judging by its name; None if the name does not tell."""
    if metric.endswith(("loss", "error")):
        return False
    return True if re.search("accuracy|reward|margin|explained_variance|(pass|maj)@", metric) else None


class BatchConfig(Section):
    """The batch of an optimizer step, and its division into microbatches."""

    global_batch_size: PositiveInt = 32
    """Records (for preferences: pairs) of an optimizer step, over all processes."""
    packing: bool = True
    """Pack several sequences into one row of tokens_per_pack tokens; otherwise pad each row."""
    tokens_per_pack: PositiveInt | None = None
    """Width of a pack in tokens; the default is max_sequence_length (for pairs: twice that)."""
    micro_batch_size: PositiveInt = 1
    """Rows (or pairs) per microbatch without packing."""
    share_prefixes: bool = False
    """Compute a common prefix of several sequences only once in a pack: the prompt of a pair or group, the first turns
    of a conversation, a system prompt."""
    min_shared_tokens: PositiveInt = 32
    """share_prefixes: number of tokens that storing a prefix once must save, over all rows with this prefix."""

    @model_validator(mode="after")
    def _used(self) -> BatchConfig:
        if self.share_prefixes and not self.packing:
            raise ValueError("share_prefixes: needs packing=true")
        if not self.share_prefixes and self.min_shared_tokens != type(self).model_fields["min_shared_tokens"].default:
            raise ValueError("min_shared_tokens: has no effect with share_prefixes=false; leave min_shared_tokens out")
        if self.packing and self.micro_batch_size != 1:
            raise ValueError(
                "micro_batch_size: has no effect with packs, whose size is tokens_per_pack; set packing=false"
            )
        if not self.packing and self.tokens_per_pack is not None:
            raise ValueError("tokens_per_pack: has no effect with packing=false; leave tokens_per_pack out")
        return self


LARGEST_BFLOAT16_BETA = 0.95
"""Largest decay β that is allowed for a running mean in bfloat16. Rounding to 8 significant bits loses relative changes
below 2⁻⁹. The running mean of equal numbers therefore stops at a relative distance of 2⁻⁹ / (1 − β) from them. For this
β, the distance is 4 %.
"""


class OptimizerConfig(Section):
    """The optimizer and its learning-rate schedule, which counts optimizer steps."""

    name: Literal["adamw", "muon"] = "adamw"
    """Optimizer. muon updates the matrices of the hidden layers by Muon, and all other parameters by AdamW."""
    lr: FractionBelowOne = 1e-6
    """Learning rate after warm-up. Adapters (LoRA) need about ten times the rate of full training."""
    min_lr: NonNegative = 0.0
    """Learning rate that the schedule has reached after the last step; for inverse_square_root: the lower bound."""
    embedding_lr: FractionBelowOne | None = None
    """Learning rate of the embedding and the LM head; the default is `lr`."""
    vision_tower_lr: FractionBelowOne | None = None
    """Learning rate of a trained vision tower; the default is `lr`."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay (AdamW); biases and norms are not decayed."""
    adam_beta1: FractionBelowOne = 0.9
    """Decay of the running mean of gradients."""
    adam_beta2: FractionBelowOne = 0.999
    """Decay of the running mean of squared gradients."""
    adam_eps: PositiveFloat = 1e-8
    """Constant that is added to the root of the running mean of squares."""
    moments_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision in which AdamW's moments are kept; they are computed in float32."""
    muon_lr: FractionBelowOne | None = None
    """muon: learning rate of the matrices; the default is `lr`."""
    muon_momentum: FractionBelowOne = 0.95
    """muon: decay of the running mean of gradients, with Nesterov's correction."""
    muon_steps: PositiveInt = 5
    """muon: Newton–Schulz iterations of an update."""
    muon_scale: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """muon: factor of an update. match_rms_adamw: 0.2·√max(rows, columns), so that a learning rate chosen for AdamW
    fits. original: √max(1, rows / columns)."""
    clip_grad: NonNegative = 1.0
    """Maximum norm of the whole gradient; 0 disables clipping."""
    warmup_steps: Count = 0
    """Steps in which the learning rate rises from 0. The first one has the rate 0, as in Megatron and transformers."""
    warmup_ratio: FractionBelowOne = 0.0
    """Warm-up as a fraction of all steps."""
    schedule: Literal["constant", "linear", "cosine", "inverse_square_root", "wsd"] = "cosine"
    """How the learning rate decays to min_lr. wsd (warm-up, stable, decay) decays only in the last steps."""
    decay_ratio: Annotated[float, Field(gt=0, le=1), BeforeValidator(refuse_bool)] = 0.1
    """wsd: fraction of all steps in which the rate decays."""
    decay_shape: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "linear"
    """wsd: shape of the decay."""
    offload: bool = False
    """Keep the moments, and with bfloat16 the fp32 weights, in host memory except during the optimizer's step."""

    def steps_of_warmup(self, total: int) -> int:
        """Return the number of warm-up steps in a run of `total` steps. At least the last step trains with `lr`."""
        return min(self.warmup_steps or round(self.warmup_ratio * total), max(total - 1, 0))

    @model_validator(mode="after")
    def _ordered(self) -> OptimizerConfig:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr: must be at most lr ({self.lr}), got {self.min_lr}")
        if self.min_lr and self.schedule == "constant":
            raise ValueError(
                "min_lr: has no effect with schedule=constant, which keeps the learning rate at lr; leave min_lr out"
            )
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError("warmup_ratio: cannot be combined with warmup_steps; leave out one of the two")
        for name in ("muon_lr", "muon_momentum", "muon_steps", "muon_scale"):
            if self.name != "muon" and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name}: requires name=muon, not {self.name}")
        for name in ("adam_beta1", "adam_beta2"):
            if self.moments_dtype == "bfloat16" and getattr(self, name) > LARGEST_BFLOAT16_BETA:
                raise ValueError(
                    f"moments_dtype: with {name}={getattr(self, name)}, bfloat16 rounds away the changes of the "
                    f"moments; set {name} to at most {LARGEST_BFLOAT16_BETA}"
                )
        for name in ("decay_ratio", "decay_shape"):
            if self.schedule != "wsd" and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name}: requires schedule=wsd, not {self.schedule}")
        return self


class TrainerConfig(Section):
    """When training ends, when it validates, and when it prints metrics. Training ends at the first limit reached."""

    max_steps: PositiveInt | None = None
    """Maximum number of steps."""
    max_epochs: PositiveInt | None = None
    """Maximum number of passes over the data; the default is 1 if max_steps is not given either."""
    validation_interval: PositiveInt | None = None
    """Steps between validations; by default, the run does not validate at intervals."""
    validate_at_start: bool = False
    """Also validate before the first step, as step 0."""
    validate_at_end: bool = False
    """Also validate after the last step."""
    early_stopping_patience: PositiveInt | None = None
    """Stop after this many consecutive validations without an improvement of checkpoint.best_metric."""
    log_interval: PositiveInt = 1
    """Steps between lines on the console. metrics.jsonl always has every step."""

    @property
    def validates(self) -> bool:
        """Whether the run validates at least once."""
        return self.validation_interval is not None or self.validate_at_start or self.validate_at_end

    @model_validator(mode="before")
    @classmethod
    def _bounded(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("max_steps") is None and values.get("max_epochs") is None:
            return {**values, "max_epochs": 1}
        return values


class LoggingConfig(Section):
    """Trackers of metrics, in addition to the console and metrics.jsonl. Without a tracker's package, a run is refused,
    and a dry run warns."""

    tensorboard: bool = False
    """Write metrics to output_dir/tensorboard; needs the `tensorboard` extra."""
    wandb: Name | None = None
    """Project on Weights & Biases; needs the `wandb` extra. A resumed run continues the same W&B run."""
    wandb_tags: tuple[Name, ...] = ()
    """Tags of the W&B run."""
    mlflow: Name | None = None
    """Experiment on the MLflow server of `MLFLOW_TRACKING_URI`; needs the `mlflow` extra."""
    run_name: Name | None = None
    """Name of the run on Weights & Biases and MLflow; the default is a generated one."""

    @model_validator(mode="after")
    def _used(self) -> LoggingConfig:
        if self.wandb_tags and self.wandb is None:
            raise ValueError("wandb_tags: need a W&B project; set wandb to its name, or leave wandb_tags out")
        if self.run_name is not None and self.wandb is None and self.mlflow is None:
            raise ValueError("run_name: requires wandb or mlflow")
        return self


class ReferenceSyncConfig(Section):
    """Updates of the reference model (arXiv:2404.09656): every `interval` steps it becomes (1 − alpha) · reference +
    alpha · policy. A small alpha at every step gives an exponential moving average."""

    interval: PositiveInt = 512
    """Steps between updates of the reference."""
    alpha: Annotated[float, Field(gt=0, le=1), BeforeValidator(refuse_bool)] = 0.6
    """Weight of the policy. With LoRA it must be 1: averaging the A and B matrices does not average the weights A·B."""


class TrainingConfig(Section):
    """Configuration that all algorithms share."""

    algorithm: ClassVar[str]
    """Name of the algorithm."""
    seed: Seed = 0
    """Seed of the data order, dropout and sampling."""
    deterministic: bool = False
    """Use only deterministic kernels (torch, Megatron, cuBLAS, NCCL, Transformer Engine), which give the same bits in
    each run. An operation without a deterministic kernel ends the run; the message names the operation."""
    dry_run: bool = False
    """Check everything, print what the run would do, and stop (`--dry-run`)."""
    output_dir: Directory
    """Directory of everything that the run writes. A run with the same directory resumes."""
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    data: DataConfig
    batch: BatchConfig = BatchConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    trainer: TrainerConfig = TrainerConfig(max_epochs=1)
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()

    def for_device(self, on_gpu: bool, te_problem: str | None, simulates: bool) -> Self:
        """Return a copy in which no value of `model` or `parallel` is `auto` any more; see `ModelConfig.for_device`.

        Raises:
            UserError: the model requires Transformer Engine or FP8, but the run cannot use it.
        """
        model = self.model.for_device(on_gpu, te_problem, simulates)
        if model.fp8 is not None:
            of_blocks: Literal["power_of_two", "float32"] = "float32" if self.sampler_has_blocks else "power_of_two"
            model = model.model_copy(update={"fp8": model.fp8.with_scales(of_blocks)})
            if not simulates:
                model.check_fp8(on_gpu, te_problem)
        return self.model_copy(update={"model": model, "parallel": self.parallel.for_device(on_gpu)})

    @model_validator(mode="after")
    def _validates_something(self) -> TrainingConfig:
        trainer = self.trainer
        for key in ("validation_interval", "validate_at_start", "validate_at_end"):
            asked = getattr(trainer, key) and not type(trainer).model_fields[key].default
            if asked and self.data.validation is None:
                raise ValueError(f"trainer.{key}: needs validation data; give data.validation")
        if trainer.early_stopping_patience is not None and self.checkpoint.best_metric is None:
            raise ValueError("trainer.early_stopping_patience: needs checkpoint.best_metric")
        best = self.checkpoint.best_metric
        if best is not None and trainer.validation_interval is None:
            raise ValueError(
                "checkpoint.best_metric: is never measured without trainer.validation_interval; give this interval"
            )
        sets = [name for name in self.data.validation_sets if name]
        if best is not None and sets and best.partition("/")[0] not in sets:
            raise ValueError(
                f"checkpoint.best_metric: must start with the name of a validation set ({', '.join(sets)}), for "
                f"example {sets[0]}/{best.rpartition('/')[2]}"
            )
        return self

    @model_validator(mode="after")
    def _trains_embeddings(self) -> TrainingConfig:
        if self.optimizer.name == "muon" and self.model.lora is not None:
            raise ValueError(
                "optimizer.name: muon trains the matrices of hidden layers, but model.lora trains only adapters; "
                "use adamw"
            )
        if self.optimizer.embedding_lr is not None and self.model.lora is not None:
            raise ValueError(
                "optimizer.embedding_lr: has no effect, because model.lora trains only adapters; leave "
                "optimizer.embedding_lr out"
            )
        is_trained = self.model.vision_tower == "trained" and self.model.lora is None
        if self.optimizer.vision_tower_lr is not None and not is_trained:
            reason = "model.vision_tower=frozen" if self.model.lora is None else "model.lora trains only adapters"
            raise ValueError(
                f"optimizer.vision_tower_lr: has no effect, because {reason}; leave optimizer.vision_tower_lr out"
            )
        return self

    @model_validator(mode="after")
    def _mixes_weights(self) -> TrainingConfig:
        sync = self.reference_sync_of
        if sync is not None and sync.alpha != 1 and self.model.lora is not None:
            raise ValueError(
                "reference_sync.alpha: must be 1 with model.lora, because averages of the A and B matrices are "
                "not averages of the weights A·B"
            )
        return self

    @model_validator(mode="after")
    def _replays(self) -> TrainingConfig:
        if self.model.mtp_loss_scaling_factor and self.batch.share_prefixes:
            raise ValueError(
                "model.mtp_loss_scaling_factor: a token of a shared prefix has several next tokens; leave "
                "batch.share_prefixes out"
            )
        for option, what in (("moe_router_replay", "experts"), ("indexer_replay", "keys")):
            if getattr(self.model, option) and not self.samples:
                raise ValueError(
                    f"model.{option}: needs GRPO or PPO, whose samples record the {what} of each token; leave "
                    f"model.{option} out"
                )
        return self

    @property
    def reference_sync_of(self) -> ReferenceSyncConfig | None:
        """Settings for updates of the reference; None if the reference does not change."""
        return getattr(self, "reference_sync", None)

    @property
    def samples(self) -> bool:
        """True if the algorithm trains on rollouts."""
        return False

    @property
    def sampler_has_blocks(self) -> bool:
        """True if an engine samples in FP8 with fp32 scales of blocks (`FP8Config.scales`)."""
        return False

    @property
    def max_answer_length(self) -> int | None:
        """Maximum number of tokens that the policy generates in a training sequence; None if it does not generate."""
        return None

    @property
    def keeps_reference(self) -> bool:
        """True if the policy is compared with the weights that training starts from."""
        return False

    @property
    def rows_per_unit(self) -> int:
        """Number of neighbouring sequences that must be in the same microbatch: 2 for preference pairs, otherwise 1."""
        return 1

    @property
    def rows_per_group(self) -> int:
        """Number of neighbouring rows of a batch that have a common prefix."""
        return self.rows_per_unit

    @property
    def samples_per_step(self) -> int:
        """Number of records (or prompts) that all processes together use in a step."""
        return self.batch.global_batch_size

    def total_steps(self, num_samples: int) -> int:
        """Return the number of steps of a run on `num_samples` samples: max_steps, or the steps of max_epochs if fewer.

        The last batch may be smaller than the others.
        """
        limits = [self.trainer.max_steps or math.inf]
        if self.trainer.max_epochs:
            limits.append(math.ceil(self.trainer.max_epochs * num_samples / self.samples_per_step))
        return int(min(limits))

    def check_steps(self, steps: int) -> None:
        """Raise UserError if a run of `steps` steps would end before it trains the policy."""

    def longest_record(self, rows_per_unit: int) -> int:
        """Return the largest possible number of tokens, with padding, of a record of `rows_per_unit` sequences."""
        multiple = self.parallel.sequence_multiple
        return rows_per_unit * -(-self.data.max_sequence_length // multiple) * multiple

    @property
    def pack_multiple(self) -> int:
        """Multiple to which the length of a whole pack is padded, in tokens; 1 without FP8.

        It makes the tokens of each rank that divides a pack a multiple of `FP8Config.token_multiple`.
        """
        fp8, parallel = self.model.fp8, self.parallel
        if fp8 is None:
            return 1
        sequence_ranks = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
        return fp8.token_multiple * parallel.context_parallel_size * sequence_ranks

    def pack_width(self, rows_per_unit: int) -> int:
        """Return the width of a pack in tokens: batch.tokens_per_pack or, if that is not set, `longest_record`.

        Raises:
            UserError: batch.tokens_per_pack is smaller than `longest_record`.
        """
        width, longest = self.batch.tokens_per_pack, self.longest_record(rows_per_unit)
        if width is not None and width < longest:
            raise UserError(
                f"batch.tokens_per_pack={width}: must be at least {longest}, the padded length of the longest "
                f"possible record ({rows_per_unit} x data.max_sequence_length={self.data.max_sequence_length})"
            )
        return width or longest
