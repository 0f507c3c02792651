"""Importing this makes the tensor functions of the package check the shapes in their signatures."""

from jaxtyping import install_import_hook

TENSOR_MODULES = (
    "collectives",
    "context_parallel",
    "linear_divergences",
    "linear_logprobs",
    "model_utils",
    "pack_layout",
    "parallel_logprobs",
    "prefix_layout",
)
LOSS_MODULES = (  # not losses.options, which checks kinds by itself
    "common",
    "distillation",
    "importance",
    "interfaces",
    "kl",
    "kto",
    "metric_reduction",
    "nll",
    "overlong",
    "packing",
    "policy_gradient",
    "preference",
    "value",
)
install_import_hook(
    [
        *(f"mcore_rl.distributed.{name}" for name in TENSOR_MODULES),
        "mcore_rl.models.megatron.attention",
        "mcore_rl.models.megatron.attention",
        *(f"mcore_rl.losses.{name}" for name in LOSS_MODULES),
        "mcore_rl.algorithms.advantages",
    ],
    "beartype.beartype",
)
