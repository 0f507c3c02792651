"""The modules that import Megatron-Core. Call `initialize_platform` before importing any of them.

The reason: Megatron-Core keeps references to functions of the device (`torch.cuda`) from the time of its import.
`initialize_platform` may replace these functions, so it must be called first.
"""

from importlib import import_module

from mcore_rl.errors import UserError
from mcore_rl.platform import importing_megatron, is_initialized
from mcore_rl.utils.packages import version_of

if not is_initialized():
    raise RuntimeError(
        "call mcore_rl.platform.initialize_platform() where the program starts, before any import that uses "
        "Megatron, because this call chooses the device"
    )

from mcore_rl.models.megatron.compatibility import prepare_import

prepare_import()
with importing_megatron():
    try:
        import_module("megatron.core")
    except ImportError as error:
        raise UserError(
            f"megatron-core {version_of('megatron-core')} cannot be imported ({type(error).__name__}: {error}); "
            "docs/versions.md lists versions that fit each other"
        ) from error
