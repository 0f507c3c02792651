"""From configurations to losses."""

from __future__ import annotations

from mcore_rl.algorithms.loss_functions import (
    BradleyTerryLoss,
    ClippedPGLossFn,
    DistillationLossFn,
    DPOLossFn,
    KTOLossFn,
    LossFunction,
    NLLLoss,
    WholeVocabularyDistillationLossFn,
)
from mcore_rl.algorithms.loss_functions.distillation import Teacher
from mcore_rl.config import DistillationConfig, DPOConfig, KTOConfig, RLConfig, RMConfig, TrainingConfig


def loss_of(config: TrainingConfig, teacher: Teacher | None = None) -> LossFunction:
    """The loss that a configuration trains with; `teacher` is needed by distillation over the whole vocabulary."""
    if isinstance(config, DPOConfig):
        return DPOLossFn(config.dpo)
    if isinstance(config, RMConfig):
        return BradleyTerryLoss(config.reward.center_rewards_coefficient)
    if isinstance(config, KTOConfig):
        return KTOLossFn(config.kto)
    if isinstance(config, DistillationConfig):
        if config.distillation.topk is not None:
            return DistillationLossFn(config.distillation)
        assert teacher is not None, "distillation over the whole vocabulary needs the teacher"
        return WholeVocabularyDistillationLossFn(config.distillation, teacher)
    if isinstance(config, RLConfig):
        return ClippedPGLossFn(config.loss)
    return NLLLoss()
