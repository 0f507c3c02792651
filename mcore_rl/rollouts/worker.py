"""The rollout worker. It runs the policy's conversations in an environment. Each replica runs its own conversations."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from mcore_rl.data.chat import with_response
from mcore_rl.data.choices import CHOICES
from mcore_rl.data.datasets import Prompt
from mcore_rl.data.texts import continuation_ids
from mcore_rl.data.turns import tokens_between
from mcore_rl.distributed.batched_data_dict import BatchShare, LocalBatch
from mcore_rl.distributed.collectives import broadcast_lists_in_replica, settle
from mcore_rl.distributed.topology import Topology
from mcore_rl.environments.interfaces import CollectiveEnvironment, Environment, Sample, Step
from mcore_rl.models.generation.interfaces import (
    GenerationDatumSpec,
    GenerationInterface,
    RequestError,
    Response,
    StreamingGeneration,
    prompts_to_answer,
)
from mcore_rl.rollouts.samples import Rollout, RolloutBatch, SummaryExchange
from mcore_rl.utils.console import GenerationProgress, PrintLine, silent

CLOSE_SECONDS, POLL_SECONDS = 10.0, 0.5

PromptRequests = Sequence[tuple[int, Prompt]]
"""Prompts with their indices in the dataset, repeated for each response."""


@dataclass(eq=False)
class Conversation:
    """A rollout in progress, and its prompt. The next turns need the prompt."""

    rollout: Rollout
    prompt: Prompt
    is_over: bool = False
    """Whether the conversation has ended, if it runs in the background."""

    @property
    def sample(self) -> Sample:
        """The last response as a `Sample`, for the judge."""
        start, asked = len(self.prompt.input_ids), self.prompt.num_complete_messages
        is_text, rollout = isinstance(self.prompt.content, str), self.rollout
        size = rollout.response_lengths[-1] if rollout.response_lengths else 0
        ids = rollout.input_ids[start:].tolist()  # for the judge's process, which reads JSON
        return Sample(rollout.message_log, self.prompt.record, asked, is_text, ids, size)

    def respond(self, response: Response, tokenizer: Any) -> None:
        rollout = self.rollout
        rollout.add_response(response.token_ids, response.logprobs, response.kept_tokens)
        rollout.weight_versions = [*rollout.weight_versions, *response.weight_versions]
        rollout.truncated, rollout.turns = not response.ended, rollout.turns + 1
        if response.choices:  # those of the whole conversation so far
            rollout.choices = response.choices
        text = tokenizer.decode(response.token_ids.tolist(), skip_special_tokens=True)
        rollout.message_log = with_response(rollout.message_log, text)

    def observe(self, step: Step, tokenizer: Any, max_turns: int, max_sequence_length: int) -> list[int] | None:
        """Record how the environment judges the last response (`step`); return the tokens of its observation.

        Return None if the conversation ends here.
        """
        rollout = self.rollout
        rollout.add_reward(step)
        rollout.rewards = rollout.rewards | {
            name: rollout.rewards.get(name, 0.0) + reward for name, reward in step.rewards.items()
        }
        rollout.error, rollout.answer = rollout.error or step.error, step.answer
        if step.done or rollout.error or step.observation is None or rollout.turns >= max_turns:
            return None
        observed = self._observed(step.observation, tokenizer)
        if len(rollout.input_ids) + len(observed) >= max_sequence_length:
            return None
        rollout.add_observation(observed)
        rollout.message_log = [*rollout.message_log, {"role": "user", "content": step.observation}]
        return observed

    def _observed(self, observation: str, tokenizer: Any) -> list[int]:
        """Return the tokens to insert after the last response, so that the policy can generate another response.

        After a plain-text prompt, these are only the tokens of `observation`; otherwise the chat template adds text.
        """
        if isinstance(self.prompt.content, str):
            return continuation_ids(tokenizer, self.rollout.message_log[-1]["content"], observation)
        return tokens_between(tokenizer, self.rollout.message_log[:-1], observation, self.rollout.input_ids)


class RolloutWorker:
    """Runs the policy's conversations in an environment.

    All methods except `begin`, `cancel` and `close` are collective.

    Each replica runs the conversations of its own prompts. If the generation engine returns responses one by one, the
    first rank of the replica runs the conversations in the background, independently of each other. Otherwise all ranks
    of the replica generate the responses of a turn together, before the responses are judged.

    Args:
        environment: an `Environment`, on the first rank of each replica, or a `CollectiveEnvironment`, on every rank.
        meeting_seconds: interval at which ranks synchronize while some of them judge; it must be well below the timeout
            of collectives.
        say: prints the progress of long generation; on the first rank only.
    """

    def __init__(
        self,
        generation: GenerationInterface,
        environment: Environment | CollectiveEnvironment | None,
        tokenizer: Any,
        max_turns: int,
        meeting_seconds: float = 5.0,
        topology: Topology = Topology(),  # noqa: B008 (frozen)
        say: PrintLine = silent,
    ) -> None:
        self.generation, self.tokenizer, self.topology = generation, tokenizer, topology
        self.max_turns, self.meeting_seconds, self.say = max_turns, meeting_seconds, say
        self.judges_together = hasattr(environment, "step")
        self.environment: Any = environment
        self.weight_version = 0
        self.judging_seconds = 0.0
        """Seconds since `prepare` in which the ranks waited for the judge; 0 if conversations run in the background."""
        self._telling = SummaryExchange(topology)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="conversations", daemon=True).start()

    def prepare(self, weight_version: int) -> None:
        """Prepare the engine to generate with the policy's current weights; their version is `weight_version`."""
        self.generation.prepare_for_generation(weight_version=weight_version)
        self.weight_version, self.judging_seconds = weight_version, 0.0

    def finish(self) -> None:
        """End generation; the engine receives no requests until the next `prepare`."""
        self.generation.finish_generation()

    def cancel(self) -> None:
        """Cancel all conversations of this rank. Not collective."""
        wait([asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop)], CLOSE_SECONDS)

    def close(self) -> None:
        """Close the worker: cancel all conversations, and send no more requests."""
        self.cancel()
        self._loop.call_soon_threadsafe(self._loop.stop)

    # ------------------------------------------------------------ conversations

    def run(self, prompts: PromptRequests, sample_ids: Sequence[int], greedy: bool = False) -> RolloutBatch:
        """Run a conversation for each of the `prompts`, given as (index, prompt), and return the rollouts.

        Args:
            sample_ids: number of each conversation among all samples of the run.
        """
        if self.streams:
            return self.collect(self.begin(prompts, sample_ids, greedy))
        places = self.topology.data.part_of(range(len(prompts)))  # one prefill for equal prompts
        conversations = _conversations(prompts, sample_ids, places)
        self._in_lockstep(conversations, greedy)
        led = zip(places, conversations, strict=True) if self.topology.leads_replica else ()
        return self._of_all({place: conversation.rollout for place, conversation in led}, len(prompts))

    @property
    def streams(self) -> bool:
        """Whether conversations can be started by `begin` and collected later by `collect`."""
        return isinstance(self.generation, StreamingGeneration) and not self.judges_together

    def begin(self, prompts: PromptRequests, sample_ids: Sequence[int], greedy: bool = False) -> PendingRollouts:
        """Start conversations as `run` does, but in the background; `collect` returns their rollouts.

        Prompts are assigned to the replicas in turn; all conversations of a prompt run on the same replica.
        """
        if not self.topology.leads_replica:
            return PendingRollouts((), None, len(prompts), ())
        replica, replicas = self.topology.data.rank, self.topology.data.size
        groups = groupby(range(len(prompts)), key=lambda place: prompts[place][0])
        places = [p for number, (_, group) in enumerate(groups) if number % replicas == replica for p in group]
        own = _conversations(prompts, sample_ids, places)
        work = asyncio.run_coroutine_threadsafe(self._lead_all(own, greedy), self._loop)
        return PendingRollouts(places, work, len(prompts), own)

    def collect(self, begun: PendingRollouts) -> RolloutBatch:
        """Wait for the conversations that `begin` started; return all replicas' rollouts in the order of the prompts.

        The ranks synchronize often enough that no collective times out. If conversations fail on some ranks, the
        exception of the lowest such rank is raised on all ranks.
        """
        with self._telling_progress(begun):
            led = settle(begun.work, self.meeting_seconds) or []
        return self._of_all(dict(zip(begun.places, led, strict=True)), begun.total)

    def _of_all(self, own: Mapping[int, Rollout], total: int) -> RolloutBatch:
        """Return the batch of all replicas' rollouts. Collective.

        Args:
            own: this rank's rollouts. Each key is a rollout's index among all rollouts.
            total: number of rollouts of all replicas.
        """
        outcomes = {place: rollout.outcome for place, rollout in own.items()}
        return RolloutBatch(self._telling.everyones(outcomes, total), own)

    @contextlib.contextmanager
    def _telling_progress(self, begun: PendingRollouts) -> Iterator[None]:
        """Context that waits for conversations in the background; meanwhile, lines about them are printed."""
        if begun.work is None or self.say is silent:
            yield
            return
        telling = asyncio.run_coroutine_threadsafe(self._tell_progress(begun.conversations), self._loop)
        try:
            yield
        finally:
            telling.cancel()

    async def _tell_progress(self, conversations: Sequence[Conversation]) -> None:
        def counts() -> tuple[int, int]:
            tokens = sum(sum(conversation.rollout.response_lengths) for conversation in conversations)
            return sum(conversation.is_over for conversation in conversations), tokens

        progress = GenerationProgress(len(conversations), self.topology.data.size, self.say, counts()[1])
        while True:
            await asyncio.sleep(POLL_SECONDS)
            progress.reached(counts)

    async def _lead_all(self, conversations: Sequence[Conversation], greedy: bool) -> list[Rollout]:
        return await asyncio.gather(*(self._lead(conversation, greedy) for conversation in conversations))

    async def _lead(self, conversation: Conversation, greedy: bool) -> Rollout:
        rollout = await self._run_conversation(conversation, greedy)
        conversation.is_over = True
        return rollout

    async def _run_conversation(self, conversation: Conversation, greedy: bool) -> Rollout:
        """Run a conversation from its prompt to its end."""
        assert isinstance(self.generation, StreamingGeneration)
        while True:
            rollout, group = conversation.rollout, conversation.prompt.input_ids
            ids, images = tuple(rollout.input_ids.tolist()), conversation.prompt.images
            asked = self.generation.submit(ids, rollout.sample_id, group, greedy, images=images)
            try:
                conversation.respond(await asyncio.wrap_future(asked), self.tokenizer)
            except RequestError as error:
                rollout.error = f"it has no response: {error}"
                return rollout
            step = await asyncio.wrap_future(self.environment.submit(conversation.sample))
            if self._observe(conversation, step) is None:
                return rollout

    def _in_lockstep(self, conversations: Sequence[Conversation], greedy: bool) -> None:
        """Run this replica's conversations turn by turn, until the conversations of all replicas have ended."""
        going = list(conversations)
        while (share := BatchShare.concatenated(len(going), self.topology.data)).total:
            self._respond(going, share, greedy)
            started = time.perf_counter()
            going = self._judge([conversation for conversation in going if conversation.rollout.error is None])
            self.judging_seconds += time.perf_counter() - started

    def _respond(self, conversations: Sequence[Conversation], share: BatchShare, greedy: bool) -> None:
        rollouts = [conversation.rollout for conversation in conversations]
        images = [conversation.prompt.images for conversation in conversations]
        asked = prompts_to_answer([r.input_ids for r in rollouts], [r.sample_id for r in rollouts], images)
        data: LocalBatch[GenerationDatumSpec] = LocalBatch(asked, share)
        out, lengths = self.generation.generate(data, greedy), asked["input_lengths"].tolist()
        ends, truncated = out["unpadded_sequence_lengths"].tolist(), out["truncated"].tolist()
        for row, conversation in enumerate(conversations):
            if ends[row] == lengths[row]:
                conversation.rollout.error = "it has no response"
                continue
            response = slice(lengths[row], ends[row])
            tokens, logprobs = out["output_ids"][row, response].numpy(), out["logprobs"][row, response].numpy()
            versions = [(self.weight_version, len(tokens))]
            choices = {name: out[name][row, : ends[row]] for name in CHOICES if name in out}
            kept = out["kept_tokens"][row] if "kept_tokens" in out else None
            answer = Response(tokens, logprobs, not truncated[row], versions, choices, kept)
            conversation.respond(answer, self.tokenizer)

    def _judge(self, conversations: Sequence[Conversation]) -> list[Conversation]:
        """Judge the last responses and add the observations; return the conversations that continue.

        With a collective environment, all ranks judge together. Otherwise the first rank of each replica judges the
        replica's samples. All ranks wait for it, if necessary longer than the time limit of a collective.
        """
        if self.judges_together:
            steps = self.environment.step([conversation.sample for conversation in conversations])
            return [c for c, step in zip(conversations, steps, strict=True) if self._observe(c, step) is not None]
        judging = None
        if self.topology.leads_replica:
            judging = asyncio.run_coroutine_threadsafe(self._judge_all(conversations), self._loop)
        observed = settle(judging, self.meeting_seconds) or []
        goes_on = [place for place, tokens in enumerate(observed) if tokens is not None]
        known = [goes_on, *(tokens or [] for tokens in observed)]
        # The other ranks of the replica need only the tokens. Texts and rewards stay on the rank that runs the
        # conversations.
        goes_on, *tokens_of = broadcast_lists_in_replica(known, 1 + len(conversations), self.topology)
        if not self.topology.leads_replica:
            for place in goes_on:
                conversations[place].rollout.add_observation(tokens_of[place])
        return [conversations[place] for place in goes_on]

    async def _judge_all(self, conversations: Sequence[Conversation]) -> list[list[int] | None]:
        """Judge the last responses; return the tokens of each observation, or None if the conversation ends."""
        judging = [asyncio.wrap_future(self.environment.submit(c.sample)) for c in conversations]
        return [self._observe(c, step) for c, step in zip(conversations, await asyncio.gather(*judging), strict=True)]

    def _observe(self, conversation: Conversation, step: Step) -> list[int] | None:
        return conversation.observe(step, self.tokenizer, self.max_turns, self.generation.max_sequence_length)


@dataclass(frozen=True)
class PendingRollouts:
    """Conversations that run in the background.

    places: for each conversation of this rank, its place among the conversations of all replicas.
    work: future of the rollouts; None if this rank runs no conversations.
    total: number of conversations of all replicas.
    conversations: the conversations of this rank.
    """

    places: Sequence[int]
    work: Future[list[Rollout]] | None
    total: int
    conversations: Sequence[Conversation]


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _conversations(prompts: PromptRequests, sample_ids: Sequence[int], places: Sequence[int]) -> list[Conversation]:
    """Return a new conversation for the prompt at each of the `places`."""
    return [Conversation(Rollout.begin(prompts[p][0], sample_ids[p], prompts[p][1]), prompts[p][1]) for p in places]
