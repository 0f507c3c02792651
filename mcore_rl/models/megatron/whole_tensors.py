"""Whole tensors from the shards that ranks hold, one at a time.

Which pipeline stage and which expert-parallel rank have a parameter, and its shard's shape and precision, follow from
the family's table and the layout. So every rank knows what comes when, and ranks exchange nothing but the numbers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from collections.abc import Mapping as Dictionary
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from mcore_rl import platform
from mcore_rl.distributed.topology import ParallelDimension, Topology
from mcore_rl.models.megatron.build import BuiltModel
from mcore_rl.models.megatron.weight_mapping import Mapping, Shape

_IN_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_IN_EXPERT = re.compile(r"\.experts\.(\d+)\.")

# gloo holds what it gathers a second time, NCCL does not: larger tensors are gathered in pieces on the CPU.
GLOO_BYTES = 4 * 1024**2
# Ranks that have no part in an export wait for those that have at every so many parameters: at its end alone a large
# model would take longer than a collective may.
PARAMETERS_BETWEEN_MEETINGS = 64


def cut_over(mapping: Mapping, topology: Topology) -> ParallelDimension:
    """The ranks that have a shard each of a parameter, if it is cut."""
    return topology.expert_tensor if mapping.is_expert else topology.tensor


def gather_tensors(
    table: Dictionary[str, Mapping],
    own: dict[str, Tensor],
    model: BuiltModel,
    names: Collection[str] | None = None,
    copies: bool = True,
    first_only: bool = False,
    adapters: Dictionary[str, Any] = MappingProxyType({}),
) -> Iterator[tuple[str, Tensor]]:
    """Every Hugging Face tensor of a table, whole, one at a time, in the table's order; by one all-gather at most, and
    a broadcast over expert-parallel ranks and over stages where there are such. Collective over all ranks.

    Args:
        own: this rank's tensors by their names in the table; all in one precision but for those that are float32 in
            every model.
        names: only these Hugging Face tensors, the same on every rank.
        copies: give each tensor memory of its own; otherwise it is valid until the next one only.
        first_only: yield to the first rank alone, and leave out the work of all others that it has no use for: one
            data-parallel replica gathers.
        adapters: by the same names, to be merged into the tensors.
    """
    dtype = next((value.dtype for name, value in own.items() if not table[name].is_float32), torch.float32)
    wanted = [m for m in table.values() if names is None or not set(m.hf_names).isdisjoint(names)]
    for number, mapping in enumerate(wanted):
        if first_only and number % PARAMETERS_BETWEEN_MEETINGS == 0:
            torch.distributed.barrier()
        holder = _Holder(mapping, torch.float32 if mapping.is_float32 else dtype, model, first_only)
        shard = own.get(mapping.megatron)
        assert (shard is not None) == holder.is_own, f"{mapping.megatron} is on another rank than the layout says"
        whole = holder.whole(shard, adapters.get(mapping.megatron))
        if whole is not None:
            split = mapping.split(whole, copies)
            yield from ((name, tensor) for name, tensor in split if names is None or name in names)


class _Holder:
    """The owner of a parameter, and its way to all ranks, or to the first."""

    def __init__(self, mapping: Mapping, dtype: torch.dtype, model: BuiltModel, first_only: bool) -> None:
        self.mapping, self.dtype, self.topology = mapping, dtype, model.topology
        self.ranks = cut_over(mapping, model.topology)
        self.stage = _stage_of(mapping, model)
        self.expert_rank = _expert_rank_of(mapping, model)
        top = model.topology
        replica = top.expert_data.rank if mapping.is_expert else top.data.rank + top.context.rank
        # The first replica; of it those that have the first shard; of these the first rank's peers on all stages.
        self.gathers = not first_only or replica == 0
        self.passes_on = not first_only or (self.gathers and self.ranks.rank == 0)
        self.crosses_stages = not first_only or top.data.rank + top.context.rank + top.tensor.rank == 0
        self.yields = self.crosses_stages and (not first_only or top.pipeline.rank == 0)

    @property
    def is_own(self) -> bool:
        there = self.stage == self.topology.pipeline.rank
        return there and (not self.mapping.is_expert or self.expert_rank == self.topology.expert.rank)

    def whole(self, shard: Tensor | None, adapter: Any) -> Tensor | None:
        """All shards stacked, [TP, …] ([1, …] if it is not cut), where it is yielded; None elsewhere."""
        size = 1 if self.mapping.kind.partition_dim is None else self.ranks.size
        shape = self.mapping.kind.shard_shape(self.mapping.parts, self.ranks.size)
        stacked = None
        if shard is not None and self.gathers:
            assert tuple(shard.shape) == shape, f"{self.mapping.megatron} is {tuple(shard.shape)}, not {shape}"
            shard = shard if adapter is None else adapter.merged(shard)
            stacked = shard.unsqueeze(0) if size == 1 else _gather(shard, self.ranks)
        if self.mapping.is_expert and self.stage == self.topology.pipeline.rank and self.passes_on:
            stacked = self._sent(stacked, (size, *shape), self.topology.expert, self.expert_rank)
        if self.crosses_stages:
            stacked = self._sent(stacked, (size, *shape), self.topology.pipeline, self.stage)
        return stacked if self.yields else None

    def _sent(self, tensor: Tensor | None, shape: Shape, ranks: ParallelDimension, source: int) -> Tensor | None:
        """`tensor` of rank `source` of a group, on all of its ranks."""
        if ranks.size == 1:
            return tensor
        if ranks.rank != source:
            tensor = torch.empty(shape, dtype=self.dtype, device=platform.device())
        assert tensor is not None, "the source has it"
        tensor = tensor.contiguous()
        torch.distributed.broadcast(tensor, group=ranks.group, group_src=source)
        return tensor


def _stage_of(mapping: Mapping, model: BuiltModel) -> int:
    if match := _IN_LAYER.match(mapping.megatron):
        return model.stages[int(match[1])]
    return 0 if mapping.megatron.startswith("embedding.") else model.topology.pipeline.size - 1


def _expert_rank_of(mapping: Mapping, model: BuiltModel) -> int:
    """Return the expert-parallel rank that holds the expert; all ranks hold the same number of experts."""
    match = _IN_EXPERT.search(mapping.megatron) if mapping.is_expert else None
    return int(match[1]) // model.experts_per_rank if match else 0


def _gather(shard: Tensor, ranks: ParallelDimension) -> Tensor:
    """[…] on each rank → [size, …]."""
    stacked = shard.new_empty((ranks.size, *shard.shape))
    own, whole = shard.contiguous().view(-1), stacked.view(ranks.size, -1)
    if platform.has_gpu() or stacked.nbytes <= GLOO_BYTES:
        torch.distributed.all_gather_into_tensor(whole.view(-1), own, group=ranks.group)
        return stacked
    numbers = GLOO_BYTES // (ranks.size * shard.itemsize)
    for mine, everyones in zip(own.split(numbers), whole.split(numbers, dim=1), strict=True):
        torch.distributed.all_gather(list(everyones.unbind()), mine, group=ranks.group)
    return stacked
