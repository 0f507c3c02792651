"""From prompts to judged conversations, and from those to a batch to train on."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

from mcore_rl.data.chat import tokens_between
from mcore_rl.data.prompts import Prompt
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.distributed.collectives import gather_objects, gather_outcomes
from mcore_rl.distributed.topology import Topology
from mcore_rl.environments.interfaces import CollectiveEnvironment, Environment, MessageLog, Sample, Step
from mcore_rl.models.generation.interfaces import (
    GenerationDatumSpec,
    GenerationInterface,
    Response,
    StreamingGeneration,
)

T = TypeVar("T")

CLOSE_SECONDS = 10.0


@dataclass
class Rollout:
    """One conversation: a prompt, responses, and observations between them.

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
    """What the reward is the weighted sum of, by name."""
    weight_versions: list[tuple[int, int]] = field(default_factory=list)
    """(version, tokens) of the responses' tokens in their order: which weights they were drawn by. A version is the
    number of steps that were trained."""
    message_log: MessageLog = field(default_factory=list)
    token_rewards: list[tuple[int, float]] = field(default_factory=list)
    """(position, reward): what tokens have earned, whose sum is the reward."""
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
    def weight_version(self) -> int:
        """Of the oldest weights that it has a token from."""
        return min((version for version, _ in self.weight_versions), default=0)

    @property
    def response_length(self) -> int:
        """Tokens of all responses."""
        return sum(self.token_mask)

    @property
    def longest_response(self) -> int:
        """Tokens of the longest single response."""
        return max(self.response_lengths, default=self.response_length)


@dataclass
class Conversation:
    """A rollout on its way, and what is needed to go on with it."""

    rollout: Rollout
    prompt: Prompt

    @property
    def sample(self) -> Sample:
        """For whoever judges its last response."""
        log, start = self.prompt.message_log, len(self.prompt.input_ids)
        is_text, rollout = isinstance(self.prompt.content, str), self.rollout
        size = rollout.response_lengths[-1] if rollout.response_lengths else 0
        return Sample(rollout.message_log, self.prompt.record, len(log), is_text, rollout.input_ids[start:], size)

    def respond(self, response: Response, tokenizer: Any) -> None:
        rollout = self.rollout
        rollout.add_response(response.token_ids, response.logprobs)
        rollout.weight_versions = [*rollout.weight_versions, *response.weight_versions]
        rollout.truncated, rollout.turns = not response.ended, rollout.turns + 1
        if response.routed_experts is not None:  # of the whole conversation so far
            rollout.routed_experts = response.routed_experts.tolist()
        text = tokenizer.decode(response.token_ids, skip_special_tokens=True)
        rollout.message_log = [*rollout.message_log, {"role": "assistant", "content": text}]

    def goes_on(self, step: Step, tokenizer: Any, max_turns: int, max_sequence_length: int) -> bool:
        """Take the reward; True if there is an observation, and room, for another turn."""
        rollout = self.rollout
        rollout.earn(step)
        rollout.rewards = rollout.rewards | {
            name: rollout.rewards.get(name, 0.0) + reward for name, reward in step.rewards.items()
        }
        rollout.error = rollout.error or step.error
        if step.done or rollout.error or step.observation is None or rollout.turns >= max_turns:
            return False
        observed = self._observed(step.observation, tokenizer)
        if len(rollout.input_ids) + len(observed) >= max_sequence_length:
            return False
        rollout.add_observation(observed)
        rollout.message_log = [*rollout.message_log, {"role": "user", "content": step.observation}]
        return True

    def _observed(self, observation: str, tokenizer: Any) -> list[int]:
        """Tokens between the last response and the next: a plain text goes on as plain text."""
        if isinstance(self.prompt.content, str):
            return list(tokenizer(observation, add_special_tokens=False)["input_ids"])
        return tokens_between(tokenizer, self.rollout.message_log[:-1], observation, self.rollout.input_ids)


