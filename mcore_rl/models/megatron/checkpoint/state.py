"""Describes what a checkpoint contains, as Megatron's sharded tensors: weights, optimizer state, reference weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from mcore_rl.config import TrainingConfig
from mcore_rl.models.megatron.internals import owned_parts
from mcore_rl.models.megatron.model.gpt_model import ModelShard
from mcore_rl.models.megatron.training.optimizer import TORCH_ADAM, optimizers_with_parameters
from mcore_rl.models.megatron.weight_mapping import Shape
from mcore_rl.models.megatron.weights.adapters import adapter_state

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

KEY = "reference"


def reference_state(model_state: Mapping[str, Any], kept: Mapping[int, Tensor]) -> dict[str, Any]:
    """Return the sharded state dict of the reference weights: `model_state` with the reference's names and values.

    Args:
        model_state: sharded state dict of the model.
        kept: map from the `id` of each of the model's tensors to its value in the reference.
    """
    described: dict[str, Any] = {}
    for chunk, name, entry, value in _pairs(model_state, kept):
        described.setdefault(chunk, {})[name] = replace(entry, data=value)
    add_prefix_for_sharding(described, f"{KEY}.")
    return described


def _pairs(model_state: Mapping[str, Any], kept: Mapping[int, Tensor]) -> Iterator[tuple[str, str, Any, Tensor]]:
    for chunk, entries in model_state.items():
        for name, entry in entries.items():
            if (value := kept.get(id(getattr(entry, "data", None)))) is not None:
                yield chunk, name, entry, value


def optimizer_shards(optimizer: MegatronOptimizer, model_state: dict[str, Any]) -> Iterator[tuple[WriteItem, Tensor]]:
    """Yield those parts of the fp32 parameters and moments that this rank writes.

    Args:
        model_state: sharded state dict of the model. It determines names, offsets and shapes of the parts.
    """
    for entry, region in _optimizer_regions(optimizer, model_state):
        if not any(entry.replica_id[:-1]):  # otherwise another tensor-parallel rank or stage writes it
            yield _write_item(region), region.values


def optimizer_regions(optimizer: MegatronOptimizer, model_state: dict[str, Any]) -> Iterator[Region]:
    """Yield those parts of the fp32 parameters and moments that this rank reads.

    Args:
        model_state: sharded state dict of the model, as in `optimizer_shards`.
    """
    return (region for _, region in _optimizer_regions(optimizer, model_state))


def tensor_regions(described: dict[str, Any]) -> Iterator[Region]:
    """Yield the tensors of the sharded state dict `described` as regions that share the tensors' memory."""
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
    """Yield each region of the optimizer's state, together with the parameter's entry in `model_state`."""
    described = {id(entry.data): entry for entry in nested_values(model_state) if hasattr(entry, "data")}
    for inner in optimizers_with_parameters(optimizer):
        for owned in owned_parts(inner):
            entry = described[id(owned.parameter)]
            for name, values in owned.tensors(inner).items():
                for part in parts_of(entry):
                    first = part.data.storage_offset() - owned.parameter.storage_offset()
                    for region in _rectangular_regions(part, first, values.detach(), owned.start, owned.end):
                        yield entry, Region(f"optimizer.state.{name}.{part.key}", *region)


def parts_of(entry: ShardedTensor | ShardedTensorFactory) -> list[ShardedTensor]:
    """Return the parts of a parameter. Each part is stored as a separate tensor; most parameters are a single part."""
    return list(nested_values(entry.build())) if isinstance(entry, ShardedTensorFactory) else [entry]


def _rectangular_regions(
    part: ShardedTensor, first: int, values: Tensor, start: int, end: int
) -> Iterator[tuple[Shape, Tensor, Shape, bool]]:
    """Divide a range of a parameter's elements into rectangles; elements outside `part` are left out.

    Args:
        first: index of the part's first element among the parameter's elements.
        values: the range, which is elements start … end − 1 of the parameter in row-major order.

    Yields:
        The rectangle's offsets in the stored tensor, its values, the stored tensor's shape, and whether a smaller
        tensor is allowed.
    """
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
    """Divide the elements start … end − 1 of a tensor, in row-major order, into rectangles.

    Yields:
        The rectangle's offsets and sizes, its first element, and the element after its last one.
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


RESHARDABLE = ("fully_reshardable", "fully_sharded_model_space")
"""Formats of Megatron's distributed optimizer that every parallel layout can load. Both have the same keys."""
METADATA = {
    "distrib_optim_sharding_type": RESHARDABLE[0],
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": False,
    # The optimizer of experts has the same keys as the one of other weights. Without this, Megatron-LM looks for
    # other keys.
    "chained_optim_avoid_prefix": True,
}


