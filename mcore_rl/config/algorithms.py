"""Configurations of training on a fixed dataset, and of models other than the policy (reference, teacher, …)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import model_validator

from mcore_rl.config.base import FractionBelowOne, NonNegative, Section
from mcore_rl.config.parallel import LayoutConfig
from mcore_rl.config.rl import PPOConfig, RLConfig
from mcore_rl.config.sections import ModelConfig, OptimizerConfig, ReferenceSyncConfig, TrainingConfig
from mcore_rl.losses.options import Bounds, DistillationOptions, DPOOptions, KTOOptions, SFTOptions


class SFTOptimizerConfig(OptimizerConfig):
    lr: FractionBelowOne = 2e-5


class RMOptimizerConfig(OptimizerConfig):
    lr: FractionBelowOne = 1e-5


@dataclass(frozen=True, kw_only=True)
class DPOAlgorithmConfig(DPOOptions):
    """Options of the loss, and the source of the reference log-probabilities."""

    reference: Literal["auto", "swap", "precompute"] = "auto"
    """When the reference's log-probabilities are computed. precompute: all before training; they are stored in
    output_dir. swap: for each batch; without `reference_model`, the initial weights take the policy's place meanwhile
    (LoRA: the adapters are left out). auto: precompute if the run goes over all training data at least once, does not
    start from a checkpoint, and has a fixed reference; otherwise swap."""
    reference_model: str | None = None
    """A model directory to use as the reference instead of the initial policy; any size, same tokenizer."""

    def check(self) -> None:
        super().check()
        self.require(
            self.needs_reference or (self.reference != "precompute" and self.reference_model is None),
            f"preference_loss={', '.join(self.preference_losses)} has no reference; leave out reference and "
            "reference_model",
        )


class DPOConfig(TrainingConfig):
    algorithm: ClassVar[str] = "dpo"
    dpo: DPOAlgorithmConfig = DPOAlgorithmConfig()
    reference_sync: ReferenceSyncConfig | None = None

    @model_validator(mode="after")
    def _moves_a_copy(self) -> DPOConfig:
        if self.reference_sync is not None and (self.dpo.reference == "precompute" or not self.keeps_reference):
            raise ValueError(
                "reference_sync: needs a loss with a reference, without dpo.reference=precompute and "
                "dpo.reference_model; leave reference_sync out, or change these keys"
            )
        return self

    @model_validator(mode="after")
    def _scores_as_it_trains(self) -> DPOConfig:
        if self.dpo.needs_batch and self.model.lora is not None and self.model.lora.dropout > 0:
            raise ValueError(
                f"model.lora.dropout: preference_loss={', '.join(self.dpo.preference_losses)} sorts scores that "
                "are computed without dropout; set model.lora.dropout=0"
            )
        return self

    @property
    def keeps_reference(self) -> bool:
        return self.dpo.needs_reference and self.dpo.reference_model is None

    def precomputes(self, epochs: float) -> bool:
        """Return whether the reference's log-probabilities are computed before training.

        Args:
            epochs: how often the run goes over its training data.
        """
        pays = self.dpo.reference == "auto" and self.reference_sync is None and epochs >= 1
        return self.dpo.needs_reference and (pays or self.dpo.reference == "precompute")

    @property
    def rows_per_unit(self) -> int:
        return 2  # chosen and rejected


class KTOConfig(TrainingConfig):
    algorithm: ClassVar[str] = "kto"
    kto: KTOOptions = KTOOptions()
    reference_sync: ReferenceSyncConfig | None = None

    @model_validator(mode="after")
    def _has_others(self) -> KTOConfig:
        if self.kto.mismatched == "batch" and self.batch.global_batch_size < 2:
            raise ValueError(
                "kto.mismatched: batch needs another record's response, but batch.global_batch_size is 1; set "
                "kto.mismatched=dataset"
            )
        return self

    @property
    def keeps_reference(self) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class DistillationAlgorithmConfig(DistillationOptions):
    """Options of the loss, of the teacher, and of the responses on which the student is trained."""

    teacher: str | Mapping[str, str]
    """Directory of a model of any size with the student's vocabulary; `policy` means the student itself. Several
    teachers are written as `{name: directory}`. In each record, the column `teacher` then has the name of one teacher,
    or the weights of several teachers as `{name: weight}`."""
    teacher_parallel: LayoutConfig | None = None
    """Parallel layout of the teachers on the student's processes; null: the student's layout. The keys are the sizes in
    `parallel`, with the same defaults."""
    teacher_prompt: str | None = None
    """Prompt that the teacher reads instead of the record's, such as "{prompt} An example: {demonstration}". Each name
    in braces is replaced by the text of that column. If the record has messages, this prompt replaces only the last
    message before the response."""
    form: Literal["divergence", "sampled"] = "divergence"
    """divergence: minimise the divergence `kl_type` at each position. sampled: minimise the reverse KL by policy
    gradient, from the log-probabilities of the student's sampled tokens alone; needs on_policy=true."""
    topk: Annotated[int, Bounds(ge=1)] | None = 64
    """Compare the distributions over this many of the teacher's most likely tokens; null: over the whole vocabulary."""
    on_policy: bool = False
    """Train on the student's answers to the records' prompts instead of the records' responses."""
    max_new_tokens: Annotated[int, Bounds(ge=1)] = 256
    """on_policy: maximum number of tokens of an answer."""
    temperature: Annotated[float, Bounds(gt=0)] = 1.0
    """on_policy: temperature of the answers."""
    max_importance_weight: Annotated[float, Bounds(ge=1)] = 2.0
    """form=sampled: upper bound of a token's importance weight (student's probability / sampler's probability)."""

    @property
    def teachers(self) -> dict[str, str]:
        """Directory of each teacher by name; a single teacher has the name ""."""
        return {"": self.teacher} if isinstance(self.teacher, str) else dict(self.teacher)

    def check(self) -> None:
        super().check()
        self._check_teachers()
        self.require(  # the dictionary of loss options always has the key
            self.kl_type == "mixed" or self.mixed_kl_weight == 0.5,
            f"mixed_kl_weight applies to kl_type=mixed, not to {self.kl_type}; leave mixed_kl_weight out",
        )
        self.require(
            self.on_policy or (self.max_new_tokens, self.temperature) == (256, 1.0),
            "max_new_tokens and temperature apply to the student's own responses: set on_policy=true",
        )
        self.require(
            self.topk is not None or not self.zero_outside_topk,
            "zero_outside_topk: has no effect, because topk=null reads the whole vocabulary; leave "
            "zero_outside_topk out",
        )

    def _check_teachers(self) -> None:
        self.require(bool(self.teachers), "teacher: names no model")
        is_sampled = self.form == "sampled"
        self.require(
            not is_sampled or self.on_policy, "form=sampled trains on the student's own samples: set on_policy=true"
        )
        self.require(
            is_sampled or self.max_importance_weight == 2.0,
            "max_importance_weight applies to form=sampled only; leave max_importance_weight out",
        )
        for name, default in (("kl_type", "forward"), ("topk", 64), ("loss_temperature", 1.0)):
            self.require(
                not is_sampled or getattr(self, name) == default,
                f"{name}: has no effect with form=sampled; leave {name} out",
            )
        needs_topk = (
            (not isinstance(self.teacher, str), "teacher by name"),
            (self.teacher_prompt is not None, "teacher_prompt"),
            (STUDENT in self.teachers.values(), f"teacher={STUDENT}"),
            (self.kl_type == "reverse_unnormalized", "kl_type=reverse_unnormalized"),
        )
        for applies, name in needs_topk:
            self.require(self.topk is not None or not applies, f"topk: {name} needs a number of tokens, not null")
        self.require(
            STUDENT not in self.teachers.values() or self.teacher_prompt is not None,
            f"teacher={STUDENT}: the student can learn from itself only with another prompt; set teacher_prompt",
        )
        self.require(
            self.teacher_parallel is None or set(self.teachers.values()) != {STUDENT},
            f"teacher_parallel: has no effect, because teacher={STUDENT} has the student's layout; leave "
            "teacher_parallel out",
        )
        if self.teacher_prompt is None:
            return
        try:
            fields = [name for _, name, _, _ in Formatter().parse(self.teacher_prompt) if name is not None]
        except ValueError as error:
            fields = [str(error)]
        self.require(
            "prompt" in fields and all(name.isidentifier() for name in fields),
            "teacher_prompt: must contain {prompt}, the place of the record's own prompt, and may contain names of "
            f"columns in braces ({{{{ for a brace); got {', '.join(fields) or 'none'}",
        )


