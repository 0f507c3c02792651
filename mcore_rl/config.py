"""The configuration: frozen pydantic models, one per YAML section, and the loader.

`load_config(DPOConfig, "configs/dpo_cpu.yaml", ["optimizer.lr=1e-4"])` reads a file, applies
`section.key=value` overrides and answers anything wrong with one line that names the key.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from mcore_rl.errors import UserError


def _refuse_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")
    return value


Int = Annotated[int, BeforeValidator(_refuse_bool)]
Positive = Annotated[int, BeforeValidator(_refuse_bool), Field(ge=1)]
Count = Annotated[int, BeforeValidator(_refuse_bool), Field(ge=0)]
NonNegative = Annotated[float, BeforeValidator(_refuse_bool), Field(ge=0)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ModelConfig(Section):
    """The model directory and how it is held."""

    path: Path
    dtype: Literal["float32", "bfloat16"] = "float32"
    head: Literal["lm", "reward"] = "lm"
    """reward: one number a sequence, from its last token, in place of the vocabulary."""
    trust_remote_code: bool = False
    recompute_activations: bool = False
    """Keep only each layer's input for the backward pass and compute the layer again."""


class ParallelConfig(Section):
    """Sizes of the parallel layout; data parallelism takes the processes that are left."""

    tensor_model_parallel_size: Positive = 1
    pipeline_model_parallel_size: Positive = 1
    virtual_pipeline_model_parallel_size: Positive | None = None
    context_parallel_size: Positive = 1
    expert_model_parallel_size: Positive = 1
    sequence_parallel: bool = False
    timeout_seconds: Positive = 600
    """A collective that takes longer ends the run instead of hanging it."""

    @model_validator(mode="after")
    def _supported(self) -> ParallelConfig:
        if self.virtual_pipeline_model_parallel_size not in (None, 1):
            raise ValueError("virtual_pipeline_model_parallel_size: virtual pipeline stages are not supported; use 1")
        if self.expert_model_parallel_size != 1:
            raise ValueError("expert_model_parallel_size: mixtures of experts are not supported; use 1")
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ValueError("sequence_parallel: needs tensor_model_parallel_size > 1")
        return self

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
        return world_size // self.model_parallel_size


class DataConfig(Section):
    """Where records come from and what happens to long ones."""

    train: str
    validation: str | None = None
    max_sequence_length: Positive
    overlong: Literal["drop", "truncate"] = "drop"


class BatchConfig(Section):
    """One optimizer step's batch and its cutting into microbatches."""

    global_batch_size: Positive
    packing: bool = True
    tokens_per_pack: Positive | None = None
    """Width of a pack in tokens; max_sequence_length if not given (twice that for pairs)."""
    micro_batch_size: Positive = 1
    """Rows (or pairs) per microbatch without packing."""


class OptimizerConfig(Section):
    """AdamW and its schedule; the unit of `warmup_steps` is optimizer steps."""

    lr: NonNegative
    min_lr: NonNegative = 0.0
    weight_decay: NonNegative = 0.0
    adam_beta1: NonNegative = 0.9
    adam_beta2: NonNegative = 0.999
    adam_eps: NonNegative = 1e-8
    clip_grad: NonNegative = 1.0
    warmup_steps: Count = 0
    schedule: Literal["constant", "linear", "cosine"] = "cosine"

    @model_validator(mode="after")
    def _ordered(self) -> OptimizerConfig:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr: must be at most lr ({self.lr}), got {self.min_lr}")
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
    """auto: the newest checkpoint in output_dir; none: start afresh; or a checkpoint directory."""
    export_hf: bool = True


class LoggingConfig(Section):
    tensorboard: bool = False
    wandb: str | None = None
    """Project name on Weights & Biases; needs the `wandb` extra."""


class TrainingConfig(Section):
    """What every algorithm shares."""

    seed: Int = 0
    deterministic: bool = False
    """Ask torch for deterministic kernels."""
    output_dir: Path
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    data: DataConfig
    batch: BatchConfig
    optimizer: OptimizerConfig
    trainer: TrainerConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()


class DPOAlgorithmConfig(Section):
    """The keys of the loss, and where the reference log-probabilities come from."""

    reference_policy_kl_penalty: NonNegative = 0.1
    preference_loss_weight: NonNegative = 1.0
    sft_loss_weight: NonNegative = 0.0
    preference_average_log_probs: bool = False
    sft_average_log_probs: bool = False
    preference_loss: Literal["sigmoid", "ipo"] = "sigmoid"
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    reference: Literal["swap", "precompute"] = "swap"


