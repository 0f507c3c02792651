"""Group relative policy optimization: rollouts by the policy, rewards, advantages, updates."""

from __future__ import annotations

import contextlib
import functools
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from mcore_rl import platform
from mcore_rl.algorithms.advantages import EstimatorInputs, advantages_of, token_rewards_with_penalty
from mcore_rl.config import GRPOConfig, RLConfig, RolloutOptions
from mcore_rl.data.chat import reads_images
from mcore_rl.data.choices import CHOICES, replayed_choices
from mcore_rl.data.datasets import PromptDataset
from mcore_rl.data.images import IMAGES
from mcore_rl.data.prefix_plan import token_identities
from mcore_rl.data.tokenize import count_ids
from mcore_rl.distributed.batched_data_dict import BatchedDataDict, BatchShare, LocalBatch, batch_share
from mcore_rl.distributed.collectives import broadcast_in_replica, broadcast_object
from mcore_rl.environments.interfaces import CollectiveEnvironment, Environment
from mcore_rl.environments.judge_processes import JudgeProcesses, probe
from mcore_rl.environments.reward_model import RewardModelEnvironment
from mcore_rl.errors import TrainingError, UserError
from mcore_rl.losses.common import over_updates, reductions_of
from mcore_rl.losses.policy_gradient import build_policy_loss, calculate_kl, observation_mask, soft_overlong_penalty
from mcore_rl.losses.policy_options import PolicyLossOptions
from mcore_rl.models.generation.interfaces import GenerationInterface
from mcore_rl.models.generation.megatron.generation import megatron_generation_of
from mcore_rl.models.generation.vllm.client import BIASED_IDS
from mcore_rl.models.generation.vllm.generation import vllm_generation_of
from mcore_rl.models.generation.vllm.placement import places_of_launch
from mcore_rl.models.generation.vllm.server import describe_fp8_sampling
from mcore_rl.models.megatron.families import family_of
from mcore_rl.models.megatron.families.base import recorded_choices
from mcore_rl.models.policy.megatron_policy import MegatronPolicy
from mcore_rl.rollouts.collector import (
    RolloutCollector,
    StatisticsBySource,
    answers_of,
    groups_with_signal,
    named_rewards,
    rollout_metrics,
    staleness_metrics,
)
from mcore_rl.rollouts.recordings import REPLAYED_OPTIONS, check_record, read_recording, recorded_by
from mcore_rl.rollouts.rollout_images import images_of_prompts, images_of_sessions
from mcore_rl.rollouts.samples import (
    Rollout,
    RolloutBatch,
    RolloutSummary,
    RowsOfRollouts,
    TokenColumn,
    are_judged,
    exchange_kept_tokens,
    exchange_rows,
    has_signal,
    rewards_of_tokens,
    to_batch,
    token_columns,
)
from mcore_rl.rollouts.worker import Conversation, RolloutWorker
from mcore_rl.run import watchdog
from mcore_rl.run.directory import JUDGE_LOG, RunDirectory
from mcore_rl.run.loop import TrainingLoop
from mcore_rl.run.metrics import JsonLinesLog
from mcore_rl.run.preflight import find_checkpoints, is_restart
from mcore_rl.run.setup import RunInputs, claim_output_dir, load_inputs
from mcore_rl.utils import torchrun
from mcore_rl.utils.console import PrintLine, rank_zero_printer, silent
from mcore_rl.utils.files import digest_of_file

if TYPE_CHECKING:
    from mcore_rl.algorithms.critic import Critic
    from mcore_rl.config import GRPOAlgorithmConfig

PROBED_RECORDS = 4
"""Number of records that the judge is tested on. If it fails on all of them, the run is refused."""


def check_inputs(
    config: RLConfig, record: Path | None, replay: Path | None
) -> tuple[RunInputs[PromptDataset], dict[int, list[Rollout]] | None]:
    """Check all inputs of the run and test the judge, without writing any file.

    Args:
        record: file to record every step's rollouts in.
        replay: recorded file to train from instead of generating.

    Returns:
        The run's inputs, and the recorded rollouts of each step, or None without `replay`.

    Raises:
        UserError: the configuration, the data or one of the files is not usable.
    """
    inputs: RunInputs[PromptDataset] = load_inputs(config)
    prompts = inputs.train.prompts
    recorded = None
    if replay:
        steps = config.total_steps(len(prompts))
        required = {**config.rollouts.model_dump(include=REPLAYED_OPTIONS), "data": inputs.train.fingerprint}
        keeps_mask = config.rollouts.sampled_at_most is not None
        replayed = replayed_choices(config.model)
        recorded = read_recording(replay, steps, required, replayed, config.algorithm, keeps_mask)
    if not config.rollouts.sample_unused_ids:
        _check_unused_ids(config, inputs, recorded)
    if not replay and torchrun.rank() == 0 and config.environment.name == "agent":
        from mcore_rl.agents.programs import check_program

        check_program(config.environment)
    elif not replay and torchrun.rank() == 0 and config.environment.name != "reward_model":
        first = [Conversation(Rollout.begin(0, 0, prompt), prompt).sample for prompt in prompts[:PROBED_RECORDS]]
        probe(config.environment, first, config.parallel.timeout_seconds / 2)
    if record and torchrun.rank() == 0:  # only rank 0 writes the file; other ranks may see other files
        begun = RunDirectory(config.output_dir).identity is not None  # also a run that was killed before its first save
        goes_on = bool(find_checkpoints(config)[0]) or is_restart(config.output_dir) or begun
        check_record(record, recorded_by(config, inputs.train.fingerprint), goes_on)
    return inputs, recorded


