"""Modules that the fork server imports once, before it forks processes: those that most processes need.

Importing this module also freezes the garbage collector's objects. In a forked process a collection would otherwise
visit, and therefore copy, every imported object, which takes most of the time of a short process.
"""

import gc

import transformers.modeling_utils  # noqa: F401

from mcore_rl.platform import initialize_platform

initialize_platform()

import mcore_rl.models.policy.megatron_policy
import mcore_rl.testing.layout_check  # noqa: F401

gc.collect()
gc.freeze()
