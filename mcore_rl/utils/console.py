"""The console: lines printed by one rank, progress of long work, and silencing of libraries."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable

from rich.console import Console


def quiet_libraries() -> None:
    """Silence messages of libraries about features that are not used here."""
    warnings.filterwarnings("ignore", module=r"megatron\..*|torch\..*|transformers\..*")
    warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine|transformer_engine).*")
    for name in ("transformers", "datasets", "megatron", "torch.distributed", "torch.utils", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # every rank would print them
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # for child processes


PrintLine = Callable[[str], None]
"""Function that prints a line for the user, once for all ranks."""

SECONDS_BETWEEN_LINES = 10.0


def silent(message: str) -> None:
    """Print nothing."""


class Progress:
    """A printer of progress every 10 seconds; it prints nothing for shorter work."""

    def __init__(self, what: str, say: PrintLine) -> None:
        self._what, self._say = what, say
        self._started = self._told = time.monotonic()

    def reached(self, part: float, count: int) -> None:
        """Report that `count` records, the fraction `part` of all, are done."""
        now = time.monotonic()
        if now - self._told > SECONDS_BETWEEN_LINES and part > 0:
            self._told = now
            left = (now - self._started) * (1 - part) / part
            self._say(f"{self._what}: {count:,} records, {part:.0%}, about {left:,.0f} s left")


console = Console(soft_wrap=True, highlight=False)


def rank_zero_printer(is_writer: bool) -> PrintLine:
    """Return the `PrintLine` of this rank."""
    return (lambda message: console.print(message, markup=False)) if is_writer else silent
