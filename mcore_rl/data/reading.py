"""Records of a data file or a dataset's name, as plain dictionaries."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mcore_rl.data.strict_json import parse_json
from mcore_rl.errors import UserError

SUFFIXES = (".jsonl", ".json", ".parquet")

FOREIGN_COLUMNS = {
    "conversations": "conversations is ShareGPT's; write it as messages of role and content",
    "instruction": "instruction is Alpaca's; write it (and input) as prompt, output as completion",
    "question": "write question as prompt",
    "text": "in a text no prompt can be told from its response; write prompt and completion",
}
"""Columns of other formats, and what to do with them."""


def read_records(source: str) -> Sequence[dict[str, Any]]:
    """A local file, or `NAME` / `NAME:SPLIT` of a dataset on the hub.

    Raises:
        UserError: naming the file, and the line where it has any.
    """
    path = Path(source)
    check_file(source)
    if path.suffix in SUFFIXES:
        readers = {".jsonl": _read_lines, ".json": _read_json, ".parquet": _read_parquet}
        records = readers[path.suffix](source)
        if not records:
            raise UserError(f"{source}: holds no records")
        return records
    return _read_hub(source)


def check_file(source: str) -> None:
    """Raises UserError if `source` is named like a data file and is none, or is a file of another kind."""
    path = Path(source)
    if path.suffix not in SUFFIXES:
        if path.exists():
            raise UserError(f"data: {source} must be a .jsonl, .json or .parquet file")
        return
    if path.is_dir():
        raise UserError(f"data: {source} is a directory, not a file")
    try:
        with open(path, "rb") as file:
            if not file.read(1):
                raise UserError(f"data: {source} is empty")
    except FileNotFoundError:
        raise UserError(f"data: {source} does not exist") from None
    except OSError as error:
        raise UserError(f"data: {source} cannot be read ({error.strerror})") from None


def _read_lines(source: str) -> list[dict[str, Any]]:
    records = []
    with open(source, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                record = _parse(line.rstrip(), f"{source}, line {number}")
                if not isinstance(record, dict):
                    raise UserError(f"{source}, line {number}: must be a JSON object, found a {type(record).__name__}")
                records.append(record)
    return records


def _read_json(source: str) -> list[dict[str, Any]]:
    """A list of objects, or an object a line, which goes by that name as well."""
    text = Path(source).read_bytes()
    if text.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{") and text.strip().count(b"\n"):
        return _read_lines(source)
    records = _parse(text, source)
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise UserError(f"{source}: must be a JSON list of objects, or an object a line")
    return records


def _parse(text: bytes, where: str) -> Any:
    try:
        return parse_json(text.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise UserError(f"{where}: is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 and "line" not in where else ""
        raise UserError(f"{where}: not valid JSON: {error.msg} at {line}column {error.colno}") from None
    except RecursionError:
        raise UserError(f"{where}: not valid JSON: nested too deeply") from None
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None


def _read_parquet(source: str) -> list[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(source).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{source}: is not a whole Parquet file: {' '.join(str(error).split())}") from None
    return [_clean(row) for row in rows]


def _hub_is_reachable() -> bool:
    """Whether a connection to the hub can be made; taken for granted behind a proxy."""
    if any(name.lower() in ("https_proxy", "all_proxy") for name in os.environ):
        return True
    url = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    try:
        socket.create_connection((url.hostname or "", url.port or 443), timeout=3).close()
    except OSError:
        return False
    return True


def _read_hub(source: str) -> Sequence[dict[str, Any]]:
    import datasets
    import huggingface_hub

    datasets.disable_progress_bars()
    if not _hub_is_reachable():  # what is in the cache is found at once, and what is not fails at once
        datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = True
    name, _, split = source.partition(":")
    try:
        records = datasets.load_dataset(name, split=split or "train")
    except (OSError, ValueError, ConnectionError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f"data: {source} is neither a .jsonl, .json or .parquet file nor a dataset that can be reached: "
            f"{' '.join(str(error).split())}"
        ) from None
    return [_clean(record) for record in records]


def _clean(record: dict[str, Any]) -> dict[str, Any]:
    """A columnar file's record without the nulls that it fills in for keys that other records have.

    The record's own keys stay, to tell one without a value from one that is not there.
    """
    return {str(key): _without_nulls(value) for key, value in record.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def record_place(source: str, index: int) -> str:
    """Where record `index` is, for an error: its line in a .jsonl file."""
    if Path(source).suffix != ".jsonl":
        return f"{source}, record {index + 1}"
    with open(source, "rb") as file:
        lines = [number for number, line in enumerate(file, start=1) if line.strip()]
    return f"{source}, line {lines[index]}"


def require(record: dict[str, Any], *keys: str) -> None:
    """Raises ValueError if a record lacks one of the keys, or has it without a value."""
    if empty := [key for key in keys if key in record and record[key] is None]:
        raise ValueError(f"the key {empty[0]} has no value (null)")
    missing = [key for key in keys if key not in record]
    if missing:
        foreign = next((f" ({what})" for column, what in FOREIGN_COLUMNS.items() if column in record), "")
        has = ", ".join(sorted(record)) or "nothing"
        raise ValueError(f"lacks the key {' and '.join(missing)}; it has {has}{foreign}")
