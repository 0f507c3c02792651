"""Observe a step phase by phase."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mcore_rl.distributed.packs import PackLayout
from mcore_rl.simulation.memory import ACTIVATIONS, LOGITS, STATE, LiveBytes
from mcore_rl.simulation.models import CRITIC_TRAINING, CRITIC_UPDATE, UPDATE
from mcore_rl.simulation.parts import LM_HEAD, Parts
from mcore_rl.simulation.products import ProductCounter
from mcore_rl.simulation.rank import AttentionFlops, HostReads, replaced
from mcore_rl.simulation.traffic import Traffic

BUILDING = "building"
RESULTS = "results"
"""What ranks tell each other of the loss: some bytes, which are not simulated."""


class Watch:
    """Memory, operations, transfers and waits of a step, each by the phase that has been entered.

    layouts: of the microbatches that have gone through a model last. swapped: bytes of weights that came from the host
    or went there.

    Args:
        devices: kinds of device whose memory is counted.
    """

    def __init__(self, traffic: Traffic, reads: HostReads, attention: AttentionFlops, devices: Sequence[str]) -> None:
        self.traffic, self.reads, self.attention, self.parts = traffic, reads, attention, Parts()
        self.live = traffic.memory = LiveBytes(*devices, kind_now=self._kind_now)
        self.products = ProductCounter(lambda: (self.live.phase, self.parts.now()))
        self.attention_by_phase = Counter[str]()
        self.layouts: list[PackLayout] = []
        self.swapped = 0
        self._made = 0  # optimizer state, so far
        self._made_before: dict[str, int] = {}

    def enter(self, phase: str) -> None:
        """A phase begins."""
        self._made_before.setdefault(phase, self._made)
        self.attention_by_phase[self.live.phase] += self.attention.total - sum(self.attention_by_phase.values())
        self.live.phase = self.traffic.phase = self.reads.phase = phase

    def missing_state(self) -> dict[str, int]:
        """Bytes of optimizers' states that were not yet made when each phase began."""
        return {phase: self._made - before for phase, before in self._made_before.items()}

    @contextmanager
    def of_step(self) -> Iterator[None]:
        """Meanwhile models are built, and go through a step."""
        from mcore_rl.models.policy import megatron_policy, reference, scoring

        with (
            replaced(scoring, "run_microbatches", self._run(scoring.run_microbatches)),
            replaced(megatron_policy, "collect_results", self._collect(megatron_policy.collect_results)),
            replaced(megatron_policy, "optimizer_step", self._update(megatron_policy.optimizer_step)),
            replaced(reference, "exchange", self._exchange(reference.exchange)),
            self.parts.of_lm_head(),
            self.live,
            self.products,
        ):
            self.enter(BUILDING)
            yield

    def _kind_now(self) -> str:
        if self.live.phase == BUILDING:
            return STATE
        return LOGITS if self.parts.now() == LM_HEAD else ACTIVATIONS

    def _run(self, run_microbatches: Any) -> Any:
        def run(model: Any, wrapped: Any, microbatches: Any, head: Any, train: bool) -> Any:
            self.layouts = [microbatch.layout for microbatch in microbatches]
            return run_microbatches(model, wrapped, microbatches, head, train)

        return run

    def _exchange(self, exchange: Any) -> Any:
        def exchanged(tensor: Any, kept: Any) -> None:
            self.swapped += 2 * tensor.nbytes
            exchange(tensor, kept)

        return exchanged

    def _collect(self, collect_results: Any) -> Any:
        def collect(*arguments: Any) -> Any:
            self.traffic.phase = RESULTS
            try:
                return collect_results(*arguments)
            finally:
                self.traffic.phase = self.live.phase

        return collect

    def _update(self, optimizer_step: Any) -> Any:
        def update(*arguments: Any) -> Any:
            self.enter(CRITIC_UPDATE if self.live.phase == CRITIC_TRAINING else UPDATE)
            before, done = self.live.live, optimizer_step(*arguments)
            self._made += self.live.live - before
            return done

        return update
