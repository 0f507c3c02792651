"""Tests of the token cache: made once, equal to the data in memory, and never used for other data."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from ended import wait_for_end
from small_models import make_tokenizer

from mcore_rl.config import DataConfig
from mcore_rl.data import token_cache, token_store, tokenize
from mcore_rl.data.datasets import load_preference_dataset, load_prompt_dataset, load_sft_dataset
from mcore_rl.data.token_cache import TokenCache
from mcore_rl.data.token_store import TokenStore
from mcore_rl.data.tokenize import TokenizerSpec, load_tokenizer
from mcore_rl.errors import UserError
from mcore_rl.testing.processes import run_processes
from mcore_rl.utils.console import silent

SETTINGS = DataConfig(train="x", max_sequence_length=40)
RECORDS = [
    {"prompt": "p" * (1 + i % 7), "completion": "cd" * (1 + i % 5), "chosen": "a" * (1 + i % 3), "rejected": "b"}
    for i in range(700)
]


@pytest.fixture
def files(tmp_path):
    (tmp_path / "model").mkdir()
    make_tokenizer().save_pretrained(tmp_path / "model")
    write(tmp_path / "data.jsonl", RECORDS)
    return tmp_path


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def load(files, load_dataset=load_sft_dataset, settings=SETTINGS, template=None, trust=False):
    tokenizer = load_tokenizer(files / "model", trust, template)
    cache = TokenCache(files / "cache", TokenizerSpec(files / "model", trust, template))
    return load_dataset(str(files / "data.jsonl"), tokenizer, settings, silent, cache=cache)


def stores(files):
    return sorted(path for path in (files / "cache" / "tokens").iterdir() if path.is_dir())


@pytest.mark.parametrize("load_dataset", [load_sft_dataset, load_preference_dataset])
def test_a_store_holds_what_memory_would(load_dataset, files, monkeypatch):
    plain = load_dataset(str(files / "data.jsonl"), load_tokenizer(files / "model"), SETTINGS)
    first = load(files, load_dataset)
    assert len(first) == 700 and first.units == plain.units
    assert first.units[-3:] == plain.units[697:] == list(plain.units)[697:]
    monkeypatch.setattr(token_cache, "tokenize_source", None)  # the second time nothing is tokenized
    again = load(files, load_dataset)
    assert again.units == plain.units
    assert again.fingerprint == first.fingerprint == plain.fingerprint
    assert again.describe("train", 40) == plain.describe("train", 40)
    assert again.units.lengths().tolist() == [len(sequence) for unit in plain.units for sequence in unit]
    with pytest.raises(IndexError):
        again.units[700]


def test_data_written_to_while_they_are_tokenized(files, monkeypatch):
    """Changed data is not stored under the name of the old data."""

    def collect(chunks, sequences_per_unit, directory):
        write(files / "data.jsonl", RECORDS[::-1])
        return token_store.collect(chunks, sequences_per_unit, directory)

    with monkeypatch.context() as writing:
        writing.setattr(token_cache, "collect", collect)
        with pytest.raises(UserError, match="changed while it was tokenized; start the run again"):
            load(files)
    assert not stores(files)
    assert len(load(files)) == 700


def test_what_a_run_writes_in_the_models_directory(files):
    load(files)
    (files / "model" / "run").mkdir()
    (files / "model" / "run" / "metrics.jsonl").write_text("{}\n")
    load(files)
    assert len(stores(files)) == 1
    (files / "model" / "additional_chat_templates").mkdir()
    (files / "model" / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    load(files)
    assert len(stores(files)) == 2


def test_prompts_keep_their_records(files):
    records = [
        {"prompt": "plain", "answer": 0.1, "more": {"é": [None, 2**60]}},
        {"prompt": [{"role": "user", "content": "häh?"}], "answer": "x" * 3000},
        {"prompt": "p" * 50, "answer": "dropped"},
        {"prompt": "last"},
    ]
    write(files / "data.jsonl", records)

    def load_dataset(*arguments, cache):
        return load_prompt_dataset(*arguments[:3], 40, arguments[3], cache=cache)

    dataset = load(files, load_dataset)
    assert [prompt.record for prompt in dataset.prompts] == [
        {key: value for key, value in record.items() if key != "prompt"} for record in (*records[:2], records[3])
    ]
    assert [prompt.content for prompt in dataset.prompts] == ["plain", records[1]["prompt"], "last"]
    assert dataset.prompts[-1] == dataset.prompts[2] and dataset.has_messages
    records[0]["answer"] = 0.2
    write(files / "data.jsonl", records)
    assert load(files, load_dataset).fingerprint != dataset.fingerprint


def test_what_tokens_depend_on_makes_another_store(files, monkeypatch):
    load(files)
    for count, change in enumerate([
        lambda: load(files, settings=SETTINGS.model_copy(update={"max_sequence_length": 9})),
        lambda: load(files, settings=SETTINGS.model_copy(update={"max_sequence_length": 9, "overlong": "truncate"})),
        lambda: load(files, load_preference_dataset),
        lambda: load(files, template="{{ messages }}"),
        lambda: load(files, trust=True),
        lambda: (write(files / "data.jsonl", RECORDS[1:]), load(files)),
        lambda: ((files / "model" / "generation_config.json").write_text('{"eos_token_id": 3}'), load(files)),
        lambda: (monkeypatch.setattr(token_cache, "_code_digest", lambda: "other code"), load(files)),
    ], start=2):  # fmt: skip
        change()
        assert len(stores(files)) == count
    (files / "model" / "model.safetensors").write_bytes(b"weights")
    load(files)
    (files / "model" / ".git").mkdir()
    (files / "model" / ".git" / "object").write_bytes(b"weights once more")
    load(files)
    assert len(stores(files)) == count, "weights are no part of a tokenizer"


def test_an_edit_that_keeps_size_and_time_is_noticed(files, monkeypatch):
    """A tool sets a file's modification time back: the change time of the inode shows the change."""
    monkeypatch.setattr(token_cache, "SOURCE_BYTES_TO_REMEMBER", 0)
    data = files / "data.jsonl"
    first, state = load(files), os.stat(data)
    digests = sorted((files / "cache" / "digests").iterdir())
    assert [path.suffix for path in digests] == ["", ".lock"]
    load(files)
    assert sorted((files / "cache" / "digests").iterdir()) == digests
    data.write_text(data.read_text().replace("cd", "dc"))
    os.utime(data, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert os.stat(data).st_size == state.st_size
    assert load(files).fingerprint != first.fingerprint


def test_one_process_of_a_node_reads_a_large_source_for_its_digest(files, monkeypatch):
    """Many processes need the same cache file at once; each that opens the file has a separate lock."""
    monkeypatch.setattr(token_cache, "SOURCE_BYTES_TO_REMEMBER", 0)
    cache = TokenCache(files / "cache", TokenizerSpec(files / "model", False, None))
    read, plain = [], token_cache.digest_of_file

    def slow(path):
        read.append(path)
        time.sleep(0.3)
        return plain(path)

    monkeypatch.setattr(token_cache, "digest_of_file", slow)
    with ThreadPoolExecutor(4) as pool:
        digests = list(pool.map(cache._source_digest, [str(files / "data.jsonl")] * 4))
    assert len(read) == 1
    assert digests == [hashlib.sha256((files / "data.jsonl").read_bytes()).hexdigest()] * 4


def test_what_was_stopped_is_made_again(files):
    whole = list(load(files).units)
    (store,) = stores(files)
    store.rename(store.with_suffix(".partial"))
    (store.with_suffix(".partial") / "ids.bin").write_bytes(b"abc")
    assert load(files).units == whole
    assert stores(files) == [store]


def test_a_damaged_store_is_named(files):
    load(files)
    (store,) = stores(files)
    (store / "ids.bin").write_bytes(b"\0" * 12)
    with pytest.raises(
        UserError,
        match=rf"data.cache_dir: {store} is incomplete: ids.bin must have .* but has 12 bytes; delete this directory",
    ):
        load(files)
    (store / "meta.json").write_text("[]")
    with pytest.raises(UserError, match=rf"data.cache_dir: {store} is incomplete: .*; delete this directory"):
        load(files)


def test_a_wrong_record_leaves_nothing(files):
    write(files / "data.jsonl", [*RECORDS, {"prompt": "p"}])
    with pytest.raises(UserError) as error:
        load(files)
    assert str(error.value) == f"{files / 'data.jsonl'}, line 701: lacks the key completion; the record has prompt" + (
        "; if another column holds it, set data.columns={completion: COLUMN}"
    )
    assert [path.suffix for path in (files / "cache" / "tokens").iterdir()] == [".lock"]


@pytest.mark.parametrize("where", ["a_file", "a_file/below"])
def test_a_directory_that_cannot_be(where, files):
    (files / "a_file").write_text("")
    cache = TokenCache(files / where, TokenizerSpec(files / "model", False, None))
    with pytest.raises(UserError, match=r"data.cache_dir: .* cannot be written"):
        load_sft_dataset(str(files / "data.jsonl"), load_tokenizer(files / "model"), SETTINGS, cache=cache)


TOKENIZE_FOR_EVER = """
import sys, time
from pathlib import Path
from mcore_rl.config import DataConfig
from mcore_rl.data import datasets, token_cache, tokenize
from mcore_rl.data.tokenize import load_tokenizer
from mcore_rl.data.tokenize import TokenizerSpec

def slow(*arguments):
    time.sleep(1000)

if __name__ == "__main__":
    files = Path(sys.argv[1])
    tokenize.SOURCE_BYTES_FOR_PROCESSES, token_cache.available_workers = 0, lambda: 2
    datasets._tokenize_sft = slow
    cache = token_cache.TokenCache(files / "cache", TokenizerSpec(files / "model", False, None))
    settings = DataConfig(train="x", max_sequence_length=40)
    datasets.load_sft_dataset(str(files / "data.jsonl"), load_tokenizer(files / "model"), settings, print, cache)
"""


@pytest.mark.long
def test_workers_end_with_a_killed_parent_and_what_it_left_is_removed(files):
    (files / "slow.py").write_text(TOKENIZE_FOR_EVER)
    process = subprocess.Popen([sys.executable, files / "slow.py", files], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    workers = []
    while len(workers) < 3:  # two, and multiprocessing's tracker of resources
        workers = psutil.Process(process.pid).children()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(3)
    process.kill()
    process.wait(10)
    for worker in workers:
        wait_for_end(worker.pid)
    (left,) = (files / "cache" / "tokens").glob("*.partial")
    write(files / "data.jsonl", RECORDS[:9])  # another store
    load(files)
    assert not left.exists()


@pytest.mark.long
def test_several_processes_tokenize_the_same(files, monkeypatch):
    monkeypatch.setattr(tokenize, "SOURCE_BYTES_FOR_PROCESSES", 0)
    source, said = TokenizerSpec(files / "model", False, None), []
    tokenizer = load_tokenizer(files / "model")
    plain = load_sft_dataset(str(files / "data.jsonl"), tokenizer, SETTINGS)
    monkeypatch.setattr(token_cache, "available_workers", lambda: 2)
    cache = TokenCache(files / "cache", source)
    assert load_sft_dataset(str(files / "data.jsonl"), tokenizer, SETTINGS, said.append, cache).units == plain.units
    assert said[0] == f"tokenizing {files / 'data.jsonl'} by 2 processes"  # a busy machine also reports progress
    bad = list(RECORDS)
    bad[300], bad[600] = {"prompt": "p"}, {"prompt": 3, "completion": 4}
    write(files / "data.jsonl", bad)
    with pytest.raises(UserError, match=r"line 301: lacks the key completion"):  # the first in the file
        load_sft_dataset(str(files / "data.jsonl"), tokenizer, SETTINGS, said.append, cache)


def load_and_count(files):
    """A rank's fingerprint, and how often it has tokenized."""
    made = []
    plain = TokenCache._make

    def make(self, path, *arguments):
        made.append(path)
        plain(self, path, *arguments)

    TokenCache._make = make
    return load(files).fingerprint, len(made)


def test_one_process_of_a_node_makes_it(files):
    results = run_processes(load_and_count, files, world_size=3)
    assert [count for _, count in results] == [1, 0, 0]
    assert len({fingerprint for fingerprint, _ in results}) == 1


def test_who_waits_for_nobody_says_so(files, monkeypatch):
    monkeypatch.setattr(token_cache, "LOST_SECONDS", 0.3)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(UserError, match=r"the process that creates .* has ended, or uses another directory"):
        load(files)


def test_nothing_of_a_store_is_read_before_it_is_used(files):
    load(files)
    (store,) = stores(files)
    units = TokenStore.open(store)
    shutil.rmtree(store)  # mapped files stay readable
    assert len(units) == 700 and units[699] == units[-1]
