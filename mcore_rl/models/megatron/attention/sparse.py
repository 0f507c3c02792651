"""Sparse attention: an indexer chooses the keys that each query sees (DeepSeek-V3.2, arXiv:2512.02556, section 2.1).

The score of query t and key s ≤ t of the same row is

    heads^−1/2 · Σ_h weight(t, h) · ReLU(size^−1/2 · query(t, h) · key(s)),

and a query sees only the `topk` keys with the highest scores. The choice has no gradient, and the indexer's weights are
frozen, as in transformers.

A choice is an int32 tensor [queries, topk] of positions in the query's own row; a query with fewer keys has −1 in the
other places. A position in a row is the same number in every pack and every layout.

In GLM-5.3 and Qwen4 the keys of a row are divided into pools of consecutive keys. Pools are scored and chosen in place
of keys; the key of a pool is a mean, in GLM-5.3 with gates. A query always sees the keys after its last whole pool.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Int32
from torch import Tensor

from mcore_rl.distributed.collectives import all_gather
from mcore_rl.models.megatron.kernels.packed_attention import AttentionPattern
from mcore_rl.models.megatron.kernels.selected_attention import blocks_of
from mcore_rl.models.megatron.layers.parameters import ShardedMixin
from mcore_rl.models.megatron.layers.transformer_layer import rotate
from mcore_rl.models.megatron.parallel_state import ProcessGroupCollection

from megatron.core.transformer.transformer_config import TransformerConfig

KEY_NORM_EPS = 1e-6
"""Epsilon of the norm of the indexer's keys in transformers, whatever `rms_norm_eps` is."""


@dataclass(frozen=True)
class Indexer:
    """Describes how the keys of one layer are chosen.

    topk: number of keys that are chosen for a query.
    pool: number of consecutive keys that are chosen together.
    heads, head_dim: number and size of the indexer's query heads. All of them share one key.
    interleaved: whether the two elements of a rotated pair are neighbours; otherwise they are half a head apart.
    rotates_end: whether the last elements of each head are rotated; otherwise the first.
    eps: epsilon of the norm of the keys. float32_norm: whether this norm's weights are always fp32.
    source: number of the layer, from 0, that chooses the keys.
    is_shared: whether `source` is an earlier layer. If so, this layer has no indexer of its own.
    """

    topk: int
    heads: int
    head_dim: int
    interleaved: bool
    source: int
    is_shared: bool = False
    rotates_end: bool = False
    eps: float = KEY_NORM_EPS
    float32_norm: bool = False
    pool: int = 1

    @property
    def most_seen(self) -> int:
        """Largest number of keys that a query sees. Without more keys, nothing is chosen."""
        return self.topk + self.pool - 1

    @property
    def chosen_size(self) -> int:
        """Number of columns of a choice."""
        return self.most_seen

    @property
    def mean_seen(self) -> float:
        """Mean number of keys that a query with more than `most_seen` keys sees."""
        return self.topk + (self.pool - 1) / 2

    @property
    def key_size(self) -> int:
        """Number of elements that an indexer computes of a token's key: with pools, also the gates."""
        return self.head_dim * (1 if self.pool == 1 else 2)

    def parameters(self, hidden: int, query_rank: int) -> int:
        """Return the number of weights by which a token is multiplied; 0 for a layer that shares a choice."""
        return 0 if self.is_shared else self.heads * (self.head_dim * query_rank + hidden) + self.key_size * hidden

    def flops_per_pair(self) -> float:
        """Return the operations of scores for a pair of a query and a key; 0 for a layer that shares a choice."""
        return 0.0 if self.is_shared else 2.0 * self.heads * self.head_dim / self.pool


class ChoosesKeys:
    """A mixer with keys and values whose queries see chosen keys only, unless `indexer` is None."""

    indexer: Any
    hidden: int

    def flops(self, tokens: int, before: int = 0) -> float:
        """Return `TokenMixer.flops`: attention counts the chosen keys, and the indexer's forward pass all earlier keys.

        The indexer's products with its weights are counted too. In short sequences it does nothing (`most_seen`).
        """
        count: float = super().flops(tokens, before)  # type: ignore[misc]
        if self.indexer is None or before + tokens <= self.indexer.most_seen:
            return count
        pairs = ((before + tokens) ** 2 - before**2) / 2
        return count + self.indexer.flops_per_pair() * pairs + 2.0 * self._indexer_parameters() * tokens

    def _indexer_parameters(self) -> int:
        """Return the number of weights by which the indexer multiplies a token."""
        count: int = self.indexer.parameters(self.hidden)
        return count

    def _seen_squared(self, tokens: int) -> float:
        if self.indexer is None:
            plain: float = super()._seen_squared(tokens)  # type: ignore[misc]
            return plain
        seen = min(tokens, self.indexer.most_seen)
        return float(seen**2 + 2 * (tokens - seen) * self.indexer.mean_seen)


