"""Attention to compressed entries (DeepSeek-V4): few recent keys, and entries that stand for several earlier keys each.

A token has one key for all heads, which is its value too. Queries see the keys of the last `window` tokens. In layers
with a compression they also see entries. Entry w of a row is made of the tokens w · rate … w · rate + rate − 1 and, if
entries overlap, of the `rate` tokens before them. It is the mean of projections of these tokens, weighted for each
channel by the softmax of gates, then normalized, and rotated as a token at position w · rate. A query sees the entries
whose tokens are all behind it or its own; with an indexer, only the `topk` of them with the highest scores. Each head
also has a sink.

Keys and entries have been rotated, and so have their sums; the outputs are rotated back by the query's position.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Int32
from torch import Tensor

from mcore_rl.distributed.collectives import all_gather_forward_reduce_scatter_backward
from mcore_rl.errors import UserError
from mcore_rl.models.megatron.attention.attention import LayerModules, TokenMixer
from mcore_rl.models.megatron.attention.sparse import (
    GatedPooling,
    Indexer,
    IndexerLayer,
    IndexerStates,
    all_keys,
    frozen,
)
from mcore_rl.models.megatron.kernels.packed_attention import AttentionPattern
from mcore_rl.models.megatron.kernels.selected_attention import attention_in_blocks, chosen_mask
from mcore_rl.models.megatron.layers.packs import PackParams
from mcore_rl.models.megatron.layers.parameters import ShardedMixin
from mcore_rl.models.megatron.layers.transformer_layer import FloatRMSNorm, ReplicatedLinear, rotate
from mcore_rl.models.megatron.parallel_state import ProcessGroupCollection, process_groups
from mcore_rl.models.megatron.weight_mapping import Columns, Kind, Mapping, Part, Replicated, Rows, Shape, Stacked

from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class Compression:
    """Describes how tokens are compressed to entries.

    rate: number of tokens from one entry to the next. overlaps: whether an entry is also made of the `rate` tokens
        before its own. Tokens then have two projections, for the next entry and for their own.
    frequencies: inverse frequencies of the rotation. Twice as many elements are rotated, the last of each entry.
    rope_factor: factor by which cos and sin are multiplied. eps: epsilon of the norm of entries.
    """

    rate: int
    overlaps: bool
    frequencies: tuple[float, ...]
    rope_factor: float
    eps: float

    def width(self, size: int) -> int:
        """Return the number of elements that a token contributes to entries of `size` elements, without gates."""
        return size * (2 if self.overlaps else 1)

    def entries(
        self,
        states: Float[Tensor, "n keys both"],
        bias: Float[Tensor, "rate width"],
        norm_weight: Float[Tensor, " size"],
    ) -> Float[Tensor, "n entries size"]:
        """Return the entries of n rows.

        Args:
            states: projections of the tokens, and their gates.
            bias: added to the gates. norm_weight: weight of the entries' norm.
        """
        whole, size = states.shape[1] // self.rate, len(norm_weight)
        values, gates = states[:, : whole * self.rate].unflatten(1, (whole, self.rate)).chunk(2, dim=-1)
        gates = gates + bias
        if self.overlaps:
            values = torch.cat((_previous(values[..., :size], 0.0), values[..., size:]), 2)
            gates = torch.cat((_previous(gates[..., :size], -torch.inf), gates[..., size:]), 2)
        wide = torch.promote_types(gates.dtype, torch.float32)
        mean = (values * gates.to(wide).softmax(2).to(values.dtype)).sum(2)
        normed = mean.to(wide) * torch.rsqrt(mean.to(wide).square().mean(-1, keepdim=True) + self.eps)
        normed = (norm_weight * normed).to(values.dtype)
        frequencies = torch.tensor(self.frequencies, device=states.device).repeat(2)
        angles = torch.outer(torch.arange(whole, device=states.device) * float(self.rate), frequencies)
        return rotate_end(normed, angles, self.rope_factor)


def _previous(x: Tensor, first: float) -> Tensor:
    """Return for each entry [n, entries, …] the values of the entry before; `first` for the first entry."""
    return torch.cat((torch.full_like(x[:, :1], first), x[:, :-1]), 1)


def rotate_end(x: Tensor, angles: Tensor, factor: float) -> Tensor:
    """Rotate the last elements of `x` [… d], whose pairs are neighbours. In the result, pairs are half of them apart.

    Args:
        angles: [… rotated].
    """
    rotated = angles.shape[-1]
    plain, end = x.split((x.shape[-1] - rotated, rotated), -1)
    return torch.cat((plain, rotate(torch.cat((end[..., ::2], end[..., 1::2]), -1), angles, factor)), -1)


def rotate_end_back(x: Tensor, angles: Tensor, factor: float) -> Tensor:
    """Rotate the last elements of `x` by −`angles`, and bring pairs back together; see `rotate_end`."""
    rotated = angles.shape[-1]
    plain, end = x.split((x.shape[-1] - rotated, rotated), -1)
    end = rotate(end, -angles, factor)
    return torch.cat((plain, torch.stack(end.chunk(2, dim=-1), -1).flatten(-2)), -1)


@dataclass(frozen=True)
class EntryIndexer(Indexer):
    """Describes an indexer that chooses entries: a choice consists of numbers of entries in the query's row."""

    compression: Compression | None = None

    @property
    def rate(self) -> int:
        assert self.compression is not None, "entries are made by a compression"
        return self.compression.rate

    @property
    def most_seen(self) -> int:
        return (self.topk + 1) * self.rate - 1

    @property
    def chosen_size(self) -> int:
        return self.topk

    @property
    def key_size(self) -> int:
        assert self.compression is not None, "entries are made by a compression"
        return 2 * self.compression.width(self.head_dim)

    def flops_per_pair(self) -> float:
        return 2.0 * self.heads * self.head_dim / self.rate


