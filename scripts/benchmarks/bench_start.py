"""Benchmark the start of programs: processor time of help, a wrong key, a dry run, and the first step's imports.

    python scripts/benchmarks/bench_start.py [--repetitions 3]

The imports of a run are compared with those of torch in the same run. The processor time of a process includes its
threads. A dry run prints the values of the configuration before it imports torch; its row is the time of the whole
report, with the data and the simulated memory. Exits with 1 if a bound without a floor is missed.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path

from bench_results import Row, finish

from mcore_rl.cli.entry_point import Parser, count

ROOT = Path(__file__).parent.parent.parent
DPO = [str(ROOT / "scripts" / "train_dpo.py")]
CONFIG = str(ROOT / "configs" / "dpo_cpu.yaml")
IMPORTS = "from mcore_rl import platform; platform.initialize_platform(); import mcore_rl.algorithms.dpo"
COMMANDS = {
    "help": [*DPO, "--help"],
    "a wrong key": [*DPO, CONFIG, "optimizer.learning_rate=1"],
    "a dry run": [*DPO, CONFIG, "--dry-run"],
    "import torch": ["-c", "import torch"],
    "imports of a run": ["-c", IMPORTS],
}
ANSWER, OF_TORCH, FLOOR_OF_DRY_RUN = 1.0, 2.6, 12.0


def main() -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("--repetitions", type=count, default=3)
    arguments = parser.parse_args()
    subprocess.run(["make", "outputs/demo/model/config.json"], cwd=ROOT, check=True, timeout=600)
    taken: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(arguments.repetitions + 1):
        for name, command in COMMANDS.items():
            taken[name].append(seconds_of(command))
    seconds = {name: statistics.median(found[1:]) for name, found in taken.items()}  # the first reads from the disk
    dry_run = Row.figure("a dry run", seconds["a dry run"], "s of CPU", at_most=ANSWER, floor=FLOOR_OF_DRY_RUN)
    torch, imports = seconds["import torch"], seconds["imports of a run"]
    rows = [Row.figure(name, seconds[name], "s of CPU", at_most=ANSWER) for name in ("help", "a wrong key")]
    rows += [
        dry_run,
        Row("imports of a run / import torch", imports, torch, imports / torch, at_most=OF_TORCH),
        Row.figure("modules that a run imports", modules(), "modules"),
    ]
    return finish("start", "Start of a program", ("s of CPU", "s of CPU", ""), rows, arguments.repetitions >= 3)


def seconds_of(command: list[str]) -> float:
    """Return the processor time of a Python process, in seconds."""
    nowhere = subprocess.DEVNULL
    with subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=nowhere, stderr=nowhere) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if (process.returncode != 0) != (command == COMMANDS["a wrong key"]):
        raise RuntimeError(f"{command} ended with exit code {process.returncode}")
    return usage.ru_utime + usage.ru_stime


def modules() -> int:
    counted = f"{IMPORTS}; import sys; print(len(sys.modules))"
    answer = subprocess.run([sys.executable, "-c", counted], capture_output=True, text=True, check=True, timeout=120)
    return int(answer.stdout)


if __name__ == "__main__":
    sys.exit(main())