class IndexerStates(NamedTuple):
    """What an indexer computes of T tokens, before it compares queries with keys.

    query: [T, heads, head_dim]. key: [T, head_dim]; with pools [T, 2 · head_dim], the keys and their gates.
    weight: [T, heads], the factors of the heads in the scores, in at least fp32.
    """

    query: Tensor
    key: Tensor
    weight: Tensor


class IndexerBase(ShardedMixin, torch.nn.Module, ABC):
    """The indexer of one layer. Its weights are the same on every rank and are not trained.

    indexer: description of the indexer.
    kind_of_states: class of its states, a named tuple whose first fields are `query` and `key`.
    """

    indexer: Any
    groups: ProcessGroupCollection
    sequence_parallel: bool
    kind_of_states: ClassVar[Any]

    @abstractmethod
    def states(self, *args: Any, **kwargs: Any) -> Any:
        """Return the indexer's states of this rank's tokens; the arguments are those of `forward`, but the last."""

    @abstractmethod
    def choose(self, states: Any, visible: AttentionPattern, first: int = 0) -> Tensor:
        """Return the choices for this rank's queries from `first` on; `states` has the keys of all ranks."""

    @abstractmethod
    def best(self, states: Any, ends: Tensor) -> Tensor:
        """Return the choices for the queries of n sequences, each of which sees `ends` [queries, 1] keys."""

    @torch.no_grad()
    def forward(self, *inputs: Any) -> Tensor | None:
        """Choose the keys of this rank's queries; return int32 [T / CP, …], or None if queries see all keys.

        They see all keys if no row of the pack has more than `most_seen` tokens. The condition is about all rows, so
        all ranks take the same way. Under sequence parallelism each rank scores its own T / CP / TP queries, and the
        ranks gather the choices.

        Args:
            inputs: tensors of the tokens, which `states` takes, and the `AttentionPattern` of the pack.
        """
        *tensors, visible = inputs
        if max(visible.layout.row_lengths, default=0) <= self.indexer.most_seen:
            return None
        query, key, *others = self.states(*tensors)
        first = self.groups.tp.rank() * len(query) if self.sequence_parallel else 0
        if self.sequence_parallel:
            key = all_gather(key, self.groups.tp).flatten(0, 1)
        key = all_gather(key, self.groups.cp).flatten(0, 1)
        chosen = self.choose(self.kind_of_states(query, key, *others), visible, first)
        return all_gather(chosen, self.groups.tp).flatten(0, 1) if self.sequence_parallel else chosen


@dataclass(frozen=True)
class Pooling(ABC):
    """How keys are pooled: pool p of a row has its keys p · size … p · size + size − 1."""

    size: int

    @abstractmethod
    def pooled(self, states: Float[Tensor, "n keys size"]) -> Float[Tensor, "n pools dim"]:
        """Return the keys of the whole pools of n rows.

        Args:
            states: what an indexer computes of each token's key (`key_size`).
        """

    def count(self, topk: int) -> int:
        """Return the number of pools that are chosen."""
        return topk // self.size

    def members(self, pools: Int32[Tensor, "queries pools"], ends: Int[Tensor, "queries 1"]) -> Tensor:
        """Return the positions of the keys of chosen pools, and of the keys after the last whole pool; −1 for none."""
        places = torch.arange(self.size, dtype=torch.int32, device=pools.device)
        members = torch.where(pools[..., None] < 0, -1, pools[..., None] * self.size + places).flatten(1)
        after = ends // self.size * self.size + places[:-1]
        return torch.cat((members, torch.where(after < ends, after, -1).int()), 1)

    def everything(self, ends: Int[Tensor, "queries 1"], keys: int) -> Tensor:
        """Return the choice of all of a query's keys, where a row has `keys` keys; −1 after its last key."""
        return all_keys(ends, keys)


@dataclass(frozen=True)
class GatedPooling(Pooling):
    """How keys are pooled with gates.

    bias: [size, head_dim], added to the gates of a pool's keys.
    """

    bias: Tensor

    def pooled(self, states: Float[Tensor, "n keys both"]) -> Float[Tensor, "n pools dim"]:
        """Return the means of whole pools, weighted for each channel by the softmax of the gates.

        Args:
            states: keys and gates, [n, keys, 2 · head_dim].
        """
        whole = states.shape[1] // self.size
        pools = states[:, : whole * self.size].unflatten(1, (whole, self.size))
        keys, gates = pools.chunk(2, dim=-1)
        wide = torch.promote_types(gates.dtype, torch.float32)
        return ((gates.to(wide) + self.bias.to(wide)).softmax(2).to(keys.dtype) * keys).sum(2)


