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
)
from mcore_rl.config import DistillationConfig, DPOConfig, GRPOConfig, KTOConfig, RMConfig, TrainingConfig


def loss_of(config: TrainingConfig) -> LossFunction:
    """The loss that a configuration trains with."""
    if isinstance(config, DPOConfig):
        return DPOLossFn(config.dpo)
    if isinstance(config, RMConfig):
        return BradleyTerryLoss(config.reward.center_rewards_coefficient)
    if isinstance(config, KTOConfig):
        return KTOLossFn(config.kto)
    if isinstance(config, DistillationConfig):
        return DistillationLossFn(config.distillation)
    if isinstance(config, GRPOConfig):
        return ClippedPGLossFn(config.loss)
    return NLLLoss()
