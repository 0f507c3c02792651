"""Which recipe is in force, and the rounding of tensors to FP8 that the recipes prescribe."""

from contextlib import contextmanager

import torch
import torch.distributed
import torch.nn.functional as F

from transformer_engine.common.recipe import Float8BlockScaling, Float8CurrentScaling, Format, MXFP8BlockScaling

BLOCK, MX_BLOCK = 128, 32


class FP8GlobalStateManager:
    FP8_RECIPE = None

    @classmethod
    def is_fp8_enabled(cls):
        return cls.FP8_RECIPE is not None

    @classmethod
    def get_fp8_recipe(cls):
        return cls.FP8_RECIPE

    @classmethod
    def set_skip_fp8_weight_update_tensor(cls, skip):
        raise NotImplementedError("CUDA graphs are not implemented here")


@contextmanager
def fp8_autocast(enabled=True, calibrating=False, fp8_recipe=None, fp8_group=None, _graph=False):
    if calibrating or _graph:
        raise NotImplementedError("calibration and CUDA graphs are not implemented here")
    outside = FP8GlobalStateManager.FP8_RECIPE
    FP8GlobalStateManager.FP8_RECIPE = (fp8_recipe or MXFP8BlockScaling()) if enabled else None
    try:
        yield
    finally:
        FP8GlobalStateManager.FP8_RECIPE = outside


@contextmanager
def fp8_model_init(enabled=True, recipe=None, preserve_high_precision_init_val=False):
    if enabled:
        raise NotImplementedError("FP8 is not implemented here")
    yield


def check_recipe_support(recipe):
    """Raise AssertionError if the device cannot compute with the recipe. The emulation computes with all of them."""


def get_align_size_for_quantization(recipe):
    return 32 if recipe.mxfp8() else 16


def is_quantizable(recipe, x):
    """Whether the rows of a tensor can be quantized before ranks gather them."""
    size = {Float8BlockScaling: BLOCK, MXFP8BlockScaling: MX_BLOCK}.get(type(recipe), 1)
    return x.shape[-1] % size == 0 and x[..., 0].numel() % size == 0


def check_dimensions(*tensors):
    for x in tensors:
        assert x[..., 0].numel() % 8 == 0 and x.shape[-1] % 16 == 0, f"FP8 cannot multiply dims={list(x.shape)}"


def rounded(x, recipe, kind, along):
    """Return the matrix `x` after a round trip through FP8, in fp32.

    Args:
        kind: "input", "weight" or "gradient".
        along: the dimension that the product sums over, 0 or 1.
    """
    is_e5m2 = recipe.fp8_format is Format.HYBRID and kind == "gradient"
    dtype = torch.float8_e5m2 if is_e5m2 else torch.float8_e4m3fn
    if isinstance(recipe, Float8CurrentScaling):
        return _rounded(x, x.shape, dtype, False)
    if isinstance(recipe, MXFP8BlockScaling):
        return _rounded(x, (MX_BLOCK, 1) if along == 0 else (1, MX_BLOCK), dtype, True)
    line = (BLOCK, 1) if along == 0 else (1, BLOCK)
    block, options = {
        "input": (line, recipe.fp8_quant_fwd_inp),
        "weight": ((BLOCK, BLOCK), recipe.fp8_quant_fwd_weight),
        "gradient": (line, recipe.fp8_quant_bwd_grad),
    }[kind]
    return _rounded(x, block, dtype, options.power_2_scale)


def _rounded(x, block, dtype, power_of_two):
    if not x.numel():
        return x.float()
    (rows, columns), (high, wide) = x.shape, block
    padded = F.pad(x.float(), (0, -columns % wide, 0, -rows % high))
    tiles = padded.view(padded.shape[0] // high, high, -1, wide)
    largest, limit = tiles.abs().amax((1, 3), keepdim=True), torch.finfo(dtype).max
    scale = torch.where(largest > 0, limit / largest, 1.0).clamp(max=2.0**127)  # finite for subnormal numbers too
    if power_of_two:
        scale = torch.exp2(scale.log2().floor())
    there = (tiles * scale).clamp(-limit, limit).to(dtype).float() / scale
    return there.reshape(padded.shape)[:rows, :columns]
