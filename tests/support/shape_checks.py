"""Shape checks: importing this module makes the package's tensor functions check the shapes in their signatures."""

from importlib.util import find_spec
from pathlib import Path

from jaxtyping import install_import_hook

TENSOR_MODULES = ("collectives", "divergences", "logprobs", "packs")
LOSS_MODULES = ("common", "distillation", "packing", "policy_gradient", "preference")  # options check kinds themselves
MODULES = [
    *(f"mcore_rl.distributed.{name}" for name in TENSOR_MODULES),
    "mcore_rl.compat.nemo_rl.model_utils",
    *(f"mcore_rl.models.megatron.attention.{name}" for name in ("attention", "latent", "sparse", "block_sparse")),
    "mcore_rl.models.megatron.kernels.selected_attention",
    "mcore_rl.models.megatron.kernels.gathered_attention",
    *(f"mcore_rl.losses.{name}" for name in LOSS_MODULES),
    "mcore_rl.algorithms.advantages",
]
for module in MODULES:  # a renamed module would be left unchecked without an error
    path = Path(find_spec("mcore_rl").origin).parent.parent.joinpath(*module.split("."))
    if not path.with_suffix(".py").is_file():
        raise ImportError(f"{__file__}: there is no module {module}; name the module that has its functions now")
install_import_hook(MODULES, "beartype.beartype")
