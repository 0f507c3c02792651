"""Evaluation of a model by the training processes or by vLLM: the rollouts and the judge of GRPO, without updates."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from mcore_rl.algorithms.grpo import check_inputs, rollout_worker
from mcore_rl.distributed.collectives import broadcast_object
from mcore_rl.models.generation.vllm.placement import places_of_launch
from mcore_rl.models.policy.megatron_policy import MegatronPolicy
from mcore_rl.rollouts.samples import Rollout, gather_from_replicas
from mcore_rl.rollouts.worker import RolloutWorker
from mcore_rl.run.setup import RunInputs
from mcore_rl.serving.engine import checkpoint_of, join_ranks, load_weights
from mcore_rl.serving.evaluation import Entry, EvaluationFiles, fingerprint_of
from mcore_rl.serving.model_source import ModelSource
from mcore_rl.utils.console import PrintLine

BATCHES = 8
"""A call of the worker has this number of full generation batches, so that few sequences wait for the longest one."""


def weights_of(source: ModelSource) -> list[str]:
    """Return what identifies a model's weights: its directories, and sizes and times of change of their files."""
    lora = source.config.model.lora
    checkpoint = source.checkpoint and checkpoint_of(source)
    directories = [source.config.model.path, checkpoint, None if lora is None else lora.path]
    told = list[str]()
    for directory in filter(None, directories):
        files = sorted(path for path in directory.iterdir() if path.is_file())
        stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        told.append(f"{directory} {hashlib.sha256(repr(stats).encode()).hexdigest()[:16]}")
    return told


class ModelEvaluation:
    """An evaluation of one model. All methods are collective.

    Attributes:
        inputs: the prompts.

    Raises:
        UserError: the model, the data or the judge cannot be used.
    """

    def __init__(self, source: ModelSource, say: PrintLine) -> None:
        self.source, self.config, self.say = source, source.config, say
        self.inputs: RunInputs
        self.inputs, _ = check_inputs(self.config, None, None)
        self.dropped = self.inputs.train.prompts.store.counts["dropped"]
        """Number of prompts that leave no room for a response, which are not evaluated."""
        if self.dropped:
            say(f"warning: {self.inputs.train.describe('prompts', self.config.max_prompt_length)}")

    @property
    def fingerprint(self) -> str:
        """Hash of the prompts."""
        return fingerprint_of(self.inputs.train.prompts)

    def run(self, files: EvaluationFiles | None, samples: int, greedy: bool) -> None:
        """Generate and judge the samples that `files` lacks, and add them to it.

        Args:
            files: the evaluation's files, on the first rank; None on other ranks.
            samples: number of samples of each prompt.
        """
        prompts = self.inputs.train.prompts
        every = [(prompt, number) for prompt in range(len(prompts)) for number in range(samples)]
        join_ranks(self.config)
        done = broadcast_object(None if files is None else set(files.entries))
        asked = [key for key in every if key not in done]
        if not asked:
            return
        places_of_launch(self.config)
        policy = MegatronPolicy(self.config)
        if not self.config.rollouts.sample_unused_ids:
            policy.exclude_unused_ids(self.inputs.tokenizer)
        load_weights(policy, self.source)
        if done:
            self.say(f"{len(done)} of {len(every)} samples have been judged before")
        with rollout_worker(self.config, self.inputs, policy) as worker:
            worker.prepare(0)
            size = BATCHES * self.config.rollouts.generation_batch_size * policy.topology.data.size
            judged = len(done)
            for batch in self._batches(asked, size):
                entries = self._entries(worker, batch, samples, greedy)
                judged += len(batch)
                if files is not None:
                    files.add(entries)
                self.say(f"{judged} of {len(every)} samples")
            worker.finish()
        policy.shutdown()

    def _batches(self, asked: Sequence[tuple[int, int]], size: int) -> Iterator[Sequence[tuple[int, int]]]:
        for first in range(0, len(asked), size):
            yield asked[first : first + size]

    def _entries(
        self, worker: RolloutWorker, batch: Sequence[tuple[int, int]], samples: int, greedy: bool
    ) -> list[Entry]:
        """Generate and judge a batch; return its entries on every rank."""
        prompts = self.inputs.train.prompts
        requests = [(prompt, prompts[prompt]) for prompt, _ in batch]
        rollouts = worker.run(requests, [prompt * samples + number for prompt, number in batch], greedy)
        own = {place: self._entry(rollout, *batch[place]) for place, rollout in rollouts.own.items()}
        found = {p: entry for part in gather_from_replicas(own, worker.topology) for p, entry in part.items()}
        return [found[place] for place in range(len(batch))]

    def _entry(self, rollout: Rollout, prompt: int, number: int) -> Entry:
        outcome = rollout.outcome
        record = self.inputs.train.prompts[prompt].record
        return {
            "prompt": prompt,
            "sample": number,
            "source": self.inputs.train.source_of(prompt),
            "reward": None if rollout.error else rollout.reward,
            "rewards": rollout.rewards,
            "error": rollout.error,
            "answer": rollout.answer,
            **({"ground_truth": record["answer"]} if "answer" in record else {}),
            "truncated": outcome.truncated,
            "turns": outcome.turns,
            "response_length": outcome.response_length,
            "messages": rollout.message_log,
        }
