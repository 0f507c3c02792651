"""Generation by vLLM's servers. The servers receive the policy's weights.

The first rank of each data-parallel replica sends requests in the background. `weights` updates the servers'
weights. A server that fails is dropped, and the run continues with the remaining servers. If it answers again later,
it is used again from the next update of the weights on. The first rank of each node starts the servers of its node, and
starts those that end again.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from mcore_rl import platform
from mcore_rl.config import RLConfig
from mcore_rl.config.rl import SERVER_LOGS
from mcore_rl.data.chat import samples_images
from mcore_rl.data.images import IMAGES, ImageReader, PlacedImage
from mcore_rl.distributed.batched_data_dict import BatchedDataDict, LocalBatch
from mcore_rl.distributed.collectives import all_ranks_true, broadcast_result, gather_objects, settle
from mcore_rl.distributed.topology import ParallelDimension, Topology
from mcore_rl.errors import TrainingError, UserError
from mcore_rl.models.generation.interfaces import (
    NO_OPTIONS,
    GenerationDatumSpec,
    GenerationOutputSpec,
    RequestError,
    RequestOptions,
    Response,
    StreamingGeneration,
    output_of,
    prompts_of,
    share_responses,
)
from mcore_rl.models.generation.megatron.generation import sampling_params_of
from mcore_rl.models.generation.sampling import SamplingParams, random_states, uniforms
from mcore_rl.models.generation.vllm.answers import Request
from mcore_rl.models.generation.vllm.client import ServerError, ServerPool, VLLMServer, WrongKeyError, WrongServerError
from mcore_rl.models.generation.vllm.images import ImageEncoder
from mcore_rl.models.generation.vllm.key import FILE, VARIABLE, run_key
from mcore_rl.models.generation.vllm.placement import ServerPlace, describe_places, places_of_launch
from mcore_rl.models.generation.vllm.server import VLLMServerProcesses
from mcore_rl.models.generation.vllm.weights import CONTROL_SECONDS, VLLMWeights, WeightSource
from mcore_rl.models.megatron.families.base import recorded_choices
from mcore_rl.models.megatron.families.mixtures import Experts, Mixture
from mcore_rl.utils.console import GenerationProgress, PrintLine, rank_zero_printer, silent

T = TypeVar("T")

POLL_SECONDS = 0.5
RETURN_SECONDS = 3.0
"""Time limit in seconds for a dropped server to answer, before each update of the weights."""


class Sender(WeightSource, Protocol):
    """Interface of the policy whose weights `VLLMGeneration` sends to the servers."""

    topology: Topology

    def offload_before_refit(self) -> int: ...

    def offload_after_refit(self) -> int: ...

    def prepare_for_lp_inference(self) -> None: ...

    def prepare_for_training(self) -> None: ...


class VLLMGeneration(StreamingGeneration):
    """Generates with vLLM's servers. It starts them, or connects to the URLs in the configuration.

    All methods except `submit` and `close` are collective.

    Args:
        policy: the policy whose weights the servers get.
        params: sampling parameters.
        say: prints a message for the user, for example about a dropped server.
    """

    def __init__(
        self, config: RLConfig, policy: Sender, params: SamplingParams, tokenizer: Any, say: PrintLine
    ) -> None:
        self.config, self.policy, self.params, self.tokenizer, self.say = config, policy, params, tokenizer, say
        self.max_sequence_length = config.data.max_sequence_length
        self.weight_version: int | None = None
        self._launch, self._key = "", ""
        self._beside = ThreadPoolExecutor(1, "generation")
        self._encoder = ImageEncoder(ImageReader(config.model.path))
        self._service: VLLMServerProcesses | None = None  # on the first rank of a node with servers of this run
        self._urls: list[str] = []
        self._failed: list[str] = []  # dropped servers, of which their nodes do not know yet
        self._pool: ServerPool | None = None
        self._weights: VLLMWeights | None = None
        self._is_connected, self._sleeps = False, config.generation.offload
        # Other ranks wait equally long in a collective, whose time limit must be longer.
        self._refit_seconds = config.parallel.timeout_seconds / 2

    @property
    def servers(self) -> list[str]:
        """URLs of the remaining servers; only on the first rank."""
        return list(self._pool.servers) if self._pool else []

    # ------------------------------------------------------------ generation

    def prepare_for_generation(self, *args: Any, weight_version: int | None = None, **kwargs: Any) -> bool:
        """Prepare the servers: start or connect them, and send them the policy's weights.

        The weights are not sent if the servers already have the version `weight_version`. With `generation.offload` the
        servers are woken first, and at the end the policy's memory on the device is released.

        Raises:
            UserError: a server does not start, does not answer, or does not suit this run.
            TrainingError: no server is left.
        """
        if self._sleeps:
            self._make_room()
        lost, has_new = list[str](), False
        if not self._is_connected:
            self._connect()
        else:
            lost = self._drop_ended()
            has_new = self._sleeps and self._start_ended()
        if weight_version is None:
            weight_version = 0 if self.weight_version is None else self.weight_version + 1
        if self._sleeps:
            self._on_first_rank(self._wake)
        if weight_version != self.weight_version or lost or has_new:
            if self._sleeps:
                self.policy.prepare_for_lp_inference()  # restores only the weights
            self._refit(weight_version, lost)
        if self._sleeps:
            self.policy.offload_after_refit()
        return True

    def submit(
        self,
        prompt: tuple[int, ...],
        sample_id: int,
        group: tuple[int, ...],
        greedy: bool = False,
        options: RequestOptions = NO_OPTIONS,
        images: Sequence[PlacedImage] = (),
    ) -> Future[Response]:
        """Start a request for one response and return the future response.

        The response's random numbers depend on seed, sample id and prompt length. The future raises TrainingError if no
        server is left, RequestError if this request fails or if the policy has sampled a token of an image that the
        prompt now contains, and UserError if an image cannot be read.
        """
        assert self._pool is not None, "`submit` is for the first rank of a replica, after weights were sent"
        if samples_images(self.tokenizer, prompt, images):  # the server would end, or be dropped
            return failed(
                "an earlier response has a token of images or videos, which vLLM would take for an image; such a "
                "response cannot be continued"
            )
        params = replace(self.params, temperature=0.0) if greedy else self.params
        if (own := options.distribution) is not None:
            params = replace(params, temperature=own.temperature, top_k=own.top_k, top_p=own.top_p, min_p=own.min_p)
        if options.stop_strings:
            params = replace(params, stop_strings=(*params.stop_strings, *options.stop_strings))
        asked = options.max_new_tokens or params.max_new_tokens
        longest = min(asked, params.max_new_tokens, self.max_sequence_length - len(prompt))
        states = random_states(params.seed, torch.tensor([sample_id]))
        seed = int(uniforms(states, torch.tensor([len(prompt)])).item() * 2**53)
        request = Request(prompt, longest, seed, sample_id, group, options.num_likeliest, tuple(images))
        return self._pool.submit(request, params)

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Return a response to the prompt in each row of `data`; each is requested as in `submit`.

        Raises:
            UserError: a prompt is empty, or leaves no room for a response; or an image cannot be read.
            TrainingError: no server is left.
        """
        if not self._is_connected:
            self.prepare_for_generation()
        rows = prompts_of(data, self.max_sequence_length)
        images = data.get(IMAGES) or [()] * len(rows)

        def ask() -> list[Response]:
            asked = [
                self.submit(prompt, sample_id, prompt, greedy, images=of_prompt or ())
                for (sample_id, prompt), of_prompt in zip(rows, images, strict=True)
            ]
            self._wait_for_all(asked, self.policy.topology.data.size if isinstance(data, LocalBatch) else 1)
            return [self._result(future, prompt) for future, (_, prompt) in zip(asked, rows, strict=True)]

        if isinstance(data, LocalBatch):
            topology = self.policy.topology
            begun = self._beside.submit(ask) if topology.leads_replica else None
            led = settle(begun, self.config.parallel.meeting_seconds) or []
            recorded = recorded_choices(self.policy.model.family, self.config.model)
            responses = share_responses(led, [prompt for _, prompt in rows], topology, recorded)
        else:
            responses = self._on_first_rank(ask)
        return output_of([prompt for _, prompt in rows], responses, self.tokenizer.pad_token_id)

    def _wait_for_all(self, asked: Sequence[Future[Response]], replicas: int) -> None:
        """Wait until all requests have ended, or one has failed; print the progress."""

        def counts() -> tuple[int, int]:
            ended = [future for future in asked if future.done() and future.exception() is None]
            return len(ended), sum(len(future.result().token_ids) for future in ended)

        progress = GenerationProgress(len(asked), replicas, self.say)
        for future in asked:
            while not future.done():
                wait([future], POLL_SECONDS)
                progress.reached(counts)
            if (error := future.exception()) is not None and not isinstance(error, RequestError):
                return

    def _result(self, asked: Future[Response], prompt: Sequence[int]) -> Response:
        """Wait for a request and return its response, or an empty response if the request has failed.

        Args:
            asked: the future response.
            prompt: tokens of the request's prompt.
        """
        try:
            return asked.result()
        except RequestError as error:
            self.say(f"a sample has no response, and counts as failed: {error}")
            recorded = recorded_choices(self.policy.model.family, self.config.model)
            choices = {choice.name: choice.unknown(len(prompt)) for choice in recorded}
            return Response(np.zeros(0, np.int32), np.zeros(0, np.float32), False, choices=choices)

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """End generation. With `generation.offload`, let the servers sleep, and move the policy back to the device."""
        if self._sleeps and self._is_connected:
            self._drop_ended()
            self._on_first_rank(self._put_to_sleep)
            self._end_failed()  # one that hangs would keep its memory
            self.policy.prepare_for_training()
        return True

    def close(self) -> None:
        """End the servers that this object started; do not wait for pending requests."""
        self._beside.shutdown(wait=False, cancel_futures=True)
        if self._weights is not None:
            self._weights.close()
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
        """Start the servers or connect to them, and prepare each replica's first rank to send them requests."""
        places, own = places_of_launch(self.config)
        if places and self.policy.is_writer:
            for line in describe_places(places):
                self.say(line)
        # The launch id distinguishes versions of other runs, and of a restarted server. The first rank hands the key to
        # the others, because they may not see its output_dir.
        self._launch, self._key = self._on_first_rank(
            lambda: (secrets.token_hex(4), run_key(self.config.output_dir / SERVER_LOGS))
        )
        starting = self._beside.submit(self._start, own) if own else None
        settle(starting, self.config.parallel.meeting_seconds)
        self._urls = [place.url for place in places] or list(self.config.generation.vllm.urls)
        if not self._on_first_rank(self._find):
            self.params = replace(self.params, max_kept_tokens=None)
        if self.policy.topology.leads_replica:
            drop = self._drop if self.policy.is_writer else _drop_in_silence
            urls = _from_own_share(self._urls, self.policy.topology.data)
            self._pool = ServerPool(map(self._server, urls), drop, self.config.generation.vllm.request_seconds)
        pool = self._pool if self.policy.is_writer else None
        self._weights = VLLMWeights(
            self.config, self.policy, pool, self._on_first_rank, self._refit_seconds, on_host=self._sleeps, say=self.say
        )
        self._weights.connect(self._urls)
        if self._service is not None:
            self._service.mark_used(self._urls)
            if not self._sleeps:
                self._service.watch()
        self._is_connected = True

    def _start(self, places: Sequence[ServerPlace]) -> None:
        """Start the servers of this node, and wait until they are ready."""
        say = rank_zero_printer(True)  # a node's own messages are printed there
        logs = self.config.output_dir / SERVER_LOGS
        self._service = VLLMServerProcesses(self.config, logs, places, self._key, say, self._launch)
        wait_until_started(self._service, self.config)

    def _server(self, url: str) -> VLLMServer:
        connections = math.ceil(self.config.rollouts.generation_batch_size / self.policy.topology.data.size)
        return self._client(url, connections, self._experts(), self._encoder)

    def _client(
        self, url: str, connections: int = 1, experts: Experts | None = None, encoder: ImageEncoder | None = None
    ) -> VLLMServer:
        run = "" if self.config.generation.vllm.urls else self._launch  # empty if other runs may use the server too
        return VLLMServer(url, connections, self._key, experts, encoder, run)

    def _experts(self) -> Experts | None:
        """Return the family's `experts` if servers must report the experts of each token; otherwise None."""
        family = self.policy.model.family
        if not self.config.model.moe_router_replay:
            return None
        assert isinstance(family, Mixture), "checked as the model was built"
        return family.experts

    def _find(self) -> bool:
        """Wait until all servers answer the first rank; return False if one lacks sampling masks that the run needs."""
        deadline = time.monotonic() + self.config.generation.vllm.start_seconds
        for url in self._urls:
            server = self._client(url)
            wait_until_ready(server, self._service, deadline)
            check_server(server, self.config)
        return not self.params.keeps_mask or self._have_masks(self._urls)

    def _have_masks(self, urls: Sequence[str]) -> bool:
        """Return whether all servers return sampling masks; if one does not, print a line.

        Raises:
            UserError: a server returns no masks, but the configuration requires them.
        """
        servers = {url: self._client(url) for url in urls}
        lacking = [url for url in urls if not _option(servers[url], "return_sampling_mask", False)]
        if not lacking:
            return True
        lack = f"{lacking[0]} does not run with --return-sampling-mask"
        if self.config.rollouts.keep_sampling_mask:
            raise UserError(
                f"generation.vllm.urls: {lack}, but {self.config.algorithm}.keep_sampling_mask=true needs this option; "
                "start the server with `mcore-rl vllm-servers` and this configuration"
            )
        self.say(f"{lack}: log-probabilities are over the whole vocabulary, not over the tokens that sampling keeps")
        return False

    def _drop(self, url: str, reason: str) -> None:
        if self._weights is not None:
            self._weights.leave_out(url)
        self.say(f"a vLLM server is dropped: {reason}")
        self._failed.append(url)
        if self._service is not None:
            self._service.end_used([url])

    def _end_failed(self) -> None:
        """End the servers that the first rank has dropped, if they still run. Collective."""

        def failed() -> list[str]:
            taken, self._failed = self._failed, []
            return taken

        dropped = self._on_first_rank(failed)
        if self._service is not None:
            self._service.end_used(dropped)

    def _start_ended(self) -> bool:
        """Start the servers that have ended again, while no weights of the policy are in their GPUs. Collective.

        Servers with GPUs of their own do not wait for this (`VLLMServerProcesses.watch`).

        Returns:
            Whether any server was started.
        """
        if all_ranks_true(self._service is None or not self._service.has_ended())[0]:
            return False
        self.policy.offload_after_refit()
        starting = None if self._service is None else self._beside.submit(self._wait_for_started, self._service)
        begun = settle(starting, self.config.parallel.meeting_seconds)
        return not all_ranks_true(not begun)[0]

    def _wait_for_started(self, service: VLLMServerProcesses) -> list[str]:
        """Start the servers that have ended again, and wait until each is ready or ends; return their URLs.

        If no server of this node runs, wait for the end of the pause before the next start.
        """
        deadline = time.monotonic() + self.config.generation.vllm.start_seconds
        while not (begun := service.start_ended()) and service.all_have_ended() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        for url in begun:
            try:
                wait_until_ready(VLLMServer(url, 1, service.key, run=service.run), service, deadline)
            except UserError as error:
                service.end(url)
                rank_zero_printer(True)(f"{error}; the run continues without it")
        return begun

    # ------------------------------------------------------------ sleep

    def _make_room(self) -> None:
        """Release device memory of the policy, so that vLLM can use it.

        Before the servers start, the weights are released too, because vLLM takes a share of the free memory at its
        start. Later only the training state is released.
        """
        if self._is_connected:
            self.policy.offload_before_refit()
        else:
            self.policy.offload_after_refit()

    def _wake(self) -> None:
        """Wake all servers; an earlier run may have left them asleep. A server that is awake does nothing."""
        assert self._pool is not None
        if self._pool.servers:  # there are none for a moment if the only one was started again
            self._pool.each(lambda server: server.post("/wake_up", {}, self._refit_seconds))

    def _put_to_sleep(self) -> None:
        """Put all servers to sleep; drop those that fail, even the last one, which may be started again."""
        assert self._pool is not None
        asked = self._pool.begin_each(lambda server: server.post("/sleep?level=1", {}, self._refit_seconds))
        for url, future in asked.items():
            if isinstance(error := future.exception(), (ServerError, TrainingError)):
                self._pool.drop(url, str(error))
            elif error is not None:
                raise error

    # ------------------------------------------------------------ weights

    def _refit(self, version: int, lost: Sequence[str]) -> None:
        """Send the weights to the servers as version `version`.

        Args:
            lost: servers that have ended (`_drop_ended`); the run waits for them if it has no other.
        """
        self.weight_version = version
        if self._pool is not None:
            self._pool.announce(self._version(), version)
        torch.distributed.barrier()  # all ranks must have the version before the first response with it arrives
        self._end_failed()
        assert self._weights is not None, "connected before"
        if returned := self._on_first_rank(partial(self._find_returned, is_waiting=bool(lost))):
            self._weights.connect(returned)
            if self._service is not None:
                self._service.mark_used(returned)
        servers = self._weights.send(version, self._version())
        if self._pool is not None:
            for url in set(returned) & set(servers):
                self._pool.add(self._server(url))
            self._pool.settle(servers)

    def _find_returned(self, is_waiting: bool) -> list[str]:
        """Return the URLs of dropped servers that answer again, for example because they were started again.

        They get no requests before they have the weights.

        Args:
            is_waiting: whether to wait for one if no server is left.
        """
        assert self._pool is not None
        dropped = [url for url in self._urls if url not in self._pool.servers]
        deadline, returned = time.monotonic() + self.config.generation.vllm.start_seconds, list[str]()
        with ThreadPoolExecutor(max(1, len(dropped))) as threads:
            while True:
                ready = threads.map(self._is_ready, dropped)
                returned = [url for url, is_ready in zip(dropped, ready, strict=True) if is_ready]
                if returned or self._pool.servers or not is_waiting or time.monotonic() > deadline:
                    break
                time.sleep(POLL_SECONDS)
        for url in returned:
            self.say(f"a vLLM server answers again: {url}")
            self._pool.add(self._client(url, 0))
        return returned

    def _drop_ended(self) -> list[str]:
        """Drop the servers that have ended since they got weights; return their URLs. Collective.

        They have lost the weights, and their connections to the ranks. `_refit` takes them again.
        """
        checking = None if self._service is None else self._beside.submit(self._service.without_weights)
        own = settle(checking, self.config.parallel.meeting_seconds) or []
        ended = {url for of_rank in gather_objects(own) for url in of_rank}
        if not ended:
            return []
        lost: list[str] = self._on_first_rank(lambda: sorted(ended.intersection(self.servers)))
        for url in lost:
            if self._pool is not None:
                self._pool.drop(url, f"{url}: it has ended, and gets weights again when it is ready")
        return lost

    def _is_ready(self, url: str) -> bool:
        """Return whether the server answers, and suits this run."""
        server = self._client(url)
        try:
            server.get("/health", RETURN_SECONDS)
            check_server(server, self.config)
            if self._sleeps:
                server.post("/wake_up", {}, self._refit_seconds)
        except (ServerError, TrainingError, UserError):
            return False
        return not self.params.keeps_mask or bool(_option(server, "return_sampling_mask", False))


