"""Tests of several training sources, each with its share, and of several validation sets, each with its metrics."""

import contextlib
import importlib
import io
import json
from collections import Counter
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from float32 import FORWARD, approx32
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_cases import make_config
from small_models import and_long, make_model, make_tokenizer

from mcore_rl.config import DataConfig, DPOConfig, GRPOConfig, KTOConfig, SFTConfig, build_config
from mcore_rl.data.datasets import load_prompt_dataset
from mcore_rl.data.token_store import (
    PERIOD,
    MixedOrder,
    MixedTokenStore,
    TokenizedChunk,
    TokenSequence,
    collect,
    quotas_of,
)
from mcore_rl.errors import UserError
from mcore_rl.testing.layout_check import ParallelLayout
from mcore_rl.testing.processes import run_processes

# ------------------------------------------------------------ the order


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6))
def test_quotas_are_the_nearest_whole_numbers_that_fill_a_period(weights):
    quotas, total = quotas_of(weights), sum(map(Fraction, weights))
    assert sum(quotas) == PERIOD
    for quota, weight in zip(quotas, weights, strict=True):
        assert abs(quota - Fraction(weight) * PERIOD / total) < 1 + Fraction(1, 10**6)  # sums of floats are rounded


@pytest.mark.long
@settings(deadline=None, max_examples=3)
@given(
    st.lists(st.tuples(st.integers(1, 12_000), st.floats(0.05, 5)), min_size=2, max_size=4), st.integers(0, 2**31 - 1)
)
def test_a_mixture_repeats_and_skips_nothing_within_a_source(sources, seed):
    sizes, quotas = [size for size, _ in sources], quotas_of([weight for _, weight in sources])
    order = MixedOrder(sizes, quotas, seed)
    stream = order.indices(0, 2 * PERIOD)
    start = 0
    for size, quota in zip(sizes, quotas, strict=True):
        own = [i - start for i in stream if start <= i < start + size]
        assert len(own) == 2 * quota
        assert sum(start <= i < start + size for i in stream[:PERIOD]) == quota
        for begin in range(0, len(own), size):  # each pass has every record once
            assert len(set(own[begin : begin + size])) == min(size, len(own) - begin)
        start += size
    assert order.indices(PERIOD - 7, 14) == stream[PERIOD - 7 : PERIOD + 7], "a function of the position alone"
    assert stream != MixedOrder(sizes, quotas, seed + 1).indices(0, 2 * PERIOD) or max(sizes) == 1


def test_sources_are_mixed_from_the_start():
    order = MixedOrder((50, 50), quotas_of([3, 1]), seed=0)
    of_first = [sum(i < 50 for i in order.indices(k, 400)) for k in range(0, PERIOD, 400)]
    assert sum(of_first) == 3 * PERIOD // 4
    assert all(250 < count < 350 for count in of_first), "300 of 400, give or take"


# ------------------------------------------------------------ the store


def store_of(*lengths, rows=2):
    chunk = TokenizedChunk(counts=Counter(records=len(lengths)))
    for number, length in enumerate(lengths):
        units = tuple(TokenSequence((length, row, number), (False, True, True)) for row in range(rows))
        chunk.add(units, json.dumps([length, number]).encode())
    return collect([chunk], rows)


@pytest.mark.parametrize("rows", [1, 2])
def test_stores_follow_one_another(rows):
    stores = {"a": store_of(5, 6, 7, rows=rows), "b": store_of(8, rows=rows), "c": store_of(9, 9, rows=rows)}
    mixed, flat = (
        MixedTokenStore(stores, {"a": 1, "b": 1, "c": 2}),
        [unit for store in stores.values() for unit in store],
    )
    assert len(mixed) == 6 and list(mixed) == flat == mixed[:] and mixed[-1] == flat[-1]
    assert mixed.lengths().tolist() == [3] * 6 * rows and mixed.num_tokens == 18 * rows
    assert [json.loads(mixed.extra(i)) for i in range(6)] == [[5, 0], [6, 1], [7, 2], [8, 0], [9, 0], [9, 1]]
    assert mixed.counts["records"] == 6 and mixed.shares == {"a": 0.25, "b": 0.25, "c": 0.5}
    assert [mixed.source_of(i) for i in range(6)] == list("aaabcc") and stores["a"].source_of(0) is None
    paths = ({"x/a.jsonl": 1, "x/b c.jsonl": 1}, {"x/a.jsonl": 1, "y/a.jsonl": 1})
    labels = [MixedTokenStore(dict(zip(names, stores.values(), strict=False)), names).labels for names in paths]
    assert labels == [["a", "b_c"], ["x_a.jsonl", "y_a.jsonl"]]
    with pytest.raises(IndexError):
        mixed[6]


