"""Generation by the training model itself, in the training processes.

Data- and context-parallel ranks are replicas that share the prompts out; the tensor- and pipeline-parallel
ranks of a replica run the same steps. A replica keeps up to `max_batch_size` sequences going: one that
ends leaves at once, and the next prompt of the queue takes its place. A prompt that is being answered already
(the others of its group) does not go through the model again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mcore_rl.config import RLConfig
from mcore_rl.data.chat import end_token_ids
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.distributed.collectives import gather_along
from mcore_rl.distributed.own_rows import OwnRows
from mcore_rl.distributed.topology import ParallelDimension
from mcore_rl.errors import UserError
from mcore_rl.models.generation.decoder import Decoder, KeyValueCache
from mcore_rl.models.generation.interfaces import (
    GenerationDatumSpec,
    GenerationInterface,
    GenerationOutputSpec,
    Response,
    output_of,
    prompts_of,
)
from mcore_rl.models.generation.sampling import SamplingParams, sample, uniforms
from mcore_rl.models.megatron.families.mixture import Mixture
from mcore_rl.models.megatron.model import BuiltModel


@dataclass
class _Sequence:
    """A sequence on its way."""

    row: int
    """In the batch of prompts."""
    sample_id: int
    prompt: tuple[int, ...]
    prompt_state: Tensor = field(init=False)
    """[hidden] of the prompt's last token, on the last stage."""
    response: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    routed: list[Tensor] = field(default_factory=list)
    """Experts of the prompt's tokens, then of each token of the response that was fed to the model."""
    ended: bool = False

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)


