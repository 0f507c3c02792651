"""Describe the content of a checkpoint from its index and small files."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mcore_rl.models.megatron.checkpoint.trust import check_trusted
from mcore_rl.utils.checkpoint_store import quick_problems


def describe(iteration: Path) -> Iterator[str]:
    """Lines: soundness, the run's state, every tensor's shape, precision and number of shards, sizes, config.

    Raises:
        UserError: it names code to run.
    """
    index = check_trusted(iteration)
    common = torch.load(iteration / "common.pt", weights_only=True)
    problems = quick_problems(iteration)
    yield f"{iteration}: {'; '.join(problems) or 'whole'}"
    for name, value in {**common.get("state", {}), **common.get("versions", {})}.items():
        yield f"  {name}: {_short(value)}"
    yield f"  also: {', '.join(sorted(set(common) - {'state', 'versions'}))}"
    tensors = {
        name: entry
        for name, entry in sorted(index.state_dict_metadata.items())
        if isinstance(entry, TensorStorageMetadata)
    }
    widest = max(map(len, tensors), default=0)
    for name, entry in tensors.items():
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        shape = " x ".join(map(str, entry.size))
        yield f"  {name:{widest}}  {dtype}  {shape}  ({len(entry.chunks)} {_plural(len(entry.chunks), 'shard')})"
    for what, part in (
        ("model", [e for n, e in tensors.items() if not n.startswith("optimizer.")]),
        ("optimizer", [e for n, e in tensors.items() if n.startswith("optimizer.")]),
    ):
        numbers, size = sum(map(_numel, part)), sum(_numel(e) * e.properties.dtype.itemsize for e in part)
        yield f"{what}: {len(part)} tensors, {numbers:,} numbers, {size:,} bytes"
    yield "config.yaml:"
    yield from (f"  {line}" for line in (iteration / "config.yaml").read_text().splitlines())


def _numel(entry: TensorStorageMetadata) -> int:
    return math.prod(entry.size)


def _plural(count: int, word: str) -> str:
    return word if count == 1 else word + "s"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 70 else text[:67] + "..."
