"""Who answers the prompts of GRPO."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from mcore_rl.config.base import AboveZero, Count, Directory, Name, Positive, Section, refuse_bool


class VLLMConfig(Section):
    """vLLM's servers, which have an environment and processes of their own (docs/rollouts.md)."""

    urls: tuple[Annotated[str, Field(pattern=r"^http://[^/?#:]+:\d+$")], ...] = ()
    """Of servers that `scripts/serve_vllm.py` has started, as http://HOST:PORT; without any, the run starts its own on
    the machine of its first rank."""
    num_servers: Positive = 1
    """How many are started."""
    tensor_parallel_size: Positive = 1
    """Processes that share out the model in each."""
    devices: tuple[Count, ...] = ()
    """GPUs of the servers, one a process in their order; those that this machine shows first if not given."""
    host: Name = "127.0.0.1"
    """Address that they listen on. Whoever can reach it can replace the weights and run code, without a password: this
    machine alone, or a network that is all yours."""
    port: Annotated[int, Field(ge=1024, lt=2**16), BeforeValidator(refuse_bool)] = 8100
    """Of the first server; the others take those behind it."""
    python: Directory = Path(".venv-vllm/bin/python")
    """The interpreter that has vLLM (`make install-vllm`)."""
    arguments: tuple[str, ...] = ()
    """More arguments of vLLM's server, such as [--gpu-memory-utilization, "0.5"]."""
    start_seconds: AboveZero = 900.0
    """A server that does not answer within this time has failed."""
    request_seconds: AboveZero = 1800.0
    """A server that takes longer over a response is given up."""

    @model_validator(mode="after")
    def _consistent(self) -> VLLMConfig:
        if len(set(self.urls)) < len(self.urls):
            raise ValueError("urls: a server stands there twice")
        if self.port + self.num_servers > 2**16:
            raise ValueError(f"port: there are no {self.num_servers} ports from {self.port} on")
        needed = self.num_servers * self.tensor_parallel_size
        if self.devices and (len(self.devices) != needed or len(set(self.devices)) != needed):
            raise ValueError(f"devices: name {needed} different GPUs (num_servers x tensor_parallel_size)")
        return self


class GenerationConfig(Section):
    """Who answers the prompts."""

    backend: Literal["megatron", "vllm"] = "megatron"
    """megatron: the training processes, by the weights that they train. vllm: servers that are sent them."""
    max_token_mult_prob_error: Annotated[float, Field(gt=1), BeforeValidator(refuse_bool)] | None = None
    """A step whose `token_mult_prob_error` is larger ends the run: sampler and trainer disagree too much."""
    offload: bool = False
    """While prompts are answered, what the policy does not need for it is in the host's memory. megatron: all but its
    weights. vllm: everything, as the servers are on the GPUs that train; while it scores and trains they sleep."""
    vllm: VLLMConfig = VLLMConfig()

    @model_validator(mode="after")
    def _used(self) -> GenerationConfig:
        if self.backend != "vllm" and self.vllm != VLLMConfig():
            raise ValueError(f"vllm: goes with backend=vllm alone, not with {self.backend}")
        return self
