"""Generation by the training model for requests that arrive while it generates.

The first rank of a replica receives requests from any thread. Before some decoding steps, it broadcasts the new
requests, so that all ranks of the replica run the same steps.
"""

from __future__ import annotations

import itertools
import queue
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_rl.data.images import PlacedImage, decode_images, encode_images
from mcore_rl.distributed.collectives import all_ranks_true, broadcast_lists_in_replica
from mcore_rl.errors import UserError
from mcore_rl.models.generation.interfaces import (
    NO_OPTIONS,
    Distribution,
    RequestEngine,
    RequestError,
    RequestOptions,
    Response,
)
from mcore_rl.models.generation.megatron.continuous_batch import (
    ContinuousBatch,
    RunningSequence,
    SamplingBatch,
    StopStrings,
)
from mcore_rl.models.generation.megatron.generation import MegatronGeneration
from mcore_rl.models.generation.sampling import SamplingParams

STEPS_BETWEEN_LOOKS = 8
"""Number of decoding steps between two looks for new requests."""
IDLE_SECONDS = 0.02
"""Time for which a replica without sequences waits for a request before it communicates with the other replicas."""


class ServedBatch(ContinuousBatch):
    """A continuous batch to which sequences are added while it runs."""

    def __init__(self, generation: MegatronGeneration, params: SamplingParams) -> None:
        none = StopStrings((), generation.tokenizer)
        rows, prefill = generation.max_batch_size, generation.prefill_tokens
        super().__init__(generation.decoder, [], params, none, rows, prefill, generation.lag, generation.uses_graphs)
        self.has_stop_strings = True
        self._over = list[RunningSequence]()

    def add(self, sequence: RunningSequence) -> None:
        self.queue.append(sequence)

    def cancel(self, row: int) -> None:
        """End the sequence with this number as soon as possible."""
        for sequence in [s for s in self.queue if s.row == row]:
            self.queue.remove(sequence)
        for sequence in self.going:
            if sequence.row == row and sequence.ended_at is None:
                sequence.ended_at = sequence.drawn

    def advance(self, steps: int) -> list[RunningSequence]:
        """Run at most `steps` decoding steps; return the sequences that have ended."""
        for _ in range(steps):
            self._admit()
            if not self.going:
                break
            self._step()
            if any(s.is_over for s in self.going):
                self._arrange(self.going, self.state)
        self._look(lag=0)
        if any(s.is_over for s in self.going):
            self._arrange(self.going, self.state)
        ended, self._over = self._over, []
        return ended

    def close(self) -> None:
        """Release the graphs. They refer to this object, and would keep the memory of its cache."""
        self._forget_graphs()

    def response(self, sequence: RunningSequence) -> Response:
        """Return the response of a sequence that has ended."""
        tokens, logprobs, likeliest = self._sampled_from(sequence, 0)
        # The last token was not an input of the model.
        choices = {name: F.pad(x, (0, 0, 0, 0, 0, 1), value=-1) for name, x in sequence.choices().items()}
        kept = sequence.kept_tokens() if self.params.keeps_mask else None
        ended, scores = sequence.ended_at is not None, sequence.prompt_scores
        return Response(
            tokens, logprobs, ended, choices=choices, kept_tokens=kept, likeliest=likeliest, prompt_scores=scores
        )

    def part(self, sequence: RunningSequence) -> Response:
        """Return the tokens that a running sequence has sampled since the last call."""
        tokens, logprobs, likeliest = self._sampled_from(sequence, sequence.num_told)
        sequence.num_told += len(tokens)
        return Response(tokens, logprobs, False, likeliest=likeliest)

    def _sampled_from(
        self, sequence: RunningSequence, start: int
    ) -> tuple[np.ndarray, np.ndarray, list[list[tuple[int, float]]]]:
        """Return the tokens of a sequence from the number `start` on, their log-probabilities, and the likeliest."""
        count, steps = sequence.response_length - start, sequence.steps_from(start)
        tokens = [torch.stack(draws.tokens[own])[:, column] for draws, column, own in steps]
        logprobs = [torch.stack(draws.logprobs[own])[:, column] for draws, column, own in steps]
        found = [torch.cat(values)[:count].cpu().numpy() for values in (tokens, logprobs)]
        return found[0], found[1], sequence.likeliest_tokens(start)

    def _arrange(self, sequences: Sequence[RunningSequence], state: Tensor) -> None:
        self._over += [s for s in sequences if s.is_over]
        super()._arrange(sequences, state)

    def _new_draws(self, sequences: Sequence[RunningSequence]) -> SamplingBatch:
        for s in sequences:
            s.places = [(draws, column) for draws, column in s.places if draws.tokens]
        draws = super()._new_draws(sequences)
        self.history = [draws]  # the sequences keep what they need of earlier ones
        return draws


