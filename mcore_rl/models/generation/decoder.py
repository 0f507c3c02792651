"""The decoder: the training model's modules, with a core attention that reads a cache.

Keys and values are in blocks that sequences allocate as they grow (arXiv:2309.06180). Layers with a recurrent state
have a slot for each sequence. The host keeps the block tables, slots and all lengths, so nothing here waits for the
device.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from mcore_rl import platform
from mcore_rl.distributed.collectives import all_gather, all_reduce
from mcore_rl.distributed.logprobs import CHUNK_BYTES, Tiles, gather_hidden_states, valid_columns
from mcore_rl.distributed.packs import PackLayout
from mcore_rl.models.megatron.attention import KeyValueMixer, PackParams
from mcore_rl.models.megatron.attention_kernels import AttentionPattern, packed_attention, visible_keys, with_sink_key
from mcore_rl.models.megatron.build import ModelShard
from mcore_rl.models.megatron.delta_net import DeltaNetLayer, GatedDeltaNet, rule_inputs
from mcore_rl.models.megatron.delta_rule import causal_conv, convolve_last, delta_rule, delta_step, exact, plan_of
from mcore_rl.models.megatron.layers import GenerationFastPath
from mcore_rl.models.megatron.moe import routers_of
from mcore_rl.models.megatron.weight_mapping import Shape

BLOCK_SIZE = 64
"""Number of tokens in a block."""
GROWTH = 4
"""The cache grows by at least 1/GROWTH of its size, because each growth copies its contents."""


def blocks_for(num_tokens: int) -> int:
    """Return the number of blocks for this number of tokens."""
    return -(-num_tokens // BLOCK_SIZE)


class Blocks:
    """Allocation of block numbers: the number of sequences that use each block, and the free blocks.

    Slots of recurrent states are allocated in the same way.
    """

    def __init__(self) -> None:
        self.users: list[int] = []
        self.free: list[int] = []

    def take(self, count: int) -> list[int]:
        """Return this number of free blocks; the cache grows if there are not enough."""
        if (missing := count - len(self.free)) > 0:
            capacity = len(self.users)
            more = max(missing, capacity // GROWTH)
            self.users += [0] * more
            self.free = [*reversed(range(capacity, capacity + more)), *self.free]
        taken = [self.free.pop() for _ in range(count)]
        for block in taken:
            self.users[block] = 1
        return taken

    def share(self, blocks: Sequence[int]) -> list[int]:
        """Add a user to these blocks and return them."""
        for block in blocks:
            self.users[block] += 1
        return list(blocks)

    def give_back(self, blocks: Sequence[int]) -> None:
        """Release the blocks of a sequence."""
        for block in blocks:
            self.users[block] -= 1
            if not self.users[block]:
                self.free.append(block)


@dataclass
class _Part:
    """Sequences whose keys and values are gathered together.

    rows: range of these sequences among all sequences. longest: length of the first, longest sequence, in tokens.
    table: [sequences, blocks], the block numbers of each sequence up to that length.
    """

    rows: slice
    longest: int
    table: Tensor


@dataclass(frozen=True)
class _Prompts:
    """Prompts that run as one pack: the keys that their queries see, the place of each token among all blocks, and each
    prompt's slot."""

    visible: AttentionPattern
    places: Tensor
    slots: Tensor


@dataclass(frozen=True)
class _Step:
    """One token for each running sequence.

    parts: the parts into which the sequences are divided. places: place of each sequence's last token among the tokens
    of all blocks. seen: for each window of the layers, a mask of the keys that each last token sees. slots: the slot of
    each sequence.
    """

    parts: Sequence[_Part]
    places: Tensor
    seen: dict[int | None, Tensor]
    slots: Tensor


class LayerCache(ABC):
    """Cache of one layer for the sequences on this rank.

    `prefill` and `step` take the same tensors [T, …] as the layer's core attention in training, and return its output
    [T, …].
    """

    @abstractmethod
    def prefill(self, prompts: _Prompts, *inputs: Tensor) -> Tensor:
        """Run whole prompts and store what later tokens need of them."""

    @abstractmethod
    def step(self, step: _Step, *inputs: Tensor) -> Tensor:
        """Run the last token of each sequence."""


def _grown(storage: Tensor, count: int) -> Tensor:
    """Return `storage`, extended with zeros if it has fewer than `count` entries."""
    if len(storage) >= count:
        return storage
    # Zeros are needed because values after a sequence's end have weight 0, and 0 · NaN is NaN.
    grown = storage.new_zeros(count, *storage.shape[1:])
    grown[: len(storage)] = storage
    return grown


