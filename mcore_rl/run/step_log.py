"""Files of JSON objects, one a line, each with the `step` of the run that it tells of."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


class StepLog:
    """Appends to such a file, whose steps ascend.

    A run may have been killed in the middle of a line, further than its last checkpoint: the first `append`
    removes what is there of its step and later ones; all that is there if it is a run's first step (0 or 1).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._goes_on = False

    def append(self, step: int, *entries: dict[str, Any]) -> None:
        if not self._goes_on:
            self._truncate(step)
            self._goes_on = True
        with open(self.path, "a") as file:
            file.writelines(json.dumps({"step": step, **entry}) + "\n" for entry in entries)

    def _truncate(self, step: int) -> None:
        with open(self.path, "ab+") as file:
            file.seek(0)
            earlier = (line for line, entry in _whole_lines(file) if entry["step"] < step)
            file.truncate(0 if step <= 1 else sum(len(line) for line in earlier))


def read_step_log(path: Path) -> list[dict[str, Any]]:
    """Return the entries of a log, without a last line that was cut short.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds something else.
    """
    with open(path, "rb") as file:
        return list(step_log_entries(file))


def step_log_entries(file: IO[bytes]) -> Iterator[dict[str, Any]]:
    """The same of an open file, one after the other.

    Raises:
        ValueError: it holds something else.
    """
    return (entry for _, entry in _whole_lines(file))


def _whole_lines(lines: Any) -> Iterator[tuple[bytes, dict[str, Any]]]:
    for line in lines:
        if line.endswith(b"\n"):
            entry = json.loads(line)
            if not (isinstance(entry, dict) and isinstance(entry.get("step"), int)):
                raise ValueError("a line of it is not an object with its step")
            yield line, entry
