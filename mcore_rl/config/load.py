"""Read configuration files: YAML, included files, variables and overrides.

Each error is one line that names the key.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml
from pydantic import ValidationError

from mcore_rl.config.base import Section
from mcore_rl.config.other_names import other_names
from mcore_rl.errors import UserError, UserErrors
from mcore_rl.utils.model_directory import check_model_directory, positions_of

BASE = "base"
"""Key by which a file names the file that it includes."""

_VARIABLE = re.compile(r"\$?\$\{([^}]*)\}")
_EXPANDED_LATER = re.compile(r"environment\.(rewards\..+\.)?headers\..+")
"""Pattern of the keys whose variables are secrets. Only the judge replaces these variables, so that no file of a run
contains the secrets."""


@dataclass(frozen=True)
class Unset:
    """Placeholder for a value that names an environment variable which is not set.

    `refuse_unset` raises an error for it, unless another file or an override has replaced the value.
    """

    message: str


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Return the sections of a configuration file as `read_overridable` does, but require that all variables are set.

    Raises:
        UserError: as in `read_overridable`, or a variable is not set.
    """
    values = read_overridable(path)
    refuse_unset(values)
    return values


def read_overridable(path: str | Path) -> dict[str, Any]:
    """Return the sections of a configuration file, unchecked.

    With `base: OTHER.yaml` (relative to the file), the sections are merged key by key into the sections of OTHER.yaml.
    In a value, `${NAME}` is replaced by the environment variable, `${NAME:-text}` by `text` if the variable is not set,
    and `$${` by `${`. A value that names a variable which is not set becomes an `Unset`.

    Raises:
        UserError: a file cannot be read, does not contain sections, or includes itself.
    """
    return _read(Path(path), ())


def parse_value(text: str, name: str = "") -> Any:
    """Read an override of the key `name` as YAML; return its value with environment variables replaced.

    Raises:
        ValueError: `text` is not YAML.
        UserError: a variable is not set.
    """
    try:
        value = expand_variables(yaml.load(text, _UniqueKeyLoader), name)
        refuse_unset(value)
        return value
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ValueError(" ".join(str(error).split())) from None


def expand_variables(value: Any, name: str, where: str = "") -> Any:
    """Return `value` with environment variables replaced in all texts.

    `name` is the configuration key of `value`. Errors begin with `where`, followed by this key.
    """
    if isinstance(value, dict):
        return {
            key: expand_variables(part, f"{name}.{key}" if name else str(key), where) for key, part in value.items()
        }
    if isinstance(value, list):
        return [expand_variables(part, name, where) for part in value]
    is_text = isinstance(value, str) and not _EXPANDED_LATER.fullmatch(name)
    return expand_text(value, f"{where}{name or value}") if is_text else value


def expand_text(text: str, name: str) -> str | Unset:
    """Return `text` with environment variables replaced, or an `Unset` if a variable is not set.

    Errors begin with `name`.

    Raises:
        UserError: `${…}` does not name a variable.
    """
    unset = list[str]()

    def text_of(match: re.Match[str]) -> str:
        if match[0].startswith("$$"):
            return match[0][1:]
        variable, separator, default = match[1].partition(":-")
        if not re.fullmatch(r"\w+", variable):
            raise UserError(f"{name}: {match[0]} does not name an environment variable; to write a plain ${{, use $${{")
        if variable not in os.environ and not separator:
            unset.append(variable)
        return os.environ.get(variable, default)

    expanded = _VARIABLE.sub(text_of, text)
    return Unset(f"{name}: the environment variable {unset[0]} is not set") if unset else expanded


def expand_headers(headers: Mapping[str, str], key: str = "environment.headers") -> dict[str, str]:
    """Return `headers`, the headers of a judge's requests, with environment variables replaced.

    The configuration key `key` contains these headers.

    Raises:
        UserError: a variable is not set, or `${…}` does not name one.
    """
    expanded = {name: expand_text(value, f"{key}.{name}") for name, value in headers.items()}
    refuse_unset(expanded)
    return {name: str(value) for name, value in expanded.items()}


