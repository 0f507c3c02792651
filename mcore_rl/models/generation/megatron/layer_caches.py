"""The layers' caches: what each kind of layer stores of earlier tokens.

An attention layer stores keys and values in blocks. A layer with a recurrent state stores one state, in a slot, for
each sequence.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_rl import platform
from mcore_rl.models.megatron.attention.attention import KeyValueMixer
from mcore_rl.models.megatron.attention.compressed import PackedCompressedAttention, attend, compressed_attention
from mcore_rl.models.megatron.attention.sparse import IndexerBase
from mcore_rl.models.megatron.kernels.delta_rule import causal_conv, convolve_last, exact, plan_of
from mcore_rl.models.megatron.kernels.gathered_attention import places_in_row
from mcore_rl.models.megatron.kernels.packed_attention import AttentionPattern, packed_attention, with_sink_key
from mcore_rl.models.megatron.kernels.selected_attention import block_mask, selected_attention
from mcore_rl.models.megatron.layers.ngram_embedding import EarlierTokens, earlier_rows, earlier_values
from mcore_rl.models.megatron.recurrent.gated_delta_net import DeltaNetLayer
from mcore_rl.models.megatron.weight_mapping import Shape

BLOCK_SIZE = 64
"""Number of tokens in a block."""


def blocks_for(num_tokens: int) -> int:
    """Return the number of blocks that store `num_tokens` tokens."""
    return -(-num_tokens // BLOCK_SIZE)


@dataclass
class RunningPart:
    """A part of the running sequences, whose keys and values are gathered into one tensor for attention.

    rows: the part's range in the list of running sequences, which is sorted by length, longest first.
    longest: number of tokens of the part's first sequence.
    table: [sequences, blocks], the block numbers of each sequence of the part.
    """

    rows: slice
    longest: int
    table: Tensor


@dataclass(frozen=True)
class PromptPack:
    """Prompts that run as one pack.

    visible: the keys that each query sees.
    places: for each token, its place in the blocks, counted in tokens from the start of block 0.
    slots: for each prompt, the slot that stores its recurrent states.
    """

    visible: AttentionPattern
    places: Tensor
    slots: Tensor


@dataclass(frozen=True)
class DecodingStep:
    """A step that runs the last token of each running sequence.

    parts: the parts into which the running sequences are divided; attention is computed part by part.
    places: for each last token, its place in the blocks, counted in tokens from the start of block 0.
    seen: for each window size of the layers' attention, a mask [sequences, keys] of the keys that the last tokens see.
    slots: for each sequence, the slot that stores its recurrent states.
    lengths: for each sequence, its number of tokens including the last.
    """

    parts: Sequence[RunningPart]
    places: Tensor
    seen: dict[int | None, Tensor]
    slots: Tensor
    lengths: Tensor


class LayerCache(ABC):
    """Cache of one layer for the sequences on this rank.

    `prefill` and `step` take the inputs [T, …] of the layer's core attention and return its output [T, …].
    """

    @abstractmethod
    def prefill(self, prompts: PromptPack, *inputs: Tensor) -> Tensor | None:
        """Run whole prompts through the core attention, and store in the cache what later tokens need."""

    @abstractmethod
    def step(self, step: DecodingStep, *inputs: Tensor) -> Tensor | None:
        """Run the last token of each sequence through the core attention, and store what later tokens need."""


def _grown(storage: Tensor, count: int) -> Tensor:
    """Return `storage`; if it has fewer than `count` entries, extend it with zeros to `count` entries."""
    if len(storage) >= count:
        return storage
    # Zeros are needed because values after a sequence's end have weight 0, and 0 · NaN is NaN.
    grown = storage.new_zeros(count, *storage.shape[1:])
    grown[: len(storage)] = storage
    return grown


class SlotLayerCache(LayerCache):
    """Cache of tensors of equal sizes for each sequence, in slots.

    storages: tensors [slots, …].
    """

    storages: list[Tensor]

    def grow(self, slots: int) -> None:
        """Extend the storages to `slots` slots."""
        self.storages = [_grown(storage, slots) for storage in self.storages]

    def copy(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy the contents of the slots `sources` to the slots `destinations`."""
        for storage in self.storages:
            storage[destinations] = storage[sources]


