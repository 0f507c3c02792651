"""Continuous batching: the sequences of a replica, and the steps that sample their tokens.

Sequences with equal prompts compute the prompt once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64, Int64
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_rl import platform
from mcore_rl.data.images import PlacedImage
from mcore_rl.data.token_texts import TokenTexts
from mcore_rl.distributed.sampling_mask import KeptTokens
from mcore_rl.models.generation.interfaces import (
    PromptScores,
    Response,
)
from mcore_rl.models.generation.megatron.decoder import Decoder, SequenceCache
from mcore_rl.models.generation.megatron.layer_caches import BLOCK_SIZE, blocks_for
from mcore_rl.models.generation.sampling import Draw, SamplingParams, random_states, sample, uniforms
from mcore_rl.utils.console import GenerationProgress

MAX_GRAPHS = 64
"""Maximum number of CUDA graphs. Once it is reached, all are freed, and recording starts anew."""
LOOK_AHEAD = BLOCK_SIZE // 2
"""Number of steps for which blocks are allocated at once, so that the device rarely needs a new block table."""


@dataclass(eq=False)
class SamplingBatch:
    """The tokens that consecutive steps sampled for the same n sequences. Each list has one entry per step.

    tokens, logprobs: [n], the sampled tokens and their log-probabilities.
    choices: recorded choices for the step's input tokens by name, [n, layers, size]; empty if nothing is recorded.
    kept: for each sequence, the tokens that the filters kept; only on the last stage, and only if kept tokens are
        returned.
    likeliest: [n, m, 2] fp64 on the host, ids and log-probabilities of the likeliest tokens; m is what the sequences
        ask for.
    """

    tokens: list[Tensor] = field(default_factory=list)
    logprobs: list[Tensor] = field(default_factory=list)
    choices: list[dict[str, Tensor]] = field(default_factory=list)
    kept: list[list[KeptTokens]] = field(default_factory=list)
    likeliest: list[Tensor] = field(default_factory=list)


@dataclass(eq=False)
class RunningSequence:
    """A sequence that is being generated."""

    row: int
    """The prompt's row in the batch."""
    sample_id: int
    prompt: tuple[int, ...]
    limit: int
    """Maximum number of tokens in the response."""
    drawn: int = 0
    """Number of tokens sampled so far. This includes tokens after the response's end, until the host detects the
    end."""
    ended_at: int | None = None
    """Number of tokens of the response including its stop token or string; None until the host has detected the end."""
    blocks: list[int] = field(default_factory=list)
    """Numbers of the sequence's blocks in the cache."""
    slot: int = -1
    """Number of the sequence's slot in the cache."""
    prompt_state: Tensor = field(init=False)
    """Final hidden state [hidden] of the prompt's last token; valid only on the last stage."""
    prompt_choices: dict[str, Tensor] = field(default_factory=dict)
    """Recorded choices for the prompt's tokens by name, [tokens, layers, size]."""
    places: list[tuple[SamplingBatch, int]] = field(default_factory=list)
    """The sampling batches that contain the response's tokens, in order, each with the sequence's column in it."""
    tail: str = ""
    """The end of the response's text, as much as is needed to detect a stop string."""
    texts: TokenTexts | None = None
    """Divides the response's text among its tokens; None if no stop strings are looked for."""
    stop_strings: StopStrings | None = None
    """Stop strings of this sequence; None for those of the batch."""
    num_likeliest: int = 0
    """Number of the likeliest tokens at each position that are returned with the response."""
    images: tuple[PlacedImage, ...] = ()
    """The prompt's images."""
    params: SamplingParams | None = None
    """Sampling parameters of this sequence; None for those of the batch."""
    scores_prompt: bool = False
    """Whether the prompt's tokens are scored (`prompt_scores`)."""
    prompt_scores: PromptScores | None = None
    num_told: int = 0
    """Number of tokens of which a listener has been told."""

    @property
    def identity(self) -> Hashable:
        """Equal for sequences with equal prompts, including their images and how they are scored."""
        scores = self.num_likeliest if self.scores_prompt else None
        return self.prompt, scores, *(image.identity for image in self.images)

    @property
    def shift(self) -> int:
        """Difference between the positions of the response's tokens for the rotary embedding and their indices."""
        return sum(image.shift for image in self.images)

    def __len__(self) -> int:
        return len(self.prompt) + self.drawn

    def kept_tokens(self) -> KeptTokens:
        """Return the tokens that the filters kept at each position of the response."""
        of_steps = [step[column] for draws, column in self.places for step in draws.kept]
        return KeptTokens.concatenated(of_steps[: self.response_length])

    def steps_from(self, start: int) -> list[tuple[SamplingBatch, int, slice]]:
        """Return the steps that have sampled the tokens from the number `start` on: batch, column and steps in it."""
        left, found = self.drawn - start, list[tuple[SamplingBatch, int, slice]]()
        for draws, column in reversed(self.places):
            if left <= 0:
                break
            first = max(0, len(draws.tokens) - left)
            left -= len(draws.tokens) - first
            found.append((draws, column, slice(first, None)))
        return found[::-1]

    def likeliest_tokens(self, start: int) -> list[list[tuple[int, float]]]:
        """Return the likeliest tokens at each position from `start` on with their log-probabilities; [] if not asked.

        All steps of a sequence that asks for them have tables. Steps of others have some only because of their
        neighbours in the batch.
        """
        if not self.num_likeliest:
            return []
        of_steps = [
            step[column, : self.num_likeliest]
            for draws, column, steps in self.steps_from(start)
            for step in draws.likeliest[steps]
        ]
        return [
            [(int(token), logprob) for token, logprob in step.tolist() if logprob > -math.inf]
            for step in of_steps[: self.response_length - start]
        ]

    @property
    def response_length(self) -> int:
        return self.drawn if self.ended_at is None else self.ended_at

    @property
    def is_over(self) -> bool:
        return self.ended_at is not None or self.drawn >= self.limit

    def choices(self) -> dict[str, Tensor]:
        """Return the recorded choices for each input token by name, [tokens, layers, size].

        The input tokens are all tokens of the sequence but the last. The model never gets the last token as an input.
        """
        count = len(self.prompt) + self.response_length - 1
        found = {}
        for name, of_prompt in self.prompt_choices.items():
            steps = [step[name][column] for draws, column in self.places for step in draws.choices]
            found[name] = torch.cat([of_prompt, *([torch.stack(steps)] if steps else [])])[:count].cpu()
        return found


