"""The default values of verl's programs, which scripts/make_defaults_of_verl.py takes from verl."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

TABLE = Path(__file__).parent / "defaults_of_verl.tsv"
"""Path of the table. Its columns are programs (files of verl's configuration), key and value as JSON."""


@functools.cache
def defaults_of_verl(program: str) -> Mapping[str, Any]:
    """Return the values that a program of verl has for keys that are left out, by dotted key."""
    rows = (line.split("\t") for line in TABLE.read_text("utf-8").splitlines())
    return {key: json.loads(value) for programs, key, value in rows if program in programs.split(",")}


def line_of(value: Any) -> str:
    """Return a value as it stands in the table."""
    return json.dumps(value, ensure_ascii=False)


def flattened(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of sections by dotted key. An empty section is a value."""
    for key, value in values.items():
        name = f"{prefix}{key}"  # YAML reads some keys as numbers
        if isinstance(value, dict) and value:
            yield from flattened(value, f"{name}.")
        else:
            yield name, value


def parsed(text: str) -> Any:
    """Return the value of a text in a command, read as YAML; `{a:1}` and 1e-6 mean what they mean to Hydra."""
    if re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", text):
        return float(text)
    if text.lower() in ("yes", "no", "on", "off", "y", "n"):  # texts for Hydra and for argparse
        return text
    if text[:1] == "{":
        text = re.sub(r"([{,]\s*[\w.]+):(?=\S)", r"\1: ", text)
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text