def test_what_a_mixture_is_tells_its_fingerprint():
    stores = {"a": store_of(5, 6), "b": store_of(8)}
    own = MixedTokenStore(stores, {"a": 1, "b": 3}).fingerprint
    assert own == MixedTokenStore({"x": stores["a"], "y": stores["b"]}, {"x": 2, "y": 6}).fingerprint
    assert own != MixedTokenStore(stores, {"a": 1, "b": 2}).fingerprint
    assert own != MixedTokenStore({"a": stores["b"], "b": stores["a"]}, {"a": 1, "b": 3}).fingerprint


def test_sources_that_would_never_be_met_are_refused():
    with pytest.raises(UserError, match=r"data\.train: no record of b is short enough"):
        MixedTokenStore({"a": store_of(5), "b": store_of()}, {"a": 1, "b": 1})
    with pytest.raises(UserError, match=r"data\.train: with its weight, a gets less than one of every 10,000 samples"):
        MixedTokenStore({"a": store_of(5), "b": store_of(5)}, {"a": 1e-6, "b": 1})


# ------------------------------------------------------------ runs


def test_the_best_metric_is_of_a_set_that_there_is(tmp_path):
    values = {"output_dir": str(tmp_path), "model": {"path": str(tmp_path)}, "trainer": {"validation_interval": 1}}
    values |= {"data": {"train": "a.jsonl", "validation": {"x": "a.jsonl", "y": "b.jsonl"}}}
    for metric in ("z/loss", "loss"):
        with pytest.raises(
            UserError, match=r"checkpoint\.best_metric: .* the name of a validation set \(x, y\), for example x/loss"
        ):
            build_config(SFTConfig, {**values, "checkpoint": {"best_metric": metric}}, [], "file")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"train": {}}, "data.train"),
        ({"train": {"a.jsonl": 0}}, "data.train.a.jsonl"),
        ({"train": {"a.jsonl": True}}, "data.train.a.jsonl"),
        ({"train": {"a.jsonl": "much"}}, "data.train.a.jsonl"),
        ({"train": []}, "data.train"),
        (
            {"train": "a.jsonl", "validation": {"a/b": "a.jsonl"}},
            "validation: the name 'a/b' of a set may contain only letters",
        ),
        ({"train": "a.jsonl", "validation": {"a": ""}}, "data.validation.a"),
    ],
)
def test_wrong_sources_are_told(tmp_path, data, message):
    values = {"output_dir": str(tmp_path), "model": {"path": str(tmp_path)}, "data": data}
    with pytest.raises(UserError) as told:
        build_config(SFTConfig, values, [], "file")
    assert message in str(told.value)


ANSWERS = {"one": ["ab", "ba", "abba"], "two": ["cc", "ccc", "abc", "ca", "b"], "three": ["a", "cab"]}


