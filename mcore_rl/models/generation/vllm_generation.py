"""Generation by vLLM's servers, which are sent the policy's weights before they answer.

The first rank of each data-parallel replica asks the servers, beside; the very first one also sends them the weights,
which all ranks gather. A server that fails is dropped, and the run goes on with those that are left.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import torch

from mcore_rl import platform
from mcore_rl.config import RLConfig
from mcore_rl.config.rl import SERVER_LOGS
from mcore_rl.distributed.batched_data_dict import BatchedDataDict, LocalBatch
from mcore_rl.distributed.collectives import broadcast_result, settle
from mcore_rl.distributed.topology import Topology
from mcore_rl.errors import TrainingError, UserError
from mcore_rl.models.generation.interfaces import (
    GenerationDatumSpec,
    GenerationOutputSpec,
    RequestError,
    Response,
    StreamingGeneration,
    output_of,
    prompts_of,
    share_responses,
)
from mcore_rl.models.generation.refit import (
    RefitGroup,
    RefitGroups,
    RefitInfo,
    RefitStore,
    encode_refit_info,
    local_address,
    send_weights,
)
from mcore_rl.models.generation.sampling import SamplingParams, random_states, uniforms
from mcore_rl.models.generation.vllm_client import Request, ServerError, ServerPool, VLLMServer
from mcore_rl.models.generation.vllm_server import VLLMServerProcesses
from mcore_rl.models.megatron.build import ModelShard
from mcore_rl.models.megatron.families.mixtures import Experts, Mixture
from mcore_rl.models.megatron.weights import export_hf_weights
from mcore_rl.utils.console import PrintLine

T = TypeVar("T")

BUCKET_BYTES = 512 * 1024**2
CONTROL_SECONDS = 60.0
"""For an answer that takes no time."""
POLL_SECONDS = 0.5


class Sender(Protocol):
    """The methods of a policy that the servers' weights come from."""

    model: ModelShard
    topology: Topology

    @property
    def is_writer(self) -> bool: ...

    def prepare_refit_info(self) -> RefitInfo: ...

    def offload_before_refit(self) -> int: ...

    def offload_after_refit(self) -> int: ...

    def prepare_for_lp_inference(self) -> None: ...

    def prepare_for_training(self) -> None: ...


