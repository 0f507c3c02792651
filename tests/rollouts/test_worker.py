"""Tests of conversations that replicas run independently: equal to turn-by-turn generation, and judged meanwhile."""

import itertools
import math
import random
import statistics
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
from plain_values import plain
from pydantic import ValidationError
from small_models import and_long, make_tokenizer

from mcore_rl.config import GRPOAlgorithmConfig, GRPOConfig, build_config
from mcore_rl.data.datasets import Prompt
from mcore_rl.data.token_store import SampleOrder
from mcore_rl.environments.interfaces import Step
from mcore_rl.errors import TrainingError, UserError, WorkerError
from mcore_rl.models.generation.interfaces import Response, StreamingGeneration, output_of, prompts_of
from mcore_rl.rollouts.collector import (
    PromptStatistics,
    RolloutCollector,
    RolloutStatistics,
    rollout_metrics,
    staleness_metrics,
)
from mcore_rl.rollouts.samples import Rollout, RolloutBatch, RolloutSummary
from mcore_rl.testing.processes import run_processes

GROUP, LIMIT = 3, 24


class Engine(StreamingGeneration):
    """A stub whose response is a function of prompt and sample, and whose latency is anything."""

    max_sequence_length = LIMIT

    def __init__(self, fails_at=None):
        self.threads, self.fails_at, self.ended = ThreadPoolExecutor(8), fails_at, {}

    def submit(self, prompt, sample_id, group, greedy=False, images=()):
        assert prompt[: len(group)] == group
        return self.threads.submit(self._answer, prompt, sample_id, greedy)

    def _answer(self, prompt, sample_id, greedy, wait=True):
        drawn = random.Random(f"{[*prompt]} {sample_id} {greedy}")
        if wait:
            time.sleep(random.random() / 5)
        if sample_id == self.fails_at:
            raise TrainingError("no server is left")
        count = drawn.randint(1, min(6, LIMIT - len(prompt)))
        self.ended[sample_id] = time.monotonic()
        tokens = [drawn.randint(10, 90) for _ in range(count)]
        return Response(tokens, [-drawn.randint(0, 99) / 64 for _ in tokens], drawn.random() < 0.7, [(4, count)])

    def generate(self, data, greedy=False):
        rows = prompts_of(data, LIMIT)
        answers = [self._answer(prompt, sample_id, greedy, wait=False) for sample_id, prompt in rows]
        return output_of([prompt for _, prompt in rows], answers, 0)

    def prepare_for_generation(self, *args, **kwargs):
        return True

    def finish_generation(self, *args, **kwargs):
        return True


class Observing:
    """An environment that continues after responses with an even sum, and records the times of its calls."""

    def __init__(self):
        self.asked = []

    def submit(self, sample):
        self.asked.append(time.monotonic())
        future, total = Future(), sum(sample.completion_ids)
        going = total % 2 == 0
        reward = total / 7 + len(sample.message_log) / 3 + sample.record["extra"]
        answer = None if total % 7 == 0 else str(total % 3)
        observation = " and " if going else None
        future.set_result(Step(reward, not going, observation, rewards={"a": reward}, answer=answer))
        return future


def conversations(streams, fails_at=None, greedy=False):
    """Return prompts of 1 to 5 tokens in groups, one of them twice in a row; a replica is two ranks or one."""
    import torch.distributed as dist
    from topologies import grid

    from mcore_rl.rollouts.worker import RolloutWorker

    topology = grid(width=2 if dist.get_world_size() % 2 == 0 else 1)
    engine, environment = Engine(fails_at), Observing() if topology.leads_replica else None
    worker = RolloutWorker(engine, environment, make_tokenizer(), 3, 0.2, topology)
    worker.prepare(4)
    prompts = [(i, Prompt(tuple(range(20, 21 + i % 5)), "text", {"extra": i / 3})) for i in (5, 3, 3, 0, 4, 2, 1)]
    prompts = [prompt for prompt in prompts for _ in range(GROUP)]
    if not streams:
        type(worker).streams = False
    rollouts = worker.run(prompts, range(30, 30 + len(prompts)), greedy)
    worker.close()
    overlapped = environment is not None and streams and min(environment.asked) < max(engine.ended.values())
    return rollouts, len(environment.asked) if environment else 0, overlapped