class DPOConfig(TrainingConfig):
    dpo: DPOAlgorithmConfig = DPOAlgorithmConfig()


class ClippedPGConfig(Section):
    """The options of `ClippedPGLossFn`; what each does is written there."""

    reference_policy_kl_penalty: NonNegative = 0.0
    ratio_clip_min: NonNegative = 0.2
    ratio_clip_max: NonNegative = 0.2
    ratio_clip_c: NonNegative | None = None
    use_on_policy_kl_approximation: bool = False
    use_importance_sampling_correction: bool = False
    token_level_loss: bool = True
    disable_ppo_ratio: bool = False
    sequence_level_importance_ratios: bool = False
    clip_type: Literal["ppo", "cispo"] = "ppo"
    dr_grpo_max_tokens: Positive | None = None
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_clamp: NonNegative | None = 20.0
    kl_gradient: Literal["detached", "score"] = "detached"
    importance_sampling_level: Literal["token", "sequence"] | None = None
    truncated_importance_sampling_type: Literal["tis", "icepop", "seq-mask-tis"] = "tis"
    truncated_importance_sampling_ratio: NonNegative | None = None
    truncated_importance_sampling_ratio_min: NonNegative = 0.0
    entropy_bonus: NonNegative = 0.0


class EnvironmentConfig(Section):
    """Who judges responses: see `mcore_rl.environments.judges`."""

    name: Literal["exact_match", "math", "try_again", "function"] = "exact_match"
    pattern: str | None = None
    """exact_match, try_again: a regular expression whose first group, in its last match, is the answer."""
    function: str | None = None
    """function: `module:function`, called with (message_log, record); returns a reward or a Step."""
    max_turns: Positive = 1
    """Responses in a conversation at most."""
    time_limit_seconds: Annotated[float, BeforeValidator(_refuse_bool), Field(gt=0)] = 10.0
    """A sample whose judgement takes longer counts as failed."""
    num_workers: Positive = 2
    """Judging processes."""


class GRPOAlgorithmConfig(Section):
    """Rollouts and what becomes of their rewards."""

    num_prompts_per_step: Positive
    num_generations_per_prompt: Positive
    max_new_tokens: Positive
    temperature: Annotated[float, BeforeValidator(_refuse_bool), Field(gt=0)] = 1.0
    top_k: Positive | None = None
    top_p: Annotated[float, BeforeValidator(_refuse_bool), Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, BeforeValidator(_refuse_bool), Field(ge=0, le=1)] = 0.0
    stop_strings: list[str] = []
    generation_batch_size: Positive = 64
    """Sequences that a replica generates at a time."""
    advantage_estimator: Literal["grpo", "dr_grpo", "rloo", "reinforce_plus_plus"] = "grpo"
    num_updates_per_rollout: Positive = 1
    """Optimizer steps on each step's rollouts."""
    dynamic_sampling_rounds: Positive = 1
    """More than 1: groups without signal are replaced by new prompts, in so many rounds at most (DAPO)."""
    overlong_cache_length: Positive | None = None
    """Soft penalty on the last so many tokens before max_new_tokens (DAPO); none if not given."""
    mask_truncated: bool = False
    """Whether responses cut off by max_new_tokens are left out of the loss."""
    num_logged_samples: Count = 4
    """Completions written to samples.jsonl each step."""

    @model_validator(mode="after")
    def _grouped(self) -> GRPOAlgorithmConfig:
        if self.num_generations_per_prompt == 1 and self.advantage_estimator != "reinforce_plus_plus":
            raise ValueError(
                f"num_generations_per_prompt: {self.advantage_estimator} compares responses; use 2 or more"
            )
        if self.overlong_cache_length is not None and self.overlong_cache_length > self.max_new_tokens:
            raise ValueError(f"overlong_cache_length: must be at most max_new_tokens ({self.max_new_tokens})")
        return self


