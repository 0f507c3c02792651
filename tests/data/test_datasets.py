"""Tests of token ids and masks of records, the order of samples, and the schedule of microbatches."""

import json
import re
import subprocess
import sys
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from small_models import make_tokenizer

from mcore_rl.algorithms.rm import RewardObjective
from mcore_rl.algorithms.supervised import TrainingBatch
from mcore_rl.config import DataConfig, SFTConfig, build_config
from mcore_rl.data.batching import MicrobatchPlanner, collate, global_valid_counts
from mcore_rl.data.datasets import load_preference_dataset, load_prompt_dataset, load_reward_dataset, load_sft_dataset
from mcore_rl.data.readers import check_file
from mcore_rl.data.token_store import SampleOrder, TokenSequence
from mcore_rl.data.tokenize import tokenize_completion, tokenize_messages
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.distributed.packs import round_up
from mcore_rl.errors import UserError
from mcore_rl.losses.preference import BradleyTerryLoss

TOKENIZER = make_tokenizer()


def text_of(sequence, trained=None):
    kept = [i for i, m in zip(sequence.input_ids, sequence.token_mask, strict=True) if trained is None or m == trained]
    return "".join(TOKENIZER.convert_ids_to_tokens(kept))


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def test_plain_strings_end_with_the_end_token():
    sequence = tokenize_completion(TOKENIZER, "ask ", "answer")
    assert text_of(sequence) == "ask answer<|end|>"
    assert text_of(sequence, trained=True) == "answer<|end|>"


def test_chat_template_and_what_it_writes_after_the_end_token():
    sequence = tokenize_completion(TOKENIZER, [user("hi")], [assistant("yo")])
    assert text_of(sequence) == "<|user|>hi<|assistant|>yo<|end|>"
    assert text_of(sequence, trained=True) == "yo<|end|>"


def test_every_assistant_message_is_trained_on():
    sequence = tokenize_messages(TOKENIZER, [user("a"), assistant("b"), user("c"), assistant("d")])
    assert text_of(sequence) == "<|user|>a<|assistant|>b<|end|>\n<|user|>c<|assistant|>d<|end|>"
    assert text_of(sequence, trained=True) == "b<|end|>d<|end|>"


def test_the_beginning_token_is_kept():
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer()
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<|system|> $A", special_tokens=[("<|system|>", tokenizer.convert_tokens_to_ids("<|system|>"))]
    )
    sequence = tokenize_completion(tokenizer, "ab", "c")
    assert "".join(tokenizer.convert_ids_to_tokens(sequence.input_ids)) == "<|system|>abc<|end|>"
    assert sequence.token_mask == (False, False, False, True, True)


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def settings_of(**changes):
    return DataConfig(**{"train": "unused", "max_sequence_length": 40, **changes})


def test_preference_records(tmp_path):
    plain = {"prompt": "p ", "chosen": "good", "rejected": "bad"}
    implicit = {"chosen": [user("q"), assistant("good")], "rejected": [user("q"), assistant("bad")]}
    explicit = {"prompt": [user("q")], "chosen": [assistant("good")], "rejected": [assistant("bad")]}
    first = load_preference_dataset(write(tmp_path / "a.jsonl", [plain]), TOKENIZER, settings_of())
    assert [text_of(s, trained=True) for s in first.units[0]] == ["good<|end|>", "bad<|end|>"]
    shared = load_preference_dataset(write(tmp_path / "b.jsonl", [implicit]), TOKENIZER, settings_of())
    given = load_preference_dataset(write(tmp_path / "c.jsonl", [explicit]), TOKENIZER, settings_of())
    assert shared.units == given.units
    whole = load_preference_dataset(
        write(tmp_path / "d.jsonl", [{**implicit, "prompt": [user("q")]}]), TOKENIZER, settings_of()
    )
    assert whole.units == given.units


