"""Block-sparse attention: an indexer chooses the blocks of keys that the queries of each group see (MiniMax-M3).

A block has `size` consecutive keys of a row. The score of a query and a block, for one of the groups of query heads, is
the largest product of the group's index query with an index key of the block that the query sees. The group's query
heads see only the keys in the `topk` blocks with the highest scores. The query's own block and the `local` − 1 blocks
before it are always among these. The choice has no gradient, and the indexer's weights are frozen, as in transformers.

A choice is an int32 tensor [queries, groups, topk] of numbers of blocks in the query's own row; −1 fills the rest of a
row with fewer blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Int32
from torch import Tensor

from mcore_rl.errors import UserError
from mcore_rl.models.megatron.attention.attention import GroupedQueryAttention, LayerModules, PackSelfAttention
from mcore_rl.models.megatron.attention.sparse import ChoosesKeys, IndexerBase, frozen, highest, zero_centred_norm
from mcore_rl.models.megatron.kernels.packed_attention import AttentionPattern
from mcore_rl.models.megatron.kernels.selected_attention import blocks_of
from mcore_rl.models.megatron.layers.packs import PackParams
from mcore_rl.models.megatron.layers.transformer_layer import rotate
from mcore_rl.models.megatron.parallel_state import ProcessGroupCollection
from mcore_rl.models.megatron.weight_mapping import Mapping, Shape, replicated_mappings

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class BlockIndexer:
    """Describes how the blocks of keys of one layer are chosen.

    topk: number of blocks that a query sees. local: number of these that are the nearest ones. size: keys in a block.
    heads, head_dim: number and size of the indexer's query heads, one for each key-value head. All share one key.
    eps: epsilon of the norms of its queries and keys.
    source: number of the layer, from 0.
    """

    topk: int
    local: int
    size: int
    heads: int
    head_dim: int
    eps: float
    source: int

    @property
    def most_seen(self) -> int:
        """Largest number of keys that a query sees. Without more keys, nothing is chosen."""
        return self.topk * self.size

    @property
    def chosen_size(self) -> int:
        """Number of blocks that are chosen for a token, for all groups together."""
        return self.heads * self.topk

    @property
    def key_size(self) -> int:
        """Size of an index key."""
        return self.head_dim

    def parameters(self, hidden: int) -> int:
        """Return the number of weights by which a token is multiplied."""
        return (self.heads + 1) * self.head_dim * hidden

    @property
    def mean_seen(self) -> float:
        """Mean number of keys that a query with more than `most_seen` keys sees: its own block is not complete."""
        return self.most_seen - (self.size - 1) / 2

    def flops_per_pair(self) -> float:
        """Return the operations of scores for a pair of a query and a key."""
        return 2.0 * self.heads * self.head_dim

    def best(
        self,
        query: Float[Tensor, "n queries heads dim"],
        key: Float[Tensor, "n keys dim"],
        ends: Int[Tensor, "all_queries 1"],
    ) -> Int32[Tensor, "all_queries heads chosen"]:
        """Return the numbers of the chosen blocks, of n sequences after each other.

        Args:
            ends: number of keys of each query, from the first on.
        """
        wide = torch.promote_types(query.dtype, torch.float32)
        scores = torch.einsum("nqhd,nkd->nqhk", query.to(wide), key.to(wide)).flatten(0, 1)
        scores.masked_fill_((torch.arange(key.shape[1], device=key.device) >= ends)[:, None], -torch.inf)
        padded = F.pad(scores, (0, -key.shape[1] % self.size), value=-torch.inf)
        of_blocks = padded.unflatten(-1, (-1, self.size)).amax(-1)
        behind = (ends - 1) // self.size - torch.arange(of_blocks.shape[-1], device=key.device)
        of_blocks.masked_fill_(((behind >= 0) & (behind < self.local))[:, None], torch.inf)
        blocks = ((ends - 1) // self.size + 1).repeat_interleave(self.heads, dim=0)
        return highest(of_blocks.flatten(0, 1), blocks, self.topk).unflatten(0, (-1, self.heads))

    def choose(
        self,
        query: Float[Tensor, "queries heads dim"],
        key: Float[Tensor, "keys dim"],
        visible: AttentionPattern,
        first: int = 0,
    ) -> Int32[Tensor, "queries heads topk"]:
        """Choose the blocks of the queries of a pack; the memory is that of the result and of one block of scores.

        Args:
            query: of this rank's queries `first` … `first + len(query)` − 1.
            key: of all context-parallel ranks, in rank order.
        """
        chosen = torch.full((len(query), self.heads, self.topk), -1, dtype=torch.int32, device=query.device)
        for queries, rows, seen in blocks_of(visible, self.heads, first, first + len(query), query.device):
            own, count = slice(queries.start - first, queries.stop - first), queries.stop - queries.start
            ends = torch.arange(seen, seen + count, device=key.device)[:, None]
            found = self.best(query[own][None], key[rows][None], ends)
            chosen[own, :, : found.shape[-1]] = found
        return chosen


class BlockIndexerStates(NamedTuple):
    """What an indexer computes of T tokens before it compares them: query [T, heads, head_dim], key [T, head_dim]."""

    query: Tensor
    key: Tensor


class BlockIndexerLayer(IndexerBase):
    """An indexer that chooses blocks; its choices are int32 [T, heads, topk]."""

    kind_of_states = BlockIndexerStates

    def __init__(self, config: TransformerConfig, indexer: BlockIndexer, groups: ProcessGroupCollection) -> None:
        super().__init__()
        self.indexer, self.groups, self.sequence_parallel = indexer, groups, config.sequence_parallel
        size, dtype = indexer.head_dim, config.params_dtype
        self.query_weight = frozen(indexer.heads * size, config.hidden_size, dtype=dtype)
        self.key_weight = frozen(size, config.hidden_size, dtype=dtype)
        self.query_norm_weight, self.key_norm_weight = (frozen(size, dtype=dtype) for _ in range(2))

    def choose(self, states: BlockIndexerStates, visible: AttentionPattern, first: int = 0) -> Tensor:
        """Return `BlockIndexer.choose` of the states of this rank's queries, with the keys of all ranks."""
        return self.indexer.choose(*states, visible, first)

    def best(self, states: BlockIndexerStates, ends: Tensor) -> Tensor:
        """Return `BlockIndexer.best` of the states of n sequences."""
        return self.indexer.best(*states, ends)

    def states(self, hidden: Tensor, angles: Tensor) -> BlockIndexerStates:
        """Return the indexer's states of this rank's tokens.

        Args:
            hidden: hidden states [T / CP (/ TP with SP), hidden].
            angles: rotary angles of the tokens, [T / CP, 1, rotated].
        """
        if self.sequence_parallel:
            angles = angles.chunk(self.groups.tp.size())[self.groups.tp.rank()]
        query = F.linear(hidden, self.query_weight).unflatten(-1, (self.indexer.heads, -1))
        key = F.linear(hidden, self.key_weight)[:, None]
        norms = self.query_norm_weight, self.key_norm_weight
        normed = (zero_centred_norm(x, w, self.indexer.eps) for x, w in zip((query, key), norms, strict=True))
        query, key = (rotate(x, angles, 1.0) for x in normed)
        return BlockIndexerStates(query, key.squeeze(1))


