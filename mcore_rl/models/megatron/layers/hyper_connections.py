"""Hyper-connections: a residual of several streams (arXiv:2409.19606; with Sinkhorn matrices arXiv:2512.24880).

Between layers, the hidden states are [T, n, hidden]: the n streams of a token take the place of Megatron's batch. A
block (attention or MLP) reads a weighted sum of the streams. Its output is added to each stream with another weight:

    x_j ← output weight_j · block(Σ_i input weight_i · x_i) + Σ_i matrix_ij · x_i.

All weights are computed from the token's streams, in at least fp32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from mcore_rl.models.megatron.layers.parameters import sum_over_sequence_ranks
from mcore_rl.models.megatron.layers.transformer_layer import PackLayer, RMSNorm, recomputed

from megatron.core.tensor_parallel import checkpoint
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class ResidualStreams(ABC):
    """Describes the streams of a model.

    count: number n of streams. norm_eps: epsilon of the norms of a token's streams.
    """

    count: int
    norm_eps: float

    @abstractmethod
    def connection(self, config: TransformerConfig) -> Any:
        """Return a module that connects one block with the streams; it has the methods of `HyperConnection`."""

    @abstractmethod
    def last_norm(self, is_float32: bool) -> ModuleSpec:
        """Return the spec of the module after the last layer, which maps streams [T, n, hidden] to [T, 1, hidden].

        Args:
            is_float32: whether the weights of norms are always fp32.
        """


@dataclass(frozen=True)
class Streams(ResidualStreams):
    """Describes hyper-connections.

    eps: number that is added to the input weights, and in the Sinkhorn normalization.
    magnitude: largest output weight. output_eps: number that is added to the output weights.
    iterations: number of Sinkhorn iterations for the matrix that mixes the streams; 0 if they are not mixed.
    ends_in_mean: whether the last norm reads the mean of the streams, not a weighted sum.
    """

    eps: float
    magnitude: float = 2.0
    output_eps: float = 0.0
    iterations: int = 0
    ends_in_mean: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of input weights, output weights and, if there is a matrix, its elements."""
        return (self.count,) * 2 + ((self.count**2,) if self.iterations else ())

    def connection(self, config: TransformerConfig) -> HyperConnection:
        return HyperConnection(config, self)

    def last_norm(self, is_float32: bool) -> ModuleSpec:
        return ModuleSpec(module=StreamNorm, params={"streams": self, "is_float32": is_float32})


class StreamWeights(torch.nn.Module):
    """The parameters from which weights of streams are computed. They are fp32, and the same on every rank.

    weight: [rows, n · hidden]. bias: [rows]. scale: one factor for each of the `groups` of rows.
    """

    def __init__(self, config: TransformerConfig, streams: Streams, groups: tuple[int, ...]) -> None:
        super().__init__()
        self.streams, self.groups, rows = streams, groups, sum(groups)
        self.weight = torch.nn.Parameter(torch.zeros(rows, streams.count * config.hidden_size))
        self.bias, self.scale = (torch.nn.Parameter(torch.zeros(size)) for size in (rows, len(groups)))
        sum_over_sequence_ranks(*self.parameters(), when=config.sequence_parallel)

    def _logits(self, x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor) -> list[Tensor]:
        """Return the logits of each group, [T, rows of the group], from the streams x [T, n, hidden]."""
        wide = x.flatten(1).to(torch.promote_types(x.dtype, weight.dtype))
        products = F.linear(wide, weight) * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.streams.norm_eps)
        parts = zip(products.split(self.groups, -1), scale, bias.split(self.groups), strict=True)
        return [part * factor + shift for part, factor, shift in parts]


def weighted_sum(x: Float[Tensor, "tokens n hidden"], weights: Float[Tensor, "tokens n"]) -> Tensor:
    """Return the weighted sums of the streams, [T, 1, hidden], in the precision of `x`."""
    return (weights[..., None] * x).sum(1, keepdim=True).to(x.dtype)


def sinkhorn(logits: Float[Tensor, "tokens n n"], iterations: int, eps: float) -> Float[Tensor, "tokens n n"]:
    """Return matrices whose rows and columns sum to about 1: softmax of the rows, then divisions by sums in turn.

    There are `iterations` divisions by the sums of columns and, between them, divisions by the sums of rows
    (arXiv:2512.24880, eq. 9).
    """
    matrix = logits.softmax(-1) + eps
    matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    return matrix


