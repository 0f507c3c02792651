"""The processes of a launch, from the environment variables that torchrun sets, and the processors of this machine."""

from __future__ import annotations

import functools
import os
import socket
from pathlib import Path

VARIABLES = ("TORCHELASTIC", "RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_", "MASTER_")
"""Beginnings of the names of the environment variables with which torchrun tells a process its place."""


def is_launched() -> bool:
    """Return whether a launcher (torchrun, a Ray actor, a test) has started this process as one of several ranks."""
    return "RANK" in os.environ


def is_under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


@functools.cache
def launcher() -> int:
    """Return the process id of this process's parent at the first call, which a program makes at its start."""
    return os.getppid()


def rank() -> int:
    return int(os.environ.get("RANK", 0))


def local_rank() -> int:
    """Return the number of this process among the processes of its node."""
    return int(os.environ.get("LOCAL_RANK", 0))


def local_world_size() -> int:
    """Return the number of processes of this launch on this node, or on all nodes if LOCAL_WORLD_SIZE is not set."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))


def processes_of_node() -> int:
    """Return the number of processes of this launch on this node as the launcher gives it; 1 if it gives none."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def processors() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def set_world_size(size: int) -> None:
    """Set the number of processes that `world_size` returns.

    A dry run (`--dry-run`) uses this, because it only describes a run of this size.
    """
    os.environ["WORLD_SIZE"] = str(size)


def node() -> int:
    """Return the index of this node among the nodes of the launch."""
    return int(os.environ.get("GROUP_RANK", 0))


def restarts() -> int:
    """Return how many times torchrun has restarted the ranks of this launch."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def may_restart() -> bool:
    """Return whether torchrun would restart the ranks of this launch if one of them failed."""
    return restarts() < int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))


def has_rendezvous_id() -> bool:
    """Return whether torchrun was given --rdzv-id, so that the launch has the same id on all nodes."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "none") != "none"


def launch_id() -> str:
    """Return an id of this launch by torchrun; "" without torchrun. It is the same after restarts of the ranks.

    The id is the argument of --rdzv-id or, without this option, the name of this node's log directory. torchrun creates
    such a directory for each launch.
    """
    if not is_under_torchrun() or has_rendezvous_id():
        return os.environ.get("TORCHELASTIC_RUN_ID", "")
    logs = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parent.parent.parent  # …/attempt_0/RANK/error.json
    return f"{socket.gethostname()}:{logs}"


def error_file() -> Path | None:
    """Return the file in which torchrun looks for this rank's error; None if torchrun has named no file."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(path) if path else None
