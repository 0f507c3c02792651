"""The configuration of each algorithm: the shared sections and its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from mcore_rl.config.environment import EnvironmentConfig
from mcore_rl.config.fields import BelowOne, Count, NonNegative, Positive, Section, refuse_bool
from mcore_rl.config.generation import GenerationConfig
from mcore_rl.config.sections import OptimizerConfig, ReferenceSyncConfig, TrainerConfig, TrainingConfig
from mcore_rl.loss_options import Bounds, ClippedPGOptions, DistillationOptions, DPOOptions, KTOOptions


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


class RolloutOptions(Section):
    """Of every algorithm that trains on rollouts."""

    num_prompts_per_step: Positive = 16
    """Prompts of a step, over all processes."""
    num_generations_per_prompt: Positive = 8
    """Responses to each prompt: its group."""
    max_new_tokens: Positive = 256
    """Tokens of a response at most."""
    temperature: Annotated[float, Field(gt=0), BeforeValidator(refuse_bool)] = 1.0
    """Logits are divided by it, in sampling and in training."""
    top_k: Positive | None = None
    """Sample among the k likeliest tokens only."""
    top_p: Annotated[float, Field(gt=0, le=1), BeforeValidator(refuse_bool)] = 1.0
    """Sample among the likeliest tokens that together have this probability."""
    min_p: Annotated[float, Field(ge=0, le=1), BeforeValidator(refuse_bool)] = 0.0
    """Sample among tokens that have at least this part of the likeliest one's probability."""
    stop_strings: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end a response."""
    generation_batch_size: Positive = 64
    """Sequences that a replica generates at a time."""
    advantage_epsilon: NonNegative = 1e-4
    """Added to the deviation that advantages are divided by."""
    num_updates_per_rollout: Positive = 1
    """Optimizer steps on each step's rollouts."""
    dynamic_sampling_rounds: Positive = 1
    """More than 1: groups without signal are replaced by new prompts, in so many rounds at most (DAPO)."""
    max_staleness: Count = 0
    """Responses for so many further steps are generated while a step is trained; their weights are so many versions old
    at most when they are trained on. More than 0 needs generation.backend=vllm (docs/rollouts.md)."""
    overlong_cache_length: Positive | None = None
    """Soft penalty on the last so many tokens before max_new_tokens (DAPO); none if not given."""
    mask_truncated: bool = False
    """Whether responses cut off by max_new_tokens are left out of the loss."""
    num_logged_samples: Count = 4
    """Completions written to samples.jsonl each step, of as many prompts as there are."""

    @property
    def filters_tokens(self) -> bool:
        """Whether some tokens are never drawn, so that samples are of another distribution than what is trained."""
        return self.top_k is not None or self.top_p < 1 or self.min_p > 0

    @property
    def compared(self) -> Literal["group", "batch"] | None:
        """Among which responses rewards must differ for there to be something to learn; None: they need not."""
        return None

    @model_validator(mode="after")
    def _has_room(self) -> Self:
        if self.overlong_cache_length is not None and self.overlong_cache_length > self.max_new_tokens:
            raise ValueError(f"overlong_cache_length: must be at most max_new_tokens ({self.max_new_tokens})")
        if self.dynamic_sampling_rounds > 1 and self.num_generations_per_prompt == 1:
            raise ValueError("dynamic_sampling_rounds: compares a prompt's responses; use 2 generations or more")
        return self


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


def _translated(loss: Any) -> Any:
    """Under this package's names, if written under the reference's."""
    return ClippedPGOptions.translate(loss) if isinstance(loss, dict) else loss


class GRPOTrainerConfig(TrainerConfig):
    validate_at_start: bool = True


