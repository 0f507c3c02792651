"""DeepSeek-V4: attention to recent keys and compressed entries, a residual of several streams, experts by token id."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import torch

from mcore_rl.errors import UserError
from mcore_rl.models.megatron.attention.attention import TokenMixer
from mcore_rl.models.megatron.attention.compressed import CompressedAttention, Compression, EntryIndexer
from mcore_rl.models.megatron.families.dense import RopeByKind
from mcore_rl.models.megatron.families.hyper_connected import HyperConnected
from mcore_rl.models.megatron.families.mixtures import Experts, Mixture
from mcore_rl.models.megatron.layers.hyper_connections import Streams
from mcore_rl.models.megatron.weight_mapping import Mapping, Part, Replicated

WINDOWS, CHOSEN, ALL = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"


class DeepseekV4(HyperConnected, RopeByKind, Mixture):
    """DeepSeek-V4. The names of its tensors are those of transformers' modules (see `name_in_family`)."""

    model_type = "deepseek_v4"
    has_windows = False
    rotates_partly = True
    rope_names = ("main", "compress")
    float32_norms = True
    count_field = "n_routed_experts"
    shared_name = "shared_experts"
    connection_names = ("attn_hc.", "ffn_hc.")
    head_name = "hc_head.hc_"
    # Indexers have modules of the same names in transformers, and o_a_proj is no linear layer.
    unadapted: ClassVar[tuple[str, ...]] = (".kv_proj", ".q_b_proj", ".o_a_proj")

    def _streams(self) -> Streams:
        hf = self.hf
        return Streams(hf.hc_mult, hf.rms_norm_eps, hf.hc_eps, iterations=max(hf.hc_sinkhorn_iters, 1))

    @cached_property
    def experts(self) -> Experts:
        hf = self.hf
        return Experts(
            hf.n_routed_experts,
            hf.num_experts_per_tok,
            hf.moe_intermediate_size,
            sparse_layers=(True,) * self.num_layers,
            shared_width=hf.moe_intermediate_size,
            score=hf.scoring_func,
            scale=hf.routed_scaling_factor,
            selection_bias=True,
            by_id=tuple(layer for layer, kind in enumerate(hf.mlp_layer_types) if kind == "hash_moe"),
        )

    @property
    def intermediate_size(self) -> int:
        """Width of an expert, because no layer is dense."""
        return self.experts.width

    def rope_kind(self, layer: int) -> int:
        return int(self.hf.layer_types[layer] != WINDOWS)

    def token_mixer(self, layer: int) -> TokenMixer:
        hf, kind = self.hf, self.hf.layer_types[layer]
        frequencies, factor = self.ropes()[self.rope_kind(layer)], self.rope_factor(layer)
        compression = indexer = None
        if kind != WINDOWS:
            of_entries = tuple(frequencies.tolist()), factor, float(hf.rms_norm_eps)
            compression = Compression(hf.compress_rates[kind], kind == CHOSEN, *of_entries)
        if kind == CHOSEN:
            sizes = hf.index_topk, hf.index_n_heads, hf.index_head_dim
            indexer = EntryIndexer(*sizes, interleaved=True, source=layer, rotates_end=True, compression=compression)
        return CompressedAttention(
            hidden=self.hidden_size,
            heads=self.num_attention_heads,
            head_dim=self.head_dim,
            query_rank=hf.q_lora_rank,
            window=hf.sliding_window,
            groups=hf.o_groups,
            output_rank=hf.o_lora_rank,
            rotated=2 * len(frequencies),
            rope_factor=factor,
            eps=hf.rms_norm_eps,
            compression=compression,
            indexer=indexer,
        )

    def check(self, max_sequence_length: int) -> None:
        super().check(max_sequence_length)
        hf = self.hf
        if hf.scoring_func not in ("sqrtsoftplus", "sigmoid"):
            raise UserError(f"model.path: scoring_func={hf.scoring_func!r} must be sqrtsoftplus or sigmoid")
        if hf.router_jitter_noise:
            raise UserError("model.path: router_jitter_noise other than 0 is not supported")

    def megatron_fields(self) -> dict[str, Any]:
        return {
            **super().megatron_fields(),
            "activation_func_clamp_value": self.hf.swiglu_limit,
        }

    def divisible_by_tensor_parallel(self) -> dict[str, int]:
        return {**super().divisible_by_tensor_parallel(), "groups of heads (o_groups)": self.hf.o_groups}

    def passes_on(self, name: str) -> bool:
        return name.startswith("mtp.")

    def shrink(self, layers: int, tensor_parallel: int, expert_parallel: int) -> None:
        hf, kinds = self.hf, self.hf.mlp_layer_types
        super().shrink(layers, tensor_parallel, expert_parallel)
        hf.num_key_value_heads, hf.o_groups, hf.o_lora_rank, hf.q_lora_rank = 1, max(2, tensor_parallel), 12, 28
        hf.mlp_layer_types = [kinds[0], *[kinds[-1]] * (layers - 1)]
        hf.index_topk, hf.sliding_window = min(hf.index_topk, 6), min(hf.sliding_window, 16)
        hf.compress_rates = {kind: min(rate, 8) for kind, rate in hf.compress_rates.items()}

    def fill(self, model: Any) -> None:
        for name, table in model.named_buffers():
            if name.endswith("tid2eid"):  # distinct experts for each token id
                table.copy_(torch.rand(len(table), self.experts.count).argsort(-1)[:, : table.shape[1]])

    def _layer(self, layer: int, ours: str, theirs: str) -> Iterator[Mapping]:
        for mapping in super()._layer(layer, ours, theirs):
            if layer in self.experts.by_id and mapping.megatron.endswith("router.expert_bias"):
                part = Part(f"{theirs}mlp.gate.tid2eid", (self.vocab_size, self.experts.topk))
                name = mapping.megatron.replace("expert_bias", "token_experts")
                mapping = replace(mapping, megatron=name, parts=(part,), kind=Replicated(), is_frozen=True)
            yield mapping
