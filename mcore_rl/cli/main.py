"""The `mcore-rl` command."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from mcore_rl.cli.doctor import report
from mcore_rl.cli.entry_point import exit_on_error, leave, show
from mcore_rl.cli.launch import launch, split
from mcore_rl.cli.report import main as write_report
from mcore_rl.cli.train import PROGRAMS, train
from mcore_rl.config.schema import json_schema
from mcore_rl.utils import torchrun

USAGE = f"""\
mcore-rl train {{{",".join(PROGRAMS)}}} [torchrun's options] CONFIG [section.key=value …]
mcore-rl train {{…}} [torchrun's options] --model PATH --data FILE [--output DIRECTORY] [section.key=value …]
mcore-rl report RUN [RUN …] [--output FILE]
mcore-rl schema {{…}}
mcore-rl doctor

    mcore-rl train dpo configs/dpo_cpu.yaml                          one process
    mcore-rl train dpo --nproc-per-node 8 dpo.yaml optimizer.lr=1e-6 eight, as by torchrun
    mcore-rl train grpo --nnodes 2 --nproc-per-node 8 --rdzv-endpoint HOST:29500 grpo.yaml

`mcore-rl train dpo --help` tells the program's own options, `torchrun --help` those of the launch;
`mcore-rl report OUTPUT` draws what a run has measured, as OUTPUT/report.html; `mcore-rl schema dpo` prints the JSON
schema of its configuration, `mcore-rl doctor` what is installed here, and what is missing for what."""


def main(arguments: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(USAGE)
        sys.exit(0 if words else 2)
    if words == ["doctor"]:
        with exit_on_error():
            for line in report():
                print(line, flush=True)
        return
    if words[0] == "report":
        write_report(words[1:], "mcore-rl report")
        return
    if words[0] not in ("train", "schema"):
        known = "mcore-rl train …, mcore-rl report …, mcore-rl schema … or mcore-rl doctor"
        leave(2, f"mcore-rl {' '.join(words)}: there is no such command; write {known}")
    if len(words) < 2 or words[1] not in PROGRAMS:
        leave(2, f"mcore-rl {' '.join(words[:2])}: name one of {', '.join(PROGRAMS)}")
    command, algorithm, rest = words[0], words[1], words[2:]
    if command == "schema":
        if rest:
            leave(2, f"mcore-rl schema {algorithm}: takes nothing more, got {' '.join(rest)}")
        show(json.dumps(json_schema(PROGRAMS[algorithm].config), indent=1))
        return
    if not torchrun.is_launched():
        launch_options, rest = split(rest)
        if launch_options:
            sys.exit(launch(launch_options, ["train", algorithm, *rest]))
        late = [word for word in rest if word.startswith("--n") and split([word])[0]]
        if late:
            leave(2, f"{late[0]}: options of the launch come first: mcore-rl train {algorithm} {late[0]} … CONFIG")
    train(algorithm, rest, f"mcore-rl train {algorithm}")
