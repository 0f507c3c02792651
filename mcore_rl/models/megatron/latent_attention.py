"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): queries, keys and values come from low-rank states.

Megatron's own module compares its submodules with Megatron's classes and rotates by tables of positions. This module
accepts the linear layers of this package, under the names of Megatron's, and rotates by the positions of a pack.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_rl.errors import UserError
from mcore_rl.models.megatron.attention import PackParams
from mcore_rl.models.megatron.layers import ReplicatedLinear, rotate
from mcore_rl.models.megatron.mixers import KeyValueMixer, LayerModules
from mcore_rl.models.megatron.parallel_state import ProcessGroupCollection, process_groups
from mcore_rl.models.megatron.weight_mapping import Columns, Kind, Mapping, Part, Replicated, Rows

from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import sharded_state_dict_default


@dataclass(frozen=True, kw_only=True)
class LatentAttention(KeyValueMixer):
    """Latent attention of one layer. Generation caches the expanded keys and values of all heads.

    query_rank: size of the latent queries; None if queries are projected in one step. key_value_rank: size of the
        latent keys and values.
    rotated: number of elements of each query and key head that are rotated; all heads share the rotated keys.
    value_dim: size of a value head.
    interleaved: whether the pairs that are rotated together are neighbours; otherwise they are half a head apart.
    rope_factor: factor on cos and sin. eps: epsilon of the norms of latent states.
    """

    query_rank: int | None
    key_value_rank: int
    rotated: int
    value_dim: int
    interleaved: bool
    rope_factor: float
    eps: float

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

    def check(self) -> None:
        if self.value_dim > self.head_dim:
            raise UserError(f"model.path: v_head_dim={self.value_dim} above the size of a key ({self.head_dim})")

    def flops_per_token_squared(self) -> float:
        return 3.0 * self.heads * (self.head_dim + self.value_dim)


class PackLatentAttention(MegatronModule):
    """The module of `LatentAttention`, over packs."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        mixer: LatentAttention,
        modules: LayerModules,
        pg_collection: ProcessGroupCollection | None = None,
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
        )
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
        """Map hidden states [T / CP (/ TP with SP), 1, hidden] to the same shape, and None for the bias."""
        mixer = self.mixer
        plain, rotated = self._queries(hidden_states).split((mixer.plain, mixer.rotated), -1)
        query = torch.cat((plain, self._rotate(rotated, rotary_pos_emb)), -1)
        latent, rotated = self.linear_kv_down_proj(hidden_states).split((mixer.key_value_rank, mixer.rotated), -1)
        # All heads share this part of the keys; the copy's backward pass sums the gradients of the ranks' heads.
        if self.config.sequence_parallel:
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
        attended = self.core_attention(query, key, value, None, packed_seq_params=packed_seq_params)
        attended = attended.unflatten(-1, (-1, mixer.head_dim))[..., : mixer.value_dim].flatten(1)
        output: tuple[Tensor, Tensor | None] = self.linear_proj(attended[:, None])
        return output

    def _queries(self, hidden_states: Tensor) -> Tensor:
        """Return [T / CP, heads / TP, head_dim]."""
        if self.mixer.query_rank is None:
            query, _ = self.linear_q_proj(hidden_states)
        else:
            query, _ = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden_states)))
        heads: Tensor = query.squeeze(1).unflatten(-1, (-1, self.mixer.head_dim))
        return heads

    def _rotate(self, x: Tensor, angles: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        """Rotate [T, heads, rotated] by angles [T, 1, rotated]; the pairs are half a head apart in the result."""
        angles = angles[0] if isinstance(angles, tuple) else angles
        if self.mixer.interleaved:
            x = torch.cat((x[..., ::2], x[..., 1::2]), -1)
        return rotate(x, angles, self.mixer.rope_factor)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Return Megatron's description of the module's weights for a checkpoint."""
        described: dict[str, Any] = {}
        for name, module in self.named_children():
            described |= sharded_state_dict_default(
                module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group
            )
        return described
