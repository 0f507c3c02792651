"""Which replica trains on which rows of a global batch, decided alike on all of them, whoever has the tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mcore_rl import platform
from mcore_rl.data.batches import padded_rows
from mcore_rl.data.batching import Batching, UnitSize
from mcore_rl.data.token_store import TokenStore
from mcore_rl.distributed.batched_data_dict import Share
from mcore_rl.distributed.collectives import all_gather
from mcore_rl.distributed.topology import ParallelDimension


def divide(
    batching: Batching,
    lengths: Sequence[int],
    tokens_of: Callable[[Sequence[int]], Tensor],
    replicas: ParallelDimension,
    known: Sequence[int] | None = None,
) -> list[list[int]]:
    """[replica] → rows of the global batch in their order, even shares of the work. Collective over the replicas.

    Where common beginnings are shared, each replica tells the sizes of what it knows.

    Args:
        lengths: of all rows.
        tokens_of: [b, S] tokens of some rows, right-padded; not called unless beginnings are shared.
        known: rows that this replica can tell the tokens of, each known by one replica; any, if left out.
    """
    if not batching.rows_per_group:
        return batching.divide(batching.unit_sizes(lengths, torch.empty(0), range(len(lengths))))
    if known is None and (replicas.size == 1 or platform.simulates()):  # where no other replica would tell anything
        rows = range(len(lengths))
        return batching.divide(batching.unit_sizes(lengths, tokens_of(rows), rows))
    if known is None:
        size = batching.rows_per_group
        known = [row for row in range(len(lengths)) if row // size % replicas.size == replicas.rank]
    own = batching.unit_sizes([lengths[row] for row in known], tokens_of(known), known) if known else []
    return batching.divide(sorted(_all_gather_units(own, replicas), key=lambda unit: unit.rows[0]))


def share_records(
    divide: Callable[[Sequence[int], Callable[[Sequence[int]], Tensor]], list[list[int]]],
    replicas: ParallelDimension,
    units: TokenStore,
    indices: Sequence[int],
) -> tuple[Share, list[int]]:
    """This replica's share of the rows that some records make; and their records' places in `indices`. Collective.

    Args:
        divide: as that of a model.
    """
    lengths = [units.lengths_of(index) for index in indices]
    size = len(lengths[0])

    def places_of(rows: Sequence[int]) -> list[int]:
        return list(dict.fromkeys(row // size for row in rows))

    def tokens_of(rows: Sequence[int]) -> Tensor:
        sequences = [sequence.input_ids for place in places_of(rows) for sequence in units[indices[place]]]
        return padded_rows(sequences)["input_ids"]

    rows = [length for unit in lengths for length in unit]
    share = Share(divide(rows, tokens_of)[replicas.rank], len(rows), replicas)
    return share, places_of(share.indices)


def _all_gather_units(own: Sequence[UnitSize], replicas: ParallelDimension) -> list[UnitSize]:
    """Return the units of all replicas; a unit's rows are neighbours."""
    rows = [[unit.rows[0], len(unit.rows), unit.tokens, unit.cost] for unit in own]
    (most,) = Share((), 0, replicas).max(len(rows))
    padded = torch.zeros(int(most), 4, dtype=torch.float64)
    padded[: len(rows)] = torch.tensor(rows, dtype=torch.float64).view(-1, 4)
    everyone = all_gather(padded.to(platform.device()), replicas.group).flatten(0, 1).tolist()
    return [
        UnitSize(range(int(first), int(first + count)), int(tokens), cost)
        for first, count, tokens, cost in everyone
        if count
    ]