class RLConfig(TrainingConfig):
    """What GRPO and PPO share: rollouts, their judging, a clipped policy gradient."""

    trainer: GRPOTrainerConfig = GRPOTrainerConfig(max_epochs=1)
    loss: Annotated[ClippedPGOptions, BeforeValidator(_translated)] = ClippedPGOptions()
    environment: EnvironmentConfig = EnvironmentConfig()
    generation: GenerationConfig = GenerationConfig()
    reference_sync: ReferenceSyncConfig | None = None

    @property
    def rollouts(self) -> RolloutOptions:
        """The algorithm's own options, in the section of its name."""
        options: RolloutOptions = getattr(self, self.algorithm)
        return options

    @property
    def first_update_step(self) -> int:
        """The first step that trains the policy."""
        return 1

    @model_validator(mode="after")
    def _has_a_reference(self) -> Self:
        if self.reference_sync is not None and self.loss.reference_policy_kl_penalty == 0:
            raise ValueError("reference_sync: there is no reference with loss.reference_policy_kl_penalty=0")
        return self

    @model_validator(mode="before")
    @classmethod
    def _set_batch_size(cls, values: Any) -> Any:
        """The global batch is all responses of a step."""
        if not (isinstance(values, dict) and isinstance(values.get(cls.algorithm, {}), dict)):
            return values
        given, defaults = values.get(cls.algorithm, {}), cls.model_fields[cls.algorithm].default
        names = ("num_prompts_per_step", "num_generations_per_prompt")
        sizes = [given.get(name, getattr(defaults, name)) for name in names]
        batch = values.get("batch") or {}
        if isinstance(batch, dict) and all(isinstance(size, int) for size in sizes):
            total = sizes[0] * sizes[1]
            if batch.get("global_batch_size", total) != total:
                raise ValueError(f"batch.global_batch_size: is prompts x generations here ({total}); leave it out")
            values = {**values, "batch": {**batch, "global_batch_size": total}}
        return values

    @property
    def samples(self) -> bool:
        return True

    @property
    def max_answer_length(self) -> int:
        return self.rollouts.max_new_tokens

    @property
    def keeps_reference(self) -> bool:
        return self.loss.reference_policy_kl_penalty > 0

    def samples_exactly(self, replays: bool = False) -> bool:
        """Whether the sampler's log-probabilities are the policy's own: it samples itself, in the precision that it is
        trained in, from all tokens.

        Args:
            replays: trains on a recording's rollouts.
        """
        own = not replays and self.generation.backend == "megatron"
        return own and self.model.dtype == "float32" and not self.rollouts.filters_tokens

    def is_on_policy(self, replays: bool = False) -> bool:
        """Whether the only update on samples begins from what they were drawn with, unless the loss's options say
        which."""
        chosen = self.loss.force_on_policy_ratio
        only = self.rollouts.num_updates_per_rollout == 1
        return (only and self.samples_exactly(replays)) if chosen is None else chosen

    def scores_samples(self, replays: bool = False) -> bool:
        """Whether a step computes its samples' log-probabilities before its updates: where the loss or the rewards need
        others than the sampler's."""
        return not self.is_on_policy(replays) or (self.loss.use_kl_in_reward and not self.samples_exactly(replays))

    def decided_loss(self, replays: bool = False) -> ClippedPGOptions:
        """`loss`, with `force_on_policy_ratio` as it is for a run."""
        return replace(self.loss, force_on_policy_ratio=self.is_on_policy(replays))

    @property
    def samples_per_step(self) -> int:
        return self.rollouts.num_prompts_per_step

    @property
    def rows_per_group(self) -> int:
        return self.rollouts.num_generations_per_prompt

    @property
    def max_prompt_length(self) -> int:
        """Tokens of a prompt at most, so that a response has room."""
        return self.data.max_sequence_length - self.rollouts.max_new_tokens

    @model_validator(mode="after")
    def _fits(self) -> Self:
        own = self.algorithm
        if self.rollouts.max_new_tokens >= self.data.max_sequence_length:
            raise ValueError(
                f"{own}.max_new_tokens: must be less than data.max_sequence_length ({self.data.max_sequence_length}), "
                "which holds the prompt too"
            )
        if self.loss.force_on_policy_ratio and self.rollouts.num_updates_per_rollout > 1:
            raise ValueError(
                f"loss.force_on_policy_ratio: is for a single update; {own}.num_updates_per_rollout is more"
            )
        if self.rollouts.max_staleness:
            self._check_stale()
        if self.data.overlong != "drop":
            raise ValueError("data.overlong: prompts are never truncated, only dropped; leave it out")
        return self

    def _check_stale(self) -> None:
        """Raises ValueError for what does not go with samples of older weights."""
        name, loss = f"{self.algorithm}.max_staleness", self.loss
        if self.generation.backend != "vllm":
            raise ValueError(f"{name}: needs generation.backend=vllm, which answers while others train")
        if self.generation.offload:
            raise ValueError(f"{name}: servers that sleep do not answer while others train; no generation.offload")
        if self.environment.name == "reward_model":
            raise ValueError(f"{name}: a reward model judges in the training processes; use another environment")
        if self.rollouts.dynamic_sampling_rounds > 1:
            raise ValueError(f"{name}: which prompts a step takes must be known; no dynamic_sampling_rounds")
        if not loss.use_importance_sampling_correction or loss.truncated_importance_sampling_ratio is None:
            raise ValueError(
                f"{name}: samples are of older weights; set loss.use_importance_sampling_correction=true "
                "and a loss.truncated_importance_sampling_ratio, such as 2"
            )
        if loss.force_on_policy_ratio:
            raise ValueError(f"{name}: samples are of older weights; leave out loss.force_on_policy_ratio")
        if self.generation.max_token_mult_prob_error is not None:
            raise ValueError(
                f"{name}: samples are of older weights, which is no mismatch; leave out "
                "generation.max_token_mult_prob_error"
            )


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
