"""Group relative policy optimization: rollouts by the policy itself, rewards, advantages, updates."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from mcore_rl import launch_environment, watchdog
from mcore_rl.algorithms.advantages import advantages_of, has_signal
from mcore_rl.algorithms.collection import RolloutCollector, rollout_metrics, staleness_metrics
from mcore_rl.algorithms.inputs import Inputs, claim_output, load_inputs, total_steps
from mcore_rl.algorithms.loss_functions import ClippedPGLossFn, calculate_kl
from mcore_rl.algorithms.loss_functions.overlong import soft_overlong_penalty
from mcore_rl.algorithms.metrics import speaker
from mcore_rl.algorithms.recordings import REPLAYED_OPTIONS, check_record, read_recording, recorded_by
from mcore_rl.algorithms.rollouts import Conversation, Rollout, RolloutWorker, to_batch
from mcore_rl.algorithms.step_log import StepLog
from mcore_rl.algorithms.training import TrainingRun
from mcore_rl.config import DataConfig, GRPOConfig
from mcore_rl.data.chat import check_keeps_turns
from mcore_rl.data.progress import Say
from mcore_rl.data.prompts import PromptDataset, load_prompt_dataset
from mcore_rl.data.token_cache import TokenCache
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.environments.interfaces import CollectiveEnvironment, Environment
from mcore_rl.environments.judged import JudgedEnvironment, probe
from mcore_rl.environments.reward_model import RewardModelEnvironment, check_reward_model
from mcore_rl.errors import TrainingError
from mcore_rl.models.generation.backends import generation_of
from mcore_rl.models.policy.megatron_policy import MegatronPolicy
from mcore_rl.preflight import find_checkpoints, is_restart
from mcore_rl.run_directory import JUDGE_LOG

# Before the first update sampler, policy and reference are the same weights; what is left is rounding.
FIRST_STEP_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2}

PROBED_RECORDS = 4
"""A judge may refuse an odd record; one that fails on all of these is wrong."""


def train_grpo(config: GRPOConfig, record: Path | None = None, replay: Path | None = None) -> None:
    """Raise the rewards of the policy's own answers.

    Args:
        record: a file that keeps every step's rollouts.
        replay: such a file, to train from instead of generating.

    Raises:
        UserError: the configuration, the data or one of the files is not usable.
    """
    inputs, recorded = _checked_inputs(config, record, replay)
    steps = total_steps(config.trainer, len(inputs.train), config.grpo.num_prompts_per_step)
    updates = steps * config.grpo.num_updates_per_rollout
    policy = MegatronPolicy(config, updates, keep_reference=config.loss.reference_policy_kl_penalty > 0)
    with contextlib.ExitStack() as started:
        environment = environment_of(config, policy)
        if environment is not None:
            started.callback(environment.close)
        worker = rollout_worker(config, inputs, policy, environment)
        started.callback(worker.generation.close)
        started.callback(worker.close)
        GRPORun(config, inputs, policy, worker, StepLog(record) if record else None, recorded).run()
    policy.shutdown()


def _checked_inputs(
    config: GRPOConfig, record: Path | None, replay: Path | None
) -> tuple[Inputs[PromptDataset], dict[int, list[Rollout]] | None]:
    """The run's inputs, and a recording's rollouts; the output directory is claimed last."""

    def load_dataset(source: str, tokenizer: Any, data: DataConfig, say: Say, cache: TokenCache) -> PromptDataset:
        # The judges of this package compare with a text of the answer, which null has as well.
        valued = ("answer",) if config.environment.compares else ()
        return load_prompt_dataset(source, tokenizer, data, config.max_prompt_length, say, valued, cache)

    inputs = load_inputs(config, load_dataset, rows_per_unit=1)
    prompts = inputs.train.prompts
    if config.environment.max_turns > 1 and inputs.train.has_messages:
        check_keeps_turns(inputs.tokenizer)
    if config.environment.name == "reward_model":
        check_reward_model(config)
    recorded = None
    if replay:
        steps = total_steps(config.trainer, len(prompts), config.grpo.num_prompts_per_step)
        required = {**config.grpo.model_dump(include=REPLAYED_OPTIONS), "data": inputs.train.fingerprint}
        recorded = read_recording(replay, steps, required, config.model.moe_router_replay)
    elif launch_environment.rank() == 0 and config.environment.name != "reward_model":
        first = [Conversation(Rollout.begin(0, 0, prompt), prompt).sample for prompt in prompts[:PROBED_RECORDS]]
        probe(config.environment, first, config.parallel.timeout_seconds / 2)
    if record:
        goes_on = bool(find_checkpoints(config)[0]) or is_restart(config.output_dir)
        check_record(record, recorded_by(config, inputs.train.fingerprint), goes_on)
    return claim_output(config, inputs), recorded


def environment_of(config: GRPOConfig, policy: MegatronPolicy) -> Environment | CollectiveEnvironment | None:
    """Who judges, on the ranks that have a part in it."""
    if config.environment.name == "reward_model":
        judge = RewardModelEnvironment(config)
        speaker(policy.is_writer)(f"reward model: {judge.model.describe()}")
        return judge
    if policy.topology.leads_replica:
        return JudgedEnvironment(config.environment, config.output_dir / JUDGE_LOG)
    return None


def rollout_worker(
    config: GRPOConfig,
    inputs: Inputs[PromptDataset],
    policy: MegatronPolicy,
    environment: Environment | CollectiveEnvironment | None,
) -> RolloutWorker:
    """Generation with the policy's weights, as the configuration says."""
    tokenizer, topology = inputs.tokenizer, policy.topology
    generation = generation_of(config, policy, tokenizer, speaker(policy.is_writer))
    meeting_seconds = min(5.0, config.parallel.timeout_seconds / 4)
    return RolloutWorker(generation, environment, tokenizer, config.environment.max_turns, meeting_seconds, topology)


