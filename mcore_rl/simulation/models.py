"""The models of a run, and what a step asks of each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mcore_rl.config import DistillationConfig, DPOConfig, KTOConfig, PPOConfig, RLConfig, TrainingConfig
from mcore_rl.config.algorithms import CRITIC, JUDGE, REFERENCE, TEACHER, configs_beside

if TYPE_CHECKING:
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy
    from mcore_rl.models.policy.scoring import ScoringModel

SCORING, TRAINING, UPDATE = "scoring", "training", "update"
CRITIC_TRAINING, CRITIC_UPDATE = "critic", "critic's update"
PHASES = (SCORING, CRITIC_TRAINING, CRITIC_UPDATE, TRAINING, UPDATE)
"""Phases of a step, in their order."""


def simulated_beside(config: TrainingConfig) -> dict[str, TrainingConfig]:
    """Return the configurations of the other models of training, by their keys, in the order of their making."""
    found = configs_beside(config)
    if _is_computed_before(config):
        found.pop(REFERENCE, None)
    return found


def _is_computed_before(config: TrainingConfig) -> bool:
    """Whether the reference's log-probabilities are there when training begins, of a run over all its data."""
    return isinstance(config, DPOConfig) and config.precomputes(epochs=1)


@dataclass(frozen=True)
class Models:
    """The policy, and the models beside it by the keys that name them."""

    policy: MegatronPolicy
    beside: Mapping[str, ScoringModel]

    @classmethod
    def build(cls, config: TrainingConfig) -> Models:
        """All that the configuration asks for."""
        from mcore_rl.models.policy.megatron_policy import MegatronPolicy
        from mcore_rl.models.policy.scoring import ScoringModel
        from mcore_rl.models.policy.teacher import TeacherModel

        keeps = config.keeps_reference and not _is_computed_before(config)
        policy = MegatronPolicy(config, 2, rows_per_unit=config.rows_per_unit, keep_reference=keeps)
        beside = dict[str, ScoringModel]()
        for key, other in simulated_beside(config).items():
            if key == CRITIC:
                beside[key] = MegatronPolicy(other, 2)
            elif key == TEACHER:
                beside[key] = TeacherModel(other, policy.hf_config.vocab_size)
            else:
                beside[key] = ScoringModel(other, rows_per_unit=other.rows_per_unit)
        return cls(policy, beside)

    @property
    def all(self) -> list[ScoringModel]:
        return [self.policy, *self.beside.values()]

    @property
    def chunks(self) -> list[Any]:
        """The chunks of this rank's pipeline stage, of all models."""
        return [chunk for model in self.all for chunk in model.model.chunks]

    @property
    def trained(self) -> list[MegatronPolicy]:
        critic: Any = self.beside.get(CRITIC)
        return [self.policy] if critic is None else [self.policy, critic]


def run_step(config: TrainingConfig, models: Models, data: Any, enter: Callable[[str], None]) -> None:
    """Run the operations of the algorithm's step, with all updates of each trained model.

    Args:
        enter: is told of each phase.
    """
    from mcore_rl.algorithms.build_loss import loss_of
    from mcore_rl.losses.policy_gradient import ClippedPGLossFn, ValueLossFn

    for score in scorings(config, models, data):
        enter(SCORING)
        score()
    critic: Any = models.beside.get(CRITIC)
    if critic is not None and isinstance(config, PPOConfig):
        enter(CRITIC_TRAINING)
        critic.get_values(data)
        for _ in range(updates_of(config)):
            enter(CRITIC_TRAINING)
            critic.train(data, ValueLossFn(config.critic.value_clip))
    teacher: Any = models.beside.get(TEACHER)
    loss_fn = ClippedPGLossFn(config.decided_loss()) if isinstance(config, RLConfig) else loss_of(config, teacher)
    for _ in range(updates_of(config)):
        enter(TRAINING)
        models.policy.train(data, loss_fn, temperature=temperature_of(config))
    enter("")


def temperature_of(config: TrainingConfig) -> float:
    """Return the temperature that divides the logits."""
    return config.rollouts.temperature if isinstance(config, RLConfig) else 1.0


def updates_of(config: TrainingConfig) -> int:
    """Return the updates of a step, all on the same batch."""
    return config.rollouts.num_updates_per_rollout if isinstance(config, RLConfig) else 1


def scorings(config: TrainingConfig, models: Models, data: Any) -> list[Callable[[], Any]]:
    """Forward passes of a step beside the one that trains: of the reference, of the weights before an update, of a
    judge or a teacher. A judge's conversations are taken to be as long as the policy's."""
    policy, beside, temperature = models.policy, models.beside, temperature_of(config)

    def by_policy() -> Any:
        return policy.get_logprobs(data, temperature=temperature)

    def by_reference() -> Any:
        return policy.get_reference_policy_logprobs(data, temperature=temperature)

    reference = [] if policy.reference is None else [by_reference]
    if isinstance(config, DPOConfig) and (other := beside.get(REFERENCE)) is not None:
        return [lambda: other.get_logprobs(data)]
    if isinstance(config, KTOConfig):
        return [by_reference, by_reference, by_policy]  # the last two on other records' responses
    if isinstance(config, DistillationConfig) and config.distillation.topk is not None:
        k = config.distillation.topk
        return [lambda: beside[TEACHER].get_topk_logits(data, k)]
    if isinstance(config, RLConfig):
        judge = beside.get(JUDGE)
        judged = [] if judge is None else [lambda: judge.get_rewards(data)]
        before = [by_policy] if config.scores_samples() else []
        return [*judged, *before, *reference]
    return reference