def all_keys(ends: Int[Tensor, "queries 1"], keys: int) -> Int32[Tensor, "queries keys"]:
    """Return the positions of all keys of each query; −1 after its last key."""
    found = torch.arange(keys, dtype=torch.int32, device=ends.device).expand(len(ends), -1)
    return torch.where(found < ends, found, -1)


class IndexerLayer(IndexerBase):
    """An indexer that reads hidden states and latent queries.

    Args:
        query_rank: size of the latent queries. rotated: number of elements of each head that are rotated.
        rope_factor: factor by which cos and sin are multiplied.
    """

    kind_of_states = IndexerStates

    def __init__(
        self,
        config: TransformerConfig,
        indexer: Indexer,
        query_rank: int,
        rotated: int,
        rope_factor: float,
        groups: ProcessGroupCollection,
    ) -> None:
        super().__init__()
        self.indexer, self.rotated, self.rope_factor = indexer, rotated, rope_factor
        self.groups, self.sequence_parallel = groups, config.sequence_parallel
        size, dtype = indexer.head_dim, config.params_dtype
        self.query_weight = frozen(indexer.heads * size, query_rank, dtype=dtype)
        self.key_weight = frozen(size, config.hidden_size, dtype=dtype)
        norm_dtype = torch.float32 if indexer.float32_norm else dtype
        self.key_norm_weight, self.key_norm_bias = (frozen(size, dtype=norm_dtype) for _ in range(2))
        self.head_weight = frozen(indexer.heads, config.hidden_size, dtype=torch.float32)
        if indexer.pool > 1:
            self.pool_gate = frozen(size, config.hidden_size, dtype=dtype)
            self.pool_bias = frozen(indexer.pool, size, dtype=dtype)

    @property
    def pooling(self) -> Pooling | None:
        """How keys are pooled; None if each key is chosen alone."""
        return GatedPooling(self.indexer.pool, self.pool_bias) if self.indexer.pool > 1 else None

    def choose(self, states: IndexerStates, visible: AttentionPattern, first: int = 0) -> Tensor:
        """Return `choose` of the states of this rank's queries from `first` on, with the keys of all ranks."""
        return choose(*states, visible, self.indexer, first, self.pooling)

    def best(self, states: IndexerStates, ends: Tensor) -> Tensor:
        """Return `best_keys` of the states of n sequences."""
        return best_keys(*states, ends, self.indexer.topk, self.pooling)

    def states(self, hidden: Tensor, latent: Tensor, angles: Tensor) -> IndexerStates:
        """Return the indexer's states of this rank's tokens.

        Args:
            hidden, latent: hidden states and latent queries, [T / CP (/ TP with SP), …].
            angles: rotary angles of the tokens, [T / CP, 1, rotated].
        """
        if self.sequence_parallel:
            angles = angles.chunk(self.groups.tp.size())[self.groups.tp.rank()]
        size, norm = (self.indexer.head_dim,), (self.key_norm_weight, self.key_norm_bias)
        key = F.linear(hidden, self.key_weight).to(norm[0].dtype)
        key = F.layer_norm(key, size, *norm, self.indexer.eps).to(hidden.dtype)
        query = F.linear(latent, self.query_weight).unflatten(-1, (self.indexer.heads, -1))
        weight = F.linear(hidden.to(self.head_weight.dtype), self.head_weight) * self.indexer.heads**-0.5
        key = self._rotate(key[:, None], angles).squeeze(1)
        if self.indexer.pool > 1:
            key = torch.cat((key, F.linear(hidden, self.pool_gate)), -1)
        return IndexerStates(self._rotate(query, angles), key, weight)

    def _rotate(self, x: Tensor, angles: Tensor) -> Tensor:
        if not self.rotated:
            return x
        if self.indexer.rotates_end:
            plain, turned = x.split((x.shape[-1] - self.rotated, self.rotated), -1)
            return torch.cat((plain, rotate(turned, angles, self.rope_factor)), -1)
        if self.indexer.interleaved:  # queries and keys are reordered alike, so their products are the same
            turned = x[..., : self.rotated]
            x = torch.cat((turned[..., ::2], turned[..., 1::2], x[..., self.rotated :]), -1)
        return rotate(x, angles, self.rope_factor)


def zero_centred_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) · (1 + weight), computed in at least fp32, in the precision of `x`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(wide), weight.shape, 1 + weight.to(wide), eps).to(x.dtype)


def frozen(*shape: int, dtype: torch.dtype) -> torch.nn.Parameter:
    """Return a parameter that is never trained."""
    return torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)


