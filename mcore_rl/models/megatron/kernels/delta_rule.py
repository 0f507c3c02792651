"""The gated delta rule (arXiv:2412.06464), also with a decay for each channel, and its convolution over packs.

Each value head has a state S [key dim, value dim]. S is 0 at the start of each sequence. Token t with query q, key k,
value v, decay g ≤ 0 and rate β first changes S, then reads it:

    S ← exp(g) · S,    S ← S + β · k (v − Sᵀ k)ᵀ,    output = Sᵀ q

In Kimi delta attention (arXiv:2510.26692), g is a vector, and row d of S decays by exp(g_d).

`delta_rule` computes chunks of 64 tokens by matrix products. Only the states between the chunks of a sequence are
computed one after the other. `delta_step` computes one token of each sequence. Several value heads share a key head.

Both functions are written in PyTorch. On GPUs `packed_rule` and `packed_convolution` call kernels of `fla` (0.6 or
newer) and `causal_conv1d` instead, in training and scoring. The kernels are not called if the run is deterministic or
the pack has shared prefixes. The kernels are untested: the tests call stand-ins with the same signatures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from mcore_rl import platform
from mcore_rl.distributed.packs import PackLayout, PrefixLayout

CHUNK = 64
"""Number of tokens in a chunk."""
EPSILON = 1e-6
"""Value that is added to the squared norms of queries and keys."""


@dataclass(frozen=True)
class Step:
    """Chunks that are computed together. Except in the first step, each of them continues a chunk of the previous step.

    count: number of chunks.
    sources: for each chunk, the index of the chunk that it continues. None in the first step. Also None if each chunk i
        continues chunk i, and the two steps have equally many chunks.
    ends: indices of those chunks that are the last of their segment.
    """

    count: int
    sources: Tensor | None
    ends: Tensor


@dataclass(frozen=True)
class ChunkPlan:
    """How a pack is divided into chunks of CHUNK rows each, and in which steps the chunks are computed.

    steps: the steps, one after the other. The chunks are numbered in this order, and so are their rows.
    tokens: [chunks · CHUNK], position in the pack of each row's token; 0 for rows without a token.
    is_token: [chunks · CHUNK], whether a row has a token; rows after the end of a segment have none.
    rows: [T], the row of each position in the pack; 0 for padding.
    is_used: [T], whether the position has a row; padding has none.
    before: [width − 1, T], for each position, the positions of the previous width − 1 tokens of its sequence, the
        nearest first; −1 where there is none.
    last: [segments], position of the last token of each segment that has tokens.
    order: [segments], for each segment of the pack, the index of its final state. The steps compute the final states in
        the order in which the segments end.
    """

    steps: tuple[Step, ...]
    tokens: Tensor
    is_token: Tensor
    rows: Tensor
    is_used: Tensor
    before: Tensor
    last: Tensor
    order: Tensor

    def chunked(self, x: Float[Tensor, "tokens heads *rest"]) -> Float[Tensor, "chunks heads rows *rest"]:
        """Divide the tokens [T, heads, …] into chunks [chunks, heads, CHUNK, …].

        The padding of a chunk has the values of position 0.
        """
        return x.index_select(0, self.tokens).unflatten(0, (-1, CHUNK)).transpose(1, 2)

    def packed(self, x: Float[Tensor, "chunks heads rows *rest"]) -> Float[Tensor, "tokens heads *rest"]:
        """Convert chunks [chunks, heads, CHUNK, …] back to tokens [T, heads, …]; padding is 0."""
        rows = x.transpose(1, 2).flatten(0, 1).index_select(0, self.rows)
        return rows * _trailing(self.is_used.to(x.dtype), rows)


def _trailing(mask: Tensor, like: Tensor) -> Tensor:
    """Add dimensions of size 1 to `mask` [n], so that it multiplies the rows of `like` [n, …]."""
    return mask.view(-1, *(1,) * (like.ndim - 1))


@lru_cache(maxsize=16)
def plan_of(layout: PackLayout, width: int, device: torch.device) -> ChunkPlan:
    """Return the chunk plan of a pack, for a convolution over `width` tokens. All layers use the same plan."""
    parents = layout.tree.parents if isinstance(layout, PrefixLayout) else (-1,) * len(layout.lengths)
    starts = layout.cu_seqlens_padded.tolist()
    chunks, steps = _schedule(layout.lengths, parents)
    tokens = torch.cat([starts[s] + number * CHUNK + torch.arange(CHUNK) for s, number in chunks])
    left = torch.tensor([layout.lengths[s] - number * CHUNK for s, number in chunks])
    is_token = (torch.arange(CHUNK) < left[:, None]).flatten()
    rows, is_used = torch.zeros(layout.total, dtype=torch.long), torch.zeros(layout.total, dtype=torch.bool)
    rows[tokens[is_token]], is_used[tokens[is_token]] = is_token.nonzero().flatten(), True
    before = [layout.predictor]
    for _ in range(width - 2):
        before.append(torch.where(before[-1] >= 0, layout.predictor[before[-1]], -1))
    held = [s for s, length in enumerate(layout.lengths) if length]
    last = torch.tensor([starts[s] + layout.lengths[s] - 1 for s in held])
    ended = torch.tensor([s for s, number in chunks if (number + 1) * CHUNK >= layout.lengths[s]])
    order = ended.argsort()
    of_pack = torch.where(is_token, tokens, 0), is_token, rows, is_used, torch.stack(before[: width - 1]), last, order
    of_steps = [index for step in steps for index in (step.sources, step.ends) if index is not None]
    sent = iter(platform.sent_together((*of_pack, *of_steps), device))
    there = [next(sent) for _ in of_pack]
    moved = [Step(step.count, None if step.sources is None else next(sent), next(sent)) for step in steps]
    return ChunkPlan(tuple(moved), *there)


def _schedule(lengths: Sequence[int], parents: Sequence[int]) -> tuple[list[tuple[int, int]], list[Step]]:
    """Assign the chunks of all segments to steps.

    Args:
        lengths: number of tokens of each segment.
        parents: for each segment, the index of the earlier segment that it continues; −1 for none.

    Returns:
        The chunks in the order of the steps, each as (segment, the chunk's number in this segment); and the steps.
    """
    counts = [-(-length // CHUNK) for length in lengths]
    by_step: list[list[tuple[int, int]]] = []
    earlier: list[tuple[int, tuple[int, int] | None]] = []  # of each segment: its first step, the chunk it continues
    for segment, parent in enumerate(parents):
        first = earlier[parent][0] + counts[parent] if parent >= 0 else 0
        earlier.append((first, (parent, counts[parent] - 1) if parent >= 0 else None))
        by_step += [[] for _ in range(first + counts[segment] - len(by_step))]
        for number in range(counts[segment]):
            by_step[first + number].append((segment, number))
    steps = []
    for index, chunks in enumerate(by_step):
        continued = [(s, number - 1) if number else earlier[s][1] for s, number in chunks]
        before = by_step[index - 1] if index else []
        place = {chunk: number for number, chunk in enumerate(before)}
        in_order = continued == before or not index
        sources = None if in_order else torch.tensor([place[chunk] for chunk in continued if chunk])
        ends = torch.tensor([i for i, (s, number) in enumerate(chunks) if number == counts[s] - 1], dtype=torch.long)
        steps.append(Step(len(chunks), sources, ends))
    return [chunk for chunks in by_step for chunk in chunks], steps


def exact(dtype: torch.dtype) -> torch.dtype:
    """Return the precision in which convolution and delta rule compute: `dtype`, or fp32 if `dtype` is narrower."""
    return torch.promote_types(dtype, torch.float32)


def causal_conv(
    x: Float[Tensor, "tokens heads channels"],
    weight: Float[Tensor, "heads channels width"],
    before: Tensor,
    bias: Float[Tensor, "heads channels"] | None = None,
) -> Float[Tensor, "tokens heads channels"]:
    """Return silu of the causal convolution of each channel, plus its bias if there is one.

    Args:
        weight: weights of each channel. The last column multiplies the token itself, the column before it the previous
            token, and so on.
        before: positions of the previous tokens; see `ChunkPlan`.
    """
    wide, weight = x.to(exact(x.dtype)), weight.to(exact(x.dtype))
    out = wide * weight[..., -1] + (0.0 if bias is None else bias.to(wide.dtype))
    for back, positions in enumerate(before, start=2):
        earlier = wide.index_select(0, positions.clamp(min=0)) * _trailing((positions >= 0).to(wide.dtype), wide)
        out = out + earlier * weight[..., -back]
    return F.silu(out).to(x.dtype)


def convolve_last(
    seen: Float[Tensor, "n width heads channels"],
    weight: Float[Tensor, "heads channels width"],
    bias: Float[Tensor, "heads channels"] | None = None,
) -> Float[Tensor, "n heads channels"]:
    """Return the result of `causal_conv` for one token of each sequence.

    Args:
        seen: for each sequence, the last `width` tokens. The last of them is the token to compute.
    """
    wide = exact(seen.dtype)
    out = (seen.to(wide) * weight.to(wide).movedim(-1, 0)).sum(1)
    return F.silu(out if bias is None else out + bias.to(wide)).to(seen.dtype)


def l2_normalized(x: Tensor) -> Tensor:
    """Return `x` with the vectors in the last dimension scaled to norm 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON)


