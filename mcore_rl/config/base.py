"""The base class of sections (it refuses unknown keys), and types for the values of keys."""

from __future__ import annotations

from dataclasses import is_dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator


def refuse_bool(value: Any) -> Any:
    """Raise ValueError for true and false; otherwise they would be read as 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")
    return value


def refuse_empty(value: Any) -> Any:
    """Raise ValueError for null and empty texts; an empty path would mean the current directory."""
    if value is None or (isinstance(value, str) and not value.strip()):
        raise ValueError("must not be empty")
    return value


Seed = Annotated[int, Field(ge=0, lt=2**31), BeforeValidator(refuse_bool)]
Directory = Annotated[Path, BeforeValidator(refuse_empty)]
Name = Annotated[str, BeforeValidator(refuse_empty)]
PositiveInt = Annotated[int, Field(ge=1), BeforeValidator(refuse_bool)]
Count = Annotated[int, Field(ge=0), BeforeValidator(refuse_bool)]
NonNegative = Annotated[float, Field(ge=0), BeforeValidator(refuse_bool)]
PositiveFloat = Annotated[float, Field(gt=0), BeforeValidator(refuse_bool)]
FractionBelowOne = Annotated[float, Field(ge=0, lt=1), BeforeValidator(refuse_bool)]


def _form(value: Any) -> str:
    if isinstance(value, dict):
        return "(several)"
    return "(joined)" if isinstance(value, list | tuple) else "(one)"


def _whose(value: Any) -> str:
    by_source = isinstance(value, dict) and any(isinstance(item, dict) for item in value.values())
    return "(parts)" if by_source else "(whole)"


DATASET_FORMATS = frozenset((
    "arrow", "audiofolder", "conll", "csv", "eval", "fasta", "fastq", "genbank", "harbor", "hdf5", "iceberg",
    "imagefolder", "json", "lance", "meshfolder", "mmcif", "niftifolder", "pandas", "parquet", "pdb", "pdffolder",
    "text", "tsfile", "videofolder", "vortex", "webdataset", "xml",
))  # fmt: skip
"""Names with which the library datasets reads files, and no datasets of the hub."""

_OneSource = Annotated[Name, Tag("(one)")] | Annotated[tuple[Name, ...], Field(min_length=1), Tag("(joined)")]
Sources = Annotated[
    _OneSource | Annotated[dict[Name, PositiveFloat], Field(min_length=1), Tag("(several)")], Discriminator(_form)
]
"""A source, a list of sources that are read one after the other, or several sources with their weights."""
NamedSources = Annotated[
    _OneSource | Annotated[dict[Name, Name], Field(min_length=1), Tag("(several)")], Discriminator(_form)
]
"""A source, a list of sources that are read one after the other, or several sources by name."""
Columns = Annotated[
    Annotated[dict[Name, Name], Tag("(whole)")] | Annotated[dict[Name, dict[Name, Name]], Tag("(parts)")],
    Discriminator(_whose),
]
"""Names of columns by field, or such a mapping for each source."""


class Section(BaseModel):
    """A section of the configuration. If a section inside it is null, that section has its default."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _remove_null_sections(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {key: value for key, value in values.items() if value is not None or not cls._has_default_section(key)}

    @classmethod
    def _has_default_section(cls, key: str) -> bool:
        default = cls.model_fields[key].default if key in cls.model_fields else None
        return isinstance(default, BaseModel) or is_dataclass(default)


def whole_number(text: str) -> int | None:
    """Return the number that a text of at most 18 ASCII digits stands for; None for any other text."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 18 else None
