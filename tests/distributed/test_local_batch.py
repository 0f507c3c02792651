"""Tests of replicas that have only their own rows of a batch: the same numbers as with all rows on every rank."""

import copy
import math
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from float32 import FORWARD, approx32
from layout_cases import make_config, make_data
from prefix_cases import dpo_config, grpo_config, make_groups, make_pairs
from small_models import and_long
from topologies import grid

from mcore_rl.algorithms import supervised
from mcore_rl.algorithms.build_loss import build_loss
from mcore_rl.data.batching import WHOLE_BATCH, MicrobatchPlanner, collate, global_valid_counts
from mcore_rl.data.token_store import TokenizedChunk, TokenSequence, collect
from mcore_rl.distributed import collectives
from mcore_rl.distributed.batched_data_dict import BatchedDataDict, BatchShare, LocalBatch, batch_share
from mcore_rl.distributed.collectives import (
    broadcast_lists_in_replica,
    broadcast_object_in_replica,
    gather_from_replicas,
    gather_items_on_rank_zero,
)
from mcore_rl.distributed.topology import Topology
from mcore_rl.errors import ContractError
from mcore_rl.losses.common import NLLLoss
from mcore_rl.models.megatron.families.mixtures import Experts, Mixtral
from mcore_rl.rollouts.samples import (
    Rollout,
    RolloutBatch,
    RolloutSummary,
    SummaryExchange,
    TokenColumn,
    exchange_rows,
    packed,
    unpacked,
)
from mcore_rl.testing.layout_check import ParallelLayout
from mcore_rl.testing.processes import WorkerError, run_cases, run_processes

# ------------------------------------------------------------------ what replicas tell each other


def shares():
    """Five rows: of replica 0 the rows 4 and 1, of replica 1 none, of replica 2 the others."""
    replicas = grid().data
    indices = [[4, 1], [], [0, 3, 2]][replicas.rank]
    share = BatchShare(indices, 5, replicas)
    values = torch.tensor([index / 7 for index in indices], dtype=torch.float64)
    appended = BatchShare.concatenated([2, 0, 3][replicas.rank], replicas)
    return (
        share.sum(float(values.sum()), 2**53 / 3), share.max(max(indices, default=-1), -replicas.rank),
        share.gather(values).tolist(), (list(appended.indices), appended.total),
    )  # fmt: skip


def rows_of_other_layouts():
    """Rows of all replicas, and rows that the processes hold and want in two ways; one holds none, one has none."""
    replicas = grid().data
    rank, indices = replicas.rank, [[4, 1], [], [0, 3, 2]][replicas.rank]
    ids = torch.tensor(indices)[:, None] * 10 + torch.arange([3, 1, 4][rank])
    columns = {"input_ids": ids.long(), "sample_mask": ids[:, 0] / 7}
    own: LocalBatch = LocalBatch(columns, BatchShare(indices, 5, replicas))
    held, wanted = [[0, 1, 2], [2, 3, 4], []][rank], [[3, 0], [1], [4, 2, 0, 3, 1]][rank]
    values = torch.tensor(held, dtype=torch.bfloat16)[:, None].expand(-1, 2)
    return (
        own.all_rows("input_ids", "sample_mask"),
        collectives.fetch_rows({"values": values}, held, wanted)["values"],
        collectives.broadcast_from_holder(None if rank == 0 else torch.full((2, 1), rank, dtype=torch.bfloat16)),
    )  # fmt: skip


def test_rows_travel_between_layouts():
    for rank, (whole, got, broadcast) in enumerate(run_processes(rows_of_other_layouts, world_size=3)):
        rows = torch.arange(5)
        expected = rows[:, None] * 10 + torch.arange(4)
        expected[[1, 4], 3] = 0  # the padding of replica 0
        assert torch.equal(whole["input_ids"], expected)
        torch.testing.assert_close(whole["sample_mask"], rows * 10 / 7)
        wanted = torch.tensor([[3, 0], [1], [4, 2, 0, 3, 1]][rank], dtype=torch.bfloat16)
        assert torch.equal(got, wanted[:, None].expand(-1, 2))
        assert torch.equal(broadcast, torch.ones(2, 1, dtype=torch.bfloat16))


