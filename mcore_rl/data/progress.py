"""A line now and then from what takes long."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

ItemT = TypeVar("ItemT")

Say = Callable[[str], None]
"""Prints a line for the user, once however many ranks there are."""

SECONDS_BETWEEN_LINES = 10.0


def silent(message: str) -> None:
    """Says nothing."""


def with_progress(items: Sequence[ItemT], what: str, say: Say) -> Iterator[ItemT]:
    """`items`, with a line about how far it is every 10 seconds; none if it is done before."""
    started = told = time.monotonic()
    for count, item in enumerate(items):
        if time.monotonic() - told > SECONDS_BETWEEN_LINES:
            told = time.monotonic()
            left = (told - started) / count * (len(items) - count)
            say(f"{what}: {count:,} of {len(items):,} records, about {left:,.0f} s left")
        yield item
