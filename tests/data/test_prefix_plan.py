"""Tests of the plan of common prefixes: the cheapest tree, the pieces that fit a pack, and even work for ranks."""

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prefix_cases import padded

from mcore_rl.data.batching import WHOLE_BATCH, MicrobatchPlanner
from mcore_rl.data.prefix_plan import PrefixForest, pieces_of, token_identities
from mcore_rl.distributed.packs import PrefixTree

# Few different tokens, so that rows begin alike, are equal, or are beginnings of one another.
ROWS = st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=12), min_size=1, max_size=6)
MULTIPLES, CONSTANTS = st.sampled_from([1, 2, 4]), st.sampled_from([0, 1, 3, 8])


def cost_of(multiple, attention_length, constant):
    def cost(before, length):
        padded_length = math.ceil(length / multiple) * multiple
        return padded_length * (1 + (2 * before + padded_length) / attention_length) + constant

    return cost


def planner(**options):
    values = {"packing": True, "tokens_per_pack": 10_000, "micro_batch_size": 1, "rows_per_unit": 1, **options}
    return MicrobatchPlanner(**values)


def cheapest(rows, cost):
    return PrefixForest(*padded(rows)).cheapest(range(len(rows)), cost)


def check_paths(tree, rows):
    """The path from the root to a row's end has the row's tokens; the tree has no other segments; it is depth first."""
    contents, used = {}, set()
    for row, end in zip(rows, tree.ends, strict=True):
        position = 0
        for segment in tree.path(end):
            tokens = tuple(row[position : position + tree.lengths[segment]])
            assert len(tokens) == tree.lengths[segment] > 0
            assert contents.setdefault(segment, tokens) == tokens
            position += len(tokens)
            used.add(segment)
        assert position == len(row)
    assert used == set(range(len(tree.lengths)))
    open_segments = [-1]
    for segment, parent in enumerate(tree.parents):
        while open_segments[-1] != parent:  # fails if the parent's descendants are not in one piece
            open_segments.pop()
        open_segments.append(segment)


@given(ROWS, MULTIPLES, CONSTANTS)
def test_cheapest_tree_has_the_rows_as_paths(rows, multiple, constant):
    check_paths(cheapest(rows, cost_of(multiple, math.inf, constant)), rows)


@given(ROWS)
def test_cheapest_tree_without_costs_of_segments_has_each_beginning_once(rows):
    beginnings = {tuple(row[: n + 1]) for row in rows for n in range(len(row))}
    assert sum(cheapest(rows, cost_of(1, math.inf, 0)).lengths) == len(beginnings)


def least_cost(rows, cost):
    """Return the least cost of any trees of `rows`, by trying all divisions into segments and branches."""

    def common(block):
        shortest = min(len(rows[row]) for row in block)
        alike = [len({rows[row][n] for row in block}) == 1 for n in range(shortest)]
        return alike.index(False) if False in alike else shortest

    @functools.cache
    def of_rows(block, start):
        if not block:
            return 0.0
        first, *others = sorted(block)
        best = math.inf
        for chosen in range(2 ** len(others)):
            joined = frozenset([first, *(row for n, row in enumerate(others) if chosen >> n & 1)])
            best = min(best, of_branch(joined, start) + of_rows(block - joined, start))
        return best

    @functools.cache
    def of_branch(block, start):
        """Return the least cost of rows that share a segment from column `start` on."""
        ends = range(start + 1, common(block) + 1)
        rest = (frozenset(row for row in block if len(rows[row]) > end) for end in ends)
        return min(
            (cost(start, end - start) + of_rows(*x) for end, *x in zip(ends, rest, ends, strict=True)), default=9e9
        )

    return of_rows(frozenset(range(len(rows))), 0)


@settings(deadline=None)
@given(ROWS.map(lambda rows: rows[:5]), MULTIPLES, CONSTANTS, st.sampled_from([math.inf, 20.0]))
def test_cheapest_tree_costs_as_little_as_any_tree(rows, multiple, constant, attention_length):
    cost = cost_of(multiple, attention_length, constant)
    tree = cheapest(rows, cost)
    total = sum(cost(before, length) for before, length in zip(tree.before, tree.lengths, strict=True))
    assert total == pytest.approx(least_cost([tuple(row) for row in rows], cost))