@dataclass(frozen=True, kw_only=True)
class BlockSparseAttention(ChoosesKeys, GroupedQueryAttention):
    """Grouped-query attention over chosen blocks of keys. The norms' weights are added to 1."""

    indexer: BlockIndexer

    @property
    def block_size(self) -> int:
        return self.indexer.size

    def spec(self, modules: LayerModules) -> ModuleSpec:
        spec = super().spec(modules)
        spec.submodules.core_attention.params["block_size"] = self.block_size
        return replace(spec, module=BlockSparseSelfAttention)

    def mappings(self, ours: str, theirs: str) -> Iterator[Mapping]:
        yield from super().mappings(ours, theirs)
        size, rows = self.indexer.head_dim, self.indexer.heads * self.indexer.head_dim
        shapes: dict[str, tuple[str, Shape]] = {
            "query_weight": ("q_proj.weight", (rows, self.hidden)),
            "key_weight": ("k_proj.weight", (size, self.hidden)),
            "query_norm_weight": ("q_norm.weight", (size,)),
            "key_norm_weight": ("k_norm.weight", (size,)),
        }
        yield from replicated_mappings(f"{ours}indexer.", f"{theirs}self_attn.indexer.", shapes, is_frozen=True)

    def check(self) -> None:
        super().check()
        indexer = self.indexer
        if indexer.heads != self.groups:
            raise UserError(
                f"model.path: index_n_heads={indexer.heads} must be the number of key-value heads ({self.groups})"
            )
        if indexer.size < 2:
            raise UserError(f"model.path: index_block_size={indexer.size} must be at least 2")
        if not 1 <= indexer.local <= indexer.topk:
            raise UserError(
                f"model.path: index_local_blocks={indexer.local} must be at least 1 and at most index_topk_blocks "
                f"({indexer.topk})"
            )


class IndexedSelfAttention(PackSelfAttention):
    """Self-attention with an indexer that reads the hidden states.

    indexer_kind: class of the indexer's module.
    """

    mixer: Any
    indexer_kind: ClassVar[type[IndexerBase]]

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        kind: Any = self.indexer_kind
        self.indexer: Any = kind(config, self.mixer.indexer, self.pg_collection)

    def forward(
        self,
        *args: Any,
        rotary_pos_emb: Any = None,
        packed_seq_params: PackParams | None = None,
        **kwargs: Any,
    ) -> Any:
        """Choose the keys, unless this is a recomputation, and run the attention over them."""
        pack = packed_seq_params
        assert pack is not None, "attention runs on packs"
        angles = rotary_pos_emb[0] if isinstance(rotary_pos_emb, tuple) else rotary_pos_emb
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        choose = lambda: self.indexer(hidden.squeeze(1), angles, pack.visible)  # noqa: E731
        pack.choice(self.mixer.indexer.source, choose, self._of_own_groups)
        return super().forward(*args, rotary_pos_emb=rotary_pos_emb, packed_seq_params=packed_seq_params, **kwargs)

    def _of_own_groups(self, chosen: Tensor | None) -> Tensor | None:
        """Return the choices for this rank's key-value heads."""
        return chosen


class BlockSparseSelfAttention(IndexedSelfAttention):
    """The module that computes `BlockSparseAttention`."""

    mixer: BlockSparseAttention
    indexer_kind = BlockIndexerLayer

    def _of_own_groups(self, chosen: Tensor | None) -> Tensor | None:
        """Return the choices [T / CP, groups / TP, topk] for this rank's key-value heads."""
        if chosen is None:
            return None
        ranks, rank = self.pg_collection.tp.size(), self.pg_collection.tp.rank()
        first, count = rank * self.mixer.groups // ranks, max(1, self.mixer.groups // ranks)
        return chosen[:, first : first + count].contiguous()
