"""The shape of every training script: arguments in, one line for what a user got wrong, an exit status."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from mcore_rl import run_directory, watchdog
from mcore_rl.config import Section, load_config
from mcore_rl.errors import TrainingError, UserError
from mcore_rl.quiet import quiet_libraries

ConfigT = TypeVar("ConfigT", bound=Section)


def run_script(config_type: type[ConfigT], train: Callable[..., Any], description: str, **file_options: str) -> None:
    """Parse `CONFIG [--option FILE] [section.key=value …]`, train, and exit.

    Args:
        train: called with the configuration, and each option's path (None if it was not given) by its name.
        file_options: the names of options that take a path, and what they are for.

    Exit status: 0; 1 for a failure, with its traceback; 2 for a user's error and 3 for training that
    cannot go on, with one line.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("config", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="overrides of the file's values")
    for name, purpose in file_options.items():
        parser.add_argument(f"--{name}", type=Path, metavar="FILE", help=purpose)
    arguments = parser.parse_intermixed_args()
    paths = {name: getattr(arguments, name) for name in file_options}
    quiet_libraries()
    try:
        train(load_config(config_type, arguments.config, arguments.overrides), **paths)
    except UserError as error:
        leave(2, str(error))
    except TrainingError as error:
        leave(3, str(error))
    except Exception as error:
        text = traceback.format_exc()
        leave(1, text + watchdog.explain(error, text), every_rank=True)


def leave(status: int, message: str, every_rank: bool = False) -> None:
    """Print and end this process at once: waiting for peers that are in a collective would hang."""
    rank = os.environ.get("RANK", "0")
    if rank == "0" or every_rank:
        prefix = f"[rank {rank}] " if every_rank else "error: "
        print(f"{prefix}{message}", file=sys.stderr)
    run_directory.release()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
