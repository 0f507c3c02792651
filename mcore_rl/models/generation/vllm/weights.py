"""Sends the policy's weights to vLLM's servers.

Several ranks send (`weights.senders`). Buckets go to the processes of a server by shared memory where a rank and the
process can share it, and otherwise by collectives of each sender with the server's processes (`weight_routes`). Rank 0
leads: it pauses the servers, lets them receive while the ranks send, and drops those that fail. A server receives from
all senders in turn.

A frozen vision tower is part of the first update that a server gets, because the server may have another run's tower.
Later updates leave it out.

With `generation.vllm.weight_updates=delta`, the senders send differences from the version that a server has. A server
that has another version, because it failed or was started again, gets all weights.
"""

from __future__ import annotations

import json
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import torch

from mcore_rl import platform
from mcore_rl.config import RLConfig
from mcore_rl.distributed.collectives import gather_objects, settle
from mcore_rl.errors import TrainingError
from mcore_rl.models.generation.vllm.client import ServerError, ServerPool, VLLMServer
from mcore_rl.models.generation.vllm.weight_routes import (
    RankReport,
    Route,
    orders_of,
    plan_routes,
    relays_of,
    without_memory,
)
from mcore_rl.models.megatron.model.gpt_model import ModelShard
from mcore_rl.models.megatron.weight_mapping import tensor_shapes
from mcore_rl.models.megatron.weights.senders import Shipment, gather_shipments, plan_shipments, sends
from mcore_rl.models.refit.delta import DeltaEncoder, largest_bucket
from mcore_rl.models.refit.shared_block import NO_PROBE, Probe, free_shared_memory
from mcore_rl.models.refit.transfer import (
    BUCKET_BYTES,
    BucketMemory,
    BucketSender,
    FilledBucket,
    RefitGroup,
    RefitGroups,
    RefitInfo,
    RefitStore,
    encode_refit_info,
    local_address,
)
from mcore_rl.utils.console import PrintLine, silent

T = TypeVar("T")

CONTROL_SECONDS = 60.0
"""Time limit in seconds of requests that take almost no time."""