def records_of(kind, name):
    for number, answer in enumerate(ANSWERS[name]):
        prompt = {"prompt": f"say {name} {number} "}
        yield {
            SFTConfig: {**prompt, "completion": answer},
            DPOConfig: {**prompt, "chosen": answer, "rejected": answer + "a"},
            KTOConfig: {**prompt, "completion": answer, "label": number % 2 == 0},
            GRPOConfig: {**prompt, "answer": answer},
        }[kind]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a function that trains on named sources and returns the printed lines and the metrics of its steps."""
    root = tmp_path_factory.mktemp("mixture")
    model = make_model("llama", root / "model")
    numbers = iter(range(100))

    def trained(kind, train_on, validation, **sections):
        directory = root / f"run{next(numbers)}"
        directory.mkdir()
        for name in ANSWERS:
            lines = [json.dumps(record) + "\n" for record in records_of(kind, name)]
            (directory / f"{name}.jsonl").write_text("".join(lines))
        path = lambda name: str(directory / f"{name}.jsonl")  # noqa: E731
        values = {
            "output_dir": str(directory / "out"),
            "model": {"path": str(model)},
            "data": {
                "train": path(train_on)
                if isinstance(train_on, str)
                else {path(name): weight for name, weight in train_on.items()},
                "validation": path(validation)
                if isinstance(validation, str)
                else {name: path(source) for name, source in validation.items()},
                "max_sequence_length": 48,
            },
            "batch": {"global_batch_size": 4},
            "trainer": {"max_steps": 2, "validation_interval": 1},
            "checkpoint": {"export_hf": False},
            **sections,
        }
        if kind is GRPOConfig:
            values["environment"] = {"name": "exact_match"}
            values["grpo"] = {"num_prompts_per_step": 2, "num_generations_per_prompt": 2, "max_new_tokens": 4}
            del values["batch"]
        (said,) = run_processes(train, build_config(kind, values, [], "test"), world_size=1)
        lines = (directory / "out" / "metrics.jsonl").read_text().splitlines()
        return said.replace(str(directory), "."), {line["step"]: line for line in map(json.loads, lines)}

    return trained


def train(config):
    from mcore_rl.run import metrics

    program = importlib.import_module(f"mcore_rl.algorithms.{config.algorithm}")
    with contextlib.redirect_stdout(io.StringIO()) as said:
        metrics.console.file = said
        getattr(program, f"train_{config.algorithm}")(config)
    return said.getvalue()


def of_set(metrics, prefix):
    return {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}


@pytest.mark.long
def test_a_run_on_a_mixture_validates_every_set(run):
    mixture, sets = {"one": 3, "two": 1}, {"known": "one", "new": "three"}
    said, steps = run(SFTConfig, mixture, sets, checkpoint={"export_hf": False, "best_metric": "new/loss"})
    assert "train: 8 records" in said and "of the samples 0.75 from ./one.jsonl, 0.25 from ./two.jsonl" in said
    assert "validation known: 3 records" in said and "validation new: 2 records" in said
    assert "step 2  validation new: loss " in said and "validation_new/loss: " in said  # as it happens, and at the end
    assert f"best validation: new/loss {min(line['validation_new/loss'] for line in steps.values()):.4g}" in said
    for line in steps.values():
        counts = {name: line.get(f"{name}/num_unmasked_tokens", 0.0) for name in mixture}
        assert sum(counts.values()) == line["num_unmasked_tokens"] and counts["one"] > 0
        total = sum(count * line[f"{name}/loss"] for name, count in counts.items() if count)
        assert total == pytest.approx(line["loss"] * line["num_unmasked_tokens"], rel=1e-5)
        assert ("two/loss" in line) == (counts["two"] > 0), "a source without a record in the step has no metrics"
    for name, source in sets.items():
        _, alone = run(SFTConfig, mixture, source)
        for step in (1, 2):
            found, expected = (of_set(s[step], p) for s, p in ((steps, f"validation_{name}/"), (alone, "validation_")))
            assert found == expected and "loss" in found


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "sections"),
    [(DPOConfig, {"dpo": {"reference": "precompute"}}), (DPOConfig, {}), (KTOConfig, {}), (GRPOConfig, {})],
)
def test_every_algorithm_validates_every_set(run, kind, sections):
    sets = {"known": "one", "new": "three"}
    _, steps = run(kind, {"one": 1, "two": 1}, sets, **sections)
    count, mean = ("num_samples", "reward_mean") if kind is GRPOConfig else ("num_valid_samples", "loss")
    for line in (steps[1], steps[2]):
        found = {name: line.get(f"{name}/{count}", 0.0) for name in ("one", "two")}
        assert sum(found.values()) == line[count]
        total = sum(number * line[f"{name}/{mean}"] for name, number in found.items() if number)
        assert total == pytest.approx(line[mean] * line[count], rel=1e-5)
    for name, source in sets.items():
        _, alone = run(kind, {"one": 1, "two": 1}, source, **sections)
        for step in (1, 2):
            assert of_set(steps[step], f"validation_{name}/") == of_set(alone[step], "validation_") != {}


def loss_of_sources(config):
    from mcore_rl.algorithms.build_loss import build_loss
    from mcore_rl.algorithms.supervised import TrainingBatch, loss_by_source
    from mcore_rl.data.batching import collate, global_valid_counts
    from mcore_rl.distributed.batched_data_dict import LocalBatch
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy, units = MegatronPolicy(config, total_steps=1, rows_per_unit=2), mixed_pairs()
    whole = collate([units[i] for i in range(len(units))], 0)
    whole["reference_policy_logprobs"] = torch.linspace(-3, -1, whole["input_ids"].numel()).view(
        whole["input_ids"].shape
    )
    own = policy.own_rows(whole)
    records = [row // 2 for row in own.share.indices[::2]]
    batch = TrainingBatch(LocalBatch(own.data, own.share), SimpleNamespace(units=units), records, [])
    loss_fn = loss_by_source(build_loss(config), batch)
    metrics = policy.forward(batch.rows, loss_fn, global_valid_counts(batch.rows)).metrics(loss_fn)
    policy.shutdown()
    return metrics


def mixed_pairs():
    generator = torch.Generator().manual_seed(3)

    def response(size):
        ids = torch.randint(1, 250, (size,), generator=generator)
        return TokenSequence(tuple(ids.tolist()), (False,) * 2 + (True,) * (size - 2))

    stores = {}
    for name, count in (("data/one.jsonl", 5), ("data/two.jsonl", 3)):
        chunk = TokenizedChunk()
        for _ in range(count):
            chunk.add(tuple(map(response, torch.randint(3, 20, (2,), generator=generator).tolist())))
        stores[name] = collect([chunk], 2)
    return MixedTokenStore(stores, {name: 1 for name in stores})


LAYOUTS = and_long([ParallelLayout(dp=2)], [ParallelLayout(cp=2), ParallelLayout(pp=2)])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_metrics_of_a_source_are_those_of_its_records_alone(layout, model_of):
    config = make_config(model_of("llama"))
    metrics = run_processes(loss_of_sources, layout.apply(config), world_size=layout.world_size)[0]
    (whole,) = run_processes(loss_of_sources, config, world_size=1)
    assert metrics == approx32(whole, FORWARD)
    assert (metrics["one/num_valid_samples"], metrics["two/num_valid_samples"]) == (5, 3)
    for name in ("loss", "accuracy", "rewards_chosen_mean"):
        assert 5 * metrics[f"one/{name}"] + 3 * metrics[f"two/{name}"] == pytest.approx(8 * metrics[name], rel=1e-5)
    assert metrics["one/loss"] != metrics["two/loss"]


def test_sources_of_prompts(tmp_path):
    """A record's `data_source` names its source, in a mixture and alone; otherwise the file of a mixture does."""
    for name, own in (("one", ["math/level 1", "", None]), ("two", [3, "code"])):
        records = [{"prompt": f"{name} {n}", **({} if it is None else {"data_source": it})} for n, it in enumerate(own)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    one, two = (str(tmp_path / f"{name}.jsonl") for name in ("one", "two"))
    data, tokenizer = DataConfig(train=one, max_sequence_length=40), make_tokenizer()
    mixed, alone = (load_prompt_dataset(source, tokenizer, data, 30) for source in ({one: 1, two: 1}, two))
    assert [mixed.source_of(i) for i in range(5)] == ["math_level_1", "one", "one", "two", "code"]
    assert [alone.source_of(i) for i in range(2)] == [None, "code"]