def variables_in(text: str) -> list[str]:
    """Return the names of the environment variables in a text."""
    return [match[1].partition(":-")[0] for match in _VARIABLE.finditer(text) if not match[0].startswith("$$")]


def refuse_unset(value: Any) -> None:
    """Raise UserError for the first `Unset` in `value`."""
    if isinstance(value, Unset):
        raise UserError(value.message)
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        refuse_unset(part)


def without_variables(value: Any, name: str = "") -> Any:
    """Invert `expand_variables`: return `value` with `$` before each text that would be read as a variable."""
    if isinstance(value, dict):
        return {key: without_variables(part, f"{name}.{key}" if name else str(key)) for key, part in value.items()}
    if isinstance(value, list):
        return [without_variables(part, name) for part in value]
    is_text = isinstance(value, str) and not _EXPANDED_LATER.fullmatch(name)
    return _VARIABLE.sub(lambda match: f"${match[0]}", value) if is_text else value


def _read(path: Path, readers: tuple[Path, ...]) -> dict[str, Any]:
    try:
        values = yaml.load(path.read_bytes().decode("utf-8-sig"), _UniqueKeyLoader) or {}
    except OSError as error:
        named_by = f" (base of {readers[-1]})" if readers else ""
        raise UserError(f"{path}: cannot be read ({error.strerror}){named_by}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not UTF-8 text") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: must be a YAML mapping of sections, found a {type(values).__name__}")
    values = expand_variables(values, "", f"{path}: ")
    if BASE not in values:
        return values
    base = values.pop(BASE)
    refuse_unset(base)
    if not isinstance(base, str) or not base:
        raise UserError(f"{path}: base: must be the path of a file, got {base!r}")
    chain = (*readers, path)
    if any((path.parent / base).resolve() == reader.resolve() for reader in chain):
        raise UserError(f"{path}: base: {base} includes {path} again; remove one of the two base keys")
    return laid_over(_read(path.parent / base, chain), values)