class ServedGeneration(RequestEngine):
    """Answers requests with a `MegatronGeneration`. `submit` and `cancel` may be called by any thread.

    weight_version: version of the weights, for responses.

    Raises:
        UserError: the run records choices of the model or sampling masks, and the model has several pipeline stages.
    """

    def __init__(self, generation: MegatronGeneration) -> None:
        self.generation, self.topology = generation, generation.topology
        self.max_sequence_length = generation.max_sequence_length
        self.weight_version = 0
        records = bool(generation.recorded) or generation.params.keeps_mask
        if records and self.topology.pipeline.size > 1:
            raise UserError(
                "parallel.pipeline_model_parallel_size: must be 1 if agents' tokens are recorded with their experts "
                "(model.moe_router_replay), keys (model.indexer_replay) or sampling masks; or set "
                "generation.backend=vllm"
            )
        self._inbox: queue.SimpleQueue[tuple[int, list[int]]] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._asked = dict[int, Future[Response]]()
        self._listeners = dict[int, Callable[[Response], None]]()

    def submit(
        self,
        prompt: tuple[int, ...],
        sample_id: int,
        group: tuple[int, ...] = (),
        greedy: bool = False,
        options: RequestOptions = NO_OPTIONS,
        images: Sequence[PlacedImage] = (),
    ) -> Future[Response]:
        """Ask for a response; see `RequestEngine.submit`. Only on the first rank of a replica.

        A request that is made before `serve` is called waits for it. `group` and `greedy` are not used: equal prompts
        are computed once, and `serve` decides for all requests without a distribution of their own.
        """
        number, future = next(self._numbers), Future[Response]()
        asked = self.generation.params.max_new_tokens
        limit = min(options.max_new_tokens or asked, asked, self.max_sequence_length - len(prompt))
        texts = [*(text.encode() for text in options.stop_strings), encode_images(images)]
        lengths = [len(prompt), options.num_likeliest, len(texts), *map(len, texts)]
        self._asked[number] = future
        if options.on_tokens is not None:
            self._listeners[number] = options.on_tokens
        sampling = [int(options.scores_prompt), *_encoded(options.distribution)]
        self._inbox.put((number, [number, sample_id, limit, *sampling, *lengths, *prompt, *itertools.chain(*texts)]))
        return future

    def cancel(self, future: Future[Response]) -> None:
        if future.cancel():
            for number in [number for number, asked in list(self._asked.items()) if asked is future]:
                self._asked.pop(number, None)
                self._listeners.pop(number, None)
                self._inbox.put((number, [-1 - number]))

    @torch.no_grad()
    def serve(self, work: Future[Any] | None, greedy: bool = False) -> None:
        """Answer requests until the work of all replicas is done. Collective.

        Args:
            work: work that makes the requests, on the first rank of each replica; None on other ranks.
            greedy: for requests without a distribution of their own, take the most likely token.
        """
        params = self.generation.params
        if greedy:
            params = replace(params, temperature=0.0)
        try:
            self.generation.model.finish_param_gather()
            with self.generation.decoder.generating():
                batch = ServedBatch(self.generation, params)
                try:
                    self._serve(batch, params, work)
                finally:
                    batch.close()
        finally:
            for number in list(self._asked):
                asked = self._asked.pop(number, None)
                if asked is not None and asked.set_running_or_notify_cancel():
                    asked.set_exception(RequestError("the rollouts of the step have ended"))

    def _serve(self, batch: ServedBatch, params: SamplingParams, work: Future[Any] | None) -> None:
        while not all_ranks_true(work is None or work.done())[0]:
            for command in self._commands(bool(batch.going or batch.queue), work):
                if command[0] < 0:
                    batch.cancel(-1 - command[0])
                else:
                    batch.add(_sequence(command, params, self.generation.tokenizer))
            for ended in batch.advance(STEPS_BETWEEN_LOOKS):
                asked = self._asked.pop(ended.row, None)
                self._listeners.pop(ended.row, None)
                if asked is not None and asked.set_running_or_notify_cancel():
                    response = batch.response(ended)
                    response.weight_versions = [(self.weight_version, len(response.token_ids))]
                    asked.set_result(response)
            for going in batch.going:
                if (listener := self._listeners.get(going.row)) is not None:
                    listener(batch.part(going))
            self.generation.decoder.run_idle()

    def _commands(self, is_busy: bool, work: Future[Any] | None) -> Iterator[list[int]]:
        """Yield the new commands on every rank of the replica: requests, or −1 − number to cancel one."""
        told = list[int]()
        if self.topology.leads_replica:
            seconds = 0.0 if is_busy or work is None or work.done() else IDLE_SECONDS
            for command in self._waiting(seconds):
                told += [len(command), *command]
        (told,) = broadcast_lists_in_replica([told], 1, self.topology)
        start = 0
        while start < len(told):
            end = start + 1 + told[start]
            yield told[start + 1 : end]
            start = end

    def _waiting(self, seconds: float) -> Iterator[list[int]]:
        """Yield the commands in the inbox; if there is none, wait for one for at most `seconds`."""
        while True:
            try:
                number, command = self._inbox.get(timeout=seconds) if seconds else self._inbox.get_nowait()
            except queue.Empty:
                return
            seconds = 0.0
            if command[0] < 0 or number in self._asked:  # otherwise it was cancelled, or asked between two steps
                yield command


