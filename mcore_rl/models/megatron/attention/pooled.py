"""Grouped-query attention to chosen pools of keys (Qwen4).

The keys of a row are divided into pools of `pool` consecutive keys. The index key of a pool is the mean of its tokens'
index keys, normalized, and rotated as a token at the pool's first position. The score of a query and a pool is

    size^−1/2 · Σ_h ReLU(query(t, h) · key(pool)).

All query heads see the keys in the `topk / pool` pools with the highest scores among those whose keys they all see, and
the keys after the last of these pools. The choice has no gradient, and the indexer's weights are frozen, as in
transformers. A choice is that of `attention.sparse`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from mcore_rl import platform
from mcore_rl.errors import UserError
from mcore_rl.models.megatron.attention.attention import GroupedQueryAttention, LayerModules
from mcore_rl.models.megatron.attention.block_sparse import IndexedSelfAttention
from mcore_rl.models.megatron.attention.sparse import (
    ChoosesKeys,
    Indexer,
    IndexerLayer,
    IndexerStates,
    Pooling,
    frozen,
    zero_centred_norm,
)
from mcore_rl.models.megatron.layers.transformer_layer import rotate
from mcore_rl.models.megatron.parallel_state import ProcessGroupCollection
from mcore_rl.models.megatron.weight_mapping import Mapping, Shape, replicated_mappings

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True, kw_only=True)
class MeanIndexer(Indexer):
    """Describes how the pools of keys of one layer are chosen.

    topk: number of keys in chosen pools. eps: epsilon of the norms of queries and keys.
    frequencies: inverse frequencies of the rotation. rope_factor: factor by which cos and sin are multiplied.
    """

    frequencies: tuple[float, ...]
    rope_factor: float

    @property
    def key_size(self) -> int:
        return self.head_dim

    def parameters(self, hidden: int, query_rank: int = 0) -> int:
        return (self.heads + 1) * self.head_dim * hidden


@dataclass(frozen=True)
class MeanPooling(Pooling):
    """How keys are pooled: as means, which are normalized and rotated.

    norm_weight: [head_dim], weight of the norm; it is added to 1.
    """

    indexer: MeanIndexer
    norm_weight: Tensor

    def pooled(self, states: Float[Tensor, "n keys dim"]) -> Float[Tensor, "n pools dim"]:
        whole = states.shape[1] // self.size
        wide = torch.promote_types(states.dtype, torch.float32)
        pools = states[:, : whole * self.size].unflatten(1, (whole, self.size)).to(wide)
        normed = zero_centred_norm(pools.mean(2).to(states.dtype), self.norm_weight, self.indexer.eps)
        frequencies = platform.sent(torch.tensor(self.indexer.frequencies, device="cpu"), states.device).repeat(2)
        angles = torch.outer(torch.arange(whole, device=states.device) * float(self.size), frequencies)
        return rotate(normed, angles, self.indexer.rope_factor)


class MeanIndexerLayer(IndexerLayer):
    """The indexer of one layer. It reads hidden states only."""

    indexer: MeanIndexer

    def __init__(self, config: TransformerConfig, indexer: MeanIndexer, groups: ProcessGroupCollection) -> None:
        torch.nn.Module.__init__(self)
        self.indexer, self.groups, self.sequence_parallel = indexer, groups, config.sequence_parallel
        size, dtype = indexer.head_dim, config.params_dtype
        self.weight = frozen((indexer.heads + 1) * size, config.hidden_size, dtype=dtype)
        self.query_norm_weight, self.key_norm_weight = (frozen(size, dtype=dtype) for _ in range(2))

    @property
    def pooling(self) -> MeanPooling:
        return MeanPooling(self.indexer.pool, self.indexer, self.key_norm_weight)

    def states(self, hidden: Tensor, angles: Tensor) -> IndexerStates:  # type: ignore[override]
        """Return the indexer's states of this rank's tokens. The keys are neither normalized nor rotated.

        Args:
            hidden: hidden states [T / CP (/ TP with SP), hidden].
            angles: rotary angles of the tokens, [T / CP, 1, rotated].
        """
        if self.sequence_parallel:
            angles = angles.chunk(self.groups.tp.size())[self.groups.tp.rank()]
        heads, size = self.indexer.heads, self.indexer.head_dim
        query, key = F.linear(hidden, self.weight).split((heads * size, size), -1)
        query = zero_centred_norm(query.unflatten(-1, (heads, size)), self.query_norm_weight, self.indexer.eps)
        query = rotate(query, angles, self.indexer.rope_factor)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        return IndexerStates(query, key, query.new_ones(query.shape[:2], dtype=wide))


@dataclass(frozen=True, kw_only=True)
class PooledSparseAttention(ChoosesKeys, GroupedQueryAttention):
    """Grouped-query attention over chosen pools of keys. The norms' weights are added to 1."""

    indexer: MeanIndexer

    def spec(self, modules: LayerModules) -> ModuleSpec:
        return replace(super().spec(modules), module=PooledSelfAttention)

    def mappings(self, ours: str, theirs: str) -> Iterator[Mapping]:
        yield from super().mappings(ours, theirs)
        size = self.indexer.head_dim
        shapes: dict[str, tuple[str, Shape]] = {
            "weight": ("index_qk_proj.weight", ((self.indexer.heads + 1) * size, self.hidden)),
            "query_norm_weight": ("q_layernorm.weight", (size,)),
            "key_norm_weight": ("k_layernorm.weight", (size,)),
        }
        yield from replicated_mappings(f"{ours}indexer.", f"{theirs}self_attn.indexer.", shapes, is_frozen=True)

    def check(self) -> None:
        super().check()
        indexer = self.indexer
        if not 2 <= indexer.pool <= indexer.topk:
            raise UserError(
                f"model.path: indexer_compress_ratio={indexer.pool} must be at least 2, and at most indexer_budget "
                f"({indexer.topk})"
            )


class PooledSelfAttention(IndexedSelfAttention):
    """The module that computes `PooledSparseAttention`."""

    mixer: PooledSparseAttention
    indexer_kind: ClassVar[type] = MeanIndexerLayer