POLL_SECONDS = 0.02
Sees = list[list[int]]
"""For each process of a server, the ranks whose memory it can read."""


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
        on_host: collectives with servers are between host memory and host memory.
        say: prints a message for the user.
    """

    def __init__(
        self,
        config: RLConfig,
        policy: WeightSource,
        pool: ServerPool | None,
        lead: Lead,
        seconds: float,
        on_host: bool,
        say: PrintLine = silent,
    ) -> None:
        self.config, self.policy, self.pool, self.on_host, self._say = config, policy, pool, on_host, say
        self._lead, self.seconds, self.rank = lead, seconds, torch.distributed.get_rank()
        self.shipments = plan_shipments(policy.model, BUCKET_BYTES)
        self.changing = [shipment for shipment in self.shipments if not shipment.is_frozen]
        self.own = [number for number, shipment in enumerate(self.shipments) if sends(shipment, policy.model)]
        self.encoder = DeltaEncoder() if config.generation.vllm.weight_updates == "delta" else None
        self.shares_host = self.encoder is not None or not platform.has_gpu()
        self.bucket_bytes = max(map(self._largest, self.shipments), default=0)
        self.bytes_sent = 0
        self._sources: list[int] = []  # the rank that sends each shipment
        self._routes: dict[str, list[Route]] = {}
        self._groups: dict[str, tuple[Route, RefitGroup]] = {}  # of this rank
        self._relays: dict[int, tuple[list[int], Any]] = {}  # by sender: ranks and group to which it passes buckets on
        self._memory = BucketMemory(on_host=self.shares_host)
        self._active = RefitGroups({})
        self._versions: dict[str, int] = {}  # of the servers, as far as their copies of the weights are known
        self._receiving: dict[str, Future[None]] = {}
        self._invited: dict[str, tuple[RefitStore, Future[None]]] = {}  # on the first rank
        self._sending = ThreadPoolExecutor(1, "sending", partial(platform.use_device, platform.device()))

    def connect(self, urls: Iterable[str]) -> None:
        """Find out how weights get to each server in `urls`, and create the groups for it; drop those that do not join.

        Raises:
            TrainingError: no server is left, or a host has too little shared memory.
        """
        wanted = list(urls)
        sizes = self._lead(lambda: self._servers.each(_world_size, wanted))
        probe, told = None, NO_PROBE
        with suppress(OSError):  # without shared memory, collectives are used
            probe = Probe(self.shares_host)
            told = probe.told()
        try:
            failures = self._connect(told, sizes)
        except BaseException:
            self._dismiss()
            raise
        finally:
            if probe is not None:
                probe.release()

        def finish() -> None:
            for url, reason in failures.items():
                self._servers.drop(url, f"{url}: the weights cannot be sent to it: {reason}")

        self._lead(finish)
        for url in wanted:
            self._versions.pop(url, None)

    def _connect(self, told: dict[str, str], sizes: Mapping[str, int]) -> dict[str, str]:
        """Connect servers; return why the weights cannot be sent to some of them.

        Args:
            told: this rank's probe.
            sizes: number of processes of each server, by URL; on the first rank.
        """
        reports = [RankReport(probe, own, None) for probe, own in gather_objects((told, self.own))]
        sources = {number: rank for rank, report in enumerate(reports) for number in report.shipments}
        self._sources = [sources[number] for number in range(len(self.shipments))]
        sees = self._lead(lambda: self._invite(reports, sizes))
        # Measured only now, because servers on this host have taken memory for their copies of the weights before they
        # have answered.
        free = gather_objects(self._free_memory())
        reports = [report._replace(free=amount) for report, amount in zip(reports, free, strict=True)]
        if lacking := without_memory(sees, reports, self.bucket_bytes):
            sees = {url: [[r for r in ranks if r not in lacking] for ranks in found] for url, found in sees.items()}
            self._say(
                f"weights are sent to servers on the nodes of ranks {sorted(lacking)} by collectives, because their "
                "shared memory (/dev/shm) has too little room; give a container more by --shm-size or --ipc=host"
            )
        senders = sorted(set(self._sources))
        routes = {url: plan_routes(found, senders) for url, found in sees.items()}
        self._routes |= routes
        mine = {url: route for url in routes for route in routes[url] if route.rank == self.rank}
        self._reserve(mine)
        self._make_relays(senders)
        stores = {url: RefitStore(local_address(_host_of(url)), 0, 0, self.seconds) for url in mine}
        addresses = gather_objects({url: (store.ip, store.port) for url, store in stores.items()})
        joining = self._sending.submit(self._join, stores, mine) if mine else None
        self._lead(lambda: self._tell(routes, addresses))
        return self._merged(settle(joining, self.config.parallel.meeting_seconds) or {})

    def _largest(self, shipment: Shipment) -> int:
        """Return the most bytes that a bucket of this shipment can have."""
        if self.encoder is None:
            return shipment.nbytes
        return largest_bucket(shipment.nbytes, len(tensor_shapes(shipment.mappings)))

    def _free_memory(self) -> int | None:
        """Return the bytes of shared memory that this host has left; None if this rank needs no more."""
        if not self.shares_host or (self._memory.shares and self._memory.is_taken):
            return None
        try:
            return free_shared_memory()
        except OSError:
            return None

    def _reserve(self, routes: Mapping[str, Route]) -> None:
        """Take this rank's shared memory of the host for its `routes`, by URL.

        Now, because a rank that fails during an update would let the others, and the servers, wait for its buckets.

        Raises:
            TrainingError: a rank's host has too little.
        """
        reserving = None
        if any(route.shares for route in routes.values()):
            if not self._memory.shares:
                self._memory = BucketMemory(shares=True, on_host=self.shares_host)
            if self.shares_host:
                reserving = self._sending.submit(self._memory.reserve, self.bucket_bytes)
        settle(reserving, self.config.parallel.meeting_seconds)

    def _invite(self, reports: Sequence[RankReport], sizes: Mapping[str, int]) -> dict[str, Sees]:
        """Begin to connect servers; return what their processes see. Only on the first rank.

        A server's processes answer through a store, and then wait for their routes (`_tell`).
        """
        stores = {url: RefitStore(local_address(_host_of(url)), 0, 0, self.seconds) for url in sizes}
        info = {
            "probes": [report.probe for report in reports], "timeout": self.seconds,
            "on_host": self.on_host, "tensors": encode_refit_info(self.policy.prepare_refit_info()), "copy": None,
        }  # fmt: skip

        def invite(server: VLLMServer) -> None:
            store = stores[server.url]
            own: dict[str, Any] = {"store": (store.ip, store.port)}
            if self.encoder is not None:
                own["copy"] = f"mcore_rl_{secrets.token_hex(8)}"
            server.post("/init_weight_transfer_engine", {"init_info": info | own}, 2 * self.seconds)

        asked = self._servers.begin_each(invite, sizes)
        self._invited = {url: (stores[url], future) for url, future in asked.items()}
        deadline, found = time.monotonic() + self.seconds, dict[str, Sees]()
        for url, (store, future) in self._invited.items():
            keys = [f"sees/{index}" for index in range(sizes[url])]
            while not (has_come := store.store.check(keys)) and not future.done() and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
            if has_come:
                found[url] = [json.loads(store.store.get(key)) for key in keys]
        return found

    def _tell(self, routes: Mapping[str, Sequence[Route]], addresses: Sequence[Mapping[str, tuple[str, int]]]) -> None:
        """Tell the processes of servers their routes, and wait until they have joined. Only on the first rank.

        Args:
            addresses: for each rank, the address at which it waits for the processes of a server, by URL.
        """
        for url, of_server in routes.items():
            processes = 1 + max(index for route in of_server for index in route.members)
            plan = {
                "routes": [[*addresses[r.rank][url], r.members, r.shares] for r in of_server],
                "orders": orders_of(of_server, self._sources, processes),
            }
            self._invited[url][0].store.set("plan", json.dumps(plan))
        self._servers.gather({url: future for url, (_, future) in self._invited.items()})
        self._invited = {}

    def _dismiss(self) -> None:
        """Tell the processes of servers that wait for their routes that there are none. Other ranks have none.

        Otherwise they would wait, and the threads that have invited them would delay the exit of this process.
        """
        for store, _ in self._invited.values():
            with suppress(RuntimeError):
                store.store.set("plan", json.dumps(None))
        self._invited = {}

    def _make_relays(self, senders: Sequence[int]) -> None:
        """Create the groups by which senders pass buckets on to other ranks."""
        for sender in senders:
            ranks = sorted({sender, *relays_of(self._routes, sender)})
            if len(ranks) > 1 and self._relays.get(sender, (None, None))[0] != ranks:
                backend = "gloo" if self.shares_host else None
                self._relays[sender] = ranks, torch.distributed.new_group(ranks, backend=backend)

    def _join(self, stores: Mapping[str, RefitStore], routes: Mapping[str, Route]) -> dict[str, str]:
        """Create this rank's group with each server; return the reasons of those that do not join."""

        def join(url: str) -> str | None:
            route = routes[url]
            try:
                on_host = self.on_host or self.encoder is not None
                group = RefitGroup(stores[url], 1 + len(route.members), on_host, route.shares)
            except RuntimeError as error:
                return str(error)
            self._groups[url] = route, group
            return None

        with ThreadPoolExecutor(max(1, len(stores))) as threads:
            return {url: why for url, why in zip(stores, threads.map(join, stores), strict=True) if why is not None}

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
            self._transfer(urls, base, number, shipments, partial(self._send_gathered, shipments, urls))
        if self.encoder is not None:
            self.encoder.version = number
            left = self._lead(lambda: list(self._servers.servers))
            if behind := [url for url in left if self._versions.get(url) != number]:
                self._transfer(behind, None, number, self.shipments, partial(self._send_copies, behind))
        return list(self._lead(lambda: self._servers.each(partial(_finish, name=name, seconds=self.seconds))))

    def _send_gathered(self, shipments: Sequence[Shipment], receivers: Sequence[str], groups: RefitGroups) -> int:
        """Gather the weights of `shipments` and send them; return the bytes that this rank has sent."""
        numbers = {name: number for number, name in enumerate(self.policy.prepare_refit_info())}
        gathered = gather_shipments(self.policy.model, shipments)
        coming = next(gathered, None)

        def fill(sender: BucketSender, shipment: Shipment) -> FilledBucket | None:
            nonlocal coming
            if coming is None or coming[0] is not shipment:
                return None  # this rank has no part of it
            bucket, tensors = None, coming[1]
            if sends(shipment, self.policy.model):
                bucket = sender.filled(((numbers[name], tensor) for name, tensor in tensors), shipment.nbytes)
            deque(tensors, maxlen=0)
            coming = next(gathered, None)
            return bucket

        return self._send_buckets(shipments, receivers, groups, fill)

    def _send_copies(self, receivers: Sequence[str], groups: RefitGroups) -> int:
        """Send the copies of what has been sent, as an update that needs no earlier version."""
        numbers = {name: number for number, name in enumerate(self.policy.prepare_refit_info())}
        encoder = self.encoder
        assert encoder is not None, "only differences need copies"

        def fill(sender: BucketSender, shipment: Shipment) -> FilledBucket | None:
            if not sends(shipment, self.policy.model):
                return None
            chosen = [numbers[name] for name in tensor_shapes(shipment.mappings)]
            return sender.placed(chosen, encoder.whole(chosen))

        return self._send_buckets(self.shipments, receivers, groups, fill)

    def _send_buckets(
        self,
        shipments: Sequence[Shipment],
        receivers: Sequence[str],
        groups: RefitGroups,
        fill: Callable[[BucketSender, Shipment], FilledBucket | None],
    ) -> int:
        """Send a bucket for each of `shipments` on all routes to the servers `receivers`; return the bytes sent.

        Args:
            fill: returns the bucket of a shipment on its sender, and None elsewhere. All ranks call it.
        """
        sender = BucketSender(groups, self.encoder, self._memory)
        sources = {id(shipment): rank for shipment, rank in zip(self.shipments, self._sources, strict=True)}
        routes = {url: self._routes[url] for url in receivers}
        for shipment in shipments:
            source = sources[id(shipment)]
            bucket = fill(sender, shipment)
            if relays_of(routes, source):
                bucket = self._passed_on(sender, source, bucket)
            own = [url for url in receivers if url in self._groups and self._groups[url][0].carries(source)]
            if bucket is not None and own:
                sender.send(bucket, own)
                if bucket.is_lent:
                    sender.wait()  # at most one large tensor at a time
        sender.wait()
        if not self.shares_host:  # a sleeping policy gives the GPU's memory to the servers
            self._memory.release()
        return sender.bytes_sent

    def _passed_on(self, sender: BucketSender, source: int, bucket: FilledBucket | None) -> FilledBucket | None:
        """Broadcast the bucket of rank `source` to the ranks that hand it to servers; return it on them."""
        ranks, group = self._relays[source]
        if self.rank not in ranks:
            return None
        device = torch.device("cpu") if self.shares_host else platform.device()
        count, size = (len(bucket.numbers), bucket.payload.numel()) if bucket is not None else (0, 0)
        header = torch.tensor([count, size], device=device)
        torch.distributed.broadcast(header, source, group=group)
        count, size = header.tolist()
        if bucket is None:
            numbers = torch.empty(count, dtype=torch.long, device=device)
            payload = sender.memory.take(size)
        else:
            numbers, payload = torch.tensor(bucket.numbers, device=device), bucket.payload
        torch.distributed.broadcast(numbers, source, group=group)
        torch.distributed.broadcast(payload, source, group=group)
        return bucket or FilledBucket(numbers.tolist(), payload, sender.memory.handle)

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
        self._active = RefitGroups({url: self._groups[url][1] for url in receivers if url in self._groups})
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
        """Send nothing more. A thread that still sends does not delay this; it ends at its next bucket."""
        self._sending.shutdown(wait=False, cancel_futures=True)
        self._memory.close()

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


def _host_of(url: str) -> str:
    return urlsplit(url).hostname or ""


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
