"""The configuration of PPO: the rollouts that GRPO has too, and a critic."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field, model_validator

from mcore_rl.config.base import AboveZero, BelowOne, Count, Directory, Positive, Section, refuse_bool
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.rollouts import RLConfig, RolloutOptions
from mcore_rl.config.sections import OptimizerConfig
from mcore_rl.errors import UserError

Share = Annotated[float, Field(ge=0, le=1), BeforeValidator(refuse_bool)]


class PPOAlgorithmConfig(RolloutOptions):
    """Rollouts, and how their rewards become advantages: GAE (arXiv:1506.02438)."""

    num_generations_per_prompt: Positive = 1
    """Responses to each prompt."""
    gamma: Share = 1.0
    """Discount of what is earned one token later."""
    gae_lambda: Share = 0.95
    """1: advantages are of returns alone; less: values stand in for what comes later, with less variance."""
    whiten_advantages: bool = True
    """Subtract the mean of all tokens' advantages and divide by their deviation."""


class CriticOptimizerConfig(OptimizerConfig):
    lr: BelowOne = 1e-5


class CriticConfig(Section):
    """The model that tells values: what is still to be earned when a token is chosen."""

    path: Directory | None = None
    """Where its weights begin: a reward model, or a language model, whose head then begins at zero. Of any size, with
    the policy's vocabulary, and such that the policy's layout fits it; `model.path` if not given, and then with the
    losses and biases of `model`'s routers, and its recompute_modules, too: another family may lack them."""
    optimizer: CriticOptimizerConfig = CriticOptimizerConfig()
    """As the policy's; it takes a step for each of the policy's, and those of pretraining_steps."""
    value_clip: AboveZero | None = 0.2
    """How far values may move from those before the step's first update, beyond which nothing is gained; null: as far
    as they like."""
    pretraining_steps: Count = 0
    """Steps at the beginning in which it alone is trained."""
    offload: bool = False
    """Keep it in the host's memory while it is not used."""
    export_hf: bool = False
    """Whether it is written to output_dir/critic at the end, as a sequence classifier of one label."""


class PPOConfig(RLConfig):
    algorithm: ClassVar[str] = "ppo"
    ppo: PPOAlgorithmConfig = PPOAlgorithmConfig()
    critic: CriticConfig = CriticConfig()

    @property
    def first_update_step(self) -> int:
        return 1 + self.critic.pretraining_steps

    def check_steps(self, steps: int) -> None:
        if self.critic.pretraining_steps >= steps:
            raise UserError(
                f"critic.pretraining_steps={self.critic.pretraining_steps}: the run has {steps} steps, in none of "
                "which the policy would be trained"
            )

    @property
    def critic_model(self) -> ModelConfig:
        """The critic, as the policy is held."""
        own = self.model
        if self.critic.path is None or self.critic.path.resolve() == own.path.resolve():
            return own.model_copy(update={"head": "reward", "lora": None, "moe_router_replay": False})
        return ModelConfig(
            path=self.critic.path,
            dtype=own.dtype,
            head="reward",
            trust_remote_code=own.trust_remote_code,
            recompute_activations=own.recompute_activations,
        )

    @model_validator(mode="after")
    def _whitens(self) -> PPOConfig:
        epsilon = type(self.ppo).model_fields["advantage_epsilon"].default
        if not self.ppo.whiten_advantages and self.ppo.advantage_epsilon != epsilon:
            raise ValueError("ppo.advantage_epsilon: is for whiten_advantages=true; leave it out")
        return self

    @model_validator(mode="after")
    def _exports(self) -> PPOConfig:
        if self.critic.export_hf and not self.checkpoint.export_hf:
            raise ValueError("critic.export_hf: nothing is exported with checkpoint.export_hf=false")
        return self
