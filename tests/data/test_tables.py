"""Tests of records that are read from tables: maps, bytes, other values that JSON does not have, names of columns."""

import datetime
import decimal

import pyarrow
import pyarrow.parquet
import pytest
from small_models import make_tokenizer

from mcore_rl.config import DataConfig
from mcore_rl.data.datasets import load_prompt_dataset, load_sft_dataset
from mcore_rl.data.readers import read_records
from mcore_rl.errors import UserError

TOKENIZER = make_tokenizer()
TEXT, NUMBER = pyarrow.string(), pyarrow.int64()


def table(path, **columns):
    """Write a Parquet file with these (values, type) by column; return its path."""
    arrays = {name: pyarrow.array(values, type=kind) for name, (values, kind) in columns.items()}
    pyarrow.parquet.write_table(pyarrow.table(arrays), path)
    return str(path)


def records(source):
    return [record for batch, _ in read_records(source) for _, record in batch.parsed()]


def prompts(source, **options):
    return load_prompt_dataset(source, TOKENIZER, DataConfig(train="x", **options), 100).prompts


MAP = pyarrow.map_(TEXT, NUMBER)
CALL = pyarrow.struct([("name", TEXT), ("arguments", MAP), ("more", TEXT)])


@pytest.mark.parametrize(
    ("values", "kind", "expected"),
    [
        ([[("a", 1), ("b", None)], [], None], MAP, [{"a": 1, "b": None}, {}, None]),
        (
            [[{"name": "f", "arguments": [("x", 1)]}, {"name": "g", "arguments": None, "more": "m"}]],
            pyarrow.list_(CALL),
            [[{"name": "f", "arguments": {"x": 1}}, {"name": "g", "more": "m"}]],
        ),
        ([[("a", [("b", 2)])]], pyarrow.map_(pyarrow.large_string(), MAP), [{"a": {"b": 2}}]),
        ([[("a", {"name": "f"})]], pyarrow.map_(TEXT, CALL), [{"a": {"name": "f"}}]),
        ([[("a", 1)]], pyarrow.map_(pyarrow.dictionary(pyarrow.int32(), TEXT), NUMBER), [{"a": 1}]),
        ([[[("a", 1)]], [None]], pyarrow.large_list(MAP), [[{"a": 1}], [None]]),
        ([[[("a", 1)], [("b", 2)]]], pyarrow.list_(MAP, 2), [[{"a": 1}, {"b": 2}]]),
        ([[("a", 1)]], pyarrow.list_(pyarrow.struct([("key", TEXT), ("value", NUMBER)])), [[{"key": "a", "value": 1}]]),
    ],
    ids=["map", "in objects of a list", "map of maps", "map of objects", "dictionary", "list", "pair", "no map"],
)
def test_maps_are_objects_at_any_depth(values, kind, expected, tmp_path):
    if kind.equals(pyarrow.list_(pyarrow.struct([("key", TEXT), ("value", NUMBER)]))):
        values = [[{"key": key, "value": value} for key, value in row] for row in values]
    source = table(tmp_path / "a.parquet", column=(values, kind))
    assert [record["column"] for record in records(source)] == expected


@pytest.mark.parametrize(
    ("values", "kind", "message"),
    [
        ([[], [("a", 1), ("b", 2), ("a", 3)]], MAP, "record 2: a map in the column column has the key a twice"),
        ([[[("a", 1), ("a", 1)]]], pyarrow.list_(MAP), "record 1: a map in the column column has the key a twice"),
        (
            [[(1, 2)]],
            pyarrow.map_(NUMBER, NUMBER),
            "a.parquet: the column column has a map with keys of the type int64",
        ),
        (
            [[{"m": [(b"a", 1)]}]],
            pyarrow.list_(pyarrow.struct([("m", pyarrow.map_(pyarrow.binary(), NUMBER))])),
            "a.parquet: the column column has a map with keys of the type binary",
        ),
    ],
    ids=["key twice", "key twice in a list", "numbers", "bytes in a list"],
)
def test_maps_that_are_no_objects_are_refused(values, kind, message, tmp_path):
    with pytest.raises(UserError, match=message):
        records(table(tmp_path / "a.parquet", column=(values, kind)))


def test_two_columns_of_one_name_are_refused(tmp_path):
    twice = pyarrow.table([pyarrow.array(["a"])] * 3, names=["prompt", "answer", "answer"])
    pyarrow.parquet.write_table(twice, tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet: has two columns of the name answer; rename or remove one"):
        records(str(tmp_path / "a.parquet"))


def test_bytes_are_read_as_text_by_judge_and_tokenizer(tmp_path):
    binary = pyarrow.binary()
    source = table(
        tmp_path / "a.parquet",
        question=([b"say b"], binary),
        answer=(["é".encode()], pyarrow.large_binary()),
        more=([[{"k": b"v"}]], pyarrow.list_(pyarrow.struct([("k", binary)]))),
    )
    (prompt,) = prompts(source, columns={"prompt": "question"})
    assert prompt.content == "say b"
    assert prompt.record == {"answer": "é", "more": [{"k": "v"}]}


@pytest.mark.parametrize(
    ("values", "kind", "what"),
    [
        ([b"\xff\x00"], pyarrow.binary(), "bytes that are not UTF-8 text"),
        ([[{"k": [b"\xff"]}]], pyarrow.list_(pyarrow.struct([("k", pyarrow.list_(pyarrow.binary()))])), "bytes that"),
    ],
    ids=["column", "nested"],
)
def test_bytes_that_are_no_text_are_refused_where_a_judge_would_get_them(values, kind, what, tmp_path):
    source = table(tmp_path / "a.parquet", prompt=(["p"], TEXT), completion=(["c"], TEXT), blob=(values, kind))
    with pytest.raises(UserError, match=f"record 1: the column blob has {what}.*; write text, or leave the column out"):
        prompts(source)
    assert len(load_sft_dataset(source, TOKENIZER, DataConfig(train="x"))) == 1  # reads no such column


def test_dates_and_decimals_are_texts_in_records(tmp_path):
    source = table(
        tmp_path / "a.parquet",
        prompt=(["p"], TEXT),
        day=([datetime.date(2026, 11, 30)], pyarrow.date32()),
        time=([datetime.datetime(2026, 11, 30, 1, 2)], pyarrow.timestamp("s")),
        price=([decimal.Decimal("1.10")], pyarrow.decimal128(5, 2)),
    )
    (prompt,) = prompts(source)
    assert prompt.record == {"day": "2026-11-30", "time": "2026-11-30 01:02:00", "price": "1.10"}
