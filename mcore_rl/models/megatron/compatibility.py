"""Adaptations to the supported versions of Megatron-Core, 0.16 to 0.19: one code path for all of them.

`mcore_rl.models.megatron` calls `prepare_import` before it imports Megatron. No other file of the package depends on
Megatron's version.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import types
import warnings
from typing import Any

NEED_TRITON = ("megatron.core.transformer.moe.paged_stash", "megatron.core.transformer.moe.ops.paged_stash")
"""Modules without which Megatron 0.18 and 0.19 cannot be imported, and which cannot be imported without Triton.

They belong to an option that this package does not use, `moe_paged_stash`. Megatron itself does not require Triton, and
torch's builds for the CPU come without it.
"""

HARMLESS = {
    # This package needs a GPTModel only; Megatron 0.19 recommends HybridModel for new architectures.
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    # The layout of the gradient buffers that Megatron 0.19 then computes itself is the one that this package needs.
    "megatron.core.distributed.distributed_data_parallel": "DistributedDataParallel: full_param_layout not provided",
    # Checkpoints have the file common.pt, so that Megatron 0.16 reads them as well.
    "megatron.core.dist_checkpointing.strategies.common": "load_common is deprecated",
}
"""Beginnings of log records that tell a user of this package nothing, by the logger that prints them."""

HARMLESS_WARNINGS = (
    # Both are optional; `mcore-rl doctor` and the start of a run tell which layers are used.
    r"(Transformer Engine and )?Apex (are|is) not installed",
    # About parts of Megatron that this package does not use.
    "full scope is deprecated",
    "MimoModelConfig is experimental",
    # Megatron looks whether views of its buffers have gradients.
    r"The \.grad attribute of a Tensor that is not a leaf Tensor",
    # A hint about speed on GPUs alone; quiet_libraries hides it in programs too.
    "When using async grad allreduce it is recommended to set the environment variable CUDA_DEVICE_MAX_CONNECTIONS",
    # torch 2.13 renamed functions that Megatron calls.
    r"`torch\.distributed\.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated",
)
"""Beginnings of Python's warnings that tell a user of this package nothing, as regular expressions."""


class _Unused(types.ModuleType):
    """Stand-in for a module from which other modules import functions that are never called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system asks for such names
            raise AttributeError(name)
        return None


def prepare_import() -> None:
    """Replace the modules `NEED_TRITON` if Triton is not installed, and silence harmless log records and warnings."""
    if sys.modules.get("triton", True) is None or importlib.util.find_spec("triton") is None:
        for name in NEED_TRITON:
            sys.modules.setdefault(name, _Unused(name))
    for name, beginning in HARMLESS.items():
        logging.getLogger(name).addFilter(_Without(beginning))
    for message in HARMLESS_WARNINGS:
        warnings.filterwarnings("ignore", message)


class _Without(logging.Filter):
    """Filter that drops the records of one message."""

    def __init__(self, beginning: str) -> None:
        super().__init__()
        self.beginning = beginning

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(self.beginning)
