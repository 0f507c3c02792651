"""The nodes of a check: their GPUs and versions, and a test that they share the output directory."""

from __future__ import annotations

import json
import platform as python_platform
import secrets
import shutil
import socket
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mcore_rl import __version__, platform
from mcore_rl.errors import UserError
from mcore_rl.testing.cluster.groups import Processes

PACKAGES = ("torch", "megatron-core", "transformers", "transformer-engine")
MARK = "verify.json"
"""File by which a directory is recognized as the output directory of a check."""
WRITTEN = (
    MARK, "verify.html", "plan.json", "nodes",
    "models", "data", "configs", "results", "logs", "resume", "grpo", "speed",
)  # fmt: skip
"""Everything that a check writes to its output directory."""


def describe_node() -> dict[str, Any]:
    """Return the host's name, GPUs, memory of the smallest GPU in GiB, and versions of this node."""
    gpus = platform.gpus()
    versions = {"mcore_rl": __version__, "python": python_platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "none"
    return {
        "host": socket.gethostname(),
        "gpus": [name for name, _ in gpus],
        "gpu_gib": min((memory for _, memory in gpus), default=0) / 2**30,
        "versions": versions,
    }


def claim_directory(directory: Path) -> None:
    """Create the output directory, or remove the results of an earlier check from it, and mark it.

    Raises:
        UserError: the directory contains other files, or cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        others = sorted(path.name for path in directory.iterdir() if path.name not in WRITTEN)
        if others or (any(directory.iterdir()) and not (directory / MARK).is_file()):
            named = others or sorted(path.name for path in directory.iterdir())
            raise UserError(
                f"--output {directory}: contains files that no check has written ({', '.join(named[:3])}); "
                "name another directory"
            )
        for name in WRITTEN:
            path = directory / name
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        (directory / MARK).write_text("{}\n")
    except OSError as error:
        raise UserError(f"--output {directory}: cannot be written ({error.strerror})") from None


def meet_nodes(directory: Path, seconds: float, answer: Path) -> None:
    """Compare all nodes. The launch has one process on each node; its rank is the number of the node.

    Every process writes `answer`, a JSON file of its own node: the number of the node, the descriptions of all nodes,
    and a problem ("" if there is none). The first node claims the output directory.

    Args:
        seconds: time limit for the nodes to meet.
    """
    processes = Processes(seconds)
    store, problem = processes.store, ""
    store.set(f"node-{processes.rank}", json.dumps(describe_node()))
    nodes = [json.loads(store.get(f"node-{rank}")) for rank in range(processes.size)]
    if processes.rank == 0:
        token = secrets.token_hex(8)
        try:
            claim_directory(directory)
            (directory / "nodes").write_text(token)
        except UserError as error:
            problem = str(error)
        store.set("claimed", json.dumps([problem, token]))
    problem, token = json.loads(store.get("claimed"))
    seen = not problem and _content(directory / "nodes") == token
    store.set(f"sees-{processes.rank}", str(seen))
    blind = [rank for rank in range(processes.size) if store.get(f"sees-{rank}") != b"True"]
    problem = problem or _difference(nodes)
    if blind and not problem:
        problem = (
            f"--output {directory}: node {blind[0]} does not see the files of node 0; name a directory on a file "
            "system that all nodes share"
        )
    answer.write_text(json.dumps({"node": processes.rank, "nodes": nodes, "problem": problem}))
    processes.meet("answered")


def _content(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _difference(nodes: list[dict[str, Any]]) -> str:
    """Return what differs between the first node and another one; "" if all are equal."""
    for number, node in enumerate(nodes):
        for name, value in node["versions"].items():
            if value != (first := nodes[0]["versions"][name]):
                return f"node {number} has {name} {value}, and node 0 has {first}; install one version"
        if set(node["gpus"]) != set(nodes[0]["gpus"]):
            kinds = [", ".join(sorted(set(one["gpus"]))) or "no GPU" for one in (node, nodes[0])]
            return f"node {number} has {kinds[0]}, and node 0 has {kinds[1]}; use nodes of one kind"
    return ""
