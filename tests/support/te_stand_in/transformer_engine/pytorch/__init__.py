from . import attention, cpu_offload, distributed, float8_tensor, fp8, module, ops, optimizers, router, tensor
from .attention import DotProductAttention
from .distributed import CudaRNGStatesTracker, checkpoint
from .fp8 import fp8_autocast
from .module import Fp8Padding, Fp8Unpadding, GroupedLinear, LayerNorm, LayerNormLinear, LayerNormMLP, Linear, RMSNorm