class StateLayerCache(LayerCache):
    """The states of a gated delta net: those of its convolution and of its delta rule.

    convolution: [slots, width − 1, heads, convolved], the last inputs of the convolution.
    states: [slots, heads, repeats, key_dim, value_dim], the states of the rule, at least fp32.
    """

    def __init__(self, layer: DeltaNetLayer, tensor_parallel: int, dtype: torch.dtype) -> None:
        self.layer, self.net = layer, layer.net
        net, heads = self.net, self.net.heads // tensor_parallel
        inputs, state = (net.width - 1, heads, net.convolved_size), (heads, net.repeats, net.key_dim, net.value_dim)
        self.convolution = torch.zeros(0, *inputs, dtype=dtype, device=platform.device())
        self.states = torch.zeros(0, *state, dtype=exact(dtype), device=platform.device())

    def grow(self, slots: int) -> None:
        """Make room for this number of slots."""
        self.convolution, self.states = _grown(self.convolution, slots), _grown(self.states, slots)

    def copy(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy slots to other slots."""
        for storage in (self.convolution, self.states):
            storage[destinations] = storage[sources]

    def prefill(self, prompts: _Prompts, *inputs: Tensor) -> Tensor:
        (rows,), weights = inputs, self.layer.weights()
        plan, size = plan_of(prompts.visible.layout, self.net.width, rows.device), self.net.convolved_size
        mixed, others = rows[..., :size], rows[..., size:]
        # The places of the last width − 1 tokens of each prompt, the last one at the end; −1 before its first token.
        kept = torch.stack([*reversed(plan.before[: self.net.width - 2, plan.last]), plan.last], dim=1)
        there = (kept >= 0)[..., None, None]
        self.convolution[prompts.slots] = torch.where(there, mixed[kept.clamp(min=0)], 0)
        convolved = causal_conv(mixed, weights.convolution, plan.before)
        out, states = delta_rule(*rule_inputs(self.net, convolved, others, weights), plan, with_states=True)
        assert states is not None, "delta_rule returns states with with_states=True"
        self.states[prompts.slots] = states
        return out.flatten(1)

    def step(self, step: _Step, *inputs: Tensor) -> Tensor:
        (rows,), weights = inputs, self.layer.weights()
        mixed, others = rows.split((self.net.convolved_size, 2 * self.net.repeats), dim=-1)
        seen = torch.cat((self.convolution[step.slots], mixed[:, None]), dim=1)
        self.convolution[step.slots] = seen[:, 1:]
        convolved = convolve_last(seen, weights.convolution)
        old = self.states[step.slots]
        out, self.states[step.slots] = delta_step(*rule_inputs(self.net, convolved, others, weights), old)
        return out.flatten(1)


class KeyValueLayerCache(LayerCache):
    """Keys and values of one layer.

    storage: [blocks, BLOCK_SIZE, 2, groups, head_dim].
    gathered: workspaces for the blocks of a part, by the shape of a block; shared with other layers.

    Args:
        sinks: sinks [heads] of this rank's query heads, if the layer has them.
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
        self.mixer, self.groups, self.gathered = mixer, max(1, mixer.groups // tensor_parallel), gathered
        self.sinks = sinks
        shape = (0, BLOCK_SIZE, 2, self.groups, mixer.head_dim)
        self.storage = torch.zeros(shape, dtype=dtype, device=platform.device())

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values."""
        return math.prod(self.storage.shape[2:]) * self.storage.itemsize

    def grow(self, blocks: int) -> None:
        """Make room for this number of blocks."""
        self.storage = _grown(self.storage, blocks)

    def copy(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy blocks to other blocks."""
        self.storage[destinations] = self.storage[sources]

    def prefill(self, prompts: _Prompts, *inputs: Tensor) -> Tensor:
        """Attend inside each prompt and store its keys and values: queries [T, heads, d] → [T, heads · d]."""
        query, key, value = inputs
        self._write(prompts.places, key, value)
        scale, window = self.mixer.scale, self.mixer.window
        return packed_attention(query, key, value, prompts.visible, scale, window, self.sinks).flatten(1)

    def step(self, step: _Step, *inputs: Tensor) -> Tensor:
        """Attend with the last token of each sequence: queries [n, heads, d] → [n, heads · d]."""
        query, key, value = inputs
        self._write(step.places, key, value)
        seen = step.seen[self.mixer.window]
        outs = [self._attend(part, query, seen) for part in step.parts]
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def make_workspace(self, blocks: int) -> None:
        """Create the workspace for parts of up to this number of blocks."""
        shape = self.storage.shape[1:]
        if shape not in self.gathered or len(self.gathered[shape]) < blocks:
            self.gathered[shape] = self.storage.new_empty(blocks, *shape)

    def _attend(self, part: _Part, query: Tensor, seen: Tensor) -> Tensor:
        """Compute attention of one part: all sequences' queries [n, heads, d] → [count, heads · d]."""
        gathered = self.gathered[self.storage.shape[1:]][: part.table.numel()]
        torch.index_select(self.storage, 0, part.table.flatten(), out=gathered)
        rows = gathered.unflatten(0, part.table.shape).flatten(1, 2)[:, : part.longest]
        keys, values = rows.transpose(1, 3).unbind(2)
        mask = seen[part.rows, None, None, : part.longest]
        if self.sinks is not None:
            scores = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill_(~mask, -torch.inf)
            sinks = self.sinks.view(1, self.groups, -1).expand(len(mask), -1, -1)
            keys, values, mask = with_sink_key(keys, values, scores, sinks)
        # The query heads of a group take the place of positions, because all of them see the same keys.
        attended = F.scaled_dot_product_attention(
            query[part.rows].unflatten(1, (self.groups, -1)),
            keys,
            values,
            attn_mask=mask,
            scale=self.mixer.scale,
        )
        return attended.flatten(1)

    def _write(self, places: Tensor, key: Tensor, value: Tensor) -> None:
        """Write keys and values [T, groups, d] to places [T] among the tokens of all blocks."""
        self.storage.flatten(0, 1).index_copy_(0, places, torch.stack((key, value), dim=1))


class SequenceCache:
    """The caches of this rank's layers.

    A sequence has a list of blocks in the order of its tokens, and a slot. They are taken from `blocks` and `slots`
    and given back when the sequence ends.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, self.blocks, self.slots = decoder, Blocks(), Blocks()
        self.layers = decoder.layer_caches()
        self.with_keys = [layer for layer in self.layers if isinstance(layer, KeyValueLayerCache)]
        self.with_states = [layer for layer in self.layers if isinstance(layer, StateLayerCache)]
        self.table = torch.zeros(0, 0, dtype=torch.long, device=platform.device())
        self.slots_of_rows = self.table[0:0]
        self.lengths: list[int] = []

    def prefill(
        self, prompts: Sequence[Sequence[int]], held: Sequence[Sequence[int]], slots: Sequence[int]
    ) -> Float[Tensor, "n hidden"]:
        """Run whole prompts, packed, each into its blocks and its slot; return the final states of their last
        tokens."""
        self._fit()
        lengths = tuple(map(len, prompts))
        layout = PackLayout.pack(lengths)
        tokens = torch.tensor([token for prompt in prompts for token in prompt])
        of_token = [block for blocks, n in zip(held, lengths, strict=True) for block in _each_token(blocks, n)]
        places = torch.tensor(of_token) * BLOCK_SIZE + layout.position_ids % BLOCK_SIZE
        last = layout.cu_seqlens[1:].long() - 1
        visible, inputs = visible_keys(
            layout, 0, tokens, layout.position_ids, places, last, torch.tensor(slots, dtype=torch.long)
        )
        tokens, positions, places, last, own = inputs
        packed = _Prompts(visible, places, own)
        return self.decoder.forward(tokens, positions, lambda layer, *x: self.layers[layer].prefill(packed, *x))[last]

    def copy_blocks(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy blocks to other blocks."""
        self._fit()
        blocks = platform.to_device([sources, destinations])
        for layer in self.with_keys:
            layer.copy(*blocks)

    def copy_slots(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy slots to other slots."""
        self._fit()
        slots = platform.to_device([sources, destinations])
        for layer in self.with_states:
            layer.copy(*slots)

    def arrange(self, held: Sequence[Sequence[int]], slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Set the sequences' blocks and slots for the coming steps, and their lengths for the next step, longest first.

        Until the next call all sequences grow by one token per step, for which their blocks must have room.
        """
        self._fit()
        width = max(map(len, held))
        # Rows are padded with block 0, whose values are finite and masked.
        table = torch.tensor([[*blocks, *[0] * (width - len(blocks))] for blocks in held])
        self.table, self.slots_of_rows = platform.sent_together(
            (table, torch.tensor(slots, dtype=torch.long)), platform.device()
        )
        self.lengths = list(lengths)

    def step(self, tokens: Int64[Tensor, " n"], positions: Int64[Tensor, " n"]) -> Float[Tensor, "n hidden"]:
        """Run the last token of each arranged sequence; return the final states."""
        parts = self._parts()
        places = self.table.gather(1, (positions // BLOCK_SIZE)[:, None])[:, 0] * BLOCK_SIZE + positions % BLOCK_SIZE
        behind = positions[:, None] - torch.arange(self.lengths[0], device=positions.device)
        windows = {layer.mixer.window for layer in self.with_keys}
        seen = {w: (behind >= 0) & (behind < (w or self.lengths[0])) for w in windows}
        step = _Step(parts, places, seen, self.slots_of_rows)
        x = self.decoder.forward(tokens, positions, lambda layer, *x: self.layers[layer].step(step, *x))
        self.lengths = [length + 1 for length in self.lengths]
        return x

    def _parts(self) -> list[_Part]:
        """Divide the sequences into parts, so that the gathered keys and values of one part need little memory.

        A part is padded to its longest sequence. As a single part, sequences of very different lengths would need more
        memory than the cache.
        """
        parts: list[_Part] = []
        token_bytes = max((layer.token_bytes for layer in self.with_keys), default=1)
        first, limit = 0, CHUNK_BYTES[platform.device().type] // token_bytes
        while first < len(self.lengths):
            longest = self.lengths[first]
            rows = slice(first, min(first + max(1, limit // longest), len(self.lengths)))
            parts.append(_Part(rows, longest, self.table[rows, : blocks_for(longest)].contiguous()))
            first = rows.stop
        largest = max(part.table.numel() for part in parts)
        for layer in self.with_keys:
            layer.make_workspace(largest)
        return parts

    def _fit(self) -> None:
        """Make room for all blocks and slots in each layer, one layer after the other to limit the memory of copies."""
        for keys in self.with_keys:
            keys.grow(len(self.blocks.users))
        for states in self.with_states:
            states.grow(len(self.slots.users))


def _each_token(blocks: Sequence[int], length: int) -> list[int]:
    """Return the block of each of a sequence's first `length` tokens."""
    return [block for block in blocks for _ in range(BLOCK_SIZE)][:length]


# A function that mixes the tokens in one layer: from the layer's number on this rank and the inputs [T, …] of its core
# attention (such as queries, keys and values) to [T, heads · d].
Attend = Callable[..., Tensor]


class CachedMixer(torch.nn.Module):
    """The module that mixes tokens in a layer during generation, in place of the one for training.

    A core attention maps queries [T, heads, d], keys and values [T, groups, d] to [T, heads · d]. A gated delta net's
    convolution and rule map queries, keys, values, rates and decays, in one tensor [T, heads, …], to [T, heads ·
    values].

    Args:
        inputs: number of input tensors (3 or 1, as above); further arguments are ignored.
    """

    def __init__(self, decoder: Decoder, layer: int, inputs: int) -> None:
        super().__init__()
        self.decoder, self.layer, self.inputs = [decoder], layer, inputs  # a decoder in a list is not a submodule

    def forward(self, *arguments: Any, **kwargs: Any) -> Tensor:
        return self.decoder[0].attend(self.layer, *arguments[: self.inputs])


class Decoder:
    """This rank's chunks of the model, run on a few tokens per step.

    Replicas that share experts must run the model equally often. A replica without sequences therefore runs it on no
    tokens while others continue (`run_idle`).
    """

    attend: Attend
    routed: Tensor
    """Experts of the last pass's tokens, [T, layers with experts on this rank, topk], if experts are recorded."""

    def __init__(self, model: ModelShard, record_experts: bool = False) -> None:
        self.model, self.topology = model, model.topology
        self.mixers = [model.family.token_mixer(index) for index in model.layer_numbers()]
        self.layers = [layer for chunk in model.chunks for layer in chunk.decoder.layers]
        # Read here, because `generating` replaces the modules that contain the sinks.
        self.sinks = [getattr(layer.self_attention.core_attention, "softmax_offset", None) for layer in self.layers]
        self.dtype = model.chunks[0].config.params_dtype
        self.token_multiple = self.topology.tensor.size if self.topology.sequence_parallel else 1
        self.in_lockstep = self.topology.expert.size > 1
        self.routers = routers_of(model) if record_experts else []

    def layer_caches(self) -> list[LayerCache]:
        """Return an empty cache for each layer of this rank."""
        size, gathered = self.topology.tensor.size, dict[Shape, Tensor]()
        caches: list[LayerCache] = []
        for mixer, layer, sinks in zip(self.mixers, self.layers, self.sinks, strict=True):
            if isinstance(mixer, KeyValueMixer):
                caches.append(KeyValueLayerCache(mixer, size, self.dtype, gathered, sinks))
            else:
                caches.append(StateLayerCache(layer.self_attention, size, self.dtype))
        return caches

    @property
    def has_states(self) -> bool:
        """Whether any layer of the whole model has a recurrent state."""
        family = self.model.family
        return any(isinstance(family.token_mixer(layer), GatedDeltaNet) for layer in range(family.num_layers))

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Set up the modules for generation inside the context, where `forward` may be called."""
        attentions = [layer.self_attention for layer in self.layers]
        originals = [attention.core_attention for attention in attentions]
        faster = [
            module
            for chunk in self.model.chunks
            for module in chunk.modules()
            if isinstance(module, GenerationFastPath)
        ]
        for chunk in self.model.chunks:
            chunk.eval()
        try:
            for module in faster:
                module.in_generation = True
            for index, (mixer, attention) in enumerate(zip(self.mixers, attentions, strict=True)):
                attention.core_attention = CachedMixer(self, index, inputs=3 if isinstance(mixer, KeyValueMixer) else 1)
            yield
        finally:
            for module in faster:
                module.in_generation = False
            for attention, original in zip(attentions, originals, strict=True):
                attention.core_attention = original

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Run all stages' layers on tokens [T]; return final states [T, hidden], valid only on the last stage."""
        if self.in_lockstep:
            self._running(1.0)
        return self._run(tokens, positions, attend)

    def run_idle(self) -> None:
        """Run the model on no tokens for as long as another replica runs it."""
        nothing = torch.zeros(0, dtype=torch.long, device=platform.device())
        while self.in_lockstep and bool(self._running(0.0) > 0):
            self._run(nothing, nothing, self._no_attention)

    def _no_attention(self, layer: int, first: Tensor, *_: Tensor) -> Tensor:
        """Return the output of a layer's core attention for no tokens."""
        return first.new_zeros(0, self.mixers[layer].mixed_size // self.topology.tensor.size)

    def _running(self, this_one: float) -> Tensor:
        """Return the number of replicas that run the model now, [1]; `this_one` is 1 if this replica does, else 0."""
        runs = torch.full((1,), this_one, device=platform.device())
        return all_reduce(all_reduce(runs, self.topology.context.group), self.topology.data.group)

    def _run(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Run the layers on tokens, padded to a multiple that sequence parallelism can shard and to at least one."""
        count, multiple = len(tokens), self.token_multiple
        padding = max(-(-count // multiple), 1) * multiple - count
        tokens, positions = F.pad(tokens, (0, padding)), F.pad(positions, (0, padding))

        def attend_real(layer: int, *inputs: Tensor) -> Tensor:
            if not padding:
                return attend(layer, *inputs)
            return F.pad(attend(layer, *(x[:count] for x in inputs)), (0, 0, 0, padding))

        self.attend = attend_real
        inputs = {
            "input_ids": tokens[None],
            "position_ids": positions[None],
            "attention_mask": None,
            "packed_seq_params": PackParams(qkv_format="thd", positions=positions),
        }
        for chunk in self.model.chunks:
            if not chunk.pre_process:
                chunk.set_input_tensor(self._received(len(tokens)))
            x: Tensor = chunk(**inputs)
            if not chunk.post_process:
                self._send(x)
        if self.routers:
            routed = torch.stack([router.chosen_last() for router in self.routers], dim=1)
            if self.topology.sequence_parallel:
                routed = all_gather(routed, self.topology.tensor.group).flatten(0, 1)
            self.routed = routed[:count]
        if not self.topology.is_last_stage:
            return x.new_empty(count, x.shape[-1])
        return gather_hidden_states(x, self.topology.tensor.group, self.topology.sequence_parallel)[:count]

    def _received(self, count: int) -> Tensor:
        pipeline, hidden = self.topology.pipeline, self.model.family.hidden_size
        x = torch.empty(count // self.token_multiple, 1, hidden, dtype=self.dtype, device=platform.device())
        torch.distributed.recv(x, group=pipeline.group, group_src=(pipeline.rank - 1) % pipeline.size)
        return x

    def _send(self, x: Tensor) -> None:
        pipeline = self.topology.pipeline
        torch.distributed.send(x.contiguous(), group=pipeline.group, group_dst=(pipeline.rank + 1) % pipeline.size)

    def logits(self, x: Tensor) -> Tensor:
        """Map final states [n, hidden] to logits [n, Vp] in fp32; −inf in the vocabulary's padding."""
        head = self.model.chunks[-1].lm_head_weight()
        # fp32 as in training: rounding to bfloat16 may change a logit of 16 by 0.06.
        logits = Tiles(x, head, len(head), temperature=1.0).all_columns(slice(None))
        logits[:, valid_columns(logits.shape[1], self.topology.tensor.rank, self.model.vocab_size) :] = -torch.inf
        return logits