def _check_unused_ids(
    config: RLConfig, inputs: RunInputs[PromptDataset], recorded: dict[int, list[Rollout]] | None
) -> None:
    """Check that ids without a token can be excluded.

    Raises:
        UserError: there are more of them than vLLM excludes, or recorded rollouts contain one.
    """
    count, rows = count_ids(inputs.tokenizer), family_of(inputs.hf_config).vocab_size
    key = f"{config.algorithm}.sample_unused_ids"
    if recorded is not None:
        last = max((int(r.input_ids.max(initial=0)) for rollouts in recorded.values() for r in rollouts), default=0)
        if last >= count:
            raise UserError(
                f"{key}: the recording has the id {last}, but the tokenizer's last is {count - 1}; set it true"
            )
    elif config.generation.backend == "vllm" and rows - count > BIASED_IDS:
        raise UserError(
            f"{key}: the model has {rows - count} ids without a token, but vLLM excludes at most {BIASED_IDS}; set it "
            "true"
        )


def prepare(
    config: RLConfig, record: Path | None, replay: Path | None
) -> tuple[RunInputs[PromptDataset], dict[int, list[Rollout]] | None]:
    """Call `check_inputs`, lock the output directory, and check that vLLM's servers fit; return the inputs."""
    inputs, recorded = check_inputs(config, record, replay)
    contents = "" if replay is None else digest_of_file(replay)
    inputs = claim_output_dir(config, inputs, {"--record": str(record is not None), "--replay": contents})
    if replay is None or config.data.validation is not None:
        places_of_launch(config)
    return inputs, recorded


@contextlib.contextmanager
def rollout_worker(
    config: RLConfig, inputs: RunInputs[PromptDataset], policy: MegatronPolicy
) -> Iterator[RolloutWorker]:
    """Context with a `RolloutWorker`. It starts generation engine and environment, and closes both at the end."""
    say = rank_zero_printer(policy.is_writer)
    with contextlib.ExitStack() as started:
        if config.environment.name == "agent":
            from mcore_rl.agents.worker import AgentWorker  # needs the packages of the extra `agents`

            generation = build_generation(config, policy, inputs.tokenizer, say)
            started.callback(generation.close)
            agents = AgentWorker(config, generation, inputs.tokenizer, policy.topology, say)
            started.callback(agents.close)
            yield agents
            return
        environment = build_environment(config, policy, inputs)
        if environment is not None:
            started.callback(environment.close)
        generation = build_generation(config, policy, inputs.tokenizer, say)
        started.callback(generation.close)
        turns, seconds = config.environment.max_turns, config.parallel.meeting_seconds
        worker = RolloutWorker(generation, environment, inputs.tokenizer, turns, seconds, policy.topology, say)
        started.callback(worker.close)
        yield worker


def build_environment(
    config: RLConfig, policy: MegatronPolicy, inputs: RunInputs[PromptDataset]
) -> Environment | CollectiveEnvironment | None:
    """Return the environment on the ranks that judge, and None on all other ranks. Collective."""
    if config.environment.name == "reward_model":
        day = broadcast_object(inputs.day)  # the ranks may have started on both sides of midnight
        judge = RewardModelEnvironment(config, day, policy.topology.data)
        rank_zero_printer(policy.is_writer)(f"reward model: {judge.model.describe()}")
        return judge
    if policy.topology.leads_replica:
        return JudgeProcesses(config.environment, config.output_dir / JUDGE_LOG)
    return None


def build_generation(config: RLConfig, policy: Any, tokenizer: Any, say: PrintLine = silent) -> GenerationInterface:
    """Return the engine that generates responses with the weights of `policy`, a `MegatronPolicy`.

    Args:
        say: prints the events of vLLM's servers, and the progress of long generation.
    """
    if config.generation.backend == "vllm":
        return vllm_generation_of(config, policy, tokenizer, say)
    return megatron_generation_of(config, policy, tokenizer, say)


