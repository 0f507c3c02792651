"""torchrun's launcher with short endings: the ranks' last line, and their exit status.

torchrun itself answers a signal with a traceback of some forty lines and status 1, kills ranks that take longer than
its grace period to save, and exits with 1 whatever status a rank gave.
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

from mcore_rl.cli.entry_point import leave

HANDED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments into torchrun's options at the beginning, and the program's arguments."""
    words, options = list(arguments), dict[str, argparse.Action]()
    if words and words[0].startswith("-") and words[0] not in ("-h", "--help"):
        options = _parser()._option_string_actions
    taken = 0
    while taken < len(words) and words[taken].partition("=")[0] in options:
        name, separator, _ = words[taken].partition("=")
        takes_value = options[name].nargs is None and not separator  # others are switches
        taken += 2 if takes_value else 1
    return words[:taken], words[taken:]


def launch(options: Sequence[str], command: Sequence[str]) -> int:
    """Run `mcore-rl COMMAND` as every rank.

    Args:
        options: torchrun's (`--nproc-per-node 4 …`).
        command: the words of `mcore-rl`.

    Returns:
        0; of a failure the status of the first rank that ended with one, 128 + its number for a signal.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import run

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does, without its warning
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the ranks have told what it reports
    launched = _parser().parse_args([*options, "--module", "mcore_rl", *command])
    # Ranks answer signals by themselves: they save and end. For those that are torchrun's own it ends them after its
    # grace period; one has to be left to it.
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
    # A method is replaced: a subclass would have to be handed every option again.
    parser.error = lambda message: leave(  # type: ignore[method-assign]
        2, f"{message} (torchrun --help tells the launch's options)"
    )
    return parser


def _hand_on(number: int, frame: FrameType | None) -> None:
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            child.send_signal(number)