def test_forest_of_some_rows_equals_that_of_these_rows_alone():
    rows = [[1, 1, 2], [1, 1, 2, 2], [1, 2], [2], [1, 1, 2, 2], [1, 1, 1]]
    forest, cost = PrefixForest(*padded(rows)), cost_of(1, math.inf, 0)
    for chosen in ([0, 1], [4, 1], [5, 0, 3], [2], [3, 4, 2, 1]):
        tree, alone = forest.cheapest(chosen, cost), [rows[row] for row in chosen]
        check_paths(tree, alone)
        assert sum(tree.lengths) == sum(cheapest(alone, cost).lengths)


def test_rows_without_common_beginnings_are_segments_in_their_order():
    rows = [[2, 1], [1, 1, 1], [2, 2, 2, 2], [3]]
    assert cheapest(rows, cost_of(1, math.inf, 100)) == PrefixTree((2, 3, 4, 1), (-1,) * 4, (0, 1, 2, 3))


def test_rows_without_tokens_have_their_own_segment():
    tree = PrefixForest(torch.tensor([[1, 1], [0, 0], [1, 2]]), [2, 0, 2]).cheapest(range(3), cost_of(1, math.inf, 0))
    assert tree == PrefixTree((1, 1, 1, 0), (-1, 0, 0, -1), (1, 3, 2))


# ------------------------------------------------------------------ pieces


