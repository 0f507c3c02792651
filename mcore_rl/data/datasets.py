"""Which records an algorithm is trained on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from mcore_rl.config import RLConfig, TrainingConfig
from mcore_rl.data.prompts import load_prompt_dataset
from mcore_rl.data.records import (
    load_preference_dataset,
    load_reward_dataset,
    load_sft_dataset,
    load_unpaired_dataset,
)

SUPERVISED: dict[str, Callable[..., Any]] = {
    "sft": load_sft_dataset,
    "distill": load_sft_dataset,
    "dpo": load_preference_dataset,
    "rm": load_reward_dataset,
    "kto": load_unpaired_dataset,
}
"""Loading functions by algorithm."""


def loader_of(config: TrainingConfig) -> Callable[..., Any]:
    """Called with a source, a tokenizer, a `DataConfig`, and `say` and `cache`: the algorithm's dataset."""
    if isinstance(config, RLConfig):
        valued = config.environment.valued_columns
        return partial(load_prompt_dataset, max_prompt_length=config.max_prompt_length, valued=valued)
    return SUPERVISED[config.algorithm]