def laid_over(base: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with `values` merged into it: sections are merged key by key, other values are replaced."""
    joined = dict(base)
    for key, value in values.items():
        both_sections = isinstance(value, dict) and isinstance(base.get(key), dict)
        joined[key] = laid_over(base[key], value) if both_sections else value
    return joined


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML's safe loader, except that it refuses a key that occurs twice in a mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                line = key.start_mark.line + 1
                if key.value in lines:
                    raise yaml.YAMLError(
                        f"the key {key.value} is given in line {lines[key.value]} and again in line {line}"
                    )
                lines[key.value] = line
        return super().construct_mapping(node, deep)


ConfigT = TypeVar("ConfigT", bound=Section)

FORM = re.compile(r"\(\w+\)|[\w-]+\[.*\]")
"""Pattern of those parts of a pydantic error's location that name a type, and are thus not parts of the key."""


def load_config(config_type: type[ConfigT], path: str | Path, overrides: Sequence[str] = ()) -> ConfigT:
    """Read the YAML file `path`, and apply overrides of the form `section.key=value`. Each value is YAML too.

    Raises:
        UserError: the file is missing or not YAML, or a key or value is wrong; the message names file and key.
    """
    return build_config(config_type, read_overridable(path), overrides, origin=str(path))


def build_config(config_type: type[ConfigT], values: dict[str, Any], overrides: Sequence[str], origin: str) -> ConfigT:
    """Return the configuration of a file's values and overrides; `origin` names the file in errors about its values."""
    for override in overrides:
        _apply_override(values, override)
    refuse_unset(values)
    try:
        config = config_type.model_validate(values)
    except ValidationError as error:
        overridden = tuple(f"{override.partition('=')[0]}." for override in overrides)
        wrong = ["".join(f"{part}." for part in problem["loc"]) for problem in error.errors()]
        said_by = "command line" if all(key.startswith(overridden) for key in wrong) else origin
        lines = [f"{said_by}: {line}" for line in _explain(config_type, error)]
        raise UserErrors(lines) if len(lines) > 1 else UserError(lines[0]) from None
    if (limit := _default_length(config)) is not None:
        return build_config(config_type, laid_over(values, {"data": {LENGTH: limit}}), overrides, origin)
    return config


LENGTH = "max_sequence_length"
"""The key in the section `data` whose default depends on the model."""


def _default_length(config: Section) -> int | None:
    """Return the model's number of positions if it must replace the default of `data.max_sequence_length`.

    Return None if the key is set, or if the model has enough positions or cannot be read. A later check then explains
    why it cannot.
    """
    data, model = getattr(config, "data", None), getattr(config, "model", None)
    if data is None or model is None or LENGTH in data.model_fields_set:
        return None
    try:
        positions = positions_of(check_model_directory(model.path))
    except (UserError, OSError, TypeError, AttributeError):
        return None
    return int(positions) if 1 <= positions < data.max_sequence_length else None


def resolved_yaml(config: Section) -> str:
    """Return the whole configuration, including defaults, as YAML that `load_config` can read."""
    return yaml.safe_dump(without_variables(config.model_dump(mode="json")), sort_keys=False)


def changed_values(config: Section) -> list[str]:
    """Return the values that differ from their defaults, each as an override `section.key=value`."""
    values = without_variables(config.model_dump(mode="json", exclude_defaults=True, exclude={"dry_run"}))
    return [f"{key}={_flow(value)}" for key, value in _flattened(values)]


def _flattened(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value and all(isinstance(name, str) and "." not in name for name in value):
            yield from ((f"{key}.{name}", inner) for name, inner in _flattened(value))
        else:
            yield key, value


class _FlowDumper(yaml.SafeDumper):
    """Writes a text that has line breaks in double quotes, with `\\n` for each line break."""


def _flow_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    has_breaks = len(text.splitlines()) > 1 or text.endswith("\n")
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if has_breaks else None)


_FlowDumper.add_representer(str, _flow_text)


def _flow(value: Any) -> str:
    """Return a value as YAML in one line."""
    text = yaml.dump(value, Dumper=_FlowDumper, default_flow_style=True, width=float("inf"))
    return text.removesuffix("...\n").strip()


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
        values[key] = parse_value(text, name)
    except ValueError as error:
        raise UserError(f"override {override!r}: {text!r} is not a YAML value: {error}") from None


def _explain(config_type: type[Section], error: ValidationError) -> list[str]:
    """Return lines that describe all problems: one for each key of another trainer, and one for all other problems.
    For an unknown key, the line suggests the nearest known key.

    If a key accepts several types of values, pydantic reports problems with each type. Only the problem that lies
    deepest in the value is described.
    """
    furthest: dict[tuple[str, ...], tuple[list[str], Any]] = {}
    for problem in error.errors():
        location = [str(part) for part in problem["loc"]]
        form = next((i for i, part in enumerate(location) if FORM.fullmatch(part)), len(location))
        location = [part for part in location if not FORM.fullmatch(part)]
        key = tuple(location[:form])
        if key not in furthest or len(location) > len(furthest[key][0]):
            furthest[key] = location, problem
    foreign, others = list[str](), list[str]()
    for location, problem in furthest.values():
        lines = _explain_foreign(config_type, ".".join(location), problem)
        foreign += lines
        others += [] if lines else [_explain_one(config_type, location, problem)]
    return [*(["; ".join(others)] if others else []), *foreign]


UNKNOWN_KEY = ("extra_forbidden", "unexpected_keyword_argument")
"""Types of pydantic's errors about a key that the section does not have."""


def _explain_foreign(config_type: type[Section], name: str, problem: Any) -> list[str]:
    """Return a line for each unknown key at or below `name`; [] if no other trainer has any of them."""
    if problem["type"] not in UNKNOWN_KEY:
        return []
    found = {unknown: _known_elsewhere(config_type, unknown) for unknown in _leaves(name, problem["input"])}
    told = [f"unknown key {unknown}" + (f"; {elsewhere}" if elsewhere else "") for unknown, elsewhere in found.items()]
    return told if any(found.values()) else []


def _explain_one(config_type: type[Section], location: list[str], problem: Any) -> str:
    name = ".".join(location)
    if problem["type"] in UNKNOWN_KEY:
        known = _fields_at(config_type, location[:-1])
        if near := difflib.get_close_matches(location[-1], known, n=1):
            return f"unknown key {name}; did you mean {'.'.join([*location[:-1], *near])}?"
        return f"unknown key {name}; known here are {', '.join(known)}"
    if problem["type"] == "missing":
        return f"{name} is required"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] in ("model_type", "dataclass_type"):
        found = "nothing (null)" if problem["input"] is None else repr(problem["input"])
        return f"{name}: must be a section of keys, found {found}"
    if problem["type"] == "value_error" and isinstance(problem["input"], dict):  # the message names the key
        is_key = message.partition(":")[0] in _fields_at(config_type, location)
        return f"{name}{'.' if is_key else ': '}{message}" if name else message
    if isinstance(problem["input"], dict | list):
        message += f" (got {'keys' if isinstance(problem['input'], dict) else 'a list'})"
    if isinstance(problem["input"], str | int | float | bool):
        message += f" (got {problem['input']!r})"
    if problem["input"] is None:
        message += " (got null)"
    return f"{name}: {message}"


