"""The table of keys of other programs, other_names.tsv, which scripts/make_config_reference.py writes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

OTHER_NAMES = Path(__file__).parent / "other_names.tsv"
"""Path of the table."""


class OtherName(NamedTuple):
    """A key of another program, or a pattern of such keys.

    kind: algorithm for which the row holds; "" for all. here: key in this package; "" if there is none. reason: why
    there is none.
    """

    program: str
    kind: str
    there: str
    here: str
    reason: str


@functools.cache
def other_names() -> tuple[OtherName, ...]:
    """Return all rows of the table."""
    return tuple(OtherName(*line.split("\t")) for line in OTHER_NAMES.read_text("utf-8").splitlines())
