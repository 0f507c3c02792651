"""The model card of an exported model: base model, data, settings and metrics."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from mcore_rl.config import TrainingConfig
from mcore_rl.run.directory import STEP_LOGS
from mcore_rl.run.identity import flattened
from mcore_rl.run.metrics import read_step_log

CACHED = re.compile(r"^models--([^-].*?)--(.+)$")
"""Pattern of the folders in the Hugging Face cache, whose names contain the model's name."""
COMMON_KEYS = ("optimizer.lr", "batch.global_batch_size", "data.max_sequence_length", "model.dtype", "seed")
"""Settings in the card that every algorithm has."""
NOT_SHOWN = ("seconds", "per_second", "step", "utilization")
"""Suffixes of metrics that are not shown because they do not describe the model."""


def model_card(config: TrainingConfig) -> str:
    """Return the card's text: a YAML head as the hub reads it, the data, key settings and the last metrics."""
    base = _hub_name(config.model.path)
    head: dict[str, Any] = {"library_name": "transformers", "tags": ["mcore_rl", config.algorithm]}
    if base is not None:
        head["base_model"] = base
    values, own = flattened(config.model_dump(mode="json")), f"{config.algorithm}."
    shown = [
        *COMMON_KEYS,
        *(key for key in values if key.startswith(own) and isinstance(values[key], int | float | str)),
    ]
    path = config.output_dir / STEP_LOGS[0]
    steps = read_step_log(path) if path.is_file() else []
    metrics = {k: v for k, v in (steps[-1] if steps else {}).items() if not k.endswith(NOT_SHOWN)}
    sources = [Path(str(source)).name for source in config.data.train_sources]
    return (
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n"
        f"Trained by {config.algorithm} from {base or Path(config.model.path).name} with mcore_rl.\n\n"
        f"Data: {', '.join(sources)}\n\n"
        f"{_table('setting', {key: values[key] for key in shown})}\n{_table('metric of the last step', metrics)}"
    )


def write_model_card(directory: Path, config: TrainingConfig) -> None:
    """Write the card as `README.md` of an exported model, unless there is one."""
    path = directory / "README.md"
    if not path.exists():
        path.write_text(model_card(config))


def _hub_name(path: Path) -> str | None:
    found = next((match for part in Path(path).parts if (match := CACHED.match(part))), None)
    return None if found is None else f"{found[1]}/{found[2]}"


def _table(title: str, values: dict[str, Any]) -> str:
    texts = {key: f"{value:.6g}" if isinstance(value, float) else str(value) for key, value in values.items()}
    rows = (f"| `{key}` | {text} |" for key, text in texts.items())
    return "\n".join([f"| {title} | |", "|---|---|", *rows]) + "\n"
