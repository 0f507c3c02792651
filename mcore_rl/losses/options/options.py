"""What a class of options is: bounds, checks, and its keys for library users."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NotRequired,
    Required,
    Self,
    TypedDict,
    get_args,
    get_origin,
    get_type_hints,
)

from mcore_rl.errors import ContractError


@dataclass(frozen=True)
class Bounds:
    """Marks a number and the range it must be in; a bool is no number."""

    ge: float | None = None
    gt: float | None = None
    lt: float | None = None

    def problem(self, value: Any) -> str | None:
        """What is wrong with `value`, or None."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return "must be a number"
        if not math.isfinite(value):
            return "must be finite"
        if self.ge is not None and not value >= self.ge:
            return f"must be at least {self.ge:g}"
        if self.gt is not None and not value > self.gt:
            return f"must be more than {self.gt:g}"
        return f"must be less than {self.lt:g}" if self.lt is not None and not value < self.lt else None

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        """For the YAML section: pydantic would take true for 1."""
        from pydantic_core import core_schema

        def refuse_bool(value: Any) -> Any:
            if isinstance(value, bool):
                raise ValueError("must be a number, not true or false")
            return value

        return core_schema.no_info_before_validator_function(refuse_bool, handler(source))


NonNegative = Annotated[float, Bounds(ge=0)]
Positive = Annotated[float, Bounds(gt=0)]


def option(default: Any) -> Any:
    """A key that dictionaries must have (YAML files need not): one that the documented reference requires."""
    return dataclasses.field(default=default, metadata={"required": True})


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """Options with their defaults; whatever is wrong raises `ContractError` and names the key."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    aliases: ClassVar[Mapping[str, str]] = {}
    """Names that other versions of the reference have for an option."""
    ignored: ClassVar[frozenset[str]] = frozenset()
    """Keys that a wider configuration of the reference's trainer has beside the loss's."""

    def __post_init__(self) -> None:
        for name, kind in _types(type(self)).items():
            if problem := _problem(kind, getattr(self, name)):
                raise ContractError(f"{name}: {problem}, got {getattr(self, name)!r}")
        self.check()

    def check(self) -> None:
        """Raises ContractError for options that contradict each other."""

    def require(self, holds: bool, message: str) -> None:
        if not holds:
            raise ContractError(message)

    @classmethod
    def translate(cls, cfg: Mapping[str, Any]) -> dict[str, Any]:
        """A dictionary of another version of the reference, under the names of this one.

        Raises:
            ContractError: two names of one option with different values.
        """
        values: dict[str, Any] = {}
        for key, value in cfg.items():
            name = cls.aliases.get(key, key)
            if name in values and values[name] != value:
                raise ContractError(f"{name} has two values, {values[name]!r} and {value!r} ({key} is another name)")
            values[name] = value
        return values

    @classmethod
    def from_config(cls, cfg: Mapping[str, Any] | Self, loss: str) -> Self:
        """From a dictionary, with aliases and the trainer's own keys.

        Raises:
            ContractError: a key is missing, unknown (the nearest is named), contradictory or of a wrong kind.
        """
        if isinstance(cfg, cls):
            return cfg
        if not isinstance(cfg, Mapping):
            raise ContractError(f"{loss}: its configuration must be a dictionary, got a {type(cfg).__name__}")
        values = {key: value for key, value in cls.translate(cfg).items() if key not in cls.ignored}
        fields = {field.name: field for field in dataclasses.fields(cls)}
        missing = [name for name, field in fields.items() if "required" in field.metadata and name not in values]
        if missing:
            raise ContractError(f"{loss}: its configuration lacks {', '.join(missing)}")
        if unknown := sorted(set(values) - set(fields)):
            nearest = difflib.get_close_matches(unknown[0], fields, n=1)
            hint = f" (did you mean {nearest[0]}?)" if nearest else ""
            raise ContractError(f"{loss}: its configuration has unknown keys {', '.join(unknown)}{hint}")
        try:
            return cls(**values)
        except ContractError as error:
            raise ContractError(f"{loss}: {error}") from None


def _types(options: type[LossOptions]) -> dict[str, Any]:
    hints = get_type_hints(options, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(options)}


def _problem(kind: Any, value: Any) -> str | None:
    """What is wrong with a value of an option of this type."""
    parts = [kind] if _is_leaf(kind) or get_origin(kind) is tuple else list(get_args(kind))
    if value is None and type(None) in parts:
        return None
    items = next((get_args(part)[0] for part in parts if get_origin(part) is tuple), None)
    parts = [part for part in parts if part is not type(None) and get_origin(part) is not tuple]
    if items is not None and (isinstance(value, list | tuple) or not parts):
        if not isinstance(value, list | tuple) or not value:
            return "must be a list that is not empty"
        return next((problem for item in value if (problem := _problem(items, item))), None)
    choices = [choice for part in parts for choice in get_args(part) if not _is_leaf_number(part)]
    if choices:
        return None if value in choices else f"must be one of {', '.join(map(str, choices))}"
    bounds = next((part.__metadata__[0] for part in parts if _is_leaf_number(part)), None)
    if bounds is not None:
        whole = any(get_args(part)[0] is int for part in parts if _is_leaf_number(part))
        return "must be a whole number" if whole and isinstance(value, float) else bounds.problem(value)
    if str in parts:
        return None if isinstance(value, str) and value.strip() else "must be a text that is not empty"
    return None if isinstance(value, bool) else "must be true or false"


def _is_leaf_number(kind: Any) -> bool:
    return hasattr(kind, "__metadata__")


def _is_leaf(kind: Any) -> bool:
    return _is_leaf_number(kind) or kind in (bool, str) or getattr(kind, "__origin__", None) is Literal


def typed_dict(name: str, options: type[LossOptions]) -> Any:
    """The `TypedDict` of these options' keys."""
    keys: dict[str, Any] = {}
    for field in dataclasses.fields(options):
        kind = _types(options)[field.name]
        keys[field.name] = Required[kind] if "required" in field.metadata else NotRequired[kind]
    made = TypedDict(name, keys)  # type: ignore[misc]
    made.__doc__ = f"Keys of a configuration dictionary; what each means is written at `{options.__name__}`."
    return made


# ------------------------------------------------------------------ policy gradients
