"""Tests of options that no other test covers: each has its documented effect."""

import io
import json
import sys
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import yaml
from float32 import FORMULA, FORWARD, approx32
from layout_cases import make_config, make_data
from rich.console import Console
from small_models import make_model, make_tokenizer
from transformers import LlamaConfig

from mcore_rl import platform
from mcore_rl.algorithms import grpo
from mcore_rl.algorithms.dpo import DPOObjective
from mcore_rl.algorithms.kto import KTOObjective
from mcore_rl.config import (
    DPOConfig,
    EnvironmentConfig,
    GRPOConfig,
    KTOConfig,
    ModelConfig,
    PPOConfig,
    SFTConfig,
    load_config,
)
from mcore_rl.data.batching import MicrobatchPlanner, divide
from mcore_rl.data.datasets import PromptDataset, StoredPrompts
from mcore_rl.data.token_store import SampleOrder, TokenizedChunk, TokenSequence, collect
from mcore_rl.distributed.batched_data_dict import BatchShare, LocalBatch
from mcore_rl.distributed.topology import Topology
from mcore_rl.environments.interfaces import Sample
from mcore_rl.environments.judge_processes import JudgeProcesses
from mcore_rl.errors import TrainingError, UserError
from mcore_rl.models.generation.megatron import generation as megatron_generation
from mcore_rl.models.megatron.checkpoint.load import Restored
from mcore_rl.models.megatron.model.hf_config import load_hf_config
from mcore_rl.rollouts.samples import Rollout, RolloutBatch
from mcore_rl.run import checkpoints as checkpointing
from mcore_rl.run import metrics, preflight, watchdog
from mcore_rl.run.checkpoints import RunCheckpoints
from mcore_rl.run.metrics import MetricsReporter, read_step_log
from mcore_rl.testing.layout_check import ParallelLayout
from mcore_rl.testing.processes import run_processes

GROUP, NUM_PROMPTS, DATASET_SIZE = 4, 6, 40


