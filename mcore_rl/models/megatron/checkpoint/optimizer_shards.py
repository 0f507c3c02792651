"""Each rank's tensors of a checkpoint, as parts of whole tensors, in the memory that training uses.

The distributed optimizer gives every data-parallel rank a range of each parameter's numbers, in
row-major order. Such a range is at most a few rectangles: the end of a row, whole rows, the beginning of
a row. A checkpoint stores rectangles of any size, so each rank writes its own and reads its own: nothing is gathered.
Keys and shapes are those of Megatron's `fully_reshardable` format, which Megatron itself reads under any layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from mcore_rl.models.megatron.checkpoint.internals import optimizer_tensors_of, owned_ranges
from mcore_rl.models.megatron.checkpoint.region_reader import Region
from mcore_rl.models.megatron.optimizer import optimizers_with_parameters
from mcore_rl.models.megatron.weight_mapping import Shape

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer import MegatronOptimizer


def optimizer_shards(optimizer: MegatronOptimizer, model_state: dict[str, Any]) -> Iterator[tuple[WriteItem, Tensor]]:
    """This rank's parts of fp32 parameters and moments, to be written.

    Args:
        model_state: Megatron's description of the model, whose places and shapes the optimizer's state shares.
    """
    for entry, region in _optimizer_regions(optimizer, model_state):
        if not any(entry.replica_id[:-1]):  # otherwise another tensor-parallel rank or stage writes it
            yield _write_item(region), region.values


def optimizer_regions(optimizer: MegatronOptimizer, model_state: dict[str, Any]) -> Iterator[Region]:
    """This rank's parts of fp32 parameters and moments, to be read; `model_state` as for `optimizer_shards`."""
    return (region for _, region in _optimizer_regions(optimizer, model_state))


def tensor_regions(described: dict[str, Any]) -> Iterator[Region]:
    """The tensors of Megatron's description, to be read into their own memory."""
    for entry in nested_values(described):
        if isinstance(entry, ShardedTensor | ShardedTensorFactory):
            memory = entry.data.untyped_storage().data_ptr()
            for part in parts_of(entry):
                assert part.data.untyped_storage().data_ptr() == memory, f"{part.key}: its parts are copies"
                values = part.data.detach()[(None,) * part.prepend_axis_num]
                yield Region(
                    part.key, tuple(part.global_offset), values, tuple(part.global_shape), part.allow_shape_mismatch
                )


def _optimizer_regions(optimizer: MegatronOptimizer, model_state: dict[str, Any]) -> Iterator[tuple[Any, Region]]:
    """Yield the optimizer's regions, with the description of their parameters."""
    described = {id(entry.data): entry for entry in nested_values(model_state) if hasattr(entry, "data")}
    for inner in optimizers_with_parameters(optimizer):
        for parameter, start, end in owned_ranges(inner):
            entry = described[id(parameter)]
            for name, values in optimizer_tensors_of(inner, parameter).items():
                for part in parts_of(entry):
                    first = part.data.storage_offset() - parameter.storage_offset()
                    for region in _rectangular_regions(part, first, values.detach(), start, end):
                        yield entry, Region(f"optimizer.state.{name}.{part.key}", *region)


def parts_of(entry: ShardedTensor | ShardedTensorFactory) -> list[ShardedTensor]:
    """A parameter's places in whole tensors: one, or several where it is stored in parts that lie side by side."""
    return list(nested_values(entry.build())) if isinstance(entry, ShardedTensorFactory) else [entry]


def _rectangular_regions(
    part: ShardedTensor, first: int, values: Tensor, start: int, end: int
) -> Iterator[tuple[Shape, Tensor, Shape, bool]]:
    """`values` are the numbers start … end − 1 of a parameter, `part` a piece of it that begins at number `first`."""
    low, high = max(start, first), min(end, first + part.data.numel())
    if low >= high:
        return
    ones = (1,) * part.prepend_axis_num
    for offsets, sizes, begin, stop in rectangles(low - first, high - first, tuple(part.data.shape)):
        local = (*(0 for _ in ones), *offsets)
        at = tuple(a + b for a, b in zip(part.global_offset, local, strict=True))
        rectangle = values[first + begin - start : first + stop - start].view(*ones, *sizes)
        yield at, rectangle, tuple(part.global_shape), part.allow_shape_mismatch


def _write_item(region: Region) -> WriteItem:
    at, size = torch.Size(region.offsets), region.values.shape
    assert region.whole is not None, "an optimizer's tensor has a shape"
    return WriteItem(
        index=MetadataIndex(region.key, at),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(at, size),
            properties=TensorProperties(dtype=region.values.dtype),
            size=torch.Size(region.whole),
        ),
    )


def rectangles(start: int, end: int, shape: Shape) -> Iterator[tuple[Shape, Shape, int, int]]:
    """The numbers start … end − 1 of a row-major tensor, cut into rectangles.

    Yields:
        offsets, sizes, and which of the numbers it covers: from, to.
    """
    if len(shape) == 1:
        yield (start,), (end - start,), start, end
        return
    row_size = math.prod(shape[1:])
    while start < end:
        row, column = divmod(start, row_size)
        if column or end - start < row_size:
            stop = min(end, (row + 1) * row_size)
            for offsets, sizes, begin, to in rectangles(column, stop - row * row_size, shape[1:]):
                yield (row, *offsets), (1, *sizes), row * row_size + begin, row * row_size + to
        else:
            rows = (end - start) // row_size
            stop = start + rows * row_size
            yield (row, *(0 for _ in shape[1:])), (rows, *shape[1:]), start, stop
        start = stop
