"""The section about records."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from mcore_rl.config.base import Columns, NamedSources, Positive, Section, Sources
from mcore_rl.errors import UserError


class DataConfig(Section):
    """Where records come from and what happens to long ones."""

    train: Sources
    """A .jsonl, .json or .parquet file, a directory of them, or NAME or NAME:SPLIT of a dataset on the hub. Or several,
    each with the weight of its samples: `{chat.jsonl: 3, math.jsonl: 1}`; one that is used up begins again. An epoch is
    as many samples as they have together."""
    validation: NamedSources | None = None
    """The same, for validation: one source, or several by the names that their metrics get, as
    `{math: math_test.jsonl}`."""
    max_sequence_length: Positive = 1024
    """Tokens of a sequence, prompt and response together."""
    overlong: Literal["drop", "truncate"] = "drop"
    """What becomes of longer records: left out, or cut at their end."""
    chat_template: str | None = None
    """A Jinja template in place of the tokenizer's, or the path of a file with one; the exported model has it too."""
    columns: Columns = Field(default={})
    """Names of columns, of all sources and sets, by those wanted: `{prompt: question, completion: answer}`. Or by
    source: `{math.jsonl: {prompt: question, completion: answer}}`, the others' being right."""
    max_samples: Positive | None = None
    """Only the first records of each source of `train` are read."""
    cache_dir: Path | None = None
    """Where tokenized data is kept for later runs; `$MCORE_RL_CACHE` or ~/.cache/mcore_rl if not given."""

    @model_validator(mode="after")
    def _template_is_there(self) -> DataConfig:
        self.read_chat_template()
        return self

    @model_validator(mode="after")
    def _sets_have_plain_names(self) -> DataConfig:
        for name in self.validation_sets:
            if name and not re.fullmatch(r"[\w.-]+", name):
                raise ValueError(f"validation: the set's name {name!r} must be of letters, digits, '_', '.' and '-'")
        return self

    @model_validator(mode="after")
    def _sources_are_there_once(self) -> DataConfig:
        found: dict[str, str] = {}
        for source in self.train_sources:
            other = found.setdefault(os.path.realpath(source), source)
            if other != source:
                raise ValueError(f"train: {other} and {source} are one source; leave one out, and add up their weights")
        for path, source in found.items():
            for directory in Path(path).parents:
                if str(directory) in found:
                    whole = found[str(directory)]
                    raise ValueError(f"train: {source} is one of the files in {whole}; leave one out")
        return self

    @model_validator(mode="after")
    def _weights_have_a_sum(self) -> DataConfig:
        if not isinstance(self.train, str) and math.isinf(sum(self.train.values())):
            raise ValueError("train: the sum of the weights is too large for a number")
        return self

    @model_validator(mode="after")
    def _columns_are_of_something(self) -> DataConfig:
        sources = {*self.train_sources, *self.validation_sets.values()}
        for key, names in self.columns.items():
            if not isinstance(names, str) and key not in sources:
                raise ValueError(f"columns: {key} is no source of train or validation ({', '.join(sorted(sources))})")
        for source in sources:
            wanted: dict[str, str] = {}
            for name, column in self.columns_of(source).items():
                if (other := wanted.setdefault(column, name)) != name:
                    raise ValueError(f"columns: {column} cannot be both {other} and {name}")
        return self

    def columns_of(self, source: str) -> dict[str, str]:
        """A source's names of columns, by those wanted."""
        by_source = {key: names for key, names in self.columns.items() if not isinstance(names, str)}
        if by_source:
            return by_source.get(source, {})
        return {name: column for name, column in self.columns.items() if isinstance(column, str)}

    @property
    def train_sources(self) -> list[str]:
        """All that is trained on."""
        return [self.train] if isinstance(self.train, str) else list(self.train)

    @property
    def validation_sets(self) -> dict[str, str]:
        """What is validated on, by name; the only one has none."""
        if self.validation is None or isinstance(self.validation, str):
            return {} if self.validation is None else {"": self.validation}
        return self.validation

    def read_chat_template(self) -> str | None:
        """The template's text."""
        return read_chat_template(self.chat_template)


def read_chat_template(template: str | None) -> str | None:
    """The text of a template that is given as such, or as a file's path.

    Raises:
        UserError: neither.
    """
    if template is None or "{" in template:
        return template
    try:
        return Path(template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise UserError(f"chat_template: {template} is neither a template nor a file with one") from None