STUDENT = "policy"
"""Name that `distillation.teacher` contains in place of a directory if the student itself is the teacher."""


class DistillationConfig(TrainingConfig):
    algorithm: ClassVar[str] = "distill"
    optimizer: SFTOptimizerConfig = SFTOptimizerConfig()
    distillation: DistillationAlgorithmConfig

    @property
    def max_answer_length(self) -> int | None:
        return self.distillation.max_new_tokens if self.distillation.on_policy else None

    @model_validator(mode="after")
    def _leaves_room(self) -> DistillationConfig:
        if self.distillation.on_policy and self.distillation.max_new_tokens >= self.data.max_sequence_length:
            raise ValueError(
                "distillation.max_new_tokens: must be less than data.max_sequence_length "
                f"({self.data.max_sequence_length}), which counts the prompt too"
            )
        return self

    @model_validator(mode="after")
    def _reads_rows(self) -> DistillationConfig:
        if self.batch.share_prefixes:
            raise ValueError("batch.share_prefixes: is not supported for distillation; leave batch.share_prefixes out")
        return self


class RewardAlgorithmConfig(Section):
    """Options of the Bradley–Terry loss."""

    center_rewards_coefficient: NonNegative = 0.0
    """Weight of the loss term that keeps rewards near zero: the mean of (r_chosen + r_rejected)²."""


