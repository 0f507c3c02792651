"""Operations of matrix products, by torch's own counter and of what it leaves out."""

import contextlib
import math
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode


def _grouped_product(rows: tuple[int, ...], weights: tuple[int, ...], *_: Any, **__: Any) -> int:
    """[T, in] by [experts, in, out], each row by one of them, or [out, T] by [T, in], each expert's tokens apart."""
    return 2 * math.prod(rows) * weights[-1]


def _added_product(total: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...], *_: Any, **__: Any) -> int:
    """[n, in] by [in, out], added to a sum; of torch's own one takes no dtype of the result."""
    return 2 * math.prod(a) * b[-1]


_LEFT_OUT: dict[Any, Callable[..., int]] = {torch.ops.aten.addmm: _added_product}
"""Operations of what torch's counter leaves out; older ones have no grouped product."""
if hasattr(torch.ops.aten, "_grouped_mm"):
    _LEFT_OUT[torch.ops.aten._grouped_mm] = _grouped_product


class _Tracker(contextlib.nullcontext[None]):
    """In the place of the counter's tracker of modules: operations count under "Global" and under what computes now.

    That tracker hooks the inputs and outputs of every module and keeps the hooks, and with them whatever is computed
    again in a backward pass, until the counting ends: memory that no other run takes.
    """

    def __init__(self, now: Callable[[], Hashable]) -> None:
        super().__init__()
        self._now = now

    @property
    def parents(self) -> set[Hashable]:
        return {"Global", self._now()}


class ProductCounter(FlopCounterMode):
    """Operations of the matrix products while it is entered.

    Args:
        now: names what computes; each name has its count.
    """

    def __init__(self, now: Callable[[], Hashable]) -> None:
        super().__init__(display=False, custom_mapping=_LEFT_OUT)
        self.mod_tracker = _Tracker(now)  # type: ignore[assignment]

    @property
    def counts(self) -> dict[Any, int]:
        """The number of operations by name."""
        return {name: sum(of.values()) for name, of in self.flop_counts.items() if name != "Global"}
