"""Group relative policy optimization: rollouts by the policy, rewards, advantages, updates."""

from __future__ import annotations

import contextlib
import functools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mcore_rl.algorithms.advantages import advantages_of
from mcore_rl.config import GRPOConfig, RLConfig
from mcore_rl.data.datasets import PromptDataset
from mcore_rl.distributed.batched_data_dict import BatchedDataDict, OwnRows, Share, share_of
from mcore_rl.distributed.collectives import broadcast_in_replica
from mcore_rl.environments.interfaces import CollectiveEnvironment, Environment
from mcore_rl.environments.judge_processes import JudgedEnvironment, probe
from mcore_rl.environments.reward_model import RewardModelEnvironment
from mcore_rl.errors import TrainingError
from mcore_rl.losses.common import over_steps, reductions_of
from mcore_rl.losses.policy_gradient import ClippedPGLossFn, calculate_kl, soft_overlong_penalty
from mcore_rl.models.generation.backends import generation_of
from mcore_rl.models.megatron.families.mixtures import Mixture
from mcore_rl.models.policy.megatron_policy import MegatronPolicy
from mcore_rl.rollouts.collector import RolloutCollector, RolloutSums, rollout_metrics, staleness_metrics
from mcore_rl.rollouts.recordings import REPLAYED_OPTIONS, check_record, read_recording, recorded_by
from mcore_rl.rollouts.samples import (
    Outcome,
    Rollout,
    Rollouts,
    TokenColumn,
    are_judged,
    has_signal,
    rows_of_replica,
    to_batch,
    token_columns,
)
from mcore_rl.rollouts.worker import Conversation, RolloutWorker
from mcore_rl.run import watchdog
from mcore_rl.run.directory import JUDGE_LOG
from mcore_rl.run.loop import TrainingRun
from mcore_rl.run.preflight import find_checkpoints, is_restart
from mcore_rl.run.setup import Inputs, claim_output, load_inputs
from mcore_rl.run.step_log import StepLog
from mcore_rl.utils import torchrun
from mcore_rl.utils.checkpoint_store import digest_of_file
from mcore_rl.utils.console import speaker

PROBED_RECORDS = 4
"""A judge may refuse an odd record; one that fails on all of these is wrong."""


def train_on_rollouts(
    config: RLConfig, record: Path | None, replay: Path | None, run_type: type[GRPORun]
) -> Path | None:
    """A run of that type, with all that it needs; returns the directory of the exported model, if there is one.

    Raises:
        UserError: the configuration, the data or one of the files is not usable.
    """
    inputs, recorded = _checked_inputs(config, record, replay)
    steps = config.total_steps(len(inputs.train))
    updates = (steps - config.first_update_step + 1) * config.updates_per_step
    policy = MegatronPolicy(config, updates, keep_reference=config.keeps_reference)
    with contextlib.ExitStack() as started:
        environment = environment_of(config, policy)
        if environment is not None:
            started.callback(environment.close)
        worker = rollout_worker(config, inputs, policy, environment)
        started.callback(worker.generation.close)
        started.callback(worker.close)
        run = run_type(config, inputs, policy, worker, StepLog(record) if record else None, recorded)
        exported = run.run()
    policy.shutdown()
    return exported


def _checked_inputs(
    config: RLConfig, record: Path | None, replay: Path | None
) -> tuple[Inputs[PromptDataset], dict[int, list[Rollout]] | None]:
    """The run's inputs, and a recording's rollouts; the output directory is claimed last."""
    inputs: Inputs[PromptDataset] = load_inputs(config)
    prompts = inputs.train.prompts
    recorded = None
    if replay:
        steps = config.total_steps(len(prompts))
        required = {**config.rollouts.model_dump(include=REPLAYED_OPTIONS), "data": inputs.train.fingerprint}
        recorded = read_recording(replay, steps, required, config.model.moe_router_replay, config.algorithm)
    elif torchrun.rank() == 0 and config.environment.name != "reward_model":
        first = [Conversation(Rollout.begin(0, 0, prompt), prompt).sample for prompt in prompts[:PROBED_RECORDS]]
        probe(config.environment, first, config.parallel.timeout_seconds / 2)
    if record:
        goes_on = bool(find_checkpoints(config)[0]) or is_restart(config.output_dir)
        check_record(record, recorded_by(config, inputs.train.fingerprint), goes_on)
    contents = "" if replay is None else digest_of_file(replay)
    return claim_output(config, inputs, {"--record": str(record is not None), "--replay": contents}), recorded


