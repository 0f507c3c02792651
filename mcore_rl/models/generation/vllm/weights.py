"""Sends the policy's weights to vLLM's servers.

Several ranks send (`weights.senders`): each has a process group with the processes of each server. Rank 0 leads: it
pauses the servers, lets them receive while the senders send, and drops those that fail. A server receives from all
senders in turn.

A frozen vision tower is part of the first update that a server gets, because the server may have another run's tower.
Later updates leave it out.

With `generation.vllm.weight_updates=delta`, the senders send differences from the version that a server has. A server
that has another version, because it failed or was started again, gets all weights.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from mcore_rl import platform
from mcore_rl.config import RLConfig
from mcore_rl.distributed.collectives import gather_objects, settle
from mcore_rl.errors import TrainingError
from mcore_rl.models.generation.vllm.client import ServerError, ServerPool, VLLMServer
from mcore_rl.models.megatron.model.gpt_model import ModelShard
from mcore_rl.models.megatron.weight_mapping import tensor_shapes
from mcore_rl.models.megatron.weights.senders import Shipment, gather_shipments, plan_shipments, sends
from mcore_rl.models.refit.delta import DeltaEncoder
from mcore_rl.models.refit.transfer import (
    BUCKET_BYTES,
    BucketSender,
    RefitGroup,
    RefitGroups,
    RefitInfo,
    RefitStore,
    encode_refit_info,
    local_address,
)

T = TypeVar("T")

CONTROL_SECONDS = 60.0
"""Time limit in seconds of requests that take almost no time."""

Addresses = dict[str, tuple[str, int]]
"""Map from a server's URL to the address (IP, port) on which a sender waits for the server's processes."""


class WeightSource(Protocol):
    """Interface of the policy whose weights are sent."""

    model: ModelShard

    @property
    def is_writer(self) -> bool: ...

    def prepare_refit_info(self) -> RefitInfo: ...


class Lead(Protocol):
    """Runs `work` on the first rank; returns its result, or raises its exception, on all ranks."""

    def __call__(self, work: Callable[[], T]) -> T: ...


class VLLMWeights:
    """Connects the senders of the policy's weights with the servers, and sends the weights.

    All ranks must create it, and call `connect` and `send`, together.

    Args:
        pool: the servers, on the first rank; None on other ranks.
        lead: runs a function on the first rank.
        seconds: time limit for a server to join a group, and for each collective with it.
        on_host: send from host memory to host memory.
    """

    def __init__(
        self,
        config: RLConfig,
        policy: WeightSource,
        pool: ServerPool | None,
        lead: Lead,
        seconds: float,
        on_host: bool,
    ) -> None:
        self.config, self.policy, self.pool, self.on_host = config, policy, pool, on_host
        self._lead, self.seconds = lead, seconds
        self.shipments = plan_shipments(policy.model, BUCKET_BYTES)
        self.changing = [shipment for shipment in self.shipments if not shipment.is_frozen]
        self.own = [number for number, shipment in enumerate(self.shipments) if sends(shipment, policy.model)]
        self.encoder = DeltaEncoder() if config.generation.vllm.weight_updates == "delta" else None
        self.bytes_sent = 0
        self._groups: dict[str, RefitGroup] = {}
        self._active = RefitGroups({})
        self._versions: dict[str, int] = {}  # of the servers, as far as their copies of the weights are known
        self._receiving: dict[str, Future[None]] = {}
        self._sending = ThreadPoolExecutor(1, "sending", partial(platform.use_device, platform.device()))

    def connect(self, urls: Iterable[str]) -> None:
        """Create the process groups of every sender with each server in `urls`; drop servers that do not join.

        Raises:
            TrainingError: no server is left.
        """
        wanted = list(urls)
        sizes = self._lead(lambda: self._servers.each(_world_size, wanted))
        stores = {url: self._store(url) for url in sizes} if self.own else {}
        mine = {url: (store.ip, store.port) for url, store in stores.items()}
        told = [each for each in gather_objects((mine, self.own)) if each[1]]
        joining = self._sending.submit(self._join, stores, sizes) if self.own else None
        self._lead(lambda: self._servers.each(partial(self._invite, told, sizes), sizes))
        failures = self._merged(settle(joining, self.config.parallel.meeting_seconds) or {})

        def finish() -> None:
            for url, reason in failures.items():
                self._servers.drop(url, f"{url}: the weights cannot be sent to it: {reason}")

        self._lead(finish)
        for url in wanted:
            self._versions.pop(url, None)

    def _store(self, url: str) -> RefitStore:
        """Return the store by which a server's processes find this sender."""
        return RefitStore(local_address(urlsplit(url).hostname or ""), 0, 0, self.seconds)

    def _join(self, stores: Mapping[str, RefitStore], sizes: Mapping[str, int]) -> dict[str, str]:
        """Create this sender's group with each server; return the reasons of those that do not join."""

        def join(url: str) -> str | None:
            try:
                on_host = self.on_host or self.encoder is not None
                self._groups[url] = RefitGroup(stores[url], 1 + sizes[url], on_host)
            except RuntimeError as error:
                return str(error)
            return None

        with ThreadPoolExecutor(max(1, len(stores))) as threads:
            return {url: why for url, why in zip(stores, threads.map(join, stores), strict=True) if why is not None}

    def _invite(self, told: list[tuple[Addresses, list[int]]], sizes: Mapping[str, int], server: VLLMServer) -> None:
        """Let the processes of a server join the groups of all senders.

        Args:
            told: for each sender, its addresses, and the numbers of its shipments.
        """
        sender_of = {number: index for index, (_, numbers) in enumerate(told) for number in numbers}
        info = {
            "senders": [addresses[server.url] for addresses, _ in told],
            "order": [sender_of[number] for number in range(len(self.shipments))], "first_rank": 1,
            "world_size": 1 + sizes[server.url], "timeout": self.seconds, "on_host": self.on_host,
            "tensors": encode_refit_info(self.policy.prepare_refit_info()),
            "copy": None if self.encoder is None else f"mcore_rl_{secrets.token_hex(8)}",
        }  # fmt: skip
        server.post("/init_weight_transfer_engine", {"init_info": info}, 2 * self.seconds)

    def send(self, number: int, name: str) -> list[str]:
        """Send the weights as version `number`, which the servers call `name`; return the URLs of the servers.

        A server discards its cached prefixes, because they were computed with the old weights. It continues pending
        responses with the new weights.

        Raises:
            TrainingError: no server is left.
        """
        everyone = list(self._lead(lambda: self._servers.each(_pause)))
        self.policy.model.finish_param_gather()
        self.bytes_sent = 0
        base = None if self.encoder is None else self.encoder.version
        receivers = [url for url in everyone if base is None or self._versions.get(url) == base]
        parts = [(receivers, self.shipments)]
        if len(self.changing) < len(self.shipments):
            known = [url for url in receivers if url in self._versions]
            fresh = [url for url in receivers if url not in self._versions]
            # The encoder must have every version, even if no server can take the differences to it.
            parts = [(known, self.changing)] if known or base is not None else []
            parts += [(fresh, self.shipments)] if fresh else []
        for urls, shipments in parts:
            self._transfer(urls, base, number, shipments, partial(self._send_gathered, shipments))
        if self.encoder is not None:
            self.encoder.version = number
            left = self._lead(lambda: list(self._servers.servers))
            if behind := [url for url in left if self._versions.get(url) != number]:
                self._transfer(behind, None, number, self.shipments, self._send_copies)
        return list(self._lead(lambda: self._servers.each(partial(_finish, name=name, seconds=self.seconds))))

    def _send_gathered(self, shipments: Sequence[Shipment], group: RefitGroups) -> int:
        """Gather the weights of `shipments` and send those of which this rank is the sender; return the bytes sent."""
        numbers = {name: number for number, name in enumerate(self.policy.prepare_refit_info())}
        sender = BucketSender(group, self.encoder, self.on_host)
        for shipment, tensors in gather_shipments(self.policy.model, shipments):
            if sends(shipment, self.policy.model):
                sender.send_together(((numbers[name], tensor) for name, tensor in tensors), shipment.nbytes)
            else:
                deque(tensors, maxlen=0)
        sender.wait()
        return sender.bytes_sent

    def _send_copies(self, group: RefitGroups) -> int:
        """Send the copies of what this rank has sent, as an update that needs no earlier version."""
        assert self.encoder is not None, "only differences need copies"
        numbers = {name: number for number, name in enumerate(self.policy.prepare_refit_info())}
        sender = BucketSender(group, self.encoder)
        for shipment in (self.shipments[number] for number in self.own):
            chosen = [numbers[name] for name in tensor_shapes(shipment.mappings)]
            sender.send(chosen, self.encoder.whole(chosen))
        sender.wait()
        return sender.bytes_sent

    def _transfer(
        self,
        receivers: Sequence[str],
        base: int | None,
        number: int,
        shipments: Sequence[Shipment],
        send: Callable[[RefitGroups], int],
    ) -> None:
        """Send one update to the servers `receivers`, and record which of them then have version `number`.

        `send` sends the weights of `shipments`.

        A server that fails is dropped, unless it only refuses differences: then it can still take all weights.
        """

        def begin() -> None:
            self._servers.each(_start_update, receivers)
            count = sum(len(tensor_shapes(shipment.mappings)) for shipment in shipments)
            update = {"base": base, "version": number, "count": count}
            self._receiving = self._servers.begin_each(partial(_receive, update, 2 * self.seconds), receivers)

        def finish() -> dict[str, int]:
            for url, future in self._receiving.items():
                reason = failures.get(url) or _reason(future)
                if reason is None:
                    self._versions[url] = number
                elif base is None or url in failures:
                    self._servers.drop(url, f"{url}: the weights could not be sent: {reason}")
                else:
                    self._versions.pop(url, None)
            return self._versions

        self._lead(begin)
        self._active = RefitGroups({url: self._groups[url] for url in receivers if url in self._groups})
        sending = self._sending.submit(send, self._active)
        self.bytes_sent += settle(sending, self.config.parallel.meeting_seconds) or 0
        failures = self._merged({url: str(error) for url, error in self._active.failures.items()})
        for url in failures:
            self._groups.pop(url, None)
        self._versions = self._lead(finish)

    def leave_out(self, url: str) -> None:
        """Send nothing more to a server; another thread may call this during an update."""
        self._active.leave_out(url)

    def close(self) -> None:
        """Send nothing more."""
        self._sending.shutdown(wait=False, cancel_futures=True)

    @property
    def _servers(self) -> ServerPool:
        assert self.pool is not None, "only the first rank asks servers"
        return self.pool

    def _merged(self, own: dict[str, str]) -> dict[str, str]:
        """Return the failures of all ranks, by the servers' URLs."""
        return {url: reason for of_rank in gather_objects(own) for url, reason in of_rank.items()}


def _reason(receiving: Future[Any]) -> str | None:
    """Return why a server did not receive the weights; None if it did."""
    error = receiving.exception()
    if error is not None and not isinstance(error, (ServerError, TrainingError)):
        raise error
    return None if error is None else str(error)


def _world_size(server: VLLMServer) -> int:
    return int(server.get("/get_world_size", CONTROL_SECONDS)["world_size"])


def _pause(server: VLLMServer) -> None:
    server.post("/pause?mode=keep&clear_cache=true", {}, CONTROL_SECONDS)


def _start_update(server: VLLMServer) -> None:
    server.post("/start_weight_update", {}, CONTROL_SECONDS)


def _receive(update: dict[str, Any], seconds: float, server: VLLMServer) -> None:
    server.post("/update_weights", {"update_info": update}, seconds)


def _finish(server: VLLMServer, name: str, seconds: float) -> None:
    server.post("/finish_weight_update", {"weight_version": name}, seconds)
    server.post("/resume", {}, CONTROL_SECONDS)
