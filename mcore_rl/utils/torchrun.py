"""Values that torchrun passes to each process, read from the environment in one place."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def is_launched() -> bool:
    """Return whether this process was launched as one rank of several (by torchrun, a Ray actor, a test)."""
    return "RANK" in os.environ


def is_under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def rank() -> int:
    return int(os.environ.get("RANK", 0))


def local_rank() -> int:
    """Return the rank of this process on its node."""
    return int(os.environ.get("LOCAL_RANK", 0))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def set_world_size(size: int) -> None:
    """Set the number of processes for a run that is only described."""
    os.environ["WORLD_SIZE"] = str(size)


def node() -> int:
    """Return the index of this node among torchrun's nodes."""
    return int(os.environ.get("GROUP_RANK", 0))


def restarts() -> int:
    """Return how often torchrun has restarted the ranks."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def has_rendezvous_id() -> bool:
    """Return whether --rdzv-id names the launch, with the same name on all nodes."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "none") != "none"


def launch_id() -> str:
    """Return an id that is the same for every attempt of one torchrun and unique to it; "" without torchrun.

    Without --rdzv-id, it is the name of this node's log directory, which torchrun creates for each launch.
    """
    if not is_under_torchrun() or has_rendezvous_id():
        return os.environ.get("TORCHELASTIC_RUN_ID", "")
    logs = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parent.parent.parent  # …/attempt_0/RANK/error.json
    return f"{socket.gethostname()}:{logs}"


def error_file() -> Path | None:
    """Return the file in which torchrun looks for a rank's error."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(path) if path else None
