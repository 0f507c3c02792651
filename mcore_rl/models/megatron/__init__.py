"""All modules that import Megatron-Core. On import, Megatron-Core binds to the device functions that it finds."""

from mcore_rl.platform import is_initialized

if not is_initialized():
    raise RuntimeError(
        "call mcore_rl.platform.initialize_platform() where the program starts, before it imports what uses Megatron: "
        "it chooses the device"
    )
