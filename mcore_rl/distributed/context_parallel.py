"""Zigzag context parallelism: cutting whole sequences, and putting gathered ones back together."""

from __future__ import annotations

from jaxtyping import Shaped
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_rl import platform
from mcore_rl.distributed.collectives import all_gather_forward_reduce_scatter_backward, group_size
from mcore_rl.distributed.pack_layout import PackLayout


def slice_context_parallel(
    packed: Shaped[Tensor, tokens * rest], layout: PackLayout, cp_rank: int
) -> Shaped[Tensor, local_tokens * rest]:
    """[T, …] in pack order → [T / CP, …], this rank's zigzag share."""
    if layout.cp_size == 1:
        return packed
    return packed[platform.sent(layout.local_positions(cp_rank), packed.device)]


def gather_context_parallel(
    local: Shaped[Tensor, local_tokens * rest], layout: PackLayout, group: ProcessGroup | None
) -> Shaped[Tensor, tokens * rest]:
    """[T / CP, …] zigzag shares → [T, …] in pack order on every rank.

    Forward all-gathers; backward sums the ranks' gradients for the own rows (reduce-scatter), which is the adjoint
    of what was done: every rank's copy was used. So where all ranks compute the same loss from the gathered rows,
    and the gradients of parameters are then summed over the ranks, the loss counts CP times: its caller divides it
    by CP, once. Every public function that takes a `context_parallel_group` follows this.
    """
    if group_size(group) == 1:
        return local
    gathered = all_gather_forward_reduce_scatter_backward(local, group)
    return gathered[platform.sent(layout.gather_order, local.device)]