def test_a_text_as_prompt_of_whole_conversations(tmp_path):
    """The form of ultrafeedback_binarized: the prompt is a text, which both conversations contain as a message."""
    whole = {"chosen": [user("q"), assistant("good")], "rejected": [user("q"), assistant("bad")]}
    expected = load_preference_dataset(write(tmp_path / "a.jsonl", [whole]), TOKENIZER, settings_of())
    for shared in ([], [{"role": "system", "content": "s"}]):
        conversations = {key: [*shared, *messages] for key, messages in whole.items()}
        path = write(tmp_path / "b.jsonl", [{"prompt": "q", **conversations}])
        dataset = load_preference_dataset(path, TOKENIZER, settings_of())
        assert [text_of(s, trained=True) for s in dataset.units[0]] == ["good<|end|>", "bad<|end|>"]
        assert shared or dataset.units == expected.units
    for prompt, chosen in (("other", whole["chosen"]), ("q", "good"), ("q", whole["chosen"][1:])):
        path = write(tmp_path / "c.jsonl", [{"prompt": prompt, **whole, "chosen": chosen}])
        with pytest.raises(UserError, match=r'beside messages, write a text as \[{"role": "user", "content": "…"}\]'):
            load_preference_dataset(path, TOKENIZER, settings_of())


