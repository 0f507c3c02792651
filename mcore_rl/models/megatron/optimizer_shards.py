"""What each rank holds of the optimizer's state, as parts of whole tensors: nothing is gathered to be saved.

The distributed optimizer gives every data-parallel rank a range of each parameter's numbers, in
row-major order. Such a range is at most a few rectangles: the end of a row, whole rows, the beginning of
a row. A checkpoint stores rectangles of any size, so each rank writes its own. Keys and shapes are those
of Megatron's `fully_reshardable` format, which Megatron itself reads back under any layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from megatron.core.dist_checkpointing.dict_utils import nested_values  # isort: skip
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory  # isort: skip
from megatron.core.optimizer import MegatronOptimizer  # isort: skip

Shape = tuple[int, ...]


def optimizers_with_parameters(optimizer: MegatronOptimizer) -> list[Any]:
    """Of the optimizers of dense parameters and of experts, those that this rank holds a part of."""
    inners = optimizer.chained_optimizers
    held = (inner for inner in inners if inner.optimizer is not None)  # the dense, where experts alone are trained
    return [inner for inner in held if any(group["params"] for group in inner.optimizer.param_groups)]


def optimizer_shards(optimizer: MegatronOptimizer, model_state: dict[str, Any]) -> Iterator[tuple[WriteItem, Tensor]]:
    """This rank's parts of fp32 parameters and moments, as views of the optimizer's memory.

    Args:
        model_state: Megatron's description of the model, whose places and shapes the optimizer's state shares.
    """
    described = {id(entry.data): entry for entry in nested_values(model_state) if hasattr(entry, "data")}
    for inner in optimizers_with_parameters(optimizer):
        for parameter in inner.model_param_gbuf_map:
            entry = described[id(parameter)]
            if any(entry.replica_id[:-1]):  # another tensor-parallel rank or stage writes it
                continue
            owned = inner._get_model_param_range_map(parameter)["param"]
            for name, values in inner._get_main_param_and_optimizer_states(parameter).items():
                if name != "step":  # one number, kept with the parameter groups
                    for part in parts_of(entry):
                        first = part.data.storage_offset() - parameter.storage_offset()
                        key = f"optimizer.state.{name}.{part.key}"
                        yield from _write_items(key, part, first, values, owned.start, owned.end)


def parts_of(entry: ShardedTensor | ShardedTensorFactory) -> list[ShardedTensor]:
    """A parameter's places in whole tensors: one, or several where it is stored in parts that lie side by side."""
    return list(nested_values(entry.build())) if isinstance(entry, ShardedTensorFactory) else [entry]


def _write_items(
    key: str, part: ShardedTensor, first: int, values: Tensor, start: int, end: int
) -> Iterator[tuple[WriteItem, Tensor]]:
    """`values` are the numbers start … end − 1 of a parameter, `part` a piece of it that begins at number `first`."""
    low, high = max(start, first), min(end, first + part.data.numel())
    if low >= high:
        return
    prepended = part.prepend_axis_num
    place, ones = part.global_offset, (1,) * prepended
    for offsets, sizes, begin, stop in rectangles(low - first, high - first, tuple(part.data.shape)):
        local = (*(0 for _ in ones), *offsets)
        at = torch.Size(a + b for a, b in zip(place, local, strict=True))
        size = torch.Size((*ones, *sizes))
        item = WriteItem(
            index=MetadataIndex(key, at),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(at, size),
                properties=TensorProperties(dtype=values.dtype),
                size=torch.Size(part.global_shape),
            ),
        )
        yield item, values.detach()[first + begin - start : first + stop - start].view(size)


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