class RMConfig(TrainingConfig):
    algorithm: ClassVar[str] = "rm"
    optimizer: RMOptimizerConfig = RMOptimizerConfig()
    reward: RewardAlgorithmConfig = RewardAlgorithmConfig()

    @property
    def rows_per_unit(self) -> int:
        return 2  # chosen and rejected

    @model_validator(mode="before")
    @classmethod
    def _set_head(cls, values: Any) -> Any:
        """Set model.head to reward if the file does not set it. Another head is refused later."""
        if isinstance(values, dict) and isinstance(model := values.get("model"), dict):
            return {**values, "model": {"head": "reward", **model}}
        return values

    @model_validator(mode="after")
    def _rewards(self) -> RMConfig:
        if self.model.head != "reward":
            raise ValueError("model.head: must be reward to train a reward model; set model.head=reward")
        return self


class SFTConfig(TrainingConfig):
    algorithm: ClassVar[str] = "sft"
    optimizer: SFTOptimizerConfig = SFTOptimizerConfig()
    sft: SFTOptions = SFTOptions()


ConfigT = TypeVar("ConfigT", bound=TrainingConfig)

REFERENCE, TEACHER, CRITIC, JUDGE = "dpo.reference_model", "distillation.teacher", "critic.path", "environment.path"
"""Keys of the models other than the policy: DPO's reference, the teacher, PPO's critic, and the judging reward
model."""


def second_model_configs(config: TrainingConfig) -> dict[str, TrainingConfig]:
    """Return the configurations of all models other than the policy. The keys of the result name the models."""
    found: dict[str, TrainingConfig] = {}
    if isinstance(config, DPOConfig) and config.dpo.reference_model is not None:
        found[REFERENCE] = reference_config(config)
    if isinstance(config, DistillationConfig):
        for name, teacher in teacher_configs(config).items():
            found[f"{TEACHER}.{name}" if name else TEACHER] = teacher
    if isinstance(config, RLConfig) and config.environment.name == "reward_model":
        found[JUDGE] = judge_config(config)
    if isinstance(config, PPOConfig):
        found[CRITIC] = critic_config(config)
    return found