class StopStrings:
    """The stop strings. A response ends as soon as it contains one of these texts."""

    def __init__(self, texts: Sequence[str], tokenizer: Any) -> None:
        self.texts, self.tokenizer = texts, tokenizer
        self._longest = max(map(len, texts), default=0)

    def end(self, s: RunningSequence, token: int) -> bool:
        """Append the text of `token` to the end of the sequence's text; return whether a stop string now ends it."""
        if s.texts is None:
            s.texts = TokenTexts(self.tokenizer)
        new = s.texts.add(token)
        text = s.tail + new
        s.tail = text[-self._longest :] if self._longest else ""
        return any(stop in text for stop in self.texts)


@dataclass
class _Look:
    """A step's data, from which the host finds the responses that have ended. It may read them some steps later.

    drawn: number of tokens sampled for each sequence, including this step's token.
    stopped: [n], whether each sequence sampled a stop token in this step.
    tokens: [n], the tokens sampled in this step; None if there are no stop strings.
    """

    sequences: Sequence[RunningSequence]
    drawn: Sequence[int]
    stopped: platform.HostCopy
    tokens: platform.HostCopy | None


def coarse_size(size: int) -> int:
    """Round `size` up, so that only 8 different sizes remain between a power of two and the next.

    This limits the number of sizes for which CUDA graphs are recorded. The size grows by less than an eighth; sizes up
    to 16 do not change.
    """
    step = max(1, 2 ** (size - 1).bit_length() // 16)
    return -(-size // step) * step


class ReplayedStep:
    """A decoding step of fixed sizes that a GPU replays as one CUDA graph. The graph always uses the same tensors.

    For small models the host needs longer to launch a step's kernels one by one than the GPU needs to run them.

    Args:
        next_of: function that computes the step. Its argument [4, rows] contains, for each sequence, the last token,
            the token's position, the seed of the random numbers, and the shift. The function reads and writes `cache`,
            and returns the new state and what it has sampled.
        graphs: memory pool in which the graph is created.
    """

    def __init__(
        self,
        next_of: Callable[[Tensor], tuple[Tensor, Draw]],
        cache: SequenceCache,
        graphs: platform.GraphPool,
    ) -> None:
        self.cache, self.table, self.slots = cache, cache.table.clone(), cache.slots_of_rows.clone()
        state = self.state = self.table.new_zeros(4, len(self.table))
        self._run = graphs.recorded(lambda: next_of(state))

    def use_inputs(self) -> None:
        """Copy the cache's block table and slot numbers to the graph's tensors, and let the cache use these tensors."""
        self.table.copy_(self.cache.table)
        self.slots.copy_(self.cache.slots_of_rows)
        self.cache.table, self.cache.slots_of_rows = self.table, self.slots

    def __call__(self, state: Tensor) -> tuple[Tensor, Draw]:
        """Run the step for n sequences, the columns of `state` [4, n]; n may be less than the step's fixed size."""
        count = state.shape[1]
        self.state.copy_(F.pad(state, (0, len(self.table) - count)))
        try:
            state, draw = self._run()
        except RuntimeError as error:
            error.add_note("generation.cuda_graphs=false generates without CUDA graphs")
            raise
        parts = (draw.tokens, draw.logprobs, draw.kept, draw.likeliest)
        tokens, logprobs, kept, likeliest = (None if part is None else part[:count].clone() for part in parts)
        assert tokens is not None and logprobs is not None and likeliest is not None
        return state[:, :count].clone(), Draw(tokens, logprobs, kept, likeliest)


class ContinuousBatch:
    """Continuous batching of a replica's sequences. When a sequence ends, the next one of the queue takes its place.

    Sampled tokens stay on the device, where the next step reads them. During generation the host reads only which
    responses have ended, and the kept tokens. If the device is asynchronous, the host reads them while the next step
    runs, so the device never waits for the host. Tokens that were sampled after a response's end are discarded.

    Args:
        sequences: sequences in the order in which they start.
        rows: maximum number of concurrent sequences.
        prefill_tokens: maximum number of prompt tokens in a forward pass.
        lag: number of steps by which the host is late in reading a step's data. It does not affect results.
        uses_graphs: whether steps have fixed sizes, so that a GPU replays them as CUDA graphs.
        progress: prints how far `run` is; None to print nothing.
    """

    def __init__(
        self,
        decoder: Decoder,
        sequences: Sequence[RunningSequence],
        params: SamplingParams,
        stop_strings: StopStrings,
        rows: int,
        prefill_tokens: int,
        lag: int,
        uses_graphs: bool = False,
        progress: GenerationProgress | None = None,
    ) -> None:
        self.decoder, self.params, self.stop_strings = decoder, params, stop_strings
        self.rows, self.prefill_tokens, self.lag, self.progress = rows, prefill_tokens, lag, progress
        self.all, self.queue, self.going = list(sequences), deque(sequences), list[RunningSequence]()
        self.cache = SequenceCache(decoder)
        # For each running sequence: its last token, the token's position, the state of its random numbers, its shift.
        self.state = torch.zeros(4, 0, dtype=torch.long, device=platform.device())
        self.stop_token_ids = platform.to_device(params.stop_token_ids)
        self.history, self.looks = list[SamplingBatch](), deque[_Look]()
        self.distributions: list[tuple[SamplingParams, Tensor | None]] = [(params, None)]
        """Sampling parameters of the running sequences, and the rows that have them; None for all rows."""
        self.has_stop_strings = bool(params.stop_strings)
        """Whether the host reads every sampled token, because a sequence may have stop strings."""
        self.kept_tables = deque[tuple[SamplingBatch, platform.HostCopy]]()
        """Tables of kept tokens, [n, k] padded with −1, of the steps that the host has not read yet."""
        self.likeliest_tables = deque[tuple[SamplingBatch, platform.HostCopy]]()
        """Tables of the likeliest tokens, [n, m, 2], of the steps that the host has not read yet."""
        self.num_likeliest = 0
        """Number of the likeliest tokens that the next steps return for each running sequence."""
        self.steps_ahead = 0
        """Number of further steps for which the cache has room, as long as the same sequences run."""
        self.uses_graphs = uses_graphs
        self.spare_block = self.spare_slot = 0
        """The block and the slot to which the unused rows of a replayed step write."""
        if uses_graphs:
            (self.spare_block,), (self.spare_slot,) = self.cache.blocks.take(1), self.cache.slots.take(1)
        self.steps_by_size = dict[Hashable, ReplayedStep]()
        """The replayed steps, by their sizes."""
        self.addresses: tuple[tuple[int, int], ...] = ()
        """Addresses of the cache's tensors that the replayed steps use."""
        self.current_step: ReplayedStep | None = None
        """The replayed step for the running sequences."""

    def run(self) -> list[Response]:
        """Generate all sequences and return their responses. The host copies the tokens from the device once."""
        try:
            while self.queue or self.going:
                self._admit()
                if self.going:
                    self._step()
                    if any(s.is_over for s in self.going):
                        self._arrange(self.going, self.state)
                if self.progress is not None:
                    self.progress.reached(self._counts)
            self._look(lag=0)
            return self._responses()
        finally:
            self._forget_graphs()  # graphs refer to this object, and would keep the memory of its cache

    def _counts(self) -> tuple[int, int]:
        """Return the numbers of complete responses and of sampled tokens, as far as the host knows them."""
        return len(self.all) - len(self.queue) - len(self.going), sum(s.response_length for s in self.all)

    # ------------------------------------------------------------ steps

    def _step(self) -> None:
        """Run each running sequence's last token and sample its next token."""
        if not self.steps_ahead:
            self._make_room()
        self.steps_ahead -= 1
        draws = self.history[-1]
        self.state, draw = (self.current_step or self._next)(self.state)
        if self.decoder.choices:
            draws.choices.append(self.decoder.choices)
        self._add(self.going, draw, draws)

    def _next(self, state: Int64[Tensor, "4 n"]) -> tuple[Tensor, Draw]:
        """Run each sequence's last token and sample its next token; only tensors on the device are used here.

        The rows of `state`: the last tokens, their positions, the seeds of the random numbers, and the shifts.
        """
        tokens, positions, states, shifts = state.unbind()
        x = self.cache.step(tokens, positions, shifts)
        draw = self._sampled(x, positions + 1, states, self.num_likeliest, self.distributions)
        return torch.stack((draw.tokens, positions + 1, states, shifts)), draw

    def _make_room(self) -> None:
        """Allocate blocks for the next steps, and arrange the cache for these steps.

        No room is needed for the last token of a response, because this token is not an input of the model.
        """
        for s in self.going:
            needed = min(len(s) + LOOK_AHEAD, len(s.prompt) + s.limit - 1)
            s.blocks += self.cache.blocks.take(max(0, blocks_for(needed) - len(s.blocks)))
        self.steps_ahead = min(len(s.blocks) * BLOCK_SIZE - len(s) for s in self.going) + 1
        self.current_step = None
        if self.uses_graphs and len(self.distributions) == 1:
            self._fix_sizes()
        else:
            held, slots, lengths = zip(*((s.blocks, s.slot, len(s)) for s in self.going), strict=True)
            self.cache.arrange(held, slots, lengths)

    def _fix_sizes(self) -> None:
        """Arrange the cache for steps of fixed sizes, and set `current_step` to the `ReplayedStep` of these sizes.

        A step may have more rows than there are running sequences. The additional rows are as long as the shortest
        sequence, and write to a spare block and a spare slot.
        """
        width = coarse_size(max(len(s.blocks) for s in self.going))
        unused = coarse_size(len(self.going)) - len(self.going)
        held, slots = [s.blocks for s in self.going], [s.slot for s in self.going]
        lengths = [coarse_size(blocks_for(len(s) + self.steps_ahead - 1)) * BLOCK_SIZE for s in self.going]
        held += [[self.spare_block] * width] * unused
        self.cache.arrange(held, slots + [self.spare_slot] * unused, lengths + lengths[-1:] * unused, width)
        ranges = tuple((rows.stop, longest) for rows, longest in self.cache.ranges())
        sizes = self.cache.table.shape, ranges, self.num_likeliest, self.distributions[0][0]
        is_full = len(self.steps_by_size) == MAX_GRAPHS and sizes not in self.steps_by_size
        if self.addresses != (addresses := self.cache.addresses()) or is_full:
            self.addresses = addresses
            self._forget_graphs()
            self.graphs = platform.GraphPool()  # a pool that has lost all of its graphs takes no new ones
        if sizes not in self.steps_by_size:
            self.steps_by_size[sizes] = ReplayedStep(self._next, self.cache, self.graphs)
        self.current_step = self.steps_by_size[sizes]
        self.current_step.use_inputs()

    def _forget_graphs(self) -> None:
        self.steps_by_size.clear()
        self.current_step = None

    def _add(self, sequences: Sequence[RunningSequence], draw: Draw, draws: SamplingBatch) -> None:
        """Add to `draws` what `sequences` sampled in a step; then read the data of earlier steps (`_look`)."""
        tokens = draw.tokens
        draws.tokens.append(tokens)
        draws.logprobs.append(draw.logprobs)
        if draw.kept is not None:
            self.kept_tables.append((draws, platform.HostCopy(draw.kept)))
        if draw.likeliest.shape[1]:
            self.likeliest_tables.append((draws, platform.HostCopy(draw.likeliest)))
        for s in sequences:
            s.drawn += 1
        if self.params.stop_token_ids or self.has_stop_strings:
            stopped = (tokens[:, None] == self.stop_token_ids).any(1)
            shown = platform.HostCopy(tokens) if self.has_stop_strings else None
            drawn = [s.drawn for s in sequences]
            self.looks.append(_Look(sequences, drawn, platform.HostCopy(stopped), shown))
        self._look(self.lag)

    def _sampled(
        self,
        x: Float[Tensor, "n hidden"],
        positions: Int64[Tensor, " n"],
        states: Int64[Tensor, " n"],
        num_likeliest: int,
        distributions: Sequence[tuple[SamplingParams, Tensor | None]],
    ) -> Draw:
        """Sample a token for each sequence; the kept tokens are returned only on the last stage.

        Args:
            x: final hidden states of the sequences' last tokens.
            positions: positions of the sampled tokens.
            states: seeds of the sequences' random numbers.
            num_likeliest: number of the likeliest tokens that are returned.
            distributions: see the attribute of this name.
        """
        topology, draw = self.decoder.topology, None
        if topology.is_last_stage:
            draw = _drawn(
                self.decoder.logits(x), uniforms(states, positions), distributions, topology.tensor.group, num_likeliest
            )
            if topology.pipeline.size == 1:
                return draw
        numbers = torch.empty(len(x), 2 + 2 * num_likeliest, dtype=torch.float64, device=x.device)
        if draw is not None:
            numbers[:, 0], numbers[:, 1], numbers[:, 2:] = draw.tokens, draw.logprobs, draw.likeliest.flatten(1)
        torch.distributed.broadcast(numbers, group=topology.pipeline.group, group_src=topology.pipeline.size - 1)
        likeliest = numbers[:, 2:].reshape(len(x), num_likeliest, 2)
        return Draw(numbers[:, 0].long(), numbers[:, 1].float(), draw.kept if draw else None, likeliest)

    def _look(self, lag: int) -> None:
        """Read the results of all steps except the last `lag`, and mark the sequences whose end these results show.

        All ranks of a replica mark the same sequences.
        """
        while len(self.kept_tables) > lag:
            draws, table = self.kept_tables.popleft()
            of_step = KeptTokens.of_table(table.read())
            draws.kept.append(of_step.split([1] * len(of_step)))
        while len(self.likeliest_tables) > lag:
            draws, table = self.likeliest_tables.popleft()
            draws.likeliest.append(table.read())
        while len(self.looks) > lag:
            look = self.looks.popleft()
            stopped = look.stopped.read().tolist()
            tokens = stopped if look.tokens is None else look.tokens.read().tolist()
            for s, drawn, stop, token in zip(look.sequences, look.drawn, stopped, tokens, strict=True):
                strings = s.stop_strings or self.stop_strings
                if s.ended_at is None and (stop or (look.tokens is not None and strings.end(s, token))):
                    s.ended_at = drawn

    # ------------------------------------------------------------ admission and removal of sequences

    def _admit(self) -> None:
        """Start queued sequences as long as the batch has free rows, and sample their first tokens."""
        while self.queue and len(self.going) < self.rows:
            new = self._begin()
            of_each = [len(s.prompt) for s in new], [s.sample_id for s in new], [s.shift for s in new]
            numbers = platform.to_device(of_each)
            states = random_states(self.params.seed, numbers[1])
            first = self._new_draws(new)
            x = torch.stack([s.prompt_state for s in new])
            draw = self._sampled(
                x, numbers[0], states, max(s.num_likeliest for s in new), _distributions_of(new, self.params)
            )
            self._add(new, draw, first)
            state = torch.stack((draw.tokens, numbers[0], states, numbers[2]))
            self._arrange([*self.going, *new], torch.cat((self.state, state), dim=1))

    def _begin(self) -> list[RunningSequence]:
        """Take the next sequences from the queue, put their prompts into the cache, and return the sequences.

        Equal prompts are computed only once.
        """
        new, fresh, others = list[RunningSequence](), list[RunningSequence](), list[tuple[RunningSequence, ...]]()
        # The recurrent state of a running sequence is no longer that of its prompt.
        having, tokens = {} if self.decoder.has_states else {s.identity: s for s in self.going}, 0
        while self.queue and len(self.going) + len(new) < self.rows:
            s = self.queue[0]
            if s.identity in having:
                others.append((having[s.identity], s))
            else:
                tokens += len(s.prompt)
                if fresh and tokens > self.prefill_tokens:
                    break
                fresh.append(s)
                having[s.identity] = s
            new.append(self.queue.popleft())
        if fresh:
            self._prefill(fresh)
        self._share(others)
        return new

    def _prefill(self, fresh: Sequence[RunningSequence]) -> None:
        for s in fresh:
            s.blocks = self.cache.blocks.take(blocks_for(len(s.prompt)))
            (s.slot,) = self.cache.slots.take(1)
        blocks, slots = [s.blocks for s in fresh], [s.slot for s in fresh]
        x, last = self.cache.prefill([s.prompt for s in fresh], blocks, slots, [s.images for s in fresh])
        for s, state in zip(fresh, x[last], strict=True):
            s.prompt_state = state
        if any(s.scores_prompt for s in fresh):
            for s, own in zip(fresh, x.split([len(s.prompt) for s in fresh]), strict=True):
                if s.scores_prompt:
                    s.prompt_scores = self._scores_of_prompt(s, own)
        for name, choices in self.decoder.choices.items():
            for s, own in zip(fresh, choices.split([len(s.prompt) for s in fresh]), strict=True):
                s.prompt_choices[name] = own

    def _scores_of_prompt(self, s: RunningSequence, x: Float[Tensor, "tokens hidden"]) -> PromptScores:
        """Score the prompt of the sequence `s`, whose final hidden states are `x`. Collective over the pipeline."""
        topology, count = self.decoder.topology, min(s.num_likeliest, self.decoder.model.num_ids)
        numbers = torch.zeros(len(s.prompt) - 1, 1 + 2 * count, dtype=torch.float64, device=x.device)
        if topology.is_last_stage and len(numbers):
            logprobs, ids = self.decoder.score(x[:-1].contiguous(), platform.to_device(s.prompt[1:]), count)
            numbers = torch.cat((logprobs.double(), ids.double()), dim=1)
        if topology.pipeline.size > 1:
            torch.distributed.broadcast(numbers, group=topology.pipeline.group, group_src=topology.pipeline.size - 1)
        rows = numbers.cpu().numpy()
        likeliest = [
            list(zip(row[1 + count :].astype(int).tolist(), row[1 : 1 + count].tolist(), strict=True)) for row in rows
        ]
        return PromptScores(rows[:, 0].astype(np.float32), likeliest)

    def _share(self, pairs: Sequence[tuple[RunningSequence, ...]]) -> None:
        """For each pair (source, s), let the sequence `s` use the cached prompt of `source`. The two prompts are equal.

        Full blocks are shared. A partly filled block and the slot are copied, because both sequences write to them.
        """
        copied = list[tuple[int, int]]()
        for source, s in pairs:
            full, rest = divmod(len(s.prompt), BLOCK_SIZE)
            s.blocks = self.cache.blocks.share(source.blocks[:full]) + self.cache.blocks.take(min(rest, 1))
            (s.slot,) = self.cache.slots.take(1)
            s.prompt_state, s.prompt_choices = source.prompt_state, source.prompt_choices
            s.prompt_scores = source.prompt_scores
            if rest:
                copied.append((source.blocks[full], s.blocks[full]))
        if copied:
            self.cache.copy_blocks([source for source, _ in copied], [own for _, own in copied])
        if pairs and self.decoder.has_states:
            self.cache.copy_slots([source.slot for source, _ in pairs], [s.slot for _, s in pairs])

    def _arrange(self, sequences: Sequence[RunningSequence], state: Tensor) -> None:
        """Keep the unfinished `sequences` running, the longest first. Release the cache of those that are finished."""
        for s in sequences:
            if s.is_over:
                self.cache.blocks.give_back(s.blocks)
                self.cache.slots.give_back([s.slot])
        order = [i for i, s in enumerate(sequences) if not s.is_over]
        order.sort(key=lambda i: -len(sequences[i]))
        in_order = order == list(range(len(sequences)))
        self.going, self.state = (
            [sequences[i] for i in order],
            state if in_order else state[:, platform.to_device(order)],
        )
        self.steps_ahead = 0
        self.num_likeliest = max((s.num_likeliest for s in self.going), default=0)
        self.distributions = _distributions_of(self.going, self.params)
        self._new_draws(self.going)

    def _new_draws(self, sequences: Sequence[RunningSequence]) -> SamplingBatch:
        """Create a sampling batch for `sequences` and record in each sequence its column in this batch."""
        draws = SamplingBatch()
        self.history.append(draws)
        for column, s in enumerate(sequences):
            s.places.append((draws, column))
        return draws

    # ------------------------------------------------------------ results

    def _responses(self) -> list[Response]:
        tokens = torch.cat([step for draws in self.history for step in draws.tokens]).cpu().numpy()
        logprobs = torch.cat([step for draws in self.history for step in draws.logprobs]).cpu().numpy()
        columns: dict[SamplingBatch, list[slice]] = {}
        start = 0
        for draws in self.history:
            width = len(draws.tokens[0]) if draws.tokens else 0
            end = start + len(draws.tokens) * width
            columns[draws] = [slice(start + column, end, width) for column in range(width)]
            start = end
        responses = []
        for s in self.all:
            parts = [columns[draws][column] for draws, column in s.places if draws.tokens]
            own_tokens = np.concatenate([tokens[:0], *(tokens[part] for part in parts)])[: s.response_length]
            own_logprobs = np.concatenate([logprobs[:0], *(logprobs[part] for part in parts)])[: s.response_length]
            kept = s.kept_tokens() if self.params.keeps_mask and self.decoder.topology.is_last_stage else None
            responses.append(Response(own_tokens, own_logprobs, s.ended_at is not None, kept_tokens=kept))
        return responses


def _distributions_of(
    sequences: Sequence[RunningSequence], default: SamplingParams
) -> list[tuple[SamplingParams, Tensor | None]]:
    """Return the different sampling parameters of `sequences`, each with the rows that have them; None for all rows."""
    rows = dict[SamplingParams, list[int]]()
    for row, s in enumerate(sequences):
        rows.setdefault(s.params or default, []).append(row)
    if len(rows) <= 1:
        return [(params, None) for params in rows] or [(default, None)]
    return [(params, platform.to_device(own)) for params, own in rows.items()]


def _drawn(
    logits: Float[Tensor, "n columns"],
    uniform: Float64[Tensor, " n"],
    distributions: Sequence[tuple[SamplingParams, Tensor | None]],
    group: ProcessGroup | None,
    num_likeliest: int,
) -> Draw:
    """Sample a token for each row, by the parameters of the row."""
    if len(distributions) == 1:
        params = distributions[0][0]
        return sample(logits, None if params.greedy else uniform, params, group, num_likeliest)
    rows = [own for _, own in distributions if own is not None]
    draws = [
        sample(logits[own], uniform[own], params, group, num_likeliest)
        for (params, _), own in zip(distributions, rows, strict=True)
    ]
    back = torch.cat(rows).argsort()
    parts = ((draw.tokens, draw.logprobs, draw.likeliest) for draw in draws)
    tokens, logprobs, likeliest = (torch.cat(own)[back] for own in zip(*parts, strict=True))
    return Draw(tokens, logprobs, None, likeliest)  # kept tokens belong to one run's parameters
