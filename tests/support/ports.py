"""Free ports for tests that must name a port before a process listens on it."""

import random
import socket

# Below the range from which the kernel takes ports for connections and for listeners that leave the choice to it
# (32768 and up): a port of that range that is free now may be taken by gloo before its owner listens.
CANDIDATES = range(20_000, 32_000)
_given: set[int] = set()


def free_port() -> int:
    """Return a port of this machine on which no process listens; never the same twice in a process."""
    for port in random.SystemRandom().sample(CANDIDATES, 200):
        if port in _given:
            continue
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
        _given.add(port)
        return port
    raise RuntimeError(f"none of 200 ports from {CANDIDATES} is free")
