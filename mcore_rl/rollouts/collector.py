"""A step's rollouts: which prompts are answered for it, which groups are kept, and what is written about them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch

from mcore_rl.config import RLConfig
from mcore_rl.data.datasets import PromptDataset
from mcore_rl.distributed.collectives import gather_items_on_rank_zero
from mcore_rl.models.megatron.weights import own_weights
from mcore_rl.models.policy.megatron_policy import MegatronPolicy
from mcore_rl.rollouts.recordings import REPLAYED_OPTIONS, hash_of_weights, recorded_by, recorded_step
from mcore_rl.rollouts.samples import Rollout, RolloutBatch, RolloutSummary, are_judged, has_signal
from mcore_rl.rollouts.worker import PendingRollouts, PromptRequests, RolloutWorker
from mcore_rl.run.metrics import JsonLinesLog, OptionalLog
from mcore_rl.run.setup import RunInputs
from mcore_rl.utils.console import PrintLine

SAMPLING_OPTIONS = {"temperature", "top_k", "top_p", "min_p", "max_new_tokens", *REPLAYED_OPTIONS}


class RolloutCollector:
    """Gives each step its groups, new ones or recorded ones. Every call is collective.

    With `max_staleness` those of so many further steps are begun when a step's are asked for, and go on beside its
    training. A step always gets the same prompts, whatever is ready first. So its oldest token is of weights that are
    so many versions old at most, those that its prompts were begun with; and no more is begun than that.

    Args:
        steps: of the run.
        recording: keeps every step's rollouts.
        recorded: of each step, to train on instead of generating.
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
        """The prompts that are being answered, by the position of the first."""
        self.samples = OptionalLog(config.output_dir / "samples.jsonl", say)

    def collect(self, step: int, position: int) -> tuple[RolloutBatch, int]:
        """The step's groups, those without signal replaced if so configured; and how many prompts that took.

        Args:
            position: of the step's first prompt in the order of the run.
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
            rewards, judged = torch.tensor([o.reward for o in new.outcomes]), are_judged(new.outcomes)
            signal = has_signal(rewards.view(-1, size), judged.view(-1, size)).tolist()
            last = round_ == options.dynamic_sampling_rounds - 1
            everything = options.dynamic_sampling_rounds == 1 or (last and not kept and not any(signal))
            kept += new.select([place for place in range(len(new)) if signal[place // size] or everything])
            if len(kept) == options.num_prompts_per_step * size:
                break
        if errors := [outcome.error for outcome in kept.outcomes if outcome.error is not None]:
            self.say(f"step {step}: {len(errors)} samples could not be judged and count as failed; first: {errors[0]}")
        return kept, asked

    def _begin_ahead(self, step: int, position: int) -> None:
        """Begin what is not begun yet of this step's prompts and of those of `max_staleness` further steps."""
        options = self.config.rollouts
        for ahead in range(min(options.max_staleness, self.steps - step) + 1):
            first = position + ahead * options.num_prompts_per_step
            if first not in self._ahead:
                self._ahead[first] = self.worker.begin(*self._prompts(first, options.num_prompts_per_step))

    def _generate(self, position: int, num_prompts: int) -> RolloutBatch:
        """All responses to the prompts from `position` on."""
        if (begun := self._ahead.pop(position, None)) is not None:
            return self.worker.collect(begun)
        return self.worker.run(*self._prompts(position, num_prompts))

    def _prompts(self, position: int, count: int) -> tuple[PromptRequests, range]:
        """Each prompt with its index, once for each response, and the responses' sample ids."""
        size = self.config.rollouts.num_generations_per_prompt
        indices = self.inputs.train.order(self.config.seed).indices(position, count)
        prompts = [(i, self.inputs.train.prompts[i]) for i in indices for _ in range(size)]
        return prompts, range(position * size, (position + count) * size)

    def write(self, step: int, rollouts: RolloutBatch) -> None:
        """Into the recording, and some into samples.jsonl; the policy must have its weights."""
        if self.recorded is not None:
            return
        topology, everything = self.policy.topology, range(len(rollouts))
        if self.recording:
            self.policy.finish_param_gather()
            if recorded := gather_items_on_rank_zero(rollouts.own, everything, topology):
                weights = hash_of_weights(own_weights(self.policy.model))
                sampling = self.config.rollouts.model_dump(include=SAMPLING_OPTIONS)
                sampling |= recorded_by(self.config, self.inputs.train.fingerprint)
                self.recording.append(step, recorded_step(weights, sampling, recorded))
        count = min(self.config.rollouts.num_logged_samples, len(rollouts))
        places = [i * len(rollouts) // count for i in range(count)]  # of as many prompts as there are
        # Objects, unlike what is trained on: these few are texts, for people to read.
        logged = gather_items_on_rank_zero(rollouts.own, places, topology)
        if self.policy.is_writer:
            self.samples.append(step, *map(_logged, logged))


def _logged(rollout: Rollout) -> dict[str, Any]:
    """Return the record of a sample in samples.jsonl."""
    return {
        "reward": rollout.reward,
        "messages": rollout.message_log,
        "error": rollout.error,
        "weight_version": rollout.outcome.weight_version,
        **({"weight_versions": rollout.weight_versions} if len(rollout.weight_versions) > rollout.turns else {}),
        **({"rewards": rollout.rewards} if rollout.rewards else {}),
    }


def staleness_metrics(outcomes: Sequence[RolloutSummary], version: int) -> dict[str, float]:
    """How many versions older than `version` the weights of each sample's oldest token are; and the share of samples
    whose tokens are of several versions."""
    outcomes = [outcome for outcome in outcomes if outcome.weight_versions]  # without, there is no response
    ages = [version - outcome.weight_version for outcome in outcomes] or [0]
    mixed = sum(len({version for version, _ in outcome.weight_versions}) > 1 for outcome in outcomes)
    return {
        "staleness_mean": sum(ages) / len(ages),
        "staleness_max": float(max(ages)),
        "mixed_versions_fraction": mixed / max(len(outcomes), 1),
    }


def _nearest(number: Fraction) -> float:
    """A float; infinite where there is none so large."""
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


class RolloutStatistics:
    """Exact sums over rewards and responses; the metrics do not depend on how the samples are divided."""

    def __init__(self) -> None:
        self._totals, self._longest = Counter[str](), 0
        self._rewards, self._squares = Fraction(), Fraction()
        self._named: dict[str, tuple[Fraction, int]] = {}
        """The sum of each of several rewards, and its number of samples."""

    def add(self, outcomes: Sequence[RolloutSummary]) -> None:
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
        )

    def metrics(self, if_none_judged: float = 0.0) -> dict[str, float]:
        """Return the metrics. Accuracy is the share of judged samples with a positive reward.

        Rewards are those of the judged samples. The mean of each of several rewards is over the judged samples that
        it applies to.

        Args:
            if_none_judged: reward and accuracy if no sample could be judged.
        """
        totals, count, judged = self._totals, self._totals["samples"], max(self._totals["judged"], 1)
        failed, mean = count - totals["judged"], self._rewards / judged
        unknown = dict.fromkeys(("reward_mean", "reward_std", "accuracy"), if_none_judged)
        return {
            **{
                f"reward_{name}_mean": _nearest(total / number) for name, (total, number) in sorted(self._named.items())
            },
            "reward_mean": _nearest(mean),
            "reward_std": math.sqrt(_nearest(self._squares / judged - mean * mean)),
            "accuracy": totals["positive"] / judged,
            "response_length_mean": totals["tokens"] / count,
            "response_length_max": float(self._longest),
            "truncated_fraction": totals["truncated"] / count,
            "turns_mean": totals["turns"] / count,
            "failed_fraction": failed / count,
            "num_failed": float(failed),
            "num_samples": float(count),
            **({} if totals["judged"] else unknown),
        }


def rollout_metrics(outcomes: Sequence[RolloutSummary]) -> dict[str, float]:
    """`RolloutStatistics.metrics` of these."""
    sums = RolloutStatistics()
    sums.add(outcomes)
    return sums.metrics()
