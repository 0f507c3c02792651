"""The sampling mask: the tokens that a sampler kept at each position, and log-probabilities over these tokens.

With top-k, top-p or min-p a token is drawn from the softmax over the kept tokens. Training in that distribution needs
the same tokens at each position (DeepSeek-V3.2, arXiv:2512.02556, section 3.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int, Int32
from torch import Tensor

from mcore_rl import platform
from mcore_rl.distributed.logprobs import Tile


@dataclass(frozen=True)
class KeptTokens:
    """The tokens that the sampler kept at each position of a sequence, on the host.

    counts: number of kept tokens at each position; 0 at positions whose token was not sampled.
    ids: the kept tokens, position after position.
    """

    counts: Int32[Tensor, " positions"]
    ids: Int32[Tensor, " total"]

    @classmethod
    def of(cls, lists: Sequence[Sequence[int]]) -> KeptTokens:
        """Return an object with the kept tokens in `lists`. Each position has one list."""
        counts = torch.tensor([len(ids) for ids in lists], dtype=torch.int32)
        return cls(counts, torch.tensor([token for ids in lists for token in ids], dtype=torch.int32))

    @classmethod
    def of_table(cls, table: Int[Tensor, "positions most"]) -> KeptTokens:
        """Return an object with the kept tokens in `table`. Each position has one row; −1 means no token."""
        return cls((table >= 0).sum(1, dtype=torch.int32), table[table >= 0].int())

    @classmethod
    def none(cls, positions: int) -> KeptTokens:
        """Return an object with this number of positions and without kept tokens."""
        return cls(torch.zeros(positions, dtype=torch.int32), torch.zeros(0, dtype=torch.int32))

    def __len__(self) -> int:
        return len(self.counts)

    def __add__(self, other: KeptTokens) -> KeptTokens:
        return KeptTokens(torch.cat((self.counts, other.counts)), torch.cat((self.ids, other.ids)))

    def split(self, lengths: Sequence[int]) -> list[KeptTokens]:
        """Split into consecutive sequences with these numbers of positions."""
        counts = self.counts.split(list(lengths))
        ids = self.ids.split([int(part.sum()) for part in counts])
        return [KeptTokens(*part) for part in zip(counts, ids, strict=True)]

    def at(self, positions: Int[Tensor, " n"]) -> KeptTokens:
        """Return the kept tokens of these positions, in this order."""
        ends = self.counts.long().cumsum(0)
        counts = self.counts[positions].long()
        offsets = torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        return KeptTokens(counts.int(), self.ids[(ends[positions] - counts).repeat_interleave(counts) + offsets])

    def padded(self, positions: int) -> KeptTokens:
        """Return an object with `positions` positions in all: positions without kept tokens are added at the end."""
        return self + KeptTokens.none(positions - len(self))

    @staticmethod
    def concatenated(parts: Sequence[KeptTokens]) -> KeptTokens:
        """Return the kept tokens of several sequences, one after the other."""
        empty = torch.zeros(0, dtype=torch.int32)
        return KeptTokens(
            torch.cat([empty, *(part.counts for part in parts)]), torch.cat([empty, *(part.ids for part in parts)])
        )


def kept_tiles(
    kept: KeptTokens, targets: Int[Tensor, " positions"], first_column: int, columns: int, shape: tuple[int, int]
) -> Iterator[Tile]:
    """Yield tiles that cover the logits of the kept tokens in this rank's shard; their tensors are on the host.

    Args:
        kept: the tokens that top-k, top-p and min-p left at each position.
        targets: the sampled token of each position.
        first_column, columns: first token id of the shard, and number of its token ids.
        shape: maximum numbers of rows and columns of a tile.
    """
    rows = torch.arange(len(kept)).repeat_interleave(kept.counts.long())
    ids = kept.ids.long() - first_column
    own = (ids >= 0) & (ids < columns)
    rows, ids, targets = rows[own], ids[own], targets.long() - first_column
    starts = range(0, len(kept), shape[0])
    bounds = torch.searchsorted(rows, torch.tensor([*starts, len(kept)])).tolist()
    for start, begin, end in zip(starts, bounds, bounds[1:], strict=False):
        of_tile = slice(start, min(start + shape[0], len(kept)))
        union, place = ids[begin:end].unique(return_inverse=True)
        goal = torch.searchsorted(union, targets[of_tile])
        is_there = goal < len(union)
        is_there &= union[goal.clamp(max=max(len(union) - 1, 0))] == targets[of_tile] if len(union) else False
        for first in range(0, len(union), shape[1]):
            part = union[first : first + shape[1]]
            inside = (place >= first) & (place < first + len(part))
            index = (rows[begin:end][inside] - start) * len(part) + place[inside] - first
            local = torch.where(is_there & (goal >= first) & (goal < first + len(part)), goal - first, -1)
            yield Tile(of_tile, part, local[:, None], kept=index)


def on_device(tiles: Sequence[Tile], device: torch.device) -> list[Tile]:
    """Return the tiles with their tensors on `device`, moved with one copy."""
    if not tiles:
        return []
    tensors = [x for tile in tiles for x in (tile.columns, tile.targets, tile.kept) if isinstance(x, Tensor)]
    moved = iter(platform.sent_together(tensors, device))
    return [Tile(tile.rows, next(moved), next(moved), kept=next(moved)) for tile in tiles]
