"""Write the table of verl's default values, mcore_rl/config/porting/defaults_of_verl.tsv, from an installed verl.

`pip install --no-deps verl` installs the files that are read; nothing of verl is imported. Classes of sections and the
options of profilers are left out.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from mcore_rl.config.load import laid_over
from mcore_rl.config.porting.defaults import TABLE, flattened, line_of

MEGATRON = {"engine": "megatron", "optim": "megatron"}


def table() -> str:
    """Return the lines of the table: the programs with a value, its key, and the value as JSON."""
    places = [file.locate() for file in importlib.metadata.files("verl") or () if file.name == "ppo_trainer.yaml"]
    (directory,) = {Path(str(place)).parent for place in places if Path(str(place)).parent.name == "config"}
    programs = {name: _read(directory / f"_generated_{name}.yaml") for name in ("ppo_trainer", "ppo_megatron_trainer")}
    programs["sft_trainer_engine"] = _composed(directory, "sft_trainer_engine", {})
    programs["sft_megatron_trainer_engine"] = _composed(directory, "sft_trainer_engine", MEGATRON)
    rows: dict[tuple[str, str], list[str]] = {}
    for name, values in programs.items():
        for key, value in flattened(values):
            if not key.endswith("_target_") and "profiler" not in key:
                rows.setdefault((key, line_of(value)), []).append(name)
    return "".join(f"{','.join(names)}\t{key}\t{value}\n" for (key, value), names in sorted(rows.items()))


def _read(file: Path) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(file.read_text("utf-8"))
    return values


def _composed(directory: Path, name: str, choices: dict[str, str]) -> dict[str, Any]:
    """Return a file of verl over the files that its list `defaults` puts into its sections."""
    values = _read(directory / f"{name}.yaml")
    base: dict[str, Any] = {}
    for group, section, file in _parts(values.pop("defaults")):
        base[section] = _read(directory / group / f"{choices.get(group, file)}.yaml")
        assert "defaults" not in base[section], (group, file)
    return laid_over(base, values)


def _parts(defaults: list[Any]) -> Iterator[tuple[str, str, str]]:
    for entry in defaults:
        if entry != "_self_":
            ((place, file),) = entry.items()
            group, _, section = place.partition("@")
            yield group, section, file


if __name__ == "__main__":
    TABLE.write_text(table())
    print(TABLE)
