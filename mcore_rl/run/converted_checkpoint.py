"""Model directories that are made from checkpoints.

`model.path` may name a checkpoint of this package, of Megatron-LM or of Megatron-Bridge. It is converted once, into the
cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from mcore_rl import __version__
from mcore_rl.config import read_yaml
from mcore_rl.data.token_cache import default_directory
from mcore_rl.errors import UserError
from mcore_rl.utils import torchrun
from mcore_rl.utils.checkpoint_store import CheckpointStore, is_foreign
from mcore_rl.utils.console import PrintLine
from mcore_rl.utils.lock_file import LockFile, LockHeld
from mcore_rl.utils.model_directory import missing_files
from mcore_rl.utils.process_groups import GroupKeeper

KEY, CONFIG_KEY = "model.path", "model.config_path"
CONVERTED = "converted"
"""Name of the directory in the cache."""
POLL_SECONDS = 0.5


def checkpoint_at(path: Path) -> Path | None:
    """Return the checkpoint at a path that is a checkpoint or contains some; None if it does not.

    Raises:
        UserError: all checkpoints there are damaged.
    """
    if not path.is_dir() or (path / "config.json").is_file():
        return None
    if (path / "metadata.json").is_file():
        return path
    candidates, _ = CheckpointStore(path).candidates()
    return candidates[0] if candidates else None


def config_directory_of(checkpoint: Path, config_path: Path | None) -> Path:
    """Return the directory with a checkpoint's config.json and tokenizer.

    Args:
        config_path: `model.config_path`; None for the directory from which the checkpoint was trained.

    Raises:
        UserError: the directory is not known, or the checkpoint is that of an adapter.
    """
    if not is_foreign(checkpoint):
        trained = read_yaml(checkpoint / "config.yaml").get("model") or {}
        if trained.get("lora"):
            raise UserError(
                f"{KEY}: {checkpoint} is the checkpoint of an adapter; convert it (mcore-rl convert to-hf), and set "
                "model.path to its base model and model.lora.path to the adapter"
            )
        config_path = config_path or Path(str(trained.get("path")))
    if config_path is None:
        raise UserError(
            f"{KEY}: {checkpoint} was written by Megatron-LM or Megatron-Bridge; set {CONFIG_KEY} to a directory with "
            "the model's config.json and tokenizer, or to the model's name on the hub"
        )
    return config_path


def converted(checkpoint: Path, config_directory: Path, say: PrintLine) -> Path:
    """Return a model directory with a checkpoint's weights; make it if the cache does not have it.

    All processes may call this at the same time: the first of a node converts, and the others wait for it, also those
    of other nodes and commands that see the same cache.

    Raises:
        UserError: the checkpoint cannot be converted.
    """
    cache = default_directory() / CONVERTED
    final = cache / _digest_of(checkpoint, config_directory)
    lock, told = LockFile(final.with_name(f"{final.name}.lock")), ""
    while not _is_whole(final):
        if torchrun.local_rank() > 0:  # torchrun ends it if the first rank fails
            time.sleep(POLL_SECONDS)
            continue
        try:
            cache.mkdir(parents=True, exist_ok=True)
            lock.take()
        except OSError as error:
            raise UserError(
                f"{KEY}: {checkpoint} cannot be converted, because {cache} cannot be written ({error.strerror}); "
                "set the environment variable MCORE_RL_CACHE to another directory"
            ) from None
        except LockHeld as held:
            if told != (told := str(held)):
                say(f"waiting for {held}, which converts {checkpoint} (if it is gone, remove {lock.path})")
            time.sleep(POLL_SECONDS)
            continue
        try:
            if not _is_whole(final):
                say(f"converting {checkpoint} to {final} (only once)")
                _convert(checkpoint, config_directory, final)
        finally:
            lock.release()
    return final


def _is_whole(directory: Path) -> bool:
    return (directory / "config.json").is_file() and not missing_files(directory)


def _digest_of(checkpoint: Path, config_directory: Path) -> str:
    """Return what identifies the content of a checkpoint and a directory: names, sizes and times of their files."""
    told: list[Any] = [__version__]
    for directory in (checkpoint.resolve(), config_directory.resolve()):
        stats = [(path.name, path.stat()) for path in sorted(directory.iterdir()) if path.is_file()]
        told.append([str(directory), *((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)])
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:24]


def _convert(checkpoint: Path, config_directory: Path, final: Path) -> None:
    """Convert in a process of its own, because the conversion makes a model and process groups."""
    partial = final.with_name(f"{final.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    arguments = [str(checkpoint), str(partial), "--model", str(config_directory)]
    command = [sys.executable, "-m", "mcore_rl", "convert", "to-hf", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(torchrun.VARIABLES)}
    keeper = GroupKeeper()  # the process ends with this one
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    keeper.add(process.pid)
    try:
        _, errors = process.communicate()
        keeper.remove(process.pid)
    finally:
        keeper.close()
    if process.returncode:
        shutil.rmtree(partial, ignore_errors=True)
        lines = errors.strip().splitlines() or [f"the conversion has ended with status {process.returncode}"]
        raise UserError(f"{KEY}: {lines[-1].removeprefix('error: ')}")
    shutil.rmtree(final, ignore_errors=True)  # it was not whole
    partial.rename(final)
