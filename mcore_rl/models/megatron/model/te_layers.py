"""Layers that consist of Transformer Engine's modules.

`build.layer_modules` imports this file only if these layers are used.

Norms and linear layers are separate modules, with the same names as in the local implementation. Adapters therefore
work in the same way, and a checkpoint of one implementation can be loaded with the other. Transformer Engine's fused
layer would save nothing in bf16: it also runs norm and product one after the other, and keeps the same tensors.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from mcore_rl.models.megatron.attention.attention import PackedCausalAttention
from mcore_rl.models.megatron.kernels.packed_attention import LARGEST_FLASH_HEAD
from mcore_rl.models.megatron.layers.packs import PackParams
from mcore_rl.models.megatron.layers.transformer_layer import (
    ExpertBiasMixin,
    LoRALinearMixin,
    PostNormMixin,
    bias_of_first_rank,
)
from mcore_rl.models.megatron.moe.experts import ExpertsMixin, row_ends, with_adapters

from megatron.core.extensions.transformer_engine import (
    TEColumnParallelGroupedLinear,
    TEColumnParallelLinear,
    TEDotProductAttention,
    TENorm,
    TERowParallelGroupedLinear,
    TERowParallelLinear,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.transformer_config import TransformerConfig


def te_config(config: TransformerConfig) -> TransformerConfig:
    """Return the configuration for Transformer Engine's modules. It differs from `config` in two respects.

    First, the modules create their weights directly on the run's device, or on the meta device inside
    `with torch.device("meta")`. With `use_cpu_initialization`, Megatron's wrappers would create each whole weight on
    the host and copy a shard of it.

    Second, the kernel that computes a weight's gradient also adds the gradient to DDP's fp32 buffer. Megatron's own
    linear layers, such as the LM head, do not get this option: they would need a kernel of apex.
    """
    built = copy.copy(config)
    built.use_cpu_initialization, built.init_model_with_meta_device = False, torch.empty(0).is_meta
    built.gradient_accumulation_fusion = True
    return built


class StatelessMixin:
    """A module of Transformer Engine whose part of a checkpoint is empty, also in FP8.

    The FP8 recipes in use keep no state. Transformer Engine before 2.20 nevertheless writes a pickled recipe, and all
    versions unpickle what a checkpoint contains, which could run code.
    """

    def get_extra_state(self) -> Tensor:
        """Return an empty tensor."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Ignore the state in a checkpoint."""