class StateLayerCache(SlotLayerCache):
    """Cache of a gated delta net or Mamba-2 mixer: for each sequence, the states of its convolution and of its rule.

    convolution: [slots, width − 1, heads, convolved], the last width − 1 inputs of the convolution.
    states: [slots, heads, repeats, key_dim, value_dim], the states of the rule, in fp32 or wider.
    """

    def __init__(self, layer: DeltaNetLayer, tensor_parallel: int, dtype: torch.dtype) -> None:
        self.layer, self.net = layer, layer.net
        net, heads = self.net, self.net.heads // tensor_parallel
        inputs, state = (net.width - 1, heads, net.convolved_size), (heads, net.repeats, net.key_dim, net.value_dim)
        self.storages = [
            torch.zeros(0, *inputs, dtype=dtype, device=platform.device()),
            torch.zeros(0, *state, dtype=exact(dtype), device=platform.device()),
        ]

    @property
    def convolution(self) -> Tensor:
        return self.storages[0]

    @property
    def states(self) -> Tensor:
        return self.storages[1]

    def prefill(self, prompts: PromptPack, *inputs: Tensor) -> Tensor:
        (rows,), weights = inputs, self.layer.weights()
        plan, size = plan_of(prompts.visible.layout, self.net.width, rows.device), self.net.convolved_size
        mixed, others = rows[..., :size], rows[..., size:]
        # The places of the last width − 1 tokens of each prompt, the last one at the end; −1 before its first token.
        kept = torch.stack([*reversed(plan.before[: self.net.width - 2, plan.last]), plan.last], dim=1)
        there = (kept >= 0)[..., None, None]
        self.convolution[prompts.slots] = torch.where(there, mixed[kept.clamp(min=0)], 0)
        convolved = causal_conv(mixed, weights.convolution, plan.before, weights.bias)
        out, states = self.net.with_states(self.net.rule_inputs(convolved, others, weights), plan)
        self.states[prompts.slots] = states
        return out.flatten(1)

    def step(self, step: DecodingStep, *inputs: Tensor) -> Tensor:
        (rows,), weights = inputs, self.layer.weights()
        mixed, others = rows.split((self.net.convolved_size, self.net.rates_and_decays_size), dim=-1)
        seen = torch.cat((self.convolution[step.slots], mixed[:, None]), dim=1)
        self.convolution[step.slots] = seen[:, 1:]
        convolved = convolve_last(seen, weights.convolution, weights.bias)
        old = self.states[step.slots]
        out, self.states[step.slots] = self.net.step(self.net.rule_inputs(convolved, others, weights), old)
        return out.flatten(1)


class EarlierTokensCache(SlotLayerCache):
    """Cache of the values of each sequence's last tokens, [slots, largest lag, width], the newest first.

    `prefill` and `step` take values [T, width] and return those of earlier tokens, as `EarlierTokens` does.
    """

    def __init__(self, module: EarlierTokens) -> None:
        self.lags = module.lags
        shape = max(module.lags), module.width
        self.storages = [torch.zeros(0, *shape, dtype=module.dtype, device=platform.device())]

    def prefill(self, prompts: PromptPack, *inputs: Tensor) -> Tensor:
        (values,), layout, (storage,) = inputs, prompts.visible.layout, self.storages
        kept = tuple(range(storage.shape[1]))
        of_last = earlier_rows(layout, None, kept, values.device)
        storage[prompts.slots] = earlier_values(values, of_last)
        return earlier_values(values, earlier_rows(layout, 0, self.lags, values.device))

    def step(self, step: DecodingStep, *inputs: Tensor) -> Tensor:
        (values,), (storage,) = inputs, self.storages
        seen = torch.cat((values[:, None], storage[step.slots]), dim=1)
        storage[step.slots] = seen[:, :-1]
        return torch.stack([seen[:, lag] for lag in self.lags], dim=1)


