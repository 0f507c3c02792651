"""From YAML and overrides to a configuration, every mistake one line that names the key."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import yaml
from pydantic import ValidationError

from mcore_rl.config.base import Section
from mcore_rl.config.files import parse_value, read_overridable, refuse_unset, without_variables
from mcore_rl.errors import UserError

ConfigT = TypeVar("ConfigT", bound=Section)

FORM = re.compile(r"\(\w+\)|[\w-]+\[.*\]")
"""What pydantic puts into an error's place to tell which form of a value was tried; no part of a key."""


def load_config(config_type: type[ConfigT], path: str | Path, overrides: Sequence[str] = ()) -> ConfigT:
    """Read `path` (YAML) and apply `section.key=value` overrides (values are YAML too).

    Raises:
        UserError: the file is missing or not YAML, or a key or value is wrong; names file and key.
    """
    return build_config(config_type, read_overridable(path), overrides, origin=str(path))


def build_config(config_type: type[ConfigT], values: dict[str, Any], overrides: Sequence[str], origin: str) -> ConfigT:
    """A configuration from a file's values and overrides; `origin` names the file in errors of what it says."""
    for override in overrides:
        _apply_override(values, override)
    refuse_unset(values)
    try:
        return config_type.model_validate(values)
    except ValidationError as error:
        overridden = tuple(f"{override.partition('=')[0]}." for override in overrides)
        wrong = ["".join(f"{part}." for part in problem["loc"]) for problem in error.errors()]
        said_by = "command line" if all(key.startswith(overridden) for key in wrong) else origin
        raise UserError(f"{said_by}: {_explain(config_type, error)}") from None


def resolved_yaml(config: Section) -> str:
    """The whole configuration, defaults included, as YAML that `load_config` reads back."""
    return yaml.safe_dump(without_variables(config.model_dump(mode="json")), sort_keys=False)


def _apply_override(values: dict[str, Any], override: str) -> None:
    name, separator, text = override.partition("=")
    if not separator or not name:
        raise UserError(f"override {override!r}: write it as section.key=value")
    *sections, key = name.split(".")
    if not all([*sections, key]):
        raise UserError(f"override {override!r}: write it as section.key=value")
    for depth, section in enumerate(sections, start=1):
        if values.get(section) is None:
            values[section] = {}
        values = values[section]
        if not isinstance(values, dict):
            raise UserError(f"override {override!r}: {'.'.join(sections[:depth])} is a value, not a section")
    try:
        values[key] = parse_value(text)
    except ValueError as error:
        raise UserError(f"override {override!r}: {text!r} is not a YAML value: {error}") from None


def _explain(config_type: type[Section], error: ValidationError) -> str:
    """All problems in one line, unknown keys with the nearest known one.

    Of a value of several possible forms, which pydantic tries one after the other, the form that went furthest counts.
    """
    furthest: dict[tuple[str, ...], tuple[list[str], Any]] = {}
    for problem in error.errors():
        location = [str(part) for part in problem["loc"]]
        form = next((i for i, part in enumerate(location) if FORM.fullmatch(part)), len(location))
        location = [part for part in location if not FORM.fullmatch(part)]
        key = tuple(location[:form])
        if key not in furthest or len(location) > len(furthest[key][0]):
            furthest[key] = location, problem
    return "; ".join(_explain_one(config_type, location, problem) for location, problem in furthest.values())


def _explain_one(config_type: type[Section], location: list[str], problem: Any) -> str:
    name = ".".join(location)
    if problem["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        known = _fields_at(config_type, location[:-1])
        if near := difflib.get_close_matches(location[-1], known, n=1):
            return f"unknown key {name}; did you mean {'.'.join([*location[:-1], *near])}?"
        return f"unknown key {name}; known here are {', '.join(known)}"
    if problem["type"] == "missing":
        return f"{name} is required"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] in ("model_type", "dataclass_type"):
        found = "nothing" if problem["input"] is None else repr(problem["input"])
        return f"{name}: is a section of keys, found {found}"
    if problem["type"] == "value_error" and isinstance(problem["input"], dict):  # says itself which of its keys
        is_key = message.partition(":")[0] in _fields_at(config_type, location)
        return f"{name}{'.' if is_key else ': '}{message}" if name else message
    if isinstance(problem["input"], dict | list):
        message += f" (got {'keys' if isinstance(problem['input'], dict) else 'a list'})"
    if isinstance(problem["input"], str | int | float | bool):
        message += f" (got {problem['input']!r})"
    return f"{name}: {message}"


def _fields_at(config_type: type[Section], sections: Sequence[str]) -> list[str]:
    kind: Any = config_type
    for section in sections:
        if get_origin(kind) is dict:  # of sections, by names of the user's own
            kind = get_args(kind)[1]
            continue
        kind = kind.model_fields[section].annotation
        if type(None) in get_args(kind):  # a section that may be left out
            kind = next(part for part in get_args(kind) if part is not type(None))
    if get_origin(kind) is dict:
        return []
    return list(kind.model_fields) if hasattr(kind, "model_fields") else [f.name for f in dataclasses.fields(kind)]