def delta_rule(
    query: Float[Tensor, "tokens heads key_dim"],
    key: Float[Tensor, "tokens heads key_dim"],
    value: Float[Tensor, "tokens heads repeats value_dim"],
    decay: Float[Tensor, "tokens heads repeats *key_dim"],
    rate: Float[Tensor, "tokens heads repeats"],
    plan: ChunkPlan,
    with_states: bool = False,
) -> tuple[Float[Tensor, "tokens heads repeats value_dim"], Tensor | None]:
    """Apply the delta rule to the tokens of a pack.

    Args:
        query, key: queries and keys of the key heads; they are normalized here. Each key head has `repeats` value
            heads.
        decay, rate: g and β of the value heads. With 4 dimensions, `decay` has a value for each channel of the key.
        with_states: whether to return the states.

    Returns:
        The outputs, and the state after each segment, [segments, heads, repeats, key_dim, value_dim], or None without
        `with_states`.
    """
    dtype, wide = value.dtype, exact(value.dtype)
    q, k = (l2_normalized(plan.chunked(x).to(wide)) for x in (query, key))
    q = q * q.shape[-1] ** -0.5
    v = plan.chunked(value).transpose(2, 3).to(wide)  # [chunks, heads, repeats, CHUNK, value_dim]
    is_token = plan.is_token.view(-1, 1, CHUNK, 1)
    b = (plan.chunked(rate).to(wide) * is_token).transpose(2, 3)
    g = plan.chunked(decay).to(wide)
    g = (g * (is_token if g.ndim == 4 else is_token[..., None])).transpose(2, 3)
    in_chunk = (_decayed_by_head if g.ndim == 4 else _decayed_by_channel)(q, k, g)
    system, inside, decayed = in_chunk.keys * b[..., None], in_chunk.queries, in_chunk.from_start
    right = torch.cat((v * b[..., None], k[:, :, None] * (decayed * b[..., None])), dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    new, reads = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    k = k[:, :, None] * in_chunk.to_end
    corrected, states, ended = _scan(new, reads, k, decayed[..., -1:, :].mT, plan.steps, with_states)
    out = inside @ corrected
    if states is not None:
        first = plan.steps[0].count
        out = torch.cat((out[:first], out[first:] + (q[first:, :, None] * decayed[first:]) @ states))
    packed = plan.packed(out.transpose(2, 3)).to(dtype)
    return packed, None if ended is None else ended[plan.order]


class _InChunk(NamedTuple):
    """Products and decays inside the chunks, [chunks, heads, repeats, CHUNK, …].

    keys, queries: [… CHUNK], products of each token's key (or query) with the key of each token up to it, times the
        decay between the two tokens; 0 for later tokens.
    from_start, to_end: [… 1 or key_dim], decay from the start of the chunk to the token, inclusive; and from the token,
        exclusive, to the end of the chunk.
    """

    keys: Tensor
    queries: Tensor
    from_start: Tensor
    to_end: Tensor


def _decayed_by_head(q: Tensor, k: Tensor, g: Tensor) -> _InChunk:
    """Return products and decays for g [chunks, heads, repeats, CHUNK]."""
    g = g.cumsum(-1)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g.device).triu(1)
    between = (g[..., :, None] - g[..., None, :]).masked_fill(later, -torch.inf).exp()
    keys, queries = ((x @ k.mT)[:, :, None] * between for x in (k, q))
    return _InChunk(keys, queries, g.exp()[..., None], (g[..., -1:] - g).exp()[..., None])


