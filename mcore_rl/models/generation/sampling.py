"""Sampling of the next token from vocabulary shards, without gathering the vocabulary.

Every filter (top-k, top-p, min-p) becomes one threshold per row; the ranks exchange only a few numbers to compute it.
One uniform number per row selects the token: the first at which the cumulative distribution over token ids exceeds
that number. The number depends only on seed, sample and position, so a sample is the same under every parallel layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from mcore_rl.distributed.collectives import all_gather, all_reduce, group_rank, group_size
from mcore_rl.distributed.logprobs import local_targets
from mcore_rl.distributed.topk import vocab_parallel_topk


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters.

    temperature: divides the logits; 0 is greedy.
    top_k: sample only the k most likely tokens; None for all.
    top_p: sample only the smallest set of most likely tokens whose total probability is at least this value.
    min_p: sample only tokens whose probability is at least this fraction of the most likely token's.
    max_new_tokens: maximum length of a response, including its stop token.
    stop_token_ids: tokens that end a response, and are part of it.
    stop_strings: texts that end a response, and are part of it.
    seed: seed of the random numbers.
    max_kept_tokens: if set, the tokens that the filters keep are returned, and at most this many are kept at each
        position. If None, any number is kept, and the kept tokens are not returned.
    unused_ids: ids that vLLM's servers do not sample. In the training processes, `ModelShard.num_ids` excludes them.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    seed: int = 0
    max_kept_tokens: int | None = None
    unused_ids: range = range(0)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def filters(self) -> bool:
        """Whether any filter (top-k, top-p, min-p) is set."""
        return self.top_k is not None or self.top_p < 1 or self.min_p > 0

    @property
    def keeps_mask(self) -> bool:
        """Whether the sampler returns the tokens that the filters keep."""
        return self.max_kept_tokens is not None and self.filters and not self.greedy

    @property
    def logprob_temperature(self) -> float:
        """Temperature at which the returned log-probabilities are computed."""
        return 1.0 if self.greedy else self.temperature


@dataclass(frozen=True)
class Draw:
    """One sampled token for each of n sequences, the same on all ranks of a tensor-parallel group.

    tokens: [n] ids.
    logprobs: [n] fp32, taken in the sampling distribution (after temperature and filters), or in the model's own
        distribution for greedy sampling.
    kept: [n, k] int32, the tokens that the filters kept, padded with −1; None for greedy sampling and without
        `max_kept_tokens`.
    likeliest: [n, m, 2] fp64, the ids and log-probabilities of the m likeliest tokens, the likeliest first; m may be 0.
        Tokens that a filter excludes are replaced by the id −1 and the log-probability −inf.
    """

    tokens: Tensor
    logprobs: Tensor
    kept: Tensor | None
    likeliest: Tensor


def sample(
    logits: Tensor,
    uniform: Tensor | None,
    params: SamplingParams,
    group: ProcessGroup | None,
    num_likeliest: int = 0,
) -> Draw:
    """Sample one token per row; the host does not wait for the device.

    Args:
        logits: [n, Vp] fp32, this rank's columns of the vocabulary; −inf in the vocabulary's padding.
        uniform: [n] float64 in [0, 1); not needed for greedy sampling.
        group: the tensor-parallel group. Its ranks hold the vocabulary's columns in order.
        num_likeliest: number of the likeliest tokens that are returned for each row.
    """
    kept = None
    logprobs = _log_softmax(logits / params.logprob_temperature, group)
    if params.greedy:
        tokens = _argmax(logprobs, group)
    else:
        if params.filters:
            logprobs = _filtered(logprobs, params, group)
            if params.max_kept_tokens is not None:  # the kept tokens are returned
                logprobs, kept = _at_most(logprobs, params.max_kept_tokens, group)
            logprobs = _log_softmax(logprobs, group)
        assert uniform is not None, "sampling needs one uniform number per row"
        tokens = _draw(logprobs, uniform, group)
    local, owned = local_targets(tokens, group_rank(group) * logits.shape[1], logits.shape[1])
    chosen = logprobs.gather(1, local[:, None])[:, 0]
    likeliest = logits.new_empty(len(logits), 0, 2, dtype=torch.float64)
    if num_likeliest:
        values, ids = vocab_parallel_topk(logprobs, min(num_likeliest, logits.shape[1] * group_size(group)), group)
        likeliest = torch.stack((torch.where(values > -torch.inf, ids, -1).double(), values.double()), dim=-1)
    return Draw(tokens, all_reduce(torch.where(owned, chosen, 0.0), group), kept, likeliest)


def random_states(seed: int, samples: Int64[Tensor, " n"]) -> Int64[Tensor, " n"]:
    """Return the seed of each sample's random numbers: a hash of the run's seed and the sample id."""
    return _mix(_signed(seed) + samples * _GOLDEN)


def uniforms(states: Int64[Tensor, " n"], positions: Int64[Tensor, " n"]) -> Float64[Tensor, " n"]:
    """Return a uniform number in [0, 1) for each position: a hash of seed, sample and position, the same on any device.

    The hash is SplitMix64 (doi:10.1145/2714064.2660195). It is defined for uint64 and computed here in int64. Products
    and sums have the same bits in both; right shifts differ, so `_shifted` takes their place.

    Args:
        states: result of `random_states`.
    """
    return _shifted(_mix(states + positions * _GOLDEN), 11).double() * 2.0**-53


def _signed(value: int) -> int:
    """Return the int64 number that has the same 64 lowest bits as `value`."""
    return (value + 2**63) % 2**64 - 2**63


_GOLDEN, _FIRST, _SECOND = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _mix(state: Tensor) -> Tensor:
    state = state + _GOLDEN
    state = (state ^ _shifted(state, 30)) * _FIRST
    state = (state ^ _shifted(state, 27)) * _SECOND
    return state ^ _shifted(state, 31)


def _shifted(state: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros; PyTorch's own right shift of int64 fills with copies of the sign bit."""
    return (state >> bits) & (2 ** (64 - bits) - 1)


