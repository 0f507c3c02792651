"""Operations of matrix products, by torch's own counter."""

import contextlib

from torch.utils.flop_counter import FlopCounterMode


class _NoModules(contextlib.nullcontext[None]):
    """In the place of the counter's tracker of modules: of it, only what everything is counted under.

    The tracker hooks the inputs and outputs of every module and keeps the hooks, and with them whatever is computed
    again in a backward pass, until the counting ends: memory that no other run takes.
    """

    parents = frozenset({"Global"})


def product_counter() -> FlopCounterMode:
    """A mode whose `get_total_flops` are those of the matrix products while it is entered."""
    counter = FlopCounterMode(display=False)
    counter.mod_tracker = _NoModules()  # type: ignore[assignment]
    return counter
