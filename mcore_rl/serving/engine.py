"""A loaded model that answers requests, under any parallel layout or by vLLM's servers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from mcore_rl import platform
from mcore_rl.algorithms.grpo import build_generation
from mcore_rl.config import GRPOConfig
from mcore_rl.data.tokenize import load_tokenizer
from mcore_rl.distributed.collectives import settle
from mcore_rl.errors import UserError
from mcore_rl.models.generation.interfaces import RequestEngine
from mcore_rl.models.generation.megatron.generation import MegatronGeneration
from mcore_rl.models.generation.megatron.served_generation import ServedGeneration
from mcore_rl.models.generation.vllm.generation import VLLMGeneration
from mcore_rl.models.generation.vllm.placement import places_of_launch
from mcore_rl.models.megatron.checkpoint.load import read_state
from mcore_rl.models.policy.megatron_policy import MegatronPolicy
from mcore_rl.run.preflight import check_layout, check_vllm
from mcore_rl.run.setup import check_models, check_tokenizers, check_weights
from mcore_rl.serving.model_source import ModelSource
from mcore_rl.utils import torchrun
from mcore_rl.utils.checkpoint_store import CheckpointStore
from mcore_rl.utils.console import PrintLine, rank_zero_printer

T = TypeVar("T")


class ServingEngine:
    """A model that answers requests. All methods are collective.

    Attributes:
        config: the resolved configuration.
        engine: answers single requests; used on the first rank of each replica.

    Args:
        say: prints a message for the user.

    Raises:
        UserError: the model cannot be used, or does not fit the layout; or a server cannot be started.
    """

    def __init__(self, source: ModelSource, say: PrintLine) -> None:
        self.config: GRPOConfig = platform.resolve(source.config)
        config, model = self.config, self.config.model
        check_layout(config, torchrun.world_size())
        found = check_models(config)
        check_weights(config, found, needed=source.checkpoint is None)
        self.tokenizer = load_tokenizer(model.path, model.trust_remote_code, config.data.chat_template, say)
        check_tokenizers(config, found, self.tokenizer)
        join_ranks(config)
        places_of_launch(config)
        self.policy = MegatronPolicy(config)
        if not config.rollouts.sample_unused_ids:
            self.policy.exclude_unused_ids(self.tokenizer)
        load_weights(self.policy, source)
        self.generation = build_generation(config, self.policy, self.tokenizer, say)
        self.engine: RequestEngine
        if isinstance(self.generation, MegatronGeneration):
            self.engine = ServedGeneration(self.generation)
        else:
            assert isinstance(self.generation, RequestEngine), "every other backend answers requests"
            self.engine = self.generation

    def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T | None:
        """Run `work` on the first rank of each replica while the engine answers its requests.

        Returns:
            What this rank's work has returned; None on other ranks.
        """
        topology = self.policy.topology
        self.generation.prepare_for_generation(weight_version=0)
        with _event_loop() as loop:
            begun = asyncio.run_coroutine_threadsafe(work(), loop) if topology.leads_replica else None
            if isinstance(self.engine, ServedGeneration):
                self.engine.serve(begun)
            return settle(begun, self.config.parallel.meeting_seconds)

    def settled(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T | None:
        """Run `work`, which asks for no responses, on the first rank of each replica; see `run`.

        If it fails on a rank, every rank raises its exception.
        """
        with _event_loop() as loop:
            begun = asyncio.run_coroutine_threadsafe(work(), loop) if self.policy.topology.leads_replica else None
            return settle(begun, self.config.parallel.meeting_seconds)

    def is_lost(self) -> bool:
        """Return whether all of vLLM's servers are gone. Only on the first rank of a replica; not collective."""
        return isinstance(self.engine, VLLMGeneration) and not self.engine.servers

    def close(self) -> None:
        self.generation.close()
        self.policy.shutdown()


@contextlib.contextmanager
def _event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Return a context with an event loop that runs in a thread."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="serving", daemon=True).start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)


def join_ranks(config: GRPOConfig) -> None:
    """Join the process group of all ranks, after checks that each of them makes alone.

    Raises:
        UserError: vLLM's servers cannot be started.
    """
    check_vllm(config)
    seconds = timedelta(seconds=config.parallel.timeout_seconds)
    platform.initialize_process_group(seconds, config.parallel.backend)


def load_weights(policy: MegatronPolicy, source: ModelSource) -> None:
    """Load the weights of the checkpoint that a user has named, if any. Collective.

    Raises:
        UserError: the checkpoint does not fit the model, or there is none of the best validation.
    """
    if (checkpoint := checkpoint_of(source)) is not None:
        policy.checkpoint.load_weights(checkpoint)


def checkpoint_of(source: ModelSource) -> Path | None:
    """Return the checkpoint with a model's weights; None if they are those of `model.path`.

    Raises:
        UserError: there is no checkpoint of the best validation.
    """
    if source.checkpoint is None or not source.takes_best:
        return source.checkpoint
    return _best_of(source.checkpoint)


def _best_of(newest: Path) -> Path:
    """Return the checkpoint of the best validation of the run whose newest checkpoint is given.

    Raises:
        UserError: the run has no best validation, or its checkpoint is gone.
    """
    step = read_state(newest).get("best", {}).get("step")
    if not step:
        raise UserError(f"{newest}: the run has no best validation; set checkpoint.best_metric when you train")
    if (best := CheckpointStore(newest.parent).iteration(step)).is_dir():
        return best
    raise UserError(f"{best}: the checkpoint of the best validation is gone")


@contextlib.contextmanager
def serving_engine(source: ModelSource) -> Iterator[ServingEngine]:
    """Return a context with the engine of a model. The engine is closed at the end, also after an error."""
    engine = ServingEngine(source, rank_zero_printer(torchrun.rank() == 0))
    try:
        yield engine
    finally:
        engine.close()
