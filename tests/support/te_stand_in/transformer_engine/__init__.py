"""A stand-in for Transformer Engine in plain PyTorch, so that Megatron's wrappers of it run on the CPU over gloo.

It has the modules, functions and signatures that `megatron.core` uses; `check_te_signatures.py` compares them with the
sources of the real package. It has no FP8, user buffers, CUDA graphs, fused router or operation fuser: an option that
asks for one raises NotImplementedError. Its products, norms and attention are separate implementations of what
Transformer Engine documents. Kernels, rounding and speed of the real package are not tested with it.
"""

__version__ = "2.9.0+cpu"
"""A version for the CPU, as torch names its own. The real package has none."""

from . import common, pytorch
