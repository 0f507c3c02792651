"""Benchmark the start of programs: processor time until help, a wrong key, and the first step's imports.

    python scripts/bench_start.py [--repetitions 5]

The imports of a run are compared with those of torch in the same run. The processor time of a process includes its
threads. Exits with 1 if a bound is missed.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path

from bench_results import Row, finish

from mcore_rl.cli.entry_point import Parser, count

ROOT = Path(__file__).parent.parent
DPO = [str(ROOT / "scripts" / "train_dpo.py")]
IMPORTS = "from mcore_rl import platform; platform.initialize_platform(); import mcore_rl.algorithms.dpo"
COMMANDS = {
    "help": [*DPO, "--help"],
    "a wrong key": [*DPO, str(ROOT / "configs" / "dpo_cpu.yaml"), "optimizer.learning_rate=1"],
    "import torch": ["-c", "import torch"],
    "imports of a run": ["-c", IMPORTS],
}
ANSWER, OF_TORCH = 1.0, 2.6


def main() -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("--repetitions", type=count, default=5)
    arguments = parser.parse_args()
    taken: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(arguments.repetitions + 1):
        for name, command in COMMANDS.items():
            taken[name].append(seconds_of(command))
    seconds = {name: statistics.median(found[1:]) for name, found in taken.items()}  # the first reads from the disk
    torch, imports = seconds["import torch"], seconds["imports of a run"]
    rows = [Row.figure(name, seconds[name], "s of CPU", at_most=ANSWER) for name in ("help", "a wrong key")]
    rows += [
        Row("imports of a run / import torch", imports, torch, imports / torch, at_most=OF_TORCH),
        Row.figure("modules that a run imports", modules(), "modules"),
    ]
    return finish("start", "Start of a program", ("s of CPU", "s of CPU", ""), rows, arguments.repetitions >= 5)


def seconds_of(command: list[str]) -> float:
    """Return the processor time of a Python process, in seconds."""
    with subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        usage = os.wait4(process.pid, 0)[2]
        process.returncode = 0
    return usage.ru_utime + usage.ru_stime


def modules() -> int:
    counted = f"{IMPORTS}; import sys; print(len(sys.modules))"
    answer = subprocess.run([sys.executable, "-c", counted], capture_output=True, text=True, check=True, timeout=120)
    return int(answer.stdout)


if __name__ == "__main__":
    sys.exit(main())
