"""The forward pass of generation: the training weights, as plain functions of a few tokens at a time.

A decode step is many small operations, and Megatron's modules spend most of it in Python. Here a layer is
a dozen tensor operations on the very parameters that training updates. Prompts go through packed; then one
token a sequence, against a cache of keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_rl import platform
from mcore_rl.distributed.collectives import all_gather, all_reduce
from mcore_rl.distributed.parallel_logprobs import local_targets, valid_columns
from mcore_rl.errors import UserError
from mcore_rl.models.megatron.attention import packed_attention
from mcore_rl.models.megatron.families.mixture import Mixture
from mcore_rl.models.megatron.model import BuiltModel
from mcore_rl.models.megatron.rope import rope_frequencies

# Attention of one layer: queries [T, groups, heads per group, d], keys and values [T, groups, d] → [T, heads · d].
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Layer:
    """One layer's parameters: this tensor-parallel rank's shards."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    projection: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Decoder:
    """This rank's part of the model."""

    def __init__(self, model: BuiltModel) -> None:
        self.topology, family = model.topology, model.family
        if isinstance(family, Mixture):
            raise UserError(f"model.path: sampling from {family.model_type}, a mixture of experts, is not supported")
        (self.chunk,) = model.chunks
        tp = self.topology.tensor.size
        # Where there are fewer key-value heads than ranks, several share one of them and split its queries.
        self.groups, self.sharers = max(1, family.num_query_groups // tp), max(1, tp // family.num_query_groups)
        self.head_dim = family.head_dim
        self.hidden_size, self.eps, self.vocab_size = family.hidden_size, family.hf.rms_norm_eps, model.vocab_size
        self.parameters = dict(self.chunk.named_parameters())
        self.layers = [self._layer(index) for index in range(len(self.chunk.decoder.layers))]
        self.inverse_frequencies, self.rope_factor = rope_frequencies(family.hf)

    @property
    def dtype(self) -> torch.dtype:
        return self.layers[0].qkv.dtype

    def _layer(self, index: int) -> Layer:
        def find(*names: str) -> Tensor | None:
            found = (self.parameters.get(f"decoder.layers.{index}.{name}") for name in names)
            return next((parameter for parameter in found if parameter is not None), None)

        def require(*names: str) -> Tensor:
            parameter = find(*names)
            assert parameter is not None, f"layer {index} has no {names[0]}"
            return parameter

        return Layer(  # a second name is that of the norm inside a fused module of Transformer Engine
            attention_norm=require("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
            qkv=require("self_attention.linear_qkv.weight"),
            qkv_bias=find("self_attention.linear_qkv.bias"),
            query_norm=find("self_attention.q_layernorm.weight"),
            key_norm=find("self_attention.k_layernorm.weight"),
            projection=require("self_attention.linear_proj.weight"),
            mlp_norm=require("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
            gate_up=require("mlp.linear_fc1.weight"),
            down=require("mlp.linear_fc2.weight"),
        )

    def embed(self, tokens: Tensor) -> Tensor:
        """[T] → [T, hidden], from the vocabulary's shards."""
        weight = self.parameters["embedding.word_embeddings.weight"]
        if self.topology.tensor.size == 1:
            return F.embedding(tokens, weight)
        local, owned = local_targets(tokens, self.topology.tensor.rank * weight.shape[0], weight.shape[0])
        return all_reduce(F.embedding(local, weight) * owned[:, None], self.topology.tensor.group)

    def logits(self, x: Tensor) -> Tensor:
        """[n, hidden] after the last layer → [n, Vp] fp32; −inf in the vocabulary's padding."""
        x = self._norm(x, self.parameters["decoder.final_layernorm.weight"])
        logits = _linear(x, self.chunk.lm_head_weight()).float()
        logits[:, valid_columns(logits.shape[1], self.topology.tensor.rank, self.vocab_size) :] = -torch.inf
        return logits

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 1, head_dim] of positions [T]."""
        angles = torch.outer(positions.float(), self.inverse_frequencies.to(positions.device))
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        return (angles.cos() * self.rope_factor).to(self.dtype), (angles.sin() * self.rope_factor).to(self.dtype)

    def run_layer(self, layer: Layer, x: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """[T, hidden] → [T, hidden]."""
        query, key, value = self._query_key_value(layer, self._norm(x, layer.attention_norm))
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = self._norm(query, layer.query_norm), self._norm(key, layer.key_norm)
        cos, sin = rope
        query = _rotate(query, cos[:, None], sin[:, None])
        attended = attend(query, _rotate(key, cos, sin), value)
        x = x + self._reduced(_linear(attended, layer.projection))
        gate, up = _linear(self._norm(x, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
        return x + self._reduced(_linear(F.silu(gate) * up, layer.down))

    def _query_key_value(self, layer: Layer, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, groups, heads per group, d] and twice [T, groups, d], of the query heads that this rank attends for."""
        mixed = _linear(x, layer.qkv, layer.qkv_bias)
        if self.sharers > 1:
            rank = self.topology.tensor.rank
            first = rank - rank % self.sharers
            parts = all_gather(mixed, self.topology.tensor.group)[first : first + self.sharers]
            mixed = parts.transpose(0, 1).flatten(1)
        mixed = mixed.view(len(x), self.groups, -1, self.head_dim)
        query = mixed[:, :, :-2].chunk(self.sharers, dim=2)[self.topology.tensor.rank % self.sharers]
        return query, mixed[:, :, -2], mixed[:, :, -1]

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.eps)

    def _reduced(self, x: Tensor) -> Tensor:
        return all_reduce(x, self.topology.tensor.group)

    def forward(self, tokens: Tensor, positions: Tensor, attends: Sequence[Attend]) -> Tensor:
        """All stages' layers on tokens [T]; [T, hidden] on the last stage, of no use on the others."""
        pipeline = self.topology.pipeline
        rope = self.rope(positions)
        if self.topology.is_first_stage:
            x = self.embed(tokens)
        else:
            x = torch.empty(len(tokens), self.hidden_size, dtype=self.dtype, device=tokens.device)
            torch.distributed.recv(x, group=pipeline.group, group_src=pipeline.rank - 1)
        for layer, attend in zip(self.layers, attends, strict=True):
            x = self.run_layer(layer, x, rope, attend)
        if not self.topology.is_last_stage:
            torch.distributed.send(x, group=pipeline.group, group_dst=pipeline.rank + 1)
        return x


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, on the CPU by oneDNN, which multiplies a few rows in about half of MKL's time."""
    if x.is_cpu and x.dtype == torch.float32 and torch.backends.mkldnn.is_available():
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return y
    return F.linear(x, weight, bias)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class KeyValueCache:
    """Keys and values of the sequences being generated, row by row.

    Args:
        rows: sequences at most.
        length: tokens of a sequence at most.
    """

    def __init__(self, decoder: Decoder, rows: int, length: int) -> None:
        self.decoder, self.scale = decoder, decoder.head_dim**-0.5
        # Zeros: what lies behind a sequence's end is weighted by 0, which a NaN would survive.
        shape = (len(decoder.layers), rows, decoder.groups, length, decoder.head_dim)
        self.keys, self.values = (torch.zeros(shape, dtype=decoder.dtype, device=platform.device()) for _ in "kv")

    def prefill(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> Tensor:
        """Run whole prompts, packed, each into its row; [n, hidden] of their last tokens."""
        device, lengths = self.keys.device, tuple(map(len, prompts))
        tokens = torch.tensor([token for prompt in prompts for token in prompt], device=device)
        positions = torch.cat([torch.arange(length, device=device) for length in lengths])

        def attend_in(layer: int) -> Attend:
            def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
                for row, k, v in zip(rows, key.split(lengths), value.split(lengths), strict=True):
                    self.keys[layer, row, :, : len(k)] = k.transpose(0, 1)
                    self.values[layer, row, :, : len(v)] = v.transpose(0, 1)
                return packed_attention(query.flatten(1, 2), key, value, lengths, lengths, self.scale).flatten(1)

            return attend

        x = self.decoder.forward(tokens, positions, [attend_in(layer) for layer in range(len(self.keys))])
        return x[torch.tensor(lengths, device=device).cumsum(0) - 1]

    def step(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """One token [n] for each of the first n rows, at positions [n]; [n, hidden]."""
        rows, longest = len(tokens), int(positions.max()) + 1
        hidden_keys = torch.arange(longest, device=positions.device) > positions[:, None]
        mask = torch.zeros(rows, 1, 1, longest, dtype=self.keys.dtype, device=positions.device)
        mask.masked_fill_(hidden_keys[:, None, None], -torch.inf)
        index = torch.arange(rows, device=positions.device)

        def attend_in(layer: int) -> Attend:
            def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
                keys, values = self.keys[layer], self.values[layer]
                keys[index, :, positions] = key
                values[index, :, positions] = value
                scores = torch.matmul(query * self.scale, keys[:rows, :, :longest].transpose(-1, -2)) + mask
                weights = scores.softmax(-1, dtype=torch.float32).to(values.dtype)
                return torch.matmul(weights, values[:rows, :, :longest]).flatten(1)

            return attend

        return self.decoder.forward(tokens, positions, [attend_in(layer) for layer in range(len(self.keys))])

    def copy(self, source: int, destination: int, length: int) -> None:
        """Copy a row's first `length` tokens to another row."""
        for cache in (self.keys, self.values):
            cache[:, destination, :, :length] = cache[:, source, :, :length]
