"""The nodes of a check: their GPUs and versions, and a test that they share the output directory."""

from __future__ import annotations

import json
import platform as python_platform
import secrets
import socket
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mcore_rl import __version__, platform
from mcore_rl.errors import UserError
from mcore_rl.testing.cluster.plan import CheckDirectory
from mcore_rl.testing.cluster.ranks import Processes

PACKAGES = ("torch", "megatron-core", "transformers", "transformer-engine")


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


def meet_nodes(directory: Path, seconds: float, answer: Path) -> None:
    """Compare all nodes. The launch has one process on each node; its rank is the number of the node.

    Every process writes `answer`, a JSON file of its own node: the number of the node, the descriptions of all nodes,
    and a problem ("" if there is none). The check on the first node claims the output directory (`answer_claim`).

    Args:
        seconds: time limit for the nodes to meet.
    """
    processes = Processes(seconds)
    store, problem = processes.store, ""
    store.set(f"node-{processes.rank}", json.dumps(describe_node()))
    nodes = [json.loads(store.get(f"node-{rank}")) for rank in range(processes.size)]
    if processes.rank == 0:
        token = secrets.token_hex(8)
        problem = _let_check_claim(answer, seconds)
        if not problem:
            (directory / "nodes").write_text(token)
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


def _let_check_claim(answer: Path, seconds: float) -> str:
    """Ask the check that has started this launch to claim the output directory; return why it cannot, or "".

    Locks end with the process that takes them, and the process of this launch ends before the check does.
    """
    request, reply = _claim_files(answer)
    request.touch()
    deadline = time.monotonic() + seconds
    while not (text := _content(reply)):
        if time.monotonic() > deadline:
            return "the check on node 0 does not claim the output directory"
        time.sleep(0.1)
    problem: str = json.loads(text)
    return problem


def answer_claim(directory: CheckDirectory, answer: Path) -> None:
    """Claim the output directory once the launch of `meet_nodes` asks for it. A check calls this again and again."""
    request, reply = _claim_files(answer)
    if not request.exists() or reply.exists():
        return
    problem = ""
    try:
        directory.claim()
    except UserError as error:
        problem = str(error)
    partial = reply.with_suffix(".partial")
    partial.write_text(json.dumps(problem))
    partial.replace(reply)


def _claim_files(answer: Path) -> tuple[Path, Path]:
    """Return the file by which a launch asks its check to claim the directory, and the file with the check's reply."""
    return answer.with_name("claim.request"), answer.with_name("claim.reply")


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