def _decayed_by_channel(q: Tensor, k: Tensor, g: Tensor) -> _InChunk:
    """Return products and decays for g [chunks, heads, repeats, CHUNK, key_dim].

    All sums of decays begin at the tokens between which they are. Differences of longer sums would lose digits: with
    decays of up to 60 for a token, gradients of g would differ from those in float64 by 2e-5, not 2e-7.
    """
    keys, queries = (decayed_products(x[:, :, None], k[:, :, None], g) for x in (k, q))
    return _InChunk(keys, queries, g.cumsum(-2).exp(), sums_of_later_rows(g).exp())


def decayed_products(
    x: Float[Tensor, "*chunks rows channels"],
    key: Float[Tensor, "*chunks rows channels"],
    decay: Float[Tensor, "*chunks rows channels"],
) -> Float[Tensor, "*chunks rows rows"]:
    """Return Σ_d x[i, d] · key[j, d] · exp(Σ_{j < m ≤ i} decay[m, d]) for j ≤ i, and 0 for j > i.

    The decay cannot be divided into a factor of i and a factor of j, because exp of a sum of −decay overflows. But for
    a row m with j ≤ m < i it is a product of the decays from j to m and from m to i, both at most 1. The number of
    rows is a power of two. Blocks on the diagonal are doubled until one is left: in a block of twice the size, the
    lower left quarter is a single matrix product, with m at the end of its upper half.
    """
    x, key = torch.broadcast_tensors(x, key)
    blocks, size = (x * key).sum(-1)[..., None, None].expand(*decay.shape[:-1], 1, 1), 1
    while size < decay.shape[-2]:
        (_, below), (above, _), (of_above, of_below) = (
            rows.unflatten(-2, (-1, 2, size)).unbind(-3) for rows in (x, key, decay)
        )
        quarter = (below * of_below.cumsum(-2).exp()) @ (above * sums_of_later_rows(of_above).exp()).mT
        first, second = blocks.unflatten(-3, (-1, 2)).unbind(-3)
        upper = torch.cat((first, torch.zeros_like(first)), dim=-1)
        blocks, size = torch.cat((upper, torch.cat((quarter, second), dim=-1)), dim=-2), 2 * size
    return blocks.squeeze(-3)