@given(ROWS, MULTIPLES, st.integers(1, 40), st.booleans())
def test_pieces_have_all_rows_and_fit(rows, multiple, capacity, in_pairs):
    size = 1 + in_pairs
    rows = rows[: len(rows) // size * size] or rows * 2
    forest, fewest = PrefixForest(*padded(rows)), cost_of(multiple, math.inf, 1e-6)
    pieces = pieces_of(forest.cheapest(range(len(rows)), cost_of(multiple, math.inf, 4)), multiple, capacity, size)
    assert sorted(row for piece in pieces for row in piece) == list(range(len(rows)))
    assert pieces == sorted(sorted(piece) for piece in pieces)
    for piece in pieces:
        assert len({row // size for row in piece}) * size == len(piece), "units stay together"
        tokens = forest.cheapest(piece, fewest).padded_size(multiple)
        assert tokens <= capacity or len(piece) == size


def test_pieces_repeat_a_prompt_as_often_as_needed():
    """Seven responses of 6 tokens to a prompt of 10, in packs of 30: three packs, not four as by halving."""
    rows = [[*range(1, 11), *[11 + i] * 6] for i in range(7)]
    tree = cheapest(rows, cost_of(1, math.inf, 4))
    assert sorted(map(len, pieces_of(tree, 1, 30))) == [1, 3, 3]


def test_rows_that_do_not_fit_with_padded_segments_are_alone():
    """A row of 8 tokens fits a pack of 8; its two segments of 4 + 4 tokens, padded to 8 each, do not."""
    rows = [[1] * 4 + [2] * 4, [1] * 4 + [3] * 4]
    assert pieces_of(PrefixTree((4, 4, 4), (-1, 0, 0), (1, 2)), 8, 8) == [[0], [1]]
    ids, lengths = padded(rows)
    (one,), (other,) = planner(tokens_per_pack=8, multiple=8, rows_per_group=2, min_shared=1).plan(lengths, ids)[0]
    assert {one, other} == {0, 1}


# ------------------------------------------------------------------ the planner


def test_rows_of_other_groups_share_prefixes_with_the_whole_batch_as_group():
    rows = [[*[7] * 20, *[group] * 9, answer] for group in (1, 2) for answer in (3, 4)]
    ids, lengths = padded(rows)
    data = {"input_ids": ids, "input_lengths": torch.tensor(lengths), "sample_mask": torch.ones(4)}
    for size, tokens in ((0, 120), (2, 62), (WHOLE_BATCH, 42)):
        found, _ = planner(rows_per_group=size, min_shared=4).pieces(_batch(data))
        assert sum(found) == tokens


def _batch(data):
    from mcore_rl.distributed.batched_data_dict import BatchedDataDict

    return BatchedDataDict(data)


def test_short_prefix_of_many_rows_is_stored_once():
    """20 tokens are worth a segment of their own for three rows, which saves 40 of them, but not for two rows."""
    rows = [[*[7] * 20, *[answer] * 30] for answer in range(3)]
    ids, lengths = padded(rows)
    for count, tokens in ((2, 100), (3, 110)):
        data = {"input_ids": ids[:count], "input_lengths": torch.tensor(lengths[:count])}
        assert sum(planner(rows_per_group=4).pieces(_batch(data))[0]) == tokens


def test_group_is_cut_so_that_ranks_have_even_work():
    """One group of eight rows for two ranks: four rows each, with the prompt on both, rather than a filler."""
    rows = [[*[7] * 20, *[answer] * 30] for answer in range(8)]
    ids, lengths = padded(rows)
    plan = planner(rows_per_group=8, dp_size=2, min_shared=4).plan(lengths, ids)
    assert sorted(len(row) for boxes in plan for row in boxes) == [4, 4]


def test_pairs_stay_together_if_prefixes_of_the_whole_batch_are_shared():
    rows = [[*[7] * 8, *[n] * 8] for n in (1, 2, 1, 3, 4, 5, 4, 6)]
    ids, lengths = padded(rows)
    batching = planner(rows_per_unit=2, rows_per_group=WHOLE_BATCH, min_shared=1, tokens_per_pack=32, dp_size=2)
    for boxes in batching.plan(lengths, ids):
        for box in boxes:
            assert len(box) % 2 == 0 and all(row ^ 1 in box for row in box)


# ------------------------------------------------------------------ recorded experts


def test_identities_differ_where_recorded_experts_differ():
    ids = torch.tensor([[1, 2, 3, 4]] * 4)
    experts = torch.arange(4 * 3 * 2).view(1, 4, 3, 2).short().repeat(4, 1, 1, 1)
    experts[1, 2, 0] = experts[1, 2, 0].flip(0)  # the same experts in another order count as others
    experts[2, 3] = -1
    identities = token_identities({"input_ids": ids, "routed_experts": experts})
    equal = identities == identities[0]
    assert equal.tolist() == [[True] * 4, [True, True, False, True], [True, True, True, False], [True] * 4]
    assert len(set(identities[0].tolist())) == 4
    assert torch.equal(token_identities({"input_ids": ids}), ids)
    other_ids = token_identities({"input_ids": ids + (torch.arange(4) == 1), "routed_experts": experts})
    assert ((other_ids == identities) == (torch.arange(4) != 1)).all()


def test_plans_with_and_without_recorded_experts_are_kept_apart():
    """Rows that agree in their tokens only are in one tree for the reference, and apart for the policy."""
    from mcore_rl.distributed.batched_data_dict import BatchShare, LocalBatch

    ids = torch.tensor([[1] * 40 + [row] for row in range(2)])
    columns = {"input_ids": ids, "input_lengths": torch.tensor([41, 41]), "sample_mask": torch.ones(2)}
    experts = torch.zeros(2, 41, 1, 1, dtype=torch.int16)
    experts[1, 0] = 1
    policy = LocalBatch({**columns, "routed_experts": experts}, BatchShare.whole(2))
    reference = policy.with_entries(columns)
    batching = planner(rows_per_group=2)
    for order in ((policy, reference), (reference, policy)):
        policy.plans.clear()
        widths = {len(data): batching.microbatches(data, 0)[0].layout.total for data in order}
        assert widths == {len(policy): 82, len(reference): 42}
        assert sum(batching.pieces(policy)[0]) == 82 and sum(batching.pieces(reference)[0]) == 42


def test_replica_without_rows_has_unknown_experts_in_its_filler():
    """The replica then has the same columns and plans as the others, and makes the same collective calls."""
    from mcore_rl.distributed.batched_data_dict import BatchShare, LocalBatch

    columns = {"input_ids": torch.zeros(0, 5, dtype=torch.long), "input_lengths": torch.zeros(0, dtype=torch.long),
               "sample_mask": torch.zeros(0), "routed_experts": torch.zeros(0, 5, 2, 3, dtype=torch.int16)}  # fmt: skip

    class OfThree(BatchShare):
        def most_packs(self, batching, packs, width):
            return 1, 8

    (filler,) = planner(rows_per_group=2).microbatches(LocalBatch(columns, OfThree((), 3)), 0)
    assert not filler.counts
    assert filler.data["routed_experts"].tolist() == [[[[-1] * 3] * 2]]
