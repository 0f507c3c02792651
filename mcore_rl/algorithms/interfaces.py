"""The interface of loss functions under the path that ported code imports."""

from mcore_rl.losses.common import LossFunction, LossType, Reduction

__all__ = ["LossFunction", "LossType", "Reduction"]
