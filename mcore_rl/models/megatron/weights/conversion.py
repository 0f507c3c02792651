"""Conversion between Hugging Face weights and Megatron weights. The family's table contains the mappings.

Import: every rank reads only its own slices of the safetensors files, without communication. Export: a generator yields
all Hugging Face tensors in the model's order. Every rank must iterate over it, because the ranks gather the shards of
each tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from collections.abc import Mapping as Dictionary
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from mcore_rl import platform
from mcore_rl.distributed.topology import ParallelDimension, Topology
from mcore_rl.errors import UserError
from mcore_rl.models.megatron.families import family_of
from mcore_rl.models.megatron.families.base import REWARD_HEAD
from mcore_rl.models.megatron.layers.vision import VISION_TOWER
from mcore_rl.models.megatron.model.gpt_model import HiddenStateGPTModel, ModelShard
from mcore_rl.models.megatron.model.hf_directory import SafetensorsDirectory
from mcore_rl.models.megatron.weight_mapping import Mapping, Part, Shape, TensorSource, assemble, tensor_shapes

_IN_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_IN_EXPERT = re.compile(r"\.experts\.(\d+)\.")

# gloo stores gathered tensors twice, NCCL does not: on the CPU larger tensors are gathered in pieces.
GLOO_BYTES = 4 * 1024**2
# Number of exported parameters after which ranks without a part in the export wait for the others. If they waited only
# at the end, the export of a large model would exceed the time limit of a collective.
PARAMETERS_BETWEEN_MEETINGS = 64


def cut_over(mapping: Mapping, topology: Topology) -> ParallelDimension:
    """Return the parallel dimension over which a parameter is sharded."""
    return topology.expert_tensor if mapping.is_expert else topology.tensor


def gather_tensors(
    table: Dictionary[str, Mapping],
    own: dict[str, Tensor],
    model: ModelShard,
    names: Collection[str] | None = None,
    copies: bool = True,
    first_only: bool = False,
    adapters: Dictionary[str, Any] = MappingProxyType({}),
) -> Iterator[tuple[str, Tensor]]:
    """Yield the Hugging Face tensors of a table with their names. The shards of a tensor are gathered from all ranks.

    The tensors are yielded in the table's order. Each tensor needs at most one all-gather, one broadcast over
    expert-parallel ranks, and one broadcast over pipeline stages. Collective over all ranks.

    Args:
        table: mappings by the parameters' names.
        own: this rank's parameters (or, for example, their gradients), by their names in the table. All have the
            same precision, except those that are float32 in every model.
        names: names of the Hugging Face tensors to yield, the same on every rank; all if None.
        copies: whether to copy each tensor. If not, a tensor is valid only until the next one is yielded.
        first_only: yield the tensors only on the first rank, and gather them from one data-parallel replica only.
        adapters: adapters to merge into the parameters, by the parameters' names.
    """
    dtype = next((value.dtype for name, value in own.items() if not table[name].is_float32), torch.float32)
    wanted = [m for m in table.values() if names is None or not set(m.hf_names).isdisjoint(names)]
    shapes = tensor_shapes(wanted)
    pieces = _gathered_parts(wanted, own, dtype, model, first_only, adapters)
    yield from assemble(
        pieces, shapes if names is None else {name: shapes[name] for name in names if name in shapes}, copies
    )


def _gathered_parts(
    wanted: Sequence[Mapping],
    own: dict[str, Tensor],
    dtype: torch.dtype,
    model: ModelShard,
    first_only: bool,
    adapters: Dictionary[str, Any],
) -> Iterator[tuple[Part, Tensor]]:
    """Gather the parameters of the mappings `wanted`; yield the parts of Hugging Face tensors, with their values."""
    for number, mapping in enumerate(wanted):
        if first_only and number % PARAMETERS_BETWEEN_MEETINGS == 0:
            torch.distributed.barrier()
        holder = _GatheredTensor(mapping, torch.float32 if mapping.is_float32 else dtype, model, first_only)
        shard = own.get(mapping.megatron)
        assert (shard is not None) == holder.is_own, f"{mapping.megatron} is on another rank than the layout says"
        whole = holder.whole(shard, adapters.get(mapping.megatron))
        if whole is not None:
            yield from mapping.split(whole)


class _GatheredTensor:
    """Knows which ranks have the shards of a parameter, and sends them to all ranks, or to the first rank only."""

    def __init__(self, mapping: Mapping, dtype: torch.dtype, model: ModelShard, first_only: bool) -> None:
        self.mapping, self.dtype, self.topology = mapping, dtype, model.topology
        self.ranks = cut_over(mapping, model.topology)
        self.stage = stage_of(mapping, model)
        self.expert_rank = expert_rank_of(mapping, model)
        top = model.topology
        replica = top.expert_data.rank if mapping.is_expert else top.data.rank + top.context.rank
        # Whether this rank is in the replica that gathers, has its first shard, and sends or receives over the stages.
        self.gathers = not first_only or replica == 0
        self.passes_on = not first_only or (self.gathers and self.ranks.rank == 0)
        self.crosses_stages = not first_only or top.data.rank + top.context.rank + top.tensor.rank == 0
        self.yields = self.crosses_stages and (not first_only or top.pipeline.rank == 0)

    @property
    def is_own(self) -> bool:
        there = self.stage == self.topology.pipeline.rank
        return there and (not self.mapping.is_expert or self.expert_rank == self.topology.expert.rank)

    def whole(self, shard: Tensor | None, adapter: Any) -> Tensor | None:
        """Return the parameter's gathered shards, [number of shards, …]; None on ranks that do not yield the tensor.

        Args:
            shard: this rank's shard; None if this rank has no shard.
            adapter: adapter to merge into the shard; None if there is no adapter.
        """
        size = 1 if self.mapping.kind.partition_dim is None else self.ranks.size
        shape = self.mapping.kind.shard_shape(self.mapping.parts, self.ranks.size)
        stacked = None
        if shard is not None and self.gathers:
            assert tuple(shard.shape) == shape, f"{self.mapping.megatron} is {tuple(shard.shape)}, not {shape}"
            shard = shard if adapter is None else adapter.merged(shard)
            stacked = shard.unsqueeze(0) if size == 1 else gather_shards(shard, self.ranks)
        if self.mapping.is_expert and self.stage == self.topology.pipeline.rank and self.passes_on:
            stacked = self._sent(stacked, (size, *shape), self.topology.expert, self.expert_rank)
        if self.crosses_stages:
            stacked = self._sent(stacked, (size, *shape), self.topology.pipeline, self.stage)
        return stacked if self.yields else None

    def _sent(self, tensor: Tensor | None, shape: Shape, ranks: ParallelDimension, source: int) -> Tensor | None:
        """Broadcast `tensor` from rank `source` to all `ranks` and return it."""
        if ranks.size == 1:
            return tensor
        if ranks.rank != source:
            tensor = torch.empty(shape, dtype=self.dtype, device=platform.device())
        assert tensor is not None, "rank `source` has the tensor"
        tensor = tensor.contiguous()
        torch.distributed.broadcast(tensor, group=ranks.group, group_src=source)
        return tensor


def stage_of(mapping: Mapping, model: ModelShard) -> int:
    """Return the pipeline stage that has a parameter."""
    if match := _IN_LAYER.match(mapping.megatron):
        return model.stages[int(match[1])]
    is_first = mapping.megatron.startswith(("embedding.", VISION_TOWER))
    return 0 if is_first else model.topology.pipeline.size - 1


def expert_rank_of(mapping: Mapping, model: ModelShard) -> int:
    """Return the expert-parallel rank of the expert that the parameter belongs to; 0 for other parameters."""
    match = _IN_EXPERT.search(mapping.megatron) if mapping.is_expert else None
    return int(match[1]) // model.experts_per_rank if match else 0


def gather_shards(shard: Tensor, ranks: ParallelDimension) -> Tensor:
    """Gather the shards […] of all `ranks` into one tensor, [number of ranks, …]."""
    stacked = shard.new_empty((ranks.size, *shard.shape))
    own, whole = shard.contiguous().view(-1), stacked.view(ranks.size, -1)
    if platform.has_gpu() or stacked.nbytes <= GLOO_BYTES:
        torch.distributed.all_gather_into_tensor(whole.view(-1), own, group=ranks.group)
        return stacked
    numbers = GLOO_BYTES // (ranks.size * shard.itemsize)
    for mine, everyones in zip(own.split(numbers), whole.split(numbers, dim=1), strict=True):
        torch.distributed.all_gather(list(everyones.unbind()), mine, group=ranks.group)
    return stacked


# Experts are stored as a list of modules, or numbered in one grouped module (Transformer Engine).
_LISTED_EXPERT = re.compile(r"\.experts\.local_experts\.(\d+)\.")
_GROUPED_EXPERT = re.compile(r"\.experts\.(linear_fc[12])\.(weight|bias|adapter)\.?(\d+)(?=\.|$)")

FLOAT32_BUFFER = ".router.expert_bias"
ADAPTER = ".adapter."


def name_in_model(name: str, first_layer: int = 0, first_expert: int = 0) -> str:
    """Convert a parameter's name in a chunk to its name in the family's table.

    Args:
        first_layer: number of the chunk's first layer in the whole model.
        first_expert: number of this rank's first expert in the whole model.
    """
    name = _IN_LAYER.sub(lambda match: f"decoder.layers.{int(match[1]) + first_layer}.", name)
    name = _LISTED_EXPERT.sub(lambda match: f".experts.{int(match[1]) + first_expert}.", name)
    return _GROUPED_EXPERT.sub(lambda match: f".experts.{int(match[3]) + first_expert}.{match[1]}.{match[2]}", name)


def named_mappings(model: ModelShard) -> Iterator[tuple[Mapping, Tensor]]:
    """Yield each of this rank's weights with its mapping, except adapters and the second copy of a tied embedding.

    Raises:
        UserError: the model family's table of weight mappings has no entry for a parameter.
    """
    for chunk in model.chunks:
        yield from ((mapping, tensor) for _, mapping, tensor in chunk_mappings(model, chunk))


def chunk_mappings(model: ModelShard, chunk: HiddenStateGPTModel) -> Iterator[tuple[str, Mapping, Tensor]]:
    """Yield the name, the mapping and the tensor of each of a chunk's weights; see `named_mappings`."""
    for name, tensor in weights_of(chunk):
        if (name == "output_layer.weight" and model.family.ties_embeddings) or ADAPTER in name:
            continue
        whole = name_in_model(name, first_layer(chunk), model.first_expert)
        if whole not in model.family.table:
            raise UserError(f"model.path: parameter {name} of the Megatron model has no Hugging Face counterpart")
        yield name, model.family.table[whole], tensor


