"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): the token mixer and the module that computes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_rl.errors import UserError
from mcore_rl.models.megatron.attention.attention import KeyValueMixer, LayerModules, check_value_dim
from mcore_rl.models.megatron.attention.sparse import ChoosesKeys, Indexer, IndexerLayer
from mcore_rl.models.megatron.layers.packs import PackParams, position_factors
from mcore_rl.models.megatron.layers.parameters import ShardedMixin
from mcore_rl.models.megatron.layers.transformer_layer import ReplicatedLinear, rotate
from mcore_rl.models.megatron.parallel_state import ProcessGroupCollection, process_groups
from mcore_rl.models.megatron.weight_mapping import (
    Columns,
    Kind,
    Mapping,
    Part,
    Replicated,
    Rows,
    Shape,
    replicated_mappings,
)

from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True, kw_only=True)
class LatentAttention(ChoosesKeys, KeyValueMixer):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).

    Queries, keys and values of all heads are expanded from smaller latent states. The cache in generation contains the
    expanded keys and values.

    query_rank: size of the latent queries; None if queries are projected without a latent state. key_value_rank: size
        of the latent keys and values.
    rotated: number of elements of each query and key head that are rotated. The rotated elements of the keys are the
        same for all heads.
    value_dim: size of a value head.
    interleaved: whether the two elements of a rotated pair are neighbours; otherwise they are half a head apart.
    rope_factor: factor by which cos and sin are multiplied. eps: epsilon of the norms of the latent states.
    rotates: whether there is a rotation. Without it (NoPE, Kimi Linear), the heads still share these elements of the
        keys.
    indexer: how the keys that a query sees are chosen; None if it sees all previous keys.
    query_scale: function that maps the tokens' positions [T] to factors of the queries; None if there is no factor.
    output_gate: whether each element of the heads' outputs has a gate. The sigmoid of the gate multiplies the element.
    has_sinks: whether each query head has a sink, which is fp32; see `GroupedQueryAttention`.
    """

    query_rank: int | None
    key_value_rank: int
    rotated: int
    value_dim: int
    interleaved: bool
    rope_factor: float
    eps: float
    rotates: bool = True
    indexer: Indexer | None = None
    query_scale: Callable[[Tensor], Tensor] | None = None
    output_gate: bool = False
    has_sinks: bool = False

    @property
    def plain(self) -> int:
        """Number of elements of each query and key head that are not rotated."""
        return self.head_dim - self.rotated

    def spec(self, modules: LayerModules) -> ModuleSpec:
        return ModuleSpec(module=PackLatentAttention, params={"mixer": self, "modules": modules})

    def mappings(self, ours: str, theirs: str) -> Iterator[Mapping]:
        theirs += "self_attn."
        queries, latent = self.heads * self.head_dim, self.key_value_rank

        def linear(name: str, hf_name: str, rows: int, columns: int, kind: Kind) -> Mapping:
            return Mapping(f"{ours}{name}.weight", (Part(f"{theirs}{hf_name}.weight", (rows, columns)),), kind)

        def norm(name: str, hf_name: str, size: int) -> Mapping:
            return Mapping(f"{ours}{name}.weight", (Part(f"{theirs}{hf_name}.weight", (size,)),), Replicated())

        if self.query_rank is None:
            yield linear("linear_q_proj", "q_proj", queries, self.hidden, Rows())
        else:
            yield linear("linear_q_down_proj", "q_a_proj", self.query_rank, self.hidden, Replicated())
            yield norm("q_layernorm", "q_a_layernorm", self.query_rank)
            yield linear("linear_q_up_proj", "q_b_proj", queries, self.query_rank, Rows())
        yield linear("linear_kv_down_proj", "kv_a_proj_with_mqa", latent + self.rotated, self.hidden, Replicated())
        yield norm("kv_layernorm", "kv_a_layernorm", latent)
        yield linear("linear_kv_up_proj", "kv_b_proj", self.heads * (self.plain + self.value_dim), latent, Rows())
        yield linear("linear_proj", "o_proj", self.hidden, self.heads * self.value_dim, Columns())
        if self.output_gate:
            yield linear("linear_gate", "gate_proj", self.heads * self.value_dim, self.hidden, Rows())
        if self.has_sinks:
            sinks = (Part(f"{theirs}sinks", (self.heads,)),)
            yield Mapping(f"{ours}core_attention.softmax_offset", sinks, Rows(), is_float32=True)
        if self.indexer is not None and not self.indexer.is_shared:
            heads, size, rank = self.indexer.heads, self.indexer.head_dim, self.query_rank or 0
            shapes: dict[str, tuple[str, Shape]] = {
                "query_weight": ("wq_b.weight", (heads * size, rank)),
                "key_weight": ("wk.weight", (size, self.hidden)),
                "key_norm_weight": ("k_norm.weight", (size,)),
                "key_norm_bias": ("k_norm.bias", (size,)),
                "head_weight": ("weights_proj.weight", (heads, self.hidden)),
            }
            if self.indexer.pool > 1:
                shapes["pool_gate"] = "index_kpool_compress_gate", (size, self.hidden)
                shapes["pool_bias"] = "index_kpool_compress_ape", (self.indexer.pool, size)
            wide = ["head_weight", *(["key_norm_weight", "key_norm_bias"] if self.indexer.float32_norm else [])]
            yield from replicated_mappings(f"{ours}indexer.", f"{theirs}indexer.", shapes, wide, is_frozen=True)

    def check(self) -> None:
        if self.indexer is not None and self.query_rank is None:
            raise UserError("model.path: q_lora_rank=null is not supported, because the indexer reads latent queries")
        if self.indexer is not None and self.indexer.head_dim < max(self.rotated, 1):
            raise UserError(
                f"model.path: index_head_dim={self.indexer.head_dim} must be at least qk_rope_head_dim ({self.rotated})"
            )
        check_value_dim(self.value_dim, self.head_dim)

    def flops_per_token_squared(self) -> float:
        return 3.0 * self.heads * (self.head_dim + self.value_dim)

    def _indexer_parameters(self) -> int:
        assert self.indexer is not None
        return self.indexer.parameters(self.hidden, self.query_rank or 0)


class PackLatentAttention(ShardedMixin, MegatronModule):
    """The module that computes `LatentAttention` over packs.

    Megatron's own module accepts only Megatron's linear layers, and rotates by tables of consecutive positions. This
    module accepts this package's linear layers and rotates by the positions in a pack. Its parameters have the same
    names as those of Megatron's module.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        mixer: LatentAttention,
        modules: LayerModules,
        pg_collection: ProcessGroupCollection | None = None,
        cp_comm_type: str | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        groups = pg_collection or process_groups()
        self.mixer, self.layer_number, self.tp_group = mixer, layer_number, groups.tp
        common = {"config": config, "init_method": config.init_method, "bias": False, "is_expert": False}
        up = {**common, "gather_output": False, "skip_bias_add": False, "tp_group": groups.tp}
        hidden, heads, rank = config.hidden_size, mixer.heads, mixer.query_rank
        if rank is None:
            self.linear_q_proj = modules.column_linear(hidden, heads * mixer.head_dim, **up)
        else:
            self.linear_q_down_proj = ReplicatedLinear(config, hidden, rank)
            self.q_layernorm = modules.norm(config, rank, mixer.eps)
            self.linear_q_up_proj = modules.column_linear(rank, heads * mixer.head_dim, **up)
        self.linear_kv_down_proj = ReplicatedLinear(config, hidden, mixer.key_value_rank + mixer.rotated)
        self.kv_layernorm = modules.norm(config, mixer.key_value_rank, mixer.eps)
        expanded = heads * (mixer.plain + mixer.value_dim)
        self.linear_kv_up_proj = modules.column_linear(mixer.key_value_rank, expanded, **up)
        self.core_attention = modules.attention(
            config,
            layer_number,
            AttnMaskType.causal,
            "self",
            softmax_scale=mixer.scale,
            pg_collection=groups,
            window=mixer.window,
            cp_comm_type=cp_comm_type,
            **({"sinks": heads, "float32_sinks": True} if mixer.has_sinks else {}),
        )
        if mixer.output_gate:
            self.linear_gate = modules.column_linear(hidden, heads * mixer.value_dim, **up)
        self.indexer: Any = None
        if mixer.indexer is not None and not mixer.indexer.is_shared:
            assert rank is not None, "the indexer reads latent queries"
            self.indexer = IndexerLayer(config, mixer.indexer, rank, mixer.rotated, mixer.rope_factor, groups)
        self.linear_proj = modules.row_linear(
            heads * mixer.value_dim, hidden, input_is_parallel=True, skip_bias_add=True, tp_group=groups.tp, **common
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        *,
        rotary_pos_emb: Tensor,
        packed_seq_params: PackParams | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Map hidden states [T / CP (/ TP with SP), 1, hidden] to outputs of the same shape; return (outputs, None)."""
        mixer = self.mixer
        latent = self._query_latent(hidden_states)
        chosen = self._chosen(hidden_states, latent, rotary_pos_emb, packed_seq_params)
        plain, rotated = self._queries(latent).split((mixer.plain, mixer.rotated), -1)
        query = torch.cat((plain, self._rotate(rotated, rotary_pos_emb)), -1)
        if mixer.query_scale is not None:
            query = query * position_factors(mixer.query_scale, packed_seq_params).to(query.dtype)
        latent, rotated = self.linear_kv_down_proj(hidden_states).split((mixer.key_value_rank, mixer.rotated), -1)
        # All heads share this part of the keys; the copy's backward pass sums the gradients of the ranks' heads.
        if not mixer.rotated:
            rotated = rotated.new_empty(len(query), 1, 0)
        elif self.config.sequence_parallel:
            rotated = gather_from_sequence_parallel_region(rotated, group=self.tp_group)
        else:
            rotated = copy_to_tensor_model_parallel_region(rotated, group=self.tp_group)
        expanded, _bias = self.linear_kv_up_proj(self.kv_layernorm(latent))
        plain, value = (
            expanded.squeeze(1)
            .unflatten(-1, (-1, mixer.plain + mixer.value_dim))
            .split((mixer.plain, mixer.value_dim), -1)
        )
        rotated = self._rotate(rotated, rotary_pos_emb).expand(-1, plain.shape[1], -1)
        # The kernels need values of the size of the keys.
        value = F.pad(value, (0, mixer.head_dim - mixer.value_dim))
        key = torch.cat((plain, rotated), -1)
        options = {} if chosen is None else {"chosen": chosen}
        attended = self.core_attention(query, key, value, None, packed_seq_params=packed_seq_params, **options)
        attended = attended.unflatten(-1, (-1, mixer.head_dim))[..., : mixer.value_dim].flatten(1)
        if mixer.output_gate:
            gate, _bias = self.linear_gate(hidden_states)
            attended = attended * gate.squeeze(1).sigmoid()
        output: tuple[Tensor, Tensor | None] = self.linear_proj(attended[:, None])
        return output

    def _query_latent(self, hidden_states: Tensor) -> Tensor:
        """Return the latent queries, or the hidden states if queries are projected without a latent state."""
        if self.mixer.query_rank is None:
            return hidden_states
        latent: Tensor = self.q_layernorm(self.linear_q_down_proj(hidden_states))
        return latent

    def _chosen(
        self, hidden_states: Tensor, latent: Tensor, angles: Tensor | tuple[Tensor, Tensor], pack: PackParams | None
    ) -> Tensor | None:
        """Return the keys that the queries see, int32 [T / CP, most_seen]; None if they see all previous keys.

        Layers that share another layer's choice take it from the pack.
        """
        indexer = self.mixer.indexer
        if indexer is None:
            return None
        assert pack is not None, "attention runs on packs"
        angles = angles[0] if isinstance(angles, tuple) else angles

        def choose() -> Tensor | None:
            assert self.indexer is not None, f"layer {indexer.source + 1} chose no keys for layer {self.layer_number}"
            chosen: Tensor | None = self.indexer(hidden_states.squeeze(1), latent.squeeze(1), angles, pack.visible)
            return chosen

        return pack.choice(indexer.source, choose)

    def _queries(self, latent: Tensor) -> Tensor:
        """Return the queries before rotation, [T / CP, heads / TP, head_dim]."""
        query, _ = (self.linear_q_proj if self.mixer.query_rank is None else self.linear_q_up_proj)(latent)
        heads: Tensor = query.squeeze(1).unflatten(-1, (-1, self.mixer.head_dim))
        return heads

    def _rotate(self, x: Tensor, angles: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        """Rotate `x` [T, heads, rotated] by `angles` [T, 1, rotated].

        In `x`, the two elements of a pair may be neighbours. In the result they are rotated / 2 elements apart.
        """
        if not self.mixer.rotates:
            return x
        angles = angles[0] if isinstance(angles, tuple) else angles
        if self.mixer.interleaved:
            x = torch.cat((x[..., ::2], x[..., 1::2]), -1)
        return rotate(x, angles, self.mixer.rope_factor)
