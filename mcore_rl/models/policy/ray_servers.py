"""vLLM servers that Ray places: one actor for each server, on GPUs on which no rank trains.

This module needs the `ray` extra. An actor starts its server with the GPUs that Ray has given to the actor, starts it
again if it ends, and ends it when the actor ends.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mcore_rl import platform
from mcore_rl.config import RLConfig
from mcore_rl.config.rl import LOOPBACK, SERVER_LOGS
from mcore_rl.errors import TimeLimitError, UserError, WorkerError
from mcore_rl.models.generation.vllm.key import run_key
from mcore_rl.models.generation.vllm.placement import Node, ServerPlace, with_host, with_ports
from mcore_rl.utils.console import counted, quiet_libraries, rank_zero_printer

END_SECONDS = 30.0
"""Time limit for the servers' end. A server also ends if its actor is killed."""


def needs_servers(config: Any) -> bool:
    """Return whether Ray must place servers for a run: they are not given, and do not use the ranks' GPUs."""
    if not isinstance(config, RLConfig) or config.generation.backend != "vllm":
        return False
    return not config.generation.offload and not config.generation.vllm.urls


def count_servers(config: RLConfig, gpus: Sequence[int], trained_on: Sequence[float]) -> int:
    """Return the number of servers that Ray has to place: with `num_servers=auto`, as many as fit, and one on the CPU.

    Args:
        gpus: number of GPUs of each node of the cluster.
        trained_on: number of GPUs of each node that the ranks have; all 0 if the ranks are on the CPU.

    Raises:
        UserError: the servers do not fit on the GPUs that the ranks leave, or `generation.vllm.devices` is set.
    """
    vllm, size = config.generation.vllm, config.generation.vllm.tensor_parallel_size
    if vllm.devices:
        raise UserError("generation.vllm.devices: Ray chooses the GPUs of servers; leave it out")
    if not any(trained_on):
        return 1 if vllm.num_servers == "auto" else vllm.num_servers
    fits = sum(int(own - trained) // size for own, trained in zip(gpus, trained_on, strict=True))
    asked = 1 if vllm.num_servers == "auto" else vllm.num_servers
    if asked > fits:
        nodes = ", ".join(
            f"{own} GPUs, {trained:g} of them for ranks" for own, trained in zip(gpus, trained_on, strict=True)
        )
        raise UserError(
            f"generation.vllm.num_servers={vllm.num_servers}: a server needs {counted(size, 'GPU')} of one node, so "
            f"{counted(fits, 'server')} would fit on the nodes of the Ray cluster ({nodes}); start fewer ranks, change "
            "generation.vllm.num_servers or tensor_parallel_size, or set generation.offload=true (ranks and servers "
            "take turns)"
        )
    return fits if vllm.num_servers == "auto" else asked


class RayServers:
    """Servers that Ray has placed. The constructor starts them and does not wait until they are ready.

    Args:
        ranks: placement group of the ranks, which is ready.
        gpus_per_rank: number of GPUs of each rank; 0 on a CPU cluster, where servers get no GPU either.
        timeout: time limit in seconds for the placement of the actors.

    Raises:
        UserError: the servers do not fit, a port is taken, or the run's key cannot be read or written.
        WorkerError: the cluster has too few free resources, or an actor died.
    """

    def __init__(self, config: RLConfig, ranks: PlacementGroup, gpus_per_rank: float, timeout: float) -> None:
        own = Counter(placement_group_table(ranks)["bundles_to_node_id"].values())
        nodes = {node["NodeID"]: int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]}
        count = count_servers(config, list(nodes.values()), [own[node] * gpus_per_rank for node in nodes])
        gpus = config.generation.vllm.tensor_parallel_size if gpus_per_rank else 0
        bundle = {"CPU": 1.0, **({"GPU": float(gpus)} if gpus else {})}
        self.actors: list[Any] = []
        self.placement = placement_group([bundle] * count, strategy="PACK")
        with self._ended_on_failure():
            if not self.placement.wait(timeout):
                raise WorkerError(
                    f"the Ray cluster has too few free resources for {counted(count, 'vLLM server')} of {bundle} each, "
                    "beside the ranks; set generation.vllm.num_servers"
                )
            actor = ray.remote(_Server)
            self.actors = [
                actor.options(
                    num_cpus=1,
                    num_gpus=gpus,
                    max_concurrency=2,  # `end` does not wait for `start`
                    scheduling_strategy=PlacementGroupSchedulingStrategy(self.placement, index),
                ).remote()
                for index in range(count)
            ]
            found = self._results([actor.find.remote() for actor in self.actors], timeout)
            self.places = places_of_actors(config, found, is_one_node={*own} == {node for node, _, _ in found})
            key = run_key(config.output_dir / SERVER_LOGS)
            self._starting = [
                actor.start.remote(config, place, key) for actor, place in zip(self.actors, self.places, strict=True)
            ]

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(place.url for place in self.places)

    def wait(self, timeout: float) -> None:
        """Wait until all servers are ready; on failure, end all.

        Raises:
            UserError: a server did not start.
            TimeLimitError: a server was not ready within `timeout` seconds.
            WorkerError: an actor died.
        """
        with self._ended_on_failure():
            self._results(self._starting, timeout)

    def close(self) -> None:
        """End the servers and their actors."""
        actors, self.actors = self.actors, []
        if actors:
            ray.wait([actor.end.remote() for actor in actors], num_returns=len(actors), timeout=END_SECONDS)
        for actor in actors:
            ray.kill(actor)
        remove_placement_group(self.placement)

    @contextmanager
    def _ended_on_failure(self) -> Any:
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _results(self, refs: Sequence[Any], timeout: float) -> list[Any]:
        try:
            results: list[Any] = ray.get(list(refs), timeout=timeout)
        except ray.exceptions.GetTimeoutError:
            raise TimeLimitError(f"vLLM's servers took longer than {timeout} s to start") from None
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise UserError(str(error.cause)) from None
            raise WorkerError(f"the actor of a vLLM server: {error}") from None
        except ray.exceptions.RayError as error:
            raise WorkerError(f"the actor of a vLLM server died: {str(error).splitlines()[0]}") from None
        return results