class VLLMGeneration(StreamingGeneration):
    """Continues prompts by servers that are started here, or that the configuration names.

    Every call but `submit` and `close` is collective.

    Args:
        policy: whose weights they get.
        params: how tokens are drawn.
        say: tells the user of a server that is dropped.
    """

    def __init__(
        self, config: RLConfig, policy: Sender, params: SamplingParams, tokenizer: Any, say: PrintLine
    ) -> None:
        self.config, self.policy, self.params, self.tokenizer, self.say = config, policy, params, tokenizer, say
        self.max_sequence_length = config.data.max_sequence_length
        self.weight_version: int | None = None
        self._launch = ""
        self._beside = ThreadPoolExecutor(1, "generation")
        self._service: VLLMServerProcesses | None = None
        self._pool: ServerPool | None = None
        self._groups = RefitGroups({})
        self._is_connected, self._sleeps = False, config.generation.offload
        # Other ranks wait for as long in a collective, which must not end before.
        self._refit_seconds = config.parallel.timeout_seconds / 2

    @property
    def servers(self) -> list[str]:
        """URLs of those that are left; known on the first rank."""
        return list(self._pool.servers) if self._pool else []

    # ------------------------------------------------------------ generation

    def prepare_for_generation(self, *args: Any, weight_version: int | None = None, **kwargs: Any) -> bool:
        """Send the policy's weights, unless the servers have those of this version; start or find the servers first.

        With `generation.offload` the servers are woken, and the policy has no device memory left afterwards.

        Raises:
            UserError: a server does not start, does not answer, or is not one for this run.
            TrainingError: no server is left.
        """
        if self._sleeps:
            self._make_room()
        if not self._is_connected:
            self._connect()
        if weight_version is None:
            weight_version = 0 if self.weight_version is None else self.weight_version + 1
        if self._sleeps:
            self._on_first_rank(self._wake)
        if weight_version != self.weight_version:
            if self._sleeps:
                self.policy.prepare_for_lp_inference()  # the weights alone
            self._refit(weight_version)
        if self._sleeps:
            self.policy.offload_after_refit()
        return True

    def submit(
        self, prompt: tuple[int, ...], sample_id: int, group: tuple[int, ...], greedy: bool = False
    ) -> Future[Response]:
        """One response; its random numbers are of seed, sample id and prompt length.

        The future raises TrainingError if no server is left, RequestError if this response is not to be had.
        """
        assert self._pool is not None, "on the first rank of a replica, when weights have been sent"
        params = replace(self.params, temperature=0.0) if greedy else self.params
        longest = min(params.max_new_tokens, self.max_sequence_length - len(prompt))
        states = random_states(params.seed, torch.tensor([sample_id]))
        seed = int(uniforms(states, torch.tensor([len(prompt)])).item() * 2**53)
        return self._pool.submit(Request(prompt, longest, seed, sample_id, group), params)

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """A response to each row, as of `submit`.

        Raises:
            UserError: a prompt that is empty, or leaves no room for a response.
            TrainingError: no server is left.
        """
        if not self._is_connected:
            self.prepare_for_generation()
        rows = prompts_of(data, self.max_sequence_length)

        def ask() -> list[Response]:
            asked = [self.submit(prompt, sample_id, prompt, greedy) for sample_id, prompt in rows]
            return [self._result(future, prompt) for future, (_, prompt) in zip(asked, rows, strict=True)]

        if isinstance(data, LocalBatch):
            topology = self.policy.topology
            begun = self._beside.submit(ask) if topology.leads_replica else None
            led = settle(begun, self.config.parallel.meeting_seconds) or []
            experts = self._experts()
            shape = None if experts is None else (sum(experts.sparse_layers), experts.topk)
            responses = share_responses(led, [prompt for _, prompt in rows], topology, shape)
        else:
            responses = self._on_first_rank(ask)
        return output_of([prompt for _, prompt in rows], responses, self.tokenizer.pad_token_id)

    def _result(self, asked: Future[Response], prompt: Sequence[int]) -> Response:
        """A response; an empty one where a request has failed."""
        try:
            return asked.result()
        except RequestError as error:
            self.say(f"a sample has no response, and counts as failed: {error}")
            experts = self._experts()
            shape = None if experts is None else (len(prompt), sum(experts.sparse_layers), experts.topk)
            routed = None if shape is None else torch.full(shape, -1, dtype=torch.int16)
            return Response([], [], ended=False, routed_experts=routed)

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """With `generation.offload` the servers fall asleep, and the policy has all its memory again.

        Raises:
            TrainingError: no server is left.
        """
        if self._sleeps and self._is_connected:
            self._on_first_rank(self._put_to_sleep)
            self.policy.prepare_for_training()
        return True

    def close(self) -> None:
        """End the servers that were started here; what they are being asked is not waited for."""
        self._beside.shutdown(wait=False, cancel_futures=True)
        if self._pool is not None:
            self._pool.close()
        if self._service is not None:
            self._service.close()

    def _version(self) -> str:
        return f"{self._launch}.{self.weight_version}"

    def _on_first_rank(self, work: Callable[[], T]) -> T:
        begun = self._beside.submit(work) if self.policy.is_writer else None
        return broadcast_result(begun, self.config.parallel.meeting_seconds)

    # ------------------------------------------------------------ servers

    def _connect(self) -> None:
        """Start or find the servers; the first rank of each replica asks them from now on."""
        # Versions of other runs, and of a server started anew, are not ours.
        self._launch, urls = self._on_first_rank(lambda: (secrets.token_hex(4), self._find()))
        if self.policy.topology.leads_replica:
            connections = math.ceil(self.config.rollouts.generation_batch_size / self.policy.topology.data.size)
            drop = self._drop if self.policy.is_writer else _drop_in_silence
            servers = [VLLMServer(url, connections, self._experts()) for url in urls]
            self._pool = ServerPool(servers, drop, self.config.generation.vllm.request_seconds)
        self._on_first_rank(self._join_all)
        self._is_connected = True

    def _experts(self) -> Experts | None:
        """Of the model, if the servers are to tell which of them tokens go to."""
        family = self.policy.model.family
        if not self.config.model.moe_router_replay:
            return None
        assert isinstance(family, Mixture), "checked as the model was built"
        return family.experts

    def _find(self) -> list[str]:
        """URLs of servers that are ready for this run."""
        vllm = self.config.generation.vllm
        if not vllm.urls:
            self._service = VLLMServerProcesses(self.config, self.config.output_dir / SERVER_LOGS)
        urls = vllm.urls or self._service.urls  # type: ignore[union-attr]
        deadline = time.monotonic() + vllm.start_seconds
        for url in urls:
            server = VLLMServer(url, connections=1)
            wait_until_ready(server, self._service, deadline)
            check_server(server, self.config)
        return list(urls)

    def _join_all(self) -> None:
        assert self._pool is not None
        joined = self._pool.each(self._join)
        self._groups = RefitGroups(joined)
        for url in set(joined) - set(self._pool.servers):  # dropped meanwhile
            self._groups.leave_out(url)

    def _drop(self, url: str, reason: str) -> None:
        self._groups.leave_out(url)
        died = self._service.why_ended(url, seconds=1.0) if self._service else None
        if self._service is not None:
            self._service.end(url)
        self.say(f"a vLLM server is dropped: {reason}{f'; {died}' if died else ''}")

    def _join(self, server: VLLMServer) -> RefitGroup:
        """A group of this process and the server's."""
        size = 1 + server.get("/get_world_size", CONTROL_SECONDS)["world_size"]
        ip = local_address(urlsplit(server.url).hostname or "")
        store = RefitStore(ip, 0, 0, self._refit_seconds)
        info = {
            "ip": ip, "port": store.port, "first_rank": 1, "world_size": size, "timeout": self._refit_seconds,
            "tensors": encode_refit_info(self.policy.prepare_refit_info()), "on_host": self._sleeps,
        }  # fmt: skip
        with ThreadPoolExecutor(1) as beside:
            path, seconds = "/init_weight_transfer_engine", 2 * self._refit_seconds
            joining = beside.submit(server.post, path, {"init_info": info}, seconds)
            try:
                group = RefitGroup(store, size, on_host=self._sleeps)
            except RuntimeError as error:
                raise joining.exception() or ServerError(f"{server.url}: {error}") from None
            joining.result()
        return group

    # ------------------------------------------------------------ sleep

    def _make_room(self) -> None:
        """vLLM takes what it wants of the device as it wakes; of what is free as it starts."""
        if self._is_connected:
            self.policy.offload_before_refit()
        else:
            self.policy.offload_after_refit()

    def _wake(self) -> None:
        """Also servers that another run has left asleep; it does nothing to those that are awake."""
        assert self._pool is not None
        self._pool.each(lambda server: server.post("/wake_up", {}, self._refit_seconds))

    def _put_to_sleep(self) -> None:
        assert self._pool is not None
        self._pool.each(lambda server: server.post("/sleep?level=1", {}, self._refit_seconds))

    # ------------------------------------------------------------ weights

    def _refit(self, version: int) -> None:
        """Pause, send, resume. What a server has computed of prompts goes with the old weights; what it is answering
        goes on with the new ones."""
        self.weight_version = version
        if self._pool is not None:
            self._pool.announce(self._version(), version)
        torch.distributed.barrier()  # a response with the new weights is for no rank one of unknown weights
        self._on_first_rank(self._begin_update)
        self.policy.model.finish_param_gather()
        tensors: Iterator[tuple[str, torch.Tensor]]
        tensors = export_hf_weights(self.policy.model, copies=False, first_only=True)
        if self._sleeps:
            tensors = ((name, tensor.cpu()) for name, tensor in tensors)
        info = self.policy.prepare_refit_info()
        send_weights(tensors, info, self._groups if self.policy.is_writer else None, BUCKET_BYTES)
        servers = self._on_first_rank(self._finish_update)
        if self._pool is not None:
            self._pool.settle(servers)

    def _begin_update(self) -> None:
        def begin(server: VLLMServer) -> None:
            server.post("/pause?mode=keep&clear_cache=true", {}, CONTROL_SECONDS)
            server.post("/start_weight_update", {}, CONTROL_SECONDS)

        def receive(server: VLLMServer) -> None:
            server.post("/update_weights", {"update_info": {}}, 2 * self._refit_seconds)

        assert self._pool is not None
        self._pool.each(begin)
        self._updating = self._pool.begin_each(receive)

    def _finish_update(self) -> list[str]:
        def finish(server: VLLMServer) -> None:
            server.post("/finish_weight_update", {"weight_version": self._version()}, self._refit_seconds)
            server.post("/resume", {}, CONTROL_SECONDS)

        assert self._pool is not None
        for url, error in self._groups.failures.items():
            self._pool.drop(url, f"{url}: the weights could not be sent: {error}")
        self._pool.gather(self._updating)
        self._pool.each(finish)
        return self.servers


