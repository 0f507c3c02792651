"""Tests of the positions of tokens in a pack: properties for arbitrary lengths, sizes and tails."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.distributed.packs import PackLayout

lengths = st.lists(st.integers(1, 17), min_size=1, max_size=6)
cp_sizes = st.sampled_from([1, 2, 3, 4])


def make(lengths, cp, tail):
    multiple = 2 * cp
    layout = PackLayout.pack(lengths, cp, multiple)
    return PackLayout(layout.lengths, layout.padded_lengths, layout.total + tail * multiple, cp)


def rows_of(lengths):
    rows = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for row, length in enumerate(lengths):
        rows[row, :length] = 100 * (row + 1) + torch.arange(length)
    return rows


@settings(deadline=None)
@given(lengths, cp_sizes, st.integers(0, 2))
def test_shares_partition_the_pack_evenly(lengths, cp, tail):
    layout = make(lengths, cp, tail)
    shares = [layout.local_positions(rank) for rank in range(cp)]
    assert {len(share) for share in shares} == {layout.total // cp}
    assert torch.equal(torch.cat(shares).sort().values, torch.arange(layout.total))
    assert torch.equal(torch.cat(shares)[layout.gather_order], torch.arange(layout.total))


@settings(deadline=None)
@given(lengths, st.sampled_from([2, 4]), st.integers(0, 1))
def test_zigzag(lengths, cp, tail):
    """Rank r holds chunks r and 2·CP − 1 − r of each segment, in this order."""
    layout = make(lengths, cp, tail)
    for rank in range(cp):
        expected, start = [], 0
        for length in layout.segment_lengths:
            chunk = length // (2 * cp)
            for index in (rank, 2 * cp - 1 - rank):
                expected += range(start + index * chunk, start + (index + 1) * chunk)
            start += length
        assert layout.local_positions(rank).tolist() == expected


@settings(deadline=None)
@given(lengths, cp_sizes, st.integers(0, 2))
def test_packing_and_targets(lengths, cp, tail):
    layout, rows = make(lengths, cp, tail), rows_of(lengths)
    packed = layout.pack_rows(rows)
    targets = layout.next_of(packed)
    for row, (start, length) in enumerate(zip(layout.starts.tolist(), lengths, strict=True)):
        assert torch.equal(packed[start : start + length], rows[row, :length])
        assert torch.equal(targets[start : start + length - 1], rows[row, 1:length])
        assert layout.position_ids[start : start + length].tolist() == list(range(length))
    assert int((packed != 0).sum()) == sum(lengths)
    assert int(layout.has_target.sum()) == sum(lengths) - len(lengths)
    # Values that each position computes for its target return to the row of that target.
    back = layout.unpack_next_token(targets, rows.shape[1], fill=0)
    assert torch.equal(back, rows[:, 1:])


def test_cumulative_lengths_may_include_the_tail():
    true, padded = torch.tensor([0, 3, 8]), torch.tensor([0, 4, 16])
    layout = PackLayout.from_cu_seqlens(true, padded, total=16)
    assert layout.lengths == (3, 5)
    assert layout.padded_lengths == (4, 12)
    assert PackLayout.from_cu_seqlens(padded, None, total=20).segment_lengths == (4, 12, 4)


def test_lengths_that_do_not_fit():
    with pytest.raises(ValueError, match="multiples of 4"):
        PackLayout((3,), (6,), 6, cp_size=2)
    with pytest.raises(ValueError, match="but its padded length is"):
        PackLayout((5,), (4,), 4)
    with pytest.raises(ValueError, match="but the pack has only 4"):
        PackLayout((5,), (8,), 4)