def test_margins_of_pairs(tmp_path):
    pair, said = {"prompt": "p ", "chosen": "good", "rejected": "bad"}, []
    path = write(
        tmp_path / "a.jsonl", [{**pair, "margin": 1}, pair, {**pair, "margin": None}, {**pair, "margin": -0.5}]
    )
    dataset = load_reward_dataset(path, TOKENIZER, settings_of(), said.append)
    assert [dataset.margin(i) for i in range(4)] == [1.0, 0.0, 0.0, -0.5] and dataset.has_margins
    assert dataset.describe("train", 40).endswith(", 2 with a margin") and said == []
    batch = TrainingBatch(None, dataset, [3, 0], [None, None])
    columns = RewardObjective(BradleyTerryLoss()).frozen_columns(batch)
    assert columns["margin"].tolist() == [-0.5, -0.5, 1.0, 1.0]
    without = load_reward_dataset(write(tmp_path / "b.jsonl", [pair]), TOKENIZER, settings_of())
    assert RewardObjective(BradleyTerryLoss()).frozen_columns(TrainingBatch(None, without, [0], [None])) == {}
    mixed = load_reward_dataset({path: 1.0, str(tmp_path / "b.jsonl"): 1.0}, TOKENIZER, settings_of())
    assert sorted(mixed.margin(i) for i in range(5)) == [-0.5, 0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("margin", ["1", True, float("nan"), [1]])
def test_margins_that_are_no_numbers_are_refused(margin, tmp_path):
    pair = {"prompt": "p ", "chosen": "good", "rejected": "bad", "margin": margin}
    with pytest.raises(UserError, match=r"a\.jsonl, line 1: .*(margin must be a finite number|NaN)"):
        load_reward_dataset(write(tmp_path / "a.jsonl", [pair]), TOKENIZER, settings_of())
    dataset = load_preference_dataset(write(tmp_path / "b.jsonl", [{**pair, "margin": "x"}]), TOKENIZER, settings_of())
    assert len(dataset) == 1  # only the loss of reward models reads margins


def test_an_answer_that_is_null_is_refused_where_it_is_needed(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": "p", "answer": None}])
    assert len(load_prompt_dataset(path, TOKENIZER, settings_of(), 40)) == 1
    with pytest.raises(UserError, match=r"a\.jsonl, line 1: the key answer has no value \(null\)"):
        load_prompt_dataset(path, TOKENIZER, settings_of(), 40, valued=("answer",))


@pytest.mark.parametrize("text", ["[{0},\n {1}]", "{0}\n{1}\n", "\ufeff{0}\n\n{1}"])
def test_json(text, tmp_path):
    records = [json.dumps({"prompt": "p", "completion": completion}) for completion in ("é", "b")]
    (tmp_path / "a.json").write_text(text.format(*records))
    dataset = load_sft_dataset(str(tmp_path / "a.json"), TOKENIZER, settings_of())
    assert [text_of(unit[0]) for unit in dataset.units] == ["p<|unk|><|end|>", "pb<|end|>"]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("as_list", [False, True])
def test_json_of_one_record(indent, as_list, tmp_path):
    record = {"prompt": "p", "completion": "b"}
    (tmp_path / "one.json").write_text(json.dumps([record] if as_list else record, indent=indent))
    assert len(load_sft_dataset(str(tmp_path / "one.json"), TOKENIZER, settings_of())) == 1


def test_json_of_one_record_that_begins_anywhere(tmp_path):
    text = '{"messages": [{"role": "user", "content": "a"},\n {"role": "assistant", "content": "b"}]\n}'
    for number in range(len(text)):  # a break after any character that is no part of a string or a word
        if text[number] in "{}[]:, ":
            (tmp_path / "one.json").write_text(f"{text[: number + 1]}\n{text[number + 1 :]}")
            assert len(load_sft_dataset(str(tmp_path / "one.json"), TOKENIZER, settings_of())) == 1


def test_json_of_objects_over_several_lines_says_what_is_wanted(tmp_path):
    text = json.dumps({"prompt": "p", "completion": "b"}, indent=2)
    (tmp_path / "two.json").write_text(f"{text}\n{text}\n")
    wanted = "the file must be a JSON list of objects, a single object, or have one JSON object in each line"
    with pytest.raises(UserError, match=f"two.json: not valid JSON: Extra data at line 5, column 1; {wanted}"):
        load_sft_dataset(str(tmp_path / "two.json"), TOKENIZER, settings_of())


def test_a_list_of_sources_is_one_source(tmp_path):
    write(tmp_path / "a.jsonl", [{"prompt": "p", "completion": "c" * size} for size in (1, 2)])
    (tmp_path / "b.json").write_text(json.dumps([{"q": "p", "completion": "ccc"}]))
    sources = (str(tmp_path / "a.jsonl"), str(tmp_path / "b.json"))
    columns = {sources[1]: {"prompt": "q"}}
    data = DataConfig(train=list(sources), validation=list(sources), columns=columns, max_sequence_length=100)
    assert data.train_sources == data.validation_sources == list(sources)
    assert data.validation_sets == {"": sources}
    dataset = load_sft_dataset(data.train, TOKENIZER, data)
    assert [len(unit[0]) for unit in dataset.units] == [3, 4, 5]
    assert sorted(dataset.order(0).indices(0, 3)) == [0, 1, 2], "each record once in an epoch"
    assert [dataset.units.source_of(index) for index in range(3)] == [None] * 3
    limited = DataConfig(train=list(sources), columns=columns, max_samples=1)
    assert [len(unit[0]) for unit in load_sft_dataset(limited.train, TOKENIZER, limited).units] == [3, 5]


def test_parquet(tmp_path):
    import datasets

    path = str(tmp_path / "a.parquet")
    datasets.Dataset.from_list([{"prompt": "p", "completion": "c"}]).to_parquet(path)
    assert text_of(load_sft_dataset(path, TOKENIZER, settings_of()).units[0][0]) == "pc<|end|>"


def test_a_directory_of_shards(tmp_path):
    records = [{"prompt": "p", "completion": "c" * (i + 1)} for i in range(9)]
    (tmp_path / "shards").mkdir()
    write(tmp_path / "shards" / "b.jsonl", records[2:])
    (tmp_path / "shards" / "a.json").write_text(json.dumps(records[:2]))
    (tmp_path / "shards" / "README.md").write_text("none of it")
    source = str(tmp_path / "shards")
    assert [len(unit[0]) for unit in load_sft_dataset(source, TOKENIZER, settings_of()).units] == list(range(3, 12))
    few = load_sft_dataset(source, TOKENIZER, settings_of(max_samples=3))
    assert [len(unit[0]) for unit in few.units] == [3, 4, 5]
    (tmp_path / "shards" / "d.jsonl.gz").write_bytes(b"")
    with pytest.raises(UserError, match=r"shards contains d.jsonl.gz, which cannot be read as data"):
        load_sft_dataset(source, TOKENIZER, settings_of())
    (tmp_path / "shards" / "d.jsonl.gz").unlink()
    write(tmp_path / "shards" / "c.jsonl", [{"prompt": "p"}])
    with pytest.raises(UserError, match=r"shards/c.jsonl, line 1: lacks the key completion"):
        load_sft_dataset(source, TOKENIZER, settings_of())


def test_columns_of_other_names(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"question": "p", "prompt": "other", "answer": "c", "answer_text": "d"}])
    columns = {"prompt": "question", "completion": "answer"}
    unit = load_sft_dataset(path, TOKENIZER, settings_of(columns=columns)).units[0]
    assert text_of(unit[0]) == "pc<|end|>"
    swapped = settings_of(columns={"prompt": "answer", "answer": "question"})
    (prompt,) = load_prompt_dataset(path, TOKENIZER, swapped, 40).prompts
    assert (prompt.content, prompt.record) == ("c", {"answer": "p", "answer_text": "d"})
    with pytest.raises(
        UserError, match=r"line 1: lacks the key text, which data.columns names; the record has answer, "
    ):
        load_sft_dataset(path, TOKENIZER, settings_of(columns={"prompt": "text"}))


