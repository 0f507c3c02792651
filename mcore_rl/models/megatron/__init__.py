"""Everything that imports Megatron-Core; the platform under it is made ready first."""

from mcore_rl.platform import initialize_platform

initialize_platform()
