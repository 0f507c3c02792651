"""The configuration of each algorithm: the shared sections and its own."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from mcore_rl.config.sections import Count, NonNegative, Positive, Section, TrainingConfig, refuse_bool


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

    @property
    def rows_per_unit(self) -> int:
        return 2  # chosen and rejected


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
    time_limit_seconds: Annotated[float, BeforeValidator(refuse_bool), Field(gt=0)] = 10.0
    """A sample whose judgement takes longer counts as failed."""
    num_workers: Positive = 2
    """Judging processes."""
    max_failed_steps: Positive = 3
    """So many steps on end in which no sample could be judged end the run."""

    @model_validator(mode="after")
    def _used(self) -> EnvironmentConfig:
        if self.name != "function" and self.function is not None:
            raise ValueError(f"function: goes with name=function alone, not with {self.name}")
        if self.pattern is not None:
            if self.name not in ("exact_match", "try_again"):
                raise ValueError(f"pattern: goes with name=exact_match and try_again alone, not with {self.name}")
            try:
                re.compile(self.pattern)
            except re.error as error:
                raise ValueError(f"pattern: {self.pattern!r} is not a regular expression ({error})") from None
        if self.max_turns > 1 and self.name in ("exact_match", "math"):
            raise ValueError(f"max_turns: {self.name} ends every conversation after one response")
        return self


class GRPOAlgorithmConfig(Section):
    """Rollouts and what becomes of their rewards."""

    num_prompts_per_step: Positive
    num_generations_per_prompt: Positive
    max_new_tokens: Positive
    temperature: Annotated[float, BeforeValidator(refuse_bool), Field(gt=0)] = 1.0
    top_k: Positive | None = None
    top_p: Annotated[float, BeforeValidator(refuse_bool), Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, BeforeValidator(refuse_bool), Field(ge=0, le=1)] = 0.0
    stop_strings: tuple[str, ...] = ()
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
    """Completions written to samples.jsonl each step, of as many prompts as there are."""

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

    @property
    def max_prompt_length(self) -> int:
        """Tokens of a prompt at most, so that a response has room."""
        return self.data.max_sequence_length - self.grpo.max_new_tokens

    @model_validator(mode="after")
    def _fits(self) -> GRPOConfig:
        if self.grpo.max_new_tokens >= self.data.max_sequence_length:
            raise ValueError(
                f"grpo.max_new_tokens: must be less than data.max_sequence_length ({self.data.max_sequence_length}), "
                "which holds the prompt too"
            )
        function = self.environment.function
        if self.environment.name == "function" and not re.fullmatch(r"[\w.]+:\w+", function or ""):
            raise ValueError(f"environment.function: name the function, as module:function (got {function!r})")
        if self.data.overlong != "drop":
            raise ValueError("data.overlong: prompts are never truncated, only dropped; leave it out")
        return self


class RewardAlgorithmConfig(Section):
    center_rewards_coefficient: NonNegative = 0.0
    """Weight of the mean of (r_chosen + r_rejected)², which keeps rewards near zero."""


class RMConfig(TrainingConfig):
    reward: RewardAlgorithmConfig = RewardAlgorithmConfig()

    @property
    def rows_per_unit(self) -> int:
        return 2  # chosen and rejected

    @model_validator(mode="after")
    def _rewards(self) -> RMConfig:
        if self.model.head != "reward":
            raise ValueError("model.head: a reward model is trained with head=reward")
        return self


class SFTConfig(TrainingConfig):
    pass
