"""Which replica trains on which rows of a global batch, decided alike on all of them, whoever has the tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mcore_rl import platform
from mcore_rl.data.packing import Batching, UnitSize
from mcore_rl.distributed.collectives import all_gather
from mcore_rl.distributed.own_rows import Share
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
    if known is None:
        size = batching.rows_per_group
        known = [row for row in range(len(lengths)) if row // size % replicas.size == replicas.rank]
    own = batching.unit_sizes([lengths[row] for row in known], tokens_of(known), known) if known else []
    return batching.divide(sorted(_all_gather_units(own, replicas), key=lambda unit: unit.rows[0]))


def _all_gather_units(own: Sequence[UnitSize], replicas: ParallelDimension) -> list[UnitSize]:
    """Those of all replicas; a unit's rows are neighbours."""
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
