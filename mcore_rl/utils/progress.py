"""A line now and then from what takes long."""

from __future__ import annotations

import time
from collections.abc import Callable

Say = Callable[[str], None]
"""Prints a line for the user, once however many ranks there are."""

SECONDS_BETWEEN_LINES = 10.0


def silent(message: str) -> None:
    """Says nothing."""


class Progress:
    """Says how far something is every 10 seconds; nothing if it is done before."""

    def __init__(self, what: str, say: Say) -> None:
        self._what, self._say = what, say
        self._started = self._told = time.monotonic()

    def reached(self, part: float, count: int) -> None:
        """`part` of all records is done, `count` of them."""
        now = time.monotonic()
        if now - self._told > SECONDS_BETWEEN_LINES and part > 0:
            self._told = now
            left = (now - self._started) * (1 - part) / part
            self._say(f"{self._what}: {count:,} records, {part:.0%}, about {left:,.0f} s left")
