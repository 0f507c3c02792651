"""Imports the modules that most test processes need; the fork server imports this module once, before it forks.

It also freezes the objects of the garbage collector. Otherwise, a collection in a forked process would visit every
imported object and therefore copy the object's memory. This would take most of the time of a short process.
"""

import gc

import transformers.modeling_utils  # noqa: F401

from mcore_rl.platform import initialize_platform

initialize_platform()

import mcore_rl.models.policy.megatron_policy
import mcore_rl.testing.layout_check  # noqa: F401

gc.collect()
gc.freeze()
