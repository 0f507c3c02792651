"""Rollouts by agents: each is a session of a program that calls the policy through the endpoint."""

from __future__ import annotations

import asyncio
import shutil
import weakref
from collections.abc import Sequence
from concurrent.futures import wait
from typing import Any

from mcore_rl.agents.agent_session import AgentSession
from mcore_rl.agents.messages import BadRequest, for_clients, images_in
from mcore_rl.agents.programs import GRACE_SECONDS, ProgramError, programs_of
from mcore_rl.agents.session_images import ImageStore
from mcore_rl.agents.sessions import Session, SessionLimits, Sessions
from mcore_rl.config import RLConfig
from mcore_rl.distributed.collectives import settle
from mcore_rl.distributed.topology import Topology
from mcore_rl.environments.interfaces import Sample
from mcore_rl.environments.judge_processes import JudgeProcesses
from mcore_rl.errors import UserError
from mcore_rl.models.generation.interfaces import GenerationInterface, RequestEngine, StreamingGeneration
from mcore_rl.models.generation.megatron.generation import MegatronGeneration
from mcore_rl.models.generation.megatron.served_generation import ServedGeneration
from mcore_rl.rollouts.samples import Rollout, RolloutBatch
from mcore_rl.rollouts.worker import Conversation, PromptRequests, RolloutWorker
from mcore_rl.run.directory import AGENT_LOG, JUDGE_LOG, SESSION_IMAGES
from mcore_rl.utils import torchrun
from mcore_rl.utils.console import PrintLine, silent


