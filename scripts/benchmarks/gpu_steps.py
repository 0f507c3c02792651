"""Training steps of published shapes with random weights: simulated on any machine, or measured on this device."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl.config import DPOConfig, SFTConfig, TrainingConfig
from mcore_rl.simulation.sequences import Sequences, sequences_of
from mcore_rl.simulation.step import RankReport

SHAPES: dict[str, dict[str, Any]] = {
    "1b": {  # Llama 3.2
        "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True,
    },
    "8b": {  # Llama 3.1
        "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False,
    },
    "toy": {
        "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False,
    },
}  # fmt: skip
PACKS, WARM_UP, REPETITIONS = 4, 2, 5
RESPONSE_PART = 1 / 3


@dataclass(frozen=True)
class Case:
    """A training step to simulate or measure.

    tokens: number of tokens of a pack, which sequences of several lengths fill.
    layers: number of layers, fewer than the shape has if the optimizer state would not fit; by default, and with
        adapters (`lora`), all layers.
    """

    shape: str
    algorithm: str
    tokens: int
    layers: int | None = None
    lora: bool = False
    recompute: bool = False
    shares_prompts: bool = False

    @property
    def name(self) -> str:
        size = f"{self.tokens // 1024}k" if self.tokens >= 1024 else f"{self.tokens}"
        extras = {
            f"{self.layers} layers": self.layers,
            "LoRA": self.lora,
            "recomputed": self.recompute,
            "prompts shared": self.shares_prompts,
        }
        return ", ".join(
            [f"{self.algorithm.upper()} {self.shape} {size}", *(text for text, on in extras.items() if on)]
        )

    def write_config(self, directory: Path) -> Path:
        """Write the model's directory without weights, and return it."""
        from transformers import LlamaConfig

        values = {**SHAPES[self.shape], **({"num_hidden_layers": self.layers} if self.layers else {})}
        LlamaConfig(
            **values, max_position_embeddings=131_072, bos_token_id=None, eos_token_id=None, pad_token_id=0
        ).save_pretrained(directory)
        return directory

    def config(self, model: Path, dtype: str) -> TrainingConfig:
        """Return the configuration of one process that trains PACKS packs per step."""
        sequences = PACKS * len(self._lengths)
        pairs = self.algorithm == "dpo"
        values: dict[str, Any] = {
            "output_dir": "unused",
            "model": {"path": model, "dtype": dtype, "recompute_activations": self.recompute},
            "data": {"train": "unused", "max_sequence_length": max(self._lengths)},
            "batch": {
                "global_batch_size": sequences // 2 if pairs else sequences,
                "tokens_per_pack": self.tokens,
                "share_prefixes": self.shares_prompts,
            },
            "optimizer": {"lr": 1e-5},
            "trainer": {"max_steps": 1000},
        }
        if self.lora:
            values["model"]["lora"] = {"rank": 16}
        if pairs:
            values["dpo"] = {"reference": "precompute"}
        return (DPOConfig if pairs else SFTConfig).model_validate(values)

    @property
    def _lengths(self) -> tuple[int, ...]:
        """Lengths of a pack's sequences; both sequences of a pair have the same length."""
        parts = (4, 4, 8, 8, 16, 16, 16, 16) if self.algorithm == "dpo" else (2, 4, 8, 16, 32, 32)
        return tuple(self.tokens // part for part in parts)

    @property
    def tokens_of_step(self) -> int:
        """Number of tokens of all sequences, counting a shared prompt in each of them."""
        return PACKS * sum(self._lengths)

    def sequences(self, config: TrainingConfig) -> Sequences:
        return sequences_of(config, self._lengths, RESPONSE_PART)


CASES = {
    "sft_1b": [
        Case("1b", "sft", 8192),
        Case("1b", "sft", 8192, recompute=True),
        Case("1b", "sft", 32_768, recompute=True),
    ],
    "dpo_1b": [
        Case("1b", "dpo", 8192),
        Case("1b", "dpo", 8192, shares_prompts=True),
        Case("1b", "dpo", 32_768, recompute=True),
    ],
    "sft_8b": [
        Case("8b", "sft", 8192, layers=8),
        Case("8b", "sft", 8192, layers=8, recompute=True),
        Case("8b", "sft", 32_768, layers=8, recompute=True),
    ],
    "dpo_8b": [
        Case("8b", "dpo", 8192, layers=8),
        Case("8b", "dpo", 8192, layers=8, shares_prompts=True),
        Case("8b", "dpo", 32_768, layers=8, recompute=True),
    ],
    "lora_8b": [
        Case("8b", "sft", 8192, lora=True, recompute=True),
        Case("8b", "dpo", 8192, lora=True, recompute=True),
        Case("8b", "sft", 32_768, lora=True, recompute=True),
    ],
}
"""Cases by part of the benchmark; each part takes a few minutes."""

REHEARSED = {
    part: [
        Case(
            "toy", case.algorithm, case.tokens // 64, case.layers and 2, case.lora, case.recompute, case.shares_prompts
        )
        for case in (cases[:2] if part.endswith("1b") else cases[-1:])
    ]
    for part, cases in CASES.items()
}
"""Each kind of case with toy sizes, to check on a CPU that everything runs."""


@dataclass(frozen=True)
class Measured:
    """Measurements of a step: median seconds, peak bytes of the device, and the operations that training needs (a
    shared prompt counts once)."""

    seconds: float
    peak: int
    flops: float


def simulate_case(case: Case, directory: Path, dtype: str) -> RankReport:
    """Simulate a run of one rank from the model's configuration only, without weights."""
    from mcore_rl.simulation.search import simulate

    config = case.config(case.write_config(directory), dtype)
    return simulate(config, 1, [0], case.sequences(config))[0]


def measure_case(case: Case, directory: Path, dtype: str) -> Measured:
    """Measure the case on this process's device, on which nothing else has allocated memory."""
    from device_meter import DeviceMeter

    from mcore_rl import platform

    platform.initialize_platform()
    from mcore_rl.simulation.rank import Models, run_step
    from mcore_rl.simulation.sequences import invented_batch

    meter = DeviceMeter()
    config = case.config(write_weights(case.write_config(directory), dtype), dtype)
    models, sequences = Models.build(config), case.sequences(config)
    data = models.policy.own_rows(invented_batch(config, sequences))
    seconds: list[float] = []
    for _ in range(WARM_UP + REPETITIONS):
        meter.forget_peak()
        started = time.perf_counter()
        run_step(config, models, data, lambda phase: None)
        meter.wait()
        seconds.append(time.perf_counter() - started)
    flops = models.policy.flops_of(data)
    peak = meter.peak()
    models.policy.shutdown()
    return Measured(statistics.median(seconds[WARM_UP:]), peak, flops)


def write_weights(directory: Path, dtype: str) -> Path:
    """Write random weights, created on the device, to a model's directory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from mcore_rl import platform

    torch.manual_seed(0)
    with platform.device():
        config = AutoConfig.from_pretrained(directory)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(directory)
    del model
    platform.release_cached_memory()
    return directory