class TELinearMixin(StatelessMixin):
    """A linear layer of Transformer Engine. It is built with `te_config` and may have adapters.

    adapter: the adapter, or a list of the experts' adapters. None or an empty list if there are no adapters.
    """

    adapter: Any

    def __init__(self, *args: Any, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(*args, config=te_config(config), **kwargs)  # type: ignore[call-arg]
        self.config = config

    def set_activation_dtype(self, inp: Tensor) -> None:
        """Choose the precision of the matrix product, given its input. Transformer Engine calls this method."""
        # Otherwise Transformer Engine raises an error if adapters are in float32 and weights in bfloat16.
        self.allow_different_data_and_param_types = bool(self.adapter)
        super().set_activation_dtype(inp)  # type: ignore[misc]


class TERMSNorm:
    """Creates Transformer Engine's norm with `te_config`. It is a class because Megatron's specs need one."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float) -> Any:
        return TENorm(te_config(config), hidden_size, eps)


class TEColumnLinear(LoRALinearMixin, TELinearMixin, TEColumnParallelLinear):
    """A linear layer whose weight is sharded by rows over tensor-parallel ranks."""

    is_column = True

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(input_)
        return self._with_adapter(input_, output), bias


class TERowLinear(ExpertBiasMixin, LoRALinearMixin, TELinearMixin, TERowParallelLinear):
    """A linear layer whose weight is sharded by columns over tensor-parallel ranks. The ranks sum their outputs."""

    is_column = False

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(input_)
        return self._with_expert_bias(self._with_adapter(input_, output), bias)


class TENormedRowLinear(PostNormMixin, TERowLinear):
    """`TERowLinear`, followed by a norm."""


class TEAttention(StatelessMixin, TEDotProductAttention):
    """Transformer Engine's attention."""


class TEPackedCausalAttention(PackedCausalAttention):
    """Computes attention by Transformer Engine, or by the local attention where Transformer Engine does not support it.

    The local attention is used in these cases: segments share a prefix; the window is shorter than the longest segment;
    there are sinks; keys are chosen; the tensors are fp32 on CUDA, because Transformer Engine before 2.11 has no fp32
    kernel for packs; the heads are larger than those of its flash kernels.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        window: int | None = None,
        sinks: int = 0,
        float32_sinks: bool = False,
        block_size: int = 1,
        **kwargs: Any,
    ) -> None:
        own: Any = {"window": window, "sinks": sinks, "float32_sinks": float32_sinks, "block_size": block_size}
        super().__init__(config, layer_number, attn_mask_type, attention_type, **own, **kwargs)
        self.te_attention = TEAttention(config, layer_number, attn_mask_type, attention_type, **kwargs)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackParams | None = None,
        chosen: Tensor | None = None,
    ) -> Tensor:
        """Map queries [T / CP, heads, d] and keys and values [T / CP, groups, d] to [T / CP, heads · d]."""
        assert packed_seq_params is not None and packed_seq_params.visible is not None, "attention runs on packs"
        chosen = packed_seq_params.chosen.get(self.layer_number - 1) if chosen is None else chosen
        ends, longest = packed_seq_params.cu_seqlens, max(packed_seq_params.visible.layout.segment_lengths)
        has_kernel = not query.is_cuda or query.dtype in (torch.float16, torch.bfloat16)
        has_kernel = has_kernel and query.shape[-1] <= LARGEST_FLASH_HEAD
        sees_all = self.window is None or self.window >= longest
        is_plain = has_kernel and sees_all and self.softmax_offset is None and chosen is None
        if ends is None or not is_plain:
            packed_seq_params.visible.ensure_on_device()
            return super().forward(query, key, value, None, packed_seq_params=packed_seq_params, chosen=chosen)
        pack = PackedSeqParams("thd", ends, ends, ends, ends, longest, longest)
        out: Tensor = self.te_attention(query, key, value, None, AttnMaskType.causal, packed_seq_params=pack)
        return out


class TEGroupedLinearMixin(TELinearMixin):
    """Computes a linear layer of all of a rank's experts in one call; the experts may have adapters.

    adapter: the adapters of the experts in their order; empty if there are none.
    """

    takes_weights_of_parts = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.adapter = torch.nn.ModuleList()

    def _decode_extra_state(self, state: Any) -> None:
        """Ignore the state in a checkpoint. Megatron's wrapper would unpickle it when it merges the experts' states."""

    def _split_extra_state(self, state: Tensor) -> list[Tensor]:
        """Return the empty state of each expert, for a checkpoint."""
        return [state] * self.num_gemms  # type: ignore[attr-defined]

    def forward(self, rows: Tensor, counts: list[int]) -> tuple[Tensor, Any]:
        output, bias = super().forward(rows, counts)  # type: ignore[misc]
        if len(self.adapter):
            output = with_adapters(list(self.adapter), output, rows, row_ends(torch.tensor(counts), rows))
        return output, bias


class TEGroupedColumnLinear(TEGroupedLinearMixin, TEColumnParallelGroupedLinear):
    """A linear layer of all of a rank's experts. The weights are sharded by rows."""

    is_column = True


class TEGroupedRowLinear(TEGroupedLinearMixin, TERowParallelGroupedLinear):
    """A linear layer of all of a rank's experts. The weights are sharded by columns."""

    is_column = False

    def forward(self, rows: Tensor, counts: list[int]) -> tuple[Tensor, list[Tensor] | None]:
        output, biases = super().forward(rows, counts)
        return output, biases and [bias_of_first_rank(bias) for bias in biases]


class TEGroupedExperts(ExpertsMixin, TEGroupedMLP):
    """Megatron's experts by Transformer Engine; one call computes a linear layer of all experts."""
