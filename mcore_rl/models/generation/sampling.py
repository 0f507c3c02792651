"""The next token from vocabulary shards: the vocabulary is never gathered.

Every filter (top-k, top-p, min-p) is one threshold per row, found with a few numbers a rank. A token is
drawn by its place in the cumulative distribution over token ids, from one uniform number per row that is a
function of seed, sample and position alone; so a sample is the same under every layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from mcore_rl.distributed.collectives import all_gather, all_reduce, group_rank
from mcore_rl.distributed.logprobs import local_targets, vocab_parallel_topk


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn.

    temperature: divides the logits; 0 is greedy.
    top_k: the k likeliest tokens; None for all.
    top_p: the fewest likeliest tokens whose probabilities make up this much.
    min_p: tokens at least this likely relative to the likeliest.
    max_new_tokens: length of a response at most, its stop token included.
    stop_token_ids: tokens that end a response, and are part of it.
    stop_strings: texts that end a response, and are part of it.
    seed: of the random numbers.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    seed: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def filters(self) -> bool:
        """Whether some tokens are never drawn."""
        return self.top_k is not None or self.top_p < 1 or self.min_p > 0

    @property
    def logprob_temperature(self) -> float:
        """The temperature under which log-probabilities are given."""
        return 1.0 if self.greedy else self.temperature


def sample(
    logits: Tensor, uniform: Tensor | None, params: SamplingParams, group: ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Draw one token a row. The host waits for nothing.

    Args:
        logits: [n, Vp] fp32, this rank's columns; −inf in the vocabulary's padding.
        uniform: [n] float64 in [0, 1); not needed where the choice is greedy.
        group: the tensor-parallel group, whose ranks hold the vocabulary's columns in their order.

    Returns:
        token ids [n] and their log-probabilities [n] fp32 in the distribution that they are drawn from (temperature
        and filters; the likeliest token's in the model's own), the same on all ranks.
    """
    logprobs = _log_softmax(logits / params.logprob_temperature, group)
    if params.greedy:
        tokens = _argmax(logprobs, group)
    else:
        if params.filters:
            logprobs = _log_softmax(_filtered(logprobs, params, group), group)
        assert uniform is not None, "drawing takes a uniform number a row"
        tokens = _draw(logprobs, uniform, group)
    local, owned = local_targets(tokens, group_rank(group) * logits.shape[1], logits.shape[1])
    chosen = logprobs.gather(1, local[:, None])[:, 0]
    return tokens, all_reduce(torch.where(owned, chosen, 0.0), group)


def random_states(seed: int, samples: Int64[Tensor, " n"]) -> Int64[Tensor, " n"]:
    """Return the seed of each sample's random numbers: a hash of seed and sample."""
    return _mix(_signed(seed) + samples * _GOLDEN)


def uniforms(states: Int64[Tensor, " n"], positions: Int64[Tensor, " n"]) -> Float64[Tensor, " n"]:
    """In [0, 1): a hash of (seed, sample, position), by SplitMix64 (doi:10.1145/2714064.2660195), on any device.

    Products and sums of int64 wrap as those of the algorithm's uint64 do; what differs is shifts to the right.

    Args:
        states: of `random_states`.
    """
    return _shifted(_mix(states + positions * _GOLDEN), 11).double() * 2.0**-53


def _signed(value: int) -> int:
    """The int64 with the bits of `value` modulo 2^64."""
    return (value + 2**63) % 2**64 - 2**63


_GOLDEN, _FIRST, _SECOND = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _mix(state: Tensor) -> Tensor:
    state = state + _GOLDEN
    state = (state ^ _shifted(state, 30)) * _FIRST
    state = (state ^ _shifted(state, 27)) * _SECOND
    return state ^ _shifted(state, 31)


def _shifted(state: Tensor, bits: int) -> Tensor:
    """To the right, zeros coming in: torch's own shift of int64 repeats the sign."""
    return (state >> bits) & (2 ** (64 - bits) - 1)


def _log_softmax(logits: Tensor, group: ProcessGroup | None) -> Tensor:
    highest = all_reduce(logits.amax(-1), group, ReduceOp.MAX)
    shifted = logits - highest[:, None]
    return shifted - all_reduce(shifted.exp().sum(-1), group).log()[:, None]