class BlockLayerCache(LayerCache):
    """Cache of one tensor per token, in blocks.

    storage: [blocks, BLOCK_SIZE, …].
    gathered: map from the shape of a block to a workspace, which all layers share. The blocks of a part of the
        sequences are copied to the workspace before they are read.

    Args:
        shape: shape of one token's tensor.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, gathered: dict[Shape, Tensor]) -> None:
        self.gathered = gathered
        self.storage = torch.zeros((0, BLOCK_SIZE, *shape), dtype=dtype, device=platform.device())

    @property
    def token_bytes(self) -> int:
        """Number of bytes of one token's tensor."""
        return math.prod(self.storage.shape[2:]) * self.storage.itemsize

    def grow(self, blocks: int) -> None:
        """Extend the storage to `blocks` blocks."""
        self.storage = _grown(self.storage, blocks)

    def copy(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy the contents of the blocks `sources` to the blocks `destinations`."""
        self.storage[destinations] = self.storage[sources]

    def make_workspace(self, blocks: int) -> None:
        """Create a workspace into which `blocks` blocks can be gathered, unless there is one of this size or larger."""
        shape = self.storage.shape[1:]
        if shape not in self.gathered or len(self.gathered[shape]) < blocks:
            self.gathered[shape] = self.storage.new_empty(blocks, *shape)

    def _rows(self, part: RunningPart) -> Tensor:
        """Return the tensors of all tokens of the sequences in `part`, [sequences of the part, longest, …]."""
        gathered = self.gathered[self.storage.shape[1:]][: part.table.numel()]
        torch.index_select(self.storage, 0, part.table.flatten(), out=gathered)
        return gathered.unflatten(0, part.table.shape).flatten(1, 2)[:, : part.longest]

    def _write(self, places: Tensor, values: Tensor) -> None:
        """Write the tensors `values` [T, …] to `places` [T], counted in tokens from the start of block 0."""
        self.storage.flatten(0, 1).index_copy_(0, places, values)


class IndexLayerCache(BlockLayerCache):
    """Cache of the keys of one layer's indexer, [blocks, BLOCK_SIZE, key_size].

    `prefill` and `step` take the indexer's states and return its choice, int32 [T, …]; None if all sequences are so
    short that nothing is chosen.
    """

    def __init__(self, layer: IndexerBase, dtype: torch.dtype, gathered: dict[Shape, Tensor]) -> None:
        super().__init__((layer.indexer.key_size,), dtype, gathered)
        self.layer = layer

    def prefill(self, prompts: PromptPack, *inputs: Tensor) -> Tensor | None:
        states = self.layer.kind_of_states(*inputs)
        self._write(prompts.places, states.key)
        if max(prompts.visible.layout.row_lengths) <= self.layer.indexer.most_seen:
            return None
        return self.layer.choose(states, prompts.visible)

    def step(self, step: DecodingStep, *inputs: Tensor) -> Tensor | None:
        states = self.layer.kind_of_states(*inputs)
        self._write(step.places, states.key)
        if step.parts[0].longest <= self.layer.indexer.most_seen:
            return None
        found = []
        for part in step.parts:
            last = self.layer.kind_of_states(*(x[part.rows, None] for x in states))._replace(key=self._rows(part))
            found.append(self.layer.best(last, step.lengths[part.rows, None]))
        width = max(chosen.shape[-1] for chosen in found)
        return torch.cat([F.pad(chosen, (0, width - chosen.shape[-1]), value=-1) for chosen in found])


class CompressedLayerCache(BlockLayerCache):
    """Cache of the tokens' states of one layer with `CompressedAttention`, [blocks, BLOCK_SIZE, state_size].

    The inputs of `prefill` and `step` are queries and states; and the choice of an indexer, if entries are chosen. The
    entries are computed again in each step.
    """

    def __init__(self, core: PackedCompressedAttention, dtype: torch.dtype, gathered: dict[Shape, Tensor]) -> None:
        super().__init__((core.mixer.state_size,), dtype, gathered)
        self.core, self.mixer = core, core.mixer

    def prefill(self, prompts: PromptPack, *inputs: Tensor) -> Tensor:
        query, states, *chosen = inputs
        self._write(prompts.places, states)
        weights = self.core.weights()
        return compressed_attention(query, states, weights, prompts.visible, self.mixer, chosen[0] if chosen else None)

    def step(self, step: DecodingStep, *inputs: Tensor) -> Tensor:
        query, states, *chosen = inputs
        self._write(step.places, states)
        outs = []
        for part in step.parts:
            ends, of_part = step.lengths[part.rows, None], chosen[0][part.rows, None] if chosen else None
            weights = self.core.weights()
            outs.append(attend(query[part.rows, None], self._rows(part), ends, of_part, 0, self.mixer, weights))
        return torch.cat(outs).flatten(1)


class KeyValueLayerCache(BlockLayerCache):
    """Cache of one layer's keys and values, [blocks, BLOCK_SIZE, 2 (key and value), groups, head_dim].

    The inputs of `prefill` and `step` are queries, keys and values; and the choice of an indexer, if keys are chosen.

    Args:
        sinks: attention sinks [heads] of this rank's query heads; None if the layer has no sinks.
    """

    def __init__(
        self,
        mixer: KeyValueMixer,
        tensor_parallel: int,
        dtype: torch.dtype,
        gathered: dict[Shape, Tensor],
        sinks: Tensor | None,
    ) -> None:
        # If there are fewer key-value heads than ranks, several ranks share a head and divide its queries.
        self.mixer, self.groups, self.sinks = mixer, max(1, mixer.groups // tensor_parallel), sinks
        super().__init__((2, self.groups, mixer.head_dim), dtype, gathered)

    def prefill(self, prompts: PromptPack, *inputs: Tensor) -> Tensor:
        """Compute attention inside each prompt, [T, heads · d], and store the prompts' keys and values."""
        self._write(prompts.places, torch.stack(inputs[1:3], dim=1))
        return self.attend_in_prompts(prompts, *inputs)

    def attend_in_prompts(self, prompts: PromptPack, *inputs: Tensor) -> Tensor:
        """Compute attention inside each prompt, [T, heads · d]; nothing is stored."""
        query, key, value, *chosen = inputs
        scale, window = self.mixer.scale, self.mixer.window
        if chosen:
            options = scale, self.sinks, self.mixer.block_size
            return selected_attention(query, key, value, prompts.visible, chosen[0], *options).flatten(1)
        return packed_attention(query, key, value, prompts.visible, scale, window, self.sinks).flatten(1)

    def step(self, step: DecodingStep, *inputs: Tensor) -> Tensor:
        """Store the key and value of each sequence's last token; return that token's attention, [n, heads · d]."""
        query, key, value, *chosen = inputs
        self._write(step.places, torch.stack((key, value), dim=1))
        return self.attend_in_step(step, query, *chosen)

    def attend_in_step(self, step: DecodingStep, query: Tensor, *chosen: Tensor) -> Tensor:
        """Return the attention of each sequence's last token over the stored keys and values, [n, heads · d]."""
        outs = [
            self._attend_in_part(step, part, query[part.rows], *(x[part.rows] for x in chosen)) for part in step.parts
        ]
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _attend_in_part(self, step: DecodingStep, part: RunningPart, query: Tensor, *chosen: Tensor) -> Tensor:
        if not chosen:
            return self._attend(query, self._rows(part), step.seen[self.mixer.window][part.rows, : part.longest])
        size = self.mixer.block_size
        if size == 1:
            return self._attend_to_chosen(part, query, chosen[0])
        if chosen[0].shape[-1] * size >= part.longest:
            mask = block_mask(chosen[0], part.longest, step.lengths[part.rows], size)
            return self._attend(query, self._rows(part), mask)
        return self._attend_to_blocks(part, query, chosen[0], step.lengths[part.rows, None, None])

    def _attend_to_chosen(self, part: RunningPart, query: Tensor, chosen: Tensor) -> Tensor:
        """Return the attention of the sequences in `part` over their chosen keys; only these are read.

        Args:
            query: [sequences of the part, heads, d].
            chosen: positions of the keys, [sequences of the part, topk]; −1 for none.
        """
        return self._attend(query, self.storage.flatten(0, 1)[self._places(part, chosen)], chosen >= 0)

    def _attend_to_blocks(self, part: RunningPart, query: Tensor, chosen: Tensor, lengths: Tensor) -> Tensor:
        """Return the attention of the sequences in `part` over their groups' chosen blocks; only these are read.

        Args:
            chosen: numbers of blocks, [sequences of the part, groups, topk]; −1 for none.
            lengths: number of keys of each sequence, [sequences of the part, 1, 1].
        """
        positions, seen = places_in_row(chosen, self.mixer.block_size, lengths)
        places = self._places(part, torch.where(seen, positions, 0).flatten(1)).view_as(positions)
        groups = torch.arange(self.groups, device=chosen.device)[:, None]
        rows = self.storage.flatten(0, 1)[places, :, groups]  # [n, groups, keys, 2, d]
        return self._attend(query, rows.permute(0, 2, 3, 1, 4), seen)

    @staticmethod
    def _places(part: RunningPart, positions: Tensor) -> Tensor:
        """Return where the keys at these positions, [sequences of the part, n], are stored."""
        positions = positions.clamp(min=0).long()
        return part.table.gather(1, positions // BLOCK_SIZE) * BLOCK_SIZE + positions % BLOCK_SIZE

    def _attend(self, query: Tensor, rows: Tensor, seen: Tensor) -> Tensor:
        """Return the attention of n sequences, [n, heads · d].

        Args:
            query: [n, heads, d]. rows: keys and values [n, keys, 2, groups, d].
            seen: mask [n, keys], or [n, groups, keys].
        """
        keys, values = rows.transpose(1, 3).unbind(2)
        mask = seen[:, None, None] if seen.ndim == 2 else seen[:, :, None]
        if self.sinks is not None:
            scores = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill_(~mask, -torch.inf)
            sinks = self.sinks.view(1, self.groups, -1).expand(len(mask), -1, -1)
            keys, values, mask = with_sink_key(keys, values, scores, sinks)
        # The query heads of a group take the place of positions, because all of them see the same keys.
        attended = F.scaled_dot_product_attention(
            query.unflatten(1, (self.groups, -1)),
            keys,
            values,
            attn_mask=mask,
            scale=self.mixer.scale,
        )
        return attended.flatten(1)


class SharedLayerCache(LayerCache):
    """Stands for the cache of an earlier layer, whose keys and values this layer uses; it stores nothing.

    Both layers have the same kind of attention. The inputs of `prefill` and `step` are queries, keys and values.
    """

    def __init__(self, source: KeyValueLayerCache) -> None:
        self.source = source

    def prefill(self, prompts: PromptPack, *inputs: Tensor) -> Tensor:
        return self.source.attend_in_prompts(prompts, *inputs)

    def step(self, step: DecodingStep, *inputs: Tensor) -> Tensor:
        return self.source.attend_in_step(step, inputs[0])