@dataclass(frozen=True)
class ModelState:
    """The state of one trained model in a checkpoint: weights, optimizer and schedule.

    name: prefix of the model's keys in the checkpoint; "" for the policy, whose keys have no prefix.
    """

    model: ModelShard
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    name: str = ""

    def weights(self) -> dict[str, Any]:
        """Return Megatron's sharded state dict of the weights."""
        return model_state(self.model, self.name)

    def optimizer_shards(self, weights: dict[str, Any]) -> Iterator[tuple[WriteItem, Tensor]]:
        """Yield those parts of the optimizer's state that this rank writes. Before the first step the moments are 0.

        Args:
            weights: result of `weights()`.
        """
        _ensure_optimizer_state(self.optimizer)
        return optimizer_shards(self.optimizer, weights)

    def common(self) -> dict[str, Any]:
        """Return the state of optimizer and schedule, without the parts that differ between ranks."""
        # Megatron gives experts an optimizer of their own only if they are divided over ranks.
        is_divided = self.model.chunks[0].config.expert_model_parallel_size > 1
        return {"optimizer": _optimizer_common(self.optimizer, is_divided), "scheduler": self.scheduler.state_dict()}

    def regions(self, weights: dict[str, Any], with_optimizer: bool) -> Iterator[Region]:
        """Yield those regions of weights and optimizer state that this rank reads from a checkpoint.

        Args:
            weights: result of `weights()`.
        """
        yield from tensor_regions(weights)
        if with_optimizer:
            _ensure_optimizer_state(self.optimizer)
            yield from optimizer_regions(self.optimizer, weights)

    def restore_step(self, common: dict[str, Any] | None) -> None:
        """Restore the optimizer's count of its updates. Call this after the regions have been read.

        Args:
            common: the optimizer's state that is the same on all ranks; None if the optimizer starts anew.
        """
        if common is None:
            self.optimizer.reload_model_params()
            return
        # Under expert parallelism there are two optimizers, with the same step.
        first = common["optimizer"] if "optimizer" in common else common[min(common)]["optimizer"]
        step = int(first["param_groups"][0].get("step") or 0)  # Megatron stores none before the first update
        for inner in optimizers_with_parameters(self.optimizer):
            _set_step(inner.optimizer, step)


def _optimizer_common(optimizer: MegatronOptimizer, has_two: bool) -> dict[Any, Any]:
    """Return the optimizer's parameter groups, which are the same on all ranks, in the form that Megatron-LM loads.

    Loading here reads only their entry "step", the number of updates. The experts' separate optimizer has the same
    "step" and learning rates; a pipeline stage without experts does not have it.

    Megatron's own function is not used because it reads the whole state of the optimizer. Transformer Engine's
    optimizer refuses such a read if the state contains Muon's state or moments in bfloat16.

    Args:
        has_two: whether experts have a separate optimizer.
    """
    inner = optimizers_with_parameters(optimizer)[0].optimizer
    step = {"step": _step_of(inner)}
    groups = [{name: value for name, value in group.items() if name != "params"} | step for group in inner.param_groups]
    form = {"param_state_sharding_type": METADATA["distrib_optim_sharding_type"]}
    dense = {"optimizer": {"param_groups": groups}, **form}
    if not has_two:
        return dense
    of_experts = [{**group, "is_expert_parallel": True} for group in groups]
    return {0: dense, 1: {"optimizer": {"param_groups": of_experts}, **form}}


def _ensure_optimizer_state(optimizer: MegatronOptimizer) -> None:
    """Create moments of zeros if the optimizer has no moments yet, so that its state can be saved or loaded."""
    for inner in optimizers_with_parameters(optimizer):
        inner.init_state_fn(inner.optimizer, inner.config)
        if isinstance(inner.optimizer, TORCH_ADAM):
            for group in inner.optimizer.param_groups:
                for parameter in group["params"]:
                    # The fused kernel reads the step on the parameter's device, the default form on the host.
                    step = torch.zeros((), device=parameter.device if group["fused"] else None)
                    inner.optimizer.state[parameter].setdefault("step", step)


