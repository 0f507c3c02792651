"""A residual of several streams that blocks read through gates (Qwen4).

With N the norms of a token's n streams, one after the other (RMS norms with a weight for each stream), a block reads

    mean_i g_i · N_i,    g = sigmoid(up · silu(down · N / n)),

where g has a gate for each element of each stream. Its output is added to stream j with the weight
2 · sigmoid(inject_j · N / n). After the last layer, the LM head reads such a mean. There is no other norm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_rl.models.megatron.layers.hyper_connections import ResidualStreams, add_to_streams
from mcore_rl.models.megatron.layers.parameters import sum_over_sequence_ranks
from mcore_rl.models.megatron.layers.transformer_layer import ReplicatedLinear, recomputed

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class GatedStreams(ResidualStreams):
    """Describes streams that are read through gates.

    rank: number of values from which the gates of a token are projected.
    """

    rank: int

    def connection(self, config: TransformerConfig) -> GatedConnection:
        return GatedConnection(config, self)

    def last_norm(self, is_float32: bool) -> ModuleSpec:
        assert not is_float32, "the norms of gated streams have the model's precision"
        return ModuleSpec(module=GatedMean, params={"streams": self})


def normed_streams(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the norms of the streams [T, n, hidden], one after the other, [T, n · hidden].

    Args:
        weight: [n · hidden]; it is added to 1.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed.flatten(1) * (1 + weight.to(wide.dtype))).to(x.dtype)


class StreamGates(torch.nn.Module):
    """The parameters of a gated mean of streams.

    They are the same on every tensor-parallel rank. The norms' weights are added to 1.
    """

    def __init__(self, config: TransformerConfig, *_: Any, streams: GatedStreams, **__: Any) -> None:
        super().__init__()
        self.streams, width = streams, streams.count * config.hidden_size
        self.norm_weight = torch.nn.Parameter(torch.zeros(width, dtype=config.params_dtype))
        sum_over_sequence_ranks(self.norm_weight, when=config.sequence_parallel)
        self.down_proj = ReplicatedLinear(config, width, streams.rank)
        self.up_proj = ReplicatedLinear(config, streams.rank, width)

    def _normed(self, x: Tensor) -> Tensor:
        return normed_streams(x, self.norm_weight, self.streams.norm_eps)

    def _mean(self, normed: Tensor) -> Tensor:
        count = self.streams.count
        gates = self.up_proj(F.silu(self.down_proj(normed) / count)).sigmoid()
        return (gates * normed).unflatten(-1, (count, -1)).mean(1, keepdim=True)


class GatedMean(StreamGates):
    """Maps streams [T, n, hidden] to the gated mean of their norms, [T, 1, hidden]; it keeps the streams only."""

    def forward(self, x: Tensor) -> Tensor:
        mean: Tensor = recomputed(lambda x: self._mean(self._normed(x)), x)
        return mean


class GatedConnection(StreamGates):
    """Connects one block with the streams. For the backward pass it keeps the streams, and nothing of their size."""

    def __init__(self, config: TransformerConfig, streams: GatedStreams) -> None:
        super().__init__(config, streams=streams)
        self.inject_proj = ReplicatedLinear(config, streams.count * config.hidden_size, streams.count)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of the block [T, 1, hidden] and its output's weights [T, n].

        Args:
            x: the streams, [T / CP (/ TP with SP), n, hidden].
        """
        found: tuple[Tensor, Tensor] = recomputed(self._weigh, x)
        return found

    def _weigh(self, x: Tensor) -> tuple[Tensor, Tensor]:
        normed = self._normed(x)
        injected = self.inject_proj(normed)
        wide = torch.promote_types(x.dtype, torch.float32)
        return self._mean(normed), 2 * (injected.to(wide) / self.streams.count).sigmoid()

    def add(self, x: Tensor, out: Tensor, weights: Tensor) -> Tensor:
        """Return the streams after the block, [T, n, hidden].

        Args:
            x: the streams before the block. out: the block's output, [T, 1, hidden]. weights: result of `forward`.
        """
        added: Tensor = recomputed(add_to_streams, x, out, weights)
        return added
