"""Embeddings of n-grams, which are added to the streams before a layer (Qwen4's per-layer embeddings).

A token stands for the n-grams of 2 … N tokens that end with it. Each n-gram has several heads, and each head a number
of rows of a table. The row of an n-gram is a hash of its tokens t_0 (the last), t_1, …:

    first row of the head + (m_0 · t_0 ⊕ m_1 · t_1 ⊕ …) mod (number of rows of the head),

in 64-bit integers that wrap around. Where a row begins, or after the end-of-sequence token, earlier tokens are replaced
by the end-of-sequence token. From the embeddings e of all heads come a key for each stream and one value:

    gate_j = sigmoid(root(norm(key_j · e) · norm(x_j) / √hidden)),    root(z) = sign(z) · √max(|z|, 1e-6),
    u_j = gate_j · (value · e),    x_j ← x_j + u_j + silu(convolution(norm(u_j))).

The convolution has one channel for each element of each stream. Its taps are N tokens apart. Norms have weights for
each stream, which are added to 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, count, islice
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from mcore_rl import platform
from mcore_rl.distributed.collectives import all_gather, all_gather_forward_reduce_scatter_backward
from mcore_rl.distributed.packs import PackLayout
from mcore_rl.models.megatron.layers.gated_streams import normed_streams
from mcore_rl.models.megatron.layers.packs import PackParams
from mcore_rl.models.megatron.layers.parameters import ShardedMixin, sum_over_sequence_ranks
from mcore_rl.models.megatron.layers.transformer_layer import ReplicatedLinear, recomputed
from mcore_rl.models.megatron.parallel_state import process_groups

from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig

SMALLEST = 1e-6
"""Smallest absolute value of which the root is computed."""
WORD = 2**64


def hash_multipliers(vocab_size: int, length: int, layer_index: int, seed: int) -> tuple[int, ...]:
    """Return the odd factors of the tokens of an n-gram of `length` tokens, the last token's first.

    They are numbers of the generator SplitMix64 (doi:10.1145/2714064.2660195), so small that a product with a token of
    the vocabulary fits into 63 bits.

    Args:
        layer_index: number of the layer among those with embeddings of n-grams, from 0.
    """
    bound = max(1, (2**63 - 1) // max(vocab_size, 1) // 2)
    step = 0x9E3779B97F4A7C15
    states = (seed + 10007 * layer_index + step * (number + 2) for number in range(length))
    return tuple(2 * (_mixed(state % WORD) % bound) + 1 for state in states)


def _mixed(state: int) -> int:
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % WORD
    return state ^ (state >> 31)


@lru_cache(maxsize=16)
def primes_from(start: int, number: int) -> tuple[int, ...]:
    """Return the `number` smallest primes that are at least `start`."""
    is_prime = lambda n: n > 1 and all(n % divisor for divisor in range(2, math.isqrt(n) + 1))  # noqa: E731
    return tuple(islice(filter(is_prime, count(start)), number))


@dataclass(frozen=True)
class NGramEmbedding:
    """Describes the embeddings of n-grams of one layer.

    multipliers: for each token of the longest n-gram, the last token's first, its factor in the hash.
    heads: numbers of rows of the heads: first those of the 2-grams, then those of the 3-grams, and so on.
    rows: number of rows of the table. head_dim: size of a row.
    end: the end-of-sequence token.
    streams: number of streams. width: number of taps of the convolution. eps: epsilon of the norms.
    """

    multipliers: tuple[int, ...]
    heads: tuple[int, ...]
    rows: int
    head_dim: int
    end: int
    streams: int
    width: int
    eps: float

    @property
    def length(self) -> int:
        """Number of tokens of the longest n-gram."""
        return len(self.multipliers)

    @property
    def size(self) -> int:
        """Size of the embeddings of all heads together."""
        return len(self.heads) * self.head_dim

    @property
    def first_rows(self) -> tuple[int, ...]:
        """First row of each head."""
        return tuple(accumulate(self.heads[:-1], initial=0))

    @cached_property
    def constants(self) -> dict[str, Tensor]:
        """The numbers of the hash by their names in a Hugging Face directory, as int64 tensors on the host."""
        numbers = {
            "layer_multipliers": self.multipliers,
            "ngram_heads_vocab_sizes": self.heads,
            "ngram_heads_offsets": self.first_rows,
        }
        return {name: torch.tensor(values, device="cpu") for name, values in numbers.items()}

    def module(self, config: TransformerConfig) -> NGramLayer:
        """Return the module that computes what is added to the streams."""
        return NGramLayer(config, self)

    def rows_of(
        self, tokens: Int64[Tensor, " tokens"], earlier: Int64[Tensor, "tokens lags"]
    ) -> Int64[Tensor, "tokens heads"]:
        """Return the rows of the table for the n-grams that end with each token.

        Args:
            earlier: the tokens before, the nearest first; −1 where there is none.
        """
        multipliers, sizes, first_rows = _sent_constants(self, tokens.device)
        per_length = len(self.heads) // (self.length - 1)
        mixed, is_cut, hashes = tokens * multipliers[0], torch.zeros_like(tokens, dtype=torch.bool), []
        for number, token in enumerate(earlier.unbind(1)):
            is_cut = is_cut | (token < 0) | (token == self.end)
            mixed = mixed ^ torch.where(is_cut, self.end, token) * multipliers[number + 1]
            hashes += [mixed] * per_length
        return torch.stack(hashes, 1) % sizes + first_rows


@lru_cache(maxsize=64)
def _sent_constants(ngrams: NGramEmbedding, device: torch.device) -> list[Tensor]:
    return platform.sent_together(list(ngrams.constants.values()), device)


@lru_cache(maxsize=16)
def earlier_rows(layout: PackLayout, rank: int | None, lags: tuple[int, ...], device: torch.device) -> Tensor:
    """Return, for each token of a context-parallel rank and each lag, the row of the token `lag` tokens before.

    The result is [T / CP, lags]; if `rank` is None, [sequences, lags], for the last token of each sequence. Rows are
    numbered in the order of the ranks. Where there is no such token, the row is T.
    """
    last, found = layout.starts + torch.tensor(layout.lengths) - 1, list[Tensor]()
    place = last if rank is None else layout.local_positions(rank)
    for lag in range(max(lags) + 1):
        if lag in lags:
            found.append(torch.where(place >= 0, layout.gather_order[place], layout.total))
        place = torch.where(place >= 0, layout.predictor[place], -1)
    return platform.sent(torch.stack(found, 1), device)


def earlier_values(values: Shaped[Tensor, "n width"], rows: Int64[Tensor, "tokens lags"]) -> Tensor:
    """Return the values of the given rows, [tokens, lags, width]; 0 for row n."""
    return F.pad(values, (0, 0, 0, 1)).index_select(0, rows.flatten()).unflatten(0, rows.shape)


class EarlierTokens(torch.nn.Module):
    """Returns values of earlier tokens of the same sequence. In generation another module replaces it.

    Args:
        lags: distances of the earlier tokens, increasing. The distance 0 is the token itself.
        width: number of values of a token.
        dtype: type of the values.
    """

    def __init__(self, lags: Sequence[int], width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.lags, self.width, self.dtype = tuple(lags), width, dtype
        self.cp_group = process_groups().cp

    def forward(
        self, values: Tensor, packed_seq_params: PackParams | None = None, wanted: slice = slice(None)
    ) -> Tensor:
        """Return the values of the tokens before each token, [tokens, lags, width]; 0 where there is no token.

        Args:
            values: of this context-parallel rank's tokens, [T / CP, width].
            wanted: the tokens for which the result is wanted.
        """
        assert packed_seq_params is not None and packed_seq_params.visible is not None, "n-grams are found in packs"
        if self.cp_group.size() > 1:
            is_differentiable = values.requires_grad
            gather = all_gather_forward_reduce_scatter_backward if is_differentiable else all_gather
            values = gather(values, self.cp_group).reshape(-1, self.width)
        layout, rank = packed_seq_params.visible.layout, self.cp_group.rank()
        return earlier_values(values, earlier_rows(layout, rank, self.lags, values.device)[wanted])


class NGramLayer(ShardedMixin, torch.nn.Module):
    """Computes what `NGramEmbedding` describes. Only the table is sharded: by columns, over tensor-parallel ranks."""

    sharded: ClassVar[dict[str, int]] = {"table": 1}

    def __init__(self, config: TransformerConfig, ngrams: NGramEmbedding) -> None:
        super().__init__()
        self.config, self.ngrams, self.tp_group = config, ngrams, process_groups().tp
        hidden, dtype, wide = config.hidden_size, config.params_dtype, ngrams.streams * config.hidden_size
        self.table = torch.nn.Parameter(torch.zeros(ngrams.rows, ngrams.head_dim // self.tp_group.size(), dtype=dtype))
        self.key_proj = ReplicatedLinear(config, ngrams.size, wide)
        self.value_proj = ReplicatedLinear(config, ngrams.size, hidden)
        self.key_norm, self.query_norm, self.conv_norm = (
            torch.nn.Parameter(torch.zeros(wide, dtype=dtype)) for _ in range(3)
        )
        self.conv_weight = torch.nn.Parameter(torch.zeros(wide, 1, ngrams.width, dtype=dtype))
        replicated = self.key_norm, self.query_norm, self.conv_norm, self.conv_weight
        sum_over_sequence_ranks(*replicated, when=config.sequence_parallel)
        self.earlier_ids: Any = EarlierTokens(range(1, ngrams.length), 1, torch.int64)
        lags = range(0, ngrams.width * ngrams.length, ngrams.length)
        self.earlier_values: Any = EarlierTokens(lags, ngrams.streams + hidden, dtype)

    def forward(self, x: Tensor, packed_seq_params: PackParams | None = None) -> Tensor:
        """Return what is added to the streams.

        Args:
            x: the streams, [T / CP (/ TP with SP), n, hidden].
        """
        assert packed_seq_params is not None and packed_seq_params.token_ids is not None, "n-grams need token ids"
        embeddings = self._embedded(packed_seq_params.token_ids, packed_seq_params)
        gates_and_values = recomputed(self._gates_and_values, x, embeddings)
        wanted = slice(None)
        if self.config.sequence_parallel:
            embedded = len(gates_and_values)
            wanted = slice(self.tp_group.rank() * embedded, (self.tp_group.rank() + 1) * embedded)
            gates_and_values = gather_from_sequence_parallel_region(gates_and_values, group=self.tp_group)
        earlier = self.earlier_values(gates_and_values, packed_seq_params, wanted)
        added: Tensor = recomputed(self._convolved, earlier)
        return added

    def _embedded(self, tokens: Tensor, pack: PackParams) -> Tensor:
        """Return the embeddings of all heads for the tokens of `x`, [T / CP (/ TP with SP), size]."""
        earlier = self.earlier_ids(tokens[:, None] + 1, pack).squeeze(-1) - 1
        shard = F.embedding(self.ngrams.rows_of(tokens, earlier), self.table)
        whole: Tensor = gather_from_tensor_model_parallel_region(shard, group=self.tp_group).flatten(1)
        if self.config.sequence_parallel:
            whole = scatter_to_sequence_parallel_region(whole, group=self.tp_group)
        return whole

    def _gates_and_values(self, x: Tensor, embeddings: Tensor) -> Float[Tensor, "tokens streams_and_hidden"]:
        keys = self.key_proj(embeddings).unflatten(-1, (self.ngrams.streams, -1))
        keys, queries = (
            normed_streams(part, weight, self.ngrams.eps)
            for part, weight in ((keys, self.key_norm), (x, self.query_norm))
        )
        wide = torch.promote_types(x.dtype, torch.float32)
        score = (keys.to(wide) * queries.to(wide)).unflatten(-1, (self.ngrams.streams, -1)).sum(-1)
        score = score / math.sqrt(x.shape[-1])
        gates = (score.abs().clamp_min(SMALLEST).sqrt() * score.sign()).sigmoid()
        return torch.cat((gates.to(x.dtype), self.value_proj(embeddings)), -1)

    def _convolved(self, earlier: Float[Tensor, "tokens lags streams_and_hidden"]) -> Float[Tensor, "tokens n hidden"]:
        """Return the gated values plus their convolution."""
        taps, total = self.conv_weight[:, 0].unbind(1)[::-1], torch.zeros((), device=earlier.device)
        for number, tap in enumerate(taps):
            gates, value = earlier[:, number].split((self.ngrams.streams, earlier.shape[-1] - self.ngrams.streams), -1)
            gated = gates[..., None] * value[:, None]
            if not number:
                own = gated
            total = total + tap * normed_streams(gated, self.conv_norm, self.ngrams.eps)
        return own + F.silu(total).view_as(own)
