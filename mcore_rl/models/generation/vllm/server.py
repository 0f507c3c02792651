"""Starts and ends vLLM servers as processes on this machine."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

from mcore_rl import platform
from mcore_rl.config import ModelConfig, RLConfig
from mcore_rl.errors import UserError
from mcore_rl.models.generation.vllm.key import VARIABLE
from mcore_rl.models.generation.vllm.placement import ServerPlace
from mcore_rl.models.generation.vllm.signing import NAME_VARIABLE, server_name
from mcore_rl.models.refit.transfer import listen
from mcore_rl.utils import torchrun
from mcore_rl.utils.console import PrintLine, silent
from mcore_rl.utils.model_directory import missing_files, vision_model_config
from mcore_rl.utils.process_groups import GRACE_SECONDS, GroupKeeper, end_groups

MODEL_NAME = "policy"
MIDDLEWARE = "mcore_rl.models.generation.vllm.middleware.RunKey"

ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # enables the routes for weight transfer
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
# Variables of torchrun and of a virtual environment that the servers must not inherit.
STRANGE = (*torchrun.VARIABLES, "PYTHONPATH", "VIRTUAL_ENV")
CPU_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


ENDING_SECONDS = 1.0
"""Time that a server which does not answer any more gets to end by itself, so that it is known why."""
PORT_SECONDS = GRACE_SECONDS + 10.0
"""Time that a server of an earlier start gets to end, and to leave its port."""
WATCH_SECONDS = 1.0
"""Seconds between two looks for servers that have ended."""
PAUSES = (0.0, 5.0, 30.0, 120.0, 600.0)
"""Seconds from the end of a server to its next start: the first time, the second time in a row, …"""
STABLE_SECONDS = 1800.0
"""A server that has run for this time begins a new row."""


def server_command(config: RLConfig, place: ServerPlace) -> list[str]:
    """Return the command line that starts the server at `place`."""
    vllm, longest = config.generation.vllm, config.data.max_sequence_length
    command = [
        str(vllm.python.absolute()), "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(config.model.path.absolute()), "--served-model-name", MODEL_NAME,
        "--host", place.host, "--port", str(place.port),
        "--dtype", config.model.dtype, "--max-model-len", str(longest),
        "--tensor-parallel-size", str(vllm.tensor_parallel_size),
        "--max-num-seqs", str(config.rollouts.generation_batch_size), "--seed", str(config.seed),
        "--generation-config", "vllm",  # the model directory's config would silently change the sampling
        "--logprobs-mode", "processed_logprobs",  # log-probabilities in the sampling distribution
        "--disable-uvicorn-access-log", "--enable-scale-out", "--middleware", MIDDLEWARE,
        "--weight-transfer-config", json.dumps({"backend": "mcore_rl"}),
    ]  # fmt: skip
    if config.model.trust_remote_code:
        command.append("--trust-remote-code")
    if config.model.moe_router_replay:
        command.append("--enable-return-routed-experts")
    if _returns_masks(config):
        command.append("--return-sampling-mask")
    if vision_model_config(config.model.path) is not None:
        # An update of the weights clears the cache of processed images in the server's API process and its engine one
        # after the other. A request in between would leave an image in one of them alone, which ends the server.
        command += ["--mm-processor-cache-gb", "0", "--limit-mm-per-prompt", json.dumps({"video": 0})]
    if overrides := _overrides(config.model):
        command += ["--hf-overrides", json.dumps(overrides)]
    if config.generation.offload and platform.has_gpu():  # vLLM rejects it on the CPU, where sleep calls free nothing
        command.append("--enable-sleep-mode")
    if not platform.has_gpu():
        # A chunked prompt rewinds random numbers, which the CPU's generators cannot do: seeded requests would crash
        # the server.
        batch = max(longest, 4096)
        command += ["--enforce-eager", "--no-enable-chunked-prefill", "--max-num-batched-tokens", str(batch)]
        if config.model.dtype == "float32" and "kv_lora_rank" in _fields(config.model.path):
            # On a processor with AMX, vLLM would choose kernels for latent attention that refuse float32.
            command += ["--attention-backend", "CPU_MLA"]
    return [*command, *vllm.arguments]


def server_environment(config: RLConfig, place: ServerPlace) -> dict[str, str]:
    """Return the environment variables of the server at `place`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(STRANGE)}
    environment |= ENVIRONMENT
    if config.model.moe_router_replay or _returns_masks(config):
        environment["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # the older one reports neither experts nor sampling masks
    if not platform.has_gpu():
        environment = {**CPU_ENVIRONMENT, **environment}
    if place.devices:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(place.devices)
    return environment


def describe_fp8_sampling(config: RLConfig) -> Iterator[str]:
    """Yield lines about sampling in FP8 by vLLM, with warnings of a large mismatch with the trainer."""
    scheme, fp8 = config.generation.vllm.quantization, config.model.fp8
    if scheme is None:
        return
    yield f"vLLM samples in FP8 ({scheme}); token_mult_prob_error shows how much its probabilities differ"
    if config.loss.truncated_importance_sampling_ratio is None:
        yield (
            "warning: importance weights are not bounded, and FP8 makes some of them large; set "
            "loss.truncated_importance_sampling_ratio=2"
        )
    if config.sampler_has_blocks and fp8 is not None and (fp8.recipe, fp8.scales) != ("blockwise", "float32"):
        yield (
            "warning: vLLM's FP8 has float32 scales of blocks, the trainer's has another form "
            f"({fp8.recipe}, {fp8.scales}), so they differ more than without FP8 in training; set "
            "model.fp8.recipe=blockwise model.fp8.scales=auto"
        )


@dataclass
class _Server:
    """A server of this machine.

    process: its process; None if it was ended and not started again.
    log_start: place in the log at which the output of `process` begins.
    started, ended: times of its last start and end; starts: number of starts in a row, see `PAUSES`.
    in_use: whether a run has used `process`, see `VLLMServerProcesses.end_used`.
    """

    place: ServerPlace
    log: Path
    process: subprocess.Popen[bytes] | None = None
    log_start: int = 0
    started: float = 0.0
    ended: float = 0.0
    starts: int = 0
    in_use: bool = False

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None


class VLLMServerProcesses:
    """Starts servers on this machine, starts them again if they end, and ends them.

    The method `close` ends the servers. They also end when this process ends, even if this process is killed. All
    methods may be called by any thread.

    Args:
        logs: directory for the servers' output.
        places: the places of the servers, which are all on this machine.
        key: the run's key. The servers get it in their environment, where only this user can read it.
        say: prints a message for the user.
        run: id of the run, if the servers answer no other run; empty otherwise.

    Raises:
        UserError: a port is taken, or the model's directory is quantized.
    """

    def __init__(
        self,
        config: RLConfig,
        logs: Path,
        places: Sequence[ServerPlace],
        key: str,
        say: PrintLine = silent,
        run: str = "",
    ) -> None:
        _check_precision(config.model.path)
        deadline = time.monotonic() + PORT_SECONDS
        for place in places:
            _check_port(place, deadline, say)
        logs.mkdir(parents=True, exist_ok=True)
        self.config, self.key, self.run, self._say = config, key, run, say
        self._keeper, self._lock, self._closed = GroupKeeper(), Lock(), Event()
        self._starting = Lock()  # one thread at a time looks for servers that have ended
        self._servers = {place.url: _Server(place, logs / f"{place.host}_{place.port}.log") for place in places}
        for server in self._servers.values():
            self._start(server)

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(self._servers)

    def why_ended(self, url: str, seconds: float = 0.0) -> str | None:
        """Return why a server has ended; wait up to `seconds` for its end. Return None if it still runs."""
        server = self._servers.get(url)
        process = server.process if server is not None else None
        if server is None or process is None:
            return None
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        printed = server.log.read_bytes()[server.log_start :].decode(errors="replace")
        return f"it ended with status {process.returncode}: {_last_error(printed)} ({server.log})"

    def end(self, *urls: str) -> None:
        """End the servers with these URLs, unless they have ended.

        A server is not ended twice, because another process may get its process id.
        """
        with self._lock:
            ending = list[subprocess.Popen[bytes]]()
            for server in (self._servers[url] for url in urls if url in self._servers):
                if server.process is not None:
                    ending.append(server.process)
                    server.ended = time.monotonic()
                server.process = None
            processes = {process.pid: process for process in ending}
            end_groups(processes, has_ended=lambda pid: processes[pid].poll() is not None)
            for process in ending:
                process.wait()
                self._keeper.remove(process.pid)

    def mark_used(self, urls: Iterable[str]) -> None:
        """Record that a run uses the servers with these URLs as they run now."""
        with self._lock:
            for server in (self._servers[url] for url in urls if url in self._servers):
                server.in_use = True

    def end_used(self, urls: Iterable[str]) -> None:
        """End those of the servers with these URLs that were not started again since the last `mark_used`.

        A run calls it for servers that failed. A server that was started again does not have the failure. The reason is
        printed if a server has ended by itself.
        """
        with self._lock:
            servers = {url: self._servers[url] for url in urls if url in self._servers}
            used = {url: server.process for url, server in servers.items() if server.in_use}
        for url in used:
            self._say_if_ended(url, ENDING_SECONDS)
        with self._starting:  # meanwhile, one that has ended may have been started again
            self.end(*(url for url, process in used.items() if self._servers[url].process is process))

    def has_ended(self) -> bool:
        """Return whether a server has ended, by itself or by `end`."""
        return not all(self._are_running())

    def all_have_ended(self) -> bool:
        """Return whether no server runs."""
        return not any(self._are_running())

    def _are_running(self) -> list[bool]:
        """Return, for each server, whether its process runs."""
        with self._lock:
            return [server.is_running for server in self._servers.values()]

    def start_ended(self) -> list[str]:
        """Start the servers that have ended again, on the same GPUs and ports; return their URLs.

        One that ends again and again is started after pauses.
        """
        with self._starting:
            return self._start_ended()

    def _start_ended(self) -> list[str]:
        begun = list[str]()
        for url, server in self._servers.items():
            if self._say_if_ended(url):
                self.end(url)  # its workers may have survived it
            with self._lock:
                if self._closed.is_set():
                    return begun
                if server.process is not None:
                    continue
                if server.ended - server.started > STABLE_SECONDS:
                    server.starts = 0
                if time.monotonic() - server.ended < PAUSES[min(max(server.starts, 1), len(PAUSES)) - 1]:
                    continue
                try:
                    self._start(server)
                except OSError as error:  # for example too many processes: tried again after the next pause
                    server.starts, server.started = server.starts + 1, time.monotonic()
                    server.ended = server.started
                    said = f"a vLLM server cannot be started again: {url}; {error}"
                else:
                    said = f"a vLLM server is started again: {url}"
                    begun.append(url)
            self._say(said)
        return begun

    def without_weights(self) -> list[str]:
        """Return the URLs of the servers that have ended since the last `mark_used`, whether they run again or not."""
        with self._lock:
            return [url for url, server in self._servers.items() if not (server.is_running and server.in_use)]

    def _say_if_ended(self, url: str, seconds: float = 0.0) -> bool:
        """Print why a server has ended by itself, and return True; wait up to `seconds` for its end."""
        why = self.why_ended(url, seconds)
        if why is not None:
            self._say(f"a vLLM server has ended: {url}; {why}")
        return why is not None

    def watch(self) -> None:
        """Start servers again as soon as they end, from now on, in a thread."""

        def look() -> None:
            while not self._closed.wait(WATCH_SECONDS):
                self.start_ended()

        Thread(target=look, name="vllm-servers", daemon=True).start()

    def close(self) -> None:
        """End all servers."""
        self._closed.set()
        self.end(*self.urls)
        self._keeper.close()

    def _start(self, server: _Server) -> None:
        command, environment = server_command(self.config, server.place), server_environment(self.config, server.place)
        environment |= {VARIABLE: self.key, NAME_VARIABLE: server_name(server.place.url, self.run)}
        with open(server.log, "ab") as log:
            server.log_start = log.tell()
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        server.process, server.started, server.starts = process, time.monotonic(), server.starts + 1
        server.in_use = False
        self._keeper.add(process.pid)


def _check_precision(path: Path) -> None:
    """Raise UserError if a model is quantized: vLLM would keep its weights quantized, but receives bfloat16 weights."""
    if _fields(path).get("quantization_config"):
        raise UserError(
            f"generation.backend: vLLM would keep {path} quantized, but the trainer sends weights in bfloat16; "
            "set model.path to a copy in bfloat16 (mcore-rl convert from-hf, then mcore-rl convert to-hf)"
        )


def _fields(path: Path) -> dict[str, Any]:
    """Return the fields of a model directory's config.json; none if there is no such file."""
    file = path / "config.json"
    fields: dict[str, Any] = json.loads(file.read_bytes()) if file.is_file() else {}
    return fields


def _overrides(model: ModelConfig) -> dict[str, Any]:
    """Return fields of config.json to change.

    vLLM would tie an LM head that the trainer trains as separate weights. It would rotate by sections in blocks if
    `mrope_interleaved` is missing, where transformers and the trainer always interleave them.
    """
    fields, found = _fields(model.path), dict[str, Any]()
    parts = {**fields.get("text_config", {})}
    if not missing_files(model.path):
        from mcore_rl.models.megatron.model.hf_config import has_separate_head  # imports Megatron

        if has_separate_head(model.path, model.trust_remote_code):
            found = {"tie_word_embeddings": False}
    of_text = dict(found) if parts else {}
    for key in ("rope_parameters", "rope_scaling"):
        rope = parts.get(key) or {}
        if vision_model_config(model.path) and "mrope_section" in rope and not rope.get("mrope_interleaved"):
            of_text[key] = {**rope, "mrope_interleaved": True}
    return {**found, "text_config": of_text} if of_text else found


def _returns_masks(config: RLConfig) -> bool:
    """Return whether to start servers with `--return-sampling-mask`.

    vLLM's build for the CPU refuses this flag. On the CPU it is therefore set only with `keep_sampling_mask=true`, and
    such a run ends with vLLM's error.
    """
    options = config.rollouts
    return options.sampled_at_most is not None and (platform.has_gpu() or options.keep_sampling_mask is True)


def _check_port(place: ServerPlace, deadline: float, say: PrintLine) -> None:
    """Wait until a server can listen on its port: an earlier server may still be ending.

    Raises:
        UserError: the port is still in use at `deadline`, or the address is not one of this machine.
    """
    waits = False
    while True:
        try:
            return listen(place.host, place.port).close()
        except OSError as error:
            if error.errno in (errno.EADDRNOTAVAIL, socket.EAI_NONAME, socket.EAI_AGAIN):
                raise UserError(
                    f"{place.host}: is not an address of this machine ({error.strerror}); give this node's address as "
                    "generation.vllm.host or in --hosts, and its index as --node-rank"
                ) from None
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise UserError(
                    f"generation.vllm.port: a server cannot listen on {place.host}:{place.port} "
                    f"({os.strerror(error.errno or 0)}); choose another port"
                ) from None
        if not waits:
            say(f"port {place.port} is in use; waiting {PORT_SECONDS:g} s, as an earlier server may be ending")
        waits = True
        time.sleep(ENDING_SECONDS)


def _last_error(printed: str) -> str:
    """Return the line of a server's output that best explains why it ended."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    errors = [line for line in lines if "Error: " in line and "WARNING" not in line]
    return (errors[:1] or lines[-1:] or ["it printed nothing"])[0][-300:]
