"""The training programs by their algorithms' names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mcore_rl.config import DistillationConfig, DPOConfig, GRPOConfig, KTOConfig, RMConfig, SFTConfig, TrainingConfig
from mcore_rl.entry_point import run_script

# Algorithms import PyTorch and Megatron: only once the configuration has been found right.


def _sft(config: SFTConfig) -> None:
    from mcore_rl.algorithms.sft import train_sft

    train_sft(config)


def _dpo(config: DPOConfig) -> None:
    from mcore_rl.algorithms.dpo import train_dpo

    train_dpo(config)


def _rm(config: RMConfig) -> None:
    from mcore_rl.algorithms.rm import train_rm

    train_rm(config)


def _kto(config: KTOConfig) -> None:
    from mcore_rl.algorithms.kto import train_kto

    train_kto(config)


def _distill(config: DistillationConfig) -> None:
    from mcore_rl.algorithms.distill import train_distill

    train_distill(config)


def _grpo(config: GRPOConfig, record: Path | None, replay: Path | None) -> None:
    from mcore_rl.algorithms.grpo import train_grpo

    train_grpo(config, record, replay)


@dataclass(frozen=True)
class Program:
    """
    file_options: options that take a path, and what they are for.
    """

    description: str
    config: type[TrainingConfig]
    train: Callable[..., None]
    file_options: Mapping[str, str] = field(default_factory=dict)


PROGRAMS = {
    "sft": Program("Supervised fine-tuning.", SFTConfig, _sft),
    "dpo": Program("Direct preference optimization.", DPOConfig, _dpo),
    "rm": Program("A reward model from preferences (Bradley–Terry).", RMConfig, _rm),
    "kto": Program("Kahneman–Tversky optimization of unpaired responses.", KTOConfig, _kto),
    "distill": Program("Distillation from a teacher beside the student.", DistillationConfig, _distill),
    "grpo": Program(
        "Group relative policy optimization, and its kin.",
        GRPOConfig,
        _grpo,
        {
            "record": "a file that keeps every step's rollouts",
            "replay": "such a file, to train from its rollouts instead of generating",
        },
    ),
}


def train(algorithm: str, arguments: Sequence[str] | None = None, usage: str | None = None) -> None:
    """Run a training program in this process, alone or as one rank of several, and exit as `run_script` says.

    Args:
        arguments: of the command line; this process's own if left out.
        usage: how the program is called, if not by a script's name.
    """
    program = PROGRAMS[algorithm]
    run_script(algorithm, program.config, program.train, program.description, program.file_options, arguments, usage)