def environment_of(config: RLConfig, policy: MegatronPolicy) -> Environment | CollectiveEnvironment | None:
    """Return the environment, on the ranks that have a part in it."""
    if config.environment.name == "reward_model":
        judge = RewardModelEnvironment(config)
        speaker(policy.is_writer)(f"reward model: {judge.model.describe()}")
        return judge
    if policy.topology.leads_replica:
        return JudgedEnvironment(config.environment, config.output_dir / JUDGE_LOG)
    return None


def rollout_worker(
    config: RLConfig,
    inputs: Inputs[PromptDataset],
    policy: MegatronPolicy,
    environment: Environment | CollectiveEnvironment | None,
) -> RolloutWorker:
    """Generation with the policy's weights, as the configuration says."""
    tokenizer, topology = inputs.tokenizer, policy.topology
    generation = generation_of(config, policy, tokenizer, speaker(policy.is_writer))
    return RolloutWorker(
        generation, environment, tokenizer, config.environment.max_turns, config.parallel.meeting_seconds, topology
    )


# Before the first update sampler, policy and reference are the same weights; what is left is rounding.
FIRST_STEP_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2}


def train_grpo(config: GRPOConfig, record: Path | None = None, replay: Path | None = None) -> Path | None:
    """Raise the rewards of the policy's own answers, each compared with others'.

    Args:
        record: a file that keeps every step's rollouts.
        replay: such a file, to train from instead of generating.

    Returns:
        The directory of the exported model; None without one.

    Raises:
        UserError: the configuration, the data or one of the files is not usable.
    """
    return train_on_rollouts(config, record, replay, GRPORun)


