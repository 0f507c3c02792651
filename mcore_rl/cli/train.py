"""The training programs of all algorithms, the command `mcore-rl train`, and the model card of a published model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from mcore_rl.cli.entry_point import leave, run_script, show
from mcore_rl.cli.launch import run_launched
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
from mcore_rl.run.directory import STEP_LOGS
from mcore_rl.run.identity import flattened
from mcore_rl.run.metrics import read_step_log
from mcore_rl.utils.console import console
from mcore_rl.utils.model_directory import push
from mcore_rl.utils.torchrun import rank


@dataclass(frozen=True)
class Program:
    """A training program: its description, its configuration class, and help texts of options that take a path."""

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

USAGE = """\
usage: mcore-rl train ALGORITHM [torchrun's options] CONFIG [section.key=value …]
       mcore-rl train ALGORITHM [torchrun's options] --model PATH --data FILE [--output DIRECTORY] [section.key=value …]
"""
MORE_HELP = """\
`mcore-rl train dpo --help` prints the options and keys of a program, `mcore-rl train dpo --help optimizer` explains the
keys of a section, and `torchrun --help` prints the options of the launch, such as --nproc-per-node, which stand before
CONFIG."""


def train_command(arguments: Sequence[str], prog: str) -> None:
    """Run `mcore-rl train`, on every rank if torchrun's options follow the algorithm. See `run_script`."""
    if arguments[:1] in (["-h"], ["--help"]):
        show(help_of_train())
        return
    if not arguments or arguments[0] not in PROGRAMS:
        leave(2, f"{' '.join([prog, *arguments[:1]])}: name one of {', '.join(PROGRAMS)}")
    algorithm = arguments[0]
    train(algorithm, run_launched(["train", algorithm], arguments[1:]), f"{prog} {algorithm}")


def help_of_train() -> str:
    """Return the text of `mcore-rl train --help`: the usage, the programs, and where their options are explained."""
    programs = (f"    {name:<8} {program.description}" for name, program in PROGRAMS.items())
    return "\n".join((USAGE, "Train a model. ALGORITHM is one of:", "", *programs, "", MORE_HELP))


def load_for(algorithm: str, path: str, overrides: Sequence[str]) -> TrainingConfig:
    """Load the configuration file `path` for the training program of `algorithm`; for scripts with `--algorithm`.

    Raises:
        UserError: the file is not a configuration of this program; the message names the algorithm.
    """
    try:
        return load_config(PROGRAMS[algorithm].config, path, overrides)
    except UserError as error:
        raise UserError(f"{error} (read as a configuration of --algorithm {algorithm})") from None


def train(algorithm: str, arguments: Sequence[str] | None = None, usage: str | None = None) -> None:
    """Run the training program of `algorithm` in this process, which may be one of several ranks (see `run_script`).

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


CACHED = re.compile(r"^models--([^-].*?)--(.+)$")
"""Pattern of the folders in the Hugging Face cache. A folder's name contains the model's name."""
COMMON_KEYS = ("optimizer.lr", "batch.global_batch_size", "data.max_sequence_length", "model.dtype", "seed")
"""Keys of settings that the model card shows, for every algorithm."""
NOT_SHOWN = ("seconds", "per_second", "step", "utilization")
"""Suffixes of metrics that the model card does not show, because they do not describe the model."""


def model_card(config: TrainingConfig) -> str:
    """Return the text of a model card: YAML metadata for the hub, the data, important settings and the last metrics."""
    base = _hub_name(config.model.path)
    head: dict[str, Any] = {"library_name": "transformers", "tags": ["mcore_rl", config.algorithm]}
    if base is not None:
        head["base_model"] = base
    values, own = flattened(config.model_dump(mode="json")), f"{config.algorithm}."
    shown = [
        *COMMON_KEYS,
        *(key for key in values if key.startswith(own) and isinstance(values[key], int | float | str)),
    ]
    path = config.output_dir / STEP_LOGS[0]
    steps = read_step_log(path) if path.is_file() else []
    metrics = {k: v for k, v in (steps[-1] if steps else {}).items() if not k.endswith(NOT_SHOWN)}
    sources = [Path(str(source)).name for source in config.data.train_sources]
    return (
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n"
        f"Trained by {config.algorithm} from {base or Path(config.model.path).name} with mcore_rl.\n\n"
        f"Data: {', '.join(sources)}\n\n"
        f"{_table('setting', {key: values[key] for key in shown})}\n{_table('metric of the last step', metrics)}"
    )


def write_model_card(directory: Path, config: TrainingConfig) -> None:
    """Write the model card as `README.md` in the `directory` of an exported model, unless this file exists."""
    path = directory / "README.md"
    if not path.exists():
        path.write_text(model_card(config))


def _hub_name(path: Path) -> str | None:
    found = next((match for part in Path(path).parts if (match := CACHED.match(part))), None)
    return None if found is None else f"{found[1]}/{found[2]}"


def _table(title: str, values: dict[str, Any]) -> str:
    texts = {key: f"{value:.6g}" if isinstance(value, float) else str(value) for key, value in values.items()}
    rows = (f"| `{key}` | {text} |" for key, text in texts.items())
    return "\n".join([f"| {title} | |", "|---|---|", *rows]) + "\n"
