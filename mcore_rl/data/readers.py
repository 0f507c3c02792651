"""Readers of records: JSON Lines, JSON, Parquet and datasets on the Hugging Face hub."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit
from uuid import UUID

from mcore_rl.config.base import DATASET_FORMATS
from mcore_rl.data.images import IMAGE_COLUMNS, is_image
from mcore_rl.errors import UserError

SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: `text` is not JSON, an object has a key twice, or a string contains an unpaired surrogate.
            (Tokenizers reject it.)
    """
    value = json.loads(text, object_pairs_hook=_unique)
    if SURROGATE.search(text):  # a pair of surrogates becomes one character
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = ord(error.object[error.start])
            raise ValueError(f"\\u{half:04x} is one half of a surrogate pair; the other half is missing") from None
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in found if keys.count(key) > 1)
        raise ValueError(f"the key {repeated} occurs twice in an object")
    return found


ItemT = TypeVar("ItemT")

RECORDS_AT_ONCE = 256

_HUB_DATASET = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(:[^/]+)?")
"""Pattern of names of datasets on the hub, with or without a split."""

SUFFIXES = (".jsonl", ".json", ".parquet")

FOREIGN_COLUMNS = {
    "conversations": "conversations is ShareGPT's; write it as messages of role and content",
    "instruction": "instruction is Alpaca's; write it (and input) as prompt, output as completion",
    "question": "write question as prompt, or set data.columns",
    "text": "a text does not show where its response starts; write prompt and completion",
}
"""Map from a column of another data format to the advice that an error message gives."""