@dataclass
class GRPORun(TrainingRun[PromptDataset]):
    """Collect, score, update; a step's samples are its prompts.

    What other algorithms do otherwise has a method of its own.
    """

    config: RLConfig
    worker: RolloutWorker
    recording: StepLog | None = None
    """Keeps every step's rollouts."""
    recorded: dict[int, list[Rollout]] | None = None
    """Recorded rollouts of each step, to train on instead of generating."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds spent in each phase of the step."""
    failed_steps = 0
    """On end, in which no sample could be judged."""
    steps_before = 0
    """Steps of the run before this process resumed it."""

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
        self.replays = self.recorded is not None
        self.loss_fn = ClippedPGLossFn(self.config.decided_loss(self.replays))

    @property
    def updates_per_step(self) -> int:
        return self.config.updates_per_step

    @property
    def max_record_length(self) -> int:
        return self.config.max_prompt_length

    def _introduce(self, done: int, steps: int) -> None:
        super()._introduce(done, steps)
        self.steps_before = done
        if self.config.is_on_policy(self.replays) and self.config.loss.force_on_policy_ratio is None:
            self.say(
                "force_on_policy_ratio: true, since the only update is on samples of the very weights it begins from"
            )

    # ------------------------------------------------------------ a step

    def step(self, step: int) -> dict[str, Any]:
        started = time.perf_counter()
        self.seconds = {}
        with self._sampling(step, "generation", weight_version=step - 1):
            rollouts, asked = self.collector.collect(step, self.consumed_samples)
        self.collector.write(step, rollouts)
        self.consumed_samples += asked
        outcomes = rollouts.outcomes
        rewards = torch.tensor([o.reward for o in outcomes]).view(-1, self.config.rollouts.num_generations_per_prompt)
        metrics = rollout_metrics(outcomes)
        if self.config.rollouts.max_staleness:
            metrics |= staleness_metrics(outcomes, version=step - 1)
        self._check_judged(step, outcomes)
        rewards = self._shaped(rewards, outcomes)
        if nothing := self._nothing_to_learn(rewards, outcomes):
            self.say(f"step {step}: {nothing}; there is nothing to learn from, no update")
            self._pass_over(step)
            return {**metrics, "skipped_update": 1.0, **self._timings(outcomes, started, flops=0.0)}
        data = self._training_data(step, rollouts, rewards)
        trained = self._update(step, data, self._minibatches(step, data))
        passes = self.config.rollouts.num_updates_per_rollout if step >= self.config.first_update_step else 0
        flops = passes * self.policy.flops_of(data)
        return {**metrics, **trained, "skipped_update": 0.0, **self._timings(outcomes, started, flops)}

    def _pass_over(self, step: int) -> None:
        """No update in this step, which counts in the schedules nevertheless."""
        if step >= self.config.first_update_step:
            self.policy.advance_schedule(self.updates_per_step)

    def _update(self, step: int, data: OwnRows[Any], minibatches: Sequence[OwnRows[Any]]) -> dict[str, Any]:
        """Make all updates of the step, on the minibatches of its batch.

        Returns:
            The last update's metrics. With minibatches: their means over the updates, and each update's loss and
            gradient norm.
        """
        updates = list[dict[str, Any]]()
        with self._phase(step, "training"):
            for _ in range(self.config.rollouts.num_updates_per_rollout):
                for minibatch in minibatches:
                    trained = self.policy.train(minibatch, self.loss_fn, temperature=self.config.rollouts.temperature)
                    trained.pop("all_mb_metrics")
                    if not updates and self.recorded is None:
                        self._check_mismatch(step, trained)
                    updates.append(trained)
        if left_out := self.updates_per_step - len(updates):
            self.policy.advance_schedule(left_out)
        if self.config.rollouts.train_global_batch_size is None:
            return updates[-1]
        of_each = {f"{k}/update_{n}": one[k] for n, one in enumerate(updates, 1) for k in ("loss", "grad_norm")}
        return over_steps(updates, reductions_of(self.loss_fn)) | of_each

    def _minibatch_rows(self, step: int, count: int) -> list[list[int]]:
        """Return the rows of each of a step's minibatches: whole groups, drawn by seed and step alone."""
        size, group = self.config.rollouts.train_global_batch_size, self.config.rollouts.num_generations_per_prompt
        if size is None:
            return [list(range(count))]
        groups = list(range(0, count, group))
        random.Random(f"{self.config.seed} minibatches {step}").shuffle(groups)
        parts = [sorted(groups[n : n + size // group]) for n in range(0, len(groups), size // group)]
        return [[first + row for first in part for row in range(group)] for part in parts]

    def _minibatches(self, step: int, data: OwnRows[Any]) -> list[OwnRows[Any]]:
        """Return the step's minibatches, without those of which no token counts. Collective."""
        if self.config.rollouts.train_global_batch_size is None:
            return [data]
        parts = [minibatch_of(data, rows) for rows in self._minibatch_rows(step, data.share.total)]
        counts = (float((part["token_mask"][:, 1:].sum(1) * part["sample_mask"]).sum()) for part in parts)
        return [part for part, count in zip(parts, data.share.sum(*counts), strict=True) if count]

    def _check_judged(self, step: int, outcomes: Sequence[Outcome]) -> None:
        """Raises TrainingError after too many steps on end in which no sample could be judged."""
        failed = all(outcome.error is not None for outcome in outcomes)
        self.failed_steps = self.failed_steps + 1 if failed else 0
        limit = min(self.config.environment.max_failed_steps, self.total_steps - self.steps_before)
        if self.failed_steps >= limit:
            raise TrainingError(
                f"step {step}: no sample could be judged in {self.failed_steps} "
                f"{'step' if self.failed_steps == 1 else 'steps on end'}; the last error: {outcomes[-1].error}"
            )

    def _shaped(self, rewards: torch.Tensor, outcomes: Sequence[Outcome]) -> torch.Tensor:
        """Rewards with the penalty on responses near the limit, if there is one."""
        cache = self.config.rollouts.overlong_cache_length
        if cache is None:
            return rewards
        lengths = torch.tensor([float(o.longest_response) for o in outcomes])
        return rewards + soft_overlong_penalty(lengths, self.config.rollouts.max_new_tokens, cache).view_as(rewards)

    def _nothing_to_learn(self, rewards: torch.Tensor, outcomes: Sequence[Outcome]) -> str | None:
        """Why an update on these samples would learn nothing, if so."""
        if all(o.error is not None for o in outcomes):
            return "no sample could be judged"
        num_failed, limit = sum(o.error is not None for o in outcomes), self.config.environment.max_failed_fraction
        if num_failed > limit * len(outcomes):
            return (
                f"{num_failed} of {len(outcomes)} samples could not be judged, more than "
                f"environment.max_failed_fraction={limit:g}"
            )
        loss, compared = self.config.loss, self.config.rollouts.compared
        if self.config.rollouts.mask_truncated and all(o.truncated for o in outcomes if o.error is None):
            return "all responses were truncated"
        if compared is None or loss.use_kl_in_reward or loss.learns_without_advantages:
            return None
        shape = (1, -1) if compared == "batch" else tuple(rewards.shape)
        if bool(has_signal(rewards.view(shape), are_judged(outcomes).view(shape)).any()):
            return None
        return "all rewards are equal" if compared == "batch" else "all rewards of each prompt are equal"

    def _columns(self) -> list[TokenColumn]:
        """Return the token columns of `_batch_of`."""
        return token_columns(self.inputs.tokenizer.pad_token_id, self._replayed_experts())

    def _replayed_experts(self) -> tuple[int, int] | None:
        """(layers, topk) of the experts that tokens are sent to again; None without."""
        if not self.config.model.moe_router_replay:
            return None
        family = self.policy.model.family
        assert isinstance(family, Mixture), "checked as the model was built"
        return sum(family.experts.sparse_layers), family.experts.topk

    def _batch_of(self, rollouts: Sequence[Rollout]) -> BatchedDataDict[Any]:
        """Return the training batch of the conversations that this rank has led."""
        return to_batch(rollouts, self.inputs.tokenizer.pad_token_id, self._replayed_experts())

    def _share_out(self, step: int, rollouts: Rollouts) -> OwnRows[Any]:
        """`_batch_of` the rollouts that this replica trains on, whose tokens go to no other."""
        topology, lengths = self.policy.topology, [outcome.num_tokens for outcome in rollouts.outcomes]
        columns, led = self._columns(), sorted(rollouts.own) if topology.leads_replica else []
        batch = self._batch_of([rollouts.own[place] for place in led])
        owners = torch.zeros(len(rollouts), dtype=torch.long)
        if topology.leads_replica:
            row_of = {place: row for row, place in enumerate(led)}
            for minibatch in map(torch.tensor, self._minibatch_rows(step, len(rollouts))):
                places = minibatch.tolist()
                known = {n: row_of[place] for n, place in enumerate(places) if place in row_of}
                tokens_of = functools.partial(_rows_of, batch, known)
                division = self.policy.divide([lengths[place] for place in places], tokens_of, list(known))
                for replica, chosen in enumerate(division):
                    owners[minibatch[chosen]] = replica
        owners = broadcast_in_replica(owners, topology)
        wanted = [(owners == replica).nonzero()[:, 0].tolist() for replica in range(topology.data.size)]
        share = Share(wanted[topology.data.rank], len(rollouts), topology.data)
        rows = rows_of_replica(batch, led, wanted, lengths, columns, topology)
        rows["input_lengths"] = share.select(torch.tensor(lengths))
        rows["sample_mask"] = torch.ones(len(share.indices))
        if not share.indices:
            rows.pop("routed_experts", None)  # there are none to replay: what keeps ranks in step is routed anew
        return OwnRows(rows, share)

    def _training_data(self, step: int, rollouts: Rollouts, rewards: torch.Tensor) -> OwnRows[Any]:
        loss, temperature = self.config.loss, self.config.rollouts.temperature
        data, outcomes = self._share_out(step, rollouts), rollouts.outcomes
        counted = are_judged(outcomes)  # a sample without a reward teaches nothing
        if self.config.rollouts.mask_truncated:
            counted &= ~torch.tensor([o.truncated for o in outcomes])
        data["sample_mask"] = data.share.select(counted.float())
        with self._phase(step, "logprobs"):
            if self.config.scores_samples(self.replays):
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
        self._add_advantages(step, data, outcomes, rewards, penalty)
        if loss.positive_example_nll_weight:
            add_positive_examples(data, rewards)
        return data

    def _add_advantages(
        self,
        step: int,
        data: OwnRows[Any],
        outcomes: Sequence[Outcome],
        rewards: torch.Tensor,
        penalty: torch.Tensor | None,
    ) -> None:
        """Add the entries of the losses that follow from the rewards [P, G] of all samples.

        Args:
            outcomes: of all samples too, before rewards were shaped.
            penalty: [B, S] to be subtracted from each own token's reward (nats).
        """
        assert isinstance(self.config, GRPOConfig)
        judged = are_judged(outcomes).view_as(rewards)
        data["advantages"] = advantages_of(self.config.grpo, rewards, data["token_mask"], penalty, data.share, judged)

    def _check_mismatch(self, step: int, metrics: dict[str, Any]) -> None:
        """Raises TrainingError if sampler and trainer disagree too much on the same weights."""
        if step == self.config.first_update_step and not self.config.model.begins_with_dropout:
            self._check_first(metrics)
        bound, error = self.config.generation.max_token_mult_prob_error, metrics["token_mult_prob_error"]
        if bound is not None and error > bound:
            raise TrainingError(
                f"step {step}: token_mult_prob_error is {error:.4g}, above generation.max_token_mult_prob_error="
                f"{bound:g}: sampler and trainer disagree on the log-probabilities of the same weights"
            )

    def _check_first(self, metrics: dict[str, Any]) -> None:
        tolerance = FIRST_STEP_TOLERANCE[self.config.model.dtype]
        expected = {} if self.config.rollouts.filters_tokens else {"token_mult_prob_error": 1.0}
        if self.config.loss.kl_in_loss:
            expected["kl_penalty"] = 0.0
        if not self.config.loss.disable_ppo_ratio:
            expected["probs_ratio"] = 1.0
        for name, value in expected.items():
            if abs(metrics[name] - value) > tolerance:
                raise TrainingError(
                    f"step {self.config.first_update_step}: before any update {name} must be {value:g}, but is "
                    f"{metrics[name]:.4g}: sampler, policy and reference do not agree on the log-probabilities of the "
                    "same weights"
                )

    # ------------------------------------------------------------ beside the step

    def validate_on(self, name: str, dataset: PromptDataset, step: int) -> dict[str, float]:
        """Rewards of greedy answers to a set's prompts, as many conversations at a time as a step has."""
        sums, prompts, options = RolloutSums(), dataset.prompts, self.config.rollouts
        size = options.num_prompts_per_step * options.num_generations_per_prompt
        with self._sampling(step, "validation", weight_version=step):
            for first in range(0, len(prompts), size):
                places = range(first, min(first + size, len(prompts)))
                sums.add(self.worker.run([(i, prompts[i]) for i in places], places, greedy=True).outcomes)
        return sums.metrics()

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

    def _timings(self, outcomes: Sequence[Outcome], started: float, flops: float) -> dict[str, float]:
        generated, total = sum(o.response_length for o in outcomes), sum(o.num_tokens for o in outcomes)
        timings = {f"{name}_seconds": value for name, value in self.seconds.items()}
        for name, tokens in (("generation", generated), ("logprobs", total), ("training", total)):
            if self.seconds.get(name):
                timings[f"{name}_tokens_per_second"] = tokens / self.seconds[name]
        return {**timings, **self.throughput(total, flops, time.perf_counter() - started)}


def _rows_of(batch: BatchedDataDict[Any], row_of: dict[int, int], asked: Sequence[int]) -> torch.Tensor:
    """Return the tokens of the rows of `batch` that `row_of` gives the numbers asked for."""
    tokens: torch.Tensor = batch["input_ids"][[row_of[n] for n in asked]]
    return tokens


def add_positive_examples(data: BatchedDataDict[Any], rewards: torch.Tensor) -> None:
    """Add the entries for the negative log-likelihood of samples with a positive reward.

    Args:
        rewards: of all samples, also where `data` has a replica's own.
    """
    data["rewards"] = share_of(data).select(rewards.flatten())
    _count_positive(data)


def _count_positive(data: BatchedDataDict[Any]) -> None:
    share = share_of(data)
    positive = data["token_mask"][:, 1:].sum(1) * data["sample_mask"] * (data["rewards"] > 0)
    (total,) = share.sum(float(positive.sum()))
    data["num_positive_tokens"] = torch.full((data.size,), total)


def minibatch_of(data: OwnRows[Any], rows: Sequence[int]) -> OwnRows[Any]:
    """Return some rows of a global batch as a global batch of their own, of which each replica has those that it had.

    Args:
        rows: of the global batch, in ascending order.
    """
    place_of = {row: place for place, row in enumerate(rows)}
    own = [n for n, row in enumerate(data.share.indices) if row in place_of]
    share = Share([place_of[data.share.indices[n]] for n in own], len(rows), data.share.replicas)
    part: OwnRows[Any] = OwnRows(data.select_indices(own).data, share)
    if not own:
        part.pop("routed_experts", None)
    if "num_positive_tokens" in part:
        _count_positive(part)
    return part


class _Timer:
    """Adds the time spent inside to `seconds[name]`."""

    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self.seconds, self.name = seconds, name

    def __enter__(self) -> None:
        self.started = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.seconds[self.name] = self.seconds.get(self.name, 0.0) + time.perf_counter() - self.started