def _argmax(logprobs: Tensor, group: ProcessGroup | None) -> Tensor:
    """The likeliest token; of equally likely ones the first."""
    value, index = logprobs.max(-1)
    values, indices = all_gather(value, group), all_gather(index, group)
    owner = values.argmax(0)
    return indices.gather(0, owner[None])[0] + owner * logprobs.shape[1]


def _filtered(logprobs: Tensor, params: SamplingParams, group: ProcessGroup | None) -> Tensor:
    """−inf for what the filters leave out, in the order in which transformers applies them."""
    if params.top_k is not None:
        best, _ = vocab_parallel_topk(logprobs, params.top_k, group)
        logprobs = _at_least(logprobs, best[:, -1])
    if params.top_p < 1:
        logprobs = _at_least(logprobs, _nucleus_threshold(logprobs, params.top_p, group))
    if params.min_p > 0:
        highest = all_reduce(logprobs.amax(-1), group, ReduceOp.MAX)
        logprobs = _at_least(logprobs, highest + math.log(params.min_p))
    return logprobs


def _at_least(logprobs: Tensor, threshold: Tensor) -> Tensor:
    return logprobs.masked_fill(logprobs < threshold[:, None], -torch.inf)


MASS = 2.0**62
"""Probabilities are added up as whole numbers of 1/MASS: the same sum in any order, so on any layout and device."""
DIGIT_BITS = 8


def _nucleus_threshold(
    logprobs: Float[Tensor, "n columns"], top_p: float, group: ProcessGroup | None
) -> Float[Tensor, " n"]:
    """The highest log-probability such that tokens at least as likely make up `top_p` of the mass.

    Exact, without a sort: the threshold's bits, in an order in which float32 values order as integers do, are found
    eight at a time, from the mass that the tokens with each value of these bits have. Four all-reduces of [n, 256];
    the host waits for nothing.
    """
    keys, masses = _ordered_bits(logprobs) + 2**31, (logprobs.double().exp() * MASS).long()
    found = above = wanted = torch.zeros_like(keys[:, 0])
    for shift in range(32 - DIGIT_BITS, -1, -DIGIT_BITS):
        digits = (keys >> shift) & (2**DIGIT_BITS - 1)
        candidates = torch.where(keys >> (shift + DIGIT_BITS) == found[:, None], masses, 0)
        histogram = masses.new_zeros(len(keys), 2**DIGIT_BITS).scatter_add_(1, digits, candidates)
        histogram = all_reduce(histogram, group)
        at_least = above[:, None] + histogram.flip(1).cumsum(1).flip(1)  # with this digit, or a higher one
        if shift == 32 - DIGIT_BITS:
            total = at_least[:, 0]
            wanted = torch.minimum((total.double() * top_p).long(), total)
        digit = ((at_least >= wanted[:, None]).sum(1) - 1).clamp(min=0)[:, None]
        found = (found << DIGIT_BITS) + digit[:, 0]
        above = (at_least - histogram).gather(1, digit)[:, 0]
    return _from_ordered_bits(found - 2**31)


def _ordered_bits(x: Tensor) -> Tensor:
    """int64 that order as the float32 values do."""
    bits = x.contiguous().view(torch.int32).long()
    return torch.where(bits >= 0, bits, -(2**31) - bits)


def _from_ordered_bits(keys: Tensor) -> Tensor:
    bits = torch.where(keys >= 0, keys, -(2**31) - keys)
    return bits.int().view(torch.float32)


def _draw(logprobs: Tensor, uniform: Tensor, group: ProcessGroup | None) -> Tensor:
    """The token at which the cumulative distribution, over token ids, passes `uniform` of its mass."""
    cumulative = logprobs.double().exp().cumsum(-1)
    masses = all_gather(cumulative[:, -1].contiguous(), group)  # [TP, n]
    ends = masses.cumsum(0)
    target = uniform.to(ends) * ends[-1]
    owner = (ends <= target).sum(0)
    rank = group_rank(group)
    before = ends[rank] - masses[rank]
    index = torch.searchsorted(cumulative, (target - before)[:, None], right=True)[:, 0]
    last = (logprobs > -torch.inf).long().cumsum(-1).argmax(-1)  # rounding must not lead past the last token
    tokens = torch.minimum(index, last) + rank * logprobs.shape[1]
    return all_reduce(torch.where(owner == rank, tokens, 0), group)
