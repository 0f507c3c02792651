"""Collects each step's rollouts: chooses prompts and groups, records and logs rollouts, computes their metrics."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mcore_rl.config import RLConfig
from mcore_rl.data.datasets import PromptDataset
from mcore_rl.distributed.collectives import gather_from_replicas, gather_items_on_rank_zero
from mcore_rl.distributed.topology import Topology
from mcore_rl.models.megatron.weights.conversion import own_weights
from mcore_rl.models.policy.megatron_policy import MegatronPolicy
from mcore_rl.rollouts.recordings import REPLAYED_OPTIONS, hash_of_weights, recorded_by, recorded_step
from mcore_rl.rollouts.rollout_images import keep_images
from mcore_rl.rollouts.samples import Rollout, RolloutBatch, RolloutSummary, are_judged, has_signal
from mcore_rl.rollouts.worker import PendingRollouts, PromptRequests, RolloutWorker
from mcore_rl.run.directory import IMAGES, SESSION_IMAGES
from mcore_rl.run.metrics import JsonLinesLog, OptionalLog
from mcore_rl.run.setup import RunInputs
from mcore_rl.utils.console import PrintLine
from mcore_rl.utils.files import naming_full_disk

SAMPLING_OPTIONS = {"temperature", "top_k", "top_p", "min_p", "max_new_tokens", *REPLAYED_OPTIONS}


class RolloutCollector:
    """Provides the rollouts of each step: generates them, or reads them from a recording. Every call is collective.

    With `max_staleness` = N, `collect` also starts the rollouts of the next N steps, which continue during training.
    The weights that generate a step's rollouts are therefore at most N versions old. Each step uses the rollouts of its
    own prompts, even if rollouts of later steps finish earlier.

    Args:
        steps: number of steps of the run.
        recording: log to which every step's rollouts are written; None for no recording.
        recorded: recorded rollouts of each step, to train on instead of generating.
    """

    def __init__(
        self,
        config: RLConfig,
        inputs: RunInputs[PromptDataset],
        policy: MegatronPolicy,
        worker: RolloutWorker,
        say: PrintLine,
        steps: int,
        recording: JsonLinesLog | None = None,
        recorded: dict[int, list[Rollout]] | None = None,
    ) -> None:
        self.config, self.inputs, self.policy, self.worker, self.say = config, inputs, policy, worker, say
        self.recording, self.recorded, self.steps = recording, recorded, steps
        self._ahead: dict[int, PendingRollouts] = {}
        """Rollouts that run in the background, by the position of their first prompt."""
        self.samples = OptionalLog(config.output_dir / "samples.jsonl", say)

    def collect(self, step: int, position: int) -> tuple[RolloutBatch, int]:
        """Return the rollouts of a step, group after group, and the number of prompts that were used for them.

        With dynamic sampling, groups whose rewards are all equal are replaced.

        Args:
            position: position of the step's first prompt, in the order in which the run uses its prompts.
        """
        options = self.config.rollouts
        if self.recorded is not None:
            of_all = RolloutBatch.from_all_ranks(self.recorded[step], self.policy.topology.data)
            return of_all, options.num_prompts_per_step
        if options.max_staleness:
            self._begin_ahead(step, position)
        kept = RolloutBatch()
        asked, size = 0, options.num_generations_per_prompt
        for round_ in range(options.dynamic_sampling_rounds):
            wanted = options.num_prompts_per_step - len(kept) // size
            new = self._generate(position + asked, wanted)
            asked += wanted
            names = list(self.config.environment.rewards) if options.compares_named_rewards else None
            signal = groups_with_signal(new.outcomes, size, names).tolist()
            last = round_ == options.dynamic_sampling_rounds - 1
            everything = options.dynamic_sampling_rounds == 1 or (last and not kept and not any(signal))
            kept += new.select([place for place in range(len(new)) if signal[place // size] or everything])
            if len(kept) == options.num_prompts_per_step * size:
                break
        if errors := [outcome.error for outcome in kept.generated if outcome.error is not None]:
            self.say(f"step {step}: {len(errors)} samples could not be judged and count as failed; first: {errors[0]}")
        return kept, asked

    def _begin_ahead(self, step: int, position: int) -> None:
        """Start the rollouts of this step and of the next `max_staleness` steps, except those already started."""
        options = self.config.rollouts
        for ahead in range(min(options.max_staleness, self.steps - step) + 1):
            first = position + ahead * options.num_prompts_per_step
            if first not in self._ahead:
                self._ahead[first] = self.worker.begin(*self._prompts(first, options.num_prompts_per_step))

    def _generate(self, position: int, num_prompts: int) -> RolloutBatch:
        """Return the rollouts of `num_prompts` prompts from `position` on; generate them if they were not started yet.

        `position` is counted in the order in which the run uses its prompts.
        """
        if (begun := self._ahead.pop(position, None)) is not None:
            return self.worker.collect(begun)
        return self.worker.run(*self._prompts(position, num_prompts))

    def _prompts(self, position: int, count: int) -> tuple[PromptRequests, range]:
        """Return a pair (index, prompt) for each response to be generated, and the responses' sample ids.

        The prompts are the `count` prompts from `position` on, in the order in which the run uses its prompts.
        """
        size = self.config.rollouts.num_generations_per_prompt
        indices = self.inputs.train.order(self.config.seed).indices(position, count)
        prompts = [(i, self.inputs.train.prompts[i]) for i in indices for _ in range(size)]
        return prompts, range(position * size, (position + count) * size)

    def record(self, step: int, rollouts: RolloutBatch) -> None:
        """Write the step's rollouts to the recording, if there is one. The policy's weights must be on the device."""
        if not self.recording:
            return
        self._keep_images(rollouts, rollouts.own)
        self.policy.finish_param_gather()
        if recorded := gather_items_on_rank_zero(rollouts.own, range(len(rollouts)), self.policy.topology):
            weights = hash_of_weights(own_weights(self.policy.model))
            sampling = self.config.rollouts.model_dump(include=SAMPLING_OPTIONS)
            sampling |= recorded_by(self.config, self.inputs.train.fingerprint)
            with naming_full_disk(self.recording.path.parent):
                self.recording.append(step, recorded_step(weights, sampling, recorded))

    def _keep_images(self, rollouts: RolloutBatch, places: Iterable[int]) -> None:
        """Keep the images of this rank's rollouts at `places` after the rollouts have ended."""
        directory = self.config.output_dir
        for rollout in (rollouts.own[place] for place in places if place in rollouts.own):
            keep_images(rollout, directory / SESSION_IMAGES, directory / IMAGES)

    def log_samples(
        self, step: int, rollouts: RolloutBatch, advantages: Float[Tensor, " samples"] | None
    ) -> list[dict[str, Any]]:
        """Write some of the rollouts to samples.jsonl. Return the written entries on rank 0, [] on other ranks.

        A replay writes nothing, because its samples were logged when they were recorded. Collective.

        Args:
            advantages: for each sample, the mean advantage of its response tokens; None in a step without an update.
        """
        if self.recorded is not None:
            return []
        options = self.config.rollouts
        places = logged_places(len(rollouts), options.num_generations_per_prompt, options.num_logged_samples)
        self._keep_images(rollouts, places)
        # These few samples are sent as Python objects with their texts; training data is sent as tensors.
        samples = gather_items_on_rank_zero(rollouts.own, places, self.policy.topology)
        if not self.policy.is_writer:
            return []
        entries = [_logged(sample, self.inputs.train.prompts[sample.prompt].record) for sample in samples]
        for entry, place in zip(entries, places, strict=True):
            entry["advantage"] = None if advantages is None else float(advantages[place])
        self.samples.append(step, *entries)
        return entries


