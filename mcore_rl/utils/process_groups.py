"""Ends process groups, also those of a trainer that dies: `python -m mcore_rl.utils.process_groups` (the keeper).

The trainer starts the keeper and writes process group ids to its standard input, one per line. A "-" before an id
removes the id. The input ends when the trainer ends, for whatever reason. When the input ends, the keeper ends the
remaining groups.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable

GRACE_SECONDS = 5.0
"""Maximum time in seconds that the leaders have to end after SIGTERM. Then their groups are killed."""


def _has_ended(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return False


def _has_members(group: int) -> bool:
    """Return whether a process group has processes, also if they have ended and nobody has waited for them."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def end_groups(leaders: Iterable[int], has_ended: Callable[[int], bool] = _has_ended) -> None:
    """End process groups: send SIGTERM to their leaders, wait a few seconds, then kill what is left.

    The wait lets a leader remove its shared memory. If a leader has ended before, its whole group gets SIGTERM, so that
    the tracker of Python's shared memory, which ignores the signal, removes the blocks of the others.

    Args:
        leaders: process ids of the leaders. They are also the ids of the groups.
        has_ended: function that returns whether a leader has ended. The default checks whether the process exists. If
            this process is the leaders' parent, pass another function: an ended process exists until its parent waits.
    """
    leaders = list(leaders)
    left = [leader for leader in leaders if has_ended(leader)]
    for leader in leaders:
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if leader in left else os.kill)(leader, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline and not (all(map(has_ended, leaders)) and not any(map(_has_members, left))):
        time.sleep(0.05)
    for leader in leaders:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)


class GroupKeeper:
    """A process that ends the groups that this process has added, when this process ends."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mcore_rl.utils.process_groups"],
            stdin=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def add(self, group: int) -> None:
        self._tell(group)

    def remove(self, group: int) -> None:
        """Remove a group that has ended; another process may get its id."""
        self._tell(-group)

    def close(self) -> None:
        """End the groups that were not removed, and the keeper."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def _tell(self, number: int) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the keeper was ended from outside
            self._process.stdin.write(f"{number}\n")
            self._process.stdin.flush()


def main() -> None:
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # these are also sent to the trainer
        signal.signal(ignored, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        number = int(line)
        groups = groups | {number} if number > 0 else groups - {-number}
    end_groups(groups)


if __name__ == "__main__":
    main()
