"""Adapters of routed experts in PEFT's format, whose files hold those of all experts of a layer as one tensor.

transformers keeps a layer's experts as two parameters, [experts, rows, columns]: gate and up in one, down in the other.
PEFT adapts such parameters (`target_parameters`) by an A of [experts · rank, columns], expert after expert, and a B of
[rows, rank · experts], whose column r · experts + e is column r of expert e's own B.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_rl.models.megatron.weight_mapping import Shape, TensorSource

GATE_UP, DOWN = TARGETS = ("experts.gate_up_proj", "experts.down_proj")
"""Names of the parameters of transformers that can have adapters."""
MODULE = "mlp."
"""The module of a layer that holds `experts` in transformers."""
_OF_EXPERT = re.compile(r"^(.*)\[(\d+)/(\d+)\]$")


def is_expert_target(target: str) -> bool:
    return target in TARGETS


def module_of(layer: str, target: str, targets: Iterable[str]) -> str:
    """The module that PEFT makes for a target: of two on one module, one is around the other.

    Args:
        layer: the module of a layer in the Hugging Face model, with a dot behind it.
    """
    is_inner = target == GATE_UP and DOWN in targets
    return f"{layer}{MODULE}experts" + (".base_layer" if is_inner else "")


def of_expert(name: str, expert: int, count: int) -> str:
    """The name of one expert's part of a tensor of all `count`."""
    return f"{name}[{expert}/{count}]"


def stacked_shapes(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Shapes of single experts' matrices → those of PEFT's tensors; all others as they are."""
    found: dict[str, Shape] = {}
    for name, (rows, columns) in shapes.items():
        if match := _OF_EXPERT.match(name):
            count = int(match[3])
            found[match[1]] = (rows * count, columns) if ".lora_A." in name else (rows, columns * count)
        else:
            found[name] = (rows, columns)
    return found


def stack_experts(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Single experts' matrices → PEFT's tensors, each where its last expert is there; all others as they come."""
    waiting: dict[str, list[Tensor]] = {}
    for name, tensor in tensors:
        match = _OF_EXPERT.match(name)
        if match is None:
            yield name, tensor
            continue
        whole, expert, count = match[1], int(match[2]), int(match[3])
        held = waiting.setdefault(whole, [])
        assert len(held) == expert, f"{name} came after expert {len(held) - 1}"
        held.append(tensor)
        if len(held) == count:
            experts = waiting.pop(whole)
            yield whole, torch.cat(experts) if ".lora_A." in whole else torch.stack(experts, dim=-1).flatten(1)


@dataclass(frozen=True)
class SingleExperts:
    """PEFT's tensors, from which those of single experts can be read too."""

    source: TensorSource
    rank: int

    def read(self, name: str, rows: slice = slice(None), columns: slice | None = None) -> Tensor:
        """`tensor[rows, columns]`."""
        match = _OF_EXPERT.match(name)
        if match is None:
            return self.source.read(name, rows, columns)
        whole, expert, count = match[1], int(match[2]), int(match[3])
        if ".lora_A." in whole:
            start, stop, _ = rows.indices(self.rank)
            return self.source.read(whole, slice(expert * self.rank + start, expert * self.rank + stop), columns)
        return self.source.read(whole, rows)[:, expert::count][:, columns or slice(None)]