def test_share_sum_and_max_cover_all_replicas():
    results = run_processes(shares, world_size=3)
    for rank, (sums, largest, everyone, appended) in enumerate(results):
        assert sums == [pytest.approx(10 / 7, rel=1e-15), 2**53]
        assert largest == [4, 0]
        assert everyone == [index / 7 for index in range(5)]
        assert appended == ([[0, 1], [], [2, 3, 4]][rank], 5)


def test_share_of_whole_batch_has_all_rows():
    share = batch_share(BatchedDataDict(a=torch.arange(3)))
    assert (list(share.indices), share.total, share.sum(0.7), share.max(-0.3)) == ([0, 1, 2], 3, [0.7], [-0.3])
    assert share.gather(torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)).tolist() == [0.1, 0.2, 0.3]
    with pytest.raises(ContractError, match="3 rows, but `share` has 2"):
        LocalBatch({"a": torch.arange(3)}, BatchShare([0, 1], 2))


def exchanged():
    """Two replicas of two ranks hold four and three of seven items, and request others."""
    topology = grid(width=2)
    own = {n: ["item", n, "x" * n] for n in range(7) if n % 2 == topology.data.rank} if topology.leads_replica else {}
    lists = [[7, 2**60], [], [-topology.data.rank]] if topology.leads_replica else []
    return (
        broadcast_object_in_replica(list(own.values()), topology), gather_items_on_rank_zero(own, [3, 0, 2], topology),
        gather_from_replicas(topology.data.rank + 0.5, topology), broadcast_lists_in_replica(lists, 3, topology),
    )  # fmt: skip