def whole(of_ranks):
    """Return the rollouts of all ranks, in order; every rank has all summaries."""
    own = {place: rollout for rollouts in of_ranks for place, rollout in rollouts.own.items()}
    together = [own[place] for place in sorted(own)]
    assert all(list(rollouts.outcomes) == [rollout.outcome for rollout in together] for rollouts in of_ranks)
    return plain(together)


@pytest.mark.parametrize(("greedy", "sizes"), and_long([(False, (4,))], [(True, (1, 3, 4))]))
def test_conversations_are_the_same_turn_by_turn_and_each_by_itself(greedy, sizes):
    ((expected, judged, _),) = run_processes(conversations, False, None, greedy, world_size=1)
    expected = whole([expected])
    assert {r["turns"] for r in expected} == {1, 2, 3} and [r["sample_id"] for r in expected] == list(range(30, 51))
    assert all(r["rewards"]["a"] == pytest.approx(r["reward"]) for r in expected)
    for size in sizes:
        results = run_processes(conversations, True, None, greedy, world_size=size)
        assert whole([rollouts for rollouts, _, _ in results]) == expected
        assert sum(len(rollouts.own) for rollouts, _, _ in results) == len(expected), "tokens are where they were led"
        by_turns = run_processes(conversations, False, None, greedy, world_size=size)
        assert whole([rollouts for rollouts, _, _ in by_turns]) == expected
        assert sum(len(rollouts.own) for rollouts, _, _ in by_turns) == len(expected), "on first ranks alone"
        counts = [count for _, count, _ in results]
        assert sum(counts) == judged
        if size == 3:
            assert min(counts) > 0
        if size == 4:
            assert counts[1] == counts[3] == 0 and min(counts[0], counts[2]) > 0
        assert all(overlapped for (_, _, overlapped), count in zip(results, counts, strict=True) if count)


def test_a_failure_of_one_replica_is_every_ranks():
    with pytest.raises(WorkerError) as error:
        run_processes(conversations, True, 40, world_size=4)
    assert str(error.value).count("TrainingError: no server is left") == 4


def test_the_mean_of_each_of_several_rewards_is_over_those_that_it_applies_to():
    rewards = [{"a": 0.1, "b": 1.0}, {"a": 0.2}, {"a": 0.3, "b": -0.5}]
    rollouts = [Rollout(0, i, [1, 2], [False, True], [0.0, -1.0], rewards=named) for i, named in enumerate(rewards)]
    metrics = rollout_metrics([rollout.outcome for rollout in rollouts])
    assert (metrics["reward_a_mean"], metrics["reward_b_mean"]) == (pytest.approx(0.2), 0.25)
    assert not any(name.startswith("reward_a") for name in rollout_metrics([replace(rollouts[0], rewards={}).outcome]))


def drawn_outcomes(count):
    drawn = random.Random(3)
    for i in range(count):
        rewards = {name: drawn.gauss(0, 1) for name in "ab" if drawn.random() < 0.7}
        rollout = Rollout(i, i, [1] * 9, [True] * 9, [-0.1] * 9, reward=drawn.gauss(1e6, 0.3), rewards=rewards)
        made = replace(rollout.outcome, response_length=drawn.randint(1, 9), turns=drawn.randint(1, 3))
        yield replace(made, truncated=drawn.random() < 0.5, error="no" if drawn.random() < 0.2 else None)


def test_metrics_are_the_same_in_whatever_parts_samples_come():
    """The metrics do not depend on the parts, and equal those of two passes over all samples, although the mean is a
    million times the spread."""
    outcomes = list(drawn_outcomes(101))
    whole = rollout_metrics(outcomes)
    for size in (1, 7, 100):
        sums = RolloutStatistics()
        for first in range(0, len(outcomes), size):
            sums.add(outcomes[first : first + size])
        assert sums.metrics() == whole
    judged = [o for o in outcomes if o.error is None]
    assert whole["reward_mean"] == statistics.mean(o.reward for o in judged)
    assert whole["reward_std"] == pytest.approx(statistics.pstdev(o.reward for o in judged), rel=1e-12)
    for name in "ab":
        named = [o.rewards[name] for o in judged if name in o.rewards]
        assert whole[f"reward_{name}_mean"] == pytest.approx(statistics.mean(named), rel=1e-15)
    lengths = [o.response_length for o in outcomes]
    assert (whole["response_length_mean"], whole["response_length_max"]) == (statistics.mean(lengths), 9.0)
    assert whole["turns_mean"] == statistics.mean(o.turns for o in outcomes)
    assert whole["truncated_fraction"] == sum(o.truncated for o in outcomes) / 101
    assert whole["failed_fraction"] == sum(o.error is not None for o in outcomes) / 101
    assert (whole["reward_positive_fraction"], whole["num_samples"]) == (1.0, 101.0)


