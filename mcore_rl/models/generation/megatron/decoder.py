"""The decoder: the training model's modules, with a core attention that reads a cache.

Keys and values are stored in blocks. A sequence allocates blocks as it grows (arXiv:2309.06180). A layer with a
recurrent state stores one state, in a slot, for each sequence. The host keeps the block tables, the slot numbers and
all lengths, so nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from mcore_rl import platform
from mcore_rl.data.choices import CHOICES, CHOSEN_KEYS, ROUTED_EXPERTS
from mcore_rl.data.images import PlacedImage
from mcore_rl.distributed.collectives import all_gather, all_reduce
from mcore_rl.distributed.logprobs import (
    CHUNK_BYTES,
    Tiles,
    gather_hidden_states,
    linear_logprobs,
    valid_columns,
)
from mcore_rl.distributed.packs import PackLayout
from mcore_rl.distributed.topk import linear_topk
from mcore_rl.models.generation.megatron.layer_caches import (
    BLOCK_SIZE,
    BlockLayerCache,
    CompressedLayerCache,
    DecodingStep,
    EarlierTokensCache,
    IndexLayerCache,
    KeyValueLayerCache,
    LayerCache,
    PromptPack,
    RunningPart,
    SharedLayerCache,
    SlotLayerCache,
    StateLayerCache,
    blocks_for,
)
from mcore_rl.models.megatron.attention.attention import KeyValueMixer
from mcore_rl.models.megatron.attention.compressed import CompressedAttention
from mcore_rl.models.megatron.attention.sparse import IndexerBase
from mcore_rl.models.megatron.families.mixtures import Mixture
from mcore_rl.models.megatron.kernels.packed_attention import visible_keys
from mcore_rl.models.megatron.layers.ngram_embedding import EarlierTokens
from mcore_rl.models.megatron.layers.packs import PackParams
from mcore_rl.models.megatron.layers.transformer_layer import GenerationFastPath
from mcore_rl.models.megatron.layers.vision import PackImages, prompt_images, rope_positions
from mcore_rl.models.megatron.model.gpt_model import ModelShard
from mcore_rl.models.megatron.model.step_statistics import routers_of
from mcore_rl.models.megatron.recurrent.gated_delta_net import GatedDeltaNet
from mcore_rl.models.megatron.weight_mapping import Shape

GROWTH = 4
"""The cache grows by at least 1/GROWTH of its size, because each growth copies its contents."""


class Blocks:
    """Allocates block numbers: counts the sequences that use each block, and lists the free blocks.

    A second object of this class allocates the slots of recurrent states.
    """

    def __init__(self) -> None:
        self.users: list[int] = []
        self.free: list[int] = []

    def take(self, count: int) -> list[int]:
        """Allocate `count` free blocks and return their numbers; add new blocks if not enough are free."""
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
        """Count one more sequence as a user of each of `blocks`; return `blocks`."""
        for block in blocks:
            self.users[block] += 1
        return list(blocks)

    def give_back(self, blocks: Sequence[int]) -> None:
        """Release the blocks of a sequence; a block becomes free when no other sequence uses it."""
        for block in blocks:
            self.users[block] -= 1
            if not self.users[block]:
                self.free.append(block)


class SequenceCache:
    """The caches of this rank's layers.

    Each sequence has a list of blocks, in the order of its tokens, and one slot. The caller takes blocks and slots from
    `blocks` and `slots` and gives them back when the sequence ends.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, self.blocks, self.slots = decoder, Blocks(), Blocks()
        self.layers = decoder.layer_caches()
        self.with_blocks = [layer for layer in self.layers if isinstance(layer, BlockLayerCache)]
        self.with_keys = [layer for layer in self.with_blocks if isinstance(layer, KeyValueLayerCache)]
        self.with_slots = [layer for layer in self.layers if isinstance(layer, SlotLayerCache)]
        self.table = torch.zeros(0, 0, dtype=torch.long, device=platform.device())
        self.slots_of_rows = self.table[0:0]
        self.lengths: list[int] = []
        self.grows = True

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        held: Sequence[Sequence[int]],
        slots: Sequence[int],
        images: Sequence[Sequence[PlacedImage]] = (),
    ) -> tuple[Float[Tensor, "tokens hidden"], Int64[Tensor, " n"]]:
        """Run whole prompts as one pack; return the final hidden states, and the place of each prompt's last token.

        Args:
            held: for each prompt, the blocks that store its keys and values.
            slots: for each prompt, the slot that stores its recurrent states.
            images: for each prompt, its images; may be empty if no prompt has images.
        """
        self._fit()
        lengths = tuple(map(len, prompts))
        layout = PackLayout.pack(lengths)
        tokens = torch.tensor([token for prompt in prompts for token in prompt])
        of_token = [block for blocks, n in zip(held, lengths, strict=True) for block in _each_token(blocks, n)]
        places = torch.tensor(of_token) * BLOCK_SIZE + layout.position_ids % BLOCK_SIZE
        last = layout.cu_seqlens[1:].long() - 1
        rotated, placed = layout.position_ids, None
        if any(images):
            rotated = torch.cat([rope_positions(n, of_prompt) for n, of_prompt in zip(lengths, images, strict=True)])
            placed = self.decoder.images_of(images, lengths)
        visible, inputs = visible_keys(layout, 0, tokens, rotated, places, last, torch.tensor(slots, dtype=torch.long))
        tokens, positions, places, last, own = inputs
        packed = PromptPack(visible, places, own)
        attend = lambda layer, *x: self.layers[layer].prefill(packed, *x)  # noqa: E731
        return self.decoder.forward(tokens, positions, attend, placed), last

    def copy_blocks(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """In every layer, copy the contents of the blocks `sources` to the blocks `destinations`."""
        self._fit()
        blocks = platform.to_device([sources, destinations])
        for layer in self.with_blocks:
            layer.copy(*blocks)

    def copy_slots(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """In every layer, copy the contents of the slots `sources` to the slots `destinations`."""
        self._fit()
        slots = platform.to_device([sources, destinations])
        for layer in self.with_slots:
            layer.copy(*slots)

    def arrange(
        self,
        held: Sequence[Sequence[int]],
        slots: Sequence[int],
        lengths: Sequence[int],
        fixed_width: int | None = None,
    ) -> None:
        """Set the running sequences for the coming steps, the longest first.

        Until the next call of `arrange`, each sequence grows by one token per step. Its blocks must have room for these
        tokens.

        Args:
            held: for each sequence, the blocks that store its keys and values.
            slots: for each sequence, the slot that stores its recurrent states.
            lengths: length of each sequence in the next step, including that step's token.
            fixed_width: number of columns of the block table, if the sizes must be the same in all steps. `lengths` are
                then the largest lengths that the sequences may reach.
        """
        self._fit()
        width = fixed_width or max(map(len, held))
        # Each row is padded with its own last block, whose values are finite and masked.
        table = torch.tensor([[*blocks, *[blocks[-1]] * (width - len(blocks))] for blocks in held])
        self.table, self.slots_of_rows = platform.sent_together(
            (table, torch.tensor(slots, dtype=torch.long)), platform.device()
        )
        self.lengths, self.grows = list(lengths), fixed_width is None
        self._make_workspaces(self.ranges())

    def step(
        self, tokens: Int64[Tensor, " n"], positions: Int64[Tensor, " n"], shifts: Int64[Tensor, " n"]
    ) -> Float[Tensor, "n hidden"]:
        """Run the last token of each sequence that `arrange` has set; return the final hidden states, [n, hidden].

        Args:
            positions: numbers of the tokens before the last token.
            shifts: what to add to them for the rotary embedding (`PlacedImage.shift`); 0 without images.
        """
        ranges = self.ranges()
        self._make_workspaces(ranges)
        parts = [
            RunningPart(rows, longest, self.table[rows, : blocks_for(longest)].contiguous()) for rows, longest in ranges
        ]
        places = self.table.gather(1, (positions // BLOCK_SIZE)[:, None])[:, 0] * BLOCK_SIZE + positions % BLOCK_SIZE
        behind = positions[:, None] - torch.arange(self.lengths[0], device=positions.device)
        windows = {layer.mixer.window for layer in self.with_keys}
        seen = {w: (behind >= 0) & (behind < (w or self.lengths[0])) for w in windows}
        step = DecodingStep(parts, places, seen, self.slots_of_rows, positions + 1)
        x = self.decoder.forward(tokens, positions + shifts, lambda layer, *x: self.layers[layer].step(step, *x))
        if self.grows:
            self.lengths = [length + 1 for length in self.lengths]
        return x

    def ranges(self) -> list[tuple[slice, int]]:
        """Divide the list of running sequences into parts; return for each part its slice and its greatest length.

        Attention copies the keys and values of one part at a time into a workspace, padded to the part's longest
        sequence. A part has as many sequences as fit into a workspace of limited size.
        """
        ranges: list[tuple[slice, int]] = []
        token_bytes = max((layer.token_bytes for layer in self.with_blocks), default=1)
        first, limit = 0, CHUNK_BYTES[platform.device().type] // token_bytes
        while first < len(self.lengths):
            longest = self.lengths[first]
            rows = slice(first, min(first + max(1, limit // longest), len(self.lengths)))
            ranges.append((rows, longest))
            first = rows.stop
        return ranges

    def addresses(self) -> tuple[tuple[int, int], ...]:
        """Return the addresses and lengths of all storages and workspaces. They change when the cache grows."""
        states = [storage for layer in self.with_slots for storage in layer.storages]
        keys = [storage for layer in self.with_blocks for storage in (layer.storage, *layer.gathered.values())]
        return tuple((storage.data_ptr(), len(storage)) for storage in (*states, *keys))

    def _make_workspaces(self, ranges: Sequence[tuple[slice, int]]) -> None:
        largest = max((rows.stop - rows.start) * blocks_for(longest) for rows, longest in ranges)
        for layer in self.with_blocks:
            layer.make_workspace(largest)

    def _fit(self) -> None:
        """Extend each layer's storage to all allocated blocks and slots.

        One layer grows after the other: growth copies the storage, so only one layer's copy needs memory at a time.
        """
        for keys in self.with_blocks:
            keys.grow(len(self.blocks.users))
        for states in self.with_slots:
            states.grow(len(self.slots.users))


def _each_token(blocks: Sequence[int], length: int) -> list[int]:
    """Return the block of each of the first `length` tokens of a sequence; `blocks` are the sequence's blocks."""
    return [block for block in blocks for _ in range(BLOCK_SIZE)][:length]


# A function that mixes the tokens in one layer: from the number of the layer's cache on this rank and the inputs [T, …]
# of its core attention (such as queries, keys and values) to [T, heads · d]; or from an indexer's states to its choice.
Attend = Callable[..., Any]


class CachedMixer(torch.nn.Module):
    """Replaces a layer's core attention during generation, and reads and writes the layer's cache.

    In an attention layer it has 3 input tensors: queries [T, heads, d], keys and values [T, groups, d]. In one with
    `CompressedAttention` it has 2: queries, and states [T, state_size]. Both also get the choice of an indexer, if
    there is one (`chosen`). The output is [T, heads · d]. In a gated delta net or Mamba-2 mixer it has 1 input tensor,
    [T, heads, …], with queries, keys, values, rates and decays. The output is [T, heads · value dimension].

    Args:
        inputs: number of input tensors; further arguments of `forward` but `chosen` are ignored.
    """

    def __init__(self, decoder: Decoder, layer: int, inputs: int) -> None:
        super().__init__()
        self.decoder, self.layer, self.inputs = [decoder], layer, inputs  # a decoder in a list is not a submodule

    def forward(self, *arguments: Any, chosen: Any = None, packed_seq_params: Any = None, **_: Any) -> Tensor:
        if chosen is None and packed_seq_params is not None:
            chosen = packed_seq_params.chosen.get(self.decoder[0].layers[self.layer].layer_number - 1)
        inputs = arguments[: self.inputs] if chosen is None else (*arguments[: self.inputs], chosen)
        out: Tensor = self.decoder[0].attend(self.layer, *inputs)
        return out


class CachedIndexer(torch.nn.Module):
    """Replaces a layer's indexer during generation, and reads and writes the cache of its keys.

    Args:
        number: number of the cache.
    """

    def __init__(self, decoder: Decoder, indexer: IndexerBase, number: int) -> None:
        super().__init__()
        self.decoder, self.number, self.indexer = [decoder], number, indexer

    @torch.no_grad()
    def forward(self, *inputs: Any) -> Tensor | None:
        """Return the keys that are chosen for all tokens of this pass, int32 [T, …]; None if all keys are seen.

        The arguments are those of the indexer's own method. The last one, the visible keys, is not used.
        """
        states: Sequence[Tensor] = self.indexer.states(*inputs[:-1])
        if self.indexer.sequence_parallel:
            states = [all_gather(x, self.decoder[0].topology.tensor.group).flatten(0, 1) for x in states]
        chosen: Tensor | None = self.decoder[0].attend(self.number, *states)
        self.decoder[0].chosen[self.number] = chosen
        return chosen


class CachedEarlierTokens(torch.nn.Module):
    """Replaces `EarlierTokens` during generation, and reads and writes the cache of the values.

    Args:
        number: number of the cache.
    """

    def __init__(self, decoder: Decoder, original: EarlierTokens, number: int) -> None:
        super().__init__()
        self.decoder, self.number, self.shape = [decoder], number, (len(original.lags), original.width)

    def forward(self, values: Tensor, packed_seq_params: Any = None, wanted: slice = slice(None)) -> Tensor:
        found: Tensor | None = self.decoder[0].attend(self.number, values)
        return (values.new_zeros(len(values), *self.shape) if found is None else found)[wanted]


class Decoder:
    """Runs this rank's chunks of the model for generation, with a cache.

    Replicas that share experts must run the model equally often. A replica that has no sequences left therefore runs
    the model on no tokens while other replicas continue (`run_idle`).

    Args:
        recorded: names of the choices that are recorded (`CHOICES`).
    """

    attend: Attend
    choices: dict[str, Tensor]
    """The recorded choices of this rank's layers for the tokens of the last pass, by name, [T, layers, size]."""

    def __init__(self, model: ModelShard, recorded: Sequence[str] = ()) -> None:
        self.model, self.topology = model, model.topology
        layers = [layer for chunk in model.chunks for layer in chunk.decoder.layers]
        mixers = [model.family.token_mixer(index) for index in model.layer_numbers()]
        self.mixers = [mixer for mixer in mixers if mixer is not None]
        # Only the layers in which tokens see each other have a cache.
        self.layers = [layer for layer, mixer in zip(layers, mixers, strict=True) if mixer is not None]
        attentions = [layer.self_attention for layer in self.layers]
        self.with_indexers = [layer for layer in attentions if getattr(layer, "indexer", None) is not None]
        # Read here, because `generating` replaces the indexers, and the modules that contain the sinks.
        self.indexers = [layer.indexer for layer in self.with_indexers]
        # Modules of all layers that return values of earlier tokens, each with the module of which it is a child.
        self.earlier: list[tuple[Any, str, EarlierTokens]] = [
            (parent, name, child)
            for layer in layers
            for parent in layer.modules()
            for name, child in parent.named_children()
            if isinstance(child, EarlierTokens)
        ]
        self.cores = [attention.core_attention for attention in attentions]
        self.sinks = [getattr(core, "softmax_offset", None) for core in self.cores]
        self.dtype = model.chunks[0].config.params_dtype
        self.sequence_ranks = self.topology.tensor.size if self.topology.sequence_parallel else 1
        self.token_multiple = self.sequence_ranks * model.row_multiple
        self.in_lockstep = self.topology.expert.size > 1
        self.routers = routers_of(model) if ROUTED_EXPERTS in recorded else []
        self.records_keys = CHOSEN_KEYS in recorded and bool(self.indexers)
        self.chosen_size = model.family.choices()[CHOSEN_KEYS].size if self.records_keys else 0
        self.chosen: dict[int, Tensor | None] = {}

    @property
    def recording_layers(self) -> dict[str, list[int]]:
        """For each choice that this rank records, the numbers of its layers among all layers that make this choice."""
        sources, own = self.model.family.layers_with_indexer, self.model.layer_numbers()
        indexed = [number for number, layer in enumerate(sources) if layer in own]
        layers = {ROUTED_EXPERTS: [router.index for router in self.routers]}
        return layers | {CHOSEN_KEYS: indexed if self.records_keys else []}

    def layer_caches(self) -> list[LayerCache]:
        """Return an empty cache for each layer of this rank with a token mixer, then one for each indexer, and then one
        for each module that returns values of earlier tokens."""
        size, gathered = self.topology.tensor.size, dict[Shape, Tensor]()
        caches: list[LayerCache] = []
        for mixer, layer, sinks in zip(self.mixers, self.layers, self.sinks, strict=True):
            if (source := getattr(mixer, "source", None)) is not None:
                shared = caches[[layer.layer_number - 1 for layer in self.layers].index(source)]
                assert isinstance(shared, KeyValueLayerCache), "layers share keys and values"
                caches.append(SharedLayerCache(shared))
            elif isinstance(mixer, KeyValueMixer):
                caches.append(KeyValueLayerCache(mixer, size, self.dtype, gathered, sinks))
            elif isinstance(mixer, CompressedAttention):
                caches.append(CompressedLayerCache(self.cores[len(caches)], self.dtype, gathered))
            else:
                caches.append(StateLayerCache(layer.self_attention, size, self.dtype))
        caches += [IndexLayerCache(indexer, self.dtype, gathered) for indexer in self.indexers]
        return [*caches, *(EarlierTokensCache(module) for *_, module in self.earlier)]

    @property
    def has_states(self) -> bool:
        """Whether any layer of the whole model has a recurrent state."""
        family = self.model.family
        return any(isinstance(family.token_mixer(layer), GatedDeltaNet) for layer in range(family.num_layers))

    @property
    def can_replay(self) -> bool:
        """Whether a GPU can replay this model's steps as CUDA graphs: a step must not communicate or wait for the GPU.

        In a mixture of experts, a step waits: the host reads how many tokens each expert gets. FP8 in a graph has not
        been tried.
        """
        alone = self.topology.tensor.size == self.topology.pipeline.size == 1
        waits = isinstance(self.model.family, Mixture) or torch.are_deterministic_algorithms_enabled()
        return platform.has_gpu() and alone and not waits and self.model.fp8 is None and not self.records_keys

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Return a context in which the model's modules are set up for generation. `forward` needs this context."""
        attentions = [layer.self_attention for layer in self.layers]
        faster = [
            module
            for chunk in self.model.chunks
            for module in chunk.modules()
            if isinstance(module, GenerationFastPath)
        ]
        for chunk in self.model.chunks:
            chunk.eval()
            chunk.set_is_first_microbatch()  # the FP8 copies of the weights may be of the weights before an update
        try:
            for module in faster:
                module.in_generation = True
            for index, (mixer, attention) in enumerate(zip(self.mixers, attentions, strict=True)):
                inputs = 3 if isinstance(mixer, KeyValueMixer) else 2 if isinstance(mixer, CompressedAttention) else 1
                attention.core_attention = CachedMixer(self, index, inputs)
            for number, attention in enumerate(self.with_indexers, len(attentions)):
                attention.indexer = CachedIndexer(self, attention.indexer, number)
            for number, (parent, name, earlier) in enumerate(self.earlier, len(attentions) + len(self.indexers)):
                setattr(parent, name, CachedEarlierTokens(self, earlier, number))
            yield
        finally:
            for module in faster:
                module.in_generation = False
            for attention, original in zip(attentions, self.cores, strict=True):
                attention.core_attention = original
            for attention, indexer in zip(self.with_indexers, self.indexers, strict=True):
                attention.indexer = indexer
            for parent, name, earlier in self.earlier:
                setattr(parent, name, earlier)
            self.__dict__.pop("attend", None)  # it refers to the cache, whose memory training needs

    def images_of(self, prompts: Sequence[Sequence[PlacedImage]], lengths: Sequence[int]) -> PackImages | None:
        """Return the images of prompts that run as one pack; None on stages without the vision tower."""
        tower = self.model.tower
        assert tower is not None, "the model reads no images"
        return prompt_images(prompts, lengths, tower, self.token_multiple) if self.topology.is_first_stage else None

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, images: PackImages | None = None) -> Tensor:
        """Run the layers of all pipeline stages on T tokens; return the final hidden states [T, hidden].

        The result is valid only on the last stage. `attend` computes a layer's core attention, and reads and writes the
        layer's cache.

        Args:
            positions: [T], or [T, 3] for prompts with images.
        """
        if self.in_lockstep:
            self._running(1.0)
        return self._run(tokens, positions, attend, images)

    def run_idle(self) -> None:
        """Run the model without tokens as long as any other replica runs the model on tokens."""
        nothing = torch.zeros(0, dtype=torch.long, device=platform.device())
        while self.in_lockstep and bool(self._running(0.0) > 0):
            self._run(nothing, nothing, self._no_attention)

    def _no_attention(self, layer: int, first: Tensor, *_: Tensor) -> Tensor | None:
        """Return an empty tensor in place of a core attention's output, for a forward pass without tokens.

        In place of an indexer's choice, or of values of earlier tokens, return None.
        """
        if layer >= len(self.mixers):
            return None
        return first.new_zeros(0, self.mixers[layer].mixed_size // self.topology.tensor.size)

    def _running(self, this_one: float) -> Tensor:
        """Return a tensor [1] that is above 0 if any replica now runs the model on tokens.

        Args:
            this_one: 1 if this replica runs the model on tokens, otherwise 0.
        """
        runs = torch.full((1,), this_one, device=platform.device())
        return all_reduce(all_reduce(runs, self.topology.context.group), self.topology.data.group)

    def _run(self, tokens: Tensor, positions: Tensor, attend: Attend, images: PackImages | None = None) -> Tensor:
        """Run the layers on `tokens` and return the final hidden states, as in `forward`.

        The tokens are padded to a number that sequence parallelism can divide and FP8 can multiply, and to at least one
        token.
        """
        count, multiple = len(tokens), self.token_multiple
        padding = max(-(-count // multiple), 1) * multiple - count
        tokens = F.pad(tokens, (0, padding))
        positions = F.pad(positions, (*(0, 0) * (positions.ndim - 1), 0, padding))

        def attend_real(layer: int, *inputs: Tensor) -> Tensor | None:
            out: Tensor | None = attend(layer, *(x[:count] for x in inputs))
            return out if out is None or not padding else F.pad(out, (*(0, 0) * (out.ndim - 1), 0, padding))

        self.attend = attend_real
        pack = PackParams(qkv_format="thd", positions=positions, images=images, token_ids=tokens)
        if self.model.fp8 is not None:
            pack.is_token = (torch.arange(len(tokens), device=tokens.device) < count).to(self.dtype)
        inputs = {
            "input_ids": tokens[None],
            "position_ids": positions[None],
            "attention_mask": None,
            "packed_seq_params": pack,
        }
        for chunk in self.model.chunks:
            if not chunk.pre_process:
                chunk.set_input_tensor(self._received(len(tokens)))
            x: Tensor = chunk(**inputs)
            if not chunk.post_process:
                self._send(x)
        self.choices = self._recorded(len(tokens), count)
        if not self.topology.is_last_stage:
            return x.new_empty(count, x.shape[-1])
        return gather_hidden_states(x, self.topology.tensor.group, self.topology.sequence_parallel)[:count]

    def _recorded(self, padded: int, count: int) -> dict[str, Tensor]:
        """Return what the layers have just chosen for the first `count` of `padded` tokens, by name."""
        choices = {}
        if self.routers:
            routed = torch.stack([router.chosen_last() for router in self.routers], dim=1)
            if self.topology.sequence_parallel:
                routed = all_gather(routed, self.topology.tensor.group).flatten(0, 1)
            choices[ROUTED_EXPERTS] = routed
        if self.records_keys:
            shape = padded, len(self.indexers), self.chosen_size
            keys = torch.full(shape, -1, dtype=torch.int32, device=platform.device())
            for number in range(len(self.indexers)):
                if (chosen := self.chosen.get(len(self.mixers) + number)) is not None:
                    chosen = chosen.flatten(1)
                    keys[:, number, : chosen.shape[1]] = chosen
            choices[CHOSEN_KEYS] = keys
        return {name: values[:count].to(CHOICES[name].dtype) for name, values in choices.items()}

    def _received(self, count: int) -> Tensor:
        pipeline, family = self.topology.pipeline, self.model.family
        shape = count // self.sequence_ranks, family.message_rows, family.hidden_size
        x = torch.empty(shape, dtype=self.dtype, device=platform.device())
        torch.distributed.recv(x, group=pipeline.group, group_src=(pipeline.rank - 1) % pipeline.size)
        return x

    def _send(self, x: Tensor) -> None:
        pipeline = self.topology.pipeline
        torch.distributed.send(x.contiguous(), group=pipeline.group, group_dst=(pipeline.rank + 1) % pipeline.size)

    def score(
        self, x: Float[Tensor, "n hidden"], tokens: Int64[Tensor, " n"], num_likeliest: int
    ) -> tuple[Float[Tensor, "n 1+m"], Int64[Tensor, "n m"]]:
        """Score tokens after final hidden states; valid only on the last stage.

        Args:
            tokens: the token after each hidden state.
            num_likeliest: number m of the likeliest tokens in its place.

        Returns:
            The log-probabilities of each token and of the likeliest ones, and the ids of the likeliest ones.
        """
        head, group, size = self.model.chunks[-1].lm_head_weight(), self.topology.tensor.group, self.model.num_ids
        softcap, ids = self.model.family.logit_softcap, tokens.new_empty(len(tokens), 0)
        if num_likeliest:
            _, ids = linear_topk(x, head, min(num_likeliest, size), group, vocab_size=size, softcap=softcap)
        targets = torch.cat((tokens[:, None], ids), dim=1)
        logprobs, _ = linear_logprobs(x, head, targets, group, vocab_size=size, softcap=softcap)
        return logprobs, ids

    def logits(self, x: Tensor) -> Tensor:
        """Map final hidden states [n, hidden] to fp32 logits [n, Vp]; logits of ids without probability are −inf."""
        head = self.model.chunks[-1].lm_head_weight()
        # fp32 as in training: rounding to bfloat16 may change a logit of 16 by 0.06.
        tiles = Tiles(x, head, len(head), temperature=1.0, softcap=self.model.family.logit_softcap)
        logits = tiles.all_columns(slice(None))
        logits[:, valid_columns(logits.shape[1], self.topology.tensor.rank, self.model.num_ids) :] = -torch.inf
        return logits
