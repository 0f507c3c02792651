"""Starts and ends vLLM servers as processes on this machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mcore_rl import platform
from mcore_rl.config import ModelConfig, RLConfig
from mcore_rl.errors import UserError
from mcore_rl.utils.model_directory import missing_files, vision_model_config
from mcore_rl.utils.process_groups import GroupKeeper, end_groups

MODEL_NAME = "policy"

ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # enables the routes for weight transfer
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
# Variables of torchrun and of a virtual environment that the servers must not inherit.
STRANGE = ("TORCHELASTIC", "PYTHONPATH", "VIRTUAL_ENV", "RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_", "MASTER_")
CPU_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def server_command(config: RLConfig, port: int) -> list[str]:
    """Return the command line that starts one server on `port`."""
    vllm, longest = config.generation.vllm, config.data.max_sequence_length
    command = [
        str(vllm.python.absolute()), "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(config.model.path.absolute()), "--served-model-name", MODEL_NAME,
        "--host", vllm.host, "--port", str(port),
        "--dtype", config.model.dtype, "--max-model-len", str(longest),
        "--tensor-parallel-size", str(vllm.tensor_parallel_size),
        "--max-num-seqs", str(config.rollouts.generation_batch_size), "--seed", str(config.seed),
        "--generation-config", "vllm",  # the model directory's config would silently change the sampling
        "--logprobs-mode", "processed_logprobs",  # log-probabilities in the sampling distribution
        "--disable-uvicorn-access-log", "--enable-scale-out",
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


class VLLMServerProcesses:
    """Starts the servers that a configuration describes, and ends them.

    The method `close` ends the servers. They also end when this process ends, even if this process is killed.

    Args:
        logs: directory for the servers' output.

    Raises:
        UserError: a port is taken, or the model's directory is quantized.
    """

    def __init__(self, config: RLConfig, logs: Path) -> None:
        vllm = config.generation.vllm
        _check_precision(config.model.path)
        for index in range(vllm.num_servers):
            _check_port(vllm.host, vllm.port + index)
        logs.mkdir(parents=True, exist_ok=True)
        self._keeper = GroupKeeper()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._logs: dict[str, Path] = {}
        self._log_starts: dict[str, int] = {}
        for index, url in enumerate(vllm.started_urls):
            port = vllm.port + index
            self._logs[url] = logs / f"vllm_{port}.log"
            self._processes[url] = self._start(server_command(config, port), self._environment(config, index), url)

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(self._processes)

    def why_ended(self, url: str, seconds: float = 0.0) -> str | None:
        """Return why a server has ended; wait up to `seconds` for its end. Return None if it still runs."""
        process = self._processes.get(url)
        if process is None:
            return None
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        printed = self._logs[url].read_bytes()[self._log_starts[url] :].decode(errors="replace")
        return f"it ended with status {process.returncode}: {_last_error(printed)} ({self._logs[url]})"

    def end(self, *urls: str) -> None:
        """End the servers with these URLs, unless they were ended before.

        A server is not ended twice, because another process may get its process id.
        """
        ending = [self._processes.pop(url) for url in urls if url in self._processes]
        processes = {process.pid: process for process in ending}
        end_groups(processes, has_ended=lambda pid: processes[pid].poll() is not None)
        for process in ending:
            process.wait()
            self._keeper.remove(process.pid)

    def close(self) -> None:
        """End all servers."""
        self.end(*self.urls)
        self._keeper.close()

    def _start(self, command: list[str], environment: dict[str, str], url: str) -> subprocess.Popen[bytes]:
        with open(self._logs[url], "ab") as log:
            self._log_starts[url] = log.tell()
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        self._keeper.add(process.pid)
        return process

    @staticmethod
    def _environment(config: RLConfig, index: int) -> dict[str, str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(STRANGE)}
        environment |= ENVIRONMENT
        if config.model.moe_router_replay or _returns_masks(config):
            environment["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # the older one reports neither experts nor sampling masks
        if not platform.has_gpu():
            environment = {**CPU_ENVIRONMENT, **environment}
        vllm = config.generation.vllm
        if vllm.devices:
            size = vllm.tensor_parallel_size
            devices = vllm.devices[index * size : (index + 1) * size]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
        return environment


def _check_precision(path: Path) -> None:
    """Raise UserError if a model is quantized: vLLM would keep its weights quantized, but receives bfloat16 weights."""
    if _fields(path).get("quantization_config"):
        raise UserError(
            f"generation.backend: vLLM would keep {path} quantized, but the trainer sends weights in bfloat16; "
            "set model.path to a copy in bfloat16 (scripts/convert_checkpoint.py hf-to-megatron, then "
            "megatron-to-hf)"
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


def _check_port(host: str, port: int) -> None:
    """Raise UserError if another program uses the port: that program would be mistaken for the new server."""
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        raise UserError(
            f"generation.vllm.port: a server cannot listen on {host}:{port} ({error.strerror}); choose another port"
        ) from None


def _last_error(printed: str) -> str:
    """Return the line of a server's output that best explains why it ended."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    errors = [line for line in lines if "Error: " in line and "WARNING" not in line]
    return (errors[:1] or lines[-1:] or ["it printed nothing"])[0][-300:]