def test_rewards_whose_squares_no_float_holds_have_an_infinite_spread():
    large = [
        replace(outcome, reward=reward) for outcome, reward in zip(drawn_outcomes(2), (1e200, -1e200), strict=True)
    ]
    metrics = rollout_metrics(large)
    assert (metrics["reward_mean"], metrics["reward_std"]) == (0.0, math.inf)


def validated(prompts_per_step, generations=1):
    """Metrics of a validation set of 17 prompts of two sources, and the sample ids of each call."""
    from topologies import grid

    from mcore_rl.algorithms.grpo import GRPOTrainer
    from mcore_rl.rollouts.worker import RolloutWorker

    topology = grid(width=1)
    worker = RolloutWorker(Engine(), Observing(), make_tokenizer(), 3, 0.2, topology)
    run, asked, answer = object.__new__(GRPOTrainer), [], worker.run

    def noted(prompts, sample_ids, greedy):
        assert greedy == (generations == 1)
        assert [index for index, _ in prompts] == [number // generations for number in sample_ids]
        asked.append(list(sample_ids))
        return answer(prompts, sample_ids, greedy)

    worker.run = noted
    run.worker = worker
    options = GRPOAlgorithmConfig(
        num_prompts_per_step=prompts_per_step, num_generations_per_prompt=2, num_validation_generations=generations,
        validation_k=(1, 2, 4) if generations > 1 else None,
    )  # fmt: skip
    run.config = SimpleNamespace(rollouts=options)
    prompts = [Prompt(tuple(range(20, 21 + i % 5)), "text", {"extra": i / 3 - 50.0}) for i in range(17)]
    dataset = SimpleNamespace(prompts=prompts, source_of=lambda index: "even" if index % 2 == 0 else "odd")
    metrics = run.validate_on("", dataset, 3)
    worker.close()
    return metrics, asked


def test_a_validation_set_is_answered_in_parts():
    """Validate in batches of as many conversations as a step has, with the responses and metrics of a single batch."""
    ((whole, at_once),) = run_processes(validated, 100, world_size=1)
    ((metrics, asked),) = run_processes(validated, 3, world_size=1)
    assert at_once == [list(range(17))]
    assert asked == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11], [12, 13, 14, 15, 16]]
    assert metrics == whole and whole["num_samples"] == 17 and whole["reward_std"] > 0
    assert (whole["even/num_samples"], whole["odd/num_samples"]) == (9, 8)
    parts = 9 * whole["even/reward_mean"] + 8 * whole["odd/reward_mean"]
    assert parts == pytest.approx(17 * whole["reward_mean"])
    assert not any("@" in name for name in whole)


@pytest.mark.long
@pytest.mark.parametrize("processes", and_long([2], [1]))
def test_several_responses_to_each_validation_prompt(processes):
    """On two replicas each prompt's responses may be on both; every rank has the metrics."""
    ((expected, _),) = run_processes(validated, 100, 4, world_size=1)
    names = {f"{kind}@{k}" for kind in ("pass", "maj") for k in (1, 2, 4)}
    assert names <= set(expected) and {f"odd/{name}" for name in names} <= set(expected)
    assert 0 < expected["pass@1"] < expected["pass@2"] < expected["pass@4"] < 1
    assert expected["pass@1"] == pytest.approx(expected["reward_positive_fraction"])
    for metrics, asked in run_processes(validated, 5, 4, world_size=processes):
        assert metrics == expected
        assert [len(ids) for ids in asked] == [8] * 8 + [4]


def outcome(reward, error=None):
    return RolloutSummary(0, 0, reward, {}, error, False, 1, 3, 2, 2, [])


