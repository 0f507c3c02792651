"""Rows of tokens on their way between ranks: for each token the bytes of all its columns, without padding.

Rows differ in length and ranks in how many they have, so that what travels is one tensor [tokens, bytes], whose layout
follows from the rows' lengths and the columns, which all ranks know.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Shaped, UInt8
from torch import Tensor

from mcore_rl import platform
from mcore_rl.distributed.collectives import all_reduce, broadcast_in_replica
from mcore_rl.distributed.topology import ParallelDimension, Topology
from mcore_rl.errors import ContractError


@dataclass(frozen=True)
class TokenColumn:
    """An entry [B, S, …] of a batch; `shape` is that of a token's values, `padding` stands behind the end of a row."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    padding: float = 0

    @property
    def nbytes(self) -> int:
        """Bytes of a token."""
        return math.prod(self.shape) * self.dtype.itemsize


def packed(
    rows: Mapping[str, Shaped[Tensor, "B S ..."]], lengths: Sequence[int], columns: Sequence[TokenColumn]
) -> UInt8[Tensor, "tokens bytes"]:
    """The columns' bytes of every token of right-padded rows, one row after the other; without rows nothing is read.

    Raises:
        ContractError: a column of other values than it says.
    """
    if not lengths:
        return torch.empty(0, bytes_of(columns), dtype=torch.uint8)
    parts = []
    for column in columns:
        values = rows[column.name]
        if (values.dtype, tuple(values.shape[2:])) != (column.dtype, column.shape):
            raise ContractError(f"packed: {column} is {values.dtype} of shape {tuple(values.shape)}")
        flat = values[_is_token(lengths, values.shape[1])]
        parts.append(flat.reshape(len(flat), math.prod(column.shape)).contiguous().view(torch.uint8))
    return torch.cat(parts, dim=1)


def bytes_of(columns: Sequence[TokenColumn]) -> int:
    """Bytes of a token in all columns."""
    return sum(column.nbytes for column in columns)


def unpacked(
    tokens: UInt8[Tensor, "tokens bytes"], lengths: Sequence[int], columns: Sequence[TokenColumn]
) -> dict[str, Shaped[Tensor, "B S ..."]]:
    """The inverse of `packed`: each column of rows of these lengths, as wide as the longest (1 if there is none)."""
    width = max(lengths, default=1)
    is_token, rows = _is_token(lengths, width), dict[str, Tensor]()
    parts = tokens.split([column.nbytes for column in columns], dim=1)
    for column, part in zip(columns, parts, strict=True):
        shape = (len(lengths), width, *column.shape)
        rows[column.name] = torch.full(shape, column.padding, dtype=column.dtype)
        # A copy begins at an address that every precision can be read from, and has no gaps.
        values = part.clone(memory_format=torch.contiguous_format).view(column.dtype)
        rows[column.name][is_token] = values.view(len(part), *column.shape)
    return rows


def _is_token(lengths: Sequence[int], width: int) -> Tensor:
    """[B, S] False in the padding."""
    return torch.arange(width) < torch.tensor(lengths, dtype=torch.long)[:, None]


def rows_of_replica(
    own: Mapping[str, Shaped[Tensor, "B S ..."]],
    held: Sequence[int],
    wanted: Sequence[Sequence[int]],
    lengths: Sequence[int],
    columns: Sequence[TokenColumn],
    topology: Topology,
) -> dict[str, Shaped[Tensor, "b s ..."]]:
    """The columns of the rows that this replica wants, in its order, on all of its ranks. Collective over all ranks.

    Args:
        own: right-padded, on the host, the rows `held`, each by the first rank of one replica, in this order.
        wanted: by replica, the rows that it gets; the same on all ranks.
        lengths: tokens of each row of the global batch.
    """
    own_lengths = [lengths[row] for row in wanted[topology.data.rank]]
    tokens = torch.empty(sum(own_lengths), bytes_of(columns), dtype=torch.uint8, device=platform.device())
    if topology.leads_replica:
        sent = packed(own, [lengths[row] for row in held], columns).to(platform.device())
        tokens = exchange_tokens(sent, held, wanted, lengths, topology.data)
    return unpacked(broadcast_in_replica(tokens, topology).cpu(), own_lengths, columns)


def exchange_tokens(
    own: UInt8[Tensor, "own_tokens bytes"],
    held: Sequence[int],
    wanted: Sequence[Sequence[int]],
    lengths: Sequence[int],
    replicas: ParallelDimension,
) -> UInt8[Tensor, "wanted_tokens bytes"]:
    """The tokens of the rows that this replica wants, in its order, from those that hold them. Collective over first
    ranks: a sum of 8 bytes a row of the global batch, and one all-to-all.

    Args:
        own: of the rows `held`, one after the other; each row is held by one replica.
        wanted: by replica, the rows that it gets; the same on all of them.
        lengths: tokens of each row of the global batch.
    """
    holders = torch.zeros(len(lengths), dtype=torch.long, device=own.device)
    holders[list(held)] = replicas.rank
    holder_of = all_reduce(holders, replicas.group).tolist()
    rows = dict(zip(held, own.split([lengths[row] for row in held]), strict=True))
    going = [[row for row in some if holder_of[row] == replicas.rank] for some in wanted]
    coming = [[row for row in wanted[replicas.rank] if holder_of[row] == rank] for rank in range(replicas.size)]
    sizes_in, sizes_out = ([sum(lengths[row] for row in some) for some in parts] for parts in (coming, going))
    sent = torch.cat([own[:0], *(rows[row] for some in going for row in some)])
    received = sent
    if replicas.size > 1:
        received = own.new_empty(sum(sizes_in), own.shape[1])
        torch.distributed.all_to_all_single(
            received, sent, output_split_sizes=sizes_in, input_split_sizes=sizes_out, group=replicas.group
        )
    arrived = [row for some in coming for row in some]
    by_row = dict(zip(arrived, received.split([lengths[row] for row in arrived]), strict=True))
    return torch.cat([own[:0], *(by_row[row] for row in wanted[replicas.rank])])
