"""What sections are made of: a base that refuses unknown keys, and kinds of values."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def refuse_bool(value: Any) -> Any:
    """YAML's true would pass for 1."""
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")
    return value


def refuse_empty(value: Any) -> Any:
    """An empty path would be the current directory."""
    if value is None or (isinstance(value, str) and not value.strip()):
        raise ValueError("must not be empty")
    return value


Seed = Annotated[int, Field(ge=0, lt=2**31), BeforeValidator(refuse_bool)]
Directory = Annotated[Path, BeforeValidator(refuse_empty)]
Name = Annotated[str, BeforeValidator(refuse_empty)]
Positive = Annotated[int, Field(ge=1), BeforeValidator(refuse_bool)]
Count = Annotated[int, Field(ge=0), BeforeValidator(refuse_bool)]
NonNegative = Annotated[float, Field(ge=0), BeforeValidator(refuse_bool)]
AboveZero = Annotated[float, Field(gt=0), BeforeValidator(refuse_bool)]
BelowOne = Annotated[float, Field(ge=0, lt=1), BeforeValidator(refuse_bool)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)
