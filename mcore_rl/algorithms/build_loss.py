"""Construction of the loss that a configuration describes."""

from __future__ import annotations

from mcore_rl.config import DistillationConfig, DPOConfig, KTOConfig, RLConfig, RMConfig, SFTConfig, TrainingConfig
from mcore_rl.losses.common import DFTLoss, LossFunction, NLLLoss
from mcore_rl.losses.distillation import (
    DistillationLossFn,
    SampledDistillationLossFn,
    Teacher,
    WholeVocabularyDistillationLossFn,
)
from mcore_rl.losses.policy_gradient import build_policy_loss
from mcore_rl.losses.preference import BradleyTerryLoss, KTOLossFn, build_dpo_loss


def build_loss(config: TrainingConfig, teacher: Teacher | None = None) -> LossFunction:
    """Return the loss that `config` describes. `teacher` is needed for distillation over the whole vocabulary."""
    if isinstance(config, DPOConfig):
        return build_dpo_loss(config.dpo)
    if isinstance(config, RMConfig):
        return BradleyTerryLoss(config.reward.center_rewards_coefficient)
    if isinstance(config, KTOConfig):
        return KTOLossFn(config.kto)
    if isinstance(config, DistillationConfig):
        if config.distillation.form == "sampled":
            return SampledDistillationLossFn(config.distillation.max_importance_weight)
        if config.distillation.topk is not None:
            return DistillationLossFn(config.distillation)
        assert teacher is not None, "distillation over the whole vocabulary needs the teacher"
        return WholeVocabularyDistillationLossFn(config.distillation, teacher)
    if isinstance(config, RLConfig):
        return build_policy_loss(config.loss)
    return DFTLoss() if isinstance(config, SFTConfig) and config.sft.loss == "dft" else NLLLoss()
