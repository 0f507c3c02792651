"""The random generators of a process: seeded, and their states as values that a checkpoint can hold."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from mcore_rl import platform

from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed


def seed_everything(seed: int) -> None:
    """Seed every random generator alike on all ranks; Megatron's tracker offsets them where needed."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def random_states() -> dict[str, Any]:
    """States of python, numpy, torch on the host and the device, and Megatron's tracker."""
    name, keys, *rest = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys, dtype="int64")), *rest),
        "torch": torch.get_rng_state(),
        "megatron": dict(get_cuda_rng_tracker().get_states()),
    }
    if (of_device := platform.random_state()) is not None:
        states["device"] = of_device
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Put every generator back where `random_states` found it."""
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype("uint32"), *rest))
    torch.set_rng_state(states["torch"])
    get_cuda_rng_tracker().set_states(states["megatron"])
    if "device" in states:
        platform.set_random_state(states["device"])
