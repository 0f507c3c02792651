"""A wrapper of torchrun's launcher. It prints short messages and ends with the ranks' exit status.

torchrun itself prints a traceback of some forty lines after a signal, kills ranks that need longer than its grace
period to save, and exits with 1 for every failure.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import re
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Sequence
from types import FrameType
from typing import Any

import psutil

from mcore_rl.cli.entry_point import KEYS_OF_OPTIONS, STATUS_FILE, exit_on_error, leave
from mcore_rl.config.base import whole_number
from mcore_rl.errors import UserError
from mcore_rl.utils import torchrun
from mcore_rl.utils.packages import check_packages, import_torch

PROGRAM_OPTIONS = {"-h", "--help", "--dry-run", "--print-config", "--record", "--replay"}
PROGRAM_OPTIONS |= {f"--{option}" for option in KEYS_OF_OPTIONS}
"""Options of training programs. None of them is an option of torchrun."""
HANDED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split `arguments` into torchrun's options, which come first, and the program's arguments."""
    words, options = list(arguments), dict[str, argparse.Action]()
    if words and words[0].startswith("-") and words[0].partition("=")[0] not in PROGRAM_OPTIONS:
        options = _parser()._option_string_actions  # imports torch, which takes seconds
    taken = 0
    while taken < len(words) and words[taken].partition("=")[0] in options:
        name, separator, _ = words[taken].partition("=")
        takes_value = options[name].nargs is None and not separator  # other options are switches
        taken += 2 if takes_value else 1
    return words[:taken], words[taken:]