def build_policy(config: RLConfig, inputs: RunInputs[PromptDataset]) -> MegatronPolicy:
    """Return the policy; its learning-rate schedule covers all updates of the run.

    Ids without a token have no probability, unless `sample_unused_ids` is set.
    """
    steps = config.total_steps(len(inputs.train))
    updates = (steps - config.first_update_step + 1) * config.updates_per_step
    policy = MegatronPolicy(config, updates, keep_reference=config.keeps_reference)
    if not config.rollouts.sample_unused_ids:
        policy.exclude_unused_ids(inputs.tokenizer)
    return policy


def train_grpo(config: GRPOConfig, record: Path | None = None, replay: Path | None = None) -> Path | None:
    """Train the policy to raise the rewards of its responses, comparing the responses to the same prompt.

    Args:
        record: file to record every step's rollouts in.
        replay: recorded file to train from instead of generating.

    Returns:
        The directory of the exported model; None if no model is exported.

    Raises:
        UserError: the configuration, the data or one of the files is not usable.
    """
    config = platform.resolve(config)
    inputs, recorded = prepare(config, record, replay)
    policy = build_policy(config, inputs)
    with rollout_worker(config, inputs, policy) as worker:
        recording = JsonLinesLog(record) if record else None
        exported = GRPOTrainer(config, inputs, policy, worker, recording=recording, recorded=recorded).run()
    policy.shutdown()
    return exported


FIRST_STEP_TOLERANCE, ROUNDED_FIRST_STEP_TOLERANCE = 1e-3, 0.2
"""`generation.first_step_tolerance`, if it is not set: in float32, and in bfloat16 or FP8.

It covers rounding, also that of an engine's other kernels.
"""

SLOW_JUDGING = 0.25
"""Fraction of a step's time that judging may take. Above it, the console names the keys that shorten judging."""