class AgentWorker(RolloutWorker):
    """Runs a program for each rollout. On the first rank of each replica, an endpoint answers the programs' requests.

    Args:
        generation: with `vllm`, sessions run in the background like conversations; the training processes themselves
            generate only while all ranks are in `run`.

    Raises:
        UserError: the program or the judge cannot be started. Raised on every rank.
    """

    def __init__(
        self,
        config: RLConfig,
        generation: GenerationInterface,
        tokenizer: Any,
        topology: Topology,
        say: PrintLine = silent,
    ) -> None:
        self.config, self.agent = config, config.environment.agent
        of_session = config.environment.of_session
        judge = None
        if topology.leads_replica and of_session is not None:
            judge = JudgeProcesses(of_session, config.output_dir / JUDGE_LOG)
        if torchrun.rank() == 0:
            shutil.rmtree(config.output_dir / SESSION_IMAGES, ignore_errors=True)  # of a run that was killed
        super().__init__(generation, judge, tokenizer, 1, config.parallel.meeting_seconds, topology, say)
        self.served = ServedGeneration(generation) if isinstance(generation, MegatronGeneration) else None
        starting = asyncio.run_coroutine_threadsafe(self._start(), self._loop) if topology.leads_replica else None
        settle(starting, self.meeting_seconds)

    async def _start(self) -> None:
        from mcore_rl.agents.server import Endpoint, Server

        agent, directory = self.agent, self.config.output_dir
        limits = SessionLimits(agent.max_calls, agent.max_tokens)
        engine = self.served or self.generation
        assert isinstance(engine, RequestEngine), "every backend answers requests, or is served"
        self._slots = asyncio.Semaphore(agent.max_sessions)
        images = ImageStore.of(self.tokenizer, directory / SESSION_IMAGES, agent.images)
        self.sessions = Sessions(engine, self.tokenizer, limits, agent.history, images)
        self.programs = programs_of(self.config.environment, directory / AGENT_LOG)
        await self.programs.start()
        port = agent.port + self.topology.data.rank if agent.port else 0
        try:
            self._server = Server(Endpoint(self.sessions, agent.max_body_bytes), agent.host, port)
        except OSError as error:
            raise UserError(f"environment.agent.port={port}: {agent.host} cannot listen on it: {error}") from None
        await self._server.start()

    def prepare(self, weight_version: int) -> None:
        super().prepare(weight_version)
        if self.topology.leads_replica:  # until now, late requests of ended sessions got status 410
            self._loop.call_soon_threadsafe(self.sessions.forget)
        if self.served is not None:
            self.served.weight_version = weight_version

    def close(self) -> None:
        if self.topology.leads_replica:
            closing = asyncio.run_coroutine_threadsafe(self._stop(), self._loop)
            wait([closing], GRACE_SECONDS)
        super().close()
        if self.environment is not None:
            self.environment.close()

    async def _stop(self) -> None:
        await self.programs.close()
        await self._server.stop()

    def run(self, prompts: PromptRequests, sample_ids: Sequence[int], greedy: bool = False) -> RolloutBatch:
        begun = self.begin(prompts, sample_ids, greedy)
        if self.served is not None:
            with self._telling_progress(begun):
                self.served.serve(begun.work, greedy)
        return self.collect(begun)

    @property
    def streams(self) -> bool:
        return isinstance(self.generation, StreamingGeneration)

    # ------------------------------------------------------------ a session

    async def _run_conversation(self, conversation: Conversation, greedy: bool) -> Rollout:
        """Run the program of a rollout; return the rollout with the rows of its session."""
        rollout, prompt = conversation.rollout, conversation.prompt
        async with self._slots:
            messages = await asyncio.to_thread(for_clients, rollout.message_log)
            session = self.sessions.begin(rollout.sample_id, prompt.record, messages, greedy)
            if session.tree.images is not None:  # as long as the trainer may read them
                weakref.finalize(rollout, session.tree.images.remove)
                session.tree.images.trust(part["image_url"]["url"] for part in images_in(messages, "image_url"))
            try:
                await self._run_program(session)
            finally:
                self.sessions.finish(session)
        self._fill(rollout, session)
        if session.reward is None and session.error is None and self.environment is not None:
            await self._judge_session(conversation, session)
        elif session.reward is None and session.error is None:
            # The policy is responsible for a limit that it has reached: the reward is then 0.
            rollout.error = None if session.reached is not None else "its program gave no reward"
        return rollout

    async def _run_program(self, session: Session) -> None:
        """Run a session's program until it ends, until it has given its reward, or for at most its time limit."""
        running = asyncio.ensure_future(self.programs.run(self._told(session)))
        rewarded = asyncio.ensure_future(session.done.wait())
        try:
            seconds = self.agent.session_seconds
            await asyncio.wait([running, rewarded], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if rewarded.done() and not running.done():
                await asyncio.wait([running], timeout=GRACE_SECONDS)
            if not session.is_over and not running.done():
                session.error = f"its program did not end within environment.agent.session_seconds={seconds:g}"
            elif not session.is_over:
                self._take_result(session, running)
        finally:
            rewarded.cancel()
            if not running.done():
                running.cancel()

    def _take_result(self, session: Session, running: asyncio.Future[Any]) -> None:
        """Take the reward that a program has returned, or its error."""
        try:
            if (reward := running.result()) is not None:
                session.give_reward(reward)
        except ProgramError as error:
            if session.reached is None:
                session.error = f"its program {error}"
        except BadRequest as error:
            session.error = f"its program returned a wrong reward: {error}"
        except Exception as error:
            session.error = f"its program could not be run: {error!r}"

    def _told(self, session: Session) -> AgentSession:
        url = self._server.url
        return AgentSession(session.id, f"{url}/v1", url, session.key, dict(session.record), session.messages)

    def _fill(self, rollout: Rollout, session: Session) -> None:
        """Set the rows, the reward and the texts of a rollout."""
        turns = session.tree.delivered()
        if rows := session.tree.rows():
            first, *rollout.further_rows = rows
            rollout.input_ids, rollout.token_mask, rollout.logprobs = first.input_ids, first.token_mask, first.logprobs
            rollout.choices, rollout.kept_tokens, rollout.images = first.choices, first.kept_tokens, first.images
            rollout.response_lengths = [len(turn.response.token_ids) for turn in turns]
            rollout.weight_versions = [pair for turn in turns for pair in turn.response.weight_versions]
            leaves = {id(turn.prompt.parent) for turn in turns}
            rollout.truncated = any(not turn.response.ended for turn in turns if id(turn) not in leaves)
            rollout.message_log = session.tree.messages_of(turns[-1])
        rollout.turns, rollout.session = len(turns), session.tree.logged()
        rollout.reward, rollout.rewards, rollout.error = session.reward or 0.0, session.rewards, session.error

    async def _judge_session(self, conversation: Conversation, session: Session) -> None:
        rollout, prompt = conversation.rollout, conversation.prompt
        if not rollout.turns:
            rollout.error = "its program has made no request"
            return
        last = session.tree.delivered()[-1]
        asked = len(last.path[0].prompt.messages) or 1  # messages before the first response
        sample = Sample(rollout.message_log, prompt.record, asked, is_text=False)
        step = await asyncio.wrap_future(self.environment.submit(sample))
        rollout.reward, rollout.rewards, rollout.error, rollout.answer = (
            step.reward,
            step.rewards,
            step.error,
            step.answer,
        )
