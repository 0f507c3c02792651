"""Everything that imports Megatron-Core, which binds what it finds of the device while it is imported."""

from mcore_rl.platform import is_initialized

if not is_initialized():
    raise RuntimeError(
        "call mcore_rl.platform.initialize_platform() where the program starts, before it imports what uses Megatron: "
        "it chooses the device"
    )