class GRPOConfig(TrainingConfig):
    grpo: GRPOAlgorithmConfig
    loss: ClippedPGConfig = ClippedPGConfig()
    environment: EnvironmentConfig = EnvironmentConfig()

    @model_validator(mode="before")
    @classmethod
    def _set_batch_size(cls, values: Any) -> Any:
        """The global batch is all responses of a step."""
        if not (isinstance(values, dict) and isinstance(values.get("grpo"), dict)):
            return values
        sizes = [values["grpo"].get(f"num_{what}") for what in ("prompts_per_step", "generations_per_prompt")]
        batch = values.get("batch") or {}
        if isinstance(batch, dict) and all(isinstance(size, int) for size in sizes):
            total = sizes[0] * sizes[1]
            if batch.get("global_batch_size", total) != total:
                raise ValueError(f"batch.global_batch_size: is prompts x generations here ({total}); leave it out")
            values = {**values, "batch": {**batch, "global_batch_size": total}}
        return values

    @model_validator(mode="after")
    def _fits(self) -> GRPOConfig:
        if self.grpo.max_new_tokens >= self.data.max_sequence_length:
            raise ValueError(
                f"grpo.max_new_tokens: must be less than data.max_sequence_length ({self.data.max_sequence_length}), "
                "which holds the prompt too"
            )
        if self.environment.name == "function" and not self.environment.function:
            raise ValueError("environment.function: name the function, as module:function")
        return self


class RewardAlgorithmConfig(Section):
    center_rewards_coefficient: NonNegative = 0.0
    """Weight of the mean of (r_chosen + r_rejected)², which keeps rewards near zero."""


class RMConfig(TrainingConfig):
    reward: RewardAlgorithmConfig = RewardAlgorithmConfig()

    @model_validator(mode="after")
    def _rewards(self) -> RMConfig:
        if self.model.head != "reward":
            raise ValueError("model.head: a reward model is trained with head=reward")
        return self


class SFTConfig(TrainingConfig):
    pass


ConfigT = TypeVar("ConfigT", bound=Section)


def load_config(config_type: type[ConfigT], path: str | Path, overrides: Sequence[str] = ()) -> ConfigT:
    """Read `path` (YAML) and apply `section.key=value` overrides (values are YAML too).

    Raises:
        UserError: the file is missing or not YAML, or a key or value is wrong; names file and key.
    """
    return build_config(config_type, read_yaml(path), overrides, origin=str(path))


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The sections of a configuration file, unchecked.

    Raises:
        UserError: the file cannot be read, or does not hold sections.
    """
    try:
        values = yaml.safe_load(Path(path).read_text()) or {}
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: must hold sections of keys, found a {type(values).__name__}")
    return values


def build_config(config_type: type[ConfigT], values: dict[str, Any], overrides: Sequence[str], origin: str) -> ConfigT:
    """A configuration from a file's values and overrides; `origin` names the file in errors."""
    for override in overrides:
        _apply_override(values, override)
    try:
        return config_type.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{origin}: {_explain(config_type, error)}") from None


def resolved_yaml(config: Section) -> str:
    """The whole configuration, defaults included, as YAML that `load_config` reads back."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _apply_override(values: dict[str, Any], override: str) -> None:
    name, separator, text = override.partition("=")
    if not separator or not name:
        raise UserError(f"override {override!r}: write it as section.key=value")
    *sections, key = name.split(".")
    for depth, section in enumerate(sections, start=1):
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise UserError(f"override {override!r}: {'.'.join(sections[:depth])} is a value, not a section")
    try:
        values[key] = yaml.safe_load(text)
    except yaml.YAMLError:
        raise UserError(f"override {override!r}: {text!r} is not a YAML value") from None


def _explain(config_type: type[Section], error: ValidationError) -> str:
    """All problems in one line, unknown keys with the nearest known one."""
    return "; ".join(_explain_one(config_type, problem) for problem in error.errors())


def _explain_one(config_type: type[Section], problem: Any) -> str:
    location = [str(part) for part in problem["loc"]]
    name = ".".join(location)
    if problem["type"] == "extra_forbidden":
        known = _fields_at(config_type, location[:-1])
        if near := difflib.get_close_matches(location[-1], known, n=1):
            return f"unknown key {name}; did you mean {'.'.join([*location[:-1], *near])}?"
        return f"unknown key {name}; known here are {', '.join(known)}"
    if problem["type"] == "missing":
        return f"{name} is required"
    message = problem["msg"].removeprefix("Value error, ")
    if isinstance(problem["input"], str | int | float | bool):
        message += f" (got {problem['input']!r})"
    return f"{name}: {message}"


def _fields_at(config_type: type[Section], sections: Sequence[str]) -> list[str]:
    for section in sections:
        annotation = config_type.model_fields[section].annotation
        assert isinstance(annotation, type) and issubclass(annotation, Section)
        config_type = annotation
    return list(config_type.model_fields)
