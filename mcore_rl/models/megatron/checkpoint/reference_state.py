"""A reference that has moved with the policy, as a part of a checkpoint: the model's tensors once more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding

KEY = "reference"


def reference_state(model_state: Mapping[str, Any], kept: Mapping[int, Tensor]) -> dict[str, Any]:
    """Megatron's description of the reference, under any layout that of the model.

    Args:
        model_state: the model's own description.
        kept: the reference's values of the model's tensors, by their `id`.
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
