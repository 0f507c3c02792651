"""`mcore-rl schema`: the JSON schema of a program's configuration."""

from __future__ import annotations

import json
from collections.abc import Sequence

from mcore_rl.cli.entry_point import Parser, show
from mcore_rl.cli.train import PROGRAMS
from mcore_rl.config.schema import json_schema


def schema(arguments: Sequence[str], prog: str) -> None:
    """Run `mcore-rl schema`."""
    parser = Parser(prog=prog, description="Print the JSON schema of a configuration, for editors.")
    parser.add_argument("algorithm", choices=PROGRAMS, help="the program that reads the configuration")
    show(json.dumps(json_schema(PROGRAMS[parser.parse_args(arguments).algorithm].config), indent=1))
