"""Tests of packs and their ranks: no row is lost, no pack is too full, and ranks are as balanced as exhaustive
search."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.distributed.bin_packing import assign, best_fit_decreasing, pack, spread_by_cost

SIZES = st.lists(st.integers(1, 20), min_size=1, max_size=30)


@settings(deadline=None)
@given(SIZES, st.integers(1, 6), st.floats(1.5, 200))
def test_pack(sizes, ranks, attention_length):
    costs = [n * (1 + n / attention_length) for n in sizes]
    shards = pack(sizes, costs, 24, ranks)
    assert sorted(unit for bins in shards for box in bins for unit in box) == list(range(len(sizes)))
    assert len({len(bins) for bins in shards}) == 1
    bins = [box for shard in shards for box in shard]
    assert all(sum(sizes[unit] for unit in box) <= 24 for box in bins)
    fewest = len(best_fit_decreasing(sizes, 24))
    assert len(bins) == -(-fewest // ranks) * ranks, "no more bins than the ranks' number asks for"
    assert all(bins) or len(bins) > len(sizes), "empty ones only where there are not enough units"
    assert pack(sizes, costs, 24, ranks) == shards


@settings(deadline=None)
@given(SIZES)
def test_best_fit_decreasing_is_within_its_bound(sizes):
    """At most 11/9 of the optimum and one more (Johnson 1974); the optimum is at least the sum over the capacity."""
    bins = best_fit_decreasing(sizes, 24)
    halves = sum(n > 12 for n in sizes)  # no two of these share a bin
    assert max(-(-sum(sizes) // 24), halves) <= len(bins) <= 11 / 9 * 2 * max(sum(sizes) / 24, halves, 1) + 1


@settings(deadline=None)
@given(st.lists(st.floats(0, 9.7), min_size=2, max_size=24), st.integers(2, 5))
def test_ranks_differ_by_less_than_a_bin(costs, count):
    """Joining never widens a gap: the last one is at most the widest among `count` neighbours in order of cost."""
    costs = costs[: len(costs) // count * count]
    ranks = assign([[i] for i in range(len(costs))], costs, count)
    assert [len(rank) for rank in ranks] == [len(costs) // count] * count
    loads = [sum(costs[unit] for box in rank for unit in box) for rank in ranks]
    ordered = sorted(costs)
    gaps = [ordered[i + count - 1] - ordered[i] for i in range(0, len(ordered), count)]
    assert max(loads) - min(loads) <= max(gaps, default=0) + 1e-9


def test_two_ranks_are_nearly_as_even_as_they_can_be():
    """Compare with all divisions of twelve bins into two halves of equal number: 3 % on average (found: 2.2)."""
    rng = random.Random(0)
    excess = []
    for _ in range(50):
        costs = [rng.lognormvariate(0, 0.7) for _ in range(12)]
        ranks = assign([[i] for i in range(12)], costs, 2)
        worst = max(sum(costs[u] for box in rank for u in box) for rank in ranks)
        halves = [sum(costs[i] for i in half) for half in itertools.combinations(range(12), 6)]
        excess.append(worst / min(max(half, sum(costs) - half) for half in halves) - 1)
    assert sum(excess) / len(excess) < 0.03


def test_spreading_says_when_it_cannot():
    assert spread_by_cost([10, 10, 10], [1.0, 1.0, 1.0], 15, 2) is None
    assert sorted(map(len, spread_by_cost([10, 5, 5], [1.0, 0.1, 0.1], 15, 2))) == [1, 2]


def test_one_record_that_fits_nowhere():
    with pytest.raises(ValueError, match="a record of 25 padded tokens does not fit a pack of 24"):
        pack([3, 25], [1.0, 2.0], 24, 1)


@pytest.mark.parametrize("ranks", [1, 4])
def test_no_bin_is_left_with_the_remainder(ranks):
    """Bins are evenly full also if the least possible number of bins is used; full bins and a remainder would be
    unbalanced."""
    bins = [box for rank in pack([100] * 64, [100.0] * 64, 2000, ranks) for box in rank]
    assert [len(box) for box in bins] == [16] * 4
    rng = random.Random(0)
    sizes = [rng.randrange(10, 200) for _ in range(64)]
    shards = pack(sizes, [float(n) for n in sizes], 2000, ranks)
    loads = [sum(sizes[unit] for unit in box) for bins in shards for box in bins]
    assert max(loads) - min(loads) <= 0.02 * sum(loads) / len(loads)


def test_full_bins_take_smaller_units_again():
    """The cheapest bin is too full for the third unit, not for the last one."""
    size, cost = [9, 6, 5, 1], [4.0, 3.0, 5.0, 1.0]
    assert spread_by_cost(size, cost, 11, 2) == [[2, 1], [0, 3]]
