"""`mcore-rl doctor`: installed packages, devices, and what is missing for which feature."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil

NEEDED = ("torch", "megatron-core", "transformers", "tokenizers", "safetensors", "datasets", "pydantic")
OPTIONAL = {
    "transformer-engine": "Megatron's fused attention and layers on GPUs (pip install 'mcore_rl[gpu]')",
    "apex": "fused optimizer and weight gradients on GPUs without Transformer Engine (built from source)",
    "flash-linear-attention": "gated delta nets on GPUs by fla's kernels (pip install flash-linear-attention)",
    "causal-conv1d": "convolutions of gated delta nets on GPUs (pip install causal-conv1d)",
    "vllm": "generation.backend=vllm (make install-vllm, or generation.vllm.python)",
    "ray": "ray_dpo.py and the Ray policy (pip install 'mcore_rl[ray]')",
    "math-verify": "environment.name=math (pip install 'mcore_rl[math]')",
    "tensorboard": "logging.tensorboard (pip install 'mcore_rl[tensorboard]')",
    "plotly": "mcore-rl report (pip install 'mcore_rl[report]')",
    "wandb": "logging.wandb (pip install 'mcore_rl[wandb]')",
    "mlflow-skinny": "logging.mlflow (pip install 'mcore_rl[mlflow]')",
    "peft": "tests of adapters; training with LoRA does not need it",
}


def report() -> Iterator[str]:
    """Yield lines for the user; nothing is written."""
    import mcore_rl
    from mcore_rl.platform import te_problem

    yield f"mcore_rl {mcore_rl.__version__}, Python {platform.python_version()}, {platform.platform()}"
    memory = psutil.virtual_memory().total / 2**30
    yield f"{len(os.sched_getaffinity(0))} processors, {memory:.0f} GiB of memory, {_disk()}"
    for name in NEEDED:
        yield f"  {name:<24}{_version(name) or 'MISSING'}"
    for name, purpose in OPTIONAL.items():
        yield f"  {name:<24}{_version(name) or f'not installed: {purpose}'}"
    if (problem := te_problem()) not in (None, "is not installed"):
        yield f"Transformer Engine {problem}: runs take local layers"
    yield from _devices()
    yield _group()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _disk() -> str:
    from mcore_rl.data.token_cache import default_directory

    cache = default_directory()
    existing = next(path for path in (cache, *cache.parents) if path.exists())
    free = shutil.disk_usage(existing).free / 2**30
    return f"{free:.0f} GiB free for tokenized data in {cache}" + ("" if _writable(existing) else " (NOT WRITABLE)")


def _writable(path: Path) -> bool:
    return os.access(path, os.W_OK | os.X_OK)


def _devices() -> Iterator[str]:
    from mcore_rl.platform import describe_gpus

    yield from describe_gpus() or [
        "torch finds no GPU: runs use the CPU. On a machine with GPUs, install a torch for CUDA, then this package"
    ]


def _group() -> str:
    """Check whether a process group of one rank can be created and used."""
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
        return f"{backend()}: NO PROCESS GROUP can be made: {' '.join(str(error).split())}"
    return f"{backend()}: a process group can be made"