class MegatronGeneration(GenerationInterface):
    """Continues prompts with the weights of a model that may go on being trained.

    Args:
        params: how tokens are drawn.
        max_sequence_length: of prompt and response together.
        tokenizer: decodes the ends of responses, for stop strings.
        max_batch_size: sequences that a replica runs at a time.
        prefill_tokens: prompt tokens that go through the model at a time.
        record_experts: give the experts of every token back.

    Raises:
        UserError: experts are to be recorded of a model that has none.
    """

    def __init__(
        self,
        model: BuiltModel,
        params: SamplingParams,
        max_sequence_length: int,
        tokenizer: Any,
        max_batch_size: int = 64,
        prefill_tokens: int = 8192,
        record_experts: bool = False,
    ) -> None:
        self.decoder, self.topology, self.params = Decoder(model, record_experts), model.topology, params
        if record_experts and not isinstance(model.family, Mixture):
            raise UserError(f"model.moe_router_replay: {model.family.model_type} has no experts; leave it out")
        self.record_experts, self.family = record_experts, model.family
        self.max_sequence_length, self.tokenizer = max_sequence_length, tokenizer
        self.max_batch_size, self.prefill_tokens = max_batch_size, prefill_tokens
        # A token holds a byte at least: so many of the last ones show any stop string that has just come.
        longest = max((len(text.encode()) for text in params.stop_strings), default=0)
        self.stop_window = longest + 1

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        return True

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        return True

    @torch.no_grad()
    def generate(
        self,
        data: BatchedDataDict[GenerationDatumSpec],
        greedy: bool = False,
        max_new_tokens: Sequence[int] | None = None,
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """A response to each row; collective, also for a replica that has none of its own.

        Args:
            greedy: take the likeliest token whatever the temperature.
            max_new_tokens: a limit of each row's own; that of the sampling parameters if left out.

        Raises:
            UserError: a prompt that is empty, or leaves no room for a response.
        """
        params = replace(self.params, temperature=0.0) if greedy else self.params
        rows = enumerate(prompts_of(data, self.max_sequence_length))
        prompts = [_Sequence(row, sample_id, prompt) for row, (sample_id, prompt) in rows]
        limits = list(max_new_tokens or [params.max_new_tokens] * len(prompts))
        sharing = [self.topology.context] if isinstance(data, OwnRows) else [self.topology.data, self.topology.context]
        places = range(len(prompts))
        for dimension in sharing:  # neighbours: equal prompts, which go through the model once
            places = dimension.part_of(places)
        mine = [prompts[place] for place in places]
        with self.decoder.generating():
            if mine:
                _Batch(self, mine, params, limits).run()
            self.decoder.run_idle()
        return self._collect(mine, prompts, sharing)

    def _collect(
        self, mine: list[_Sequence], prompts: list[_Sequence], sharing: Sequence[ParallelDimension]
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """The sequences of all ranks that share them out."""
        own = [(s.row, Response(s.response, s.logprobs, s.ended)) for s in mine]
        done = dict(pair for part in gather_along(own, *sharing) for pair in part)
        responses = [done[s.row] for s in prompts]
        collected = output_of([s.prompt for s in prompts], responses, self.tokenizer.pad_token_id)
        if self.record_experts:
            collected["routed_experts"] = self._collect_experts(mine, tuple(collected["output_ids"].shape), sharing)
        return collected

    def _collect_experts(
        self, mine: list[_Sequence], shape: tuple[int, ...], sharing: Sequence[ParallelDimension]
    ) -> Tensor:
        """As `_collect`, of every stage; [B, S', layers with experts, topk] int16."""
        assert isinstance(self.family, Mixture)
        experts, layers = self.family.experts, [router.index for router in self.decoder.routers]
        speaks = bool(layers) and self.topology.tensor.rank == 0
        own = [(s.row, torch.cat(s.routed).short().cpu()) for s in mine] if speaks else []
        collected = torch.full((*shape, sum(experts.sparse_layers), experts.topk), -1, dtype=torch.int16)
        for their_layers, part in gather_along((layers, own), self.topology.tensor, self.topology.pipeline, *sharing):
            for row, routed in part:
                collected[row, : len(routed), their_layers] = routed
        return collected


class _Batch:
    """The sequences that a replica has going: sequence i in row i of the cache."""

    def __init__(
        self, generation: MegatronGeneration, sequences: list[_Sequence], params: SamplingParams, limits: list[int]
    ) -> None:
        self.generation, self.params = generation, params
        room = generation.max_sequence_length
        self.limit = {s.row: min(limits[s.row], room - len(s.prompt)) for s in sequences}
        self.queue, self.going = deque(sequences), list[_Sequence]()
        rows = min(len(sequences), generation.max_batch_size)
        longest = max(len(s.prompt) + self.limit[s.row] for s in sequences)
        self.cache = KeyValueCache(generation.decoder, rows, longest)
        self.rows = rows

    def run(self) -> None:
        while self.queue or self.going:
            self._admit()
            if self.going:
                tokens, lengths = [s.response[-1] for s in self.going], [len(s) for s in self.going]
                x = self.cache.step(tokens, lengths)
                self._note_experts(self.going, [1] * len(self.going))
                self._extend(self.going, x)
                self._retire()

    def _admit(self) -> None:
        """Queued sequences into free rows, each with its first token; one whose prompt is in a row copies it."""
        while self.queue and len(self.going) < self.rows:
            first, fresh = len(self.going), list[int]()
            row_of = {s.prompt: row for row, s in enumerate(self.going)}
            tokens = 0
            while self.queue and len(self.going) < self.rows:
                s, row = self.queue[0], len(self.going)
                if s.prompt not in row_of:
                    tokens += len(s.prompt)
                    if fresh and tokens > self.generation.prefill_tokens:
                        break
                    fresh.append(row)
                    row_of[s.prompt] = row
                self.going.append(self.queue.popleft())
            self._prefill(fresh)
            new = self.going[first:]
            for row, s in enumerate(new, start=first):
                if (source := row_of[s.prompt]) != row:
                    self.cache.copy(source, row, len(s.prompt))
                    s.prompt_state = self.going[source].prompt_state
                    s.routed = self.going[source].routed[:1]
            self._extend(new, torch.stack([s.prompt_state for s in new]))
            self._retire()

    def _prefill(self, rows: list[int]) -> None:
        """Run the prompts of these rows' sequences."""
        if rows:
            states = self.cache.prefill(rows, [self.going[row].prompt for row in rows])
            for row, state in zip(rows, states, strict=True):
                self.going[row].prompt_state = state
            fresh = [self.going[row] for row in rows]
            self._note_experts(fresh, [len(s.prompt) for s in fresh])

    def _note_experts(self, sequences: list[_Sequence], lengths: list[int]) -> None:
        """Of the tokens that have just gone through the model, so many of each sequence."""
        if self.generation.decoder.routers:
            for s, routed in zip(sequences, self.generation.decoder.routed.split(lengths), strict=True):
                s.routed.append(routed)

    def _extend(self, sequences: list[_Sequence], x: Tensor) -> None:
        """One more token each, from the hidden states [n, hidden] of their last ones."""
        tokens, logprobs = self._next_tokens(sequences, x)
        for s, token, logprob in zip(sequences, tokens, logprobs, strict=True):
            s.response.append(token)
            s.logprobs.append(logprob)
            s.ended = token in self.params.stop_token_ids or self._at_stop_string(s)

    def _next_tokens(self, sequences: list[_Sequence], x: Tensor) -> tuple[list[int], list[float]]:
        topology = self.generation.topology
        drawn = torch.empty(2, len(sequences), dtype=torch.float64, device=x.device)
        if topology.is_last_stage:
            u = uniforms(self.params.seed, [s.sample_id for s in sequences], [len(s) for s in sequences])
            group = topology.tensor.group
            drawn[0], drawn[1] = sample(self.generation.decoder.logits(x), u, self.params, group)
        if topology.pipeline.size > 1:
            torch.distributed.broadcast(drawn, group=topology.pipeline.group, group_src=topology.pipeline.size - 1)
        tokens, logprobs = drawn.tolist()
        return [int(token) for token in tokens], logprobs

    def _at_stop_string(self, s: _Sequence) -> bool:
        if not self.params.stop_strings:
            return False
        text = self.generation.tokenizer.decode(s.response[-self.generation.stop_window :])
        return any(stop in text for stop in self.params.stop_strings)

    def _retire(self) -> None:
        """Let go of what has ended; the last sequences move into the rows that become free."""
        for row in reversed(range(len(self.going))):
            s = self.going[row]
            if s.ended or len(s.response) >= self.limit[s.row]:
                last = self.going.pop()
                if last is not s:
                    self.cache.copy(len(self.going), row, len(last))
                    self.going[row] = last


def sampling_params_of(config: RLConfig, tokenizer: Any) -> SamplingParams:
    """How the configuration has tokens drawn."""
    options = config.rollouts
    return SamplingParams(
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        stop_token_ids=tuple(sorted(end_token_ids(tokenizer))),
        stop_strings=options.stop_strings,
        seed=config.seed,
    )


def megatron_generation_of(config: RLConfig, model: BuiltModel, tokenizer: Any) -> MegatronGeneration:
    """Generation by `model`, as the configuration says."""
    return MegatronGeneration(
        model,
        sampling_params_of(config, tokenizer),
        config.data.max_sequence_length,
        tokenizer,
        config.rollouts.generation_batch_size,
        record_experts=config.model.moe_router_replay,
    )