def test_columns_of_each_source(tmp_path):
    own = write(tmp_path / "own.jsonl", [{"prompt": "p", "completion": "c"}])
    other = write(tmp_path / "other.jsonl", [{"question": "q", "answer": "a"}])
    sources = {"train": {own: 1, other: 1}, "validation": other}
    section = settings_of(**sources, columns={other: {"prompt": "question", "completion": "answer"}})
    units = load_sft_dataset(section.train, TOKENIZER, section).units
    assert [text_of(unit[0]) for unit in (units[0], units[1])] == ["pc<|end|>", "qa<|end|>"]
    (unit,) = load_sft_dataset(section.validation, TOKENIZER, section).units
    assert text_of(unit[0]) == "qa<|end|>"
    with pytest.raises(
        UserError, match=r"other.jsonl, line 1: lacks the keys prompt and completion; the record has answer, q"
    ):
        load_sft_dataset(section.train, TOKENIZER, settings_of(**sources, columns={own: {"prompt": "prompt"}}))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"columns": {"b.jsonl": {"prompt": "q"}}},
            r"columns: b.jsonl is not a source of train or validation; the sources are a.jsonl",
        ),
        ({"columns": {"prompt": "q", "completion": "q"}}, "columns: the column q cannot be both prompt and completion"),
        ({"columns": {"a.jsonl": {"prompt": "q"}, "completion": "c"}}, "columns.*completion"),
        ({"train": {"d/a.jsonl": 1, "d": 2}}, "train: d/a.jsonl is one of the files in d; leave one of the two out"),
        ({"train": {"a.jsonl": 1e308, "b.jsonl": 1e308}}, "train: the sum of the weights is infinite"),
        ({"train": {"a.jsonl": 1, "./a.jsonl": 2}}, "train: a.jsonl and ./a.jsonl are the same source; leave one out"),
        ({"train": ["a.jsonl", "b.jsonl", "a.jsonl"]}, "train: a.jsonl and a.jsonl are the same source; leave one out"),
        ({"train": ["d/a.jsonl", "d"]}, "train: d/a.jsonl is one of the files in d; leave one of the two out"),
        ({"train": []}, r"(?s)train.*at least 1 item"),
        ({"train": [""]}, r"(?s)train.*must not be empty"),
        ({"validation": []}, r"(?s)validation.*at least 1 item"),
        ({"validation": ["b.jsonl", "./b.jsonl"]}, "validation: b.jsonl and ./b.jsonl are the same source; leave one"),
    ],
)
def test_sources_and_columns_that_do_not_go_together(section, message):
    with pytest.raises(ValidationError, match=message):
        DataConfig.model_validate({"train": "a.jsonl", **section})


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"prompt": "a", "completion": "b"}', "", '{"prompt": '], "line 3: not valid JSON"),
        (['{"prompt": "a'], "line 1: not valid JSON: Unterminated string at column 12"),
        (["[1, 2]"], "line 1: must be a JSON object, found a list"),
        (['{"prompt": "a", "prompt": "c", "completion": "b"}'], "line 1: the key prompt occurs twice in an object"),
        ([r'{"prompt": "a", "completion": "\ud83d\ude00 \ud83d"}'], r"line 1: \\ud83d is one half of a surrogate pair"),
        (['{"prompt": "a", "completion": "b", "id": ' + "9" * 5000 + "}"], "line 1: Exceeds the limit"),
        (
            ['{"prompt": "a", "completion": "b", "tools": [{"name": "f"}]}'],
            "line 1: tools need a chat template",
        ),
        (
            ['{"prompt": "a", "completion": "b", "messages": [{"role": "user", "content": "a"}]}'],
            "line 1: has both messages and a completion",
        ),
        (
            ['{"prompt": "a", "completion": "b"}', "", '{"prompt": "a", "answer": "b"}'],
            "line 3: lacks the key completion",
        ),
        (['{"prompt": "a", "completion": ""}'], "line 1: the record has no response tokens"),
        (['{"messages": [{"role": "user", "content": "a"}]}'], "line 1: the record has no response tokens"),
        (
            ['{"prompt": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "completion": "b"}'],
            "no record is short enough",
        ),
    ],
)
def test_bad_lines_name_file_and_line(tmp_path, lines, message):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError, match=message) as error:
        load_sft_dataset(str(path), TOKENIZER, settings_of())
    assert "data.jsonl" in str(error.value)