class HyperConnection(StreamWeights):
    """Connects one block with the streams. For the backward pass it keeps the streams in their own precision, and no
    fp32 copies of them."""

    def __init__(self, config: TransformerConfig, streams: Streams) -> None:
        super().__init__(config, streams, streams.sizes)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the input of the block [T, 1, hidden], its output's weights [T, n], and the matrices [T, n, n], if
        the streams are mixed.

        Args:
            x: the streams, [T / CP (/ TP with SP), n, hidden].
        """
        found: tuple[Tensor, ...] = recomputed(self._weigh, x, self.weight, self.bias, self.scale)
        return found

    def _weigh(self, x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        streams = self.streams
        before, after, *mixing = self._logits(x, *parameters)
        total = weighted_sum(x, before.sigmoid() + streams.eps)
        weights = streams.magnitude * after.sigmoid() + streams.output_eps
        matrices = (m.unflatten(-1, (streams.count,) * 2) for m in mixing)
        return total, weights, *(sinkhorn(m, streams.iterations, streams.eps) for m in matrices)

    def add(self, x: Tensor, out: Tensor, weights: Tensor, *matrix: Tensor) -> Tensor:
        """Return the streams after the block, [T, n, hidden].

        Args:
            x: the streams before the block. out: the block's output, [T, 1, hidden].
            weights, matrix: results of `forward`.
        """
        added: Tensor = recomputed(add_to_streams, x, out, weights, *matrix)
        return added


def add_to_streams(x: Tensor, out: Tensor, weights: Tensor, *matrix: Tensor) -> Tensor:
    """Return the streams after a block, as `HyperConnection.add`, in the precision of `x`."""
    wide = x.to(weights.dtype)
    kept = matrix[0].mT @ wide if matrix else wide
    return (weights[..., None] * out + kept).to(x.dtype)


class StreamLayer(PackLayer):
    """A transformer layer whose residual has several streams. Its hidden states are [T / CP (/ TP with SP), n, hidden].

    Its modules are those of other layers; only residual connections differ.

    Args:
        ngrams: function that builds the module of n-gram embeddings, which are added to the streams before attention;
            None for none.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        streams: ResidualStreams,
        ngrams: Callable[[TransformerConfig], torch.nn.Module] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, *args, **kwargs)
        self.ngrams: Any = None if ngrams is None else ngrams(config)
        self.attention_streams, self.mlp_streams = (streams.connection(config) for _ in range(2))

    def _blocks(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        *,
        rotary_pos_emb: Tensor,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        if self.ngrams is not None:
            hidden_states = hidden_states + self.ngrams(hidden_states, packed_seq_params)
        x, *weights = self.attention_streams(hidden_states)
        out, bias = self.self_attention(
            self.input_layernorm(x), None, rotary_pos_emb=rotary_pos_emb, packed_seq_params=packed_seq_params
        )
        assert bias is None, "a bias after attention is not added to streams"
        hidden_states = self.attention_streams.add(hidden_states, out, *weights)
        x, *weights = self.mlp_streams(hidden_states)
        normed = self.pre_mlp_layernorm(x)
        out, _bias = checkpoint(self.mlp, False, normed) if self.recompute_mlp else self.mlp(normed)
        return self.mlp_streams.add(hidden_states, out, *weights), None


class StreamNorm(RMSNorm):
    """The model's last norm. It reads a weighted sum of the streams, or their mean: [T, n, hidden] → [T, 1, hidden]."""

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float,
        streams: Streams,
        is_float32: bool = False,
        **_: Any,
    ) -> None:
        super().__init__(config, hidden_size, eps)
        if is_float32:
            self.weight.data = self.weight.data.float()
        self.streams = None if streams.ends_in_mean else FinalWeights(config, streams, (streams.count,))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mean(1, keepdim=True) if self.streams is None else self.streams(x))


class FinalWeights(StreamWeights):
    """The weights of the streams in the sum that the last norm reads."""

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = recomputed(self._weigh, x, self.weight, self.bias, self.scale)
        return total

    def _weigh(self, x: Tensor, *parameters: Tensor) -> Tensor:
        (logits,) = self._logits(x, *parameters)
        return weighted_sum(x, logits.sigmoid() + self.streams.eps)