def _step_of(optimizer: Any) -> int:
    """Return the optimizer's "step": the number of updates that it has made.

    The number is stored in the parameter groups, or in the states of the parameters.
    """
    groups = [group["step"] for group in optimizer.param_groups if group["params"] and "step" in group]
    steps = {int(step) for step in groups or [state.get("step", 0) for state in optimizer.state.values()]}
    assert len(steps) == 1, f"one step for all parameters, not {sorted(steps)}"
    return steps.pop()


def _set_step(optimizer: Any, step: int) -> None:
    """Set the optimizer's "step": the number of updates that it has made.

    PyTorch's Adam, Muon and `AdamWInBfloat16` store this number in each parameter's state, as a tensor. Other
    optimizers store it in their parameter groups.
    """
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].fill_(step)
    if not isinstance(optimizer, TORCH_ADAM):
        for group in optimizer.param_groups:
            group["step"] = step


def _model_key(model: ModelShard, index: int) -> str:
    return "model" if len(model.chunks) == 1 else f"model{index}"


def model_state(model: ModelShard, name: str = "") -> dict[str, Any]:
    """Return the sharded state dicts of the model's chunks; if there are adapters, only those of the adapters.

    Args:
        name: prefix of the keys, for a model that is trained together with the policy.
    """
    described = {
        _model_key(model, index): adapter_state(model, chunk)
        if model.lora
        else chunk.sharded_state_dict(metadata=METADATA)
        for index, chunk in enumerate(model.chunks)
    }
    if name:
        add_prefix_for_sharding(described, f"{name}.")
    return described


def stored_names(model: ModelShard) -> set[str]:
    """Return the names of the tensors that this rank's part of the model has in a checkpoint."""
    tensors = (e for e in nested_values(model_state(model)) if isinstance(e, ShardedTensor | ShardedTensorFactory))
    return {part.key for entry in tensors for part in parts_of(entry)}


def set_objects(model: ModelShard, loaded: dict[str, Any]) -> None:
    """Load the objects that a checkpoint stores in addition to the model's tensors.

    Args:
        loaded: the objects, with the same keys as in `model_state`.
    """
    for index, chunk in enumerate(model.chunks):
        if objects := loaded.get(_model_key(model, index)):  # Megatron drops the key of a chunk without objects
            chunk.load_state_dict(objects, strict=False)


@dataclass(frozen=True)
class Region:
    """A region of a tensor in a checkpoint, and this rank's memory for it.

    key: name of the tensor.
    offsets: first index of the region in each dimension.
    values: the memory. It has the region's shape, with as many dimensions as the tensor; its precision and device may
        be any.
    whole: the shape that the tensor must have; None for any shape.
    is_padded: whether the tensor may end before the region ends; the values beyond its end are then set to 0.
    """

    key: str
    offsets: Shape
    values: Tensor
    whole: Shape | None = None
    is_padded: bool = False


class MovingReference(Protocol):
    """Interface of reference weights that may change during training.

    has_moved: whether the reference weights differ from the initial weights.
    """

    has_moved: bool

    def by_tensor(self) -> dict[int, Tensor]:
        """Return a map from the `id` of each of the model's tensors to its value in the reference."""
        ...


@dataclass(frozen=True)
class TrainingState:
    """The parts of a run's state that a checkpoint contains, except the state of the training loop.

    reference: the reference weights, if the run has a copy of them. A checkpoint contains the reference weights if they
        have changed.
    beside: other models that are trained together with the policy.
    """

    policy: ModelState
    config: TrainingConfig
    reference: MovingReference | None = None
    beside: tuple[ModelState, ...] = ()

    @property
    def model(self) -> ModelShard:
        return self.policy.model

    @property
    def layout(self) -> list[int]:
        """Sizes of the parallel dimensions. Random states are valid only for the same sizes."""
        topology = self.model.topology
        return [d.size for d in (topology.tensor, topology.pipeline, topology.context, topology.data)]
