"""`mcore-rl doctor`: what is installed, which features need what is missing, and what must be mended before a run."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module

import psutil

from mcore_rl.cli.entry_point import Parser, exit_on_error
from mcore_rl.errors import UserError
from mcore_rl.utils import torchrun
from mcore_rl.utils.console import quiet_libraries
from mcore_rl.utils.packages import import_torch, is_own_build, package_problems, version_of

DESCRIPTION = "List the installed packages, the features that need the missing ones, and what must be mended."
EPILOG = "The exit status is 1 if a run could not start."

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


def doctor(arguments: Sequence[str], prog: str) -> None:
    """Run `mcore-rl doctor`, and exit: with status 1 if a run could not start."""
    Parser(prog=prog, description=DESCRIPTION, epilog=EPILOG).parse_args(arguments)
    with exit_on_error():
        sys.exit(print_doctor())


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
