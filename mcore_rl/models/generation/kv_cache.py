"""Keys and values of the sequences being generated, in blocks that are taken as sequences grow (arXiv:2309.06180).

Which block holds what is known on the host, as are all lengths; so nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from mcore_rl import platform
from mcore_rl.distributed.logprobs import CHUNK_BYTES
from mcore_rl.distributed.packs import PackLayout
from mcore_rl.models.generation.decoder import Decoder
from mcore_rl.models.megatron.attention import packed_attention, visible_keys

BLOCK_SIZE = 64
"""Tokens of a block."""
GROWTH = 4
"""The cache grows by a 4th of itself at least, as each growth copies what is there."""


def blocks_for(num_tokens: int) -> int:
    """How many blocks hold so many tokens."""
    return -(-num_tokens // BLOCK_SIZE)


class Blocks:
    """Numbers of blocks: which are free, and how many sequences have each of the others."""

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
        """The same, which one more sequence has now."""
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
    """Sequences whose keys and values are gathered at a time.

    rows: which of all they are; longest: tokens of the first; table: [rows, blocks] of that many tokens each.
    """

    rows: slice
    longest: int
    table: Tensor


class KeyValueCache:
    """The cache of this rank's layers.

    storage: of each layer [blocks, BLOCK_SIZE, 2, groups, head_dim], keys and values.

    A sequence has a list of blocks, whose order is that of its tokens. It takes them of `blocks`, and gives them back.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, self.blocks = decoder, Blocks()
        shape = (0, BLOCK_SIZE, 2, decoder.groups, decoder.head_dim)
        self.storage = [torch.zeros(shape, dtype=decoder.dtype, device=platform.device()) for _ in decoder.layers]
        self.token_bytes = 2 * decoder.groups * decoder.head_dim * decoder.dtype.itemsize
        self.gathered = self.storage[0][:0] if self.storage else torch.zeros(0)
        self.table = torch.zeros(0, 0, dtype=torch.long, device=platform.device())
        self.lengths: list[int] = []

    def prefill(self, prompts: Sequence[Sequence[int]], held: Sequence[Sequence[int]]) -> Float[Tensor, "n hidden"]:
        """Run whole prompts, packed, each into the blocks that it has; final states of their last tokens."""
        self._fit()
        lengths = tuple(map(len, prompts))
        layout = PackLayout.pack(lengths)
        tokens = torch.tensor([token for prompt in prompts for token in prompt])
        of_token = [block for blocks, n in zip(held, lengths, strict=True) for block in _each_token(blocks, n)]
        slots = torch.tensor(of_token) * BLOCK_SIZE + layout.position_ids % BLOCK_SIZE
        last = layout.cu_seqlens[1:].long() - 1
        visible, inputs = visible_keys(layout, 0, tokens, layout.position_ids, slots, last)
        tokens, positions, slots, last = inputs

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            self._write(layer, slots, key, value)
            window = self.decoder.windows[layer]
            return packed_attention(query, key, value, visible, self.decoder.scale, window).flatten(1)

        return self.decoder.forward(tokens, positions, attend)[last]

    def copy(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy blocks to others."""
        self._fit()
        blocks = platform.to_device([sources, destinations])
        for storage in self.storage:
            storage[blocks[1]] = storage[blocks[0]]

    def arrange(self, held: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
        """Take these sequences' blocks for the steps to come, and their lengths, the longest first, for the next one.

        Until the next call all grow by one token a step, for which they must have room.
        """
        self._fit()
        width = max(map(len, held))
        # Behind a sequence's own stands block 0: something finite, which nobody sees.
        table = torch.tensor([[*blocks, *[0] * (width - len(blocks))] for blocks in held])
        self.table, self.lengths = platform.to_device(table), list(lengths)

    def step(self, tokens: Int64[Tensor, " n"], positions: Int64[Tensor, " n"]) -> Float[Tensor, "n hidden"]:
        """Attend from the last token of each arranged sequence; final states."""
        parts = self._parts()
        slots = self.table.gather(1, (positions // BLOCK_SIZE)[:, None])[:, 0] * BLOCK_SIZE + positions % BLOCK_SIZE
        behind = positions[:, None] - torch.arange(self.lengths[0], device=positions.device)
        seen = {w: (behind >= 0) & (behind < (w or self.lengths[0])) for w in set(self.decoder.windows)}

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            self._write(layer, slots, key, value)
            outs = [self._attend(layer, part, query, seen[self.decoder.windows[layer]]) for part in parts]
            return outs[0] if len(outs) == 1 else torch.cat(outs)

        x = self.decoder.forward(tokens, positions, attend)
        self.lengths = [length + 1 for length in self.lengths]
        return x

    def _attend(self, layer: int, part: _Part, query: Tensor, seen: Tensor) -> Tensor:
        """[n, heads, d] queries of all → [count, heads · d] of a part."""
        gathered, table = self.gathered[: part.table.numel()], part.table
        torch.index_select(self.storage[layer], 0, table.flatten(), out=gathered)
        keys, values = gathered.unflatten(0, table.shape).flatten(1, 2)[:, : part.longest].transpose(1, 3).unbind(2)
        # The query heads of a group go for positions: all of them see the same keys.
        attended = F.scaled_dot_product_attention(
            query[part.rows].unflatten(1, (self.decoder.groups, -1)),
            keys,
            values,
            attn_mask=seen[part.rows, None, None, : part.longest],
            scale=self.decoder.scale,
        )
        return attended.flatten(1)

    def _parts(self) -> list[_Part]:
        """All sequences, few enough at a time that a layer's keys and values of them are not much to gather: padded to
        the longest, they take more than the cache itself where lengths are skewed."""
        parts: list[_Part] = []
        first, limit = 0, CHUNK_BYTES[platform.device().type] // self.token_bytes
        while first < len(self.lengths):
            longest = self.lengths[first]
            rows = slice(first, min(first + max(1, limit // longest), len(self.lengths)))
            parts.append(_Part(rows, longest, self.table[rows, : blocks_for(longest)].contiguous()))
            first = rows.stop
        if self.storage and (largest := max(part.table.numel() for part in parts)) > len(self.gathered):
            self.gathered = self.storage[0].new_empty(largest, *self.storage[0].shape[1:])
        return parts

    def _write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Keys and values [T, groups, d] into places [T] among the tokens of all blocks."""
        self.storage[layer].flatten(0, 1).index_copy_(0, slots, torch.stack((key, value), dim=1))

    def _fit(self) -> None:
        """As much storage as there are blocks. A layer at a time, so that what is copied is never there twice."""
        if self.storage and (more := len(self.blocks.users) - len(self.storage[0])):
            for layer, old in enumerate(self.storage):
                # Zeros: what lies behind a sequence's end is weighted by 0, which a NaN would survive.
                self.storage[layer] = old.new_zeros(len(old) + more, *old.shape[1:])
                self.storage[layer][: len(old)] = old


def _each_token(blocks: Sequence[int], length: int) -> list[int]:
    """The block of each of a sequence's first tokens."""
    return [block for block in blocks for _ in range(BLOCK_SIZE)][:length]