def weights_of(chunk: HiddenStateGPTModel) -> Iterator[tuple[str, Tensor]]:
    """Yield all weights of a chunk with their names: its parameters (also the adapters' parameters) and router biases.

    Router biases are buffers, because they have no gradient.
    """
    yield from chunk.named_parameters()
    yield from ((name, buffer) for name, buffer in chunk.named_buffers() if name.endswith(FLOAT32_BUFFER))


def own_weights(model: ModelShard) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of all chunks of this rank; each name begins with the index of the chunk."""
    for index, chunk in enumerate(model.chunks):
        yield from ((f"{index}.{name}", tensor) for name, tensor in weights_of(chunk))


def first_layer(chunk: HiddenStateGPTModel) -> int:
    """Return the number of a chunk's first layer in the whole model; 0 if the chunk has no layer."""
    return int(chunk.decoder.layers[0].layer_number) - 1 if len(chunk.decoder.layers) else 0


# ---------------------------------------------------------------- import


def load_hf_weights(model: ModelShard, source: SafetensorsDirectory) -> None:
    """Read this rank's weights from a model directory, without communication.

    Raises:
        UserError: a tensor is missing, unknown, or has another shape than the config implies.
    """
    check_hf_tensors(model.family.whole, source)
    with torch.no_grad():
        for mapping, tensor in named_mappings(model):
            if mapping.hf_names == (REWARD_HEAD,) and REWARD_HEAD not in source.names():
                continue  # a language model's directory has no reward head: training starts from zeros
            tensor.copy_(read_shard(mapping, source, model.topology))
            _mark_for_norm(tensor, mapping, model.topology)
        if model.family.ties_embeddings and model.topology.is_last_stage:
            embedding = read_shard(model.family.table["embedding.word_embeddings.weight"], source, model.topology)
            model.chunks[-1].lm_head_weight().copy_(embedding)