def answers_of(rollouts: RolloutBatch, topology: Topology) -> list[str | None]:
    """Return the answer that the judge found in each rollout of all replicas. Collective."""
    own = {place: rollout.answer for place, rollout in rollouts.own.items() if rollout.answer is not None}
    found = {place: answer for part in gather_from_replicas(own, topology) for place, answer in part.items()}
    return [found.get(place) for place in range(len(rollouts))]


def named_rewards(outcomes: Sequence[RolloutSummary], names: Sequence[str]) -> Float[Tensor, "names samples"]:
    """Return each sample's rewards with the given names; NaN for rewards that do not apply to the sample."""
    rewards = [[outcome.rewards.get(name, math.nan) for outcome in outcomes] for name in names]
    return torch.tensor(rewards, dtype=torch.float64)


def groups_with_signal(
    outcomes: Sequence[RolloutSummary], size: int, names: Sequence[str] | None = None
) -> Bool[Tensor, " prompts"]:
    """Return, for each group of `size` samples, whether rewards differ within the group.

    With `names`, at least one of these named rewards must differ.
    """
    judged = are_judged(outcomes).view(-1, size)
    if names is None:
        return has_signal(torch.tensor([outcome.reward for outcome in outcomes]).view(-1, size), judged)
    of_names = named_rewards(outcomes, names).view(len(names), -1, size)
    return torch.stack([has_signal(r.nan_to_num(), judged & ~r.isnan()) for r in of_names]).any(0)