def _log_softmax(logits: Tensor, group: ProcessGroup | None) -> Tensor:
    highest = all_reduce(logits.amax(-1), group, ReduceOp.MAX)
    shifted = logits - highest[:, None]
    return shifted - all_reduce(shifted.exp().sum(-1), group).log()[:, None]


def _argmax(logprobs: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return the most likely token of each row; of equally likely tokens, the first."""
    value, index = logprobs.max(-1)
    values, indices = all_gather(value, group), all_gather(index, group)
    owner = values.argmax(0)
    return indices.gather(0, owner[None])[0] + owner * logprobs.shape[1]


def _filtered(logprobs: Tensor, params: SamplingParams, group: ProcessGroup | None) -> Tensor:
    """Return log-probabilities that are −inf for every token that a filter excludes.

    The filters are applied in the same order as in transformers: top-k, top-p, min-p.
    """
    if params.top_k is not None:
        best, _ = vocab_parallel_topk(logprobs, min(params.top_k, logprobs.shape[1] * group_size(group)), group)
        logprobs = _at_least(logprobs, best[:, -1])
    if params.top_p < 1:
        logprobs = _at_least(logprobs, _nucleus_threshold(logprobs, params.top_p, group))
    if params.min_p > 0:
        highest = all_reduce(logprobs.amax(-1), group, ReduceOp.MAX)
        logprobs = _at_least(logprobs, highest + math.log(params.min_p))
    return logprobs


def _at_least(logprobs: Tensor, threshold: Tensor) -> Tensor:
    return logprobs.masked_fill(logprobs < threshold[:, None], -torch.inf)


def _at_most(logprobs: Tensor, most: int, group: ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Keep the `most` most likely tokens of each row; of equally likely tokens, keep the first.

    Returns:
        The log-probabilities, −inf for the other tokens; and the ids of the kept tokens [n, most], padded with −1.
    """
    most = min(most, logprobs.shape[1] * group_size(group))
    lowest = vocab_parallel_topk(logprobs, most, group)[0][:, -1:]
    above, level = logprobs > lowest, (logprobs == lowest) & (lowest > -torch.inf)
    room = most - all_reduce(above.sum(1), group)
    before = all_gather(level.sum(1), group)[: group_rank(group)].sum(0)
    first = level.cumsum(1) + before[:, None] <= room[:, None]
    logprobs = logprobs.masked_fill(~(above | (level & first)), -torch.inf)
    best, ids = vocab_parallel_topk(logprobs, most, group)
    return logprobs, torch.where(best > -torch.inf, ids, -1).int()


MASS = 2.0**62
"""Denominator of probabilities as integers. Sums of integers are the same in any order and layout, on any device."""
DIGIT_BITS = 8


def _nucleus_threshold(
    logprobs: Float[Tensor, "n columns"], top_p: float, group: ProcessGroup | None
) -> Float[Tensor, " n"]:
    """Return the threshold of top-p: the tokens at or above this log-probability have at least `top_p` of the mass.

    The result is the highest such threshold. It is found as an integer of 32 bits (`_ordered_bits`), in four steps of
    eight bits. A step sums the mass of the tokens for each value of its bits, and all-reduces these sums [n, 256]. The
    host does not wait.
    """
    keys, masses = _ordered_bits(logprobs) + 2**31, _masses(logprobs)
    found = above = wanted = torch.zeros_like(keys[:, 0])
    for shift in range(32 - DIGIT_BITS, -1, -DIGIT_BITS):
        digits = (keys >> shift) & (2**DIGIT_BITS - 1)
        candidates = torch.where(keys >> (shift + DIGIT_BITS) == found[:, None], masses, 0)
        histogram = masses.new_zeros(len(keys), 2**DIGIT_BITS).scatter_add_(1, digits, candidates)
        histogram = all_reduce(histogram, group)
        at_least = above[:, None] + histogram.flip(1).cumsum(1).flip(1)  # mass with this digit or a higher one
        if shift == 32 - DIGIT_BITS:
            total = at_least[:, 0]
            wanted = torch.minimum((total.double() * top_p).long(), total)
        digit = ((at_least >= wanted[:, None]).sum(1) - 1).clamp(min=0)[:, None]
        found = (found << DIGIT_BITS) + digit[:, 0]
        above = (at_least - histogram).gather(1, digit)[:, 0]
    return _from_ordered_bits(found - 2**31)


def _ordered_bits(x: Tensor) -> Tensor:
    """Map float32 values to int64 values, so that a larger value has a larger integer."""
    bits = x.contiguous().view(torch.int32).long()
    return torch.where(bits >= 0, bits, -(2**31) - bits)


def _from_ordered_bits(keys: Tensor) -> Tensor:
    bits = torch.where(keys >= 0, keys, -(2**31) - keys)
    return bits.int().view(torch.float32)


def _draw(logprobs: Tensor, uniform: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return, for each row, the first token at which the cumulative distribution over token ids exceeds `uniform`."""
    cumulative = _masses(logprobs).cumsum(-1)
    masses = all_gather(cumulative[:, -1].contiguous(), group)  # [TP, n]
    ends = masses.cumsum(0)
    target = torch.minimum((uniform.double() * ends[-1]).long(), ends[-1] - 1)
    owner = (ends <= target).sum(0)
    rank = group_rank(group)
    before = ends[rank] - masses[rank]
    index = torch.searchsorted(cumulative, (target - before)[:, None], right=True)[:, 0]
    index = index.clamp(max=logprobs.shape[1] - 1)  # NaN must not select a token outside the vocabulary
    return all_reduce(torch.where(owner == rank, index + rank * logprobs.shape[1], 0), group)


def _masses(logprobs: Tensor) -> Tensor:
    """Return the probabilities as int64 numbers, whole multiples of 1/MASS."""
    return (logprobs.double().exp() * MASS).long()