def sums_of_later_rows(x: Float[Tensor, "*any rows channels"]) -> Float[Tensor, "*any rows channels"]:
    """Return for each row the sum of the rows after it."""
    return F.pad(x[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2)


def _scan(
    new: Tensor, reads: Tensor, key: Tensor, whole: Tensor, steps: Sequence[Step], with_states: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute the states between the chunks, step by step.

    If S is the state before a chunk, the state after it is whole · S + keyᵀ (new − reads · S).

    Args:
        new: [chunks, …, CHUNK, value_dim], values that the chunk's tokens would write if S were 0.
        reads: [chunks, …, CHUNK, key_dim], vectors by which the tokens read S; reads · S is subtracted from `new`.
        key: [chunks, …, CHUNK, key_dim], keys by which the values are written.
        whole: [chunks, …, 1 or key_dim, 1], decay of the state over the whole chunk.

    Returns:
        Three values. First, new − reads · S of all chunks. Second, the state S before each chunk, except the chunks of
        the first step; None if there is only one step. Third, with `with_states`, the states after the segments, in the
        order in which the segments end; otherwise None.
    """
    parts = [x.split([step.count for step in steps]) for x in (new, reads, key, whole)]
    corrected, before, ended = [parts[0][0]], list[Tensor](), list[Tensor]()
    state = None
    for number, step in enumerate(steps):
        values, read, keys, factor = (part[number] for part in parts)
        if state is not None:
            state = state if step.sources is None else state.index_select(0, step.sources)
            before.append(state)
            corrected.append(values - read @ state)
        if with_states or number + 1 < len(steps):
            added = keys.mT @ corrected[-1]
            state = added if state is None else state * factor + added
        if with_states and state is not None:
            ended.append(state.index_select(0, step.ends))
    return torch.cat(corrected), torch.cat(before) if before else None, torch.cat(ended) if with_states else None


def delta_step(
    query: Float[Tensor, "n heads key_dim"],
    key: Float[Tensor, "n heads key_dim"],
    value: Float[Tensor, "n heads repeats value_dim"],
    decay: Float[Tensor, "n heads repeats *key_dim"],
    rate: Float[Tensor, "n heads repeats"],
    state: Float[Tensor, "n heads repeats key_dim value_dim"],
) -> tuple[Float[Tensor, "n heads repeats value_dim"], Float[Tensor, "n heads repeats key_dim value_dim"]]:
    """Apply the delta rule to one token of each of n sequences; return the outputs and the new states."""
    wide = state.dtype
    q, k = (l2_normalized(x.to(wide))[:, :, None, None] for x in (query, key))  # [n, heads, 1, 1, key_dim]
    factor = decay.to(wide).exp()[..., None]
    state = state * (factor[..., None] if decay.ndim == 3 else factor)
    delta = (value.to(wide)[..., None, :] - k @ state) * rate.to(wide)[..., None, None]
    state = state + k.mT * delta
    out = (q * q.shape[-1] ** -0.5) @ state
    return out.squeeze(-2).to(value.dtype), state


def rule_kernel() -> Callable[..., Any] | None:
    """Return the delta rule's function in the package `fla`; None without a GPU or if the package is not installed."""
    return _kernel("fla.ops.gated_delta_rule", "chunk_gated_delta_rule")


def channel_rule_kernel() -> Callable[..., Any] | None:
    """Return what `rule_kernel` returns, for a rule with a decay for each channel."""
    return _kernel("fla.ops.kda", "chunk_kda")


def convolution_kernel() -> Callable[..., Any] | None:
    """Return the function of the package `causal_conv1d`; None without a GPU or if the package is not installed."""
    return _kernel("causal_conv1d", "causal_conv1d_fn")


@cache
def _kernel(module: str, name: str) -> Callable[..., Any] | None:
    try:
        kernel: Callable[..., Any] = getattr(import_module(module), name)
    except ImportError:
        return None
    return kernel if platform.has_gpu() else None


def describe_kernels() -> str:
    """Describe in a few words which packages compute gated delta nets."""
    if torch.are_deterministic_algorithms_enabled():
        return "delta nets by torch"
    rule = "fla" if rule_kernel() else "torch"
    convolution = "causal_conv1d" if convolution_kernel() else "torch"
    return f"delta rule by {rule}, its convolution by {convolution}"


@lru_cache(maxsize=16)
def _segments(layout: PackLayout, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a pack's segments in the form that the kernels need. Segments without tokens are left out.

    Returns:
        Cumulative lengths of the padded segments, [segments + 1], and the segment of each position in the pack, [1, T].
    """
    lengths = torch.tensor([length for length in layout.segment_lengths if length])
    ends = torch.cat((torch.zeros(1, dtype=torch.long), lengths.cumsum(0)))
    segment = torch.repeat_interleave(torch.arange(len(lengths)), lengths)[None].int()
    ends, segment = platform.sent_together((ends, segment), device)
    return ends, segment


def _fits(layout: PackLayout) -> bool:
    return not (isinstance(layout, PrefixLayout) or torch.are_deterministic_algorithms_enabled())


def packed_convolution(
    x: Tensor, weight: Tensor, layout: PackLayout, plan: ChunkPlan, bias: Tensor | None = None
) -> Tensor:
    """Compute `causal_conv` over a pack, by the kernel if it can be used; return [T, heads, channels]."""
    kernel = convolution_kernel() if _fits(layout) else None
    if kernel is None:
        return causal_conv(x, weight, plan.before, bias)
    _, segment = _segments(layout, x.device)
    # The kernel takes sequence indices only if the channels of a token are next to each other.
    rows = x.flatten(1).T[None]
    options = {} if bias is None else {"bias": bias.flatten()}
    out: Tensor = kernel(rows, weight.flatten(0, 1), seq_idx=segment, activation="silu", **options)
    return out[0].T.unflatten(1, x.shape[1:])


def packed_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, layout: PackLayout, plan: ChunkPlan
) -> Tensor:
    """Compute `delta_rule` over a pack, by the kernel if it can be used; return only the outputs."""
    kernel = (rule_kernel() if decay.ndim == 3 else channel_rule_kernel()) if _fits(layout) else None
    if kernel is None:
        return delta_rule(query, key, value, decay, rate, plan)[0]
    ends, _ = _segments(layout, value.device)
    of_heads = (x.flatten(1, 2)[None] for x in (value, decay, rate))
    values, decays, rates = of_heads
    out, _ = kernel(
        query[None], key[None], values, decays.float(), rates, use_qk_l2norm_in_kernel=True, cu_seqlens=ends
    )
    whole: Tensor = out[0].unflatten(1, value.shape[1:3])
    return whole