def load(config_type, tmp_path, overrides=(), **sections):
    config = {
        "output_dir": str(tmp_path),
        "model": {"path": "model"},
        "data": {"train": "data.jsonl", "max_sequence_length": 40},
        "optimizer": {"lr": 1e-3},
        "trainer": {"max_steps": 4},
        **sections,
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    return platform.resolve(load_config(config_type, tmp_path / "config.yaml", list(overrides)))


# ------------------------------------------------------------------ grpo.*: a step whose worker and policy take notes


class Worker:
    """Answers of ascending lengths; every other prompt's are all right, and teach nothing."""

    judging_seconds = 0.0

    def __init__(self, teaches=lambda prompt: prompt % 2 == 1):
        self.asked, self.teaches = [], teaches

    def prepare(self, weight_version):
        self.weight_version = weight_version

    def finish(self):
        pass

    def run(self, prompts, sample_ids, greedy=False):
        self.asked += [index for index, _ in prompts][::GROUP]
        return RolloutBatch.from_all_ranks(self.answers(prompts, sample_ids))

    def answers(self, prompts, sample_ids):
        return [
            Rollout(
                index, sample_id, [1] * (3 + n), [False, False] + [True] * (n + 1), [0.0, 0.0] + [-1.0] * (n + 1),
                reward=float(not self.teaches(index) or number % 2), truncated=n == 7,
                message_log=[{"role": "user", "content": str(index)}],
            )
            for number, ((index, _), sample_id) in enumerate(zip(prompts, sample_ids, strict=True))
            for n in [sample_id % 8]
        ]  # fmt: skip


class Policy:
    is_writer, reference, batching, topology = True, "weights", MicrobatchPlanner(True, 64, 1, 1), Topology()
    model = SimpleNamespace(family=None)

    def __init__(self):
        self.trained, self.skipped = [], 0

    def train_batch(self, data, loss_fn, temperature, check=None):
        metrics = {"loss": 0.0, "kl_penalty": 0.0, "logprob_error": 0.0, "token_mult_prob_error": 1.0}
        if check is not None:
            check(metrics | {"probs_ratio": 1.0})
        self.trained.append(data)
        return {**metrics, "probs_ratio": 1.0, "grad_norm": 0.0}

    def get_reference_policy_logprobs(self, data, temperature, counted_only):
        return {"reference_logprobs": 3 * data["generation_logprobs"]}

    def advance_schedule(self, steps):
        self.skipped += steps

    def get_logprobs(self, data, temperature, counted_only):
        return {"logprobs": data["generation_logprobs"]}

    def divide(self, lengths, tokens_of, known):
        return divide(self.batching, lengths, tokens_of, self.topology.data, known)

    def flops_of(self, data):
        return 0.0


def order(count):
    """The dataset's first prompts, in the order of a run, once for each response."""
    return [index for index in SampleOrder(DATASET_SIZE, 0).indices(0, count) for _ in range(GROUP)]


@pytest.fixture
def step(tmp_path):
    """A function that runs the first step with options of the `grpo` section; the run it belongs to."""

    def run(worker=None, loss=(), sections=(), **options):
        section = {"num_prompts_per_step": NUM_PROMPTS, "num_generations_per_prompt": GROUP, "max_new_tokens": 8}
        config = load(GRPOConfig, tmp_path, grpo={**section, **options}, loss=dict(loss), **dict(sections))
        chunk = TokenizedChunk()
        for _ in range(DATASET_SIZE):
            chunk.add((TokenSequence((1, 2), (False, False)),), b'{"prompt": "", "answer": "four"}')
        prompts = PromptDataset(StoredPrompts(collect([chunk], 1)))
        inputs = SimpleNamespace(train=prompts, validation={}, tokenizer=SimpleNamespace(pad_token_id=0))
        run = grpo.GRPOTrainer(config, inputs, Policy(), worker or Worker())
        run.reporter = MetricsReporter(config, False, 1, 1)
        run.metrics = run.train_step(1)
        return run

    return run


def test_dynamic_sampling_asks_on_until_every_group_has_signal(step):
    plain, dynamic = step(), step(dynamic_sampling_rounds=8)
    assert (len(plain.worker.asked), plain.consumed_samples) == (NUM_PROMPTS, NUM_PROMPTS)
    assert len(dynamic.worker.asked) == dynamic.consumed_samples > NUM_PROMPTS
    (data,) = dynamic.policy.trained
    assert data.size == NUM_PROMPTS * GROUP
    assert (data["advantages"][:, 0].view(NUM_PROMPTS, GROUP).std(dim=1) > 0).all()


def test_dynamic_sampling_ends_after_its_rounds(step):
    lucky = order(1)[0]
    one = step(Worker(lambda prompt: prompt == lucky), dynamic_sampling_rounds=3)
    assert one.policy.trained[0].size == GROUP
    assert len(one.worker.asked) == NUM_PROMPTS + 2 * (NUM_PROMPTS - 1)
    none = step(Worker(lambda prompt: False), dynamic_sampling_rounds=3)
    assert (none.policy.trained, none.metrics["skipped_update"]) == ([], 1)


def test_failed_samples_of_dropped_groups_count_as_failed(step, capsys):
    """Every other group is dropped, because three of its four samples failed."""

    class Failing(Worker):
        def answers(self, prompts, sample_ids):
            rollouts = super().answers(prompts, sample_ids)
            fails = [not self.teaches(rollout.prompt) and number % GROUP for number, rollout in enumerate(rollouts)]
            return [replace(r, error="down") if failed else r for r, failed in zip(rollouts, fails, strict=True)]

    run = step(Failing(), dynamic_sampling_rounds=8)
    asked = run.worker.asked
    dropped = sum(not run.worker.teaches(prompt) for prompt in asked)
    assert 0 < dropped < len(asked) and run.policy.trained[0].size == NUM_PROMPTS * GROUP
    failed, fraction = 3 * dropped, 3 * dropped / (GROUP * len(asked))
    assert (run.metrics["num_failed"], run.metrics["failed_fraction"]) == (failed, fraction)
    assert run.metrics["num_samples"] == NUM_PROMPTS * GROUP and run.metrics["skipped_update"] == 0
    assert f"step 1: {failed} samples could not be judged and count as failed; first: down" in capsys.readouterr().out
    limit = {"environment": {"max_failed_fraction": fraction - 0.01}}
    strict = step(Failing(), sections=limit, dynamic_sampling_rounds=8)
    assert (strict.policy.trained, strict.metrics["skipped_update"]) == ([], 1)
    told = f"{failed} of {GROUP * len(asked)} samples could not be judged, more than environment.max_failed_fraction="
    assert told in capsys.readouterr().out


def test_mask_truncated_leaves_out_responses_that_hit_the_limit(step):
    (kept,), (masked,) = step().policy.trained, step(mask_truncated=True).policy.trained
    truncated = torch.arange(NUM_PROMPTS * GROUP) % 8 == 7
    assert kept["sample_mask"].all()
    assert torch.equal(masked["sample_mask"] == 0, truncated)


def test_overlong_cache_length_takes_from_long_responses(step):
    (data,) = step(overlong_cache_length=4).policy.trained
    lengths = torch.arange(NUM_PROMPTS * GROUP) % 8 + 1.0
    worker = Worker()
    rewards = torch.tensor([r.reward for r in worker.answers([(i, None) for i in order(NUM_PROMPTS)], range(24))])
    shaped = rewards - ((lengths - 4) / 4).clamp(0, 1)
    groups = shaped.view(-1, GROUP)
    expected = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    torch.testing.assert_close(data["advantages"][:, 0], expected.flatten())


def test_the_limit_on_length_is_each_responses_own(step):
    """Two responses of 7 of 8 tokens each are long, not over the limit of one."""

    class TwoTurns(Worker):
        def answers(self, prompts, sample_ids):
            rollouts = super().answers(prompts, sample_ids)
            for rollout in rollouts:
                rollout.response_lengths = [7, 6]
            return rollouts

    worker = TwoTurns()
    (data,) = step(worker, overlong_cache_length=2, advantage_estimator="dr_grpo").policy.trained
    rewards = torch.tensor([r.reward for r in worker.answers([(i, None) for i in order(NUM_PROMPTS)], range(24))])
    groups = rewards.view(-1, GROUP) - 0.5
    torch.testing.assert_close(data["advantages"][:, 0], (groups - groups.mean(1, keepdim=True)).flatten())


@pytest.mark.parametrize(
    ("loss", "skipped"),
    [
        ({}, 1),
        ({"entropy_bonus": 0.01}, 0),
        ({"reference_policy_kl_penalty": 0.01}, 0),
        ({"positive_example_nll_weight": 0.1}, 0),
    ],
)
def test_without_signal_only_other_terms_are_trained(step, loss, skipped):
    """Rewards of 0.7 in groups of 4, whose mean is not 0.7 in fp32: advantages are exactly 0."""

    class Equal(Worker):
        def answers(self, prompts, sample_ids):
            rollouts = super().answers(prompts, sample_ids)
            for rollout in rollouts:
                rollout.reward = 0.7
            return rollouts

    run = step(Equal(), loss, num_updates_per_rollout=2)
    assert run.metrics["skipped_update"] == skipped
    assert run.policy.skipped == 2 * skipped, "the schedule goes on as if it had been trained"
    assert len(run.policy.trained) == 2 * (1 - skipped)
    assert not any(data["advantages"].any() for data in run.policy.trained)
    if "positive_example_nll_weight" in loss:
        assert (run.policy.trained[0]["num_positive_tokens"] == run.policy.trained[0]["token_mask"].sum()).all()


def test_all_truncated_is_nothing_to_learn(step):
    class Truncated(Worker):
        def answers(self, prompts, sample_ids):
            rollouts = super().answers(prompts, sample_ids)
            for rollout in rollouts:
                rollout.truncated = True
            return rollouts

    assert step(Truncated(), mask_truncated=True).metrics["skipped_update"] == 1


def test_kl_in_the_reward(step):
    """Sampler's log-probabilities are −1, the reference's −3 for each of n tokens: k1 is 2 a token."""
    options = {"advantage_estimator": "reinforce_plus_plus", "advantage_epsilon": 0.0}
    loss = {"use_kl_in_reward": True, "reference_policy_kl_penalty": 0.3, "kl_estimator": "k1"}
    run = step(Worker(), loss, **options)
    (data,) = run.policy.trained
    mask = data["token_mask"].double()
    rewards = torch.tensor([r.reward for r in Worker().answers([(i, None) for i in order(NUM_PROMPTS)], range(24))])
    left = mask.flip(1).cumsum(1).flip(1)  # tokens from here to the end
    returns = rewards.double()[:, None] - 0.3 * 2 * left
    values = returns[mask > 0]
    expected = torch.where(mask > 0, (returns - values.mean()) / values.std(unbiased=False), 0)
    torch.testing.assert_close(data["advantages"].double(), expected, rtol=1e-5, atol=1e-5)
    assert run.loss_fn.options.kl_in_loss is False


def test_force_on_policy_ratio_is_chosen_or_decided(step):
    assert step().loss_fn.force_on_policy_ratio is True
    assert step(num_updates_per_rollout=2).loss_fn.force_on_policy_ratio is False
    run = step(None, {"force_on_policy_ratio": False})
    assert run.loss_fn.force_on_policy_ratio is False
    assert "prev_logprobs" in run.policy.trained[0]
    with pytest.raises(UserError, match="force_on_policy_ratio: needs exactly one update"):
        step(None, {"force_on_policy_ratio": True}, num_updates_per_rollout=2)


def test_updates_per_rollout_and_logged_samples(step, tmp_path):
    run = step(num_updates_per_rollout=3, num_logged_samples=5)
    assert len(run.policy.trained) == 3
    assert all("prev_logprobs" in data for data in run.policy.trained)
    assert "prev_logprobs" not in step().policy.trained[0]
    samples = read_step_log(tmp_path / "samples.jsonl")
    assert len(samples) == 4 and len({sample["messages"][0]["content"] for sample in samples}) == 2, "two of each"
    step(num_logged_samples=0)
    assert read_step_log(tmp_path / "samples.jsonl") == []


@pytest.mark.parametrize("config_type", [GRPOConfig, PPOConfig])
def test_where_nothing_could_be_judged_nothing_is_learned(tmp_path, config_type):
    config = load(config_type, tmp_path, **{config_type.algorithm: {"max_new_tokens": 8}})
    rollouts = [replace(rollout, error="down") for rollout in Worker().answers([(0, None)], range(1))]
    assert (
        grpo.nothing_to_learn(config, torch.zeros(1, 1), [rollout.outcome for rollout in rollouts])
        == "no sample could be judged"
    )


def test_the_last_steps_of_a_resumed_run_may_not_all_fail(tmp_path):
    section = {"num_prompts_per_step": 1, "num_generations_per_prompt": 2, "max_new_tokens": 8}
    inputs = SimpleNamespace(train=range(9), validation={})
    run = grpo.GRPOTrainer(load(GRPOConfig, tmp_path, grpo=section), inputs, Policy(), Worker())
    run.steps_before = 2
    failed = [replace(rollout, error="down").outcome for rollout in Worker().answers([(0, None)], range(1))]
    run._check_judged(3, failed)
    with pytest.raises(TrainingError, match="step 4: no sample could be judged in 2 consecutive steps"):
        run._check_judged(4, failed)


def test_steps_without_update_because_most_samples_failed_end_the_run(tmp_path):
    """Some samples are judged in every step; a step with enough of them starts the count anew."""
    environment = {"max_failed_steps": 3, "max_failed_fraction": 0.5}
    run = grpo.GRPOTrainer(
        load(GRPOConfig, tmp_path, environment=environment, grpo={"max_new_tokens": 8}, trainer={"max_steps": 99}),
        SimpleNamespace(train=range(999), validation={}), Policy(), Worker(),
    )  # fmt: skip
    judged = [rollout.outcome for rollout in Worker().answers([(0, None)] * 4, range(4))]
    half, most, every = ([replace(o, error="down") for o in judged[:n]] + judged[n:] for n in (2, 3, 4))
    for step, outcomes in enumerate((most, most, half, most, every), start=1):
        run._check_judged(step, outcomes)
    told = r"step 6: more than environment\.max_failed_fraction=0\.5 of the samples could not be judged"
    with pytest.raises(TrainingError, match=f"{told} in 3 consecutive steps; the last error: down"):
        run._check_judged(6, most)


def test_sampling_options_reach_the_sampler(tmp_path, monkeypatch):
    taken = []
    monkeypatch.setattr(
        megatron_generation,
        "MegatronGeneration",
        lambda *arguments, recorded, cuda_graphs: (
            taken.extend((*arguments, recorded, cuda_graphs)) or SimpleNamespace(close=lambda: None)
        ),
    )
    options = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "stop_strings": ["!", "END"]}
    section = {"num_prompts_per_step": 2, "num_generations_per_prompt": 2, "max_new_tokens": 7, **options}
    config = load(
        GRPOConfig,
        tmp_path,
        [
            "grpo.generation_batch_size=3",
            "seed=11",
            "environment={name: try_again, max_turns: 4}",
            "model.moe_router_replay=true",
            "generation.cuda_graphs=false",
        ],
        grpo=section,
    )
    tokenizer = make_tokenizer()
    tokenizer.eos_token = "<|unk|>"  # a response ends with it, or with the end token that the chat template writes
    inputs = SimpleNamespace(tokenizer=tokenizer)
    monkeypatch.setattr(grpo, "build_environment", lambda config, policy, inputs: None)
    policy = SimpleNamespace(model="model", is_writer=True, topology=Topology())
    with grpo.rollout_worker(config, inputs, policy) as worker:
        pass
    model, params, longest, _, at_once, records, graphs = taken
    assert {name: getattr(params, name) for name in options} == {**options, "stop_strings": ("!", "END")}
    assert (params.max_new_tokens, params.seed, params.stop_token_ids) == (7, 11, (1, 5))
    assert (model, longest, at_once, worker.max_turns, records, graphs) == (
        "model",
        40,
        3,
        4,
        ["routed_experts"],
        False,
    )


