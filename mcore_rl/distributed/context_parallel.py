"""Zigzag context parallelism: cutting whole sequences, and putting gathered ones back together."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_rl.distributed.collectives import all_gather_forward_split_backward, group_size
from mcore_rl.distributed.pack_layout import PackLayout


def slice_context_parallel(packed: Tensor, layout: PackLayout, cp_rank: int) -> Tensor:
    """[T, …] in pack order → [T / CP, …], this rank's zigzag share."""
    if layout.cp_size == 1:
        return packed
    return packed[layout.local_positions(cp_rank).to(packed.device)]


def gather_context_parallel(local: Tensor, layout: PackLayout, group: ProcessGroup | None) -> Tensor:
    """[T / CP, …] zigzag shares → [T, …] in pack order on every rank.

    Forward all-gathers; backward takes this rank's own rows, so a loss that every context-parallel
    rank computes alike counts once: the gradients of the ranks add up to the whole one.
    """
    if group_size(group) == 1:
        return local
    gathered = all_gather_forward_split_backward(local, group)
    return gathered[layout.gather_order.to(local.device)]
