"""The training programs, by algorithm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
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
from mcore_rl.utils.console import console
from mcore_rl.utils.model_directory import push
from mcore_rl.utils.torchrun import rank


@dataclass(frozen=True)
class Program:
    """A training program: its description, its configuration class, and the options that take a path."""

    description: str
    config: type[TrainingConfig]
    file_options: Mapping[str, str] = field(default_factory=dict)


RECORDINGS = {
    "record": "write the rollouts of every step to this file",
    "replay": "train on the rollouts of such a file; generate none",
}

PROGRAMS = {
    "sft": Program("Supervised fine-tuning.", SFTConfig),
    "dpo": Program("Direct preference optimization.", DPOConfig),
    "rm": Program("A reward model from preferences (Bradley–Terry).", RMConfig),
    "kto": Program("Kahneman–Tversky optimization of unpaired responses.", KTOConfig),
    "distill": Program("Distillation: train a student on the distribution of a teacher.", DistillationConfig),
    "grpo": Program("Group relative policy optimization (GRPO) and related algorithms.", GRPOConfig, RECORDINGS),
    "ppo": Program("Proximal policy optimization, with a critic.", PPOConfig, RECORDINGS),
}


def load_for(algorithm: str, path: str, overrides: Sequence[str]) -> TrainingConfig:
    """Return the configuration of a training program, for a script with `--algorithm`.

    Raises:
        UserError: the file is not a configuration of this program; the message names the program.
    """
    try:
        return load_config(PROGRAMS[algorithm].config, path, overrides)
    except UserError as error:
        raise UserError(f"{error} (taken for a configuration of --algorithm {algorithm})") from None


def train(algorithm: str, arguments: Sequence[str] | None = None, usage: str | None = None) -> None:
    """Run a training program in this process, alone or as one of several ranks, and exit with the status of
    `run_script`.

    Args:
        arguments: arguments of the command line; by default, those of this process.
        usage: name of the program in messages; by default, the name of the script.
    """
    program = PROGRAMS[algorithm]

    def train_and_push(config: TrainingConfig, **files: Path | None) -> None:
        # Algorithms import PyTorch and Megatron, so they are imported only after the configuration has been checked.
        module = import_module(f"mcore_rl.algorithms.{algorithm}")
        exported: Path | None = getattr(module, f"train_{algorithm}")(config, **files)
        # Upload after the process groups are closed: otherwise collectives of other ranks would time out meanwhile.
        if exported is not None and config.checkpoint.push_to_hub is not None and rank() == 0:
            write_model_card(exported, config)
            console.print(f"pushed to {push(exported, config.checkpoint.push_to_hub)}", markup=False)

    run_script(algorithm, program.config, train_and_push, program.description, program.file_options, arguments, usage)
