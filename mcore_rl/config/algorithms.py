"""The configuration of each algorithm: the shared sections and its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import model_validator

from mcore_rl.config.base import BelowOne, NonNegative, Section
from mcore_rl.config.rollouts import RLConfig, RolloutOptions
from mcore_rl.config.sections import OptimizerConfig, ReferenceSyncConfig, TrainingConfig
from mcore_rl.losses.options import Bounds, DistillationOptions, DPOOptions, KTOOptions


class SFTOptimizerConfig(OptimizerConfig):
    lr: BelowOne = 2e-5


class RMOptimizerConfig(OptimizerConfig):
    lr: BelowOne = 1e-5


@dataclass(frozen=True, kw_only=True)
class DPOAlgorithmConfig(DPOOptions):
    """The options of the loss, and where the reference log-probabilities come from."""

    reference: Literal["auto", "swap", "precompute"] = "auto"
    """swap: for each batch, by the initial weights in the policy's place (with LoRA: without the adapters),
    or by `reference_model`; precompute: all before training, kept in output_dir; auto: precompute if the run goes over
    all training data at least once, did not begin from a checkpoint, and has a reference that does not move."""
    reference_model: str | None = None
    """A model directory that is the reference in place of the initial policy; of any size, with the same tokenizer."""

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
                "reference_sync: moves the policy's own reference: no dpo.reference=precompute, no reference_model"
            )
        return self

    @property
    def keeps_reference(self) -> bool:
        return self.dpo.needs_reference and self.dpo.reference_model is None

    def precomputes(self, epochs: float) -> bool:
        """Whether the reference's log-probabilities are computed before training.

        Args:
            epochs: how often the run goes over its training data.
        """
        pays = self.dpo.reference == "auto" and self.reference_sync is None and epochs >= 1
        return self.dpo.needs_reference and (pays or self.dpo.reference == "precompute")

    @property
    def rows_per_unit(self) -> int:
        return 2  # chosen and rejected


class GRPOAlgorithmConfig(RolloutOptions):
    """Rollouts and what becomes of their rewards."""

    advantage_estimator: Literal["grpo", "dr_grpo", "rloo", "reinforce_plus_plus"] = "grpo"
    """How rewards become advantages."""
    use_leave_one_out_baseline: bool | None = None
    """grpo: compare each response with the others of its group, not with all of them; null: no."""
    normalize_rewards: bool | None = None
    """grpo: divide by the deviation of those that it is compared with; null: yes. dr_grpo is grpo without this,
    rloo without this and with the other."""
    advantage_deviation: Literal["sample", "population"] = "sample"
    """grpo: whether that deviation divides by n − 1 or by n."""
    minus_baseline: bool = False
    """reinforce_plus_plus: subtract the mean of each prompt's rewards first."""

    @property
    def compared(self) -> Literal["group", "batch"]:
        whole_batch = self.advantage_estimator == "reinforce_plus_plus" and not self.minus_baseline
        return "batch" if whole_batch else "group"

    @property
    def baseline_and_scale(self) -> tuple[bool, bool]:
        """Whether the baseline leaves one out, and whether advantages are divided by the deviation."""
        if self.advantage_estimator == "grpo":
            return bool(self.use_leave_one_out_baseline), self.normalize_rewards is not False
        return self.advantage_estimator == "rloo", False

    @model_validator(mode="after")
    def _estimates(self) -> GRPOAlgorithmConfig:
        of_grpo = {"use_leave_one_out_baseline", "normalize_rewards", "advantage_deviation"}
        for name in sorted(self.model_fields_set & (of_grpo | {"minus_baseline"})):
            owner = "grpo" if name in of_grpo else "reinforce_plus_plus"
            if self.advantage_estimator != owner and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name}: is an option of advantage_estimator={owner}")
        return self

    @model_validator(mode="after")
    def _grouped(self) -> GRPOAlgorithmConfig:
        if self.num_generations_per_prompt == 1 and self.advantage_estimator != "reinforce_plus_plus":
            raise ValueError(
                f"num_generations_per_prompt: {self.advantage_estimator} compares responses; use 2 or more"
            )
        return self


class GRPOConfig(RLConfig):
    algorithm: ClassVar[str] = "grpo"
    grpo: GRPOAlgorithmConfig = GRPOAlgorithmConfig()

    @model_validator(mode="after")
    def _rewards_tokens(self) -> GRPOConfig:
        if self.loss.use_kl_in_reward and self.grpo.advantage_estimator != "reinforce_plus_plus":
            raise ValueError("loss.use_kl_in_reward: needs grpo.advantage_estimator=reinforce_plus_plus")
        return self


class KTOConfig(TrainingConfig):
    algorithm: ClassVar[str] = "kto"
    kto: KTOOptions = KTOOptions()
    reference_sync: ReferenceSyncConfig | None = None

    @property
    def keeps_reference(self) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class DistillationAlgorithmConfig(DistillationOptions):
    """The options of the loss, who teaches, and on whose responses."""

    teacher: str
    """A model directory, of any size, with the student's vocabulary."""
    topk: Annotated[int, Bounds(ge=1)] | None = 64
    """The teacher's likeliest tokens, over which it is compared; null: the whole vocabulary."""
    on_policy: bool = False
    """Train on the student's answers to the records' prompts; otherwise on the records' responses."""
    max_new_tokens: Annotated[int, Bounds(ge=1)] = 256
    """on_policy: of an answer."""
    temperature: Annotated[float, Bounds(gt=0)] = 1.0
    """on_policy: that answers are drawn with."""

    def check(self) -> None:
        super().check()
        self.require(  # a dictionary of the loss's options has it in any case
            self.kl_type == "mixed" or self.mixed_kl_weight == 0.5,
            f"mixed_kl_weight applies to kl_type=mixed, not to {self.kl_type}",
        )
        self.require(
            self.on_policy or (self.max_new_tokens, self.temperature) == (256, 1.0),
            "max_new_tokens and temperature are of the student's own answers: set on_policy=true",
        )
        self.require(
            self.topk is not None or not self.zero_outside_topk,
            "zero_outside_topk: nothing is outside the whole vocabulary (topk=null); leave it out",
        )


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
                f"({self.data.max_sequence_length}), of which the prompt is a part"
            )
        return self


class RewardAlgorithmConfig(Section):
    """Options of the Bradley–Terry loss."""

    center_rewards_coefficient: NonNegative = 0.0
    """Weight of the mean of (r_chosen + r_rejected)², which keeps rewards near zero."""


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
        """The head of this algorithm's models is the reward, unless the file says otherwise, which is refused."""
        if isinstance(values, dict) and isinstance(model := values.get("model"), dict):
            return {**values, "model": {"head": "reward", **model}}
        return values

    @model_validator(mode="after")
    def _rewards(self) -> RMConfig:
        if self.model.head != "reward":
            raise ValueError("model.head: a reward model is trained with head=reward")
        return self


class SFTConfig(TrainingConfig):
    algorithm: ClassVar[str] = "sft"
    optimizer: SFTOptimizerConfig = SFTOptimizerConfig()
