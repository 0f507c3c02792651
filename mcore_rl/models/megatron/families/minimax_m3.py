"""MiniMax-M3, text: attention to chosen blocks of keys in some layers, and a mixture with clamped gates."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

from mcore_rl.errors import UserError
from mcore_rl.models.megatron.attention.attention import TokenMixer
from mcore_rl.models.megatron.attention.block_sparse import BlockIndexer, BlockSparseAttention
from mcore_rl.models.megatron.families.dense import PackedMLP, packed_mlp
from mcore_rl.models.megatron.families.mixtures import Experts, Mixture, ScaledSwish
from mcore_rl.models.megatron.weight_mapping import Mapping


class MiniMaxM3(PackedMLP, Mixture):
    """The text model of MiniMax-M3, with the names of tensors with which transformers writes it."""

    model_type = "minimax_m3_vl_text"
    count_field = "num_local_experts"
    width_field = "intermediate_size"
    shared_name = "shared_experts"
    has_qk_norm = True
    has_windows = False
    rotates_partly = True

    @property
    def intermediate_size(self) -> int:
        return int(self.hf.dense_intermediate_size)

    @cached_property
    def experts(self) -> Experts:
        hf = self.hf
        return Experts(
            hf.num_local_experts,
            hf.num_experts_per_tok,
            hf.intermediate_size,
            sparse_layers=tuple(kind == "sparse" for kind in hf.mlp_layer_types),
            shared_width=hf.shared_intermediate_size,
            score="sigmoid",
            scale=hf.routed_scaling_factor,
            selection_bias=True,
        )

    def token_mixer(self, layer: int) -> TokenMixer:
        hf = self.hf
        if hf.layer_types[layer] != "minimax_m3_sparse":
            return self._grouped_query_attention(layer)
        indexer = BlockIndexer(
            topk=hf.index_topk_blocks,
            local=hf.index_local_blocks,
            size=hf.index_block_size,
            heads=hf.index_n_heads,
            head_dim=hf.index_head_dim,
            eps=hf.rms_norm_eps,
            source=layer,
        )
        return self._grouped_query_attention(layer, BlockSparseAttention, indexer=indexer)

    def check(self, max_sequence_length: int) -> None:
        super().check(max_sequence_length)
        rotated = 2 * len(self.ropes()[0])
        if self.hf.index_head_dim < rotated:
            raise UserError(
                f"model.path: index_head_dim={self.hf.index_head_dim} must be at least the number of rotated elements "
                f"of a head ({rotated})"
            )
        if self.hf.router_jitter_noise:
            raise UserError("model.path: router_jitter_noise other than 0 is not supported")

    def megatron_fields(self) -> dict[str, Any]:
        return {
            **super().megatron_fields(),
            "layernorm_zero_centered_gamma": True,
            "activation_func": ScaledSwish(self.hf.swiglu_alpha),
            "activation_func_clamp_value": self.hf.swiglu_limit,
            "glu_linear_offset": 1.0,
        }

    def shrink(self, layers: int, tensor_parallel: int, expert_parallel: int) -> None:
        hf, pairs = self.hf, list(dict.fromkeys(zip(self.hf.layer_types, self.hf.mlp_layer_types, strict=True)))
        super().shrink(layers, tensor_parallel, expert_parallel)
        pairs = [pairs[layer % len(pairs)] for layer in range(layers)]
        hf.layer_types, hf.mlp_layer_types = [kind for kind, _ in pairs], [kind for _, kind in pairs]
        hf.dense_intermediate_size = hf.shared_intermediate_size = 24 * max(2, tensor_parallel)
        hf.index_n_heads, hf.index_head_dim, hf.index_block_size = hf.num_key_value_heads, 16, 8
        hf.index_topk_blocks = max(2, hf.index_local_blocks)

    def passes_on(self, name: str) -> bool:
        return name.startswith(("mtp.", "model.mtp."))

    def _sparse(self, ours: str, theirs: str) -> Iterator[Mapping]:
        for mapping in super()._sparse(ours, theirs):
            if ".shared_experts." not in mapping.megatron:
                yield mapping
        names = f"{ours}shared_experts.", f"{theirs}{self.shared_name}."
        yield from packed_mlp(*names, self.hidden_size, self.experts.shared_width)
