"""A reward model as the judge: in the training processes, in packs, under the policy's layout."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mcore_rl.config import EnvironmentConfig, ModelConfig, RLConfig
from mcore_rl.data.batches import padded_rows
from mcore_rl.data.chat import render
from mcore_rl.data.messages import check_tools
from mcore_rl.data.tokenize import load_tokenizer, tokenize_completion
from mcore_rl.distributed.own_rows import OwnRows, Share
from mcore_rl.environments.interfaces import MessageLog, Sample, Step
from mcore_rl.errors import UserError
from mcore_rl.models.megatron.families.family import REWARD_HEAD
from mcore_rl.models.megatron.hf_checkpoint import SafetensorsDirectory
from mcore_rl.models.megatron.hf_config import check_model_fits, load_hf_config
from mcore_rl.models.megatron.weights import check_hf_tensors
from mcore_rl.models.policy.scoring import ScoringModel


class RewardModelEnvironment:
    """A response's reward is the model's at the end of the conversation, as its own tokenizer renders it.

    Every rank makes one, and all step together, each with its replica's samples.
    """

    def __init__(self, config: RLConfig) -> None:
        self.config, self.limit = config.environment, _limit(config)
        self.tokenizer = load_tokenizer(_path(config.environment))
        self.model = ScoringModel(config_of_judge(config))

    def step(self, samples: Sequence[Sample]) -> list[Step]:
        rows = [self._tokens(sample.message_log, sample.record) for sample in samples]
        steps = [Step(error=row) if isinstance(row, str) else Step() for row in rows]
        fitting = {index: row for index, row in enumerate(rows) if not isinstance(row, str)}
        share = Share.appended(len(fitting), self.model.topology.data)
        if not share.total:
            return steps
        entries = {**padded_rows(list(fitting.values())), "sample_mask": torch.ones(len(fitting))}
        data: OwnRows[Any] = OwnRows(entries, share)
        for index, reward in zip(fitting, self.model.get_rewards(data)["rewards"][:, 0].tolist(), strict=True):
            finite = math.isfinite(reward)
            steps[index] = Step(reward) if finite else Step(error=f"the reward is {reward}")
        return steps

    def _tokens(self, log: MessageLog, record: dict[str, Any]) -> list[int] | str:
        """The conversation for the model, or why it cannot have it."""
        try:
            if self.config.format == "text":
                *before, response = (message["content"] for message in log)
                tokens = list(tokenize_completion(self.tokenizer, "".join(before), response).input_ids)
            else:
                text = render(self.tokenizer, list(log), check_tools(record.get("tools")))
                tokens = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        except ValueError as error:
            return str(error)
        if not tokens:
            return "there is nothing to judge"
        if len(tokens) > self.limit:
            return f"{len(tokens)} tokens are more than environment.max_sequence_length={self.limit}"
        return tokens

    def close(self) -> None:
        self.model.shutdown()


def check_reward_model(config: RLConfig) -> None:
    """Look at the reward model before any process group exists.

    Raises:
        UserError: it is none, or not one that can be used.
    """
    judging = config_of_judge(config)
    with _named_by_its_key():
        model = judging.model
        hf = load_hf_config(model.path, model.trust_remote_code, model.head)
        check_model_fits(hf, config.parallel, judging.data.max_sequence_length, model)
        source = SafetensorsDirectory(model.path)
        if REWARD_HEAD not in source.names():
            raise UserError(f"model.path: {model.path} is no reward model: it has no {REWARD_HEAD}")
        check_hf_tensors(hf, source)
        tokenizer = load_tokenizer(model.path)
    if config.environment.format == "chat" and not tokenizer.chat_template:
        raise UserError(
            f"environment.path: the tokenizer of {model.path} has no chat template; set environment.format=text if the "
            "model was trained on plain prompts and completions"
        )
    positions = getattr(hf, "max_position_embeddings", None) or math.inf
    if _limit(config) > positions:
        raise UserError(f"environment.max_sequence_length={_limit(config)}: the reward model has {positions} positions")


def config_of_judge(config: RLConfig) -> RLConfig:
    """The run's configuration with the reward model in the policy's place."""
    model = ModelConfig(path=_path(config.environment), dtype=config.model.dtype, head="reward")
    data = config.data.model_copy(update={"max_sequence_length": _limit(config)})
    batch = config.batch.model_copy(update={"share_prefixes": False, "tokens_per_pack": None})
    parallel = config.parallel
    if config.batch.tokens_per_pack is not None and config.batch.packing:
        longest = -(-_limit(config) // parallel.sequence_multiple) * parallel.sequence_multiple
        batch = batch.model_copy(update={"tokens_per_pack": max(config.batch.tokens_per_pack, longest)})
    return config.model_copy(update={"model": model, "data": data, "batch": batch})


def _path(config: EnvironmentConfig) -> Any:
    assert config.path is not None, "the configuration asks for it"
    return config.path


def _limit(config: RLConfig) -> int:
    return config.environment.max_sequence_length or 2 * config.data.max_sequence_length


@contextmanager
def _named_by_its_key() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(str(error).replace("model.path", "environment.path")) from None
