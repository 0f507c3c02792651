"""From prompts to judged conversations, and from those to a batch to train on."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from mcore_rl.data.chat import tokens_between
from mcore_rl.data.prompts import Prompt
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.distributed.collectives import share_outcome
from mcore_rl.environments.interfaces import Environment, MessageLog, Step
from mcore_rl.models.generation.interfaces import GenerationDatumSpec, GenerationInterface


@dataclass
class Rollout:
    """One conversation: a prompt, responses, and observations between them.

    input_ids, token_mask, logprobs: of all tokens; masked are those of responses, which alone have
        log-probabilities.
    truncated: the last response ran into the limit of new tokens.
    error: why it could not be judged, if so.
    weight_version: of the weights that answered: updates since the run's start, in steps.
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
    weight_version: int = 0
    message_log: MessageLog = field(default_factory=list)
    routed_experts: list[Any] | None = None
    """[tokens, layers, topk] the experts of its tokens, if they are to be replayed."""

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

    @property
    def response_length(self) -> int:
        """Tokens of all responses."""
        return sum(self.token_mask)

    @property
    def longest_response(self) -> int:
        """Tokens of the longest single response."""
        return max(self.response_lengths, default=self.response_length)


class RolloutWorker:
    """Lets the policy answer prompts in an environment, which all ranks run, or rank 0 alone. Every call is collective.

    Args:
        meeting_seconds: how often ranks meet while rank 0 judges: well below the timeout of collectives.
    """

    def __init__(
        self,
        generation: GenerationInterface,
        environment: Environment | None,
        tokenizer: Any,
        max_turns: int,
        meeting_seconds: float = 5.0,
    ) -> None:
        self.generation, self.environment, self.tokenizer = generation, environment, tokenizer
        self.max_turns, self.meeting_seconds = max_turns, meeting_seconds
        self._beside = ThreadPoolExecutor(1, "judging")
        self.weight_version = 0

    def prepare(self, weight_version: int) -> None:
        """Let the weights of the policy, whose number this is, answer from now on."""
        self.generation.prepare_for_generation(weight_version=weight_version)
        self.weight_version = weight_version

    def finish(self) -> None:
        """Nothing is asked until `prepare`."""
        self.generation.finish_generation()

    def run(
        self, prompts: Sequence[tuple[int, Prompt]], sample_ids: Sequence[int], greedy: bool = False
    ) -> list[Rollout]:
        """One conversation for each (index, prompt); `sample_ids` tell them apart."""
        rollouts = [
            Rollout.begin(index, sample_id, prompt)
            for (index, prompt), sample_id in zip(prompts, sample_ids, strict=True)
        ]
        records = [prompt.record for _, prompt in prompts]
        plain = [isinstance(prompt.content, str) for _, prompt in prompts]
        going = list(range(len(rollouts)))
        while going:
            self._respond([rollouts[i] for i in going], greedy)
            steps = self._judge([rollouts[i].message_log for i in going], [records[i] for i in going])
            going = [
                i for i, step in zip(going, steps, strict=True) if self._goes_on(rollouts[i], step, plain=plain[i])
            ]
        return rollouts

    def _respond(self, rollouts: list[Rollout], greedy: bool) -> None:
        lengths = [len(r.input_ids) for r in rollouts]
        data: BatchedDataDict[GenerationDatumSpec] = BatchedDataDict(
            input_ids=_padded([r.input_ids for r in rollouts], torch.long),
            input_lengths=torch.tensor(lengths),
            sample_ids=torch.tensor([r.sample_id for r in rollouts]),
        )
        out = self.generation.generate(data, greedy)
        ends, truncated = out["unpadded_sequence_lengths"].tolist(), out["truncated"].tolist()
        for row, rollout in enumerate(rollouts):
            response = slice(lengths[row], ends[row])
            tokens = out["output_ids"][row, response].tolist()
            rollout.add_response(tokens, out["logprobs"][row, response].tolist())
            rollout.truncated, rollout.turns = truncated[row], rollout.turns + 1
            rollout.weight_version = self.weight_version
            if "routed_experts" in out:
                rollout.routed_experts = out["routed_experts"][row, : ends[row]].tolist()
            text = self.tokenizer.decode(tokens, skip_special_tokens=True)
            rollout.message_log = [*rollout.message_log, {"role": "assistant", "content": text}]

    def _judge(self, logs: list[MessageLog], records: list[dict[str, Any]]) -> list[Step]:
        """All ranks judge together; or rank 0 beside, however long it takes, and the ranks meet often enough for no
        collective to time out."""
        judging = None
        if self.environment is not None and getattr(self.environment, "on_every_rank", False):
            return self.environment.step(logs, records)
        if self.environment is not None:
            judging = self._beside.submit(self.environment.step, logs, records)
        return share_outcome(judging, self.meeting_seconds)

    def _goes_on(self, rollout: Rollout, step: Step, plain: bool) -> bool:
        """Take the reward; True if there is an observation, and room, for another turn."""
        rollout.reward += step.reward
        rollout.error = rollout.error or step.error
        if step.done or step.error or step.observation is None or rollout.turns >= self.max_turns:
            return False
        observed = self._observed(rollout, step.observation, plain)
        if len(rollout.input_ids) + len(observed) >= self.generation.max_sequence_length:
            return False
        rollout.add_observation(observed)
        rollout.message_log = [*rollout.message_log, {"role": "user", "content": step.observation}]
        return True

    def _observed(self, rollout: Rollout, observation: str, plain: bool) -> list[int]:
        """Tokens between the last response and the next: a plain text goes on as plain text."""
        if plain:
            return list(self.tokenizer(observation, add_special_tokens=False)["input_ids"])
        return tokens_between(self.tokenizer, rollout.message_log[:-1], observation, rollout.input_ids)


def to_batch(rollouts: Sequence[Rollout], pad_token_id: int) -> BatchedDataDict[Any]:
    """Right-padded rows: input_ids, token_mask, generation_logprobs [B, S], input_lengths, sample_mask [B].

    And routed_experts [B, S, layers, topk] int16 where the rollouts have them, −1 where they are not known.
    """
    input_ids = _padded([r.input_ids for r in rollouts], torch.long, pad_token_id)
    batch: BatchedDataDict[Any] = BatchedDataDict(
        input_ids=input_ids,
        token_mask=_padded([r.token_mask for r in rollouts], torch.float32),
        generation_logprobs=_padded([r.logprobs for r in rollouts], torch.float32),
        input_lengths=torch.tensor([len(r.input_ids) for r in rollouts]),
        sample_mask=torch.ones(len(rollouts)),
    )
    if all(r.routed_experts is not None for r in rollouts):
        experts = _padded([r.routed_experts or [] for r in rollouts], torch.int16, -1)
        tail = input_ids.shape[1] - experts.shape[1]  # what was observed last was never fed to the model
        batch["routed_experts"] = F.pad(experts, (0, 0, 0, 0, 0, tail), value=-1)
    return batch


def _padded(rows: Sequence[Sequence[float]], dtype: torch.dtype, padding: float = 0) -> torch.Tensor:
    tensors = [torch.tensor(row, dtype=dtype) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=padding)