@dataclass(frozen=True)
class EntryPooling(GatedPooling):
    """How an indexer's entries are made and counted. `size` is the rate of the compression.

    norm_weight: weight of the entries' norm.
    """

    compression: Compression
    norm_weight: Tensor

    def pooled(self, states: Float[Tensor, "n keys both"]) -> Float[Tensor, "n entries dim"]:
        return self.compression.entries(states, self.bias, self.norm_weight)

    def count(self, topk: int) -> int:
        return topk

    def members(self, pools: Int32[Tensor, "queries pools"], ends: Int[Tensor, "queries 1"]) -> Tensor:
        return pools

    def everything(self, ends: Int[Tensor, "queries 1"], keys: int) -> Tensor:
        return all_keys(ends // self.size, keys // self.size)


class EntryIndexerLayer(IndexerLayer):
    """The indexer of one layer that chooses entries. Its weights are not trained."""

    indexer: EntryIndexer

    def __init__(
        self, config: TransformerConfig, indexer: EntryIndexer, query_rank: int, rotated: int, groups: Any
    ) -> None:
        torch.nn.Module.__init__(self)
        self.indexer, self.rotated, self.groups = indexer, rotated, groups
        self.sequence_parallel = config.sequence_parallel
        size, dtype = indexer.head_dim, config.params_dtype
        self.query_weight = frozen(indexer.heads * size, query_rank, dtype=dtype)
        self.key_weight = frozen(indexer.key_size, config.hidden_size, dtype=dtype)
        self.head_weight = frozen(indexer.heads, config.hidden_size, dtype=torch.float32)
        self.bias = frozen(indexer.rate, indexer.key_size // 2, dtype=torch.float32)
        self.norm_weight = frozen(size, dtype=torch.float32)

    @property
    def pooling(self) -> EntryPooling:
        assert self.indexer.compression is not None
        return EntryPooling(self.indexer.rate, self.bias, self.indexer.compression, self.norm_weight)

    def states(self, hidden: Tensor, latent: Tensor, angles: Tensor) -> IndexerStates:
        if self.sequence_parallel:
            angles = angles.chunk(self.groups.tp.size())[self.groups.tp.rank()]
        assert self.indexer.compression is not None
        query = F.linear(latent, self.query_weight).unflatten(-1, (self.indexer.heads, -1))
        query = rotate_end(query, angles, self.indexer.compression.rope_factor)
        weight = F.linear(hidden.to(self.head_weight.dtype), self.head_weight) * self.indexer.heads**-0.5
        return IndexerStates(query, F.linear(hidden, self.key_weight), weight)


@dataclass(frozen=True, kw_only=True)
class CompressedAttention(TokenMixer):
    """Describes the attention of a layer of DeepSeek-V4.

    heads, head_dim: number and size of query heads; key and entries have the same size.
    query_rank: size of the latent queries. window: number of the last keys that a query sees, including its own.
    groups, output_rank: the heads' outputs are divided into `groups` groups, each of which is projected to
        `output_rank` values before the last projection.
    rotated: number of elements that are rotated, at the end of each head. rope_factor: factor of cos and sin.
    eps: epsilon of all norms. compression: how entries are made; None for a layer without entries.
    indexer: how entries are chosen; None if all are seen.
    """

    input_linear: ClassVar[str] = "linear_q_down_proj"
    heads: int
    head_dim: int
    query_rank: int
    window: int
    groups: int
    output_rank: int
    rotated: int
    rope_factor: float
    eps: float
    compression: Compression | None = None
    indexer: EntryIndexer | None = None

    @property
    def mixed_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def state_size(self) -> int:
        """Number of elements that attention needs of an earlier token: key, contributions to entries, and gates."""
        return self.head_dim + (0 if self.compression is None else 2 * self.compression.width(self.head_dim))

    def spec(self, modules: LayerModules) -> ModuleSpec:
        return ModuleSpec(module=PackCompressedAttention, params={"mixer": self, "modules": modules})

    def check(self) -> None:
        if self.mixed_size % self.groups:
            raise UserError(
                f"model.path: o_groups={self.groups} must divide the {self.mixed_size} outputs of the heads"
            )

    def mappings(self, ours: str, theirs: str) -> Iterator[Mapping]:
        theirs += "self_attn."
        size, hidden, rank = self.head_dim, self.hidden, self.groups * self.output_rank

        def one(name: str, hf_name: str, shape: Shape, kind: Kind, wide: bool = False) -> Mapping:
            return Mapping(f"{ours}{name}", (Part(f"{theirs}{hf_name}", shape),), kind, is_float32=wide)

        yield one("linear_q_down_proj.weight", "q_a_proj.weight", (self.query_rank, hidden), Replicated())
        yield one("q_layernorm.weight", "q_a_norm.weight", (self.query_rank,), Replicated(), True)
        yield one("linear_q_up_proj.weight", "q_b_proj.weight", (self.mixed_size, self.query_rank), Rows())
        yield one("linear_kv_proj.weight", "kv_proj.weight", (size, hidden), Replicated())
        yield one("kv_layernorm.weight", "kv_norm.weight", (size,), Replicated(), True)
        yield one("group_weight", "o_a_proj.weight", (rank, self.mixed_size // self.groups), Rows())
        yield one("linear_proj.weight", "o_b_proj.weight", (hidden, rank), Columns())
        yield one("core_attention.softmax_offset", "sinks", (self.heads,), Rows(), True)
        if self.compression is not None:
            yield from _compressor(f"{ours}core_attention.", f"{theirs}compressor.", self.compression, size)
            yield _stacked(f"{ours}linear_entry_proj.weight", f"{theirs}compressor.", self.compression, size, hidden)
        if self.indexer is not None and self.compression is not None:
            heads, size = self.indexer.heads, self.indexer.head_dim
            ours, theirs = f"{ours}indexer.", f"{theirs}compressor.indexer."
            tensors = [
                one("query_weight", "q_b_proj.weight", (heads * size, self.query_rank), Replicated()),
                one("head_weight", "scorer.weights_proj.weight", (heads, hidden), Replicated(), True),
                *_compressor(ours, theirs, self.compression, size),
                _stacked(f"{ours}key_weight", theirs, self.compression, size, hidden),
            ]
            for mapping in tensors:
                yield Mapping(mapping.megatron, mapping.parts, mapping.kind, False, mapping.is_float32, is_frozen=True)

    def flops(self, tokens: int, before: int = 0) -> float:
        """Return `TokenMixer.flops`: the products with recent keys and visible entries, and the indexer's forward pass.

        The few operations that make entries are not counted.
        """
        pairs = self._pairs(before + tokens) - self._pairs(before)
        count = 12.0 * self.heads * self.head_dim * pairs
        if self.indexer is None or before + tokens <= self.indexer.most_seen:
            return count
        scored = _sum_of_quotients(before + tokens, self.indexer.rate) - _sum_of_quotients(before, self.indexer.rate)
        weights = self.indexer.parameters(self.hidden, self.query_rank)
        return count + 2.0 * self.indexer.heads * self.indexer.head_dim * scored + 2.0 * weights * tokens

    def _pairs(self, tokens: int) -> float:
        """Return the number of pairs of a query and a key or entry that it sees; its own key counts half."""
        window = min(tokens, self.window)
        pairs = window**2 / 2 + (tokens - window) * window
        if self.compression is None:
            return pairs
        rate = self.compression.rate
        most = tokens if self.indexer is None else min(tokens, self.indexer.topk * rate)
        chosen = 0 if self.indexer is None else (tokens - most) * self.indexer.topk
        return pairs + _sum_of_quotients(most, rate) + chosen


def _sum_of_quotients(number: int, divisor: int) -> int:
    """Return the sum of n // divisor for n = 1 … number."""
    last = number // divisor
    return divisor * last * (last - 1) // 2 + last * (number - last * divisor + 1)


def _compressor(ours: str, theirs: str, compression: Compression, size: int) -> Iterator[Mapping]:
    shapes: dict[str, tuple[str, Shape]] = {
        "bias": ("position_bias", (compression.rate, compression.width(size))),
        "norm_weight": ("kv_norm.weight", (size,)),
    }
    for name, (hf_name, shape) in shapes.items():
        yield Mapping(f"{ours}{name}", (Part(f"{theirs}{hf_name}", shape),), Replicated(), is_float32=True)


def _stacked(ours: str, theirs: str, compression: Compression, size: int, hidden: int) -> Mapping:
    width = compression.width(size)
    parts = tuple(Part(f"{theirs}{name}_proj.weight", (width, hidden)) for name in ("kv", "gate"))
    return Mapping(ours, parts, Stacked((width, width)))


class PackCompressedAttention(ShardedMixin, MegatronModule):
    """The module that computes `CompressedAttention` over packs."""

    sharded: ClassVar[dict[str, int]] = {"group_weight": 0}

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        mixer: CompressedAttention,
        modules: LayerModules,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        groups = pg_collection or process_groups()
        self.mixer, self.layer_number, self.tp_group = mixer, layer_number, groups.tp
        common = {"config": config, "init_method": config.init_method, "bias": False, "is_expert": False}
        hidden, size = config.hidden_size, mixer.head_dim
        self.linear_q_down_proj = ReplicatedLinear(config, hidden, mixer.query_rank)
        self.q_layernorm = FloatRMSNorm(config, mixer.query_rank, mixer.eps)
        self.linear_q_up_proj = modules.column_linear(
            mixer.query_rank,
            mixer.mixed_size,
            gather_output=False,
            skip_bias_add=False,
            tp_group=groups.tp,
            **common,
        )
        self.linear_kv_proj = ReplicatedLinear(config, hidden, size)
        self.kv_layernorm = FloatRMSNorm(config, size, mixer.eps)
        if mixer.compression is not None:
            self.linear_entry_proj = ReplicatedLinear(config, hidden, mixer.state_size - size)
        self.core_attention: Any = PackedCompressedAttention(config, mixer, groups)
        self.indexer: Any = None
        if mixer.indexer is not None:
            self.indexer = EntryIndexerLayer(config, mixer.indexer, mixer.query_rank, mixer.rotated, groups)
        rank = mixer.groups * mixer.output_rank
        shape = rank // groups.tp.size(), mixer.mixed_size // mixer.groups
        self.group_weight = torch.nn.Parameter(torch.zeros(shape, dtype=config.params_dtype))
        self.linear_proj = modules.row_linear(
            rank, hidden, input_is_parallel=True, skip_bias_add=True, tp_group=groups.tp, **common
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
        mixer, factor = self.mixer, self.mixer.rope_factor
        angles: Tensor = rotary_pos_emb[0] if isinstance(rotary_pos_emb, tuple) else rotary_pos_emb
        latent = self.q_layernorm(self.linear_q_down_proj(hidden_states))
        chosen = self._chosen(hidden_states, latent, angles, packed_seq_params)
        query, _bias = self.linear_q_up_proj(latent)
        query = query.squeeze(1).unflatten(-1, (-1, mixer.head_dim))
        mean = query.to(torch.promote_types(query.dtype, torch.float32)).square().mean(-1, keepdim=True)
        query = rotate_end(query * torch.rsqrt(mean + mixer.eps).to(query.dtype), angles, factor)
        states = self.kv_layernorm(self.linear_kv_proj(hidden_states))
        if mixer.compression is not None:
            states = torch.cat((states, self.linear_entry_proj(hidden_states)), -1)
        # All heads share the states; the backward pass sums the gradients of the ranks' heads.
        if self.config.sequence_parallel:
            states = gather_from_sequence_parallel_region(states, group=self.tp_group)
        else:
            states = copy_to_tensor_model_parallel_region(states, group=self.tp_group)
        key, others = states.split((mixer.head_dim, mixer.state_size - mixer.head_dim), -1)
        states = torch.cat((rotate_end(key, angles, factor), others), -1).squeeze(1)
        options = {} if chosen is None else {"chosen": chosen}
        out = self.core_attention(query, states, packed_seq_params=packed_seq_params, **options)
        out = rotate_end_back(out.unflatten(-1, (-1, mixer.head_dim)), angles, factor)
        groups = out.flatten(1).unflatten(-1, (-1, self.group_weight.shape[1]))
        weight = self.group_weight.unflatten(0, (groups.shape[1], -1))
        projected = torch.einsum("tgi,goi->tgo", groups, weight).flatten(1)
        output: tuple[Tensor, Tensor | None] = self.linear_proj(projected[:, None])
        return output

    def _chosen(self, hidden: Tensor, latent: Tensor, angles: Tensor, pack: PackParams | None) -> Tensor | None:
        """Return the entries that the queries see, int32 [T / CP, topk]; None if they see all earlier entries."""
        if self.indexer is None:
            return None
        assert pack is not None, "attention runs on packs"
        states = hidden.squeeze(1), latent.squeeze(1)
        return pack.choice(self.layer_number - 1, lambda: self.indexer(*states, angles, pack.visible))


class PackedCompressedAttention(ShardedMixin, torch.nn.Module):
    """The core of the attention: keys, entries and sinks.

    softmax_offset: the sinks of this rank's heads. bias, norm_weight: of the entries.
    """

    sharded: ClassVar[dict[str, int]] = {"softmax_offset": 0}

    def __init__(self, config: TransformerConfig, mixer: CompressedAttention, groups: ProcessGroupCollection) -> None:
        super().__init__()
        self.mixer, self.tp_group, self.cp_group = mixer, groups.tp, groups.cp
        self.softmax_offset = torch.nn.Parameter(torch.zeros(mixer.heads // groups.tp.size()))
        if mixer.compression is not None:
            width = mixer.compression.width(mixer.head_dim)
            self.bias = torch.nn.Parameter(torch.zeros(mixer.compression.rate, width))
            self.norm_weight = torch.nn.Parameter(torch.ones(mixer.head_dim))

    def forward(
        self,
        query: Tensor,
        states: Tensor,
        *,
        packed_seq_params: PackParams | None = None,
        chosen: Tensor | None = None,
    ) -> Tensor:
        """Map queries [T / CP, heads / TP, d] and states [T / CP, state_size] to outputs [T / CP, heads / TP · d]."""
        assert packed_seq_params is not None and packed_seq_params.visible is not None, "attention runs on packs"
        if self.cp_group.size() > 1:
            states = all_gather_forward_reduce_scatter_backward(states, self.cp_group)
        return compressed_attention(query, states, self.weights(), packed_seq_params.visible, self.mixer, chosen)

    def weights(self) -> tuple[Tensor, ...]:
        """Return the sinks and, if there are entries, their bias and the weight of their norm."""
        if self.mixer.compression is None:
            return (self.softmax_offset,)
        # The heads of all ranks see the entries: their gradients are summed.
        shared = (copy_to_tensor_model_parallel_region(x, group=self.tp_group) for x in (self.bias, self.norm_weight))
        return self.softmax_offset, *shared


def compressed_attention(
    query: Float[Tensor, "queries heads dim"],
    states: Float[Tensor, "keys size"],
    weights: tuple[Tensor, ...],
    visible: AttentionPattern,
    mixer: CompressedAttention,
    chosen: Int32[Tensor, "queries topk"] | None,
) -> Float[Tensor, "queries mixed"]:
    """Compute attention over a pack, in blocks of queries, whose entries are computed for each block.

    Args:
        states: of all context-parallel ranks, in rank order. weights: see `PackedCompressedAttention.weights`.
    """

    def of_block(chosen: Tensor | None, seen: int, query: Tensor, states: Tensor, *weights: Tensor) -> Tensor:
        # The states are those of all tokens of the row up to the last of the queries.
        ends = torch.arange(seen, seen + len(query), device=query.device)[None]
        first = max(0, seen - mixer.window)
        part = None if chosen is None else chosen[None]
        return attend(query[None], states[None], ends, part, first, mixer, weights)[0]

    return attention_in_blocks(of_block, query, (states,), weights, visible, chosen, query.shape[1]).flatten(1)


def attend(
    query: Float[Tensor, "n queries heads dim"],
    states: Float[Tensor, "n keys size"],
    ends: Int[Tensor, "n queries"],
    chosen: Int32[Tensor, "n queries topk"] | None,
    first: int,
    mixer: CompressedAttention,
    weights: tuple[Tensor, ...],
) -> Float[Tensor, "n queries heads dim"]:
    """Return attention of queries of n rows to recent keys, entries and sinks.

    Args:
        ends: number of tokens of the row up to each query, including its own.
        first: number of tokens at the start of each row that are in no window.
    """
    sinks, *of_entries = weights
    keys, place = states[:, first:, : mixer.head_dim], torch.arange(first, states.shape[1], device=states.device)
    mask = (place < ends[..., None]) & (place >= ends[..., None] - mixer.window)
    if mixer.compression is not None:
        entries = mixer.compression.entries(states[..., mixer.head_dim :], of_entries[0], of_entries[1])
        count = torch.arange(entries.shape[1], device=states.device)
        seen = count < (ends // mixer.compression.rate)[..., None]
        if chosen is not None:
            seen = chosen_mask(chosen, len(count))
        keys, mask = torch.cat((keys, entries), 1), torch.cat((mask, seen), 2)
    # All heads see the same keys, so they take the place of further queries. The sinks are products of an element that
    # is added to each query with a further key, in which only this element is not 0.
    heads, size = query.shape[2:]
    more = 8 - size % 8
    sink = (sinks / mixer.scale).to(query.dtype)[:, None].expand(*query.shape[:3], 1)
    rows = F.pad(torch.cat((query, sink), -1), (0, more - 1)).flatten(1, 2)[:, None]
    of_sink = F.pad(torch.ones_like(keys[:, :1, :1]), (size, more - 1))
    with_sink = torch.cat((F.pad(keys, (0, more)), of_sink), 1)[:, None]
    values = F.pad(keys, (0, more, 0, 1))[:, None]
    mask = F.pad(mask, (0, 1), value=True).repeat_interleave(heads, 1)[:, None]
    out = F.scaled_dot_product_attention(rows, with_sink, values, attn_mask=mask, scale=mixer.scale)
    return out[:, 0, :, :size].unflatten(1, (-1, heads))
