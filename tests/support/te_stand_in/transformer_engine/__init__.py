"""A stand-in for Transformer Engine in plain PyTorch, so that Megatron's wrappers of it run on the CPU over gloo.

It has the modules, functions and signatures that `megatron.core` uses; `check_te_signatures.py` compares them with the
sources of the real package. FP8 is emulated: values are rounded as the recipes prescribe, and multiplied in fp32. It
has no delayed scaling, weights in FP8, user buffers, CUDA graphs, fused router or operation fuser: an option that
asks for one raises NotImplementedError. Its products, norms and attention are separate implementations of what
Transformer Engine documents. Kernels, rounding and speed of the real package are not tested with it.
"""

import os

__version__ = os.environ.get("TE_STAND_IN_VERSION", "2.9.0") + "+cpu"
"""A version for the CPU, as torch names its own; the real package has none. Megatron chooses its calls by the version.

The environment variable selects a later version. Functions that later versions have in another form are below `if
since(…)`.
"""


def since(*version):
    """Return whether the stand-in stands for this version, such as (2, 10), or a later one."""
    return tuple(map(int, __version__.split("+")[0].split(".")[:2])) >= version


from . import common, pytorch
