"""The program of each process that `mcore-rl verify` starts: `[torchrun's options] PART DIRECTORY [ARGUMENT …]`.

With torchrun's options, it launches itself on all ranks.
"""

from __future__ import annotations

import sys
from pathlib import Path

from mcore_rl.cli.entry_point import exit_on_error
from mcore_rl.cli.launch import launch, split
from mcore_rl.utils import torchrun
from mcore_rl.utils.console import quiet_libraries

MODULE = "mcore_rl.cli.verify_part"


def main() -> None:
    options, words = ([], sys.argv[1:]) if torchrun.is_launched() else split(sys.argv[1:])
    if options:
        sys.exit(launch(options, words, MODULE))
    name, directory, arguments = words[0], Path(words[1]), words[2:]
    quiet_libraries()
    with exit_on_error():
        if name == "nodes":
            from mcore_rl.testing.cluster.nodes import meet_nodes

            meet_nodes(directory, seconds=float(arguments[0]), answer=Path(arguments[1]))
            return
        from mcore_rl.testing.cluster.ranks import run_part

        run_part(name, directory, [int(number) for number in arguments])


if __name__ == "__main__":
    main()