# ------------------------------------------------------------------ environment.*, checkpoint.*, logging.*


@pytest.mark.long
def test_num_workers_judge_at_the_same_time(tmp_path, monkeypatch):
    (tmp_path / "slowly.py").write_text(
        "import os, time\ndef judge(message_log, record):\n    time.sleep(0.5)\n    return float(os.getpid())\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    log = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    for num_workers in (1, 3):
        config = EnvironmentConfig(name="function", function="slowly:judge", num_workers=num_workers)
        environment = JudgeProcesses(config)
        try:
            steps = [future.result(30) for future in [environment.submit(Sample(log, {})) for _ in range(3)]]
        finally:
            environment.close()
        assert len(Counter(step.reward for step in steps)) == num_workers, steps


@pytest.mark.parametrize("asynchronous", [True, False])
def test_asynchronous_decides_whether_a_save_is_waited_for(asynchronous, tmp_path):
    waited = []
    policy = SimpleNamespace(
        save_checkpoint=lambda directory, step, state, wait: waited.append(wait),
        checkpoint=SimpleNamespace(pending=None),
    )
    overrides = [f"checkpoint.asynchronous={str(asynchronous).lower()}"]
    config = load(SFTConfig, tmp_path, overrides, batch={"global_batch_size": 2})
    checkpoints = RunCheckpoints(config, policy, print, ([], []), "")
    checkpoints.save(1, {}, wait=False)
    checkpoints.save(2, {}, wait=True)
    assert waited == [not asynchronous, True]


@pytest.mark.parametrize(("kept", "held"), [(None, True), ("weights", True), (None, False)])
def test_a_moved_reference_is_not_forgotten_in_silence(kept, held, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpointing, "broadcast_object", lambda value: value)
    restored = Restored({"step": 3}, ["weights"], has_reference=held)
    policy = SimpleNamespace(
        reference=kept,
        checkpoint=SimpleNamespace(verify=lambda path: []),
        load_checkpoint=lambda path, partial: restored,
    )
    said = []
    config = load(SFTConfig, tmp_path, batch={"global_batch_size": 2})
    RunCheckpoints(config, policy, said.append, ([tmp_path], []), "").resume()
    assert any("the checkpoint's reference, which has been updated, is not used" in line for line in said) == (
        kept is None and held
    )


def test_dropout_of_adapters_is_no_mistake_of_the_first_step(step):
    run, metrics = step(), {"logprob_error": 0.08, "token_mult_prob_error": 1.08, "kl_penalty": 0.1, "probs_ratio": 1.1}
    with pytest.raises(TrainingError, match="before any update"):
        run._check_mismatch(1, metrics)
    lora = {"path": "adapter", "dropout": 0.2}
    run.config = run.config.model_copy(update={"model": ModelConfig(path="model", lora=lora)})
    run._check_mismatch(1, metrics)


@pytest.mark.parametrize(("dtype", "per_token", "ends"), [
    ("bfloat16", 0.009, False), ("bfloat16", 0.011, True), ("float32", 9e-5, False), ("float32", 2e-4, True),
])  # fmt: skip
@pytest.mark.parametrize("algorithm", [DPOConfig, KTOConfig])
def test_first_rewards_are_judged_by_their_mean_per_token(algorithm, dtype, per_token, ends, tmp_path):
    """One of the responses is as long as all others together; a masked pair does not count."""
    config = load(algorithm, tmp_path, batch={"global_batch_size": 4}, model={"path": "model", "dtype": dtype})
    token_mask = torch.zeros(8, 101)
    for row, length in enumerate((100, 10, 10, 20, 30, 10, 100, 100)):
        token_mask[row, 1 : length + 1] = 1
    rows = LocalBatch(
        {"token_mask": token_mask, "sample_mask": torch.tensor([1.0] * 6 + [0.0] * 2)}, BatchShare.whole(8)
    )
    total = per_token * 180
    metrics = {"rewards_chosen_mean": total / 6, "rewards_rejected_mean": -total / 12}
    metrics |= {"rewards_desirable_sum": total / 2, "rewards_undesirable_sum": -total}
    objective = object.__new__(DPOObjective if algorithm is DPOConfig else KTOObjective)
    objective.config, objective.reference = config, object()
    batch = SimpleNamespace(rows=rows)
    if ends:
        with pytest.raises(TrainingError, match="before any update the policy must equal the reference"):
            objective.check_first_step(batch, metrics)
    else:
        objective.check_first_step(batch, metrics)


def test_other_programs_get_every_metric(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "wandb.py").write_text(
        "calls = []\n"
        "def init(**options):\n    calls.append(options)\n    import wandb\n    return wandb\n"
        "def log(metrics, step):\n    calls.append((step, metrics))\n"
        "def Table(columns, data):\n    return columns, data\n"
        "def finish():\n    calls.append('end')\n"
    )
    (tmp_path / "modules" / "mlflow.py").write_text(
        "calls = []\n"
        "def set_experiment(name):\n    calls.append(name)\n"
        "def start_run(run_name):\n    calls.append(run_name)\n"
        "def log_params(values):\n    calls.append(values['optimizer.lr'])\n"
        "def log_metrics(metrics, step):\n    calls.append((step, metrics))\n"
        "def log_table(data, artifact_file):\n    calls.append((artifact_file, data))\n"
        "def end_run():\n    calls.append('end')\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "modules")
    asked = ["logging.tensorboard=true", "logging.wandb=project", "logging.wandb_tags=[a, b]", "logging.mlflow=trials"]
    asked += ["logging.run_name=tuesday", "optimizer.lr=0.25"]
    config = load(SFTConfig, tmp_path, asked, batch={"global_batch_size": 2})
    reporter = MetricsReporter(config, True, 1, 2)
    for step in (1, 2):
        reporter.record(step, {"loss": 0.5 / step})
    messages = [{"role": "user", "content": "a|b?"}, {"role": "assistant", "content": "<i>"}]
    sample = {"messages": messages, "reward": 1.0, "advantage": -0.5, "ground_truth": "c"}
    reporter.record_samples(2, [sample])
    reporter.close()
    events = EventAccumulator(str(config.output_dir / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 0.5), (2, 0.25)]
    (text,) = events.Tensors("samples/text_summary")
    assert text.tensor_proto.string_val[0].decode().endswith("\n| a&#124;b? | &lt;i&gt; | c | 1.0 | -0.5 |")
    begun, *calls = sys.modules.pop("wandb").calls
    assert (begun["project"], begun["name"], begun["tags"]) == ("project", "tuesday", ["a", "b"])
    assert begun["config"]["optimizer"]["lr"] == 0.25
    table = (["prompt", "response", "ground_truth", "reward", "advantage"], [["a|b?", "<i>", "c", "1.0", "-0.5"]])
    assert calls == [(1, {"loss": 0.5}), (2, {"loss": 0.25}), (2, {"samples": table}), "end"]
    calls = sys.modules.pop("mlflow").calls
    of_step = dict(zip(*table[:1], [["a|b?"], ["<i>"], ["c"], ["1.0"], ["-0.5"]], strict=True))
    shown = ("samples/step_000002.json", of_step)
    assert calls == ["trials", "tuesday", 0.25, (1, {"loss": 0.5}), (2, {"loss": 0.25}), shown, "end"]


def test_logged_samples_have_ground_truth_and_advantage(step, tmp_path):
    run = step(num_logged_samples=NUM_PROMPTS * GROUP)
    samples, (rows,) = read_step_log(tmp_path / "samples.jsonl"), run.policy.trained
    assert len(samples) == rows.size == NUM_PROMPTS * GROUP
    for sample, advantages, mask in zip(samples, rows["advantages"], rows["token_mask"], strict=True):
        assert sample["ground_truth"] == "four"
        assert sample["advantage"] == approx32(advantages[mask.bool()].double().mean().item(), FORMULA)
    assert len({sample["advantage"] for sample in samples}) > 1
    step(Worker(lambda prompt: False))
    assert {sample["advantage"] for sample in read_step_log(tmp_path / "samples.jsonl")} == {None}


def test_a_terminal_shows_a_bar_and_others_do_not(tmp_path, monkeypatch):
    config = load(SFTConfig, tmp_path, batch={"global_batch_size": 2})
    for is_terminal in (True, False):
        shown = io.StringIO()
        monkeypatch.setattr(metrics, "console", Console(file=shown, force_terminal=is_terminal, width=120))
        reporter = MetricsReporter(config, True, 3, 4)
        with reporter.live():
            watchdog.start(tmp_path / "stacks", 0)
            watchdog.enter("step 3: generation {of} [sorts]")
            reporter.advance(3)
            time.sleep(0.6)
            metrics.console.print("a line")
            watchdog.stop()
        assert "a line" in shown.getvalue()
        for part in ("3/4", "step 3: generation {of} [sorts]", "0:00:0"):
            assert (part in shown.getvalue()) == is_terminal


def test_every_tracker_that_is_not_installed_is_told_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "find_spec", lambda name: None)
    asked = {"tensorboard": "true", "wandb": "project", "mlflow": "trials"}
    for name, value in asked.items():
        config = load(SFTConfig, tmp_path, [f"logging.{name}={value}"], batch={"global_batch_size": 2})
        with pytest.raises(UserError, match=f"logging.{name}: install the {name} extra"):
            preflight.preflight(config, 1, {})


# ------------------------------------------------------------------ what stays of a run that went further


# ------------------------------------------------------------------ model.*, deterministic


def train_counting_layers(config):
    from mcore_rl.algorithms.loss_functions import NLLLoss
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config, total_steps=10, rows_per_unit=2)
    calls = Counter()
    for chunk in policy.chunks:
        for name, module in chunk.named_modules():
            if name.endswith("mlp"):
                module.register_forward_hook(lambda *_: calls.update(["mlp"]))
    metrics = [policy.train(make_data(), NLLLoss()) for _ in range(2)]
    policy.shutdown()
    deterministic = policy.chunks[0].config.deterministic_mode, torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    return metrics, calls["mlp"], deterministic


