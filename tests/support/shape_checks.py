"""Importing this makes the tensor functions of the package check the shapes in their signatures."""

from jaxtyping import install_import_hook

TENSOR_MODULES = ("collectives", "divergences", "logprobs", "model_utils", "packs")
LOSS_MODULES = ("common", "distillation", "packing", "policy_gradient", "preference")  # options check kinds themselves
install_import_hook(
    [
        *(f"mcore_rl.distributed.{name}" for name in TENSOR_MODULES),
        "mcore_rl.models.megatron.attention",
        *(f"mcore_rl.losses.{name}" for name in LOSS_MODULES),
        "mcore_rl.algorithms.advantages",
    ],
    "beartype.beartype",
)
