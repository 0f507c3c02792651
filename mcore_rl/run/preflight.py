"""Fast checks of layout, paths and directories. They run before PyTorch and Megatron are imported."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from mcore_rl.config import RLConfig, RMConfig, TrainingConfig
from mcore_rl.config.algorithms import own_layouts
from mcore_rl.config.load import expand_headers
from mcore_rl.data.datasets import check_first_records
from mcore_rl.data.readers import check_file
from mcore_rl.errors import NotFiniteError, UserError
from mcore_rl.run.directory import RunDirectory
from mcore_rl.run.identity import input_paths, model_directories
from mcore_rl.utils.checkpoint_store import CheckpointStore, is_foreign, quick_problems
from mcore_rl.utils.compression import zstd_problem
from mcore_rl.utils.model_directory import check_model_directory, check_positions
from mcore_rl.utils.torchrun import has_rendezvous_id, launch_id, node, rank, restarts


def preflight(config: TrainingConfig, world_size: int, files: Mapping[str, Path | None]) -> None:
    """Check everything that needs no tensors, without writing any file.

    Args:
        world_size: number of processes of the run.
        files: paths given on the command line, by the name of their option.

    Raises:
        UserError: a check fails; the message names the key or option, the value found, and a valid value.
        NotFiniteError: torchrun has restarted a run after a loss that was not finite; the run would end in the same way
            again.
    """
    if is_restart(config.output_dir) and (ended := RunDirectory(config.output_dir).not_finite(launch_id())):
        raise NotFiniteError(f"{ended}; a restart would end in the same way, so the run is not restarted")
    if not config.dry_run and (problems := missing_trackers(config)):
        raise UserError("; ".join(problems))
    check_layout(config, world_size)
    check_sources(config)  # before lengths: a missing column is the more basic mistake
    check_lengths(config)
    _check_files(files, RunDirectory(config.output_dir))
    if isinstance(config, RLConfig) and not (files.get("replay") and config.data.validation is None):
        check_vllm(config)
    if isinstance(config, RLConfig):
        check_headers(config)
    check_output(config)
    if rank() == 0 or config.checkpoint.resume not in ("auto", "none"):  # other ranks may see other files in output_dir
        find_checkpoints(config)


def missing_trackers(config: TrainingConfig) -> list[str]:
    """Return a message for each tracker of `logging` whose package is not installed."""
    asked = (name for name in ("tensorboard", "wandb", "mlflow") if getattr(config.logging, name) not in (None, False))
    return [
        f"logging.{name}: install the {name} extra with pip install 'mcore_rl[{name}]'"
        for name in asked
        if find_spec(name) is None
    ]


def check_layout(config: TrainingConfig, world_size: int) -> None:
    """Check all settings that need no data: the models exist, the layout fits the processes, packs and steps are valid.

    Raises:
        UserError: a check fails; the message names the key, the value found, and a valid value.
    """
    if config.model.head == "reward" and not isinstance(config, RMConfig):
        raise UserError("model.head: only train_rm.py trains a model with head=reward; leave model.head out")
    config.parallel.data_parallel_size(world_size)
    for key, own in own_layouts(config).items():
        try:
            own.data_parallel_size(world_size)
        except UserError as error:
            raise UserError(f"{key}{str(error).removeprefix('parallel')}") from None
    config.pack_width(config.rows_per_unit)
    if config.trainer.max_steps is not None:
        config.check_steps(config.trainer.max_steps)
    for key, path in model_directories(config).items():
        if key != "model.lora.path":
            check_model_directory(path, key)


def check_lengths(config: TrainingConfig) -> None:
    """Raise UserError if the model has fewer positions than `data.max_sequence_length`."""
    check_positions(check_model_directory(config.model.path), config.data.max_sequence_length)


def check_sources(config: TrainingConfig) -> None:
    """Raise UserError if a data file is missing or does not contain records, or if its first record is invalid."""
    for source in config.data.sources:
        check_file(source)
    check_first_records(config)


def check_vllm(config: RLConfig) -> None:
    """Raise UserError if a package for vLLM's servers is missing, or vLLM's build cannot return routed experts."""
    generation = config.generation
    if generation.vllm.weight_updates == "delta" and (problem := zstd_problem()):
        raise UserError(f"generation.vllm.weight_updates: delta compresses by zstd, but there is {problem}")
    if generation.backend != "vllm" or generation.vllm.urls:
        return
    if not os.access(generation.vllm.python, os.X_OK):
        raise UserError(
            f"generation.vllm.python: not found: {generation.vllm.python}; create it with `make install-vllm`, or give "
            "generation.vllm.urls of running servers"
        )
    if config.model.moe_router_replay:
        from mcore_rl import platform  # imports PyTorch

        if not platform.has_gpu():
            raise UserError(
                "model.moe_router_replay: vLLM's build for the CPU cannot return experts; give generation.vllm.urls of "
                "servers on GPUs, or use generation.backend=megatron"
            )


def check_headers(config: RLConfig) -> None:
    """Raise UserError if the headers of an HTTP judge name an environment variable that is not set."""
    expand_headers(config.environment.headers)
    for name, judge in config.environment.rewards.items():
        expand_headers(judge.headers, f"environment.rewards.{name}.headers")


def _check_files(files: Mapping[str, Path | None], directory: RunDirectory) -> None:
    record, replay = files.get("record"), files.get("replay")
    if record and replay:
        raise UserError(
            "--record and --replay cannot be used together, because a replay generates nothing that could be recorded"
        )
    if record and not record.parent.is_dir():
        raise UserError(f"--record {record}: the directory {record.parent} does not exist")
    for option, file in files.items():
        if file and directory.writes(file):
            raise UserError(f"--{option} {file}: is a file that this run writes itself; name another file")
    if record and record.is_dir():
        raise UserError(f"--record {record}: is a directory; name a file")
    if replay:
        try:
            replay.open("rb").close()
        except OSError as error:
            raise UserError(f"--replay {replay}: cannot be read ({error.strerror})") from None


def is_restart(output_dir: Path) -> bool:
    """Return whether torchrun has restarted this process because the run in `output_dir` failed."""
    if restarts() == 0:
        return False
    if not has_rendezvous_id() and node() > 0:
        return True  # only the first rank of the first node can tell
    identity = RunDirectory(output_dir).identity
    return identity is not None and identity.launch == launch_id()


def check_output(config: TrainingConfig) -> None:
    """Check that the run can use `output_dir`, and will overwrite neither files that no run wrote nor its own inputs.

    Raises:
        UserError: it would overwrite such files, or `output_dir` is not writable or has an earlier run that is neither
            resumed nor removed. The message names the key and the files.
    """
    directory, checkpoint = RunDirectory(config.output_dir), config.checkpoint
    afresh = checkpoint.resume == "none" and not is_restart(config.output_dir)
    overwrite = checkpoint.overwrite and afresh
    directory.check(checkpoint.export_hf, overwrite)
    for key, path in input_paths(config).items():
        if _is_written(key, path, directory, checkpoint.export_hf or overwrite):
            remedy = "choose another output_dir"
            if not overwrite and not _is_written(key, path, directory, exports=False):
                remedy += ", or set checkpoint.export_hf=false"
            raise UserError(f"{key}: {path} is written{' or removed' if overwrite else ''} by this run; {remedy}")
    if afresh and not checkpoint.overwrite and directory.holds_results():
        raise UserError(
            f"checkpoint.resume: {config.output_dir} holds a run, which would be mixed with a new one; choose another "
            "output_dir, or set checkpoint.overwrite=true to remove the earlier run"
        )


def _is_written(key: str, path: Path, directory: RunDirectory, exports: bool) -> bool:
    """Return whether the run would write to its input `path`.

    If `path` is a directory, the files in it are checked too. If one of them is a link, the link's target is checked.

    Args:
        key: configuration key of the input.
        directory: the run's output directory.
        exports: whether the run also writes to the directories of exported models.
    """
    if path.resolve() == directory.path.resolve():
        return key.startswith("data.")  # logs may be read as data files, but no output as a model's file
    return any(directory.writes(part, exports) for part in (path, *path.glob("*")))


def find_checkpoints(config: TrainingConfig) -> tuple[list[Path], list[str]]:
    """Return the checkpoints that the run may resume by `checkpoint.resume`, best first, and notes for the user.

    Raises:
        UserError: the path in `checkpoint.resume` has no checkpoint, or all checkpoints are damaged.
    """
    wanted = config.checkpoint.resume
    if wanted == "none" and not is_restart(config.output_dir):
        return [], []
    own = CheckpointStore(config.output_dir / "checkpoints")
    if wanted in ("auto", "none"):
        return own.candidates()
    path = Path(wanted)
    if not path.is_dir():
        raise UserError(f"checkpoint.resume: {path} is not a directory; give a directory, auto or none")
    is_own = own.directory.resolve() in (path.resolve(), path.resolve().parent)
    if own.iterations() and not is_own:  # the run started from that path, and has written checkpoints since
        found, notes = own.candidates()
        return found, [*notes, f"checkpoint.resume: {path} is not used: output_dir has checkpoints of the run"]
    if path.name.startswith("iter_") or is_foreign(path):
        if problems := quick_problems(path):
            raise UserError(f"checkpoint.resume: {path} is damaged or incomplete: {'; '.join(problems)}")
        return [path], []
    found, notes = CheckpointStore(path).candidates()
    if not found:
        raise UserError(f"checkpoint.resume: {path} holds no checkpoint")
    return found, notes