def failed(reason: str) -> Future[Response]:
    """Return the future of a response that cannot be generated."""
    future = Future[Response]()
    future.set_exception(RequestError(reason))
    return future


def vllm_generation_of(config: RLConfig, policy: Any, tokenizer: Any, say: PrintLine = silent) -> VLLMGeneration:
    """Return an object that generates by vLLM's servers with the weights of `policy`, a `MegatronPolicy`."""
    unused = range(policy.model.num_ids, policy.model.vocab_size)
    params = replace(sampling_params_of(config, tokenizer), unused_ids=unused)
    return VLLMGeneration(config, policy, params, tokenizer, say)


def _from_own_share(urls: Sequence[str], replicas: ParallelDimension) -> list[str]:
    """Return `urls`, beginning with the first server of this replica's share.

    A replica sends requests to idle servers in this order. If all replicas began with the same server, few prompts
    would all go to the first servers, and the others would be idle.
    """
    start = replicas.rank * len(urls) // replicas.size
    return [*urls[start:], *urls[:start]]


def _drop_in_silence(url: str, reason: str) -> None:
    """Do nothing when a server is dropped: the first rank prints the message."""


def wait_until_ready(server: VLLMServer, service: VLLMServerProcesses | None, deadline: float) -> None:
    """Wait until a server answers.

    Args:
        service: the object that has started the server; None if this run has not started it.
        deadline: latest time, as a value of `time.monotonic`.

    Raises:
        UserError: the server has ended, does not answer before `deadline`, or is not one of this run.
    """
    while True:
        reason: ServerError | None = None
        try:
            server.get("/health", CONTROL_SECONDS)
        except ServerError as error:
            reason = error
        # Also if it answers: it may be the server of another command with the same key, which has the port.
        ended = service.why_ended(server.url) if service else None
        if ended is not None:
            taken = "; another generation.vllm.port may be free" if "address already in use" in ended.lower() else ""
            raise UserError(f"generation.vllm: the server {server.url} did not start: {ended}{taken}")
        if reason is None:
            return
        is_own = service is not None and server.url in service.urls  # then another program may use its port for now
        if isinstance(reason, WrongServerError) and not is_own:
            raise _as_user_error(reason)
        if time.monotonic() > deadline:
            raise UserError(f"generation.vllm: the server was not ready within generation.vllm.start_seconds: {reason}")
        time.sleep(POLL_SECONDS)