class RolloutWorker:
    """Lets the policy answer prompts in an environment. All but `begin` and `close` is collective.

    Where a generation engine gives responses one by one, the first rank of each data-parallel replica leads the
    conversations of the replica's own prompts, each as far as it has come, beside whatever else the rank does.
    Otherwise all ranks generate all responses of a turn together, which then are judged, each by its own replica.

    Args:
        environment: of the first rank of each replica, or a collective one of every rank.
        meeting_seconds: how often ranks meet while some judge: well below the timeout of collectives.
    """

    def __init__(
        self,
        generation: GenerationInterface,
        environment: Environment | CollectiveEnvironment | None,
        tokenizer: Any,
        max_turns: int,
        meeting_seconds: float = 5.0,
        topology: Topology = Topology(),  # noqa: B008 (frozen)
    ) -> None:
        self.generation, self.tokenizer, self.topology = generation, tokenizer, topology
        self.max_turns, self.meeting_seconds = max_turns, meeting_seconds
        self.judges_together = hasattr(environment, "step")
        self.environment: Any = environment
        self.weight_version = 0
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="conversations", daemon=True).start()

    def prepare(self, weight_version: int) -> None:
        """Let the weights of the policy, whose number this is, answer from now on."""
        self.generation.prepare_for_generation(weight_version=weight_version)
        self.weight_version = weight_version

    def finish(self) -> None:
        """Nothing is asked until `prepare`."""
        self.generation.finish_generation()

    def close(self) -> None:
        """Nothing is asked or judged any more."""
        wait([asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop)], CLOSE_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)

    # ------------------------------------------------------------ conversations

    def run(
        self, prompts: Sequence[tuple[int, Prompt]], sample_ids: Sequence[int], greedy: bool = False
    ) -> list[Rollout]:
        """One conversation for each (index, prompt); `sample_ids` tell them apart."""
        if self.streams:
            return self.collect(self.begin(prompts, sample_ids, greedy))
        conversations = _conversations(prompts, sample_ids)
        self._in_lockstep(conversations, greedy)
        return [conversation.rollout for conversation in conversations]

    @property
    def streams(self) -> bool:
        """Whether conversations can be begun now and collected later."""
        return isinstance(self.generation, StreamingGeneration) and not self.judges_together

    def begin(self, prompts: Sequence[tuple[int, Prompt]], sample_ids: Sequence[int], greedy: bool = False) -> Begun:
        """As `run`, of which `collect` is the end: the conversations of this rank's replica go on meanwhile.

        Those of a prompt are of one replica, the prompts in turn of one and the other.
        """
        replicas, conversations = self.topology.data.size, _conversations(prompts, sample_ids)
        groups = groupby(conversations, key=lambda conversation: conversation.rollout.prompt)
        owners = [number % replicas for number, (_, group) in enumerate(groups) for _ in group]
        own = [c for c, owner in zip(conversations, owners, strict=True) if owner == self.topology.data.rank]
        work = asyncio.run_coroutine_threadsafe(self._lead_all(own, greedy), self._loop) if self._leads else None
        return Begun(owners, work)

    def collect(self, begun: Begun) -> list[Rollout]:
        """The rollouts of what was begun, from all replicas, in the order of their prompts."""
        return self._in_turn(begun.owners, begun.work)

    async def _lead_all(self, conversations: Sequence[Conversation], greedy: bool) -> list[Rollout]:
        return await asyncio.gather(*(self._lead(conversation, greedy) for conversation in conversations))

    async def _lead(self, conversation: Conversation, greedy: bool) -> Rollout:
        """One conversation from its prompt to its end."""
        assert isinstance(self.generation, StreamingGeneration)
        while True:
            rollout, group = conversation.rollout, conversation.prompt.input_ids
            asked = self.generation.submit(tuple(rollout.input_ids), rollout.sample_id, group, greedy)
            conversation.respond(await asyncio.wrap_future(asked), self.tokenizer)
            step = await asyncio.wrap_future(self.environment.submit(conversation.sample))
            if not self._goes_on(conversation, step):
                return rollout

    def _in_lockstep(self, conversations: Sequence[Conversation], greedy: bool) -> None:
        """All turn by turn."""
        going = list(conversations)
        while going:
            self._respond(going, greedy)
            steps = self._judge([conversation.sample for conversation in going])
            going = [c for c, step in zip(going, steps, strict=True) if self._goes_on(c, step)]

    def _respond(self, conversations: Sequence[Conversation], greedy: bool) -> None:
        rollouts = [conversation.rollout for conversation in conversations]
        lengths = [len(r.input_ids) for r in rollouts]
        data: BatchedDataDict[GenerationDatumSpec] = BatchedDataDict(
            input_ids=_padded([r.input_ids for r in rollouts], torch.long),
            input_lengths=torch.tensor(lengths),
            sample_ids=torch.tensor([r.sample_id for r in rollouts]),
        )
        out = self.generation.generate(data, greedy)
        ends, truncated = out["unpadded_sequence_lengths"].tolist(), out["truncated"].tolist()
        for row, conversation in enumerate(conversations):
            response = slice(lengths[row], ends[row])
            tokens, logprobs = out["output_ids"][row, response].tolist(), out["logprobs"][row, response].tolist()
            versions = [(self.weight_version, len(tokens))]
            experts = out["routed_experts"][row, : ends[row]] if "routed_experts" in out else None
            conversation.respond(Response(tokens, logprobs, not truncated[row], versions, experts), self.tokenizer)

    def _judge(self, samples: Sequence[Sample]) -> list[Step]:
        """Each replica judges its own beside, however long it takes; or all ranks judge all together."""
        if self.judges_together:
            steps: list[Step] = self.environment.step(samples)
            return steps
        replica, replicas = self.topology.data.rank, self.topology.data.size
        owners = [number % replicas for number in range(len(samples))]
        judging = None
        if self._leads:
            judging = asyncio.run_coroutine_threadsafe(self._judge_all(samples[replica::replicas]), self._loop)
        return self._in_turn(owners, judging)

    async def _judge_all(self, samples: Sequence[Sample]) -> list[Step]:
        return await asyncio.gather(*(asyncio.wrap_future(self.environment.submit(sample)) for sample in samples))

    def _goes_on(self, conversation: Conversation, step: Step) -> bool:
        return conversation.goes_on(step, self.tokenizer, self.max_turns, self.generation.max_sequence_length)

    # ------------------------------------------------------------ replicas

    @property
    def _leads(self) -> bool:
        return self.topology.leads_replica

    def _in_turn(self, owners: Sequence[int], work: Future[list[T]] | None) -> list[T]:
        """The results of all replicas' work, whose owners in their order are these; of exceptions the first is raised.

        The ranks meet often enough for no collective to time out.
        """
        outcomes, ranks = gather_outcomes(work, self.meeting_seconds), gather_objects(self.topology.data.rank)
        of_replica = {rank: iter(results) for rank, results in zip(ranks, outcomes, strict=True) if results is not None}
        return [next(of_replica[owner]) for owner in owners]


