"""Conversations with a policy, what came of each, and the batch to train on that they make."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from mcore_rl.data.datasets import Prompt
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.distributed.topology import ParallelDimension
from mcore_rl.environments.interfaces import MessageLog, Step
from mcore_rl.rollouts.outcomes import Outcome
from mcore_rl.rollouts.token_rows import TokenColumn


@dataclass
class Rollout:
    """A conversation: a prompt, responses, and observations between them.

    input_ids, token_mask, logprobs: of all tokens; masked are those of responses, which alone have
        log-probabilities.
    truncated: the last response ran into the limit of new tokens.
    error: why it could not be judged, if so.
    """

    prompt: int
    """Index in the dataset."""
    sample_id: int
    """Position among all samples of the run: with the seed, its random numbers."""
    input_ids: list[int]
    token_mask: list[bool]
    logprobs: list[float]
    reward: float = 0.0
    truncated: bool = False
    turns: int = 0
    response_lengths: list[int] = field(default_factory=list)
    """Tokens of each response."""
    error: str | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    """The rewards whose weighted sum is the reward, by name."""
    weight_versions: list[tuple[int, int]] = field(default_factory=list)
    """(version, tokens) of the responses' tokens in their order: which weights they were drawn by. A version is the
    number of steps that were trained."""
    message_log: MessageLog = field(default_factory=list)
    token_rewards: list[tuple[int, float]] = field(default_factory=list)
    """(position, reward): what tokens have earned, whose sum is the reward."""
    routed_experts: torch.Tensor | None = None
    """[tokens, layers, topk] int16, the experts of its tokens, if they are to be replayed."""

    @classmethod
    def begin(cls, index: int, sample_id: int, prompt: Prompt) -> Rollout:
        """A prompt that awaits its first response."""
        size = len(prompt.input_ids)
        log = prompt.message_log
        return cls(index, sample_id, list(prompt.input_ids), [False] * size, [0.0] * size, message_log=log)

    def add_response(self, tokens: list[int], logprobs: list[float]) -> None:
        self._add(tokens, True, logprobs)
        self.response_lengths = [*self.response_lengths, len(tokens)]

    def add_observation(self, tokens: list[int]) -> None:
        self._add(tokens, False, [0.0] * len(tokens))

    def _add(self, tokens: list[int], is_response: bool, logprobs: list[float]) -> None:
        self.input_ids += tokens
        self.token_mask += [is_response] * len(tokens)
        self.logprobs += logprobs

    def earn(self, step: Step) -> None:
        """Take what the last response has earned: its last token the reward, each token what is its own."""
        length = self.response_lengths[-1]
        first = len(self.input_ids) - length
        of_tokens = [(first + t, reward) for t, reward in enumerate(step.token_rewards) if reward]
        if len(step.token_rewards) not in (0, length):
            self.error = self.error or f"{len(step.token_rewards)} token_rewards for a response of {length} tokens"
            return
        self.reward += math.fsum([step.reward, *(reward for _, reward in of_tokens)])
        self.token_rewards = [*self.token_rewards, *of_tokens]
        if step.reward:
            self.token_rewards.append((len(self.input_ids) - 1, step.reward))

    @property
    def outcome(self) -> Outcome:
        """Its outcome."""
        generated = sum(self.token_mask)
        return Outcome(
            prompt=self.prompt,
            sample_id=self.sample_id,
            reward=self.reward,
            rewards=self.rewards,
            error=self.error,
            truncated=self.truncated,
            turns=self.turns,
            num_tokens=len(self.input_ids),
            response_length=generated,
            longest_response=max(self.response_lengths, default=generated),
            weight_versions=self.weight_versions,
        )


@dataclass(frozen=True)
class Rollouts:
    """The conversations of all replicas: what came of each is known to every rank, its tokens where it was led.

    outcomes: of all, in their order.
    own: by its place in that order, each conversation that this rank has led; each is led by one replica, of which the
        first rank's count.
    """

    outcomes: Sequence[Outcome] = ()
    own: Mapping[int, Rollout] = field(default_factory=dict)

    @classmethod
    def known_to_all(
        cls,
        rollouts: Sequence[Rollout],
        replicas: ParallelDimension = ParallelDimension(),  # noqa: B008 (frozen)
    ) -> Rollouts:
        """Return rollouts that every rank has, each counted as led by one replica; neighbours have the same replica."""
        own = {place: rollouts[place] for place in replicas.part_of(range(len(rollouts)))}
        return cls([rollout.outcome for rollout in rollouts], own)

    def select(self, places: Sequence[int]) -> Rollouts:
        """Return the rollouts at these places, in this order."""
        own = {new: self.own[old] for new, old in enumerate(places) if old in self.own}
        return Rollouts([self.outcomes[place] for place in places], own)

    def __add__(self, other: Rollouts) -> Rollouts:
        behind = {len(self.outcomes) + place: rollout for place, rollout in other.own.items()}
        return Rollouts([*self.outcomes, *other.outcomes], {**self.own, **behind})

    def __len__(self) -> int:
        return len(self.outcomes)


def token_columns(pad_token_id: int, experts: tuple[int, int] | None = None) -> list[TokenColumn]:
    """Return the per-token columns of `to_batch`.

    Args:
        experts: (layers, topk) of the experts to be replayed; None without any.
    """
    columns = [
        TokenColumn("input_ids", torch.long, padding=pad_token_id),
        TokenColumn("token_mask", torch.float32),
        TokenColumn("generation_logprobs", torch.float32),
    ]
    return columns if experts is None else [*columns, TokenColumn("routed_experts", torch.int16, experts, padding=-1)]


def to_batch(
    rollouts: Sequence[Rollout], pad_token_id: int, experts: tuple[int, int] | None = None
) -> BatchedDataDict[Any]:
    """Right-padded rows: input_ids, token_mask, generation_logprobs [B, S], input_lengths, sample_mask [B].

    And routed_experts [B, S, layers, topk] int16 where the rollouts have them, −1 where they are not known.

    Args:
        experts: (layers, topk) of those to be replayed, for rollouts without a response, which have none; None if they
            are not replayed.
    """
    input_ids = _padded([r.input_ids for r in rollouts], torch.long, pad_token_id)
    batch: BatchedDataDict[Any] = BatchedDataDict(
        input_ids=input_ids,
        token_mask=_padded([r.token_mask for r in rollouts], torch.float32),
        generation_logprobs=_padded([r.logprobs for r in rollouts], torch.float32),
        input_lengths=torch.tensor([len(r.input_ids) for r in rollouts], dtype=torch.long),
        sample_mask=torch.ones(len(rollouts)),
    )
    routed = [_experts_of(rollout, experts) for rollout in rollouts]
    known = [tensor for tensor in routed if tensor is not None]
    if known and len(known) == len(rollouts):
        padded = torch.nn.utils.rnn.pad_sequence(known, batch_first=True, padding_value=-1)
        tail = input_ids.shape[1] - padded.shape[1]  # what was observed last was never fed to the model
        batch["routed_experts"] = F.pad(padded, (0, 0, 0, 0, 0, tail), value=-1)
    return batch


def _experts_of(rollout: Rollout, experts: tuple[int, int] | None) -> torch.Tensor | None:
    """Return the rollout's experts; unknown ones for a rollout whose request failed, which has no response."""
    if experts is None or not rollout.error or rollout.turns:
        return rollout.routed_experts
    return torch.full((len(rollout.input_ids), *experts), -1, dtype=torch.int16)


def rewards_of_tokens(rollouts: Sequence[Rollout], data: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """[B, S] fp32, what each token has earned; of rollouts that do not say, all at the last token of a response.

    Args:
        data: `to_batch` of them.
    """
    rewards, last = torch.zeros_like(data["token_mask"]), last_response_tokens(data).tolist()
    for row, rollout in enumerate(rollouts):
        for position, reward in rollout.token_rewards or [(last[row], rollout.reward)]:
            rewards[row, position] += reward
    return rewards


def last_response_tokens(data: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """[B] positions in the rows of `to_batch`; the last of all tokens where no response has one."""
    positions = torch.arange(data["token_mask"].shape[1])
    last = torch.where(data["token_mask"] > 0, positions, -1).amax(1)
    return torch.where(last < 0, data["input_lengths"] - 1, last)


def _padded(rows: Sequence[Sequence[float]], dtype: torch.dtype, padding: float = 0) -> torch.Tensor:
    if not rows:
        return torch.zeros(0, 1, dtype=dtype)
    tensors = [torch.tensor(row, dtype=dtype) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=padding)
