"""Convert Hugging Face directories to Megatron checkpoints, and back.

    mcore-rl convert to-hf CHECKPOINT DESTINATION [--model MODEL]
    mcore-rl convert from-hf MODEL DESTINATION
    mcore-rl convert inspect CHECKPOINT

CHECKPOINT is a directory iter_NNNNNNN, or its parent directory (the newest checkpoint is used). The conversion runs in
one process, which holds one or two tensors in memory. The layouts that write and read the checkpoint do not matter.

to-hf and inspect also read checkpoints that Megatron-LM (--ckpt-format torch_dist) and Megatron-Bridge wrote.
to-hf then needs --model: a directory with config.json and tokenizer of the model, with or without weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from mcore_rl.cli.entry_point import Parser, exit_on_error
from mcore_rl.config import read_chat_template, read_yaml
from mcore_rl.errors import UserError
from mcore_rl.utils.checkpoint_store import CheckpointStore, digest_problems, is_foreign
from mcore_rl.utils.console import quiet_libraries
from mcore_rl.utils.model_directory import check_model_directory
from mcore_rl.utils.packages import check_packages, import_torch


def convert(arguments: Sequence[str], prog: str) -> None:
    """Run `mcore-rl convert`. A user's error gives status 2."""
    parser = Parser(prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    forward = commands.add_parser("from-hf")
    forward.add_argument("model", type=Path)
    forward.add_argument("destination", type=Path)
    backward = commands.add_parser("to-hf")
    backward.add_argument("checkpoint", type=Path)
    backward.add_argument("destination", type=Path)
    backward.add_argument("--model", type=Path, help="config and tokenizer, if not those that it was trained from")
    look = commands.add_parser("inspect")
    look.add_argument("checkpoint", type=Path)
    parsed = vars(parser.parse_args(arguments))
    quiet_libraries()
    command: dict[str, Callable[..., None]] = {"from-hf": hf_to_megatron, "to-hf": megatron_to_hf, "inspect": inspect}
    with exit_on_error():
        command[parsed.pop("command")](**parsed)


def hf_to_megatron(model: Path, destination: Path) -> None:
    check_model_directory(model)
    if destination.exists() and not destination.is_dir():
        raise UserError(f"{destination} is not a directory")
    choose_device()
    from mcore_rl.models.megatron.checkpoint.convert import hf_to_megatron

    iteration = hf_to_megatron(model, destination, progress)
    print(f"Megatron checkpoint: {iteration}")
    print(f"train from it with checkpoint.resume={destination} checkpoint.allow_partial=true")


def megatron_to_hf(checkpoint: Path, destination: Path, model: Path | None) -> None:
    if destination.exists():
        raise UserError(f"{destination} exists already; name a new directory")
    iteration = find_iteration(checkpoint)
    if problems := digest_problems(iteration):
        raise UserError(f"{iteration} is damaged: {'; '.join(problems)}")
    config = {} if is_foreign(iteration) else read_yaml(iteration / "config.yaml")
    if model is None and is_foreign(iteration):
        raise UserError(
            f"{iteration} was written by Megatron-LM or Megatron-Bridge; name a directory with the model's config.json "
            "with --model"
        )
    source = model or Path(str(config.get("model", {}).get("path")))
    if not source.is_dir():
        raise UserError(
            f"the model {source}, from which {iteration} was trained, does not exist; name its directory with --model"
        )
    check_model_directory(source)
    choose_device()
    from mcore_rl.models.megatron.checkpoint.convert import megatron_to_hf

    template = read_chat_template(config.get("data", {}).get("chat_template"))
    megatron_to_hf(iteration, source, destination, progress, chat_template=template)
    is_adapter = not (destination / "config.json").is_file()
    print(f"{'PEFT adapter' if is_adapter else 'Hugging Face model'}: {destination}")


def inspect(checkpoint: Path) -> None:
    iteration = find_iteration(checkpoint)
    choose_device()
    from mcore_rl.models.megatron.checkpoint.convert import describe

    for line in describe(iteration):
        print(line)


def choose_device() -> None:
    check_packages()
    import_torch()  # takes seconds: after the arguments are checked
    from mcore_rl.platform import initialize_platform

    initialize_platform()


def find_iteration(path: Path) -> Path:
    """Return the checkpoint at a path that is a checkpoint or its parent directory."""
    if not path.is_dir():
        raise UserError(f"{path} is not a directory")
    if (path / "metadata.json").is_file():
        return path
    candidates, problems = CheckpointStore(path).candidates()
    for problem in problems:
        print(problem)
    if not candidates:
        raise UserError(f"{path} is not a checkpoint and contains none")
    return candidates[0]


def progress(items: Iterable[Any], total: int) -> Iterable[Any]:
    from rich.console import Console
    from rich.progress import track

    return track(items, "tensors", total, console=Console(stderr=True))