def test_missing_file():
    with pytest.raises(UserError, match=r"missing\.jsonl does not exist"):
        load_sft_dataset("missing.jsonl", TOKENIZER, settings_of())


def test_a_hub_that_cannot_be_reached_is_told_at_once(monkeypatch):
    import datasets
    import huggingface_hub

    def refuse(address, timeout):
        raise OSError("no network")

    monkeypatch.setattr("mcore_rl.data.readers.socket.create_connection", refuse)
    monkeypatch.delenv("HTTPS_PROXY", raising=False)
    monkeypatch.delenv("https_proxy", raising=False)
    for module in (datasets.config, huggingface_hub.constants):  # so that they are put back
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", module.HF_HUB_OFFLINE)
    started = time.monotonic()
    with pytest.raises(UserError, match=r"no/such-name does not exist, and cannot be loaded as a dataset of the hub"):
        load_sft_dataset("no/such-name", TOKENIZER, settings_of())
    assert time.monotonic() - started < 5


def test_other_kinds_of_files(tmp_path):
    with pytest.raises(UserError, match=r"must be a \.jsonl, \.json or \.parquet file"):
        load_sft_dataset(write(tmp_path / "data.csv", []), TOKENIZER, settings_of())


def test_long_records_are_dropped_or_truncated(tmp_path):
    records = [{"prompt": "p" * n, "completion": "c" * 20} for n in (5, 30, 60)]
    path = write(tmp_path / "a.jsonl", records)
    dropped = load_sft_dataset(path, TOKENIZER, settings_of())
    assert (len(dropped), dropped.num_dropped, dropped.num_truncated) == (1, 2, 0)
    cut = load_sft_dataset(path, TOKENIZER, settings_of(overlong="truncate"))
    assert (len(cut), cut.num_dropped, cut.num_truncated) == (2, 1, 1)  # the last has no response left
    whole = load_sft_dataset(path, TOKENIZER, settings_of(max_sequence_length=100))
    assert list(whole.units.lengths()) == sorted(dropped.units.record_lengths()) == [26, 51, 81]
    told = "2 of 3 dropped (longer than 40 tokens; the median is 51, the longest 81; "
    assert dropped.describe("train", 40).endswith(told + "data.max_sequence_length=81 keeps all)")
    assert "1 of 3 dropped" in cut.describe("train", 40)
    assert "1 truncated to 40 tokens" in cut.describe("train", 40)
    assert max(len(unit[0]) for unit in cut.units) == 40


