"""Tests of shared prefixes: the trees, the positions of tokens, and unchanged numbers."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_cases import make_config
from ports import free_port
from prefix_cases import dpo_config, grpo_config, make_groups, make_pairs, padded
from simulated_cases import config_of, in_processes, prepare_real_process, real_rank
from small_models import and_long

from mcore_rl.config import DPOConfig
from mcore_rl.data.batching import MicrobatchPlanner
from mcore_rl.data.prefix_plan import PrefixForest
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.distributed.packs import LossPositions, PackLayout, PrefixLayout, PrefixTree, slice_context_parallel
from mcore_rl.simulation.sequences import Sequences
from mcore_rl.simulation.step import simulate_rank
from mcore_rl.testing.layout_check import ParallelLayout, compare, compute_layout_result, table_row
from mcore_rl.testing.processes import run_processes

# Few different tokens, so that rows begin alike, are equal, or are beginnings of one another.
ROWS = st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=12), min_size=1, max_size=6)


@settings(deadline=None)
@given(st.lists(ROWS, min_size=1, max_size=3), st.sampled_from([1, 2, 3]), st.integers(0, 1))
def test_layouts_of_trees(units, cp, tail):
    trees, rows = [], []
    for unit in units:
        trees.append(PrefixForest(*padded(unit)).cheapest(range(len(unit)), lambda before, length: length + 2))
        rows += unit
    ids, lengths = padded(rows)
    multiple = 2 * cp if cp > 1 else 1
    forest = PrefixTree.forest(trees)
    layout = PrefixLayout.of(forest, cp, multiple, forest.padded_size(multiple) + tail * multiple)
    assert layout.row_lengths == tuple(lengths)
    packed = layout.pack_rows(ids)
    index, valid = layout.token_table(ids.shape[1])
    assert torch.equal(torch.where(valid, packed[index], 0), ids)
    assert torch.equal(layout.position_ids[index][valid], torch.arange(ids.shape[1]).expand_as(ids)[valid])
    before = layout.predictor[index]
    assert (before[:, 0] == -1).all()
    assert torch.equal(before[:, 1:][valid[:, 1:]], index[:, :-1][valid[:, 1:]])
    held = torch.cat([layout.local_positions(rank) for rank in range(cp)])
    assert sorted(held.tolist()) == list(range(layout.total))
    check_keys(layout, index, valid, cp)


def check_keys(layout, index, valid, cp):
    """A real token sees itself and the earlier tokens of its row, and nothing else."""
    rows_of = {}
    for row, (places, there) in enumerate(zip(index.tolist(), valid.tolist(), strict=True)):
        for column, (place, real) in enumerate(zip(places, there, strict=True)):
            if real:
                rows_of[place] = (row, column)
    for rank in range(cp):
        queries, keys, seen = layout.visible_keys(rank)
        local = slice_context_parallel(torch.arange(layout.total), layout, rank).tolist()
        assert sum(queries) == len(local)
        first_query = first_key = 0
        for count, visible in zip(queries, keys, strict=True):
            chunk = seen[first_key : first_key + visible].tolist()
            for offset, query in enumerate(local[first_query : first_query + count]):
                if query in rows_of:
                    row, column = rows_of[query]
                    causal = chunk[: visible - count + offset + 1]
                    assert causal == index[row, : column + 1].tolist()
            first_query, first_key = first_query + count, first_key + visible


def test_a_filler_is_no_wider_than_what_it_stands_beside():
    """One group for two ranks, in packs of one width: the filler is a whole unit with its shared rows.

    The rows are equal, so that dividing them would give no rank less work.
    """
    ids = torch.tensor([[1] * 12 + [2]] * 4)
    data = BatchedDataDict(input_ids=ids, input_lengths=torch.full((4,), 13), sample_mask=torch.ones(4))
    batching = MicrobatchPlanner(True, 64, 1, 1, dp_size=2, one_width=True, rows_per_group=4, min_shared=4)
    (real,), (filler,) = (batching.microbatches(data, rank) for rank in (0, 1))
    assert sorted([real.counts, filler.counts]) == [False, True]
    assert real.layout.total == filler.layout.total == 13


@settings(deadline=None)
@given(ROWS, st.integers(1, 13))
def test_a_pack_holds_its_rows_in_the_order_of_its_data(rows, min_shared):
    """Also where rows begin alike and nothing is shared: too few tokens, or one row is the beginning of another."""
    ids, lengths = padded(rows)
    data = BatchedDataDict(input_ids=ids, input_lengths=torch.tensor(lengths), sample_mask=torch.ones(len(rows)))
    batching = MicrobatchPlanner(True, 128, 1, 1, rows_per_group=len(rows), min_shared=min_shared)
    (microbatch,) = batching.microbatches(data, 0)
    layout = microbatch.layout
    assert layout.row_lengths == tuple(lengths[row] for row in microbatch.rows)
    index, valid = layout.token_table(ids.shape[1])
    assert torch.equal(
        torch.where(valid, layout.pack_rows(microbatch.data["input_ids"])[index], 0), ids[microbatch.rows]
    )


def test_rows_that_begin_alike_and_share_nothing_have_the_gradients_of_unshared_rows(model_of):
    rows = [[5, 6, 7, 8], [9, 10], [5, 11, 12, 13, 14], [20, 21, 22], [20, 21, 22], [30, 31, 32, 33]]
    ids, lengths = padded(rows)
    data = BatchedDataDict(
        input_ids=ids, input_lengths=torch.tensor(lengths), token_mask=(ids > 0).float(), sample_mask=torch.ones(6),
        reference_policy_logprobs=torch.randn(ids.shape, generator=torch.Generator().manual_seed(3)) - 5,
    )  # fmt: skip
    config = make_config(model_of("llama"))
    shared = ParallelLayout(prefix=True).apply(config)
    one, other = (
        run_processes(compute_layout_result, c, copy.deepcopy(data), 1, world_size=1)[0] for c in (config, shared)
    )
    difference = compare(other, one)
    assert difference.within(), table_row(ParallelLayout(prefix=True), difference)


def test_passages_are_the_segments_of_each_row():
    """The counts of segments, added up over each row's segments, are the row's number of tokens."""
    forest = PrefixTree(lengths=(4, 2, 3, 5), parents=(-1, 0, 0, -1), ends=(1, 2, 0, 3, 2))
    layout = PrefixLayout.of(forest, 2, 4, 32)
    row, segment = layout.passages
    tokens = torch.bincount(layout.segment_of_token, minlength=5)
    assert tokens.tolist() == [4, 2, 3, 5, 18], "padding has the last number"
    assert torch.zeros(5, dtype=torch.long).index_add(0, row, tokens[segment]).tolist() == list(layout.row_lengths)
    apart = PackLayout.pack((4, 2, 3), 2, 4)
    assert apart.passages.tolist() == [[0, 1, 2]] * 2
    assert torch.bincount(apart.segment_of_token).tolist() == [4, 2, 3, 3]


def test_columns_of_predicted_tokens_come_from_a_row_that_counts_them():
    """Three rows share two tokens, which one of them counts: a sampling mask is there in that row alone."""
    layout = PrefixLayout.of(PrefixTree(lengths=(3, 1, 1, 1), parents=(-1, 0, 0, 0), ends=(1, 2, 3)), 1, 1)
    mask = torch.tensor([[0.0, 0, 1], [1, 1, 1], [0, 0, 0]])
    positions = LossPositions.of(layout, mask, 0)
    assert positions.outputs().tolist() == [5, 6, 3, 7]
    assert positions.tokens.tolist() == [1, 2, 3, 4]


def test_a_group_too_large_for_a_pack_is_cut():
    """Eight responses of 6 tokens to a prompt of 10, in packs of 30: each of three packs has the prompt."""
    prompt = list(range(1, 11))
    rows = [[*prompt, *[11 + i] * 6] for i in range(8)]
    ids, lengths = padded(rows)
    data = BatchedDataDict(input_ids=ids, input_lengths=torch.tensor(lengths), sample_mask=torch.ones(8))
    batching = MicrobatchPlanner(True, 30, 1, 1, rows_per_group=8, min_shared=4)
    microbatches = batching.microbatches(data, 0)
    assert sorted(row for m in microbatches for row in m.rows) == list(range(8))
    assert all(m.layout.total <= 30 for m in microbatches)
    assert sum(m.layout.total for m in microbatches) == 8 * 6 + len(microbatches) * 10
    lengths, before = batching.pieces(data)
    assert len(microbatches) == 3
    assert sum(lengths) == 8 * 6 + 3 * 10
    assert sum((b + n) ** 2 - b**2 for n, b in zip(lengths, before, strict=True)) == 8 * (16**2 - 10**2) + 3 * 100


# ------------------------------------------------------------------ numbers


LAYOUTS = [
    ParallelLayout(prefix=True),
    ParallelLayout(prefix=True, cp=2),
    ParallelLayout(prefix=True, tp=2, sp=True),
    ParallelLayout(prefix=True, pp=2),
    ParallelLayout(prefix=True, dp=2, tokens_per_pack=128),
]
CASES = {"pairs": (dpo_config, make_pairs), "groups": (grpo_config, make_groups)}


@pytest.fixture(scope="module")
def unshared(model_of):
    made = {}

    def get(case, family):
        if (case, family) not in made:
            config, data = ParallelLayout().apply(CASES[case][0](model_of(family))), CASES[case][1]()
            made[case, family] = run_processes(compute_layout_result, config, data, 2, world_size=1)[0]
        return made[case, family]

    return get


def check(layout, case, unshared, model_of, family="llama", **tolerances):
    config, data = layout.apply(CASES[case][0](model_of(family))), copy.deepcopy(CASES[case][1]())
    outcome = run_processes(compute_layout_result, config, data, 2, world_size=layout.world_size)[0]
    difference = compare(outcome, unshared(case, family))
    assert difference.within(**tolerances), table_row(layout, difference)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_shared_prompts_change_nothing(layout, case, unshared, model_of):
    check(layout, case, unshared, model_of)


@pytest.mark.long
@pytest.mark.parametrize(
    "layout", [ParallelLayout(prefix=True, cp=4), ParallelLayout(prefix=True, tp=2, cp=2, pp=2, sp=True)], ids=str
)
@pytest.mark.parametrize("case", CASES)
def test_shared_prompts_under_more_layouts(layout, case, unshared, model_of):
    check(layout, case, unshared, model_of)


@pytest.mark.long
@pytest.mark.every_case
@pytest.mark.parametrize(
    "layout",
    and_long(
        [ParallelLayout(prefix=True)],
        [ParallelLayout(prefix=True, cp=2), ParallelLayout(prefix=True, tp=2, sp=True)],
    ),
    ids=str,
)
@pytest.mark.parametrize("case", CASES)
def test_states_go_on_from_shared_prompts(layout, case, unshared, model_of):
    """Chunks of a delta net begin elsewhere than without shared prompts: see `tolerances` in test_layout_check."""
    check(layout, case, unshared, model_of, "qwen3_5", gradients=5e-4)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_states_by_channel_go_on_from_shared_prompts(case, unshared, model_of):
    check(ParallelLayout(prefix=True, cp=2), case, unshared, model_of, "kimi_linear")


@pytest.mark.parametrize(
    ("family", "layout"),
    and_long(
        [],
        [("nemotron_h_moe", ParallelLayout(prefix=True, cp=2))],
        [
            ("nemotron_h", ParallelLayout(prefix=True, tp=2, sp=True)),
            ("nemotron_h_moe", ParallelLayout(prefix=True, pp=2)),
        ],
    ),
    ids=str,
)
@pytest.mark.parametrize("case", CASES)
def test_states_of_mamba_go_on_from_shared_prompts(family, layout, case, unshared, model_of):
    check(layout, case, unshared, model_of, family)


def test_prompts_are_shared_there(model_of):
    """The cases above do have something in common: fewer tokens go through the model."""
    for make, rows_per_group in ((make_pairs, 2), (make_groups, 4)):
        data = make()
        lengths, before = MicrobatchPlanner(True, 256, 1, 1, rows_per_group=rows_per_group, min_shared=8).pieces(data)
        assert sum(lengths) < 0.8 * int(data["input_lengths"].sum())
        assert any(before)


@pytest.mark.parametrize(
    "layout", and_long([], [ParallelLayout(prefix=True, dp=2)], [ParallelLayout(prefix=True)]), ids=str
)
def test_a_simulated_step_shares_as_much_as_a_real_one(layout, model_of):
    config = layout.apply(config_of(model_of("llama"), DPOConfig, batch={"global_batch_size": 4}))
    sequences, port, size = Sequences((240,) * 4 + (99,) * 4, (60,) * 4 + (33,) * 4), free_port(), layout.world_size
    ranks = [(config, rank, size, port, sequences) for rank in range(size)]
    real, simulated = (
        in_processes(real_rank, *ranks, prepare=prepare_real_process),
        in_processes(simulate_rank, *[(*r[:3], sequences) for r in ranks]),
    )
    for one, other in zip(real, simulated, strict=True):
        assert (other.packs, other.tokens) == (one.packs, one.tokens)
        assert other.products["training"] == one.products["training"]
    assert sum(report.tokens[0] for report in simulated) == sum(sequences.lengths) - 2 * 180 - 2 * 66