def _mark_for_norm(tensor: Tensor, mapping: Mapping, topology: Topology) -> None:
    """Mark a weight if its gradient counts in the gradient norm on this rank, whichever tensor-parallel rank this is.

    Without a mark, the gradient is counted only on the model's first tensor-parallel rank. Sharded weights are marked
    here because Megatron marks them only if it initializes them. An expert's unsharded weight is marked on the first
    rank of the expert's tensor-parallel group, because the model's first rank may have other experts.
    """
    dimension = mapping.kind.partition_dim
    if dimension is None and mapping.is_expert and topology.expert_tensor.rank == 0:
        dimension = 0
    if dimension is not None and not getattr(tensor, "tensor_model_parallel", False):
        # Megatron's own function refuses tensors that have some of these attributes.
        attributes = {"tensor_model_parallel": True, "partition_dim": dimension, "partition_stride": 1}
        for name, value in attributes.items():
            setattr(tensor, name, value)


def read_shard(mapping: Mapping, source: TensorSource, topology: Topology) -> Tensor:
    """Return this rank's shard of a parameter, read from `source`."""
    ranks = cut_over(mapping, topology)
    return mapping.kind.read(mapping.parts, source, ranks.rank, ranks.size)


def check_hf_tensors(hf: Any, source: SafetensorsDirectory) -> None:
    """Raise an error if the tensors of a model directory do not match its configuration.

    Raises:
        UserError: a tensor is missing, unknown or misshapen, or cannot be decoded. The message names the tensor.
    """
    family = family_of(hf)
    expected = family.shapes()
    if family.has_reward_head and REWARD_HEAD not in source.names():
        del expected[REWARD_HEAD]
    found = {name for name in source.names() if not (family.ignores(name) or family.copies(name))}
    for what, names in (("lacks", set(expected) - found), ("has unknown", found - set(expected))):
        if names:
            raise UserError(
                f"model.path: {source.path} {what} tensors: {', '.join(sorted(names)[:3])} ({len(names)} in total)"
            )
    for name in (*expected, *filter(family.copies, source.names())):
        source.check(name)
    for name, value in family.constants().items():
        if name in source.names() and not torch.equal(source.read(name), value):
            raise UserError(f"model.path: {source.path}: {name} has other values than config.json determines")
    for name, shape in expected.items():
        if tuple(source.shape(name)) != shape:
            raise UserError(
                f"model.path: {source.path}: {name} has the shape {tuple(source.shape(name))}, but "
                f"config.json requires {shape}"
            )