def test_recomputation_runs_layers_twice_and_changes_no_number(model_of):
    config = make_config(model_of("llama"))
    model = config.model.model_copy(update={"recompute_activations": True})
    recomputing = config.model_copy(update={"model": model, "deterministic": True})
    (plain, calls, deterministic), (again, more, asked) = (
        run_processes(train_counting_layers, c, world_size=1)[0] for c in (config, recomputing)
    )
    assert again == plain
    assert more == 2 * calls
    assert (deterministic, asked) == ((False, False), (True, True))


@pytest.mark.long
@pytest.mark.parametrize(
    "layout", [ParallelLayout(tp=2, sp=True), ParallelLayout(cp=2), ParallelLayout(dp=2, pp=2)], ids=str
)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_deterministic_runs_are_equal_bit_for_bit(layout, family, model_of):
    """And no operation that training needs lacks a deterministic form on the CPU."""
    config = layout.apply(make_config(model_of(family)))
    runs = [
        run_processes(train_counting_layers, c, world_size=layout.world_size)[0][0]
        for c in (config, *(2 * [config.model_copy(update={"deterministic": True})]))
    ]
    assert runs[1] == runs[2]
    assert runs[1][-1]["loss"] == approx32(runs[0][-1]["loss"], FORWARD)


def test_an_environment_that_contradicts_is_refused(monkeypatch):
    for name in platform.DETERMINISTIC_ENVIRONMENT:
        monkeypatch.setenv(name, "else")
        with pytest.raises(UserError, match=f"deterministic: the environment has {name}=else; it must be one of"):
            platform.make_deterministic()
        monkeypatch.delenv(name)
    assert not torch.are_deterministic_algorithms_enabled()


def test_code_of_a_model_directory_runs_only_if_trusted(tmp_path, monkeypatch):
    path = make_model("llama", tmp_path / "model")
    (path / "configuration_own.py").write_text(
        "from transformers import LlamaConfig\nclass OwnConfig(LlamaConfig):\n    model_type = 'llama'\n"
    )
    config = json.loads((path / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "configuration_own.OwnConfig"}
    (path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    assert type(load_hf_config(path)) is LlamaConfig
    assert type(load_hf_config(path, trust_remote_code=True)).__name__ == "OwnConfig"
