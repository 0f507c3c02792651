"""The models beside the one that is trained, each as a configuration with it in the policy's place."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from mcore_rl.config.algorithms import DistillationConfig, DPOConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.ppo import PPOConfig
from mcore_rl.config.rollouts import RLConfig
from mcore_rl.config.sections import TrainingConfig

ConfigT = TypeVar("ConfigT", bound=TrainingConfig)

REFERENCE, TEACHER, CRITIC, JUDGE = "dpo.reference_model", "distillation.teacher", "critic.path", "environment.path"
"""The keys that name them."""


def configs_beside(config: TrainingConfig) -> dict[str, TrainingConfig]:
    """Of all models beside the policy that a run has, by their keys."""
    found: dict[str, TrainingConfig] = {}
    if isinstance(config, DPOConfig) and config.dpo.reference_model is not None:
        found[REFERENCE] = config_of_reference(config)
    if isinstance(config, DistillationConfig):
        found[TEACHER] = config_of_teacher(config)
    if isinstance(config, RLConfig) and config.environment.name == "reward_model":
        found[JUDGE] = config_of_judge(config)
    if isinstance(config, PPOConfig):
        found[CRITIC] = config_of_critic(config)
    return found


def config_of_reference(config: DPOConfig) -> DPOConfig:
    """Of a reference that is not the initial policy."""
    return _with_frozen(config, Path(config.dpo.reference_model or ""))


def config_of_teacher(config: DistillationConfig) -> DistillationConfig:
    """Of a student's teacher."""
    return _with_frozen(config, Path(config.distillation.teacher))


def _with_frozen(config: ConfigT, path: Path) -> ConfigT:
    own = config.model
    model = ModelConfig(path=path, dtype=own.dtype, trust_remote_code=own.trust_remote_code)
    return config.model_copy(update={"model": model})


def config_of_critic(config: PPOConfig) -> PPOConfig:
    """Of a critic, which has an optimizer of its own."""
    return config.model_copy(update={"model": config.critic_model, "optimizer": config.critic.optimizer})


def config_of_judge(config: RLConfig) -> RLConfig:
    """Of a reward model that judges, whose conversations have a limit of their own."""
    path = config.environment.path
    assert path is not None, "the configuration asks for it"
    limit = config.environment.max_sequence_length or 2 * config.data.max_sequence_length
    model = ModelConfig(path=path, dtype=config.model.dtype, head="reward")
    data = config.data.model_copy(update={"max_sequence_length": limit})
    batch = config.batch.model_copy(update={"share_prefixes": False, "tokens_per_pack": None})
    parallel = config.parallel
    if config.batch.tokens_per_pack is not None and config.batch.packing:
        longest = -(-limit // parallel.sequence_multiple) * parallel.sequence_multiple
        batch = batch.model_copy(update={"tokens_per_pack": max(config.batch.tokens_per_pack, longest)})
    return config.model_copy(update={"model": model, "data": data, "batch": batch})
