"""The engine that a configuration asks for."""

from __future__ import annotations

from typing import Any

from mcore_rl.config import RLConfig
from mcore_rl.models.generation.interfaces import GenerationInterface
from mcore_rl.models.generation.megatron_generation import megatron_generation_of, sampling_params_of
from mcore_rl.models.generation.vllm_generation import VLLMGeneration
from mcore_rl.utils.console import Say, silent


def generation_of(config: RLConfig, policy: Any, tokenizer: Any, say: Say = silent) -> GenerationInterface:
    """What continues prompts with the weights of `policy`, a `MegatronPolicy`; `say` tells what becomes of servers."""
    if config.generation.backend == "vllm":
        return VLLMGeneration(config, policy, sampling_params_of(config, tokenizer), tokenizer, say)
    return megatron_generation_of(config, policy, tokenizer)
