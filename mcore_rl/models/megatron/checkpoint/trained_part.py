"""The part of a trained model in a checkpoint: weights, optimizer, schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem

from mcore_rl.models.megatron.build import BuiltModel
from mcore_rl.models.megatron.checkpoint.optimizer_shards import optimizer_regions, optimizer_shards, tensor_regions
from mcore_rl.models.megatron.checkpoint.region_reader import Region
from mcore_rl.models.megatron.lora_layers import adapter_state
from mcore_rl.models.megatron.optimizer import optimizers_with_parameters

from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

TORCH_ADAM = (torch.optim.Adam, torch.optim.AdamW)
# The one optimizer format that loads under every layout.
METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient": False}


@dataclass(frozen=True)
class TrainedPart:
    """
    name: what the keys of its shards begin with, and the key of all else; "" for the policy, which has none.
    """

    model: BuiltModel
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    name: str = ""

    def weights(self) -> dict[str, Any]:
        """Megatron's description of the weights."""
        return model_state(self.model, self.name)

    def optimizer_shards(self, weights: dict[str, Any]) -> Iterator[tuple[WriteItem, Tensor]]:
        """This rank's parts of the optimizer's state, with zero moments before the first step.

        Args:
            weights: as described above.
        """
        _ensure_optimizer_state(self.optimizer)
        return optimizer_shards(self.optimizer, weights)

    def common(self) -> dict[str, Any]:
        """Return the state that all ranks share."""
        return {"optimizer": _optimizer_common(self.optimizer), "scheduler": self.scheduler.state_dict()}

    def regions(self, weights: dict[str, Any], with_optimizer: bool) -> Iterator[Region]:
        """Yield the regions to read, with this rank's memory for them.

        Args:
            weights: as described above.
        """
        yield from tensor_regions(weights)
        if with_optimizer:
            _ensure_optimizer_state(self.optimizer)
            yield from optimizer_regions(self.optimizer, weights)

    def restore_step(self, common: dict[str, Any] | None) -> None:
        """Restore the rest after the regions have been read.

        Args:
            common: the optimizer's part of what all ranks share; None where it begins anew.
        """
        if common is None:
            self.optimizer.reload_model_params()
            return
        step = common["optimizer"]["param_groups"][0].get("step")
        for inner in optimizers_with_parameters(self.optimizer):
            _set_step(inner.optimizer, step)


def _optimizer_common(optimizer: MegatronOptimizer) -> dict[Any, Any]:
    """Return the optimizer's state that all ranks share: its parameter groups, of which only the step is loaded.

    Experts have an optimizer of their own, with the same step and rates.
    """
    state = optimizers_with_parameters(optimizer)[0].state_dict()
    return {**state, "param_state_sharding_type": METADATA["distrib_optim_sharding_type"]}


def _ensure_optimizer_state(optimizer: MegatronOptimizer) -> None:
    """Zero moments before the first step: what is saved and read is what is there."""
    for inner in optimizers_with_parameters(optimizer):
        inner.init_state_fn(inner.optimizer, inner.config)
        if isinstance(inner.optimizer, TORCH_ADAM):
            for state in inner.optimizer.state.values():
                state.setdefault("step", torch.tensor(0.0))


def _set_step(optimizer: Any, step: Any) -> None:
    """torch's Adam counts in each parameter's state, in place, so each has a tensor of its own; others count in the
    parameter groups."""
    if isinstance(optimizer, TORCH_ADAM):
        for state in optimizer.state.values():
            state["step"].fill_(step)
    elif step is not None:
        for group in optimizer.param_groups:
            group["step"] = step


def _model_key(model: BuiltModel, index: int) -> str:
    return "model" if len(model.chunks) == 1 else f"model{index}"


def model_state(model: BuiltModel, name: str = "") -> dict[str, Any]:
    """Megatron's description of the model's part of a checkpoint, by chunk: of the adapters alone, where there are.

    Args:
        name: what the keys in the checkpoint begin with, of a model beside the policy.
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


def set_objects(model: BuiltModel, loaded: dict[str, Any]) -> None:
    """Set the objects that modules keep in addition to their tensors, by chunk as in `model_state`."""
    for index, chunk in enumerate(model.chunks):
        if objects := loaded.get(_model_key(model, index)):  # which Megatron drops where there are none
            chunk.load_state_dict(objects, strict=False)