def choose(
    query: Float[Tensor, "queries heads dim"],
    key: Float[Tensor, "keys size"],
    weight: Float[Tensor, "queries heads"],
    visible: AttentionPattern,
    indexer: Indexer,
    first: int = 0,
    pooling: Pooling | None = None,
) -> Int32[Tensor, "queries chosen_size"]:
    """Choose the keys of the queries of a pack.

    The memory is that of the result and of one block of scores. No scores are computed in rows without more keys than a
    query may see.

    Args:
        query, weight: of this rank's queries `first` … `first + len(query)` − 1.
        key: of all context-parallel ranks, in rank order.
    """
    chosen = torch.full((len(query), indexer.chosen_size), -1, dtype=torch.int32, device=query.device)
    for queries, rows, seen in blocks_of(visible, query.shape[1], first, first + len(query), query.device):
        own, count = slice(queries.start - first, queries.stop - first), seen + queries.stop - queries.start - 1
        ends = torch.arange(seen, count + 1, device=key.device)[:, None]
        if count <= indexer.most_seen:
            found = (all_keys if pooling is None else pooling.everything)(ends, count)
        else:
            found = best_keys(query[own][None], key[rows][None], weight[own][None], ends, indexer.topk, pooling)
        chosen[own, : found.shape[1]] = found
    return chosen


def best_keys(
    query: Float[Tensor, "n queries heads dim"],
    key: Float[Tensor, "n keys size"],
    weight: Float[Tensor, "n queries heads"],
    ends: Int[Tensor, "all_queries 1"],
    topk: int,
    pooling: Pooling | None,
) -> Int32[Tensor, "all_queries chosen"]:
    """Return the positions of the keys that each query sees; −1 for none.

    Args:
        ends: number of keys of each query, from the first on, of all n sequences after each other.
    """
    if pooling is None:
        return highest(index_scores(query, key, weight).flatten(0, 1), ends, topk)
    scores = index_scores(query, pooling.pooled(key), weight).flatten(0, 1)
    return pooling.members(highest(scores, ends // pooling.size, pooling.count(topk)), ends)


def index_scores(
    query: Float[Tensor, "n queries heads dim"],
    key: Float[Tensor, "n keys dim"],
    weight: Float[Tensor, "n queries heads"],
) -> Float[Tensor, "n queries keys"]:
    """Return the scores of queries and keys, in at least fp32."""
    wide = torch.promote_types(query.dtype, torch.float32)
    products = torch.einsum("nqhd,nkd->nqhk", query.to(wide), key.to(wide)).mul_(query.shape[-1] ** -0.5).relu_()
    return torch.einsum("nqh,nqhk->nqk", weight.to(wide), products)


def highest(
    scores: Float[Tensor, "queries keys"], ends: Int[Tensor, "queries 1"], topk: int
) -> Int32[Tensor, "queries chosen"]:
    """Return the positions of the highest scores, [queries, min(topk, keys)]; −1 after a query's last key.

    The positions are in the order of their scores, the highest first. Of equal scores the earlier position is chosen,
    and comes first. Equal scores are frequent, because the score of a key is 0 if its products with all heads are
    negative. `torch.topk` may return any of them, and others if a row has more columns. Therefore it only finds the
    lowest chosen score. The positions with this score are counted from the first on, until `topk` positions are chosen.
    A stable sort of all scores would give the same positions; this function sorts only the chosen scores.

    Args:
        scores: they are overwritten. NaN counts as infinity. ends: number of keys that each query sees, from the first
            on.
    """
    keys = scores.shape[1]
    behind = torch.arange(keys, device=scores.device) >= ends
    # NaN equals nothing, so that a row with NaN would have fewer than `topk` positions.
    scores = scores.nan_to_num_(math.inf, math.inf, -math.inf).masked_fill_(behind, -math.inf)
    if topk < keys:
        lowest = scores.topk(topk, dim=-1, sorted=False).values.amin(-1, keepdim=True)
        chosen, equal = scores > lowest, scores == lowest
        places = topk - chosen.sum(-1, keepdim=True)
        chosen |= equal & (equal.cumsum(-1, dtype=torch.int32) <= places)
        # Exactly `topk` columns are chosen. Their numbers from the end are positive and differ, so no two are equal.
        from_end = torch.arange(keys, 0, -1, dtype=torch.int32, device=scores.device)
        found = keys - torch.where(chosen, from_end, 0).topk(topk, dim=-1).values.long()
    else:
        found = torch.arange(keys, device=scores.device).expand(scores.shape)
    # Adding 0 turns −0 into 0: a sort by bits would separate them.
    order = scores.gather(-1, found).add_(0.0).sort(dim=-1, descending=True, stable=True).indices
    found = found.gather(-1, order)
    return torch.where(found < ends, found, -1).int()
