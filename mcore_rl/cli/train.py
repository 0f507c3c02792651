"""The training programs by their algorithms' names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mcore_rl.cli.entry_point import run_script
from mcore_rl.config import (
    DistillationConfig,
    DPOConfig,
    GRPOConfig,
    KTOConfig,
    PPOConfig,
    RMConfig,
    SFTConfig,
    TrainingConfig,
    load_config,
)
from mcore_rl.errors import UserError
from mcore_rl.run.model_card import write_model_card
from mcore_rl.utils.hub import push
from mcore_rl.utils.torchrun import rank

# Algorithms import PyTorch and Megatron: only once the configuration has been found right.


def _sft(config: SFTConfig) -> Path | None:
    from mcore_rl.algorithms.sft import train_sft

    return train_sft(config)


def _dpo(config: DPOConfig) -> Path | None:
    from mcore_rl.algorithms.dpo import train_dpo

    return train_dpo(config)


def _rm(config: RMConfig) -> Path | None:
    from mcore_rl.algorithms.rm import train_rm

    return train_rm(config)


def _kto(config: KTOConfig) -> Path | None:
    from mcore_rl.algorithms.kto import train_kto

    return train_kto(config)


def _distill(config: DistillationConfig) -> Path | None:
    from mcore_rl.algorithms.distill import train_distill

    return train_distill(config)


def _grpo(config: GRPOConfig, record: Path | None, replay: Path | None) -> Path | None:
    from mcore_rl.algorithms.grpo import train_grpo

    return train_grpo(config, record, replay)


def _ppo(config: PPOConfig, record: Path | None, replay: Path | None) -> Path | None:
    from mcore_rl.algorithms.ppo import train_ppo

    return train_ppo(config, record, replay)


@dataclass(frozen=True)
class Program:
    """
    train: returns the directory of the exported model, None without one.
    file_options: options that take a path, and what they are for.
    """

    description: str
    config: type[TrainingConfig]
    train: Callable[..., Path | None]
    file_options: Mapping[str, str] = field(default_factory=dict)


RECORDINGS = {
    "record": "a file that keeps every step's rollouts",
    "replay": "such a file, to train from its rollouts instead of generating",
}

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
        RECORDINGS,
    ),
    "ppo": Program("Proximal policy optimization, with a critic.", PPOConfig, _ppo, RECORDINGS),
}


def load_for(algorithm: str, path: str, overrides: Sequence[str]) -> TrainingConfig:
    """The configuration of a training program, for a script that was told by `--algorithm` which one it is.

    Raises:
        UserError: it is none; says which program's it was taken for.
    """
    try:
        return load_config(PROGRAMS[algorithm].config, path, overrides)
    except UserError as error:
        raise UserError(f"{error} (taken for a configuration of --algorithm {algorithm})") from None


def train(algorithm: str, arguments: Sequence[str] | None = None, usage: str | None = None) -> None:
    """Run a training program in this process, alone or as one rank of several, and exit as `run_script` says.

    Args:
        arguments: of the command line; this process's own if left out.
        usage: how the program is called, if not by a script's name.
    """
    program = PROGRAMS[algorithm]

    def train_and_push(config: TrainingConfig, **files: Path | None) -> None:
        exported = program.train(config, **files)
        # Once the ranks' groups are closed: others would give up waiting for an upload.
        if exported is not None and config.checkpoint.push_to_hub is not None and rank() == 0:
            write_model_card(exported, config)
            print(f"pushed to {push(exported, config.checkpoint.push_to_hub)}", flush=True)

    run_script(algorithm, program.config, train_and_push, program.description, program.file_options, arguments, usage)