def test_a_tokenizer_without_pad_token_pads_with_its_end_token(tmp_path):
    from mcore_rl.data.tokenize import load_tokenizer

    tokenizer, said = make_tokenizer(), []
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path, say=said.append).pad_token_id == tokenizer.eos_token_id
    assert said == ["the tokenizer has no pad token; its end token <|end|> pads (padding is never trained on)"]


@given(st.integers(1, 20), st.integers(0, 5))
def test_sample_order_repeats_and_skips_nothing(size, seed):
    order = SampleOrder(size, seed)
    stream = order.indices(0, 3 * size)
    for epoch in range(3):
        assert sorted(stream[epoch * size : (epoch + 1) * size]) == list(range(size))
    assert order.indices(size - 1, size) == stream[size - 1 : 2 * size - 1]


def sequences(lengths):
    return [(TokenSequence((1,) * n, (False,) + (True,) * (n - 1)),) for n in lengths]


def test_a_replica_without_rows_counts_none():
    """Also of data without a mask, as for scoring."""
    data = BatchedDataDict(input_ids=torch.ones(1, 4, dtype=torch.long), input_lengths=torch.tensor([4]))
    batching = MicrobatchPlanner(True, 8, 1, 1, dp_size=2)
    (one,), (filler,) = batching.microbatches(data, 0), batching.microbatches(data, 1)
    assert one.counts and "sample_mask" not in one.data
    assert not filler.counts and filler.data["sample_mask"].tolist() == [0]


def test_collate_and_counts():
    data = collate(sequences([3, 5]), pad_token_id=9)
    assert data["input_ids"].tolist() == [[1, 1, 1, 9, 9], [1, 1, 1, 1, 1]]
    assert [int(x) for x in global_valid_counts(data)] == [2, 6]