# ---------------------------------------------------------------- export


def export_hf_weights(
    model: ModelShard,
    value_of: Callable[[Tensor], Tensor] | None = None,
    names: Collection[str] | None = None,
    copies: bool = True,
    first_only: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Gather all Hugging Face tensors of the model from all ranks; yield each with its name. Collective.

    Args:
        value_of: function that returns what to export for a parameter, for example its gradient. Default: the
            parameter's value with its adapter merged.
        names: names of the tensors to yield, the same on every rank; all if None.
        copies: whether to copy each tensor. If not, a tensor is valid only until the next one is yielded.
        first_only: yield the tensors only on the first rank, and gather them from one data-parallel replica only.
    """
    adapters = adapters_of(model) if value_of is None else {}
    value_of = value_of or torch.Tensor.detach
    own = {mapping.megatron: value_of(tensor) for mapping, tensor in named_mappings(model)}
    yield from gather_tensors(model.family.table, own, model, names, copies, first_only, adapters)


def adapters_of(model: ModelShard) -> dict[str, Any]:
    """Return this rank's adapters, by the names of the weights to which they belong."""
    return {
        f"{name_in_model(name, first_layer(chunk), model.first_expert).removesuffix('adapter')}weight": module
        for chunk in model.chunks
        for name, module in chunk.named_modules()
        if hasattr(module, "lora_A")
    }
