"""The section of the configuration for FP8."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, model_validator

from mcore_rl.config.base import Count, Section

OWN_SCALES = {"mxfp8": "power_of_two", "tensorwise": "float32"}
"""Form of the scales of those FP8 recipes that have only one form."""


def _refuse_delayed(recipe: Any) -> Any:
    if recipe == "delayed":
        raise ValueError(
            "delayed scaling is not supported, because its scales depend on earlier steps and would be part of "
            "checkpoints; use blockwise, tensorwise or mxfp8"
        )
    return recipe


class FP8Config(Section):
    """FP8 for the matrix products of linear layers, by Transformer Engine, in training, evaluation and scoring; with
    the megatron backend also in sampling. Weights, optimizer state, checkpoints and exports keep their precision.
    Attention, norms, routers, embeddings, LM head and adapters are not computed in FP8. It applies to the policy, its
    reference, and a critic of the same model (docs/fp8.md)."""

    recipe: Annotated[Literal["blockwise", "tensorwise", "mxfp8"], BeforeValidator(_refuse_delayed)] = "blockwise"
    """Which elements share a scale. blockwise: 1 x 128 of an activation or gradient, 128 x 128 of a weight; Hopper.
    tensorwise: a whole tensor; results depend on packs and parallel layout. mxfp8: 32 elements; Blackwell."""
    scales: Literal["auto", "power_of_two", "float32"] = "auto"
    """blockwise: form of the scales. power_of_two: gradients hardly depend on the parallel layout. float32: the form of
    vLLM on Hopper; with it, gradients depend on packs and layout. auto: float32 if vLLM samples in FP8 by blocks,
    otherwise power_of_two. The scales of mxfp8 are powers of two, those of tensorwise float32."""
    first_layers: Count = 0
    """Number of layers at the start of the model that are not computed in FP8."""
    last_layers: Count = 0
    """Number of layers at the end of the model that are not computed in FP8."""

    @model_validator(mode="after")
    def _has_scales(self) -> FP8Config:
        own = OWN_SCALES.get(self.recipe)
        if own is not None and self.scales not in ("auto", own):
            raise ValueError(f"scales: {self.recipe} always has scales in the form {own}; leave scales out")
        return self

    def with_scales(self, of_blocks: Literal["power_of_two", "float32"]) -> FP8Config:
        """Return this section with `scales` replaced if it is auto; by `of_blocks` if the recipe is blockwise."""
        if self.scales != "auto":
            return self
        return self.model_copy(update={"scales": OWN_SCALES.get(self.recipe, of_blocks)})

    @property
    def token_multiple(self) -> int:
        """Each rank's tokens of a pack are padded to a multiple of this number.

        The weight's gradient sums over the tokens in blocks of this size. Under sequence parallelism, Transformer
        Engine before 2.14 gathers only whole blocks.
        """
        return {"blockwise": 128, "mxfp8": 32, "tensorwise": 16}[self.recipe]

    @property
    def size_multiple(self) -> int:
        """Both sizes of a factor of a product must be multiples of this number: a block of MXFP8, or 16 bytes."""
        return 32 if self.recipe == "mxfp8" else 16

    def in_fp8(self, layer: int, num_layers: int) -> bool:
        """Return whether FP8 is used in layer number `layer` (from 0) of a model with `num_layers` layers."""
        return self.first_layers <= layer < num_layers - self.last_layers