@settings(deadline=None)
@given(
    st.lists(st.integers(2, 30), min_size=1, max_size=24),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.booleans(),
    st.sampled_from([1, 4]),
)
def test_plan(lengths, dp_size, rows_per_unit, packing, multiple):
    """Every row once, units whole, packs within capacity, the same number for every rank."""
    lengths = lengths * rows_per_unit
    batching = MicrobatchPlanner(packing, 70, 3, rows_per_unit, dp_size, multiple=multiple)
    plan = batching.plan(lengths)
    assert len(plan) == dp_size
    assert len({len(shard) for shard in plan}) == 1
    assert sorted(row for shard in plan for rows in shard for row in rows) == list(range(len(lengths)))
    for rows in (rows for shard in plan for rows in shard):
        assert all(row // rows_per_unit * rows_per_unit in rows for row in rows)
        assert len(rows) % rows_per_unit == 0
        if packing:
            assert sum(round_up(lengths[row], multiple) for row in rows) <= 70


@pytest.mark.parametrize("packing", [True, False])
def test_fillers_keep_ranks_in_step(packing):
    """Three units on four ranks: one rank gets a microbatch whose samples do not count."""
    data = collate(sequences([8, 6, 4]), 0)
    batching = MicrobatchPlanner(packing, 16, 1, 1, dp_size=4, one_width=True)
    shards = [batching.microbatches(data, rank) for rank in range(4)]
    assert {len(shard) for shard in shards} == {1}
    assert {shard[0].layout.total for shard in shards} == {8}
    fillers = [shard[0] for shard in shards if not shard[0].counts]
    assert len(fillers) == 1
    assert fillers[0].data["sample_mask"].sum() == 0
    assert sum(float(shard[0].data["sample_mask"].sum()) for shard in shards) == 3


def test_packs_are_filled_the_longest_first():
    plan = MicrobatchPlanner(True, 10, 1, 1).plan([5, 6, 4, 5])
    assert sorted(map(sorted, plan[0])) == [[0, 3], [1, 2]]


def test_a_unit_longer_than_a_pack():
    with pytest.raises(ValueError, match="record of 12 padded tokens does not fit a pack of 10"):
        MicrobatchPlanner(True, 10, 1, 1, multiple=4).plan([9])


def test_microbatch_rows_are_cut_to_their_longest():
    data = collate(sequences([9, 3, 4]), 0)
    microbatch = MicrobatchPlanner(False, 0, 2, 1).microbatches(data, 0)[1]
    assert microbatch.rows == [2]
    assert torch.equal(microbatch.data["input_ids"], data["input_ids"][2:, :4])


@pytest.mark.parametrize(
    ("positions", "own", "length"), [(64, {}, 64), (4096, {}, 1024), (64, {"max_sequence_length": 65}, 65)]
)
def test_default_length_fits_the_models_positions(positions, own, length, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": positions}))
    values = {"output_dir": "out", "model": {"path": str(tmp_path)}, "data": {"train": "a.jsonl", **own}}
    config = build_config(SFTConfig, values, ["trainer.max_steps=1"], "")
    assert (config.data.max_sequence_length, config.trainer.max_steps) == (length, 1)


@pytest.mark.parametrize("source", ["/no/where", "./where", "../a/b", "a/b/c", "no/where.jsonl", "~/data"])
def test_path_that_does_not_exist_is_not_sought_on_the_hub(source):
    with pytest.raises(UserError, match=f"data: {re.escape(source)} does not exist$"):
        check_file(source)


def test_first_record_is_checked_without_torch_or_tokenizer(tmp_path):
    """Wrong columns, messages without a template and too many positions are refused; a right record passes."""
    model, path = tmp_path / "model", tmp_path / "a.jsonl"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 64}')
    (model / "tokenizer_config.json").write_text("{}")
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    cases = [
        (
            {"question": "a", "completion": "b"},
            {},
            "a.jsonl, line 1: lacks the key prompt; the record has completion, question",
        ),
        (chat, {}, "a.jsonl, line 1: messages need a chat template, but the tokenizer has none"),
        (chat, {"chat_template": "{{ messages }}"}, None),
        ({"prompt": "a", "completion": "b"}, {}, None),
        (
            {"prompt": "a", "answer": "b"},
            {"max_sequence_length": 65},
            "the record has answer, prompt; if another column holds it, set data.columns={completion: COLUMN}",
        ),
        (
            {"prompt": "a", "completion": "b"},
            {"max_sequence_length": 65},
            "the model has 64 positions.*; set data.max_sequence_length=64 or less",
        ),
    ]
    code = """
import json, sys
from mcore_rl.config import SFTConfig, build_config
from mcore_rl.errors import UserError
from mcore_rl.run.preflight import preflight
model, path, cases = json.loads(sys.argv[1])
for record, data, _ in cases:
    open(path, "w").write(json.dumps(record))
    values = {"output_dir": model + "/out", "model": {"path": model}, "trainer": {"max_steps": 1},
              "data": {"train": path, "max_sequence_length": 64, **data}}
    try:
        print(preflight(build_config(SFTConfig, values, [], ""), 1, {}))
    except UserError as error:
        print(error)
print({"torch", "transformers"} & set(sys.modules))
"""
    command = [sys.executable, "-c", code, json.dumps([str(model), str(path), cases])]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    *told, imported = done.stdout.splitlines()
    for (_, _, message), line in zip(cases, told, strict=True):
        assert re.search(str(message), line), line
    assert imported == "set()"


def test_packs_are_padded_as_a_whole():
    """FP8 needs a multiple for all tokens of a rank, not for each sequence. Nothing is counted for the padding."""
    data = BatchedDataDict(input_ids=torch.ones(3, 70, dtype=torch.long), input_lengths=torch.tensor([70, 25, 9]))
    for packing, one_width in ((True, False), (True, True), (False, False)):
        planner = MicrobatchPlanner(packing, 100, 1, 1, cp_size=2, multiple=4, pack_multiple=64, one_width=one_width)
        layouts = [pack.layout for pack in planner.microbatches(data, 0)]
        assert all(layout.total % 64 == 0 for layout in layouts)
        assert sorted(n for layout in layouts for n in layout.lengths) == [9, 25, 70]
        assert sum(int(layout.is_token.sum()) for layout in layouts) == 104
        if packing:
            assert all(layout.padded_lengths == tuple(-(-n // 4) * 4 for n in layout.lengths) for layout in layouts)
