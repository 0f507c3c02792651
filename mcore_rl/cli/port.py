"""`mcore-rl port`: print the configuration that corresponds to one of TRL, verl or NeMo RL."""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mcore_rl.cli.entry_point import Parser, count, exit_on_error, show
from mcore_rl.cli.train import PROGRAMS
from mcore_rl.config.porting.foreign import Foreign
from mcore_rl.config.porting.port import Ported, as_yaml, port
from mcore_rl.config.porting.read import read_foreign
from mcore_rl.config.porting.shell import Script
from mcore_rl.errors import UserError


def port_command(arguments: Sequence[str], prog: str) -> None:
    """Run `mcore-rl port` and exit: with status 1 if a run could not start, or would train something else."""
    parser = Parser(prog=prog, description="Translate a configuration of TRL, verl or NeMo RL.")
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="a command in a file, a YAML file, or TRL's Python file"
    )
    parser.add_argument("arguments", nargs="*", metavar="ARGUMENT", help="arguments of the script that has the command")
    parser.add_argument(
        "--env",
        action="append",
        type=_variable,
        default=[],
        metavar="NAME=VALUE",
        help="a variable that the script reads",
    )
    parser.add_argument("--algorithm", choices=PROGRAMS, help="the program here, if the file does not say which")
    parser.add_argument("--num-processes", type=count, metavar="N", help="number of processes of TRL's run")
    parser.add_argument("--output", type=Path, metavar="FILE", help="path of the result (default: the standard output)")
    parsed = parser.parse_args(arguments)
    with exit_on_error():
        foreign = read_foreign(parsed.file, Script(tuple(parsed.arguments), dict(parsed.env)))
        algorithm = parsed.algorithm or foreign.algorithm
        if not algorithm:
            unread = "".join(f"\n  not read: {line}" for line in foreign.unread)
            raise UserError(
                f"{parsed.file}: {foreign.program}'s file does not say which program reads it; "
                f"add --algorithm {{{','.join(PROGRAMS)}}}{unread}"
            )
        foreign = replace(foreign, algorithm=algorithm, processes=parsed.num_processes or foreign.processes)
        ported = port(foreign, PROGRAMS[algorithm].config)
        text = ported_text(parsed.file, foreign, ported)
        if parsed.output is None:
            show(text.rstrip())
        else:
            _write(parsed.output, text)
    for line in ported.differs:
        print(f"differs: {line}", file=sys.stderr)
    for line in ported.todo:
        print(f"to do: {line}", file=sys.stderr)
    sys.exit(int(ported.refused))


def _variable(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not name.isidentifier():
        raise ArgumentTypeError(f"must be NAME=VALUE, got {text}")
    return name, value


def ported_text(path: Path, foreign: Foreign, ported: Ported) -> str:
    """Return the YAML file of a translation: comments about each key, then the configuration."""
    each = (foreign.processes or 1) // foreign.nodes
    launch = f"--nnodes {foreign.nodes} " * (foreign.nodes > 1) + f"--nproc-per-node {each} " * (each > 1)
    parts = {
        "Without a counterpart, so that something else is trained; decide about these first:": ported.differs,
        "To do:": ported.todo,
        "What the keys became:": ported.became,
        "Keys that became nothing, and why:": ported.left,
    }
    lines = [f"Ported from {path} ({foreign.program}). Start: mcore-rl train {foreign.algorithm} {launch}THIS_FILE"]
    for title, told in parts.items():
        lines += ["", title, *(f"  {' '.join(line.split())}" for line in told)] if told else []
    comments = "".join(f"# {line}".rstrip() + "\n" for line in lines)
    return f"{comments}\n{as_yaml(ported, PROGRAMS[foreign.algorithm].config)}"


def _write(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(f"--output {path}: exists; choose another file, or remove it first") from None
    except OSError as error:
        raise UserError(f"--output {path}: cannot be written ({error.strerror})") from None