def _encoded(distribution: Distribution | None) -> list[int]:
    """Return a distribution as integers: those with the bits of its numbers; the first one is 0 for None."""
    if distribution is None:
        return [0, 0, 0, 0, 0]
    numbers = distribution.temperature, distribution.top_p, distribution.min_p
    return [1, distribution.top_k or 0, *struct.unpack("3q", struct.pack("3d", *numbers))]


def _decoded(numbers: Sequence[int], default: SamplingParams) -> SamplingParams | None:
    """Return the sampling parameters of a request with the `_encoded` distribution `numbers`; None for the default."""
    is_own, top_k, *bits = numbers
    if not is_own:
        return None
    temperature, top_p, min_p = struct.unpack("3d", struct.pack("3q", *bits))
    return replace(default, temperature=temperature, top_k=top_k or None, top_p=top_p, min_p=min_p)


def _sequence(command: list[int], params: SamplingParams, tokenizer: Any) -> RunningSequence:
    """Return the sequence of a request (see `ServedGeneration.submit`)."""
    number, sample_id, limit, scores_prompt, *rest = command
    own, (size, num_likeliest, count, *rest) = _decoded(rest[:5], params), rest[5:]
    lengths, rest = rest[:count], rest[count:]
    prompt, rest = rest[:size], rest[size:]
    texts = list[bytes]()
    for length in lengths:
        texts.append(bytes(rest[:length]))
        rest = rest[length:]
    *stops, images = texts
    return RunningSequence(
        number,
        sample_id,
        tuple(prompt),
        limit,
        stop_strings=StopStrings([*params.stop_strings, *(stop.decode() for stop in stops)], tokenizer),
        images=decode_images(images),
        num_likeliest=num_likeliest,
        params=own,
        scores_prompt=bool(scores_prompt),
    )
