"""The losses: each is normalised over the global batch, and exact under every parallel layout.

Importing this package imports torch and nothing heavier.
"""

from typing import TypeVar

import torch

from mcore_rl.losses.common import masked_mean
from mcore_rl.losses.distillation import (
    DistillationLossConfig,
    DistillationLossDataDict,
    DistillationLossFn,
    WholeVocabularyDistillationLossFn,
)
from mcore_rl.losses.interfaces import LossFunction, LossType
from mcore_rl.losses.kl import calculate_kl
from mcore_rl.losses.kto import KTOLossConfig, KTOLossDataDict, KTOLossFn, kto_reference_point
from mcore_rl.losses.nll import NLLLoss
from mcore_rl.losses.overlong import soft_overlong_penalty
from mcore_rl.losses.packing import SequencePackingLossWrapper
from mcore_rl.losses.policy_gradient import ClippedPGLossConfig, ClippedPGLossDataDict, ClippedPGLossFn
from mcore_rl.losses.preference import (
    BradleyTerryLoss,
    DPOLossConfig,
    DPOLossDataDict,
    DPOLossFn,
    PreferenceLoss,
    PreferenceLossDataDict,
)
from mcore_rl.losses.value import ValueLossDataDict, ValueLossFn

Tensor = TypeVar("Tensor", bound=torch.Tensor)

__all__ = [
    "BradleyTerryLoss",
    "ClippedPGLossConfig",
    "ClippedPGLossDataDict",
    "ClippedPGLossFn",
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
    "PreferenceLoss",
    "PreferenceLossDataDict",
    "SequencePackingLossWrapper",
    "Tensor",
    "ValueLossDataDict",
    "ValueLossFn",
    "WholeVocabularyDistillationLossFn",
    "calculate_kl",
    "kto_reference_point",
    "masked_mean",
    "soft_overlong_penalty",
]
