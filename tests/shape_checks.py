"""Importing this makes the tensor functions of the package check the shapes in their signatures."""

from jaxtyping import install_import_hook

TENSOR_MODULES = (
    "attention_tiles",
    "collectives",
    "context_parallel",
    "linear_divergences",
    "linear_logprobs",
    "model_utils",
    "pack_layout",
    "parallel_logprobs",
    "prefix_layout",
    "remaking",
)
install_import_hook(
    [
        *(f"mcore_rl.distributed.{name}" for name in TENSOR_MODULES),
        "mcore_rl.algorithms.loss_functions",
        "mcore_rl.algorithms.advantages",
    ],
    "beartype.beartype",
)
