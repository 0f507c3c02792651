"""The `mcore-rl` command: train, port, vllm-servers, verify, report, schema and doctor."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

import psutil

from mcore_rl.cli.entry_point import Parser, exit_on_error, leave, show
from mcore_rl.cli.launch import launch, split
from mcore_rl.cli.train import PROGRAMS, train
from mcore_rl.config.schema import json_schema
from mcore_rl.errors import UserError
from mcore_rl.run.directory import REPORT, is_report
from mcore_rl.utils import torchrun
from mcore_rl.utils.console import quiet_libraries
from mcore_rl.utils.packages import check_packages, import_torch, is_own_build, package_problems, version_of

USAGE = f"""\
mcore-rl train {{{",".join(PROGRAMS)}}} [torchrun's options] CONFIG [section.key=value …]
mcore-rl train {{…}} [torchrun's options] --model PATH --data FILE [--output DIRECTORY] [section.key=value …]
mcore-rl port FILE [ARGUMENT …] [--env NAME=VALUE] [--algorithm {{…}}] [--num-processes N] [--output FILE]
mcore-rl vllm-servers CONFIG [section.key=value …] [--hosts HOST,…] [--gpus-per-node N]
mcore-rl verify [torchrun's options] [CONFIG] [section.key=value …] [--output DIRECTORY] [--only PARTS] [--minutes N]
mcore-rl report RUN [RUN …] [--output FILE]
mcore-rl schema {{…}}
mcore-rl doctor

    mcore-rl train dpo configs/dpo_cpu.yaml                          one process
    mcore-rl train dpo --nproc-per-node 8 dpo.yaml optimizer.lr=1e-6 eight processes
    mcore-rl train grpo --nnodes 2 --nproc-per-node 8 --rdzv-endpoint HOST:29500 grpo.yaml
    mcore-rl verify --nproc-per-node 8                               check this node in less than half an hour

`mcore-rl train dpo --help` prints the options and keys of a program, `torchrun --help` those of the launch.
`mcore-rl port FILE > dpo.yaml` translates a command or configuration of TRL, verl or NeMo RL.
`mcore-rl vllm-servers CONFIG` starts the vLLM servers of a configuration, for runs that use them.
`mcore-rl report OUTPUT` writes curves and samples of a run to OUTPUT/report.html.
`mcore-rl schema dpo` prints the JSON schema of a configuration.
`mcore-rl doctor` lists the installed packages, the features that need the missing ones, and what must be mended."""

TRAIN_USAGE = """\
usage: mcore-rl train ALGORITHM [torchrun's options] CONFIG [section.key=value …]
       mcore-rl train ALGORITHM [torchrun's options] --model PATH --data FILE [--output DIRECTORY] [section.key=value …]
"""
TRAIN_HELP = """\
`mcore-rl train dpo --help` prints the options and keys of a program, `mcore-rl train dpo --help optimizer` explains the
keys of a section, and `torchrun --help` prints the options of the launch, such as --nproc-per-node, which stand before
CONFIG."""
DOCTOR = "List the installed packages, the features that need the missing ones, and what must be mended."
STATUS_OF_DOCTOR = "The exit status is 1 if a run could not start."

NEEDED = ("torch", "megatron-core", "transformers", "tokenizers", "safetensors", "datasets", "pydantic")
OPTIONAL = {
    "transformer-engine": "Megatron's fused attention and layers on GPUs (pip install 'mcore_rl[gpu]')",
    "apex": "fused optimizer and weight gradients on GPUs without Transformer Engine (built from source)",
    "flash-linear-attention": "gated delta nets on GPUs by fla's kernels (pip install flash-linear-attention)",
    "causal-conv1d": "convolutions of gated delta nets on GPUs (pip install causal-conv1d)",
    "vllm": "generation.backend=vllm (make install-vllm, or generation.vllm.python)",
    "ray": "ray_dpo.py and the Ray policy (pip install 'mcore_rl[ray]')",
    "pillow": "images (pip install 'mcore_rl[vision]')",
    "math-verify": "environment.name=math (pip install 'mcore_rl[math]')",
    "tensorboard": "logging.tensorboard (pip install 'mcore_rl[tensorboard]')",
    "plotly": "mcore-rl report (pip install 'mcore_rl[report]')",
    "wandb": "logging.wandb (pip install 'mcore_rl[wandb]')",
    "mlflow-skinny": "logging.mlflow (pip install 'mcore_rl[mlflow]')",
    "peft": "tests of adapters; training with LoRA does not need it",
}

IN_CONTAINERS = "Megatron's fused attention and layers on GPUs (NVIDIA's containers bring it; do not install another)"
"""Purpose of Transformer Engine, and where it comes from, in an environment with a container's own torch."""


def main(arguments: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words in (["-h"], ["--help"]):
        show(USAGE)
        sys.exit(0 if words else 2)
    if words[0] == "doctor":
        Parser(prog="mcore-rl doctor", description=DOCTOR, epilog=STATUS_OF_DOCTOR).parse_args(words[1:])
        with exit_on_error():
            sys.exit(print_doctor())
    if words[0] == "report":
        report(words[1:], "mcore-rl report")
        return
    if words[0] == "port":
        from mcore_rl.cli.port import port_command  # imports tables that nothing else needs

        port_command(words[1:], "mcore-rl port")
        return
    if words[0] in ("verify", "vllm-servers"):
        with exit_on_error():
            check_packages()
            import_torch()
        if words[0] == "verify":
            from mcore_rl.cli.verify import verify  # imports what training does not need

            verify(words[1:])
        else:
            from mcore_rl.cli.vllm_servers import vllm_servers

            vllm_servers(words[1:], "mcore-rl vllm-servers")
        return
    if words[0] not in ("train", "schema"):
        known = (
            ", ".join(f"mcore-rl {name} …" for name in ("train", "port", "vllm-servers", "verify", "report", "schema"))
            + " or mcore-rl doctor"
        )
        leave(2, f"mcore-rl {' '.join(words)}: there is no such command; write {known}")
    if words[0] == "schema":
        schema(words[1:])
        return
    if words[1:2] in (["-h"], ["--help"]):
        show(help_of_train())
        return
    if len(words) < 2 or words[1] not in PROGRAMS:
        leave(2, f"mcore-rl {' '.join(words[:2])}: name one of {', '.join(PROGRAMS)}")
    algorithm, rest = words[1], words[2:]
    if not torchrun.is_launched():
        with exit_on_error():
            launch_options, rest = split(rest)  # imports torch if there are options
        if launch_options:
            sys.exit(launch(launch_options, ["train", algorithm, *rest]))
        late = [word for word in rest if word.startswith("--n") and split([word])[0]]
        if late:
            leave(2, f"{late[0]}: options of the launch come first: mcore-rl train {algorithm} {late[0]} … CONFIG")
    train(algorithm, rest, f"mcore-rl train {algorithm}")


def help_of_train() -> str:
    """Return the text of `mcore-rl train --help`: the usage, the programs, and where their options are explained."""
    programs = (f"    {name:<8} {program.description}" for name, program in PROGRAMS.items())
    return "\n".join((TRAIN_USAGE, "Train a model. ALGORITHM is one of:", "", *programs, "", TRAIN_HELP))


def schema(arguments: Sequence[str]) -> None:
    """Run `mcore-rl schema`: print the JSON schema of a program's configuration."""
    parser = Parser(prog="mcore-rl schema", description="Print the JSON schema of a configuration, for editors.")
    parser.add_argument("algorithm", choices=PROGRAMS, help="the program that reads the configuration")
    show(json.dumps(json_schema(PROGRAMS[parser.parse_args(arguments).algorithm].config), indent=1))


def report(arguments: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Run `mcore-rl report`: write an HTML file about runs, and print its path. A user's error gives status 2."""
    parser = Parser(prog=prog, description="Write one self-contained HTML file about runs.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="output_dir of a running or finished run")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help=f"path of the report (default: {REPORT} in the first RUN)"
    )
    parsed = parser.parse_args(arguments)
    with exit_on_error():
        print(write_report(parsed.runs, parsed.output or parsed.runs[0] / REPORT))


def write_report(paths: Sequence[Path], output: Path) -> Path:
    """Write a report of the runs with the output directories `paths` to the file `output`; return `output`.

    Raises:
        UserError: a path is not the directory of a run; `output` exists and is not a report, or cannot be written;
            Plotly is not installed.
    """
    from mcore_rl.report.runs import read_runs

    runs = read_runs(list(paths))
    if output.is_symlink() or (output.exists() and not is_report(output)):
        raise UserError(f"{output}: exists and was not written by mcore-rl report; choose another file (--output FILE)")
    for run in runs:
        if run.directory.writes(output) and output.resolve() != (run.path / REPORT).resolve():
            raise UserError(f"--output {output}: the run in {run.path} writes this file; choose another file")
    try:
        from mcore_rl.report.page import page
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is not installed: pip install 'mcore_rl[report]'") from None
    text = page(runs).encode("utf-8", "replace")  # a sample may have half a surrogate pair
    try:
        with tempfile.NamedTemporaryFile(dir=output.parent, prefix=f".{output.name}.", delete=False) as file:
            file.write(text)
        Path(file.name).chmod(0o644)
        Path(file.name).replace(output)
    except OSError as error:
        raise UserError(f"{output}: cannot be written ({error.strerror})") from None
    return output


def print_doctor() -> int:
    """Print what is installed and whether it works, line by line; return the exit status: 1 if a run would fail."""
    for line in describe_installation():
        print(line, flush=True)
    wrong = [*package_problems()]
    if not wrong:
        try:
            import_torch()
            for line in describe_device():
                print(line, flush=True)
            wrong = [problem for problem in (_group_problem(), _megatron_problem()) if problem]
        except UserError as error:
            wrong = [str(error)]
    print("\n".join(f"MEND THIS: {problem}" for problem in wrong) or "a run can start")
    return int(bool(wrong))


def describe_installation() -> Iterator[str]:
    """Yield lines about this machine and the packages: versions, and what each missing package is for."""
    import mcore_rl

    yield f"mcore_rl {mcore_rl.__version__}, Python {platform.python_version()}, {platform.platform()}"
    memory = psutil.virtual_memory().total / 2**30
    yield f"{torchrun.processors()} processors, {memory:.0f} GiB of memory, {_disk()}"
    for name in NEEDED:
        yield f"  {name:<24}{version_of(name) or 'MISSING'}"
    in_container = is_own_build(version_of("torch"))
    for name, purpose in OPTIONAL.items():
        missing = IN_CONTAINERS if in_container and name == "transformer-engine" else purpose
        yield f"  {name:<24}{version_of(name) or f'not installed: {missing}'}"


def describe_device() -> Iterator[str]:
    """Yield lines about GPUs and Transformer Engine. This imports PyTorch and, if installed, Transformer Engine."""
    from mcore_rl.platform import describe_gpus, te_problem, te_warning

    if (problem := te_problem()) not in (None, "is not installed"):
        yield f"Transformer Engine {problem}: runs take local layers"
    if warning := te_warning():
        yield f"warning: {warning}"
    yield from describe_gpus() or [
        "torch finds no GPU: runs use the CPU. On a machine with GPUs, install a torch for CUDA, then this package"
    ]


def _disk() -> str:
    from mcore_rl.data.token_cache import default_directory

    cache = default_directory()
    existing = next(path for path in (cache, *cache.parents) if path.exists())
    free = shutil.disk_usage(existing).free / 2**30
    problem = "" if os.access(existing, os.W_OK | os.X_OK) else " (NOT WRITABLE)"
    return f"{free:.0f} GiB free for tokenized data in {cache}{problem}"


def _group_problem() -> str | None:
    """Return why no process group of one rank can be created and used; None if one can."""
    from datetime import timedelta

    import torch

    from mcore_rl.platform import backend, device

    try:
        store = torch.distributed.HashStore()
        limit = timedelta(seconds=30)
        torch.distributed.init_process_group(backend(), store=store, rank=0, world_size=1, timeout=limit)
        torch.distributed.all_reduce(torch.ones(1, device=device()))
        torch.distributed.destroy_process_group()
    except (RuntimeError, ValueError) as error:
        return f"{backend()}: no process group can be made: {' '.join(str(error).split())}"
    return None


def _megatron_problem() -> str | None:
    """Return why Megatron-Core cannot be imported; None if it can."""
    from mcore_rl.platform import initialize_platform

    quiet_libraries()
    initialize_platform()
    try:
        import_module("mcore_rl.models.megatron.model.build")
    except UserError as error:
        return str(error)
    return None