def test_replica_collectives_return_items_in_requested_order():
    for rank, (shared, first, told, numbers) in enumerate(run_processes(exchanged, world_size=4)):
        assert shared == [["item", n, "x" * n] for n in range(7) if n % 2 == rank // 2]
        assert first == ([["item", n, "x" * n] for n in (3, 0, 2)] if rank == 0 else [])
        assert told == [0.5, 1.5]
        assert numbers == [[7, 2**60], [], [-(rank // 2)]]


COLUMNS = [
    TokenColumn("ids", torch.long, padding=9),
    TokenColumn("logprobs", torch.float32),
    TokenColumn("experts", torch.int16, (3, 1), padding=-1),
]
LENGTHS = [3, 1, 5, 2, 4, 1, 2]


def token_rows(rows):
    """Rows are right-padded; the values of the padding do not matter."""
    width = max((LENGTHS[row] for row in rows), default=1) + 2
    generators = [torch.Generator().manual_seed(row) for row in rows]
    return {
        "ids": torch.stack([torch.randint(2**40, (width,), generator=g) for g in generators]),
        "logprobs": torch.stack([torch.randn(width, generator=g) for g in generators]),
        "experts": torch.stack([torch.randint(128, (width, 3, 1), generator=g).short() for g in generators]),
    } if rows else {}  # fmt: skip


def given_away(held_by, wanted):
    topology = grid(width=2)
    held = held_by[topology.data.rank] if topology.leads_replica else []
    return exchange_rows(token_rows(held), held, wanted, LENGTHS, COLUMNS, topology)


HELD_AND_WANTED = [
    ([[6, 0, 3], [1, 2, 4, 5]], [[5, 0, 6], [1, 4]]),
    ([[], [0, 1, 2, 3, 4, 5, 6]], [[2, 4, 6], [0, 1, 3, 5]]),
    ([[0, 1, 2], [3, 4, 5, 6]], [[], [0, 1, 2, 3, 4, 5, 6]]),
    ([[0], [5]], [[5], [0]]),
    ([[1], []], [[], [1]]),
]


def test_rows_of_replica_sends_each_row_to_the_replica_that_wants_it():
    cases = [(given_away, *case) for case in HELD_AND_WANTED]
    for (held_by, wanted), ranks in zip(HELD_AND_WANTED, run_cases(cases, world_size=4), strict=True):
        check_rows_of_replicas(held_by, wanted, ranks)


def check_rows_of_replicas(held_by, wanted, ranks):
    for rank, got in enumerate(ranks):
        rows = wanted[rank // 2]
        expected = {name: [] for name in got}
        for held in held_by:
            for name, values in token_rows(held).items():
                expected[name] += [(row, values[i, : LENGTHS[row]]) for i, row in enumerate(held)]
        assert list(got) == [column.name for column in COLUMNS]
        for column in COLUMNS:
            values, of_row = got[column.name], dict(expected[column.name])
            assert values.dtype == column.dtype
            assert values.shape == (len(rows), max((LENGTHS[row] for row in rows), default=1), *column.shape)
            for row, value in zip(rows, values, strict=True):
                assert torch.equal(value[: LENGTHS[row]], of_row[row])
                assert bool((value[LENGTHS[row] :] == column.padding).all())


def test_packed_refuses_column_of_wrong_shape():
    with pytest.raises(
        ContractError, match=r"experts must be torch.int16 of shape .*\(1, 3\)., got torch.int16 of shape"
    ):
        packed(token_rows([0]), [3], [replace(COLUMNS[2], shape=(1, 3))])
    assert unpacked(torch.zeros(0, 18, dtype=torch.uint8), [], COLUMNS)["experts"].shape == (0, 1, 3, 1)


class Unsendable(Exception):
    def __init__(self, one, other):
        super().__init__(f"{one} and {other}")


def settled(kind):
    """Rank 1's work fails in this way; rank 0's comes to something, rank 2 has none."""
    rank, work = torch.distributed.get_rank(), Future()
    if rank == 0:
        work.set_result("done")
    elif kind == "cancelled":
        work.cancel()
        work.set_running_or_notify_cancel()
    else:
        work.set_exception(Unsendable("this", "that") if kind == "unsendable" else ValueError("no"))
    try:
        return collectives.settle(work if rank < 2 else None, 0.1)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def test_settle_raises_the_error_of_one_rank_on_all():
    told = {
        "failed": "ValueError: no",
        "cancelled": "WorkerError: rank 1: the work was cancelled before its end",
        "unsendable": "WorkerError: rank 1: Unsendable: this and that",
    }
    results = run_cases([(settled, kind) for kind in told], world_size=3)
    assert results == [[message] * 3 for message in told.values()]


OUTCOMES = [
    RolloutSummary(
        prompt=2**50 + place, sample_id=2**51 + place, reward=reward, rewards=rewards, error=error,
        truncated=place == 1, turns=place, num_tokens=7 * place, response_length=3, longest_response=2,
        weight_versions=versions,
    )
    for place, (reward, rewards, error, versions) in enumerate([
        (0.1, {"a": 0.1}, None, [(3, 2), (4, 1)]),
        (-math.inf, {}, None, []),
        (2 / 3, {"b": -0.0, "c": 1e-300}, None, [(5, 3)]),
        (1.5, {"a": 1.5}, "the judge's\nown words: é", [(0, 1), (1, 1), (2, 1)]),
    ])
]  # fmt: skip


def told(wells, places_of):
    """Return whether texts were sent, for each of several steps."""
    topology, sent = grid(width=2), []
    telling = SummaryExchange(topology)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("gather_objects", "gather_objects_along"):
            original = getattr(collectives, name)
            patch.setattr(collectives, name, lambda *a, original=original: (sent.append(1), original(*a))[1])
        results = []
        for well in wells:
            chosen = [place for place in range(4) if not (well and OUTCOMES[place].error)]
            own = [place for place in places_of[topology.data.rank] if place in chosen]
            sent.clear()
            own = {chosen.index(place): OUTCOMES[place] for place in own}
            results.append((telling.everyones(own, len(chosen)), bool(sent)))
    return results


def test_telling_gives_every_rank_all_outcomes():
    """Texts travel with the first step, whose names of rewards are new, and with errors."""
    well = [outcome for outcome in OUTCOMES if not outcome.error]
    steps = [True, True, False, True]
    cases = [(told, steps, places_of) for places_of in ([[2, 0], [1, 3]], [[], [3, 2, 1, 0]])]
    for rank, results in (pair for ranks in run_cases(cases, world_size=4) for pair in enumerate(ranks)):
        assert [outcomes for outcomes, _ in results] == [well, well, OUTCOMES, well]
        first, again, with_error, last = (sent for _, sent in results)
        assert first and not again and not last
        assert with_error or rank % 2  # which hears of texts from the first rank of its replica


# ------------------------------------------------------------------ division


def divided(lengths, ids, batching, known):
    from mcore_rl.data.batching import divide

    replicas = grid().data
    own = None if known is None else known[replicas.rank]
    asked = []

    def tokens_of(rows):
        asked.extend(rows)
        return ids[list(rows)]

    return divide(batching, lengths, tokens_of, replicas, own), asked


@pytest.mark.parametrize("sharing", [False, True])
def test_divide_of_own_rows_equals_the_plan_of_the_whole_batch(sharing):
    data = make_groups()
    lengths, ids = data["input_lengths"].tolist(), data["input_ids"]
    batching = MicrobatchPlanner(True, 96, 1, 1, dp_size=3, rows_per_group=4 if sharing else 0, min_shared=8)
    expected = [sorted(row for box in boxes for row in box) for boxes in batching.plan(lengths, ids)]
    knowns = (None, [[0, 1, 2, 3], [8, 9, 10, 11, 12, 13, 14, 15], [4, 5, 6, 7]], [[], list(range(16)), []])
    cases = [(divided, lengths, ids, batching, known) for known in knowns]
    for known, results in zip(knowns, run_cases(cases, world_size=3), strict=True):
        assert [rows for rows, _ in results] == [expected] * 3
        told = [asked for _, asked in results]
        assert sorted(row for asked in told for row in asked) == (list(range(16)) if sharing else [])
        if known is not None and sharing:
            assert told == known


# ------------------------------------------------------------------ learning and scoring


def scored_and_trained(config, data, division):
    """Compare own rows with whole batches: scores (with their rows), metrics of a step, gradient norm."""
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config, total_steps=10, rows_per_unit=2 if config.algorithm == "dpo" else 1)
    replicas = policy.topology.data
    share = BatchShare(division[replicas.rank], data.size, replicas)
    own = LocalBatch(data.select_indices(share.indices), share)
    loss_fn = build_loss(config)
    whole_scores, own_scores = (policy.get_logprobs(rows)["logprobs"] for rows in (data, own))
    if config.algorithm == "grpo":
        for rows, scores in ((data, whole_scores), (own, own_scores)):
            for name in ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs"):
                rows[name] = scores * 0.98
    whole, evaluated = policy.evaluate(data, loss_fn), policy.evaluate(own, loss_fn)
    flops = policy.flops_of(data), policy.flops_of(own)
    halves = [data.slice(0, 4), data.slice(4, data.size)]
    first, second = (policy.forward(half, loss_fn, global_valid_counts(data)) for half in halves)
    in_parts = (first + second).metrics(loss_fn)
    for name, value in whole.items():
        assert in_parts[name] == approx32(value, FORWARD), name
    trained = policy.train(own, loss_fn)
    parts = trained.pop("all_mb_metrics")
    with pytest.raises(ContractError, match="the number of rows of all replicas"):
        policy.train(own, loss_fn, gbs=2)
    policy.shutdown()
    return whole_scores, (list(share.indices), own_scores), whole, evaluated, trained, parts, flops


def check_own_rows(config, data, layout, division, splits_groups=False):
    config = layout.apply(config)
    results = run_processes(scored_and_trained, config, copy.deepcopy(data), division, world_size=layout.world_size)
    for whole_scores, (indices, own_scores), whole, evaluated, trained, parts, flops in results:
        width = own_scores.shape[1]
        torch.testing.assert_close(own_scores, whole_scores[indices][:, :width], rtol=1e-5, atol=1e-5)
        for name, value in whole.items():
            assert evaluated[name] == approx32(value, FORWARD), name
            assert trained[name] == approx32(value, FORWARD), name
        assert sum(parts["num_valid_samples"]) == whole["num_valid_samples"]
        assert flops[1] == pytest.approx(flops[0]) or (splits_groups and flops[1] > flops[0])
    assert all(result[2:] == results[0][2:] for result in results), "the same on all ranks"


UNEVEN = [[2, 3, 8, 9, 0, 1, 10, 11, 4, 5], [6, 7]]
"""The second replica's rows do not count."""
NONE = [list(range(12)), []]
LAYOUTS = and_long(
    [
        ("llama", ParallelLayout(dp=2, tokens_per_pack=128), UNEVEN),
        ("llama", ParallelLayout(dp=2, pp=2, tokens_per_pack=128), NONE),
    ],
    [
        ("mixtral", ParallelLayout(dp=2, ep=2), NONE),
        ("llama", ParallelLayout(dp=2, packing=False), UNEVEN),
        ("llama", ParallelLayout(dp=2, packing=False), NONE),
        ("llama", ParallelLayout(dp=2, cp=2, tp=2, sp=True, tokens_per_pack=128), NONE),
        ("llama", ParallelLayout(dp=4), [[0, 1], [4, 5, 2, 3, 6, 7], [], [8, 9, 10, 11]]),
        ("deep", ParallelLayout(dp=2, pp=2, vpp=2, first=4, last=2, tokens_per_pack=128), NONE),
        ("qwen3_moe", ParallelLayout(dp=2, pp=2, ep=2), UNEVEN),
    ],
)


@pytest.mark.parametrize(("family", "layout", "division"), LAYOUTS, ids=str)
def test_policy_own_rows_equal_whole_batch(family, layout, division, model_of):
    check_own_rows(make_config(model_of(family)), make_data(), layout, division)


SPLIT = [[0, 1, 5, 6, 7, 12, 13, 14, 15], [2, 3, 4, 8, 9, 10, 11]]
"""Two rows of four groups of four are on both replicas."""


@pytest.mark.parametrize(
    ("config_of", "make", "division"),
    and_long(
        [(grpo_config, make_groups, SPLIT)],
        [
            (grpo_config, make_groups, [[], list(range(16))]),
            (dpo_config, make_pairs, [[4, 5, 0, 1], [2, 3, *range(6, 14)]]),
        ],
    ),
)
def test_policy_own_rows_with_shared_prefixes_equal_whole_batch(config_of, make, division, model_of):
    layout = ParallelLayout(prefix=True, dp=2, tokens_per_pack=128)
    check_own_rows(config_of(model_of("llama")), make(), layout, division, splits_groups=division is SPLIT)


def empty_batches(config):
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config, total_steps=10, rows_per_unit=2)
    data = make_data().select_indices([])
    policy.train(LocalBatch(data, BatchShare([], 0, policy.topology.data)), build_loss(config))


def missing_embeddings(config):
    """The second replica alone has a token behind the vocabulary, in a row that the first does not see."""
    from mcore_rl.models.policy.scoring import ScoringModel

    model = ScoringModel(config)
    replicas, tokens = model.topology.data, torch.tensor([[1, 2, model.hf_config.vocab_size]])
    model.check_tokens(
        LocalBatch({"input_ids": tokens[:, :2]}, BatchShare([replicas.rank], 2, replicas)), "critic.path"
    )
    own = tokens if replicas.rank == 1 else tokens[:0]
    model.check_tokens(LocalBatch({"input_ids": own}, BatchShare([0][: len(own)], 1, replicas)), "critic.path")


def test_check_tokens_raises_on_all_ranks_for_unknown_token(model_of):
    config = ParallelLayout(dp=2).apply(make_config(model_of("llama")))
    with pytest.raises(WorkerError) as error:
        run_processes(missing_embeddings, config, world_size=2)
    assert str(error.value).count("TrainingError: critic.path: ") == 2 and "which is not in the tokenizer" in str(
        error.value
    )


def test_train_refuses_batch_without_rows(model_of):
    config = ParallelLayout(dp=2).apply(make_config(model_of("llama")))
    with pytest.raises(WorkerError, match="ContractError: train: the batch has no rows"):
        run_processes(empty_batches, config, world_size=2)


def losses_of_a_token_that_is_not_finite(config, data, division):
    """Return the metrics of the loss on all rows, and on this replica's rows."""
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config, total_steps=10, rows_per_unit=2)
    with torch.no_grad():
        policy.model.chunks[0].embedding.word_embeddings.weight[249] = torch.nan
    replicas = policy.topology.data
    share = BatchShare(division[replicas.rank], data.size, replicas)
    said = []
    for rows in (data, LocalBatch(data.select_indices(share.indices), share)):
        with pytest.raises(FloatingPointError) as told:
            policy.train(rows, build_loss(config))
        said.append(str(told.value))
    policy.shutdown()
    return said


def test_train_names_row_of_global_batch_for_nan_loss(model_of):
    data = make_data()
    data["input_ids"][data["input_ids"] == 249] = 248
    data["input_ids"][10, 12], data["token_mask"][10, 13] = 249, 1
    config = ParallelLayout(dp=2, packing=False).apply(make_config(model_of("llama")))
    division = [list(range(8)), [8, 9, 10, 11]]
    for said in run_processes(losses_of_a_token_that_is_not_finite, config, data, division, world_size=2):
        assert all(": row 10 of the global batch, position" in told for told in said), said


# ------------------------------------------------------------------ the loops


class Units:
    """Pairs of a dataset that records which of them are read."""

    def __init__(self):
        generator = torch.Generator().manual_seed(4)
        chunk = TokenizedChunk()
        for n in torch.randint(1, 30, (9,), generator=generator).tolist():
            prompt = tuple(range(2, 2 + 40 * (n % 2) + 2))
            chunk.add(tuple(TokenSequence((*prompt, *[side] * m), (False,) * len(prompt) + (True,) * m)
                            for side, m in ((7, n), (8, 30 - n))))  # fmt: skip
        self.store, self.read = collect([chunk], 2), []

    def lengths_of(self, index):
        return self.store.lengths_of(index)

    def __getitem__(self, index):
        self.read.append(index)
        return self.store[index]


def batch_of_records(rows_per_group):
    from mcore_rl.algorithms.supervised import SupervisedTrainer
    from mcore_rl.data.batching import divide

    replicas, run = grid().data, object.__new__(SupervisedTrainer)
    batching = MicrobatchPlanner(True, 256, 1, 2, dp_size=replicas.size, rows_per_group=rows_per_group)
    run.inputs = SimpleNamespace(tokenizer=SimpleNamespace(pad_token_id=0))
    run.policy = SimpleNamespace(
        topology=SimpleNamespace(data=replicas), divide=lambda lengths, rows: divide(batching, lengths, rows, replicas)
    )
    units = Units()
    batch = run.local_batch(SimpleNamespace(units=units), [5, 3, 8, 0, 1, 7])
    return dict(batch.rows), list(batch.rows.share.indices), batch.indices, units.read


def test_own_rows_reads_and_builds_only_the_records_of_its_rank():
    """If any records may have common prefixes, the first replica reads all of them."""
    sizes = (0, 2, WHOLE_BATCH)
    for size, results in zip(sizes, run_cases([(batch_of_records, n) for n in sizes], world_size=3), strict=True):
        check_own_records(size, results)


def check_own_records(rows_per_group, results):
    whole = collate([Units().store[i] for i in (5, 3, 8, 0, 1, 7)], 0)
    assert sorted(row for _, indices, _, _ in results for row in indices) == list(range(12))
    for rank, (data, indices, own, read) in enumerate(results):
        assert own == [(5, 3, 8, 0, 1, 7)[row // 2] for row in indices[::2]]
        units = {0: range(0), 2: range(rank, 6, 3), WHOLE_BATCH: range(0 if rank else 6)}[rows_per_group]
        described = [(5, 3, 8, 0, 1, 7)[unit] for unit in units]
        assert read == [*described, *own], "and what it tells the others the sizes of"
        width = data["input_ids"].shape[1]
        assert width == int(data["input_lengths"].max())
        for name, values in data.items():
            expected = whole[name][indices]
            assert torch.equal(values, expected[:, :width] if expected.ndim > 1 else expected), name


class Evaluating:
    """A policy that stores the batches that it evaluates."""

    def __init__(self):
        self.topology, self.seen = Topology(), []

    def divide(self, lengths, tokens_of):
        return [list(range(len(lengths)))]

    def forward(self, rows, loss_fn, counts, temperature):
        from mcore_rl.models.policy.megatron_policy import MicrobatchResults

        self.seen.append((dict(rows), [float(count) for count in counts]))
        return MicrobatchResults()


def test_validate_on_loads_few_records_at_a_time(monkeypatch):
    monkeypatch.setattr(supervised, "VALIDATION_RECORDS", 4)
    added, current, units = [], [], Units()

    class Noting(supervised.Objective):
        def frozen_columns(self, batch):
            added.append(batch.indices)
            return {"reference": batch.rows["input_ids"] / 3}

        def current_columns(self, batch):
            current.append(batch.indices)
            return {}

    inputs = SimpleNamespace(tokenizer=SimpleNamespace(pad_token_id=0))
    run = supervised.SupervisedTrainer(None, inputs, Evaluating(), Noting(NLLLoss()))
    whole = collate([units.store[i] for i in range(9)], 0)
    for _ in range(2):
        run.validate_on("", Nine(units), 1)
    assert [len(part["input_ids"]) for part, _ in run.policy.seen] == [8, 8, 2] * 2
    for (part, counts), start in zip(run.policy.seen, (0, 8, 16) * 2, strict=True):
        assert counts == [float(count) for count in global_valid_counts(whole)]
        width = part["input_ids"].shape[1]
        assert torch.equal(part["input_ids"], whole["input_ids"][start : start + 8, :width])
        assert torch.equal(part["reference"], part["input_ids"] / 3)
    assert added == [[0, 1, 2, 3], [4, 5, 6, 7], [8]], "once"
    assert current == added * 2
    run.reference_moved()
    run.validate_on("", Nine(units), 2)
    assert len(added) == 6


class Nine:
    def __init__(self, units):
        self.units = units

    def __len__(self):
        return 9


def shared_out(rows_per_group, with_experts, led):
    """The first rollouts, of which each of two replicas has led some."""
    from mcore_rl.algorithms.grpo import GRPOTrainer
    from mcore_rl.data.batching import divide

    topology, run = grid(width=2), object.__new__(GRPOTrainer)
    batching = MicrobatchPlanner(True, 256, 1, 1, dp_size=2, rows_per_group=rows_per_group, min_shared=4)
    family = object.__new__(Mixtral)
    family.__dict__["layers_with_indexer"] = ()
    family.__dict__["experts"] = Experts(count=8, topk=2, width=1, sparse_layers=(True, False, True, True))
    train = SimpleNamespace(images_column=lambda indices: {})
    run.inputs = SimpleNamespace(tokenizer=SimpleNamespace(pad_token_id=3), train=train)
    run.critic = None
    run.config = SimpleNamespace(
        environment=SimpleNamespace(name="exact_match"),
        model=SimpleNamespace(moe_router_replay=with_experts, indexer_replay=False),
        rollouts=SimpleNamespace(train_global_batch_size=None, num_generations_per_prompt=1, reads_score_norms=False),
    )
    run.policy = SimpleNamespace(
        topology=topology,
        model=SimpleNamespace(family=family),
        divide=lambda lengths, rows, known: divide(batching, lengths, rows, topology.data, known),
    )
    known = make_rollouts(with_experts)[: sum(map(len, led))]
    own = {place: known[place] for place in led[topology.data.rank]} if topology.leads_replica else {}
    data, _ = run._share_out(1, RolloutBatch([rollout.outcome for rollout in known], own))
    return dict(data), list(data.share.indices), data.share.total


def make_rollouts(with_experts):
    """Experts are unknown at the last token, which the model has not read."""
    rollouts = []
    for n in range(10):
        prompt = [20 + n // 2] * 9
        tokens = [*prompt, *[n] * (1 + 7 * (n % 3))]
        mask = [False] * 9 + [True] * (len(tokens) - 9)
        texts = [{"role": "user", "content": "?"}]
        logprobs = [-m / 3 for m in mask]
        routed = [[[n, t % 8]] * 3 for t in range(len(tokens) - 1)]
        choices = {"routed_experts": torch.tensor(routed, dtype=torch.int16)} if with_experts else {}
        made = Rollout(n // 2, n, tokens, mask, logprobs, reward=n / 7, message_log=texts, choices=choices)
        rollouts.append(made)
    return rollouts


LED = [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9]]


def test_share_out_gives_each_sample_to_the_replica_that_trains_it():
    cases = [(0, True, LED), (2, False, LED), (0, True, [[], list(range(10))]), (0, True, [[], [0]])]
    results = run_cases([(shared_out, *case) for case in cases], world_size=4)
    for (_, with_experts, led), of_case in zip(cases, results, strict=True):
        check_shared_out(with_experts, led, of_case)


def check_shared_out(with_experts, led, results):
    count = sum(map(len, led))
    for name, values in results[0][0].items():
        assert torch.equal(values, results[1][0][name]), "a replica's ranks have the same"
    assert results[0][1] == results[1][1] and results[2][1] == results[3][1]
    assert sorted(results[0][1] + results[2][1]) == list(range(count))
    assert min(len(indices) for _, indices, _ in results) > 0 or count == 1
    known = make_rollouts(with_experts)
    for data, indices, total in results:
        assert total == count and ("routed_experts" in data) == with_experts
        width = max((len(known[place].input_ids) for place in indices), default=1)
        assert data["input_ids"].shape == (len(indices), width)
        for row, place in enumerate(indices):
            rollout = known[place]
            behind = width - len(rollout.input_ids)
            assert data["input_ids"][row].tolist() == [*rollout.input_ids, *[3] * behind]
            assert data["token_mask"][row].tolist() == [*rollout.token_mask, *[False] * behind]
            assert data["generation_logprobs"][row].equal(torch.tensor([*rollout.logprobs, *[0.0] * behind]))
            assert (int(data["input_lengths"][row]), float(data["sample_mask"][row])) == (len(rollout.input_ids), 1)
            if with_experts:
                unknown = [[[-1, -1]] * 3] * (behind + 1)
                assert data["routed_experts"][row].tolist() == [*rollout.choices["routed_experts"].tolist(), *unknown]