def _logged(rollout: Rollout, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of samples.jsonl for a rollout; `record` is the record of its prompt."""
    return {
        "reward": None if rollout.error else rollout.reward,
        **({"ground_truth": record["answer"]} if "answer" in record else {}),
        "prompt": rollout.prompt,
        "messages": rollout.message_log,
        "error": rollout.error,
        "weight_version": rollout.outcome.weight_version,
        **({"weight_versions": rollout.weight_versions} if len(rollout.weight_versions) > rollout.turns else {}),
        **({"rewards": rollout.rewards} if rollout.rewards else {}),
        **({"session": rollout.session} if rollout.session else {}),
    }


def logged_places(total: int, group: int, count: int) -> list[int]:
    """Return the places of `count` of `total` samples: at least two of each chosen prompt, if it has two.

    Args:
        group: number of samples of each prompt; they follow each other, and `total` is a multiple of it.
    """
    assert total % group == 0, f"{total} samples are not groups of {group}"
    count, prompts = min(count, total), total // group
    if not count:
        return []
    of_prompt = max(min(2, group), -(-count // prompts))
    chosen = -(-count // of_prompt)
    return [n * prompts // chosen * group + sample for n in range(chosen) for sample in range(of_prompt)][:count]


def staleness_metrics(outcomes: Sequence[RolloutSummary], version: int) -> dict[str, float]:
    """Return metrics of the age of the weights that generated the samples.

    A sample's age is `version` minus the oldest of the weight versions that generated its tokens. Another metric is the
    fraction of samples whose tokens were generated by several versions.
    """
    outcomes = [outcome for outcome in outcomes if outcome.weight_versions]  # others have no response
    ages = [version - outcome.weight_version for outcome in outcomes] or [0]
    mixed = sum(len({version for version, _ in outcome.weight_versions}) > 1 for outcome in outcomes)
    return {
        "staleness_mean": sum(ages) / len(ages),
        "staleness_max": float(max(ages)),
        "mixed_versions_fraction": mixed / max(len(outcomes), 1),
    }


def _nearest(number: Fraction) -> float:
    """Return the float nearest to `number`; plus or minus infinity if it is too large for a float."""
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


class RolloutStatistics:
    """Computes metrics of rewards and responses, from exact sums over samples.

    Because the sums are exact, the metrics do not depend on how the samples are divided among calls of `add`.

    Args:
        ks: values of k for pass@k and maj@k; see `PromptStatistics`.
        group: number of responses to each prompt; needed with `ks`.
    """

    def __init__(self, ks: Sequence[int] = (), group: int = 1) -> None:
        self._prompts, self._group = PromptStatistics(ks), group
        self._totals, self._longest = Counter[str](), 0
        self._rewards, self._squares = Fraction(), Fraction()
        self._named: dict[str, tuple[Fraction, int]] = {}
        """Sum and number of samples of each named reward."""

    def add(self, outcomes: Sequence[RolloutSummary], answers: Sequence[str | None] | None = None) -> None:
        """Add samples to the sums.

        Args:
            answers: the answer of each sample, for pass@k and maj@k. All responses to the same prompt must then be in
                the same call. None if pass@k and maj@k are not computed.
        """
        for place in range(0, len(outcomes) if answers is not None else 0, self._group):
            responses = slice(place, place + self._group)
            self._prompts.add(outcomes[responses], answers[responses] if answers is not None else ())
        judged = [outcome for outcome in outcomes if outcome.error is None]
        for outcome in judged:
            reward = Fraction(outcome.reward)
            self._rewards, self._squares = self._rewards + reward, self._squares + reward * reward
            for name, one in outcome.rewards.items():
                total, count = self._named.get(name, (Fraction(), 0))
                self._named[name] = (total + Fraction(one), count + 1)
        self._longest = max([self._longest, *(o.response_length for o in outcomes)])
        self._totals.update(
            samples=len(outcomes),
            judged=len(judged),
            positive=sum(o.reward > 0 for o in judged),
            tokens=sum(o.response_length for o in outcomes),
            truncated=sum(o.truncated for o in outcomes),
            turns=sum(o.turns for o in outcomes),
            kept=sum(o.kept_tokens for o in outcomes),
        )

    def metrics(self, if_none_judged: float = 0.0) -> dict[str, float]:
        """Return the metrics of all added samples.

        Metrics of rewards are over the judged samples. The mean of a named reward is over those judged samples to which
        the reward applies. `reward_positive_fraction` is the fraction of judged samples with a positive reward: the
        accuracy, if rewards are 0 and 1. `kept_tokens_mean` is the number of tokens that top-k, top-p and min-p left to
        choose from, as the mean over all sampled tokens. It exists only if generation returns the kept tokens.

        Args:
            if_none_judged: value of the metrics of rewards if no sample could be judged.
        """
        totals, count, judged = self._totals, self._totals["samples"], max(self._totals["judged"], 1)
        failed, mean = count - totals["judged"], self._rewards / judged
        unknown = dict.fromkeys(("reward_mean", "reward_std", "reward_positive_fraction"), if_none_judged)
        return {
            **{
                f"reward_{name}_mean": _nearest(total / number) for name, (total, number) in sorted(self._named.items())
            },
            "reward_mean": _nearest(mean),
            "reward_std": math.sqrt(_nearest(self._squares / judged - mean * mean)),
            "reward_positive_fraction": totals["positive"] / judged,
            "response_length_mean": totals["tokens"] / count,
            "response_length_max": float(self._longest),
            "truncated_fraction": totals["truncated"] / count,
            "turns_mean": totals["turns"] / count,
            "failed_fraction": failed / count,
            "num_failed": float(failed),
            "num_samples": float(count),
            **({"kept_tokens_mean": totals["kept"] / totals["tokens"]} if totals["kept"] else {}),
            **({} if totals["judged"] else unknown),
            **self._prompts.metrics(),
        }


class StatisticsBySource:
    """Computes `RolloutStatistics` of all samples, and of the samples of each source of prompts (`SOURCE/METRIC`).

    Args:
        source_of: function that returns the source of a prompt, given its index; None for a prompt without source.
        ks, group: see `RolloutStatistics`.
    """

    def __init__(self, source_of: Callable[[int], str | None], ks: Sequence[int] = (), group: int = 1) -> None:
        self._source_of, self._new = functools.cache(source_of), functools.partial(RolloutStatistics, ks, group)
        self._whole, self._of_sources = self._new(), dict[str, RolloutStatistics]()

    def add(self, outcomes: Sequence[RolloutSummary], answers: Sequence[str | None] | None = None) -> None:
        self._whole.add(outcomes, answers)
        places: dict[str, list[int]] = {}
        for place, outcome in enumerate(outcomes):
            if (source := self._source_of(outcome.prompt)) is not None:
                places.setdefault(source, []).append(place)
        for source, own in places.items():
            answers_of_own = None if answers is None else [answers[place] for place in own]
            self._of_sources.setdefault(source, self._new()).add([outcomes[place] for place in own], answers_of_own)

    def metrics(self, if_none_judged: float = 0.0) -> dict[str, float]:
        """Return the metrics of all samples and of each source; see `RolloutStatistics.metrics`."""
        return {**self._whole.metrics(if_none_judged), **self.metrics_of_sources(if_none_judged)}

    def metrics_of_sources(self, if_none_judged: float = 0.0) -> dict[str, float]:
        return {
            f"{source}/{name}": value
            for source, sums in sorted(self._of_sources.items())
            for name, value in sums.metrics(if_none_judged).items()
        }


class PromptStatistics:
    """Computes pass@k and maj@k over prompts. Each prompt has several responses.

    A response is right if its reward is positive. Responses that could not be judged are ignored. A prompt with fewer
    than k judged responses is ignored for that k.

    pass@k is the probability that at least one of k responses is right. If c of n responses are right, 1 − C(n − c, k)
    / C(n, k) is an unbiased estimate of pass@k (arXiv:2107.03374, eq. 1).

    maj@k is the probability that the most frequent answer of k responses is right. It is estimated by the mean over ⌊n
    / k⌋ disjoint sets of k responses. If several answers are equally frequent, the first one is taken. Responses
    without an answer do not vote.

    Args:
        ks: the values of k.
    """

    def __init__(self, ks: Sequence[int]) -> None:
        self._passed: dict[int, list[Fraction]] = {k: [] for k in ks}
        self._voted: dict[int, list[Fraction]] = {k: [] for k in ks}
        self._has_answers = False

    def add(self, outcomes: Sequence[RolloutSummary], answers: Sequence[str | None]) -> None:
        """Add one prompt, given all of its responses.

        Args:
            answers: answer of each response; None if the judge found no answer.
        """
        judged = [
            (outcome.reward > 0, answer)
            for outcome, answer in zip(outcomes, answers, strict=True)
            if outcome.error is None
        ]
        total, right = len(judged), sum(is_right for is_right, _ in judged)
        self._has_answers |= any(answer is not None for answer in answers)
        for k in self._passed:
            if total >= k:
                self._passed[k].append(1 - Fraction(math.comb(total - right, k), math.comb(total, k)))
                votes = [_majority_is_right(judged[i : i + k]) for i in range(0, total - k + 1, k)]
                self._voted[k].append(Fraction(sum(votes), len(votes)))

    def metrics(self) -> dict[str, float]:
        """Return pass@k for each k and, if the judge finds answers, maj@k for each k.

        A k is left out if no prompt has enough responses.
        """
        kinds = {"pass": self._passed, **({"maj": self._voted} if self._has_answers else {})}
        return {
            f"{name}@{k}": _nearest(sum(of_prompts, Fraction()) / len(of_prompts))
            for name, found in kinds.items()
            for k, of_prompts in found.items()
            if of_prompts
        }


def _majority_is_right(judged: Sequence[tuple[bool, str | None]]) -> bool:
    votes = Counter(answer for _, answer in judged if answer is not None)
    if not votes:
        return False
    winner = max(votes, key=lambda answer: votes[answer])  # the first one of equally frequent ones
    return next(is_right for is_right, answer in judged if answer == winner)


def rollout_metrics(outcomes: Sequence[RolloutSummary], dropped: Sequence[RolloutSummary] = ()) -> dict[str, float]:
    """Return the metrics of the rollouts `outcomes` (see `RolloutStatistics.metrics`).

    Args:
        dropped: rollouts that were generated and are not trained on; only the metrics of failed samples include them.
    """
    sums, generated = RolloutStatistics(), [*outcomes, *dropped]
    sums.add(outcomes)
    failed = sum(outcome.error is not None for outcome in generated)
    metrics = {**sums.metrics(), "failed_fraction": failed / len(generated), "num_failed": float(failed)}
    if any(outcome.row_sizes for outcome in outcomes):
        metrics["rows_per_sample"] = sum(len(outcome.rows) for outcome in outcomes) / len(outcomes)
    return metrics
