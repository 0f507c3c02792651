"""The losses: each is normalised over the global batch, and exact under every parallel layout.

Importing this package imports torch and nothing heavier.
"""

from typing import TypeVar

import torch

from mcore_rl.algorithms.interfaces import LossFunction, LossType
from mcore_rl.algorithms.loss_functions.clipped_pg import ClippedPGLossConfig, ClippedPGLossDataDict, ClippedPGLossFn
from mcore_rl.algorithms.loss_functions.common import masked_mean
from mcore_rl.algorithms.loss_functions.distillation import (
    DistillationLossConfig,
    DistillationLossDataDict,
    DistillationLossFn,
    WholeVocabularyDistillationLossFn,
)
from mcore_rl.algorithms.loss_functions.kl import calculate_kl
from mcore_rl.algorithms.loss_functions.kto import KTOLossConfig, KTOLossDataDict, KTOLossFn, kto_reference_point
from mcore_rl.algorithms.loss_functions.nll import NLLLoss
from mcore_rl.algorithms.loss_functions.overlong import soft_overlong_penalty
from mcore_rl.algorithms.loss_functions.packing import SequencePackingLossWrapper
from mcore_rl.algorithms.loss_functions.preference import (
    BradleyTerryLoss,
    DPOLossConfig,
    DPOLossDataDict,
    DPOLossFn,
    PreferenceLoss,
    PreferenceLossDataDict,
)
from mcore_rl.algorithms.loss_functions.value import ValueLossDataDict, ValueLossFn

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
