"""The reward model as a judge. It runs in the training processes, on packs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import date
from typing import Any

import torch

from mcore_rl.config import RLConfig
from mcore_rl.config.algorithms import judge_config
from mcore_rl.data.batching import padded_rows
from mcore_rl.data.chat import check_tools
from mcore_rl.data.images import image_directory
from mcore_rl.data.token_cache import default_directory
from mcore_rl.data.token_store import TokenSequence, images_column
from mcore_rl.data.tokenize import judged_tokens, load_tokenizer, tokenize_completion
from mcore_rl.distributed.batched_data_dict import BatchShare, LocalBatch
from mcore_rl.distributed.topology import ParallelDimension
from mcore_rl.environments.interfaces import MessageLog, Sample, Step
from mcore_rl.errors import UserError
from mcore_rl.models.policy.scoring import ScoringModel


class RewardModelEnvironment:
    """Gives a reward: a reward model's output at the conversation's last token that is not its pad token.

    The conversation is tokenized with the reward model's own tokenizer and chat template. Every rank creates this
    object. All ranks call `step` together, each with the samples of its replica.

    Args:
        day: date for a chat template that inserts a date; today if None.
        replicas: the replicas among which the samples are divided, such as the policy's replicas; None means the reward
            model's replicas.
    """

    def __init__(self, config: RLConfig, day: date | None = None, replicas: ParallelDimension | None = None) -> None:
        judge = judge_config(config)
        self.config, self.limit = config.environment, judge.data.max_sequence_length
        images = image_directory(config.data.cache_dir or default_directory())
        self.tokenizer = load_tokenizer(judge.model.path, day=day, images=images)
        self.model = ScoringModel(judge)
        self.replicas = self.model.topology.data if replicas is None else replicas

    def step(self, samples: Sequence[Sample]) -> list[Step]:
        rows = [self._tokens(sample.message_log, sample.record) for sample in samples]
        steps = [Step(error=row) if isinstance(row, str) else Step() for row in rows]
        fitting = {index: row for index, row in enumerate(rows) if not isinstance(row, str)}
        share = BatchShare.concatenated(len(fitting), self.replicas)
        if not share.total:
            return steps
        read = list(fitting.values())
        entries: dict[str, Any] = padded_rows([row.input_ids for row in read])
        entries |= {"sample_mask": torch.ones(len(read)), **images_column([row.images for row in read])}
        data: LocalBatch[Any] = LocalBatch(entries, share)
        for index, reward in zip(fitting, self.model.get_rewards(data)["rewards"][:, 0].tolist(), strict=True):
            finite = math.isfinite(reward)
            steps[index] = Step(reward) if finite else Step(error=f"the reward is {reward}")
        return steps

    def _tokens(self, log: MessageLog, record: dict[str, Any]) -> TokenSequence | str:
        """Return the conversation's tokens for the reward model.

        If the model cannot judge the conversation, return the reason instead.
        """
        try:
            if self.config.format == "text":
                *before, response = (message["content"] for message in log)
                tokens = tokenize_completion(self.tokenizer, "".join(before), response)
            else:
                tokens = judged_tokens(self.tokenizer, list(log), check_tools(record.get("tools")))
        except UserError:  # of the model directory or the installation, not of the conversation
            raise
        except ValueError as error:
            return str(error)
        if not len(tokens):
            return "there is nothing to judge"
        if len(tokens) > self.limit:
            return f"{len(tokens)} tokens are more than environment.max_sequence_length={self.limit}"
        return tokens

    def close(self) -> None:
        self.model.shutdown()
