"""Metrics of several calls of a loss as one."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mcore_rl.errors import ContractError
from mcore_rl.losses.interfaces import Reduction


def reductions_of(loss_fn: Any) -> Mapping[str, Reduction]:
    """Return how a loss's metrics are reduced that are not sums; all others are summed."""
    declared: Mapping[str, Reduction] = getattr(loss_fn, "metric_reductions", {})
    if unknown := {name: kind for name, kind in declared.items() if kind not in _REDUCE}:
        raise ContractError(
            f"{type(loss_fn).__name__}.metric_reductions: {unknown}; known are {', '.join(map(repr, _REDUCE))}"
        )
    return declared


def reduce_metrics(
    parts: Sequence[Mapping[str, Any]], samples: Sequence[Any], reductions: Mapping[str, Reduction]
) -> dict[str, Any]:
    """Reduce the metrics of several calls to one dictionary.

    Args:
        samples: valid samples of each call, the weights of means.
    """
    names = dict.fromkeys(name for part in parts for name in part)
    return {
        name: _REDUCE[reductions.get(name, "sum")](
            [part[name] for part in parts if name in part],
            [count for part, count in zip(parts, samples, strict=True) if name in part],
        )
        for name in names
    }


def over_steps(steps: Sequence[Mapping[str, float]], reductions: Mapping[str, Reduction]) -> dict[str, float]:
    """Metrics of several steps as one: the mean over the steps that have it, or what is declared min or max."""
    values: dict[str, list[float]] = {}
    for metrics in steps:
        for name, value in metrics.items():
            values.setdefault(name, []).append(value)
    return {
        name: min(found) if kind == "min" else max(found) if kind == "max" else sum(found) / len(found)
        for name, found in values.items()
        for kind in [reductions.get(name)]
    }


def _sum(values: list[Any], samples: list[Any]) -> Any:
    return functools.reduce(operator.add, values)


def _mean(values: list[Any], samples: list[Any]) -> Any:
    """0 without any sample, whatever the calls made of that."""
    counted = [(torch.as_tensor(v), torch.as_tensor(n)) for v, n in zip(values, samples, strict=True)]
    total = sum(torch.where(n > 0, v * n, 0) for v, n in counted)
    return total / sum(n for _, n in counted).clamp(min=torch.finfo(torch.float32).tiny)  # type: ignore[union-attr]


def _min(values: list[Any], samples: list[Any]) -> Tensor:
    return functools.reduce(torch.minimum, map(torch.as_tensor, values))


def _max(values: list[Any], samples: list[Any]) -> Tensor:
    return functools.reduce(torch.maximum, map(torch.as_tensor, values))


_REDUCE = {"sum": _sum, "mean": _mean, "min": _min, "max": _max}
