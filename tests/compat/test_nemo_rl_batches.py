"""Tests of BatchedDataDict by the names of NeMo RL: no row is lost or duplicated, and the order is restored."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.distributed.batched_data_dict import BatchedDataDict, SlicedDataDict
from mcore_rl.testing.processes import run_processes

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
    keys = {"max_tokens_per_microbatch": budget, "input_key": "input_ids", "input_lengths_key": "input_lengths"}
    if packed:
        arguments = {**keys, "sequence_length_pad_multiple": multiple, "algorithm": "first_fit_decreasing"}
        arguments = {"sequence_packing_args": arguments}
    else:
        arguments = {"dynamic_batching_args": {**keys, "sequence_length_round": multiple}}
    if len(lengths) < shards:
        with pytest.raises(ValueError, match="are fewer than the"):
            data.shard_by_batch_size(shards, **arguments)
        return
    made, order = data.shard_by_batch_size(shards, **arguments)
    assert sorted(order) == list(range(len(lengths)))
    assert rows_of(made) == order
    counts = [len(shard.micro_batch_indices[0]) for shard in made]
    assert max(counts) - min(counts) <= (len(lengths) < max(counts) * shards), "equal wherever the rows allow it"
    microbatches = []
    for shard in made:
        assert isinstance(shard, SlicedDataDict)
        if packed:
            parts = list(shard.make_microbatch_iterator_for_packable_sequences())
            count, longest = shard.get_microbatch_iterator_for_packable_sequences_len()
            assert longest == max(sum(multiple * -(-n // multiple) for n in p["input_lengths"].tolist()) for p in parts)
        else:
            parts = list(shard.make_microbatch_iterator_with_dynamic_shapes(sequence_dim=1))
            count = shard.get_microbatch_iterator_dynamic_shapes_len()
        assert count == len(parts)
        assert all(part.size for part in parts), "no microbatch is empty"
        microbatches += parts
        assert rows_of(parts) == shard["row"].tolist()
    for part in microbatches:
        padded = [multiple * -(-n // multiple) for n in part["input_lengths"].tolist()]
        assert (sum(padded) if packed else max(padded) * len(padded)) <= budget
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


def test_global_batches_of_a_shard():
    """Two global batches of six rows on two shards: indices and lengths of each, counted from its first row."""
    data = make([5, 9, 2, 7, 7, 3, 8, 8, 8, 1, 2, 4])
    packing = {"max_tokens_per_microbatch": 16, "sequence_length_pad_multiple": 4}
    shards, order = data.shard_by_batch_size(2, batch_size=6, sequence_packing_args=packing)
    seen = []
    for shard in shards:
        assert sum(shard.elem_counts_per_gb) == shard.size
        for index in (0, 1):
            batch = shard.get_batch(index)
            assert batch.size == shard.elem_counts_per_gb[index]
            assert all(6 * index <= row < 6 * index + 6 for row in batch["row"].tolist())
            (indices,), (lengths,) = batch.micro_batch_indices, batch.micro_batch_lengths
            assert [0, *(end for _, end in indices)] == [*(start for start, _ in indices), batch.size]
            packs = list(batch.make_microbatch_iterator_for_packable_sequences())
            assert [sum(-(-n // 4) * 4 for n in pack["input_lengths"].tolist()) for pack in packs] == lengths
            seen += rows_of(packs)
    assert sorted(seen) == list(range(12)) == sorted(order)
    plain = data.shard_by_batch_size(2, batch_size=6)[1]
    assert plain.get_batch(1, batch_size=3)["row"].tolist() == [9, 10, 11]
    assert plain.get_batch(1, batch_size=4)["row"].tolist() == [10, 11], "the last batch may be smaller"
    for call in (lambda: plain.get_batch(0), lambda: plain.get_batch(2, 3), lambda: shards[0].get_batch(2)):
        with pytest.raises(AssertionError, match=r"get_batch: (needs batch_size|batch_idx=2 must be)"):
            call()


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 6))
def test_plain_shards_and_chunks(lengths, shards):
    data = make(lengths)
    made = data.shard_by_batch_size(shards, allow_uneven_shards=True)
    assert rows_of(made) == list(range(len(lengths)))
    assert all(shard.size == -(-len(lengths) // shards) for shard in made[: len(lengths) // -(-len(lengths) // shards)])
    if len(lengths) % shards:
        with pytest.raises(AssertionError, match=r"Batch size.*is not a multiple of shards"):
            data.shard_by_batch_size(shards)
        with pytest.raises(AssertionError, match="is not a multiple of the number of chunks"):
            data.chunk(0, shards)
    else:
        assert rows_of(data.shard_by_batch_size(shards)) == list(range(len(lengths)))
        assert rows_of(data.chunk(i, shards) for i in range(shards)) == list(range(len(lengths)))


def test_each_batch_is_shared_out_by_itself():
    first, second = make([1] * 8).shard_by_batch_size(2, batch_size=4)
    assert first["row"].tolist() == [0, 1, 4, 5]
    assert second["row"].tolist() == [2, 3, 6, 7]


def test_views_copies_and_places():
    data = make([3, 1, 2, 5])
    data.slice(1, 3)["input_ids"].fill_(9)
    assert (data["input_ids"][1:3] == 9).all(), "a slice is a view"
    assert data.slice(2, 99).size == 2
    data.select_indices([0])["input_ids"].fill_(7)
    assert not (data["input_ids"][0] == 7).any(), "chosen rows are copies"
    data["log"] = [[{"role": "user"}] for _ in range(4)]
    repeated = data.repeat_interleave(num_repeats=2)
    repeated["log"][0][0]["role"] = "changed"
    assert repeated["log"][1] == [{"role": "user"}] == data["log"][0], "items are copied deeply"
    assert data.to("meta") is data
    assert data["input_ids"].device.type == "meta"


def gather_jagged():
    rank, group = torch.distributed.get_rank(), torch.distributed.group.WORLD
    lengths = [[3, 1], [2, 2, 2], [5]][rank]
    width = 5
    own = make(lengths)
    own["input_ids"] = torch.nn.functional.pad(own["input_ids"], (0, width - max(lengths)))
    own["rank"] = torch.full((len(lengths),), rank)
    everyone = own.all_gather(group)
    own["only_here" if rank == 1 else "elsewhere"] = torch.zeros(len(lengths))
    with pytest.raises(ValueError, match="all_gather: all ranks must have the same entries"):
        own.all_gather(group)
    return everyone


def test_all_gather_of_jagged_batches():
    for everyone in run_processes(gather_jagged, world_size=3):
        assert everyone["input_lengths"].tolist() == [3, 1, 2, 2, 2, 5]
        assert everyone["rank"].tolist() == [0, 0, 1, 1, 1, 2]
        assert everyone["name"] == ["r0", "r1", "r0", "r1", "r2", "r0"]
        assert everyone["input_ids"].shape == (6, 5)
        assert everyone["k"] == 3


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


PACKS = {"max_tokens_per_microbatch": 4}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda d: d.make_microbatch_iterator(3), r"\(4\) is not a multiple of the provided microbatch size \(3\)"),
        (
            lambda d: list(d.make_microbatch_iterator_for_packable_sequences()),
            "make it with sequence_packing_args",
        ),
        (lambda d: d.reorder_data([0, 0, 1, 2]), "contain each number from 0 to 3 exactly once"),
        (lambda d: d.chunk(4, 4), "chunk 4 must be at least 0"),
        (lambda d: d.shard_by_batch_size(2, batch_size=3), r"Total batch size \(4\) is not a multiple of batch_size"),
        (lambda d: d.shard_by_batch_size(2, 2, True), "batch_size must be None if allow_uneven_shards is True"),
        (lambda d: d.shard_by_batch_size(2, None, False, PACKS), "a row of 5 tokens does not fit a microbatch of 4"),
        (lambda d: d.shard_by_batch_size(2, None, False, None, PACKS), "5 padded tokens does not fit a pack of 4"),
        (lambda d: d.shard_by_batch_size(2, None, False, PACKS, PACKS), "cannot be passed together"),
        (lambda d: BatchedDataDict.from_batches([d, {"row": d["row"]}]), "all batches must have the same entries"),
        (lambda d: BatchedDataDict(d, more=torch.ones(3)).size, "Batch sizes are not the same across the rollout"),
    ],
)
@pytest.mark.parametrize("kind", [ValueError, AssertionError])
def test_bad_use(call, message, kind):
    with pytest.raises(kind, match=message):
        call(make([3, 1, 2, 5]))


def test_a_mask_selects_the_rows_where_it_is_true():
    data = BatchedDataDict(x=torch.arange(3), names=["a", "b", "c"])
    chosen = data.select_indices(torch.tensor([True, False, True]))
    assert (chosen["x"].tolist(), chosen["names"]) == ([0, 2], ["a", "c"])
    with pytest.raises(AssertionError, match="mask has 2 entries, but the batch has 3 rows"):
        data.select_indices(torch.tensor([True, False]))
