"""The options of the losses, each defined once: as a YAML section, a TypedDict and what the loss reads.

A class of options is a frozen dataclass. The configuration validates it as a section, `typed_dict` gives library
users its keys, and `from_config` reads a plain dictionary. Neither torch nor pydantic is imported here.
"""

from mcore_rl.losses.options.clipped_pg import ClippedPGOptions, KLEstimator, TruncationType
from mcore_rl.losses.options.distillation import DistillationOptions
from mcore_rl.losses.options.options import Bounds, LossOptions, option, typed_dict
from mcore_rl.losses.options.preference import DPOOptions, KTOOptions, PreferenceLossType

__all__ = [
    "Bounds",
    "ClippedPGOptions",
    "DPOOptions",
    "DistillationOptions",
    "KLEstimator",
    "KTOOptions",
    "LossOptions",
    "PreferenceLossType",
    "TruncationType",
    "option",
    "typed_dict",
]