@dataclass
class GRPORun(TrainingRun[PromptDataset]):
    """Collect, score, update; a step's samples are its prompts."""

    config: GRPOConfig
    worker: RolloutWorker
    recording: StepLog | None = None
    """Keeps every step's rollouts."""
    recorded: dict[int, list[Rollout]] | None = None
    """Of each step, to train on instead of generating."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Of each phase of the step."""
    failed_steps = 0
    """On end, in which no sample could be judged."""
    steps_before = 0
    """Of the run, which this process goes on with."""

    def __post_init__(self) -> None:
        self.collector = RolloutCollector(
            self.config,
            self.inputs,
            self.policy,
            self.worker,
            self.say,
            self.total_steps,
            self.recording,
            self.recorded,
        )
        # The sampler's log-probabilities are the policy's own where the policy samples, in the precision that it is
        # trained in, from all tokens; then the only update on them is on-policy and needs no others.
        grpo, own = self.config.grpo, self.recorded is None and self.config.generation.backend == "megatron"
        self.exact = own and self.config.model.dtype == "float32" and not grpo.filters_tokens
        chosen = self.config.loss.force_on_policy_ratio
        self.on_policy = (self.exact and grpo.num_updates_per_rollout == 1) if chosen is None else chosen
        self.loss_fn = ClippedPGLossFn(replace(self.config.loss, force_on_policy_ratio=self.on_policy))

    @property
    def samples_per_step(self) -> int:
        return self.config.grpo.num_prompts_per_step

    @property
    def updates_per_step(self) -> int:
        return self.config.grpo.num_updates_per_rollout

    @property
    def max_record_length(self) -> int:
        return self.config.max_prompt_length

    def _introduce(self, done: int, steps: int) -> None:
        super()._introduce(done, steps)
        self.steps_before = done
        if self.on_policy and self.config.loss.force_on_policy_ratio is None:
            self.say(
                "force_on_policy_ratio: true, since the only update is on samples of the very weights it begins from"
            )

    # ------------------------------------------------------------ a step

    def step(self, step: int) -> dict[str, Any]:
        started = time.perf_counter()
        self.seconds = {}
        with self._sampling(step, "generation", weight_version=step - 1):
            rollouts, asked = self.collector.collect(step, self.consumed_samples)
        self.consumed_samples += asked
        rewards = torch.tensor([r.reward for r in rollouts]).view(-1, self.config.grpo.num_generations_per_prompt)
        metrics = rollout_metrics(rollouts)
        if self.config.grpo.max_staleness:
            metrics |= staleness_metrics(rollouts, version=step - 1)
        self._check_judged(step, rollouts)
        rewards = self._shaped(rewards, rollouts)
        if nothing := self._nothing_to_learn(rewards, rollouts):
            self.say(f"step {step}: {nothing}; there is nothing to learn from, no update")
            self.policy.advance_schedule(self.config.grpo.num_updates_per_rollout)
            return {**metrics, "skipped_update": 1.0, **self._timings(rollouts, started, updates=0)}
        data = self._training_data(step, rollouts, rewards)
        with self._phase(step, "training"):
            for update in range(self.config.grpo.num_updates_per_rollout):
                trained = self.policy.train(data, self.loss_fn, temperature=self.config.grpo.temperature)
                trained.pop("all_mb_metrics")
                if update == 0 and self.recorded is None:
                    self._check_mismatch(step, trained)
        updates = self.config.grpo.num_updates_per_rollout
        return {**metrics, **trained, "skipped_update": 0.0, **self._timings(rollouts, started, updates)}

    def _check_judged(self, step: int, rollouts: list[Rollout]) -> None:
        """Raises TrainingError after too many steps on end in which no sample could be judged."""
        failed = all(rollout.error is not None for rollout in rollouts)
        self.failed_steps = self.failed_steps + 1 if failed else 0
        limit = min(self.config.environment.max_failed_steps, self.total_steps - self.steps_before)
        if self.failed_steps >= limit:
            raise TrainingError(
                f"step {step}: no sample could be judged in {self.failed_steps} "
                f"{'step' if self.failed_steps == 1 else 'steps on end'}; the last error: {rollouts[-1].error}"
            )

    def _shaped(self, rewards: torch.Tensor, rollouts: list[Rollout]) -> torch.Tensor:
        """Rewards with the penalty on responses near the limit, if there is one."""
        cache = self.config.grpo.overlong_cache_length
        if cache is None:
            return rewards
        lengths = torch.tensor([float(r.longest_response) for r in rollouts])
        return rewards + soft_overlong_penalty(lengths, self.config.grpo.max_new_tokens, cache).view_as(rewards)

    def _nothing_to_learn(self, rewards: torch.Tensor, rollouts: list[Rollout]) -> str | None:
        """Why an update on these samples would learn nothing, if so."""
        loss, grpo = self.config.loss, self.config.grpo
        if grpo.mask_truncated and all(r.truncated for r in rollouts):
            return "all responses were truncated"
        whole_batch = grpo.advantage_estimator == "reinforce_plus_plus" and not grpo.minus_baseline
        signal = has_signal(rewards.view(1, -1) if whole_batch else rewards)
        if bool(signal.any()) or loss.use_kl_in_reward or loss.learns_without_advantages:
            return None
        return "all rewards are equal" if whole_batch else "all rewards of each prompt are equal"

    def _training_data(self, step: int, rollouts: list[Rollout], rewards: torch.Tensor) -> BatchedDataDict[Any]:
        loss, temperature = self.config.loss, self.config.grpo.temperature
        data = to_batch(rollouts, self.inputs.tokenizer.pad_token_id)
        if self.config.grpo.mask_truncated:
            data["sample_mask"] = torch.tensor([0.0 if r.truncated else 1.0 for r in rollouts])
        with self._phase(step, "logprobs"):
            if not self.on_policy or (loss.use_kl_in_reward and not self.exact):
                data["prev_logprobs"] = self.policy.get_logprobs(data, temperature=temperature)["logprobs"]
            if self.policy.reference is not None:
                reference = self.policy.get_reference_policy_logprobs(data, temperature=temperature)
                data["reference_policy_logprobs"] = reference["reference_logprobs"]
        penalty = None
        if loss.use_kl_in_reward:
            current = data["prev_logprobs" if "prev_logprobs" in data else "generation_logprobs"]
            reference = data["reference_policy_logprobs"]
            kl = calculate_kl(current, reference, loss.kl_estimator, loss.kl_clamp, loss.kl_output_clamp)
            penalty = loss.reference_policy_kl_penalty * kl
        add_advantages(data, self.config, rewards, penalty)
        return data

    def _check_mismatch(self, step: int, metrics: dict[str, Any]) -> None:
        """Raises TrainingError if sampler and trainer disagree too much on the same weights."""
        if step == 1:
            self._check_first(metrics)
        bound, error = self.config.generation.max_token_mult_prob_error, metrics["token_mult_prob_error"]
        if bound is not None and error > bound:
            raise TrainingError(
                f"step {step}: token_mult_prob_error is {error:.4g}, above generation.max_token_mult_prob_error="
                f"{bound:g}: sampler and trainer disagree on the log-probabilities of the same weights"
            )

    def _check_first(self, metrics: dict[str, Any]) -> None:
        tolerance = FIRST_STEP_TOLERANCE[self.config.model.dtype]
        expected = {} if self.config.grpo.filters_tokens else {"token_mult_prob_error": 1.0}
        if self.config.loss.kl_in_loss:
            expected["kl_penalty"] = 0.0
        if not self.config.loss.disable_ppo_ratio:
            expected["probs_ratio"] = 1.0
        for name, value in expected.items():
            if abs(metrics[name] - value) > tolerance:
                raise TrainingError(
                    f"step 1: before any update {name} must be {value:g}, but is {metrics[name]:.4g}: sampler, policy "
                    "and reference do not agree on the log-probabilities of the same weights"
                )

    # ------------------------------------------------------------ beside the step

    def validate(self, step: int) -> dict[str, float]:
        """Rewards of greedy answers to the validation prompts."""
        if self.inputs.validation is None:
            return {}
        with self._sampling(step, "validation", weight_version=step):
            prompts = list(enumerate(self.inputs.validation.prompts))
            metrics = rollout_metrics(self.worker.run(prompts, range(len(prompts)), greedy=True))
        self.say(f"step {step}  validation: reward {metrics['reward_mean']:.4g}  accuracy {metrics['accuracy']:.4g}")
        return {f"validation_{name}": value for name, value in metrics.items()}

    @contextlib.contextmanager
    def _sampling(self, step: int, name: str, weight_version: int) -> Iterator[None]:
        """A phase in which the policy's weights answer: those after so many steps."""
        with self._phase(step, "refit"):
            if self.recorded is None or name == "validation":
                self.worker.prepare(weight_version)
        with self._phase(step, name, f"{name}, answers and their judging"):
            yield
        self.worker.finish()

    def _phase(self, step: int, name: str, doing: str | None = None) -> _Timer:
        watchdog.enter(f"step {step}: {doing or name}")
        return _Timer(self.seconds, name)

    def _timings(self, rollouts: list[Rollout], started: float, updates: int) -> dict[str, float]:
        generated, total = sum(r.response_length for r in rollouts), sum(len(r.input_ids) for r in rollouts)
        timings = {f"{name}_seconds": value for name, value in self.seconds.items()}
        for name, tokens in (("generation", generated), ("logprobs", total), ("training", total)):
            if self.seconds.get(name):
                timings[f"{name}_tokens_per_second"] = tokens / self.seconds[name]
        data = to_batch(rollouts, self.inputs.tokenizer.pad_token_id)
        return {**timings, **self.throughput(data, time.perf_counter() - started, updates)}


def add_advantages(
    data: BatchedDataDict[Any], config: GRPOConfig, rewards: torch.Tensor, penalty: torch.Tensor | None = None
) -> None:
    """What the loss reads that follows from the rewards [P, G] of the batch's samples.

    Args:
        penalty: [B, S] to be subtracted from each token's reward (nats).
    """
    data["advantages"] = advantages_of(config.grpo, rewards, data["token_mask"], penalty)
    if config.loss.positive_example_nll_weight:
        data["rewards"] = rewards.flatten()
        positive = data["token_mask"][:, 1:].sum(1) * data["sample_mask"] * (data["rewards"] > 0)
        data["num_positive_tokens"] = positive.sum().expand(data.size).clone()


class _Timer:
    """Adds the time spent inside to `seconds[name]`."""

    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self.seconds, self.name = seconds, name

    def __enter__(self) -> None:
        self.started = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.seconds[self.name] = self.seconds.get(self.name, 0.0) + time.perf_counter() - self.started