def test_pass_at_k_and_majorities_by_enumeration():
    generator, prompts = random.Random(4), []
    for size in (6, 6, 6, 3, 0):
        rewards = [generator.choice([0.0, 0.0, 1.0]) for _ in range(size)]
        prompts.append([(reward, "right" if reward else generator.choice(["a", "b", None])) for reward in rewards])
    prompts.append([(1.0, None)] * 6)
    statistics_of = PromptStatistics((1, 2, 3, 5, 6))
    for responses in prompts:
        failed = [outcome(0.0, "no judge")]
        statistics_of.add([outcome(reward) for reward, _ in responses] + failed, [a for _, a in responses] + ["right"])
    metrics = statistics_of.metrics()
    for k in (1, 2, 3, 5, 6):
        passed, voted = [], []
        for responses in (p for p in prompts if len(p) >= k):
            sets = list(itertools.combinations(responses, k))
            passed.append(sum(any(reward for reward, _ in chosen) for chosen in sets) / len(sets))
            blocks = [responses[i : i + k] for i in range(0, len(responses) - k + 1, k)]
            given = [[answer for _, answer in block if answer is not None] for block in blocks]
            votes = [statistics.mode(answers) if answers else None for answers in given]
            voted.append(votes.count("right") / len(votes))
        assert metrics[f"pass@{k}"] == pytest.approx(statistics.mean(passed))
        assert metrics[f"maj@{k}"] == pytest.approx(statistics.mean(voted))
    without = PromptStatistics((1,))
    without.add([outcome(1.0)], [None])
    assert without.metrics() == {"pass@1": 1.0}
    assert PromptStatistics((2,)).metrics() == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"validation_k": [1]},
            r"must be at most num_validation_generations, which is 1 \(greedy\); raise that number",
        ),
        ({"num_validation_generations": 4, "validation_k": [1, 8]}, "must be at most num_validation_generations"),
        ({"num_validation_generations": 4, "validation_k": []}, "must not be empty"),
    ],
)
def test_values_of_k_that_responses_do_not_suffice_for(options, message):
    with pytest.raises(ValidationError, match=f"validation_k: {message}"):
        GRPOAlgorithmConfig(**options)


# ------------------------------------------------------------------ ahead of training


def stale_config(tmp_path, *changes, **grpo):
    section = {"num_prompts_per_step": 3, "num_generations_per_prompt": 2, "max_new_tokens": 8, "max_staleness": 2}
    values = {
        "output_dir": str(tmp_path),
        "model": {"path": "model"},
        "data": {"train": "data.jsonl", "max_sequence_length": 40},
        "optimizer": {"lr": 1e-3},
        "trainer": {"max_steps": 6},
        "grpo": {**section, **grpo},
        "loss": {"use_importance_sampling_correction": True, "truncated_importance_sampling_ratio": 2.0},
        "generation": {"backend": "vllm"},
    }
    return build_config(GRPOConfig, values, changes, "here")


STALE_ERRORS = {
    "generation={}": "grpo.max_staleness: needs generation.backend=vllm",
    "grpo.dynamic_sampling_rounds=2": "leave out dynamic_sampling_rounds",
    "loss={}": "set loss.use_importance_sampling_correction=true and a loss.truncated_importance_sampling_ratio",
    "loss.truncated_importance_sampling_ratio=null": "and a loss.truncated_importance_sampling_ratio, such as 2",
    "loss.force_on_policy_ratio=true": "leave out loss.force_on_policy_ratio",
    "generation.max_token_mult_prob_error=1.5": "leave out generation.max_token_mult_prob_error",
    "generation.offload=true": "sleeping servers cannot generate during training; leave out generation.offload",
    "environment={name: reward_model, path: judge}": "a reward model judges in the training processes",
}


@pytest.mark.parametrize(("change", "message"), STALE_ERRORS.items())
def test_what_does_not_go_with_samples_of_older_weights(change, message, tmp_path):
    stale_config(tmp_path)
    with pytest.raises(UserError, match=message):
        stale_config(tmp_path, change)