@dataclass(frozen=True)
class Records:
    """Consecutive records of a source: rows of a table, or lines that are not parsed yet.

    place: word before a record's number in errors: "line", or "record" for tables and lists.
    numbers: position of each record in the source, from 1.
    """

    source: str
    place: str
    numbers: list[int]
    raw: list[bytes] | list[dict[str, Any]]

    def first(self, count: int) -> Records:
        return Records(self.source, self.place, self.numbers[:count], self.raw[:count])

    def parsed(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield, for each record, its position (in words, for messages) and its parsed object.

        Raises:
            UserError: a record is not a JSON object.
        """
        for number, item in zip(self.numbers, self.raw, strict=True):
            where = f"{self.source}, {self.place} {number}"
            record = _parse(item, where) if isinstance(item, bytes) else item
            if not isinstance(record, dict):
                raise UserError(f"{where}: must be a JSON object, found a {type(record).__name__}")
            yield where, record


def read_records(source: str) -> Iterator[tuple[Records, float]]:
    """Yield the records of a source, with the fraction of the source that has been read so far.

    The source is a local file, a directory, or a dataset `NAME` or `NAME:SPLIT` on the hub.

    Raises:
        UserError: the source cannot be read; the message names the file, and the line if there is one.
    """
    check_file(source)
    files = files_of(source)
    readers = {".jsonl": _read_lines, ".json": _read_json, ".parquet": _read_parquet}
    for number, file in enumerate(files):
        is_empty = True
        try:
            for records, part in readers.get(Path(file).suffix, _read_hub)(file):
                is_empty = False
                yield records, (number + part) / len(files)
        except OSError as error:
            raise UserError(f"data: {file} cannot be read ({error.strerror})") from None
        if is_empty:
            raise UserError(f"{file}: holds no records")


def files_of(source: str) -> list[str]:
    """Return the data files in the directory `source`, sorted by name; `[source]` if `source` is not a directory."""
    if not Path(source).is_dir():
        return [source]
    return sorted(str(path) for path in Path(source).iterdir() if path.suffix in SUFFIXES and path.is_file())


def check_file(source: str) -> None:
    """Raise UserError if `source` is a data file that is missing, empty or unreadable, or of an unsupported kind.

    A directory is checked with all its files. Names on the hub are not checked.
    """
    path = Path(source)
    if path.is_dir():
        if not (files := files_of(source)):
            raise UserError(f"data: {source} is a directory without a .jsonl, .json or .parquet file")
        if others := [
            entry.name for entry in sorted(path.iterdir()) if str(entry) not in files and not _is_aside(entry)
        ]:
            raise UserError(
                f"data: {source} contains {', '.join(others[:3])}, which cannot be read as data; unpack, rename "
                "or move these files"
            )
        for name in files:
            check_file(name)
        return
    if path.suffix not in SUFFIXES:
        if path.exists():
            raise UserError(f"data: {source} must be a .jsonl, .json or .parquet file")
        if not _HUB_DATASET.fullmatch(source):
            raise UserError(f"data: {source} does not exist")
        return
    try:
        with open(path, "rb") as file:
            if not file.read(1):
                raise UserError(f"data: {source} is empty")
    except FileNotFoundError:
        raise UserError(f"data: {source} does not exist") from None
    except OSError as error:
        raise UserError(f"data: {source} cannot be read ({error.strerror})") from None


def _is_aside(path: Path) -> bool:
    """Return whether a file in a data directory never contains data; an example is README.md."""
    return path.name.startswith((".", "_")) or path.suffix in (".md", ".lock") or path.stem in ("README", "LICENSE")


def _read_lines(source: str) -> Iterator[tuple[Records, float]]:
    size, read = os.path.getsize(source), 0
    with open(source, "rb") as file:
        numbered = ((number, line) for number, line in enumerate(file, start=1) if line.strip())
        for lines in _batched(numbered, RECORDS_AT_ONCE):
            read += sum(len(line) for _, line in lines)
            numbers, texts = [number for number, _ in lines], [line.rstrip() for _, line in lines]
            yield Records(source, "line", numbers, texts), read / size


def _read_json(source: str) -> Iterator[tuple[Records, float]]:
    """Yield the records of a .json file.

    The file has a JSON list of objects, a single object or, as JSON Lines, one object per line.
    """
    with open(source, "rb") as file:
        first = next((text for line in file if (text := line.strip(b"\xef\xbb\xbf \t\r\n"))), b"")
    if _is_object(first):
        yield from _read_lines(source)
        return
    wanted = "must be a JSON list of objects, a single object, or have one JSON object in each line"
    try:
        records = _parse(Path(source).read_bytes(), source)
    except UserError as error:
        raise UserError(f"{error}; the file {wanted}") from None
    records = [records] if isinstance(records, dict) else records
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise UserError(f"{source}: {wanted}")
    yield from _rows(source, records, len(records))


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _rows(source: str, rows: Iterable[dict[str, Any]], total: int) -> Iterator[tuple[Records, float]]:
    for some in _batched(enumerate(rows, start=1), RECORDS_AT_ONCE):
        numbers = [number for number, _ in some]
        yield Records(source, "record", numbers, [row for _, row in some]), numbers[-1] / total


def _batched(items: Iterable[ItemT], count: int) -> Iterator[list[ItemT]]:
    """Yield lists of up to `count` items, as itertools.batched does since Python 3.12."""
    iterator = iter(items)
    while some := list(itertools.islice(iterator, count)):
        yield some


def _parse(text: bytes, where: str) -> Any:
    try:
        return parse_json(text.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise UserError(f"{where}: is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 and "line" not in where else ""
        what = error.msg.removesuffix(" at").removesuffix(" starting")  # "starting" is for unterminated strings
        raise UserError(f"{where}: not valid JSON: {what} at {line}column {error.colno}") from None
    except RecursionError:
        raise UserError(f"{where}: not valid JSON: too many nested lists or objects") from None
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None


def _read_parquet(source: str) -> Iterator[tuple[Records, float]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(source) as file:
            schema = file.schema_arrow
            check_columns(source, schema)
            nested = {field.name: field.type for field in schema if field.type.num_fields}
            rows = (row for batch in file.iter_batches(batch_size=RECORDS_AT_ONCE) for row in batch.to_pylist())
            numbered = enumerate(rows, start=1)
            records = (record_of(row, nested, f"{source}, record {number}") for number, row in numbered)
            yield from _rows(source, records, file.metadata.num_rows)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{source}: is not a complete Parquet file: {' '.join(str(error).split())}") from None


def check_columns(source: str, schema: Any) -> None:
    """Raise UserError if records of a table with this Arrow schema would not be JSON objects.

    Two columns or fields have one name, or a map has keys that are not texts.
    """
    import pyarrow.types as of

    def check(column: str, kind: Any) -> None:
        keys = kind.key_type if of.is_map(kind) else None
        keys = keys.value_type if keys is not None and of.is_dictionary(keys) else keys
        if keys is not None and not (of.is_string(keys) or of.is_large_string(keys) or of.is_string_view(keys)):
            raise UserError(
                f"{source}: the column {column} has a map with keys of the type {kind.key_type}; keys must be strings"
            )
        if of.is_struct(kind):
            refuse_repeated(f"objects in the column {column} have two fields", [field.name for field in kind])
        for number in range(kind.num_fields):
            check(column, kind.field(number).type)

    def refuse_repeated(what: str, names: list[str]) -> None:
        if repeated := [name for name in names if names.count(name) > 1]:
            raise UserError(f"{source}: {what} of the name {repeated[0]}; rename or remove one of them")

    refuse_repeated("has two columns", schema.names)
    for field in schema:
        check(field.name, field.type)


def record_of(row: dict[str, Any], nested: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a row of a table as a record; maps become objects, which Arrow gives as lists of pairs.

    If only some records have a key of a nested object, the format of tables adds nulls to the other records, which are
    left out here. Keys of the record itself and of maps are all kept, so that a null value differs from a missing key.

    Args:
        nested: Arrow types of the columns that have objects, lists or maps; other values need no conversion.

    Raises:
        UserError: a map has a key twice.
    """
    import pyarrow.types as of

    def converted(value: Any, kind: Any, column: str) -> Any:
        if value is None or not kind.num_fields:
            return value
        if of.is_map(kind):
            found = {key: converted(item, kind.item_type, column) for key, item in value}
            if len(found) < len(value):
                keys = [key for key, _ in value]
                repeated = next(key for key in found if keys.count(key) > 1)
                raise UserError(f"{where}: a map in the column {column} has the key {repeated} twice")
            return found
        if of.is_struct(kind):
            return {
                field.name: converted(value[field.name], field.type, column)
                for field in kind
                if value[field.name] is not None
            }
        return [converted(item, kind.value_type, column) for item in value] if isinstance(value, list) else value

    return {**row, **{column: converted(row[column], kind, column) for column, kind in nested.items()}}


def with_texts(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record of a table with its bytes decoded as UTF-8. Images, and bytes that are no text, stay bytes."""

    def decoded(value: Any) -> Any:
        if isinstance(value, bytes):
            with contextlib.suppress(UnicodeDecodeError):
                return value.decode()
        if isinstance(value, list):
            return [decoded(item) for item in value]
        if isinstance(value, dict) and not is_image(value):
            return {key: decoded(item) for key, item in value.items()}
        return value

    return {key: value if key in IMAGE_COLUMNS else decoded(value) for key, value in record.items()}


def json_of(record: Any) -> bytes:
    """Return a record, or a part of it, as JSON. Values of tables that JSON does not have, such as dates, become texts.

    Raises:
        ValueError: a column has bytes, or another value that is no text.
    """
    try:
        return json.dumps(record, default=_text_of).encode()
    except TypeError:
        for column, value in record.items():
            try:
                json.dumps(value, default=_text_of)
            except TypeError as error:
                raise ValueError(f"the column {column} has {error}; write text, or leave the column out") from None
        raise


def _text_of(value: Any) -> str:
    if isinstance(value, date | time | timedelta | Decimal | UUID):
        return str(value)
    is_bytes = isinstance(value, bytes)
    raise TypeError("bytes that are not UTF-8 text" if is_bytes else f"a value of the type {type(value).__name__}")


def _hub_is_reachable() -> bool:
    """Return whether a connection to the hub can be opened; always True if a proxy is configured."""
    if any(name.lower() in ("https_proxy", "all_proxy") for name in os.environ):
        return True
    url = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    try:
        socket.create_connection((url.hostname or "", url.port or 443), timeout=3).close()
    except OSError:
        return False
    return True


def load_hub_dataset(source: str) -> Any:
    """Return the dataset `NAME` or `NAME:SPLIT` from the hub or its cache.

    Raises:
        UserError: the dataset is neither on the hub nor in the hub's cache.
    """
    import datasets
    import huggingface_hub

    datasets.disable_progress_bars()
    if not _hub_is_reachable():  # offline mode finds cached data sets and fails for others without waiting
        datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = True
    name, _, split = source.partition(":")
    if name in DATASET_FORMATS:  # the library would read every such file in the working directory
        raise UserError(f"data: {name} is the name of a format, not of a dataset; give the path of the file")
    try:
        return datasets.load_dataset(name, split=split or "train")
    except (OSError, ValueError, ConnectionError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f"data: {source} does not exist, and cannot be loaded as a dataset of the hub: "
            f"{' '.join(str(error).split())}"
        ) from None


def _read_hub(source: str) -> Iterator[tuple[Records, float]]:
    dataset = with_encoded_images(load_hub_dataset(source))
    yield from _rows(source, (_clean(record) for record in dataset), len(dataset))


def with_encoded_images(dataset: Any) -> Any:
    """Return a dataset of the `datasets` library whose images are not decoded: each is an object {bytes, path}."""
    import datasets

    def encoded(feature: Any) -> Any:
        if isinstance(feature, datasets.Image):
            return datasets.Image(decode=False)
        if isinstance(feature, dict):
            return {name: encoded(inner) for name, inner in feature.items()}
        if isinstance(feature, list):
            return [encoded(inner) for inner in feature]
        return type(feature)(encoded(feature.feature)) if hasattr(feature, "feature") else feature

    features = datasets.Features({name: encoded(feature) for name, feature in dataset.features.items()})
    return dataset if features == dataset.features else dataset.cast(features)


def _clean(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record of a table without the nulls in nested objects.

    If only some records have a key, the format of tables adds such nulls to the other records. The record's top-level
    keys are all kept, so that a null value differs from a missing key.
    """
    return {str(key): _without_nulls(value) for key, value in record.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def require(record: dict[str, Any], *keys: str) -> None:
    """Raise ValueError if a record lacks one of the keys, or the value of a key is null."""
    if empty := [key for key in keys if key in record and record[key] is None]:
        raise ValueError(f"the key {empty[0]} has no value (null)")
    missing = [key for key in keys if key not in record]
    if missing:
        other = f"; if another column holds it, set data.columns={{{missing[0]}: COLUMN}}"
        advice = next((f" ({what})" for column, what in FOREIGN_COLUMNS.items() if column in record), other)
        has = ", ".join(sorted(record)) or "nothing"
        raise ValueError(
            f"lacks the key{'s' * (len(missing) > 1)} {' and '.join(missing)}; the record has {has}{advice}"
        )
