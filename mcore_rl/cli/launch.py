"""A wrapper of torchrun's launcher with short messages: it ends with the ranks' last line and their exit status.

torchrun itself prints a traceback of some forty lines after a signal, kills ranks that need longer than its grace
period to save, and exits with 1 for every failure.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

import psutil

from mcore_rl.cli.entry_point import KEYS_OF_OPTIONS, leave

PROGRAM_OPTIONS = {"-h", "--help", "--dry-run", "--print-config", "--record", "--replay"}
PROGRAM_OPTIONS |= {f"--{option}" for option in KEYS_OF_OPTIONS}
"""Options of training programs. None of them is an option of torchrun."""
HANDED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments into torchrun's options, which come first, and the arguments of the program."""
    words, options = list(arguments), dict[str, argparse.Action]()
    if words and words[0].startswith("-") and words[0].partition("=")[0] not in PROGRAM_OPTIONS:
        options = _parser()._option_string_actions  # imports torch, which takes seconds
    taken = 0
    while taken < len(words) and words[taken].partition("=")[0] in options:
        name, separator, _ = words[taken].partition("=")
        takes_value = options[name].nargs is None and not separator  # other options are switches
        taken += 2 if takes_value else 1
    return words[:taken], words[taken:]


def launch(options: Sequence[str], command: Sequence[str]) -> int:
    """Run `mcore-rl COMMAND` on every rank.

    Args:
        options: options of torchrun (`--nproc-per-node 4 …`).
        command: arguments of `mcore-rl`.

    Returns:
        0 after success; otherwise the exit status of the first rank that failed, or 128 + the number of its signal.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import run

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does, without its warning
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the ranks print their errors
    launched = _parser().parse_args([*options, "--module", "mcore_rl", *command])
    # Ranks handle signals themselves: they save and end. torchrun would kill the ranks after its grace period for each
    # signal that it handles itself; it needs at least one.
    launched.signals_to_handle = "SIGQUIT"
    for number in HANDED_ON:
        signal.signal(number, _hand_on)
    try:
        run(launched)
    except ChildFailedError as error:
        failed, failure = error.get_first_failure()
        if failure.exitcode >= 0:
            return int(failure.exitcode)
        name = signal.Signals(-failure.exitcode).name
        print(f"error: rank {failed} was ended by {name}", file=sys.stderr)
        return 128 - int(failure.exitcode)
    except SignalException as error:
        return 128 + int(error.sigval)
    except ValueError as error:
        leave(2, f"{error} (torchrun --help tells the launch's options)")
    return 0


def _parser() -> argparse.ArgumentParser:
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.prog = "mcore-rl train ALGORITHM"
    # Replace the method: a subclass would have to declare every option again.
    parser.error = lambda message: leave(  # type: ignore[method-assign]
        2, f"{message} (torchrun --help tells the launch's options)"
    )
    return parser


def _hand_on(number: int, frame: FrameType | None) -> None:
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            child.send_signal(number)