def _drop_in_silence(url: str, reason: str) -> None:
    """The first rank tells of what becomes of servers."""


def wait_until_ready(server: VLLMServer, service: VLLMServerProcesses | None, deadline: float) -> None:
    """Until a server answers; `service` if it has started it.

    Raises:
        UserError: it has ended, or does not answer until `deadline` (of `time.monotonic`).
    """
    while True:
        try:
            server.get("/health", CONTROL_SECONDS)
            return
        except ServerError as error:
            ended = service.why_ended(server.url) if service else None
            if ended is not None:
                raise UserError(f"generation.vllm: the server {server.url} did not start: {ended}") from None
            if time.monotonic() > deadline:
                raise UserError(f"generation.vllm: {error} (within generation.vllm.start_seconds)") from None
        time.sleep(POLL_SECONDS)


def check_server(server: VLLMServer, config: RLConfig) -> None:
    """Raises UserError if a server cannot be the one for this run."""
    (model, *_) = server.get("/v1/models", CONTROL_SECONDS)["data"]
    wanted = config.data.max_sequence_length
    if model["max_model_len"] < wanted:
        raise UserError(
            f"generation.vllm.urls: {server.url} takes {model['max_model_len']} tokens at most, "
            f"data.max_sequence_length is {wanted}; start it by scripts/serve_vllm.py with this configuration"
        )
    if config.generation.offload and platform.has_gpu() and not _can_sleep(server):
        raise UserError(
            f"generation.offload: {server.url} runs without --enable-sleep-mode; start it by scripts/serve_vllm.py "
            "with this configuration"
        )


def _can_sleep(server: VLLMServer) -> bool:
    """As far as it tells."""
    try:
        told = server.get("/server_info?config_format=json", CONTROL_SECONDS)
        return bool(told["vllm_config"]["model_config"]["enable_sleep_mode"])
    except (ServerError, TrainingError, KeyError, TypeError):
        return True
