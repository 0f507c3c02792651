"""What a user names as a model: a model directory, the directory of a run, a checkpoint, or a PEFT directory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mcore_rl.config import GRPOConfig, build_config, read_yaml
from mcore_rl.config.load import LENGTH
from mcore_rl.config.sections import ModelConfig
from mcore_rl.errors import UserError
from mcore_rl.run.converted_checkpoint import CONFIG_KEY, checkpoint_at
from mcore_rl.run.directory import RunDirectory
from mcore_rl.utils.checkpoint_store import CheckpointStore, is_foreign
from mcore_rl.utils.model_directory import check_model_directory, download, is_hub_name, positions_of

Which = Literal["newest", "best", "hf"]
UNREAD = "not read"
"""Value of keys that a configuration must have, but that only training reads."""
PEFT_FILE = "adapter_config.json"
OF_RUN = ("model", "data", "seed", "environment")
"""Sections of a run's configuration that are kept: those that describe its model, and the judge."""
OF_DATA = ("chat_template",)
LONGEST = 32768


@dataclass(frozen=True)
class ModelSource:
    """A model to use.

    name: its name, for people and for requests.
    config: configuration by which it is built; `model.path` is a model directory or a name on the hub.
    checkpoint: checkpoint from which the weights are read; None for those of `model.path`.
    takes_best: whether they are read from the checkpoint of the run's best validation, which `checkpoint` names.
    """

    name: str
    config: GRPOConfig
    checkpoint: Path | None = None
    takes_best: bool = False


def find_model(
    named: str, overrides: Sequence[str], values: dict[str, Any] | None = None, which: Which | None = None
) -> ModelSource:
    """Return the model that a user names.

    Args:
        named: a model directory or a name on the hub; the output directory of a run; a checkpoint; or a PEFT directory.
        overrides: overrides of the configuration, of the form `section.key=value`.
        values: further values of the configuration.
        which: which weights of a run: those of its newest checkpoint (the default), of its best, or its directory `hf`.

    Raises:
        UserError: there is no such model, or the run has no such weights.
    """
    path = Path(named)
    found, checkpoint = _of_path(path, which) if path.exists() or not is_hub_name(path) else ({}, None)
    if which is not None and "run" not in found:
        raise UserError(f"--checkpoint {which}: {named} is not the directory of a run")
    found.pop("run", None)
    own_judge = found.pop("environment", {})
    merged: dict[str, Any] = {
        "model": {"path": named},
        "output_dir": "outputs/serve",
        "data": {"train": UNREAD},
        "checkpoint": {"export_hf": False},
        "grpo": {"max_new_tokens": None, "keep_sampling_mask": False},
    }
    if (values or {}).get("environment") is None:  # a judge that is named replaces the run's
        values = {**(values or {}), "environment": own_judge}
    for section, more in [*found.items(), *(values or {}).items()]:
        merged[section] = {**merged.get(section, {}), **more} if isinstance(more, dict) else more
    is_set = LENGTH in merged["data"] or any(change.startswith(f"data.{LENGTH}=") for change in overrides)
    merged["data"].setdefault(LENGTH, LONGEST)
    config = build_config(GRPOConfig, merged, overrides, named)
    if not is_set and (length := _length_of(config.model)) < LONGEST:
        merged["data"][LENGTH] = length
        config = build_config(GRPOConfig, merged, overrides, named)
    name = path.resolve().name if path.exists() else path.name
    return ModelSource(name, config, checkpoint, takes_best=which == "best")


def overrides_for(named: str, overrides: Sequence[str]) -> list[str]:
    """Return the overrides for one of two compared models: `model.config_path` is only for a checkpoint of others."""
    own = not is_foreign(checkpoint_at(Path(named)) or Path())
    return [change for change in overrides if not (own and change.startswith(f"{CONFIG_KEY}="))]


def _length_of(model: ModelConfig) -> int:
    """Return the default of the maximum number of tokens of prompt and response: the model's positions, if not many."""
    path = model.config_path or model.path
    try:
        directory = download(str(path), "model.path", with_weights=False) if is_hub_name(path) else path
        return int(min(positions_of(check_model_directory(directory)), LONGEST))
    except (UserError, OSError, TypeError, AttributeError):  # a later check explains
        return LONGEST


def _of_path(path: Path, which: Which | None) -> tuple[dict[str, Any], Path | None]:
    """Return the values of the configuration for the model at `path`, and the checkpoint with its weights.

    The values have the key `run` if `path` is the directory of a run.

    Raises:
        UserError: there is no model.
    """
    if (path / "config.json").is_file():
        return {}, None
    if (path / PEFT_FILE).is_file():
        return {"model": {"path": _base_of_adapter(path), "lora": {"path": str(path)}}}, None
    if is_foreign(path):
        return {}, None  # it is converted
    if (path / "metadata.json").is_file():
        return _values_of(path / "config.yaml"), path
    run = RunDirectory(path)
    if run.identity is None:
        for store in (CheckpointStore(path), run.checkpoints):
            if found := store.candidates()[0]:
                return ({}, None) if is_foreign(found[0]) else (_values_of(found[0] / "config.yaml"), found[0])
        raise UserError(
            f"{path}: is not a model; name a model directory (with config.json), the output_dir of a run, a checkpoint "
            f"(iter_NNNNNNN) or a PEFT directory (with {PEFT_FILE})"
        )
    values = {**_values_of(path / "config.yaml"), "run": True}
    if which == "hf":
        return _of_export(run, values), None
    iterations = run.checkpoints.iterations()
    if not iterations and which is None:
        return _of_export(run, values), None
    if not iterations:
        raise UserError(f"{path}: the run has no checkpoint")
    newest = run.checkpoints.candidates()[0][0]
    return values, newest


def _of_export(run: RunDirectory, values: dict[str, Any]) -> dict[str, Any]:
    if not (run.export / "config.json").is_file():
        raise UserError(f"{run.path}: the run has neither exported a model (hf/) nor saved a checkpoint")
    own = {key: value for key, value in values["model"].items() if key != "lora"}
    return {**values, "model": {**own, "path": str(run.export)}}


def _values_of(file: Path) -> dict[str, Any]:
    """Return the values of a run's configuration that describe its model.

    Raises:
        UserError: the file is missing.
    """
    if not file.is_file():
        raise UserError(f"{file}: does not exist; is this a checkpoint?")
    values = read_yaml(file)
    found = {section: values[section] for section in OF_RUN if section in values}
    found["data"] = {key: value for key, value in found.get("data", {}).items() if key in OF_DATA}
    return found


def _base_of_adapter(path: Path) -> str:
    try:
        base = json.loads((path / PEFT_FILE).read_bytes()).get("base_model_name_or_path")
    except (ValueError, AttributeError):
        base = None
    if not isinstance(base, str):
        raise UserError(f"{path / PEFT_FILE}: has no base_model_name_or_path; set model.path to the adapter's model")
    return base