@dataclass(frozen=True)
class Begun:
    """Conversations that go on beside. owners: the replica of each. work: of this rank's replica, if it leads it."""

    owners: list[int]
    work: Future[list[Rollout]] | None


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _conversations(prompts: Sequence[tuple[int, Prompt]], sample_ids: Sequence[int]) -> list[Conversation]:
    return [
        Conversation(Rollout.begin(index, sample_id, prompt), prompt)
        for (index, prompt), sample_id in zip(prompts, sample_ids, strict=True)
    ]


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


def rewards_of_tokens(rollouts: Sequence[Rollout]) -> torch.Tensor:
    """[B, S] fp32, what each token has earned; of rollouts that do not say, all at the last token of a response."""
    rewards = torch.zeros(len(rollouts), max(len(r.input_ids) for r in rollouts))
    for row, rollout in enumerate(rollouts):
        for position, reward in rollout.token_rewards or [(last_response_token(rollout), rollout.reward)]:
            rewards[row, position] += reward
    return rewards


def last_response_token(rollout: Rollout) -> int:
    """Its position; the last of all if no response has a token."""
    own = [position for position, is_own in enumerate(rollout.token_mask) if is_own]
    return own[-1] if own else len(rollout.token_mask) - 1


def _padded(rows: Sequence[Sequence[float]], dtype: torch.dtype, padding: float = 0) -> torch.Tensor:
    tensors = [torch.tensor(row, dtype=dtype) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=padding)
