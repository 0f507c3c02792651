"""Ends vLLM's servers if their trainer dies: `python -m mcore_rl.models.generation.vllm_server_reaper`.

It reads the numbers of process groups, one a line, "-" before those that are to be forgotten. When its input ends,
which it does however the process at the other end dies, it ends the groups that are left.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable

GRACE_SECONDS = 5.0
"""Between asking a process group to end and killing it."""


def _has_ended(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return False


def end_groups(leaders: Iterable[int], has_ended: Callable[[int], bool] = _has_ended) -> None:
    """End process groups: ask their leaders, which then remove shared memory, and after a while kill what is left.

    Args:
        has_ended: whether a leader is gone; its parent must ask otherwise, for whom it is there until waited for.
    """
    leaders = list(leaders)
    for leader in leaders:
        with contextlib.suppress(ProcessLookupError):
            os.kill(leader, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline and not all(map(has_ended, leaders)):
        time.sleep(0.05)
    for leader in leaders:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)


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