def _as_user_error(error: WrongServerError) -> UserError:
    """Return the error for a server that is not one of this run, or has another key."""
    if not isinstance(error, WrongKeyError):
        return UserError(f"generation.vllm: {error}")
    return UserError(
        f"generation.vllm.urls: {error}; set the environment variable {VARIABLE} to the key in the file "
        f"{SERVER_LOGS}/{FILE} of the servers' output_dir"
    )


def wait_until_started(service: VLLMServerProcesses, config: RLConfig) -> None:
    """Wait until all servers that were started on this machine are ready.

    Raises:
        UserError: a server has ended, or is not ready within `generation.vllm.start_seconds`.
    """
    deadline = time.monotonic() + config.generation.vllm.start_seconds
    for url in service.urls:
        wait_until_ready(VLLMServer(url, 1, service.key, run=service.run), service, deadline)


def check_server(server: VLLMServer, config: RLConfig) -> None:
    """Raise UserError if a server does not suit the run.

    It may have another key, allow too few tokens, or lack the sleep mode that the run needs.
    """
    try:
        (model, *_) = server.get("/v1/models", CONTROL_SECONDS)["data"]
    except WrongServerError as error:
        raise _as_user_error(error) from None
    wanted = config.data.max_sequence_length
    if model["max_model_len"] < wanted:
        raise UserError(
            f"generation.vllm.urls: {server.url} takes {model['max_model_len']} tokens at most, but "
            f"data.max_sequence_length is {wanted}; start the server with `mcore-rl vllm-servers` and "
            "this configuration"
        )
    if config.generation.offload and platform.has_gpu() and not _option(server, "enable_sleep_mode", unknown=True):
        raise UserError(
            f"generation.offload: {server.url} runs without --enable-sleep-mode; start the server with "
            "`mcore-rl vllm-servers` and this configuration"
        )


def _option(server: VLLMServer, name: str, unknown: bool) -> bool:
    """Return the option `name` of the server's model configuration, or `unknown` if the server does not report it."""
    try:
        told = server.get("/server_info?config_format=json", CONTROL_SECONDS)
        return bool(told["vllm_config"]["model_config"][name])
    except (ServerError, TrainingError, KeyError, TypeError):
        return unknown
