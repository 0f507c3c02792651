"""Run all checks that need a GPU: tests, layouts, a profile, log-probabilities, steps, generation, checkpoints.

    python scripts/check_gpu.py [--output outputs/gpu] [--only PART …] [--again] [--seconds N] [--rehearse]

The check ends after 20 minutes (--seconds) and says how it goes on. Each part is a separate program with a limit of ten
minutes. It writes PART.json (command, device, versions, how it
ended, the end of its output), PART.log, and the table and picture of a benchmark. After each part, results.json holds
the results of all parts so far, and results.md is one page with the same figures, to be pasted into an issue. A part
that has succeeded with the same code on the same device is not run again, so an interrupted check can be continued.
Exits with 1 if a part failed, and with 3 if the time was over before the last part. --rehearse: toy sizes on the CPU.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from argparse import RawDescriptionHelpFormatter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mcore_rl.cli.entry_point import Parser, count, exit_on_error
from mcore_rl.errors import UserError

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "scripts" / "benchmarks"))  # for the names of its parts
from gpu_steps import CASES

SECONDS = 600
AT_ONCE = min(8, os.cpu_count() or 1)
"""Tests that run at the same time: they wait mostly for their processes to start."""
LINES_KEPT, LINES_OF_A_FAILURE = 60, 20
ENDED_WELL, NOT_ALL = "ended well", 3
told_to_end = threading.Event()
"""Set by SIGTERM, from a time limit or a batch system."""


@dataclass(frozen=True)
class Part:
    """A part: its command and its command in a rehearsal, both without the name of the interpreter."""

    name: str
    command: Sequence[str]
    rehearsal: Sequence[str]


def tests(name: str, wanted: str, file: str = "test_devices.py") -> Part:
    options = ["-q", "-rs", "-p", "no:cacheprovider", "--numprocesses", str(AT_ONCE)]
    plain = ["-m", "pytest", *options, f"tests/gpu/{file}", "-k", wanted]
    return Part(name, [*plain, "-m", "gpu"], [*plain, "-m", "not gpu"])


def benchmark(name: str) -> Part:
    command = ["scripts/benchmarks/bench_gpu.py", name, "--output", "{output}"]
    return Part(name, command, [*command, "--rehearse"])


DOCTOR = ["-m", "mcore_rl", "doctor"]
FIRST = "step_in_fp32 or demonstration"
PARTS = [
    Part("doctor", DOCTOR, DOCTOR),
    tests("smoke", FIRST),
    tests("tests", f"not ({FIRST})"),
    tests("layouts", "layout", "test_layouts.py"),
    *map(benchmark, ("trace", "logprobs", *CASES, "generation", "checkpoints")),
]
"""All parts, the most informative first."""


def main() -> int:
    parser = Parser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/gpu"))
    parser.add_argument("--only", nargs="+", metavar="PART", help=", ".join(part.name for part in PARTS))
    parser.add_argument("--again", action="store_true", help="run parts that have succeeded again")
    parser.add_argument("--seconds", type=count, default=1200, help="end after this many seconds (default: 1200)")
    parser.add_argument("--rehearse", action="store_true", help="run toy sizes on the CPU")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: told_to_end.set())
    with exit_on_error():
        names = [part.name for part in PARTS]
        if unknown := set(arguments.only or ()) - set(names):
            raise UserError(
                f"--only {' '.join(sorted(unknown))}: there is no such check; the checks are {', '.join(names)}"
            )
        chosen = [part for part in PARTS if not arguments.only or part.name in arguments.only]
        here = surroundings(arguments.rehearse)
        arguments.output.mkdir(parents=True, exist_ok=True)
        return run_all(chosen, arguments.output.resolve(), here, arguments)


def surroundings(rehearses: bool) -> dict[str, str]:
    """Return the device, versions and code that the results depend on.

    Raises:
        UserError: there is no GPU.
    """
    import torch

    if not (torch.cuda.is_available() or rehearses):
        raise UserError(f"torch {torch.__version__} sees no GPU; install a torch for CUDA, or add --rehearse")
    device = "the CPU, rehearsed" if rehearses else torch.cuda.get_device_name()
    versions = {"python": sys.version.split()[0], "cuda": torch.version.cuda or "none"}
    for name in ("torch", "megatron-core", "transformers", "transformer-engine"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "none"
    return {"device": device, **versions, "code": digest_of_code()}


def digest_of_code() -> str:
    """Return a digest of all code that a part runs. A result is valid for this code only."""
    digest = hashlib.sha256()
    for folder in ("mcore_rl", "scripts", "tests", "configs"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".yaml"):
                digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def run_all(parts: Sequence[Part], output: Path, here: dict[str, str], arguments: Any) -> int:
    """Run the parts and return the exit status. Parts without a result run before those that have failed earlier."""
    deadline, failed, status = time.monotonic() + arguments.seconds, list[str](), 0
    before = {part.name: earlier(output / f"{part.name}.json", here) for part in parts}
    for part in sorted(parts, key=lambda part: before[part.name] is not None):
        if not arguments.again and before[part.name] == ENDED_WELL:
            print(f"{part.name}: ended well before, {output / part.name}.json", flush=True)
            continue
        if time.monotonic() >= deadline:
            print(f"{part.name}: not begun, {arguments.seconds} s are over; the same command goes on with it")
            status = NOT_ALL
            break
        result = run(part, output, here, arguments.rehearse, deadline)
        summarize(dict.fromkeys(one.name for one in (*PARTS, *parts)), output, here)
        print(f"{part.name}: {result['ended']} after {result['seconds']:.0f} s, {output / part.name}.log", flush=True)
        if result["ended"] != ENDED_WELL:
            failed.append(part.name)
            print("\n".join(f"    {line}" for line in result["output"][-8:]))
    print(f"all results so far: {output / 'results.md'} and results.json")
    if failed:
        print(f"did not end well: {', '.join(failed)}")
    return status or int(bool(failed))


def summarize(names: Iterable[str], output: Path, here: dict[str, str]) -> None:
    """Write the results of the parts that have run with this device, versions and code: results.json and results.md."""
    found = [result_of(output / f"{name}.json", here) for name in names]
    results = [{key: one[key] for key in one.keys() - here.keys()} for one in found if one is not None]
    whole = {**here, "parts": results}
    (output / "results.json").write_text(json.dumps(whole, indent=1, ensure_ascii=False, sort_keys=True) + "\n")
    page = [f"# {here['device']}", "", ", ".join(f"{name} {value}" for name, value in here.items() if name != "device")]
    page += ["", "| part | end | seconds |", "|---|---|---|"]
    page += [f"| {one['part']} | {one['ended']} | {one['seconds']:.0f} |" for one in results]
    for one in results:
        shown = one["output"] if one["ended"] == ENDED_WELL else one["output"][-LINES_OF_A_FAILURE:]
        page += ["", f"## {one['part']}", "", "```", *shown, "```"]
    (output / "results.md").write_text("\n".join(page) + "\n")


def result_of(path: Path, here: dict[str, str]) -> dict[str, Any] | None:
    """Return a part's result with the same device, versions and code; None if it has not run with them."""
    try:
        result: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return result if all(result.get(name) == value for name, value in here.items()) else None