def run_launched(command: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """Run `mcore-rl COMMAND ARGUMENTS` on every rank, and exit, if `arguments` begins with options of torchrun.

    Otherwise, return the arguments: this process is the only one of the command, or one of the ranks.

    Args:
        command: words of the command (`["train", "dpo"]`), which the options follow.

    The exit status is that of `launch`, or 2 if options of the number of processes follow other arguments.
    """
    words = list(arguments)
    if torchrun.is_launched():
        return words
    with exit_on_error():
        options, words = split(words)  # imports torch if there are options
    if options:
        sys.exit(launch(options, [*command, *words]))
    late = [word for word in words if word.startswith("--n") and split([word])[0]]
    if late:
        leave(2, f"{late[0]}: options of the launch come first: mcore-rl {' '.join(command)} {late[0]} …")
    return words


def launch(options: Sequence[str], command: Sequence[str], module: str = "mcore_rl") -> int:
    """Run `mcore-rl COMMAND` on every rank.

    Args:
        options: options of torchrun (`--nproc-per-node 4 …`).
        command: arguments of `mcore-rl`.
        module: module that the ranks run instead of `mcore-rl`, with these arguments.

    Returns:
        0 after success; 128 + the number of the signal that has stopped the run; otherwise the exit status of the first
        rank that failed, or 128 + the number of the signal that ended it.
    """
    parser = _parser()
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.run import run

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does, without its warning
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the ranks print their errors
    launched = parser.parse_args([*options, "--module", module, *command])
    # Ranks handle signals themselves: they save and end. torchrun would kill the ranks after its grace period for each
    # signal that it handles itself; it needs at least one.
    launched.signals_to_handle = "SIGQUIT"
    for number in HANDED_ON:
        signal.signal(number, _hand_on)
    store = _listen_locally(launched)
    status = tempfile.NamedTemporaryFile()  # noqa: SIM115 (removed with this process)
    os.environ[STATUS_FILE] = status.name
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
    except (DistError, RendezvousError) as error:
        leave(2, _why_nodes_do_not_meet(error, launched))
    except ValueError as error:
        leave(2, f"{error} (torchrun --help tells the launch's options)")
    finally:
        del store  # closes its port
    return int(status.read() or 0)


def nodes_and_processes(options: Sequence[str]) -> tuple[int, int, argparse.Namespace]:
    """Return the number of nodes, the number of processes on this node, and all options of torchrun, parsed.

    Raises:
        UserError: a number or the rendezvous endpoint cannot be read, or the number of nodes is a range.
    """
    from torch.distributed.run import determine_local_world_size

    parsed = _parser().parse_args([*options, "--module", "mcore_rl"])
    least, _, most = parsed.nnodes.partition(":")
    nodes = whole_number(least)
    if not nodes or most not in ("", least):
        raise UserError(f"--nnodes {parsed.nnodes}: must be a single number of at least 1 here")
    try:
        processes = determine_local_world_size(parsed.nproc_per_node)
    except ValueError as error:
        raise UserError(f"--nproc-per-node: {error}") from None
    if processes < 1:
        raise UserError(f"--nproc-per-node {parsed.nproc_per_node}: must be at least 1")
    split_endpoint(parsed.rdzv_endpoint, default_port=0)
    return nodes, processes, parsed


def split_endpoint(endpoint: str, default_port: int) -> tuple[str, int]:
    """Return the host of a rendezvous as --rdzv-endpoint names it, and its port.

    Raises:
        UserError: the endpoint is not a host, or a host and a port.
    """
    found = re.fullmatch(r"(\[[^\[\]]+\]|[^:\[\]]*)(?::(\d+))?", endpoint)
    if not found or (found[2] and not 0 < int(found[2]) < 2**16):
        raise UserError(f"--rdzv-endpoint {endpoint}: must be HOST or HOST:PORT, with a port of 1 to 65535")
    return found[1], int(found[2] or default_port)


def _listen_locally(launched: argparse.Namespace) -> Any:
    """Start the ranks' store on 127.0.0.1, if there is only this node and the user chose no port; return the store.

    The store that torchrun creates would listen on every network interface, without authentication. With
    `multi_tenant`, stores of the same process and port share one server: torchrun's store uses the server started here.
    """
    from torch.distributed import TCPStore

    chosen = launched.master_port is not None or launched.rdzv_endpoint or launched.rdzv_backend != "static"
    if launched.nnodes not in ("1", "1:1") or (chosen and not launched.standalone):
        return None
    listening = socket.create_server(("127.0.0.1", 0))
    launched.master_addr, launched.master_port = listening.getsockname()
    launched.standalone, launched.rdzv_id = False, str(uuid.uuid4())
    return TCPStore(
        host_name=launched.master_addr,
        port=launched.master_port,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listening.detach(),
    )


def _why_nodes_do_not_meet(error: Exception, launched: argparse.Namespace) -> str:
    """Return an error message: why the nodes did not meet, and the options that determine where they meet."""
    from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousError

    if isinstance(error, RendezvousConnectionError):
        return (
            f"--rdzv-endpoint {launched.rdzv_endpoint}: no rendezvous of torchrun answers there; start the node with "
            "this address first, or choose a port that no other program uses"
        )
    missing = f"--nnodes {launched.nnodes}: not all nodes have joined in time"
    if isinstance(error, RendezvousError):
        return f"{missing}; start the same command on each node, and see the output of the others"
    if "EADDRINUSE" in str(error):
        return f"--master-port {launched.master_port}: another program listens on this port; choose a free one"
    address = f"--master-addr {launched.master_addr}, --master-port {launched.master_port}"
    return f"{missing} at {address}; start the same command on each node, with node rank 0 at this address"


def _parser() -> argparse.ArgumentParser:
    # torch reads this level when it is imported. Without it, torch's C++ code prints thirty lines for a failed
    # connection, which an error of this module reports in one line. The ranks do not inherit the level.
    quiet = {} if "TORCH_CPP_LOG_LEVEL" in os.environ else {"TORCH_CPP_LOG_LEVEL": "FATAL"}
    os.environ.update(quiet)
    check_packages()
    import_torch()
    from torch.distributed.run import get_args_parser

    for name in quiet:
        del os.environ[name]
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
