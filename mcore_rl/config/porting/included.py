"""Files that a configuration includes by its key `defaults`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from mcore_rl.config.load import laid_over
from mcore_rl.errors import UserError

OWN_OF_VERL = {
    "ppo_trainer": "ppo_trainer", "ppo_megatron_trainer": "ppo_megatron_trainer",
    "sft_trainer_engine": "sft_trainer_engine", "sft_trainer": "sft_trainer_engine",
}  # fmt: skip
"""Names under which files of verl's package are included, and those of the tables of their values."""


def with_included(values: dict[str, Any], path: Path, depth: int = 0) -> tuple[dict[str, Any], str, list[str]]:
    """Return the values over those of the files that `defaults` names.

    In NeMo RL, `defaults` names files. In verl, which uses Hydra, it names files in the directory of this file, or
    files of verl's package. Later entries replace the values of earlier ones. The file's own values come last, or in
    the place of `_self_`.

    Returns:
        values, the name of the file of verl's package or "", and what could not be read.
    """
    values = {key: value for key, value in values.items() if key != "hydra"}
    if "defaults" not in values:
        return values, "", []
    included = values.pop("defaults")
    entries = included if isinstance(included, list) else [included]
    base, own, unread = dict[str, Any](), "", list[str]()
    for entry in entries if "_self_" in entries else [*entries, "_self_"]:
        name = entry if isinstance(entry, str) else None
        if name == "_self_":
            base = _over(base, values)
            continue
        if name in OWN_OF_VERL and not beside(name, path).is_file():
            own = OWN_OF_VERL[name]
            continue
        choices = entry if isinstance(entry, dict) else {}
        if engine := next((value for key, value in choices.items() if key.split()[-1] == "model_engine"), None):
            base = _over(base, {"model_engine": engine})
            continue
        file = path if name is None else beside(name, path)
        if name is None or not file.is_file() or depth > 20:
            unread.append(f"defaults: the values of {_shown(entry)} are not read; write them into {path.name}")
            continue
        part, its_own, its_unread = with_included(mapping_of(file, f"defaults of {path}"), file, depth + 1)
        base, own, unread = _over(base, part), own or its_own, [*unread, *its_unread]
    return base, own, unread


def _over(base: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return `values` over `base`. A section with NeMo RL's `_override_: true` replaces that of `base`."""
    for key, value in values.items():
        if isinstance(value, dict) and "_override_" in value:
            replaces = value.pop("_override_") is True
            base = {name: part for name, part in base.items() if name != key or not replaces}
    return laid_over(base, values)


def _shown(entry: Any) -> str:
    return ", ".join(f"{key}: {value}" for key, value in entry.items()) if isinstance(entry, dict) else str(entry)


def beside(name: str, path: Path) -> Path:
    """Return the YAML file `name`, which may lack its ending, in the directory of `path`."""
    file = path.parent / name
    return file if file.suffix in (".yaml", ".yml") else file.with_name(f"{file.name}.yaml")


def mapping_of(file: Path, role: str) -> dict[str, Any]:
    """Return the mapping of a YAML file.

    Raises:
        UserError: the file cannot be read or is no mapping. `role` says in the message what names the file.
    """
    try:
        values = yaml.safe_load(file.read_text("utf-8-sig"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{file} ({role}): cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise UserError(f"{file} ({role}): must be a mapping, found a {type(values).__name__}")
    return values
