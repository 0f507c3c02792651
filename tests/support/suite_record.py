"""Plugin that records the versions, the processor and the result of a suite: outputs/suites/NAME.json.

`scripts/make_version_table.py` makes the table of docs/versions.md of these files.
"""

import importlib.util
import json
import os
import platform
import re
import subprocess
import time
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from bench_results import processor

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("torch", "megatron-core", "transformers", "trl", "peft", "ray", "triton")


def pytest_addoption(parser):
    parser.addoption("--suite", metavar="NAME", help="record versions and result below this name in outputs/suites")


STARTED = time.time()


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    name = config.getoption("suite")
    if name is None:  # workers of a parallel run have no terminal
        return
    counts = {kind: len(terminalreporter.stats.get(kind, ())) for kind in ("passed", "failed", "error", "skipped")}
    record = {
        "suite": name,
        "date": date.today().isoformat(),
        "commit": _commit(),
        "processor": _processor(),
        "python": platform.python_version(),
        "versions": versions(config.getoption("markexpr")),
        "seconds": round(time.time() - STARTED),
        **counts,
    }
    directory = ROOT / "outputs" / "suites"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{file_name(record)}.json").write_text(json.dumps(record, indent=1) + "\n")


def file_name(record):
    """Return a name that is the same for two runs with the same suite, Python, Megatron and engines."""
    of = record["versions"]
    parts = [record["suite"], "python" + ".".join(record["python"].split(".")[:2]), "megatron" + of["megatron-core"]]
    parts += [f"{one}{of[one]}" for one in ("transformer-engine", "vllm") if one in of]
    parts = [re.sub(r"[ (),]+", "_", part).strip("_") for part in parts]
    return "_".join(parts)


def versions(marks):
    """Return the versions of the packages that this suite's processes import, by name; `marks` selects its tests."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if (engine := importlib.util.find_spec("transformer_engine")) is not None:
        is_stand_in = "te_stand_in" in str(engine.origin)
        stand_in = f"stand-in for {os.environ.get('TE_STAND_IN_VERSION', '2.9.0')}"
        found["transformer-engine"] = stand_in if is_stand_in else version("transformer-engine")
    if marks == "vllm":
        (server,) = (ROOT / ".venv-vllm").glob("lib/*/site-packages/vllm*.dist-info")
        found["vllm"] = server.name.removesuffix(".dist-info").replace("-", " ").removeprefix("vllm ")
    return found


def _processor():
    """Return the processor's name and the instructions that torch's own kernels use on it."""
    import torch

    return f"{processor()}, {torch.backends.cpu.get_cpu_capability()}"


def _commit():
    asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    return subprocess.run(asked, capture_output=True, text=True).stdout.strip() or "unknown"
