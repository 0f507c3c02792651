"""What the server of processes imports once, before any is forked from it: all that most of them need.

Importing this freezes what the garbage collector watches. In a forked process a collection would otherwise
visit, and so copy, every object that was imported: most of the time of a short process.
"""

import gc

import transformers.modeling_utils  # noqa: F401

from mcore_rl.platform import initialize_platform

initialize_platform()

import mcore_rl.models.policy.megatron_policy
import mcore_rl.testing.layout_check  # noqa: F401

gc.collect()
gc.freeze()
