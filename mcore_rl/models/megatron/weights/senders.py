"""Division of the model's weights among senders: the ranks that gather whole Hugging Face tensors and send them.

The first data-parallel replica sends; of an expert's weights, the first rank with each shard. Every pipeline stage
sends its own layers. Within a stage, a weight's tensor-parallel ranks take turns, and each expert-parallel rank sends
its own experts. So each weight is gathered over the ranks that hold its shards, and never passes another stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from mcore_rl import platform
from mcore_rl.distributed.topology import ParallelDimension
from mcore_rl.models.megatron.layers.vision import VISION_TOWER
from mcore_rl.models.megatron.model.gpt_model import ModelShard
from mcore_rl.models.megatron.weight_mapping import Mapping, Part, assemble, tensor_shapes
from mcore_rl.models.megatron.weights.conversion import (
    GLOO_BYTES,
    adapters_of,
    cut_over,
    expert_rank_of,
    named_mappings,
    stage_of,
)


class Sender(NamedTuple):
    """The place of a sender in the layout.

    stage: its pipeline-parallel rank.
    expert: its expert-parallel rank; None for a sender of weights that are not experts.
    shard: its rank among the ranks over which the weights are sharded (`conversion.cut_over`).
    """

    stage: int
    expert: int | None
    shard: int


@dataclass(frozen=True)
class Shipment:
    """Weights that one sender gathers and sends together.

    mappings: the weights; those with Hugging Face tensors in common are together.
    nbytes: size of their Hugging Face tensors.
    is_frozen: whether they are weights of a frozen vision tower, which never change.
    """

    sender: Sender
    mappings: tuple[Mapping, ...]
    nbytes: int
    is_frozen: bool = False


def plan_shipments(model: ModelShard, bucket_bytes: int) -> list[Shipment]:
    """Divide the model's weights among senders; the result is the same on every rank.

    A shipment has at most `bucket_bytes` bytes, or only weights that cannot be divided. Shipments of weights that never
    change are the last ones. Ranks gather, send and receive the shipments of a stage in the order of this list.
    Otherwise a sender could wait for a receiver that waits for another sender, which waits for the first one to gather.
    """
    sizes = _sizes(model)
    open_ones, closed = dict[tuple[int, int | None, bool], _Open](), list[_Open]()
    for mappings in joined(model.family.table.values()):
        stages = {stage_of(mapping, model) for mapping in mappings}
        assert len(stages) == 1, f"{mappings[0].hf_names} are on several pipeline stages"
        expert = expert_rank_of(mappings[0], model) if mappings[0].is_expert else None
        place = stages.pop(), expert, _is_frozen(mappings[0], model)
        nbytes = sum(sizes[name] for name in tensor_shapes(mappings))
        current = open_ones.get(place)
        if current is None or current.nbytes + nbytes > bucket_bytes:
            shards = cut_over(mappings[0], model.topology).size
            shard = 0 if current is None else (current.shard + 1) % shards
            current = open_ones[place] = _Open(place, shard)
            closed.append(current)
        current.mappings += mappings
        current.nbytes += nbytes
    counts = Counter[int]()
    turns = list[tuple[bool, int, int, Shipment]]()
    for one in closed:  # stages take turns, because they gather at the same time
        stage, expert, is_frozen = one.place
        shipment = Shipment(Sender(stage, expert, one.shard), tuple(one.mappings), one.nbytes, is_frozen)
        turns.append((is_frozen, counts[stage], stage, shipment))
        counts[stage] += 1
    return [shipment for *_, shipment in sorted(turns, key=lambda turn: turn[:3])]


@dataclass
class _Open:
    place: tuple[int, int | None, bool]
    shard: int
    nbytes: int = 0
    mappings: list[Mapping] = field(default_factory=list)


def _is_frozen(mapping: Mapping, model: ModelShard) -> bool:
    """Return whether a weight belongs to a frozen vision tower."""
    return model.tower is not None and not model.tower.is_trained and mapping.megatron.startswith(VISION_TOWER)


def _sizes(model: ModelShard) -> dict[str, int]:
    """Return the size in bytes of each Hugging Face tensor."""
    wide, itemsize = model.family.float32_tensors(), model.chunks[0].config.params_dtype.itemsize
    return {
        name: torch.Size(shape).numel() * (torch.float32.itemsize if name in wide else itemsize)
        for name, shape in model.family.shapes().items()
    }


def joined(mappings: Iterable[Mapping]) -> list[list[Mapping]]:
    """Group mappings that have Hugging Face tensors in common, directly or through others, in the order given."""
    group_of = dict[str, list[Mapping]]()
    for mapping in mappings:
        merged = [mapping]
        names = [name for name in mapping.hf_names if name]  # a part without a name is in no file
        for earlier in {id(group): group for name in names if (group := group_of.get(name))}.values():
            merged = [*earlier, *merged]
        for member in merged:
            group_of.update(dict.fromkeys(filter(None, member.hf_names), merged))
    return list({id(group): group for group in group_of.values()}.values())


def sends(shipment: Shipment, model: ModelShard) -> bool:
    """Return whether this rank sends `shipment`."""
    sender, ranks = shipment.sender, cut_over(shipment.mappings[0], model.topology)
    has_experts = sender.expert is None or model.topology.expert.rank == sender.expert
    return _gathers(sender, model) and has_experts and ranks.rank == sender.shard


def _gathers(sender: Sender, model: ModelShard) -> bool:
    """Return whether this rank belongs to the stage and the replica that send."""
    top = model.topology
    replica = top.data.rank + top.context.rank if sender.expert is None else top.expert_data.rank
    return top.pipeline.rank == sender.stage and replica == 0


def gather_shipments(
    model: ModelShard, shipments: Sequence[Shipment]
) -> Iterator[tuple[Shipment, Iterator[tuple[str, Tensor]]]]:
    """Gather the weights of `shipments`; yield those in which this rank takes part, each with an iterator.

    The iterator must be exhausted. On the sender it yields names and values of Hugging Face tensors, elsewhere nothing.
    A tensor is valid only until the next one is yielded. Adapters are merged.
    """
    own = {mapping.megatron: tensor.detach() for mapping, tensor in named_mappings(model)}
    adapters = adapters_of(model)
    dtype = model.chunks[0].config.params_dtype

    @torch.no_grad()
    def pieces(shipment: Shipment) -> Iterator[tuple[Part, Tensor]]:
        for mapping in shipment.mappings:
            shard, adapter = own.get(mapping.megatron), adapters.get(mapping.megatron)
            if shard is not None and adapter is not None:
                shard = adapter.merged(shard)
            whole = _gathered(mapping, shard, shipment.sender, torch.float32 if mapping.is_float32 else dtype, model)
            if whole is not None:
                yield from mapping.split(whole)

    for shipment in shipments:
        if _gathers(shipment.sender, model):
            yield shipment, assemble(pieces(shipment), tensor_shapes(shipment.mappings), copies=False)


def _gathered(
    mapping: Mapping, shard: Tensor | None, sender: Sender, dtype: torch.dtype, model: ModelShard
) -> Tensor | None:
    """Return a parameter's shards [number of shards, …] on the sender; None on other ranks.

    Args:
        shard: this rank's shard; None if this rank has no shard.
    """
    top, ranks = model.topology, cut_over(mapping, model.topology)
    size = 1 if mapping.kind.partition_dim is None else ranks.size
    receives = ranks.rank == sender.shard
    stacked = None
    if shard is not None:
        stacked = gather_to(shard, ranks, sender.shard) if size > 1 else shard.unsqueeze(0)
    if not receives:
        return None
    if sender.expert is None:
        return stacked
    source = expert_rank_of(mapping, model)
    if source != sender.expert and top.expert.rank == source:
        assert stacked is not None, "the owner has gathered the shards"
        torch.distributed.send(stacked.contiguous(), group=top.expert.group, group_dst=sender.expert)
    if top.expert.rank != sender.expert:
        return None
    if source != sender.expert:
        shape = (size, *mapping.kind.shard_shape(mapping.parts, ranks.size))
        stacked = torch.empty(shape, dtype=dtype, device=platform.device())
        torch.distributed.recv(stacked, group=top.expert.group, group_src=source)
    return stacked


def gather_to(shard: Tensor, ranks: ParallelDimension, destination: int) -> Tensor | None:
    """Gather the shards […] of all `ranks` on rank `destination`: there [number of ranks, …], elsewhere None."""
    own, whole = shard.contiguous().view(-1), None
    if ranks.rank == destination:
        whole = shard.new_empty((ranks.size, *shard.shape))
    # gloo stores what it gathers twice, so on the CPU a large tensor is gathered in pieces.
    numbers = own.numel() if platform.has_gpu() else max(1, GLOO_BYTES // (ranks.size * shard.itemsize))
    for start in range(0, own.numel(), numbers):
        piece = own[start : start + numbers]
        into = None if whole is None else [x[start : start + numbers] for x in whole.view(ranks.size, -1)]
        torch.distributed.gather(piece, into, group=ranks.group, group_dst=destination)
    return whole
