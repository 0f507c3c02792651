"""BatchedDataDict: nothing lost, nothing duplicated, order restored, whatever the cut."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.distributed.batched_data_dict import BatchedDataDict

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=24)


def make(lengths):
    width = max(lengths)
    rows = torch.arange(len(lengths))
    ids = torch.where(torch.arange(width) < torch.tensor(lengths)[:, None], rows[:, None] + 1, 0)
    return BatchedDataDict(
        input_ids=ids, input_lengths=torch.tensor(lengths), row=rows, name=[f"r{i}" for i in range(len(lengths))], k=3
    )


def rows_of(parts):
    return [row for part in parts for row in part["row"].tolist()]


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 5), st.booleans(), st.integers(1, 4))
def test_packed_and_dynamic_shards(lengths, shards, packed, multiple):
    data = make(lengths)
    budget = max(48, *(4 * -(-n // 4) for n in lengths))
    if packed:
        made, order = data.shard_by_batch_size(
            shards,
            sequence_packing_args={"max_tokens_per_microbatch": budget, "sequence_length_pad_multiple": multiple},
        )
    else:
        made, order = data.shard_by_batch_size(
            shards, dynamic_batching_args={"max_tokens_per_microbatch": budget, "sequence_length_round": multiple}
        )
    assert sorted(order) == list(range(len(lengths)))
    assert rows_of(made) == order
    assert len({len(shard.microbatches) for shard in made}) == 1, "as many microbatches on every shard"
    microbatches = []
    for shard in made:
        parts = list(
            shard.make_microbatch_iterator_for_packable_sequences()
            if packed
            else shard.make_microbatch_iterator_with_dynamic_shapes(sequence_length_round=multiple)
        )
        microbatches += parts
        assert rows_of(parts) == shard["row"].tolist()
    for part in microbatches:
        padded = [multiple * -(-n // multiple) for n in part["input_lengths"].tolist()]
        assert (sum(padded) if packed else max(padded, default=0) * len(padded)) <= budget
        assert part["k"] == 3
        for ids, row, length, name in zip(
            *(part[k] for k in ("input_ids", "row", "input_lengths", "name")), strict=True
        ):
            assert (ids == row + 1).sum() == length, "no token is cut off"
            assert name == f"r{row}"
    joined = BatchedDataDict.from_batches(made)
    joined.reorder_data(order)
    assert joined["row"].tolist() == list(range(len(lengths)))
    assert torch.equal(joined["input_ids"], data["input_ids"])
    assert joined["name"] == data["name"]


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 6))
def test_plain_shards_and_chunks(lengths, shards):
    data = make(lengths)
    made = data.shard_by_batch_size(shards, allow_uneven_shards=True)
    assert rows_of(made) == list(range(len(lengths)))
    assert rows_of(data.chunk(i, shards) for i in range(shards)) == list(range(len(lengths)))
    sizes = [shard.size for shard in made]
    assert max(sizes) - min(sizes) <= 1
    if len(lengths) % shards:
        with pytest.raises(ValueError, match="do not divide over"):
            data.shard_by_batch_size(shards)
    else:
        assert rows_of(data.shard_by_batch_size(shards)) == list(range(len(lengths)))


def test_each_batch_is_shared_out_by_itself():
    first, second = make([1] * 8).shard_by_batch_size(2, batch_size=4)
    assert first["row"].tolist() == [0, 1, 4, 5]
    assert second["row"].tolist() == [2, 3, 6, 7]


@settings(deadline=None)
@given(st.lists(LENGTHS, min_size=1, max_size=4))
def test_from_batches_pads(parts):
    batches = [make(lengths) for lengths in parts]
    joined = BatchedDataDict.from_batches(batches, {"input_ids": -7})
    width = max(max(lengths) for lengths in parts)
    assert joined["input_ids"].shape == (sum(map(len, parts)), width)
    assert joined["name"] == [name for batch in batches for name in batch["name"]]
    start = 0
    for batch in batches:
        own = joined.slice(start, start + batch.size)
        assert torch.equal(own["input_ids"][:, : batch["input_ids"].shape[1]], batch["input_ids"])
        assert (own["input_ids"][:, batch["input_ids"].shape[1] :] == -7).all()
        start += batch.size


def test_microbatches_of_rows():
    data = make([3, 1, 2, 5])
    assert [part["row"].tolist() for part in data.make_microbatch_iterator(2)] == [[0, 1], [2, 3]]
    assert data.repeat_interleave(2)["row"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    data.truncate_tensors(1, 2)
    assert data["input_ids"].shape == (4, 2)
    assert data["input_lengths"].shape == (4,)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda d: d.make_microbatch_iterator(3), "do not make whole microbatches of 3"),
        (lambda d: list(d.make_microbatch_iterator_for_packable_sequences()), "shard with sequence_packing_args"),
        (lambda d: d.reorder_data([0, 0, 1, 2]), "name each of the 4 rows once"),
        (lambda d: d.chunk(4, 4), "no chunk 4 of 4"),
        (lambda d: d.shard_by_batch_size(2, batch_size=3), "whole batches of 3"),
        (
            lambda d: d.shard_by_batch_size(2, sequence_packing_args={"max_tokens_per_microbatch": 4}),
            "5 padded tokens does not fit a pack of 4",
        ),
        (lambda d: BatchedDataDict.from_batches([d, {"row": d["row"]}]), "differ in their entries"),
    ],
)
def test_bad_use(call, message):
    with pytest.raises(ValueError, match=message):
        call(make([3, 1, 2, 5]))