def _leaves(name: str, value: Any) -> list[str]:
    """Return the names of all values below the key `name`, or `[name]` if `value` is not a section."""
    if not isinstance(value, dict):
        return [name]
    return [leaf for key, part in value.items() for leaf in _leaves(f"{name}.{key}", part)]


def _known_elsewhere(config_type: type[Section], name: str) -> str | None:
    """Return a text about a key of another trainer (such as TRL): its name here, or why it has no counterpart.

    The key is searched in the table of other trainers' keys: first the whole key, then its last parts. The result is
    None if nothing is found, or if the best matches lead to different keys."""
    algorithm = getattr(config_type, "algorithm", "")
    found: dict[tuple[Any, ...], dict[str, str]] = {}
    for program, kind, there, here, reason in other_names():
        is_whole, shared = fnmatch.fnmatchcase(name, there), _shared_parts(name, there)
        if kind.lower() not in ("", algorithm) or not (is_whole or shared) or here == name:
            continue
        if there.endswith(".*") and has_key(config_type, there.removesuffix(".*")):  # this program has the section too
            continue
        likeness = (not is_whole, there != name, -shared)
        if not here:
            text = f"{program}'s {there} has no counterpart here: {reason}"
            found.setdefault((*likeness, True, "*" in there), {}).setdefault(reason, text)
        elif has_key(config_type, here):
            found.setdefault((*likeness, False, not kind), {}).setdefault(here, f"{program}'s {there} is {here} here")
        elif there == name:
            text = f"{program}'s {there} is {here}, which this program does not have"
            found.setdefault((*likeness, True, False), {}).setdefault(here, text)
    nearest = found[min(found)] if found else {}
    return next(iter(nearest.values())) if len(nearest) == 1 else None


def _shared_parts(name: str, other: str) -> int:
    """Return how many of the last parts of two dotted keys are equal: 2 for `a.b.c` and `x.b.c`."""
    pairs = zip(reversed(name.split(".")), reversed(other.split(".")), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def has_key(config_type: type[Section], name: str) -> bool:
    """Return whether a configuration has the dotted key `name`."""
    *sections, key = name.split(".")
    try:
        return key in _fields_at(config_type, sections)
    except (KeyError, TypeError):
        return False


def _fields_at(config_type: type[Section], sections: Sequence[str]) -> list[str]:
    kind: Any = config_type
    for section in sections:
        if get_origin(kind) is dict:  # sections by names that the user chooses
            kind = get_args(kind)[1]
            continue
        kind = kind.model_fields[section].annotation if hasattr(kind, "model_fields") else get_type_hints(kind)[section]
        if type(None) in get_args(kind):  # an optional section
            kind = next(part for part in get_args(kind) if part is not type(None))
    if get_origin(kind) is dict:
        return []
    if get_origin(kind) is UnionType or get_origin(kind) is Union:  # the forms that a section's name chooses among
        forms = (form.__origin__ for form in get_args(kind))
        return list(dict.fromkeys(field.name for form in forms for field in dataclasses.fields(form)))
    return list(kind.model_fields) if hasattr(kind, "model_fields") else [f.name for f in dataclasses.fields(kind)]