class GRPOTrainer(TrainingLoop[PromptDataset]):
    """Trains a policy on rollouts: GRPO and its variants, or PPO with a critic.

    The attribute `consumed_samples` counts prompts.

    Args:
        critic: model that computes PPO's advantages; without a critic, advantages compare the samples of a group.
        recording: log to which every step's rollouts are written; None for no recording.
        recorded: recorded rollouts of each step, to train on instead of generating.
    """

    config: RLConfig
    has_sampling_mask = False
    """Whether the step's rollouts have the tokens that the sampler kept."""

    def __init__(
        self,
        config: RLConfig,
        inputs: RunInputs[PromptDataset],
        policy: MegatronPolicy,
        worker: RolloutWorker,
        critic: Critic | None = None,
        recording: JsonLinesLog | None = None,
        recorded: dict[int, list[Rollout]] | None = None,
    ) -> None:
        super().__init__(config, inputs, policy)
        self.worker, self.critic = worker, critic
        self.replays = recorded is not None
        self.loss_fn = build_policy_loss(config.effective_loss_options(self.replays))
        self.collector = RolloutCollector(
            config, inputs, policy, worker, self.say, self.total_steps, recording, recorded
        )
        self.phases = PhaseTimes(0)
        self.is_advised = False
        self.failed_steps = 0
        """Number of consecutive steps in which too many samples could not be judged."""
        self.judged_in_failed_steps = 0
        """Number of judged samples in the steps that `failed_steps` counts."""
        self.steps_before = 0
        """Number of steps of the run before this process resumed it."""

    def train_step(self, step: int) -> dict[str, Any]:
        """Sample and judge responses, compute log-probabilities and advantages, and update; return the step's metrics.

        Raises:
            FloatingPointError: loss or gradient norm is not finite. Raised on every rank; the weights are unchanged.
            TrainingError: too many samples could not be judged, or the log-probabilities of sampler and trainer differ.
        """
        started, config, policy, critic = time.perf_counter(), self.config, self.policy, self.critic
        phases = self.phases = PhaseTimes(step)

        # Sample and judge: engines answer with the policy's weights, an environment rewards the answers. Every rank
        # receives rewards and lengths; the tokens stay on the replica that generated them.
        with phases("refit"):
            if not self.replays:
                self.worker.prepare(step - 1)
        with phases("generation", "generation, answers and their judging"):
            rollouts, asked = self.collector.collect(step, self.consumed_samples)
        self.worker.finish()
        self.collector.record(step, rollouts)
        self.consumed_samples += asked
        outcomes = rollouts.outcomes
        sums = StatisticsBySource(self.inputs.train.source_of)
        sums.add(outcomes)
        metrics: dict[str, Any] = rollout_metrics(outcomes, rollouts.dropped) | sums.metrics_of_sources()
        if config.rollouts.max_staleness:
            metrics |= staleness_metrics(outcomes, version=step - 1)
        try:
            self._check_judged(step, rollouts.generated)
        except TrainingError:
            self._log_samples(step, rollouts, None)
            raise

        rewards = shaped_rewards(config, outcomes)  # [P, G]
        if reason := nothing_to_learn(config, rewards, outcomes, rollouts.dropped):
            self.say(f"step {step}: {reason}; there is nothing to learn from, no update")
            self._log_samples(step, rollouts, None)
            self._skip_updates(step)
            return {**metrics, "skipped_update": 1.0, **self._timings(outcomes, started, flops=0.0)}

        # Divide the rows: each replica receives those that it trains on, so that all replicas have equal work.
        rows, of_rollouts = self._share_out(step, rollouts)
        rows["sample_mask"] = of_rollouts.select(sample_mask(config.rollouts, outcomes))

        # Score: log-probabilities under the current weights (unless the sampler's are used) and under the reference.
        with phases("logprobs"):
            temperature = config.rollouts.temperature
            if config.rollouts.reads_score_norms:
                scored = policy.get_score_norms(rows, temperature, counted_only=True)
                rows["score_norms"] = scored["score_norms"]
            elif config.scores_samples(self.replays):
                scored = policy.get_logprobs(rows, temperature=temperature, counted_only=True)
            if config.scores_samples(self.replays):
                rows["prev_logprobs"] = scored["logprobs"]
            if policy.reference is not None:
                scored = policy.get_reference_policy_logprobs(rows, temperature=temperature, counted_only=True)
                rows["reference_policy_logprobs"] = scored["reference_logprobs"]
        penalty = kl_penalty(config.loss, rows) if config.loss.use_kl_in_reward else None  # [B, S]

        # Advantages: per sample, within its group; or per token, with a critic.
        if critic is None:
            options, judged = cast("GRPOAlgorithmConfig", config.rollouts), are_judged(outcomes).view_as(rewards)
            mask, more = rows["token_mask"], self._estimator_inputs(rows, of_rollouts, rewards, outcomes)
            rows["advantages"] = advantages_of(options, rewards, mask, penalty, of_rollouts, judged, more)
        else:
            with phases("critic"):
                metrics |= critic.add_advantages(rows, of_rollouts, rewards, outcomes, penalty)
        add_columns_of_loss(config.loss, rows, of_rollouts.select(rewards.flatten()))
        self._log_samples(step, rollouts, rows, of_rollouts)

        # Update: optimizer steps of the critic and of the policy on the minibatches.
        minibatches, passes = self._minibatches(step, rows, outcomes), config.rollouts.num_updates_per_rollout
        if critic is not None:
            with phases("critic"):
                metrics |= critic.update(minibatches, passes, of_all=self.updates_per_step)
        flops = 0.0 if critic is None else critic.take_flops()
        if step >= config.first_update_step:
            with phases("training"):
                metrics |= self._update(step, minibatches, passes)
            flops += passes * policy.flops_of(rows)
        return {**metrics, "skipped_update": 0.0, **self._timings(outcomes, started, flops)}

    def validate_on(self, name: str, dataset: PromptDataset, step: int) -> dict[str, float]:
        """Generate and judge responses to the prompts of a validation set; return metrics of their rewards.

        If each prompt gets a single response, the response is generated greedily. If it gets several responses, they
        are sampled, with the same random numbers in each validation. A batch has as many responses as a training step.
        """
        prompts, options, phases = dataset.prompts, self.config.rollouts, PhaseTimes(step)
        count = options.num_validation_generations
        sums = StatisticsBySource(dataset.source_of, options.ks_of_validation, count)
        size = max(1, options.num_prompts_per_step * options.num_generations_per_prompt // count)
        with phases("refit"):
            self.worker.prepare(step)
        with phases("validation", "validation, answers and their judging"):
            for first in range(0, len(prompts), size):
                indices = range(first, min(first + size, len(prompts)))
                asked = [(i, prompts[i]) for i in indices for _ in range(count)]
                ids = range(first * count, first * count + len(asked))
                responses = self.worker.run(asked, ids, greedy=count == 1)
                answers = answers_of(responses, self.worker.topology) if count > 1 else None
                sums.add(responses.outcomes, answers)
        self.worker.finish()
        return sums.metrics(if_none_judged=math.nan)  # NaN is never the best value

    def release_engines(self) -> None:
        self.worker.cancel()
        with contextlib.suppress(TrainingError):  # all servers have ended, so none uses the device
            self.worker.finish()

    @property
    def updates_per_step(self) -> int:
        return self.config.updates_per_step

    @property
    def max_record_length(self) -> int:
        return self.config.max_prompt_length

    # ------------------------------------------------------------ the parts of a step

    def _share_out(self, step: int, rollouts: RolloutBatch) -> tuple[LocalBatch[Any], BatchShare]:
        """Divide the rows of the step's samples among the replicas. Collective.

        The tokens of a row are sent only to the replica that trains on it.

        Returns:
            The rows that this replica trains on; and its share of the samples: for each of these rows, the sample's
            number.
        """
        topology, all_rows = self.policy.topology, RowsOfRollouts.of(rollouts.outcomes)
        lengths = [size.tokens for size in all_rows.sizes]
        pad = self.inputs.tokenizer.pad_token_id
        recorded = recorded_choices(self.policy.model.family, self.config.model)
        columns, led = token_columns(pad, recorded), sorted(rollouts.own) if topology.leads_replica else []
        own, held = [rollouts.own[place] for place in led], all_rows.of_rollouts(led)
        batch = to_batch(own, pad, recorded)
        has_sessions = self.config.environment.name == "agent" and reads_images(self.inputs.tokenizer)
        of_prompts = images_of_prompts(rollouts, all_rows, self.inputs.train)
        images_of = images_of_sessions(own, held, topology) if has_sessions else of_prompts
        batch.update(images_of(held))
        if self.critic is not None or self.config.rollouts.reads_score_norms:
            columns.append(TokenColumn("token_rewards", torch.float32))
            batch["token_rewards"] = rewards_of_tokens(own, batch)
        owners = torch.zeros(len(lengths), dtype=torch.long)
        if topology.leads_replica:
            row_of = {number: row for row, number in enumerate(held)}
            for minibatch in self._minibatch_rows(step, all_rows):
                known = {n: row_of[number] for n, number in enumerate(minibatch) if number in row_of}
                tokens_of = functools.partial(_rows_of, batch, known)
                division = self.policy.divide([lengths[number] for number in minibatch], tokens_of, list(known))
                for replica, chosen in enumerate(division):
                    owners[torch.tensor(minibatch)[chosen]] = replica
        owners = broadcast_in_replica(owners, topology)
        wanted = [(owners == replica).nonzero()[:, 0].tolist() for replica in range(topology.data.size)]
        share = BatchShare(wanted[topology.data.rank], len(lengths), topology.data)
        rows: dict[str, Any] = {**exchange_rows(batch, held, wanted, lengths, columns, topology)}
        self.has_sampling_mask = any(outcome.kept_tokens for outcome in rollouts.outcomes)
        if self.has_sampling_mask:
            kept = [row.kept_tokens for rollout in own for row in rollout.rows]
            rows["kept_tokens"] = exchange_kept_tokens(kept, held, wanted, all_rows.sizes, topology)
        rows["input_lengths"] = share.select(torch.tensor(lengths))
        rows["sample_mask"] = torch.ones(len(share.indices))
        if (weights := all_rows.weights()) is not None:
            rows["sample_weights"] = share.select(weights)
        samples = [all_rows.rollout_of[row] for row in share.indices]
        rows |= images_of(share.indices)
        return LocalBatch(rows, share), BatchShare(samples, len(rollouts), topology.data)

    def _estimator_inputs(
        self,
        rows: LocalBatch[Any],
        of_rollouts: BatchShare,
        rewards: torch.Tensor,
        outcomes: Sequence[RolloutSummary],
    ) -> EstimatorInputs:
        """Return what the configured advantage estimator reads in addition to the rewards [P, G] of the samples.

        Columns of `rows` that only the estimator reads are removed.

        Args:
            of_rollouts: the samples of `rows`.
        """
        options = self.config.rollouts
        if options.compares_named_rewards:
            judges = self.config.environment.rewards
            by_name = named_rewards(outcomes, list(judges)).view(len(judges), *rewards.shape)
            return EstimatorInputs(by_name, torch.tensor([judge.weight for judge in judges.values()]))
        if options.reads_score_norms:
            shaping = rewards.flatten() - torch.tensor([outcome.reward for outcome in outcomes])
            earned = token_rewards_with_penalty(rows, of_rollouts.select(shaping), None)
            del rows["token_rewards"]
            return EstimatorInputs(token_rewards=earned, score_norms=rows.pop("score_norms"))
        return EstimatorInputs()

    def _update(self, step: int, minibatches: Sequence[LocalBatch[Any]], passes: int) -> dict[str, Any]:
        """Run the policy updates of a step, and return their metrics (see `over_updates`)."""
        updates, temperature = list[dict[str, float]](), self.config.rollouts.temperature
        for minibatch in [*minibatches] * passes:
            check = None if updates or self.replays else functools.partial(self._check_mismatch, step)
            updates.append(self.policy.train_batch(minibatch, self.loss_fn, temperature, check))
        if left_out := self.updates_per_step - len(updates):
            self.policy.advance_schedule(left_out)
        return over_updates(updates, reductions_of(self.loss_fn))

    def _skip_updates(self, step: int) -> None:
        """Advance the learning-rate schedules for a step without updates, as if its updates had been made."""
        if step >= self.config.first_update_step:
            self.policy.advance_schedule(self.updates_per_step)
        if self.critic is not None:
            self.critic.model.advance_schedule(self.updates_per_step)

    def _minibatch_rows(self, step: int, rows: RowsOfRollouts) -> list[list[int]]:
        """Return the row numbers of each minibatch of a step, in ascending order.

        A minibatch consists of whole groups. The groups are shuffled; their order depends only on seed and step.
        """
        size, group = self.config.rollouts.train_global_batch_size, self.config.rollouts.num_generations_per_prompt
        if size is None:
            return [list(range(len(rows.sizes)))]
        groups = list(range(0, max(rows.rollout_of) + 1, group))
        random.Random(f"{self.config.seed} minibatches {step}").shuffle(groups)
        parts = [sorted(groups[n : n + size // group]) for n in range(0, len(groups), size // group)]
        return [rows.of_rollouts([first + n for first in part for n in range(group)]) for part in parts]

    def _minibatches(
        self, step: int, data: LocalBatch[Any], outcomes: Sequence[RolloutSummary]
    ) -> list[LocalBatch[Any]]:
        """Return the step's minibatches; minibatches without a token to train on are left out. Collective."""
        if self.config.rollouts.train_global_batch_size is None:
            return [data]
        parts = [minibatch_of(data, rows) for rows in self._minibatch_rows(step, RowsOfRollouts.of(outcomes))]
        counts = (float((part["token_mask"][:, 1:].sum(1) * part["sample_mask"]).sum()) for part in parts)
        return [part for part, count in zip(parts, data.share.sum(*counts), strict=True) if count]

    def _log_samples(
        self,
        step: int,
        rollouts: RolloutBatch,
        rows: LocalBatch[Any] | None,
        of_rollouts: BatchShare | None = None,
    ) -> None:
        """Write some of the step's samples, each with its mean advantage, to samples.jsonl and the trackers.

        Without `rows`, there are no advantages.

        Args:
            of_rollouts: the samples of `rows`.
        """
        means = None
        if rows is not None and of_rollouts is not None:
            mask = rows["token_mask"]
            sums, counts = (of_rollouts.gather(x.sum(1)) for x in (rows["advantages"] * mask, mask))
            means = sums / counts.clamp(min=1)
        self.reporter.record_samples(step, self.collector.log_samples(step, rollouts, means))

    def _check_judged(self, step: int, generated: Sequence[RolloutSummary]) -> None:
        """Raise TrainingError if too many samples could not be judged in each of the last `max_failed_steps` steps.

        If this process makes fewer steps in total, it raises the error if too many samples failed in all of them.
        """
        errors = [outcome.error for outcome in generated if outcome.error is not None]
        judged, fraction = len(generated) - len(errors), self.config.environment.max_failed_fraction
        if not _too_many_failed(len(errors), len(generated), fraction):
            self.failed_steps = self.judged_in_failed_steps = 0
            return
        self.failed_steps, self.judged_in_failed_steps = self.failed_steps + 1, self.judged_in_failed_steps + judged
        limit = min(self.config.environment.max_failed_steps, self.total_steps - self.steps_before)
        if self.failed_steps >= limit:
            some = f"more than environment.max_failed_fraction={fraction:g} of the samples could not be judged"
            raise TrainingError(
                f"step {step}: {some if self.judged_in_failed_steps else 'no sample could be judged'} "
                f"in {self.failed_steps} {'step' if self.failed_steps == 1 else 'consecutive steps'}; "
                f"the last error: {errors[-1]}"
            )

    def _check_mismatch(self, step: int, metrics: Mapping[str, float]) -> None:
        """Check the loss's metrics before a step's first update, when sampler and trainer have the same weights.

        Raises:
            TrainingError: log-probabilities of sampler, policy and reference differ too much.
        """
        if step == self.config.first_update_step and not self.config.model.begins_with_dropout:
            self._check_first(metrics)
        bound, error = self.config.generation.max_token_mult_prob_error, metrics["token_mult_prob_error"]
        if bound is not None and error > bound:
            raise TrainingError(
                f"step {step}: token_mult_prob_error is {error:.4g}, above "
                f"generation.max_token_mult_prob_error={bound:g}: sampler and trainer compute different "
                "log-probabilities with the same weights"
            )

    def _check_first(self, metrics: Mapping[str, float]) -> None:
        """Raise TrainingError if the first update's metrics show different weights; warn if single tokens differ.

        An engine may compute few tokens very differently, and no weights are wrong. `logprob_error` bounds the
        influence of a token.
        """
        step, tolerance = self.config.first_update_step, self.config.generation.first_step_tolerance
        if tolerance is None:
            tolerance = FIRST_STEP_TOLERANCE if self.config.model.in_float32 else ROUNDED_FIRST_STEP_TOLERANCE
        same_tokens = self.has_sampling_mask or not self.config.rollouts.filters_tokens
        expected = {"logprob_error": 0.0} if same_tokens else {}
        if self.config.loss.kl_in_loss:
            expected["kl_penalty"] = 0.0
        if self.config.loss.has_ratio:
            expected["probs_ratio"] = 1.0
        for name, value in expected.items():
            if not abs(metrics[name] - value) <= tolerance:
                raise TrainingError(
                    f"step {step}: before any update {name} must be {value:g}, but is {metrics[name]:.4g}: sampler, "
                    "policy and reference compute different log-probabilities with the same weights. The bound is "
                    f"generation.first_step_tolerance={tolerance:g}"
                )
        if same_tokens and metrics["token_mult_prob_error"] - 1 > tolerance:
            self.say(
                f"step {step}: warning: sampler and trainer differ much in few tokens: token_mult_prob_error is "
                f"{metrics['token_mult_prob_error']:.4g}, but logprob_error {metrics['logprob_error']:.2g}. "
                "loss.truncated_importance_sampling_ratio=2 bounds the weight of such tokens"
            )

    def _timings(self, outcomes: Sequence[RolloutSummary], started: float, flops: float) -> dict[str, float]:
        generated, total = sum(o.response_length for o in outcomes), sum(o.num_tokens for o in outcomes)
        seconds, judging = self.phases.seconds, 0.0 if self.replays else self.worker.judging_seconds
        if judging:  # the phase of generation includes it
            seconds = seconds | {"generation": seconds["generation"] - judging, "judging": judging}
            self._advise_on_judging(judging, time.perf_counter() - started)
        timings = {f"{name}_seconds": value for name, value in seconds.items()}
        for name, tokens in (("generation", generated), ("logprobs", total), ("training", total)):
            if seconds.get(name):
                timings[f"{name}_tokens_per_second"] = tokens / seconds[name]
        return {**timings, **self.throughput(total, flops, time.perf_counter() - started)}

    def _advise_on_judging(self, seconds: float, total: float) -> None:
        """If judging takes a large part of a step, print (once per run) which keys of the configuration shorten it."""
        environment = self.config.environment
        is_slow = seconds > max(SLOW_JUDGING * total, 1.0)
        if self.is_advised or not is_slow or environment.name == "reward_model" or environment.batch_size > 1:
            return
        self.is_advised = True
        self.say(
            f"judging took {seconds:.1f} of the {total:.1f} s of a step: one sample a call in environment.num_workers="
            f"{environment.num_workers} processes; environment.batch_size=16 gives a function up to 16 samples a call"
        )

    # ------------------------------------------------------------ around the steps

    def print_run_description(self, done: int, steps: int) -> None:
        super().print_run_description(done, steps)
        self.steps_before = done
        for line in describe_fp8_sampling(self.config):
            self.say(line)
        if self.config.is_on_policy(self.replays) and self.config.loss.force_on_policy_ratio is None:
            self.say("one update per rollout: importance ratios are fixed at 1 (loss.force_on_policy_ratio)")
        if self.critic is not None:
            self.critic.introduce(steps * self.updates_per_step, self.say)

    def _export(self) -> Path | None:
        exported = super()._export()
        if self.critic is not None and self.critic.config.critic.export_hf:
            directory = RunDirectory(self.config.output_dir)
            self.critic.export_hf(directory.critic)
            self.say(f"critic: {directory.critic}")
        return exported


class PhaseTimes:
    """Measures the seconds of each phase of a step, and tells the watchdog the phase: `with phases("logprobs"): …`."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str, doing: str | None = None) -> Iterator[None]:
        watchdog.enter(f"step {self.step}: {doing or name}")
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


def shaped_rewards(config: RLConfig, outcomes: Sequence[RolloutSummary]) -> torch.Tensor:
    """Return the rewards [P, G] of a step's samples; if configured, responses near the length limit are penalised."""
    options = config.rollouts
    rewards = torch.tensor([o.reward for o in outcomes]).view(-1, options.num_generations_per_prompt)
    if options.overlong_cache_length is None:
        return rewards
    lengths = torch.tensor([float(o.longest_response) for o in outcomes])
    limit = options.max_new_tokens or config.data.max_sequence_length
    return rewards + soft_overlong_penalty(lengths, limit, options.overlong_cache_length).view_as(rewards)


def sample_mask(options: RolloutOptions, outcomes: Sequence[RolloutSummary]) -> torch.Tensor:
    """Return a mask that is 1 for the samples to train on.

    These are the samples that were judged; with `mask_truncated`, truncated samples are excluded.
    """
    counted = are_judged(outcomes)
    if options.mask_truncated:
        counted &= ~torch.tensor([o.truncated for o in outcomes])
    return counted.float()


def nothing_to_learn(
    config: RLConfig,
    rewards: torch.Tensor,
    outcomes: Sequence[RolloutSummary],
    dropped: Sequence[RolloutSummary] = (),
) -> str | None:
    """Return the reason why no update on these samples should be made; None if an update would learn something.

    Args:
        rewards: shaped rewards [P, G] of the samples.
        outcomes: summaries of the samples.
        dropped: summaries of those samples of the same step that are not trained on.
    """
    if all(o.error is not None for o in outcomes):
        return "no sample could be judged"
    total, limit = len(outcomes) + len(dropped), config.environment.max_failed_fraction
    num_failed = sum(o.error is not None for o in (*outcomes, *dropped))
    if _too_many_failed(num_failed, total, limit):
        return (
            f"{num_failed} of {total} samples could not be judged, more than environment.max_failed_fraction={limit:g}"
        )
    loss, compared = config.loss, config.rollouts.compared
    if config.rollouts.mask_truncated and all(o.truncated for o in outcomes if o.error is None):
        return "all responses were truncated"
    if compared is None or loss.use_kl_in_reward or loss.learns_without_advantages:
        return None
    shape = (1, -1) if compared == "batch" else tuple(rewards.shape)
    signal = has_signal(rewards.view(shape), are_judged(outcomes).view(shape))
    if config.rollouts.compares_named_rewards:
        signal = groups_with_signal(outcomes, rewards.shape[1], list(config.environment.rewards))
    if bool(signal.any()):
        return None
    return "all rewards are equal" if compared == "batch" else "all rewards of each prompt are equal"


def _too_many_failed(failed: int, total: int, limit: float) -> bool:
    """Return whether a step has too many failed samples to make an update: more than `limit` · `total`, or all."""
    return failed > limit * total or failed == total


def kl_penalty(loss: PolicyLossOptions, rows: BatchedDataDict[Any]) -> torch.Tensor:
    """Return each token's KL penalty [B, S] (nats).

    With `use_kl_in_reward`, the penalty is subtracted from the token's reward.
    """
    current = rows["prev_logprobs" if "prev_logprobs" in rows else "generation_logprobs"]
    reference = rows["reference_policy_logprobs"]
    kl = calculate_kl(current, reference, loss.kl_estimator, loss.kl_clamp, loss.kl_output_clamp)
    return loss.reference_policy_kl_penalty * kl


def _rows_of(batch: BatchedDataDict[Any], row_of: dict[int, int], asked: Sequence[int]) -> torch.Tensor:
    """Return the numbers of the tokens of some rows of `batch` (see `token_identities`).

    `asked` has the numbers of these rows in the global batch. `row_of` maps such a number to the row in `batch`.
    """
    columns = {name: batch[name] for name in ("input_ids", *CHOICES, IMAGES) if name in batch}
    return token_identities(BatchedDataDict(columns).select_indices([row_of[n] for n in asked]))


def add_columns_of_loss(loss: PolicyLossOptions, data: BatchedDataDict[Any], rewards: torch.Tensor) -> None:
    """Add the columns for the loss's optional NLL terms to `data`: rewards, and token counts of the global batch.

    Args:
        rewards: for each row of `data`, the reward of its sample.
    """
    if loss.positive_example_nll_weight:
        data["rewards"] = rewards
        data["num_positive_tokens"] = torch.zeros(data.size)
    if loss.observation_nll_weight:
        data["num_observation_tokens"] = torch.zeros(data.size)
    _count_tokens(data)


def _count_tokens(data: BatchedDataDict[Any]) -> None:
    """Recompute the columns of `data` that contain token counts of the global batch. Collective."""
    share = batch_share(data)
    if "num_positive_tokens" in data:
        positive = data["token_mask"][:, 1:].sum(1) * data["sample_mask"] * (data["rewards"] > 0)
        data["num_positive_tokens"] = torch.full((data.size,), share.sum(float(positive.sum()))[0])
    if "num_observation_tokens" in data:
        observed = observation_mask(data, data["token_mask"])
        data["num_observation_tokens"] = torch.full((data.size,), share.sum(float(observed.sum()))[0])


def minibatch_of(data: LocalBatch[Any], rows: Sequence[int]) -> LocalBatch[Any]:
    """Return a new global batch that consists of some rows of the global batch `data`. Each row stays on its replica.

    Args:
        rows: numbers of the rows in the global batch, in ascending order.
    """
    place_of = {row: place for place, row in enumerate(rows)}
    own = [n for n, row in enumerate(data.share.indices) if row in place_of]
    share = BatchShare([place_of[data.share.indices[n]] for n in own], len(rows), data.share.replicas)
    part: LocalBatch[Any] = LocalBatch(data.select_indices(own).data, share)
    _count_tokens(part)
    return part
