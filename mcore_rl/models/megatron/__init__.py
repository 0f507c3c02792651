"""The modules that import Megatron-Core. Call `initialize_platform` before importing any of them.

The reason: Megatron-Core keeps references to functions of the device (`torch.cuda`) from the time of its import.
`initialize_platform` may replace these functions, so it must be called first.
"""

from importlib import import_module

from mcore_rl.platform import importing_megatron, is_initialized

if not is_initialized():
    raise RuntimeError(
        "call mcore_rl.platform.initialize_platform() where the program starts, before any import that uses "
        "Megatron, because this call chooses the device"
    )

with importing_megatron():
    import_module("megatron.core")