TEACHER_LAYOUT, JUDGE_LAYOUT = "distillation.teacher_parallel", "environment.parallel"
"""Keys that give the teachers and the judging reward model a parallel layout of their own."""


def own_layouts(config: TrainingConfig) -> dict[str, LayoutConfig]:
    """Return the parallel layouts of models with a layout of their own.

    The keys of the result are the configuration keys that set these layouts.
    """
    found: dict[str, LayoutConfig | None] = {}
    if isinstance(config, DistillationConfig):
        found[TEACHER_LAYOUT] = config.distillation.teacher_parallel
    if isinstance(config, RLConfig):
        found[JUDGE_LAYOUT] = config.environment.parallel
    return {key: parallel for key, parallel in found.items() if parallel is not None}


def own_layout_key(config: TrainingConfig, key: str) -> str | None:
    """Return the key that sets the layout of the model named by `key`; None if it has the trained model's layout."""
    layout = TEACHER_LAYOUT if key.startswith(TEACHER) else JUDGE_LAYOUT if key == JUDGE else None
    return layout if layout in own_layouts(config) else None


def reference_config(config: DPOConfig) -> DPOConfig:
    """Return the configuration of a reference model that has its own directory, `dpo.reference_model`.

    It is computed in the policy's precision, also if that is FP8.
    """
    found = _with_frozen(config, Path(config.dpo.reference_model or ""))
    precision = {"fp8": config.model.fp8, "transformer_impl": config.model.transformer_impl}
    return found.model_copy(update={"model": found.model.model_copy(update=precision)})


def teacher_configs(config: DistillationConfig) -> dict[str, DistillationConfig]:
    """Return the configuration of each teacher except the student itself, by the teacher's name."""
    teachers = config.distillation.teachers
    return {
        name: _in_layout(_with_frozen(config, Path(path)), config.distillation.teacher_parallel)
        for name, path in teachers.items()
        if path != STUDENT
    }


def _with_frozen(config: ConfigT, path: Path) -> ConfigT:
    own = config.model
    model = ModelConfig(path=path, dtype=own.dtype, trust_remote_code=own.trust_remote_code)
    return config.model_copy(update={"model": model})


def critic_config(config: PPOConfig) -> PPOConfig:
    """Return the configuration of a critic, with its own optimizer."""
    return config.model_copy(update={"model": config.critic_model, "optimizer": config.critic.optimizer})


def judge_config(config: RLConfig) -> RLConfig:
    """Return the configuration of a judging reward model. Its conversations have their own maximum length."""
    path = config.environment.path
    assert path is not None, "the configuration asks for it"
    limit = config.environment.max_sequence_length or 2 * config.data.max_sequence_length
    model = ModelConfig(path=path, dtype=config.model.dtype, head="reward")
    data = config.data.model_copy(update={"max_sequence_length": limit})
    batch = config.batch.model_copy(update={"share_prefixes": False})
    judge = config.model_copy(update={"model": model, "data": data, "batch": batch})
    return _in_layout(judge, config.environment.parallel)


def _in_layout(config: ConfigT, own: LayoutConfig | None) -> ConfigT:
    """Return a frozen model's configuration `config` with the parallel layout `own`; None leaves the layout as it is.

    If the model's longest record needs more than batch.tokens_per_pack, this value is increased. The record may be
    longer, or have more padding, than the trained model's longest record.
    """
    if own is not None:
        config = config.model_copy(update={"parallel": config.parallel.model_copy(update=own.model_dump())})
    if (width := config.batch.tokens_per_pack) is None:
        return config
    batch = config.batch.model_copy(update={"tokens_per_pack": max(width, config.longest_record(rows_per_unit=1))})
    return config.model_copy(update={"batch": batch})
