"""The interface of loss functions, at the import path that ported code uses."""

from mcore_rl.losses.common import LossFunction, LossType, Reduction

__all__ = ["LossFunction", "LossType", "Reduction"]
