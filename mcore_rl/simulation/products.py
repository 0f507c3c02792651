"""Operations of matrix products, by torch's own counter and of what it leaves out."""

import contextlib
import math
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode


def _grouped_product(rows: tuple[int, ...], weights: tuple[int, ...], *_: Any, **__: Any) -> int:
    """[T, in] by [experts, in, out], each row by one of them, or [out, T] by [T, in], each expert's tokens apart."""
    return 2 * math.prod(rows) * weights[-1]


_GROUPED_PRODUCTS = {torch.ops.aten._grouped_mm: _grouped_product} if hasattr(torch.ops.aten, "_grouped_mm") else {}
"""Operations of what torch's counter leaves out; older ones have no such product."""


class _NoModules(contextlib.nullcontext[None]):
    """In the place of the counter's tracker of modules: of it, only what everything is counted under.

    The tracker hooks the inputs and outputs of every module and keeps the hooks, and with them whatever is computed
    again in a backward pass, until the counting ends: memory that no other run takes.
    """

    parents = frozenset({"Global"})


def product_counter() -> FlopCounterMode:
    """A mode whose `get_total_flops` are those of the matrix products while it is entered."""
    counter = FlopCounterMode(display=False, custom_mapping=_GROUPED_PRODUCTS)
    counter.mod_tracker = _NoModules()  # type: ignore[assignment]
    return counter
