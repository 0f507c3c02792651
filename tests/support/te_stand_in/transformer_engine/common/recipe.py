"""FP8 recipes: for each kind of tensor the element format and the blocks that share a scale.

Delayed scaling, which needs a history of earlier steps, cannot be constructed.
"""

import enum
import os
from dataclasses import dataclass


class Format(enum.Enum):
    E4M3 = "e4m3"
    E5M2 = "e5m2"
    HYBRID = "hybrid"


class Recipe:
    def delayed(self):
        return isinstance(self, DelayedScaling)

    def float8_current_scaling(self):
        return isinstance(self, Float8CurrentScaling)

    def float8_block_scaling(self):
        return isinstance(self, Float8BlockScaling)

    def mxfp8(self):
        return isinstance(self, MXFP8BlockScaling)


@dataclass(frozen=True)
class QParams:
    """How a tensor is quantized.

    power_2_scale: whether scales are rounded down to powers of two.
    """

    power_2_scale: bool = False
    amax_epsilon: float = 0.0


class DelayedScaling(Recipe):
    def __init__(self, *args, **kwargs):
        raise NotImplementedError("delayed scaling is not implemented here")


@dataclass
class Float8CurrentScaling(Recipe):
    """One scale for a tensor, from its own largest magnitude."""

    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False


@dataclass
class Float8BlockScaling(Recipe):
    """A scale for 1 x 128 elements of an input or a gradient, and for 128 x 128 elements of a weight.

    The form of the scales comes from the environment when this module is imported, as in the package. The class
    attributes without annotation are no fields.
    """

    use_f32_scales: bool = os.getenv("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "0") == "1"
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_quant_fwd_inp = QParams(power_2_scale=not use_f32_scales)
    fp8_quant_fwd_weight = QParams(power_2_scale=not use_f32_scales)
    fp8_quant_bwd_grad = QParams(power_2_scale=not use_f32_scales)


@dataclass
class MXFP8BlockScaling(Recipe):
    """A scale, which is a power of two, for 32 elements along the dimension that a product sums over."""

    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
