"""What every algorithm shares that trains on rollouts: the policy's own answers, which something judges."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from mcore_rl.config.base import Count, NonNegative, Positive, Section, refuse_bool
from mcore_rl.config.environment import EnvironmentConfig
from mcore_rl.config.generation import GenerationConfig
from mcore_rl.config.sections import ReferenceSyncConfig, TrainerConfig, TrainingConfig
from mcore_rl.losses.options import ClippedPGOptions


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
    """Passes over each step's rollouts; each is one optimizer step, or several with train_global_batch_size."""
    train_global_batch_size: Positive | None = None
    """Responses of one update, over all processes: whole groups, shuffled anew in each step. Each response is in one
    update of a pass. All responses of a step if not given."""
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
    def updates_per_step(self) -> int:
        """Optimizer steps of one step."""
        whole = self.batch.global_batch_size
        return self.rollouts.num_updates_per_rollout * (whole // (self.rollouts.train_global_batch_size or whole))

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
        return self.rollouts.max_new_tokens * self.environment.max_turns

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
        only = self.updates_per_step == 1
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
        size, group = self.rollouts.train_global_batch_size, self.rollouts.num_generations_per_prompt
        if size is not None and (size % group or self.batch.global_batch_size % size):
            raise ValueError(
                f"{own}.train_global_batch_size: {size} must be a multiple of {own}.num_generations_per_prompt "
                f"({group}) and divide the {self.batch.global_batch_size} responses of a step"
            )
        if self.loss.force_on_policy_ratio and self.updates_per_step > 1:
            why = "num_updates_per_rollout" if self.rollouts.num_updates_per_rollout > 1 else "train_global_batch_size"
            raise ValueError(f"loss.force_on_policy_ratio: is for a single update a step; {own}.{why} makes several")
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
