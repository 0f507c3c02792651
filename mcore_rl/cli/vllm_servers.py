"""The command `mcore-rl vllm-servers`: the vLLM servers that a GRPO or PPO configuration describes.

On each node, it starts the servers of this node. They run until the command ends. A server that ends is started again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Sequence

from mcore_rl import platform
from mcore_rl.cli.entry_point import Parser, count, exit_on_error, show
from mcore_rl.cli.train import load_for
from mcore_rl.config import RLConfig
from mcore_rl.config.base import whole_number
from mcore_rl.config.rl import LOOPBACK, SERVER_LOGS
from mcore_rl.errors import UserError
from mcore_rl.models.generation.vllm.placement import Node, ServerPlace, describe_places, place_servers, with_host
from mcore_rl.run.preflight import check_vllm
from mcore_rl.utils.console import counted, quiet_libraries, rank_zero_printer
from mcore_rl.utils.model_directory import check_model_directory

DESCRIPTION = (
    "Start the vLLM servers of a configuration on this node, until the command is stopped. Print generation.vllm.urls, "
    "with which a run uses them."
)
EPILOG = """\
On several nodes, start the command on each with the same words and --hosts; the run then gets the addresses of all
nodes. Under Slurm, a task knows its node; elsewhere, add --node-rank."""


def vllm_servers(arguments: Sequence[str], prog: str) -> None:
    """Run `mcore-rl vllm-servers`."""
    parser = Parser(prog=prog, description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("config", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="overrides of the file's values")
    parser.add_argument("--algorithm", choices=("grpo", "ppo"), default="grpo", help="program of the file (grpo)")
    parser.add_argument("--hosts", type=_hosts, metavar="HOST,…", help="addresses of all nodes with servers")
    parser.add_argument("--node-rank", type=int, metavar="N", help="index of this node in --hosts (SLURM_NODEID, or 0)")
    gpus = "GPUs of each node that servers may use, at most those of this node; default: those that torch finds here"
    parser.add_argument("--gpus-per-node", type=count, metavar="N", help=gpus)
    parser.add_argument("--print-urls", action="store_true", help="print the servers' addresses, and stop")
    parser.add_argument("--dry-run", action="store_true", help="check the configuration, print the table, and stop")
    parsed = parser.parse_intermixed_args(arguments)
    with exit_on_error():
        overrides = ["generation.backend=vllm", *parsed.overrides, "generation.vllm.urls=[]"]
        config = load_for(parsed.algorithm, parsed.config, overrides)
        assert isinstance(config, RLConfig), "--algorithm allows no other"
        quiet_libraries()
        places = places_on_hosts(config, parsed.hosts, parsed.gpus_per_node)
        if parsed.print_urls:
            return print(_as_override([place.url for place in places]))
        own = None if parsed.dry_run else _node_rank(parsed.node_rank, len(parsed.hosts or [LOOPBACK]))
        if own is not None:
            _check_gpus(parsed.gpus_per_node)
        check_model_directory(config.model.path)
        check_vllm(config)
        show("\n".join(describe_places(places)))
        if own is not None:
            _serve(config, [place for place in places if place.node == own], [place.url for place in places])


def _hosts(text: str) -> list[str]:
    hosts = [re.sub(r"^\[(.*)\]$", r"\1", host.strip()) for host in text.split(",")]  # brackets of IPv6 in URLs
    if not all(hosts) or len(set(hosts)) < len(hosts):
        raise argparse.ArgumentTypeError(f"must be different addresses with commas between them, got {text!r}")
    return hosts


def _node_rank(given: int | None, nodes: int) -> int:
    """Return the index of this node among the nodes with servers.

    Raises:
        UserError: there is no such node, or the index is not known.
    """
    of_slurm = os.environ.get("SLURM_NODEID", "")
    if given is None and nodes > 1 and not of_slurm:
        raise UserError(f"--node-rank: is missing; --hosts names {nodes} nodes, so give this node's index, from 0 on")
    if given is None and nodes == 1:
        return 0
    rank, told = given, f"--node-rank {given}"
    if rank is None:
        rank, told = whole_number(of_slurm), f"the environment variable SLURM_NODEID={of_slurm}"
    if rank is None or not 0 <= rank < nodes:
        remedy = "" if given is not None else "; give this node's index as --node-rank"
        raise UserError(f"{told}: --hosts names {counted(nodes, 'node')}, with the indices 0 to {nodes - 1}{remedy}")
    return rank


def _check_gpus(wanted: int | None) -> None:
    """Raise UserError if servers shall use more GPUs than torch finds on this node: the others may be another job's."""
    found = len(platform.gpu_names())
    if wanted is not None and wanted > found:
        raise UserError(
            f"--gpus-per-node {wanted}: torch finds {counted(found, 'GPU') if found else 'no GPU'} on this node, and "
            "other GPUs may belong to other jobs; "
            + (f"give {found} at most" if found else "leave it out to start servers on the CPU")
        )


def places_on_hosts(config: RLConfig, hosts: list[str] | None, gpus_per_node: int | None) -> list[ServerPlace]:
    """Return the places of the servers on all nodes.

    Args:
        hosts: addresses of the nodes; None for this node alone.
        gpus_per_node: number of GPUs of each node; None for as many as torch finds on this node. If it is larger, the
            places are those of other nodes, whose GPUs are counted from 0.

    Raises:
        UserError: the servers do not fit; or `generation.vllm.host` is another address than that of `hosts`.
    """
    host = config.generation.vllm.host
    if host is not None and hosts and hosts != [host]:
        raise UserError(
            f"generation.vllm.host={host}: --hosts gives other addresses to servers ({','.join(hosts)}); leave one out"
        )
    names = platform.gpu_names()
    if gpus_per_node is not None:
        names = names[:gpus_per_node] if len(names) >= gpus_per_node else tuple(map(str, range(gpus_per_node)))
    # With offload, the run that uses these servers trains on the same GPUs.
    trained_on = names if config.generation.offload else ()
    nodes = [Node(host, names, trained_on) for host in hosts or [LOOPBACK]]
    return place_servers(config, with_host(config, nodes))


def _as_override(urls: Sequence[str]) -> str:
    """Return the override by which a run uses the servers; URLs with brackets are quoted, as YAML needs them."""
    return f"generation.vllm.urls=[{','.join(json.dumps(url) if '[' in url else url for url in urls)}]"


def _serve(config: RLConfig, own: Sequence[ServerPlace], urls: Sequence[str]) -> None:
    """Run the servers at the places `own`; print the override for the servers `urls` when they are ready."""
    platform.initialize_platform()
    config = platform.resolve(config)
    from mcore_rl.models.generation.vllm.generation import wait_until_started
    from mcore_rl.models.generation.vllm.key import run_key
    from mcore_rl.models.generation.vllm.server import WATCH_SECONDS, VLLMServerProcesses

    # SystemExit, unlike other exceptions, leaves event loops, in which the signal may arrive.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    say = rank_zero_printer(True)
    logs = config.output_dir / SERVER_LOGS
    key = run_key(logs)
    with contextlib.closing(VLLMServerProcesses(config, logs, own, key, say)) as service:
        wait_until_started(service, config)
        print(_as_override(urls), flush=True)
        while True:
            time.sleep(WATCH_SECONDS)
            service.start_ended()
