"""Placement of vLLM's servers: which node starts which server, on which of its GPUs and ports."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mcore_rl import platform
from mcore_rl.config import RLConfig
from mcore_rl.config.rl import LOOPBACK
from mcore_rl.distributed.collectives import gather_objects
from mcore_rl.errors import UserError
from mcore_rl.models.refit.transfer import local_address
from mcore_rl.utils import torchrun
from mcore_rl.utils.console import counted

LAST_PORT = 2**16 - 1


@dataclass(frozen=True)
class Node:
    """A machine on which servers can run.

    host: address at which the other nodes reach its servers.
    gpus: names of its GPUs, as in CUDA_VISIBLE_DEVICES; none if the servers run on the CPU.
    trained_on: names of the GPUs of training processes, in the order of their ranks.
    first_rank: lowest rank of the training processes of the node, which starts its servers.
    """

    host: str
    gpus: tuple[str, ...] = ()
    trained_on: tuple[str, ...] = ()
    first_rank: int = 0


@dataclass(frozen=True)
class ServerPlace:
    """The place of a server.

    node: index of its node.
    host, port: address on which it listens.
    devices: names of its GPUs, one for each of its processes; none on the CPU.
    """

    node: int
    host: str
    port: int
    devices: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"


def place_servers(config: RLConfig, nodes: Sequence[Node]) -> list[ServerPlace]:
    """Return the places of the servers that are started on `nodes`, node by node.

    With `generation.offload`, servers and training take turns on the GPUs of the training processes: the GPUs of a
    server are those of consecutive ranks. Otherwise servers get the GPUs on which nobody trains. Nodes get equal
    numbers of servers as far as their GPUs allow.

    Raises:
        UserError: the servers need more GPUs than they can use; the message contains the numbers.
    """
    vllm, size = config.generation.vllm, config.generation.vllm.tensor_parallel_size
    usable = [_usable(config, node, index) for index, node in enumerate(nodes)]
    on_gpus = any(node.gpus for node in nodes)
    rooms = [len(gpus) // size for gpus in usable]
    if vllm.num_servers == "auto":
        counts = _counts_of_auto(config, nodes, usable) if on_gpus else [1] * len(nodes)
    else:
        if on_gpus and vllm.num_servers > sum(rooms):
            raise UserError(_too_many(config, nodes, usable))
        counts = _spread(vllm.num_servers, rooms if on_gpus else None, len(nodes))
    return with_ports(
        config,
        (
            (index, node.host, gpus[number * size : (number + 1) * size])
            for index, (node, gpus, count) in enumerate(zip(nodes, usable, counts, strict=True))
            for number in range(count)
        ),
    )


def with_ports(config: RLConfig, servers: Iterable[tuple[int, str, tuple[str, ...]]]) -> list[ServerPlace]:
    """Return the places of servers with the ports from `generation.vllm.port` on.

    Args:
        servers: for each server, the index of its node, its address and the names of its GPUs. Several nodes may have
            one address.

    Raises:
        UserError: a port would be too large.
    """
    first, places, taken = config.generation.vllm.port, list[ServerPlace](), Counter[str]()
    for node, host, devices in servers:
        port = first + taken[host]
        taken[host] += 1
        if port > LAST_PORT:
            raise UserError(f"generation.vllm.port={first}: {host} has too few ports above it; lower it")
        places.append(ServerPlace(node, host, port, devices))
    return places


def _usable(config: RLConfig, node: Node, index: int) -> tuple[str, ...]:
    """Return the names of the GPUs of a node that servers can use."""
    chosen = config.generation.vllm.devices
    if chosen:
        if wrong := [number for number in chosen if number >= len(node.gpus)]:
            raise UserError(
                f"generation.vllm.devices: node {index} has no GPU {wrong[0]}; it has {counted(len(node.gpus), 'GPU')}"
            )
        gpus = tuple(node.gpus[number] for number in chosen)
        if not config.generation.offload and (both := [gpu for gpu in gpus if gpu in node.trained_on]):
            raise UserError(
                f"generation.vllm.devices: training uses GPU {node.gpus.index(both[0])} of node {index}; name another "
                "GPU, or set generation.offload=true"
            )
        return gpus
    if config.generation.offload:
        return tuple(dict.fromkeys(node.trained_on))  # several ranks may share a GPU
    return tuple(gpu for gpu in node.gpus if gpu not in node.trained_on)


def _counts_of_auto(config: RLConfig, nodes: Sequence[Node], usable: Sequence[tuple[str, ...]]) -> list[int]:
    """Return the number of servers that fill each node.

    Raises:
        UserError: there is no GPU for a server, or the GPUs of a node cannot be divided.
    """
    size = config.generation.vllm.tensor_parallel_size
    if not any(usable):
        raise UserError(
            f"generation.vllm: servers need GPUs, but {_described(nodes, usable)}; {_remedy(config, nodes)}"
        )
    if max(map(len, usable)) < size:
        room = any(len(node.gpus) >= size for node in nodes)
        raise UserError(
            f"generation.vllm.tensor_parallel_size={size}: a server must fit on one node, but "
            f"{_described(nodes, usable)}; {_remedy(config, nodes) if room else 'lower it'}"
        )
    if uneven := [index for index, gpus in enumerate(usable) if len(gpus) % size]:
        index = uneven[0]
        raise UserError(
            f"generation.vllm.tensor_parallel_size={size}: does not divide the {counted(len(usable[index]), 'GPU')} "
            f"that servers can use on node {index}; to leave GPUs unused, set generation.vllm.num_servers"
        )
    return [len(gpus) // size for gpus in usable]


def _too_many(config: RLConfig, nodes: Sequence[Node], usable: Sequence[tuple[str, ...]]) -> str:
    number, size = config.generation.vllm.num_servers, config.generation.vllm.tensor_parallel_size
    needed = "1 GPU" if size == 1 else f"{size} GPUs of one node"
    fits = sum(len(gpus) // size for gpus in usable)
    return (
        f"generation.vllm.num_servers={number}: a server needs {needed}, so {counted(fits, 'server')} would fit: "
        f"{_described(nodes, usable)}; {_remedy(config, nodes)}"
    )


def _described(nodes: Sequence[Node], usable: Sequence[tuple[str, ...]]) -> str:
    """Describe the GPUs of the nodes in words; equal nodes are described together."""
    alike = Counter(
        (len(node.gpus), len(set(node.trained_on)), len(gpus)) for node, gpus in zip(nodes, usable, strict=True)
    )
    return ", ".join(
        f"{counted(count, 'node')} with {counted(gpus, 'GPU')}, {trained} of them for training, {free} for servers"
        for (gpus, trained, free), count in alike.items()
    )


def _remedy(config: RLConfig, nodes: Sequence[Node]) -> str:
    change = "change generation.vllm.num_servers or tensor_parallel_size"
    if not any(node.trained_on for node in nodes):
        return f"{change}, or name more nodes"
    others = "start servers on further nodes by `mcore-rl vllm-servers`, and set generation.vllm.urls to what it prints"
    if config.generation.offload:
        return f"{change}, or {others}"
    return f"set generation.offload=true (training and servers take turns), start fewer processes, or {others}"


def _spread(total: int, rooms: Sequence[int] | None, nodes: int) -> list[int]:
    """Divide servers among nodes as evenly as their rooms allow; None: the rooms have no limit."""
    counts = [0] * nodes
    for _ in range(total):
        open_ones = [index for index in range(nodes) if rooms is None or counts[index] < rooms[index]]
        counts[min(open_ones, key=lambda index: counts[index])] += 1
    return counts


def describe_places(places: Sequence[ServerPlace], first: str = "vLLM's servers") -> Iterator[str]:
    """Yield the lines of a table: node, address, port and GPUs of each server."""
    yield f"{first}: {counted(len(places), 'server')}"
    rows = [("node", "address", "port", "GPUs")]
    rows += [(str(p.node), p.host, str(p.port), ",".join(p.devices) or "none (CPU)") for p in places]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  " + "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip()


# ------------------------------------------------------------ nodes


def nodes_of_launch() -> list[Node]:
    """Return the nodes of the training processes, in the order of their first ranks. Collective.

    The address of a node is that of its interface towards the first rank; with a single node, it is 127.0.0.1.

    Raises:
        UserError: there are several nodes, and one has no address towards the first rank, or the first towards another.
    """
    names, key = platform.gpu_names(), (torchrun.node(), socket.gethostname())
    own = names[torchrun.local_rank() % len(names)] if names else None
    first = os.environ.get("MASTER_ADDR", LOOPBACK)
    told = gather_objects((key, _address_towards(first), names, own))
    nodes, hosts = dict[tuple[int, str], Node](), dict[tuple[int, str], str]()
    for rank, (of_rank, address, of_node, gpu) in enumerate(told):
        node = nodes.setdefault(of_rank, Node(LOOPBACK, first_rank=rank))
        # A launcher may show each rank only its own GPU.
        gpus, trained_on = dict.fromkeys((*node.gpus, *of_node)), (*node.trained_on, *([gpu] if gpu else []))
        nodes[of_rank] = replace(node, gpus=tuple(gpus), trained_on=trained_on)
        hosts.setdefault(of_rank, address)
    if len(nodes) == 1:
        return list(nodes.values())
    _check_addresses(hosts, f"MASTER_ADDR={first}")
    # The name of its own node leads the first rank to a loopback address; others tell where they are.
    outside = next((host for host in hosts.values() if not ipaddress.ip_address(host).is_loopback), LOOPBACK)
    seen = gather_objects((key, _address_towards(outside)))
    hosts |= {of_rank: address for of_rank, address in seen if ipaddress.ip_address(hosts[of_rank]).is_loopback}
    _check_addresses(hosts, outside)
    return [replace(node, host=hosts[of_rank]) for of_rank, node in nodes.items()]


def _address_towards(host: str) -> str:
    """Return this node's address towards `host`; "" if it has none.

    An error would end this rank alone, while the others wait for what it tells.
    """
    try:
        return local_address(host)
    except OSError:
        return ""


def _check_addresses(hosts: Mapping[tuple[int, str], str], towards: str) -> None:
    """Raise UserError if a node has no address.

    Args:
        hosts: for each node (index and name), its address.
        towards: where the addresses lead to, for the message.
    """
    if lost := [name for (_, name), address in hosts.items() if not address]:
        raise UserError(
            f"generation.vllm: the node {lost[0]} has no address towards {towards}, at which the other nodes could "
            "reach its servers; give the address of the first node to the launcher"
        )


def places_of_launch(config: RLConfig) -> tuple[list[ServerPlace], list[ServerPlace]]:
    """Return the places of the servers that this run starts, and of those that this rank starts. Collective.

    The first rank of a node starts the servers of the node. A run that uses no servers, or those of
    `generation.vllm.urls`, starts none.

    Raises:
        UserError: the servers do not fit; or `generation.vllm.host` is set for servers on several nodes.
    """
    if config.generation.backend != "vllm" or config.generation.vllm.urls:
        return [], []
    nodes = with_host(config, nodes_of_launch())
    places = place_servers(config, nodes)
    return places, [place for place in places if nodes[place.node].first_rank == torchrun.rank()]


def with_host(config: RLConfig, nodes: Sequence[Node]) -> list[Node]:
    """Return `nodes` with the address `generation.vllm.host`, if it is set.

    Raises:
        UserError: there are several nodes, which cannot have one address.
    """
    host = config.generation.vllm.host
    if host is None:
        return list(nodes)
    if len(nodes) > 1:
        raise UserError(
            f"generation.vllm.host={host}: is one address, but servers run on {len(nodes)} nodes; leave it out, and "
            "each node uses its address towards the first rank"
        )
    return [replace(node, host=host) for node in nodes]


def planned_nodes(world_size: int, gpus_per_node: int, processes_per_node: int | None = None) -> list[Node]:
    """Return nodes of `gpus_per_node` GPUs for `world_size` training processes.

    Args:
        processes_per_node: processes of each node, which share GPUs if they are more; None for one on each GPU.
    """
    names, each = tuple(map(str, range(gpus_per_node))), processes_per_node or gpus_per_node
    starts = range(0, world_size, each)
    hosts = [LOOPBACK] if len(starts) == 1 else [f"node{index}" for index in range(len(starts))]
    return [
        Node(host, names, tuple(names[n % gpus_per_node] for n in range(min(each, world_size - start))), start)
        for host, start in zip(hosts, starts, strict=True)
    ]
