"""One trained model's part of a checkpoint: weights, optimizer, schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem

from mcore_rl.models.megatron.adapters import adapter_state
from mcore_rl.models.megatron.model import BuiltModel
from mcore_rl.models.megatron.optimizer_shards import optimizer_shards, optimizers_with_parameters

from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding  # isort: skip
from megatron.core.optimizer import MegatronOptimizer  # isort: skip
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # isort: skip

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
        """What all ranks share."""
        return {"optimizer": _optimizer_common(self.optimizer), "scheduler": self.scheduler.state_dict()}

    def wanted(self, weights: dict[str, Any], with_optimizer: bool) -> dict[str, Any]:
        """What is to be loaded."""
        found = dict(weights)
        if with_optimizer:
            _ensure_optimizer_state(self.optimizer)
            for index, inner in enumerate(optimizers_with_parameters(self.optimizer)):
                described = inner.sharded_state_dict(weights, is_loading=True, metadata=METADATA)
                found[f"moments{index}"] = described["param_state"]
        return found

    def restore(self, loaded: dict[str, Any], common: dict[str, Any] | None) -> None:
        """Take what was loaded for `wanted`.

        Args:
            common: the optimizer's part of what all ranks share; None where it begins anew.
        """
        set_model_state(self.model, loaded)
        if common is None:
            self.optimizer.reload_model_params()
            return
        step = common["optimizer"]["param_groups"][0].get("step")
        for index, inner in enumerate(optimizers_with_parameters(self.optimizer)):
            _load_optimizer(inner, step, loaded[f"moments{index}"])


def _optimizer_common(optimizer: MegatronOptimizer) -> dict[Any, Any]:
    """What all ranks share of the optimizer: its parameter groups, of which only the step is read back.

    Experts have an optimizer of their own, with the same step and rates.
    """
    state = optimizers_with_parameters(optimizer)[0].state_dict()
    return {**state, "param_state_sharding_type": METADATA["distrib_optim_sharding_type"]}


def _ensure_optimizer_state(optimizer: MegatronOptimizer) -> None:
    """Zero moments before the first step: Megatron describes only states that exist."""
    for inner in optimizers_with_parameters(optimizer):
        if not inner.optimizer.state:
            rates = [group["lr"] for group in inner.optimizer.param_groups]
            for group in inner.optimizer.param_groups:  # a step on zero gradients would still decay the weights
                group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
            inner._init_optimizer_states_with_dummy_values()
            for group, rate in zip(inner.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            for state in inner.optimizer.state.values():
                if "step" in state:
                    state["step"].zero_()


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


def set_model_state(model: BuiltModel, loaded: dict[str, Any]) -> None:
    for index, chunk in enumerate(model.chunks):
        state = loaded.get(_model_key(model, index), {})  # which Megatron drops where it holds nothing: no adapters
        if model.lora is None:
            chunk.load_state_dict(state)
            continue
        with torch.no_grad():
            for name, value in state.items():
                chunk.get_parameter(name).copy_(value)


def _load_optimizer(inner: Any, step: Any, moments: dict[Any, Any]) -> None:
    """Restore an optimizer on torch's Adam, whose `step` is a tensor in every parameter's state.

    Megatron's loader assigns one such tensor to all parameters (Adam counts in place, and would advance
    it once per parameter), then copies the moments by the state's keys and finds no saved `step`. So
    the step is taken out while the moments are copied, and put back as a tensor of each parameter's own.
    """
    own = inner.state_dict()
    for group in own["optimizer"]["param_groups"]:
        group["step"] = step
    inner.load_state_dict(own)
    steps = [(entry, entry.pop("step")) for entry in inner.optimizer.state.values() if "step" in entry]
    inner.load_parameter_state_from_fully_reshardable(moments)
    for entry, value in steps:
        entry["step"] = value.clone()
