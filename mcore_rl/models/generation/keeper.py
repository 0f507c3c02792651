"""A process that ends what another one started, should that one die: `python -m mcore_rl.models.generation.keeper`.

It reads the numbers of process groups, one a line, "-" before those that are to be forgotten. When its input ends,
which it does however the process at the other end dies, it ends the groups that are left.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable

GRACE_SECONDS = 5.0
"""Between asking a process group to end and killing it."""


def end_groups(groups: Iterable[int]) -> None:
    """End process groups: their leaders in order, which removes shared memory, and after a while all that is left."""
    groups = list(groups)
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.kill(group, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline and any(map(_is_there, groups)):
        time.sleep(0.05)
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def _is_there(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def main() -> None:
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # whoever sends it also ends the other process
        signal.signal(ignored, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        number = int(line)
        groups = groups | {number} if number > 0 else groups - {-number}
    end_groups(groups)


if __name__ == "__main__":
    main()