def earlier(path: Path, here: dict[str, str]) -> str | None:
    """Return how the part ended earlier with the same device, versions and code; None if it has not run."""
    result = result_of(path, here)
    return None if result is None else result["ended"]


def run(part: Part, output: Path, here: dict[str, str], rehearses: bool, deadline: float) -> dict[str, Any]:
    """Run a part until the deadline at most, and return its result.

    The result is written at the end, so an interrupted part has none.
    """
    command = [word.format(output=output) for word in (part.rehearsal if rehearses else part.command)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **({"CUDA_VISIBLE_DEVICES": ""} if rehearses else {})}
    (output / f"{part.name}.json").unlink(missing_ok=True)
    started, log = time.monotonic(), output / f"{part.name}.log"
    limit = min(SECONDS, deadline - started)
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            while process.poll() is None and time.monotonic() - started < limit and not told_to_end.wait(0.2):
                pass
        finally:
            if (status := process.poll()) is None:
                os.killpg(process.pid, signal.SIGKILL)  # including its child processes
                process.wait()
    if told_to_end.is_set():
        sys.exit(128 + signal.SIGTERM)
    result = {
        "part": part.name,
        "command": " ".join(["python", *command]),
        **here,
        "status": status,
        "ended": f"cut off after {limit:.0f} s" if status is None else ENDED_WELL if not status else f"status {status}",
        "seconds": round(time.monotonic() - started, 1),
        "output": log.read_text(errors="replace").splitlines()[-LINES_KEPT:],
    }
    (output / f"{part.name}.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    return result


if __name__ == "__main__":
    sys.exit(main())
