"""The losses by NeMo RL's names, which ported code imports from `mcore_rl.algorithms.loss_functions`."""

from typing import TypeVar

import torch

from mcore_rl.losses.common import DFTLoss, LossFunction, LossType, NLLLoss, masked_mean
from mcore_rl.losses.distillation import (
    DistillationLossConfig,
    DistillationLossDataDict,
    DistillationLossFn,
    WholeVocabularyDistillationLossFn,
)
from mcore_rl.losses.packing import SequencePackingLossWrapper
from mcore_rl.losses.policy_gradient import (
    ClippedPGLossConfig,
    ClippedPGLossDataDict,
    ClippedPGLossFn,
    PolicyGradientLossFn,
    ValueLossDataDict,
    ValueLossFn,
    calculate_kl,
    soft_overlong_penalty,
)
from mcore_rl.losses.preference import (
    BradleyTerryLoss,
    DPOLossConfig,
    DPOLossDataDict,
    DPOLossFn,
    KTOLossConfig,
    KTOLossDataDict,
    KTOLossFn,
    PreferenceLoss,
    PreferenceLossDataDict,
    WeightedDPOLossFn,
    kto_reference_point,
)

Tensor = TypeVar("Tensor", bound=torch.Tensor)

__all__ = [
    "BradleyTerryLoss",
    "ClippedPGLossConfig",
    "ClippedPGLossDataDict",
    "ClippedPGLossFn",
    "DFTLoss",
    "DPOLossConfig",
    "DPOLossDataDict",
    "DPOLossFn",
    "DistillationLossConfig",
    "DistillationLossDataDict",
    "DistillationLossFn",
    "KTOLossConfig",
    "KTOLossDataDict",
    "KTOLossFn",
    "LossFunction",
    "LossType",
    "NLLLoss",
    "PolicyGradientLossFn",
    "PreferenceLoss",
    "PreferenceLossDataDict",
    "SequencePackingLossWrapper",
    "Tensor",
    "ValueLossDataDict",
    "ValueLossFn",
    "WeightedDPOLossFn",
    "WholeVocabularyDistillationLossFn",
    "calculate_kl",
    "kto_reference_point",
    "masked_mean",
    "soft_overlong_penalty",
]