class Notes:
    """A worker that records the start of each rollout, and answers with the weights of that time."""

    def __init__(self):
        self.begun, self.version, self.open = [], 0, 0

    def begin(self, prompts, sample_ids):
        self.open += 1
        self.begun.append((self.version, [index for index, _ in prompts], list(sample_ids)))
        return self.begun[-1]

    def collect(self, begun):
        self.open -= 1
        version, indices, sample_ids = begun
        return RolloutBatch.from_all_ranks([
            Rollout(index, sample_id, [1, 2, 3], [False, True, True], [0.0, -1.0, -2.0], reward=sample_id % 3 / 7,
                    weight_versions=[(version, 1), (self.version, 1)])
            for index, sample_id in zip(indices, sample_ids, strict=True)
        ])  # fmt: skip

    def run(self, prompts, sample_ids):
        return self.collect(self.begin(prompts, sample_ids))


def steps_of(config, tmp_path, first=1, position=0):
    """(indices, sample ids, versions, batches begun and not collected) of each step from `first` on."""
    inputs = SimpleNamespace(train=Prompts())
    policy = SimpleNamespace(is_writer=False)
    worker, taken = Notes(), []
    collector = RolloutCollector(config, inputs, policy, worker, print, steps=6)
    for step in range(first, 7):
        worker.version = step - 1
        rollouts, asked = collector.collect(step, position)
        position += asked
        metrics = staleness_metrics(rollouts.outcomes, step - 1)
        ids = [(o.prompt, o.sample_id) for o in rollouts.outcomes]
        taken.append((ids, metrics["staleness_max"], metrics["mixed_versions_fraction"], worker.open))
    assert worker.open == 0
    return taken


class Prompts:
    """A data set of 7."""

    prompts = tuple("abcdefg")

    def __len__(self):
        return 7

    def order(self, seed):
        return SampleOrder(7, seed)


@pytest.mark.parametrize("staleness", [1, 2, 9])
def test_steps_get_the_same_prompts_however_far_ahead_they_are_begun(staleness, tmp_path):
    now = steps_of(stale_config(tmp_path, max_staleness=0), tmp_path)
    ahead = steps_of(stale_config(tmp_path, max_staleness=staleness), tmp_path)
    assert [ids for ids, *_ in ahead] == [ids for ids, *_ in now]
    assert [age for _, age, *_ in now] == [0.0] * 6
    assert [age for _, age, *_ in ahead] == [float(min(step, staleness)) for step in range(6)]
    assert [mixed for _, _, mixed, _ in ahead] == [float(step > 0) for step in range(6)]
    assert [left for *_, left in ahead] == [min(staleness, 5 - step) for step in range(6)], "no more than is allowed"


def test_a_resumed_run_begins_what_was_in_flight_again(tmp_path):
    config = stale_config(tmp_path, max_staleness=2)
    whole, resumed = steps_of(config, tmp_path), steps_of(config, tmp_path, first=4, position=9)
    assert [ids for ids, *_ in resumed] == [ids for ids, *_ in whole[3:]]
    assert [age for _, age, *_ in resumed] == [0.0, 1.0, 2.0]


def begun_ahead():
    """Two batches under way at once, collected in their order."""
    from topologies import grid

    from mcore_rl.rollouts.worker import RolloutWorker

    topology = grid()
    worker = RolloutWorker(Engine(), Observing(), make_tokenizer(), 3, 0.2, topology)
    prompts = [(i, Prompt((20 + i,), "text", {"extra": 0})) for i in range(4)]
    begun = [worker.begin(prompts, range(4)), worker.begin(prompts[::-1], range(4, 8))]
    ahead = [worker.collect(one) for one in begun]
    worker.begin(prompts, range(8, 12))  # never collected, as at the end of a run that fails
    worker.close()
    type(worker).streams = False
    worker = RolloutWorker(Engine(), Observing(), make_tokenizer(), 3, 0.2, topology)
    worker.prepare(4)
    return ahead, [worker.run(prompts, range(4)), worker.run(prompts[::-1], range(4, 8))]


def test_batches_go_on_beside_each_other():
    ahead, by_turns = zip(*run_processes(begun_ahead, world_size=2), strict=True)
    for batch in range(2):
        together = whole([ranks[batch] for ranks in ahead])
        assert len(together) == 4 and together == whole([ranks[batch] for ranks in by_turns])