def places_of_actors(
    config: RLConfig, found: Sequence[tuple[str, str, tuple[str, ...]]], is_one_node: bool
) -> list[ServerPlace]:
    """Return the place of each actor's server.

    Args:
        found: for each actor, the id of its Ray node, the address of the node, and the names of the actor's GPUs.
        is_one_node: whether ranks and servers are all on one node, so that servers can listen on 127.0.0.1.

    Raises:
        UserError: a port would be too large, or `generation.vllm.host` is set for servers on several nodes.
    """
    addresses = {node: LOOPBACK if is_one_node else address for node, address, _ in found}
    hosts = with_host(config, [Node(address) for address in addresses.values()])
    indices = {node: index for index, node in enumerate(addresses)}
    return with_ports(config, ((indices[node], hosts[indices[node]].host, devices) for node, _, devices in found))


class _Server:
    """The actor of one server."""

    def find(self) -> tuple[str, str, tuple[str, ...]]:
        """Return the id and the address of this Ray node, and the names of this actor's GPUs."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")  # set by Ray, for actors with GPUs
        devices = tuple(visible.split(",")) if ray.get_gpu_ids() else ()
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), devices

    def start(self, config: RLConfig, place: ServerPlace, key: str) -> None:
        """Start the server, wait until it is ready, and start it again whenever it ends.

        Args:
            key: the run's key.

        Raises:
            UserError: the server's port is taken, or the server did not start.
        """
        quiet_libraries()
        platform.initialize_platform()
        config = platform.resolve(config)
        from mcore_rl.models.generation.vllm.generation import wait_until_started
        from mcore_rl.models.generation.vllm.server import VLLMServerProcesses

        say = rank_zero_printer(True)
        self.service = VLLMServerProcesses(config, config.output_dir / SERVER_LOGS, [place], key, say)
        wait_until_started(self.service, config)
        self.service.watch()

    def end(self) -> None:
        """End the server, if it was started."""
        if hasattr(self, "service"):
            self.service.close()
