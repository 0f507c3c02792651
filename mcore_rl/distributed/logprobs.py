"""Log-probabilities, entropy and top-k over a sharded vocabulary, from logits or from hidden states and LM head.

Everything is computed in fp32 (fp64 for fp64 inputs). Logits are reduced in chunks of a few tokens, and the results are
combined over the group. From hidden states, the product hidden × weightᵀ is computed in tiles of tokens × vocabulary.
Each tile is reduced to a few numbers per token, and computed again in the backward pass; logits are never stored.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_rl import platform
from mcore_rl.distributed.collectives import (
    all_gather,
    all_gather_forward_reduce_scatter_backward,
    copy_forward_all_reduce_backward,
    group_rank,
    group_size,
)
from mcore_rl.distributed.packs import PackLayout, gather_context_parallel, slice_context_parallel
from mcore_rl.errors import ContractError

# In nats. exp() of smaller values is 0 in fp32 and fp64.
LOWEST_LOGPROB = -1e4


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return fp64 for fp64, and fp32 for all other types."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def finite_peak(x: Float[Tensor, "tokens columns"]) -> Float[Tensor, " tokens"]:
    """Return each row's largest logit, which is subtracted before exp; 0 if all logits are −inf (a masked shard)."""
    peak = x.amax(dim=1)
    return torch.where(peak == -torch.inf, 0, peak)


def slices(total: int, step: int) -> Iterator[slice]:
    """Yield consecutive slices of length `step` that cover 0 … `total` − 1; the last one may be shorter."""
    return (slice(start, min(start + step, total)) for start in range(0, total, step))


# Size of the working chunk: a CPU's cache, or enough of a GPU's memory to keep it busy.
CHUNK_BYTES = {"cpu": 4 * 2**20, "cuda": 256 * 2**20}


def valid_columns(shard_size: int, rank: int, vocab_size: int | None) -> int:
    """Return the number of columns of `rank`'s shard that are real tokens; the vocabulary is padded at its end."""
    return shard_size if vocab_size is None else max(0, min(shard_size, vocab_size - rank * shard_size))


def combine_over_vocabulary(
    lse: Float[Tensor, " tokens"],
    sums: Float[Tensor, "k tokens"],
    entropy: Float[Tensor, " tokens"],
    group: ProcessGroup | None,
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, "k tokens"], Float[Tensor, " tokens"]]:
    """Combine the statistics of all vocabulary shards into those of the whole vocabulary, with one all-gather.

    If a shard has the probability w and the entropy H, the entropy of the whole is Σ w·(H − log w). No term is
    negative, so no digits cancel.

    Args:
        lse: log Σ exp x over the shard, [T].
        sums: quantities to sum over the shards, [K, T].
        entropy: H of the softmax over the shard, [T]; 0 for a shard that is all −inf.
    """
    if group_size(group) == 1:
        return lse, sums, entropy
    stats = all_gather(torch.cat((lse[None], entropy[None], sums)), group)
    shard_lse, shard_entropy = stats[:, 0], stats[:, 1]
    lse = torch.logsumexp(shard_lse, dim=0)
    log_share = shard_lse - lse
    # A share of 0 adds 0, and must not be multiplied with its infinite logarithm.
    entropy = (log_share.exp() * (shard_entropy - log_share.clamp(min=LOWEST_LOGPROB))).sum(0)
    return lse, stats[:, 2:].sum(0), entropy


def entropy_of_sums(total: Float[Tensor, " tokens"], moment: Float[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
    """Return the entropy of the softmax of logits x: log Σ z − (Σ z·log z) / Σ z with z = exp(x − peak); 0 if Σ z is 0.

    log Σ exp x − E[x] is the same number in exact arithmetic. But its rounding errors would grow with the size of the
    logits, not only with the size of the entropy.

    Args:
        total: Σ z.
        moment: Σ z·log z.
    """
    return torch.where(total == 0, 0, total.log() - moment / total)


class _LogprobsFromLogits(torch.autograd.Function):
    """Autograd function (logits [T, Vp], targets [T, K]) → (logprobs [T, K], entropy [T]; 0 unless with_entropy)."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        group: ProcessGroup | None,
        rank: int,
        columns: int,
        temperature: float,
        with_entropy: bool,
        chunk: int,
        normalize: bool,
    ) -> tuple[Tensor, Tensor]:
        count, dtype = logits.shape[0], accumulation_dtype(logits.dtype)
        local, owned = local_targets(targets, rank * logits.shape[1], columns)
        lse = torch.full((count,), -torch.inf, dtype=dtype, device=logits.device)
        entropy, chosen = torch.zeros_like(lse), torch.zeros_like(targets, dtype=dtype)
        scratch = torch.empty(min(chunk, count), columns, dtype=dtype, device=logits.device)
        for rows in slices(count if columns else 0, chunk):
            x = _scaled(logits[rows, :columns], dtype, temperature)
            peak = finite_peak(x)
            z = torch.sub(x, peak[:, None], out=scratch[: len(x)]).exp_()
            total = z.sum(dim=1)
            lse[rows] = peak + total.log()
            chosen[rows] = torch.where(owned[rows], x.gather(1, local[rows]), 0)
            if with_entropy:
                log_z = torch.sub(x, peak[:, None]).clamp_(min=LOWEST_LOGPROB)
                entropy[rows] = entropy_of_sums(total, torch.linalg.vecdot(z, log_z))
        lse, picked, entropy = combine_over_vocabulary(lse, chosen.T, entropy, group)
        ctx.save_for_backward(logits, local, owned, lse, entropy)
        ctx.columns, ctx.temperature, ctx.with_entropy, ctx.chunk = columns, temperature, with_entropy, chunk
        ctx.normalize = normalize
        return picked.T - lse[:, None] if normalize else picked.T, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, local, owned, lse, entropy = ctx.saved_tensors
        g, h = grads[0], grads[1] if ctx.with_entropy else None
        grad_logits, columns = torch.empty_like(logits), ctx.columns
        grad_logits[:, columns:] = 0
        # Rows that the loss does not use may hold any value, including NaN. Their gradient is 0, not 0·NaN.
        unused = ~((g != 0).any(dim=1) if h is None else (g != 0).any(dim=1) | (h != 0))
        total = g.sum(dim=1, keepdim=True) if ctx.normalize else g.new_zeros(len(g), 1)
        for rows in slices(logits.shape[0] if columns else 0, ctx.chunk):
            x = _scaled(logits[rows, :columns], lse.dtype, ctx.temperature)
            grad = grad_logits[rows, :columns] if logits.dtype == lse.dtype else torch.empty_like(x)
            logprob_gradient(x, lse[rows], entropy[rows], total[rows, 0], None if h is None else h[rows], out=grad)
            grad.scatter_add_(1, local[rows], torch.where(owned[rows], g[rows], 0))
            if ctx.temperature != 1:
                grad.mul_(1 / ctx.temperature)
            grad.masked_fill_(unused[rows, None], 0)
            if logits.dtype != lse.dtype:
                grad_logits[rows, :columns] = grad
        return grad_logits, *(None,) * 8


def _scaled(logits: Tensor, dtype: torch.dtype, temperature: float) -> Tensor:
    """Return logits in the accumulation type, divided by the temperature; `logits` itself if nothing changes."""
    x = logits.to(dtype)
    return x if temperature == 1 else x / temperature


def logprob_gradient(
    x: Float[Tensor, "tokens columns"],
    lse: Float[Tensor, " tokens"],
    entropy: Float[Tensor, " tokens"],
    g: Float[Tensor, " tokens"],
    h: Float[Tensor, " tokens"] | None,
    out: Float[Tensor, "tokens columns"],
) -> Float[Tensor, "tokens columns"]:
    """Return −p·(g + h·(log p + entropy)): the gradient of g·(−log Z) + h·entropy with respect to the logits x.

    p = exp(x − lse) are the probabilities; log Z is `lse`. The caller adds g at the targets, for the gradient of the
    targets' logits. The result is written to `out`, which may be x.
    """
    logp = torch.sub(x, lse[:, None], out=out)
    if h is None:
        return logp.exp_().mul_(-g[:, None])
    # A logit of −inf has p = 0, which must not be multiplied with an infinite weight.
    weight = logp.clamp(min=LOWEST_LOGPROB).add_(entropy[:, None]).mul_(-h[:, None]).sub_(g[:, None])
    return logp.exp_().mul_(weight)


def local_targets(
    targets: Int[Tensor, "tokens *k"], start: int, columns: int
) -> tuple[Int[Tensor, "tokens *k"], Bool[Tensor, "tokens *k"]]:
    """Return the targets' columns in the shard, clamped to valid columns, and whether each target is in the shard."""
    owned = (targets >= start) & (targets < start + columns)
    return (targets - start).clamp(0, max(columns - 1, 0)), owned


def vocab_parallel_logprobs(
    logits: Float[Tensor, "tokens vocab_shard"],
    targets: Int[Tensor, tokens * k],
    group: ProcessGroup | None = None,
    rank: int | None = None,
    vocab_size: int | None = None,
    temperature: float = 1.0,
    with_entropy: bool = False,
    chunk_size: int | None = None,
    normalize: bool = True,
) -> tuple[Float[Tensor, tokens * k], Float[Tensor, " tokens"] | None]:
    """Compute log-probabilities of the tokens `targets` and, if requested, the entropy of each distribution, in nats.

    The result equals `log_softmax(logits / temperature)` at `targets`. The forward pass needs one all-gather of K + 2
    numbers per token, the backward pass no communication. Every rank of `group` must compute the same loss from the
    result, and gets the whole gradient of its shard. Logits may be −inf.

    Args:
        logits: [T, Vp], this rank's shard of the vocabulary (last dimension split over `group`).
        targets: [T] or [T, K] token ids in the whole vocabulary, the same on all ranks of `group`.
        rank: index of the shard; None means the rank in `group`.
        vocab_size: number of real tokens in the vocabulary; later columns are padding and ignored.
        temperature: divides the logits.
        chunk_size: number of tokens processed together; None for as many as `CHUNK_BYTES` allows.
        normalize: if False, return the targets' logits divided by the temperature; the logits of other tokens
            have a gradient of exactly 0.

    Returns:
        Log-probabilities in the shape of `targets`, and entropy [T] or None; fp32 (fp64 for fp64 logits).

    Raises:
        ContractError: a shape is wrong, or `rank` is not this process's rank in the group.
    """
    rank = group_rank(group) if rank is None else rank
    _check(logits, targets, group, rank, temperature)
    columns = valid_columns(logits.shape[1], rank, vocab_size)
    if chunk_size is None:
        row_bytes = max(columns, 1) * accumulation_dtype(logits.dtype).itemsize
        chunk_size = max(1, CHUNK_BYTES[logits.device.type] // row_bytes)
    wide = targets if targets.ndim == 2 else targets[:, None]
    logprobs, entropy = _LogprobsFromLogits.apply(
        logits, wide, group, rank, columns, temperature, with_entropy, chunk_size, normalize
    )
    return logprobs if targets.ndim == 2 else logprobs[:, 0], entropy if with_entropy else None


def _check(logits: Tensor, targets: Tensor, group: ProcessGroup | None, rank: int, temperature: float) -> None:
    if logits.ndim != 2 or targets.ndim not in (1, 2) or targets.shape[0] != logits.shape[0]:
        raise ContractError(
            f"logits {tuple(logits.shape)} must be [T, Vp] and targets {tuple(targets.shape)} [T] or [T, K]"
        )
    if group is not None and rank != group_rank(group):
        raise ContractError(f"vocab_parallel_rank is {rank}, but the rank of this process is {group_rank(group)}")
    if temperature <= 0:
        raise ContractError(f"temperature must be positive, got {temperature}")


def next_token_logprobs_from_logits(
    logits: Float[Tensor, "local_tokens vocab_shard"],
    input_ids: Int[Tensor, "rows seq"],
    layout: PackLayout,
    tensor_parallel_group: ProcessGroup | None = None,
    context_parallel_group: ProcessGroup | None = None,
    tensor_parallel_rank: int | None = None,
    vocab_size: int | None = None,
    temperature: float = 1.0,
    with_entropy: bool = False,
) -> tuple[Float[Tensor, "rows predicted"], Float[Tensor, "rows predicted"] | None]:
    """Return next-token log-probabilities (and entropies) of a pack, as rows.

    Args:
        logits: [T / CP, Vp], for this rank's zigzag share of the pack's tokens and its shard of the vocabulary.
        input_ids: [N, S], whole right-padded rows.
        layout: positions of the rows in the pack (for unpacked rows, `PackLayout.rows`).

    Returns:
        logprobs [N, S − 1], whose entry (b, t) scores `input_ids[b, t + 1]`; and entropies [N, S − 1], or None. Both
        are 0 where a row has no token. They are the same on every context-parallel rank. Their gradients are summed
        over these ranks: if every rank computes the whole loss, divide it by CP (see `gather_context_parallel`).
    """
    targets = slice_context_parallel(
        layout.next_of(layout.pack_rows(input_ids)), layout, group_rank(context_parallel_group)
    )
    logprobs, entropy = vocab_parallel_logprobs(
        logits, targets, tensor_parallel_group, tensor_parallel_rank, vocab_size, temperature, with_entropy
    )
    return unpack_next_token_values(logprobs, entropy, layout, input_ids.shape[1], context_parallel_group)


def unpack_next_token_values(
    logprobs: Float[Tensor, " local_tokens"],
    entropy: Float[Tensor, " local_tokens"] | None,
    layout: PackLayout,
    width: int,
    context_parallel_group: ProcessGroup | None,
) -> tuple[Float[Tensor, "rows predicted"], Float[Tensor, "rows predicted"] | None]:
    """Gather next-token values [T / CP] of all context-parallel ranks; return them as rows [N, width − 1]."""
    local = logprobs[:, None] if entropy is None else torch.stack((logprobs, entropy), dim=1)
    packed = gather_context_parallel(local, layout, context_parallel_group)
    rows = [layout.unpack_next_token(values, width) for values in packed.unbind(1)]
    return rows[0], None if entropy is None else rows[1]


# (tokens, vocabulary columns) of a tile that fits a CPU's cache, or keeps a GPU busy. On an H200, 4096 × 8192 is 3
# to 7 % faster and takes 100 MB more.
TILE_SHAPE = {"cpu": (512, 4096), "cuda": (4096, 4096)}
KEPT_TILE_SHAPE = {"cpu": (64, 4096), "cuda": (256, 4096)}
"""Largest (rows, columns) of a tile of kept tokens. A tile has only the columns that its rows keep."""


def gather_hidden_states(
    hidden: Float[Tensor, "local_tokens hidden"], group: ProcessGroup | None, sequence_parallel: bool
) -> Float[Tensor, "tokens hidden"]:
    """Return hidden states that every tensor-parallel rank may multiply with its shard of the LM head.

    With sequence parallelism, `hidden` [T / TP, H] is gathered, and its gradients are reduce-scattered. Otherwise
    `hidden` is [T, H] already, and its gradients are summed over the group. The result is [T, H].
    """
    if sequence_parallel:
        return all_gather_forward_reduce_scatter_backward(hidden, group)
    return copy_forward_all_reduce_backward(hidden, group)


def linear_logprobs(
    hidden: Float[Tensor, "tokens hidden"],
    weight: Float[Tensor, "vocab_shard hidden"],
    targets: Int[Tensor, tokens * k],
    group: ProcessGroup | None = None,
    vocab_size: int | None = None,
    temperature: float = 1.0,
    with_entropy: bool = False,
    normalize: bool = True,
    kept: Sequence[Tile] | None = None,
    keeps_logits: bool = False,
    softcap: float | None = None,
) -> tuple[Float[Tensor, tokens * k], Float[Tensor, " tokens"] | None]:
    """Compute log-probabilities of `targets` under softmax(hidden · weightᵀ / temperature), in nats.

    The result equals `log_softmax(hidden @ weight.T / temperature)` at `targets`, accumulated in fp32. The forward pass
    needs one all-gather of K + 2 numbers per token, the backward pass no communication: the gradient of `hidden` covers
    only this shard (`gather_hidden_states` sums it over the ranks). The weight's gradient is added directly to a
    Megatron `weight.main_grad`, in that tensor's precision.

    Args:
        hidden: [T, H], the same on all ranks of `group`. Pass only the rows that the loss uses.
        weight: [Vp, H], this rank's rows of the LM head.
        targets: [T] or [T, K] token ids in the whole vocabulary.
        vocab_size: number of real tokens in the vocabulary; later rows of `weight` are padding and ignored.
        with_entropy: also return the entropy [T] of each distribution.
        normalize: if False, return the targets' logits divided by the temperature; the logits of other tokens
            have a gradient of exactly 0.
        kept: restricts the softmax to the tokens that top-k, top-p and min-p left at each position: the result of
            `kept_tiles` for this shard. None for a softmax over the whole vocabulary.
        keeps_logits: keep the logits [T, Vp] of the forward pass for the backward pass, in the accumulation type. This
            saves one of four matrix products; results do not change. Without gradients, nothing is kept.
        softcap: bound c of the logits: each product x becomes c · tanh(x / c), before it is divided by the temperature
            (arXiv:2408.00118, section 2). None for no bound.

    Returns:
        Log-probabilities in the shape of `targets`, and entropy [T] or None; fp32 (fp64 for fp64 hidden states).

    Raises:
        ContractError: a shape is wrong.
    """
    fits = hidden.ndim == 2 == weight.ndim and hidden.shape[1] == weight.shape[1]
    if not fits or targets.ndim not in (1, 2) or targets.shape[:1] != hidden.shape[:1]:
        raise ContractError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and targets {tuple(targets.shape)} "
            "must be [T, H], [Vp, H] and [T] or [T, K]"
        )
    if temperature <= 0:
        raise ContractError(f"temperature must be positive, got {temperature}")
    columns = valid_columns(weight.shape[0], group_rank(group), vocab_size)
    wide = targets if targets.ndim == 2 else targets[:, None]
    logprobs, entropy = _LinearLogprobs.apply(
        hidden, weight, wide, group, columns, temperature, with_entropy, normalize, kept,
        keeps_logits and torch.is_grad_enabled(), softcap,
    )  # fmt: skip
    return logprobs if targets.ndim == 2 else logprobs[:, 0], entropy if with_entropy else None


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        group: ProcessGroup | None,
        columns: int,
        temperature: float,
        with_entropy: bool,
        normalize: bool,
        kept: Sequence[Tile] | None,
        keeps_logits: bool,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        local = (targets - group_rank(group) * weight.shape[0]).contiguous()
        tiles = Tiles(hidden, weight, columns, temperature, kept, softcap)
        ctx.products = [] if keeps_logits and any(ctx.needs_input_grad[:2]) else None
        lse, target_logits, entropy = shard_statistics(tiles, local, with_entropy, ctx.products)
        lse, picked, entropy = combine_over_vocabulary(lse, target_logits.T, entropy, group)
        ctx.save_for_backward(hidden, local, lse, entropy)
        ctx.weight, ctx.options = weight, (columns, temperature, kept, softcap)
        ctx.with_entropy, ctx.normalize = with_entropy, normalize
        return picked.T - lse[:, None] if normalize else picked.T, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, local, lse, entropy = ctx.saved_tensors
        tiles = Tiles(hidden, ctx.weight, *ctx.options)
        gradients = HeadGradients(tiles, ctx.weight, *ctx.needs_input_grad[:2])
        g, h = grads[0].contiguous(), grads[1].contiguous() if ctx.with_entropy else None
        of_lse = g.sum(dim=1) if ctx.normalize else g.new_zeros(len(g))
        upstream = TokenGradients(lse, entropy, local, g, of_lse, h)
        steps = tile_steps(tiles.device.type, tiles.dtype)
        dtype = tiles.factor_dtype if tiles.softcap is None else tiles.dtype  # the slope is multiplied in the latter
        products = None if ctx.products is None else ctx.products[::-1]
        ctx.products = None
        for tile in tiles.all(local):
            of_rows = upstream.of(tile.rows)._replace(local=tile.targets)
            product = tiles.products(tile) if products is None else products.pop()  # freed tile by tile
            slope = tiles.slope(product)  # before `gradient` overwrites the logits
            grad = steps.gradient(product, *of_rows, tile.first_column, tiles.temperature, dtype)
            gradients.add(tile.rows, tile.columns, grad if slope is None else slope.mul_(grad))
        return (*gradients.results(), *(None,) * 9)


class SoftmaxSums(NamedTuple):
    """Running sums over a shard's columns, from which the statistics of its softmax are computed.

    peak: the largest logit x so far, [T]; −inf if there was none.
    total: Σ exp(x − peak), [T].
    moment: Σ exp(x − peak)·(x − peak), [T]; 0 if the entropy is not computed.
    picked: the targets' logits, [T, K]; 0 if another shard has the target.
    """

    peak: Tensor
    total: Tensor
    moment: Tensor
    picked: Tensor

    def of(self, rows: slice) -> SoftmaxSums:
        return SoftmaxSums(*(x[rows] for x in self))


class TokenGradients(NamedTuple):
    """Values per token from which the gradient of a tile of logits is computed.

    lse, entropy: log Σ exp and entropy over the whole vocabulary, [T].
    local: the targets' columns in this shard, [T, K]; outside of 0 … Vp − 1 if another shard has the target.
    of_targets: gradients of the targets' logits, [T, K].
    of_lse: gradient with respect to −`lse`, [T]; each log-probability is a logit minus `lse`.
    of_entropy: gradient of the entropy, [T], or None.
    """

    lse: Tensor
    entropy: Tensor
    local: Tensor
    of_targets: Tensor
    of_lse: Tensor
    of_entropy: Tensor | None

    def of(self, rows: slice) -> TokenGradients:
        of_entropy = None if self.of_entropy is None else self.of_entropy[rows]
        of_tokens = self.lse[rows], self.entropy[rows], self.local[rows], self.of_targets[rows], self.of_lse[rows]
        return TokenGradients(*of_tokens, of_entropy)


class Tile(NamedTuple):
    """A tile of the product hidden × weightᵀ.

    columns: columns of the product, which are rows of the weight; no column occurs twice.
    targets: [rows, K]. A target's column in the tile is `targets` − `first_column`; it may be outside of the tile.
    kept: indices, in the flattened tile, of the logits that belong to the softmax; None if all logits do.
    """

    rows: slice
    columns: slice | Tensor
    targets: Tensor
    first_column: int = 0
    kept: Tensor | None = None


class TileSteps(NamedTuple):
    """The two functions that compute on a tile of products [rows, columns]; `tile_steps` chooses an implementation.

    Both take tensors and numbers: the products, the fields of `SoftmaxSums` or of `TokenGradients`, the token id of the
    tile's first column, and the temperature, by which they divide the products. `gradient` may overwrite the products.
    With a soft cap, these are the capped products; the caller multiplies the gradient by `Tiles.slope`.

    add: `add(products, peak, total, moment, picked, targets, first_column, temperature, with_entropy)` adds the tile's
        logits to the sums of its rows, in place; `moment` only if `with_entropy`.
    gradient: `gradient(products, lse, entropy, local, of_targets, of_lse, of_entropy, first_column, temperature,
        dtype)` returns the loss's gradient with respect to the products, in this type.
    add_overwrites: whether `add` overwrites the products.
    """

    add: Callable[..., None]
    gradient: Callable[..., Tensor]
    add_overwrites: bool


WIDENING_PRODUCTS = "dtype" in torch.ops.aten.mm.overloads()
"""Whether the installed PyTorch can return a product of half-precision factors in fp32 (since 2.8)."""


@functools.cache
def adds_widened(device: torch.device) -> bool:
    """Return whether the installed PyTorch can add products of half-precision factors to an fp32 sum in place.

    On a GPU, one addition is tried. The result is False on the CPU. It is True on the meta device since PyTorch 2.8.
    """
    if not WIDENING_PRODUCTS or device.type in ("cpu", "meta"):
        return WIDENING_PRODUCTS and device.type == "meta"
    total, factor = torch.zeros(16, 16, device=device), torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    try:
        torch.addmm(total, factor, factor, out_dtype=total.dtype, out=total)
    except (RuntimeError, TypeError):
        return False
    return True


class Tiles:
    """Computes the product hidden × weightᵀ in tiles, in the accumulation type; `tempered` applies the temperature.

    On a GPU, half-precision factors are multiplied without conversion; the products are accumulated in fp32.

    kept: the result of `kept_tiles` for a softmax over the tokens that the sampler could draw; None for all tokens.
    softcap: bound of the products (see `linear_logprobs`); None for no bound. All methods return capped products.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        columns: int,
        temperature: float,
        kept: Sequence[Tile] | None = None,
        softcap: float | None = None,
    ) -> None:
        self._hidden, self._weight, self._kept, self.softcap = hidden, weight.detach(), kept, softcap
        self.columns, self.temperature = columns, temperature
        self.count, self.device = hidden.shape[0], hidden.device
        self.dtype, self.hidden_dtype = accumulation_dtype(hidden.dtype), hidden.dtype
        self.is_half = (
            WIDENING_PRODUCTS and self.device.type != "cpu" and hidden.dtype in (torch.float16, torch.bfloat16)
        )

    def row_tiles(self) -> Iterator[slice]:
        return slices(self.count, TILE_SHAPE[self.device.type][0])

    def column_tiles(self) -> Iterator[slice]:
        return slices(self.columns, TILE_SHAPE[self.device.type][1])

    def all(self, local: Tensor) -> Iterator[Tile]:
        """Yield all tiles of the shard, given the targets' columns `local` [T, K], counted from the shard's start."""
        if self._kept is not None:
            yield from self._kept
            return
        for columns in self.column_tiles():
            for rows in self.row_tiles():
                yield Tile(rows, columns, local[rows], columns.start)

    def products(self, tile: Tile) -> Tensor:
        """Return hidden × weightᵀ for a tile, with −inf for logits that are not in `tile.kept`."""
        x = self.product(tile.rows, tile.columns)
        if tile.kept is None:
            return x
        masked = torch.full_like(x, -torch.inf)
        masked.view(-1).index_copy_(0, tile.kept, x.view(-1)[tile.kept])
        return masked

    def zeros_of_hidden(self) -> Tensor:
        return torch.zeros_like(self._hidden, dtype=self.dtype)

    @property
    def factor_dtype(self) -> torch.dtype:
        return self.hidden_dtype if self.is_half else self.dtype

    def factor(self, x: Tensor) -> Tensor:
        """Return `x` in `factor_dtype`, the dtype in which hidden states, weights and gradients are multiplied."""
        return x.to(self.factor_dtype)

    def hidden(self, rows: slice) -> Tensor:
        return self.factor(self._hidden[rows])

    def weight(self, columns: slice | Tensor) -> Tensor:
        return self.factor(self._weight[columns])

    def product(self, rows: slice, columns: slice | Tensor) -> Tensor:
        """Return these rows and columns of hidden × weightᵀ, not divided by the temperature."""
        return self.capped(self.multiply(self.hidden(rows), self.weight(columns).T))

    def capped(self, x: Tensor) -> Tensor:
        """Bound products by the soft cap, in place; return them."""
        return x if self.softcap is None else x.div_(self.softcap).tanh_().mul_(self.softcap)

    def slope(self, products: Tensor) -> Tensor | None:
        """Return the derivative of the soft cap, 1 − (y / softcap)² at capped products y; None without soft cap."""
        if self.softcap is None:
            return None
        # Tokens that are not kept have the product −inf. Their slope is 0, so that their gradient of 0 remains.
        return products.div(self.softcap).square_().neg_().add_(1).clamp_(min=0)

    def all_columns(self, rows: slice) -> Tensor:
        """Return the given rows of hidden × weightᵀ, all columns. A weight of another dtype is converted in tiles."""
        if self.factor_dtype == self._weight.dtype == self.dtype:
            return self.capped(platform.linear(self.hidden(rows), self.weight(slice(0, self.columns))))
        if self.factor_dtype == self._weight.dtype:
            return self.product(rows, slice(0, self.columns))
        return torch.cat([self.product(rows, columns) for columns in list(self.column_tiles()) or [slice(0)]], dim=1)

    def logits(self, rows: slice, columns: slice) -> Tensor:
        return self.tempered(self.product(rows, columns))

    def tempered(self, x: Tensor) -> Tensor:
        """Divide `x` (products, or gradients of logits) by the temperature, in place; return it."""
        return _tempered(x, self.temperature)

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        """Return a · b in the accumulation type. Both factors must have the dtype `factor_dtype`."""
        return torch.mm(a, b, out_dtype=self.dtype) if self.is_half else a @ b

    def add_product(self, total: Tensor, a: Tensor, b: Tensor) -> None:
        """Compute total += a · b. Both factors must have the dtype `factor_dtype`."""
        if total.dtype == a.dtype:
            torch.addmm(total, a, b, out=total)  # torch's counter of operations ignores `addmm_`
        elif adds_widened(total.device):
            torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
        else:
            total += self.multiply(a, b)


@functools.cache
def tile_steps(device_type: str, dtype: torch.dtype) -> TileSteps:
    """Return Triton kernels for fp32 on a GPU if Triton is installed; otherwise return torch operations."""
    if device_type == "cuda" and dtype == torch.float32 and importlib.util.find_spec("triton") is not None:
        return triton_steps()
    return TORCH_STEPS


@functools.cache
def triton_steps() -> TileSteps:
    """Return Triton kernels, which read each tile once."""
    from mcore_rl.distributed import triton_logprobs

    add, gradient = triton_logprobs.add_tile, triton_logprobs.tile_gradient
    return TileSteps(
        functools.partial(add, LOWEST_LOGPROB), functools.partial(gradient, LOWEST_LOGPROB), add_overwrites=False
    )


def shard_statistics(
    tiles: Tiles, local: Tensor, with_entropy: bool, products: list[Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the shard's log-sum-exp [T], targets' logits [T, K] (0 for targets of other shards), and entropy [T] or 0.

    Args:
        local: the targets' columns in the shard, [T, K], contiguous.
        products: list to which the products of each tile are appended.
    """
    count, steps = local.shape[0], tile_steps(tiles.device.type, tiles.dtype)
    peak = torch.full((count,), -torch.inf, dtype=tiles.dtype, device=local.device)
    sums = SoftmaxSums(peak, torch.zeros_like(peak), torch.zeros_like(peak), torch.zeros_like(local, dtype=tiles.dtype))
    for tile in tiles.all(local):
        product = tiles.products(tile)
        if products is not None:
            products.append(product.clone() if steps.add_overwrites else product)
        of_rows = sums.of(tile.rows)
        steps.add(product, *of_rows, tile.targets, tile.first_column, tiles.temperature, with_entropy)
    entropy = entropy_of_sums(sums.total, sums.moment) if with_entropy else sums.moment
    return sums.peak + sums.total.log(), sums.picked, entropy


def add_tile(
    x: Tensor, peak: Tensor, total: Tensor, moment: Tensor, picked: Tensor, targets: Tensor, first_column: int,
    temperature: float, with_entropy: bool,
) -> None:  # fmt: skip
    """Add the logits of a tile, given by its products `x`, to running sums (see `TileSteps`), by torch operations."""
    _tempered(x, temperature)
    picked.add_(_at_targets(x, targets - first_column))
    higher = torch.maximum(peak, x.amax(dim=1))
    finite = torch.where(higher == -torch.inf, 0, higher)  # if all logits so far are −inf
    log_before = peak - finite
    before = log_before.exp()
    x.sub_(finite[:, None])
    if with_entropy:
        z = x.exp()
        # 0 times the logarithm of 0 is 0.
        moment.add_(total * log_before.clamp_(min=LOWEST_LOGPROB)).mul_(before)
        moment.add_(torch.linalg.vecdot(z, x.clamp_(min=LOWEST_LOGPROB)))
    else:
        z = x.exp_()
    total.mul_(before).add_(z.sum(dim=1))
    peak.copy_(higher)


def tile_gradient(
    x: Tensor, lse: Tensor, entropy: Tensor, local: Tensor, of_targets: Tensor, of_lse: Tensor,
    of_entropy: Tensor | None, first_column: int, temperature: float, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Return the loss's gradient with respect to the products `x` of a tile (see `TileSteps`), by torch operations."""
    _tempered(x, temperature)
    logprob_gradient(x, lse, entropy, of_lse, of_entropy, out=x)
    _add_at_targets(x, local - first_column, of_targets)
    return _tempered(x, temperature).to(dtype)


def _tempered(x: Tensor, temperature: float) -> Tensor:
    """Divide products, or gradients of logits, by the temperature, in place; return them."""
    return x if temperature == 1 else x.div_(temperature)


TORCH_STEPS = TileSteps(add_tile, tile_gradient, add_overwrites=True)


def _at_targets(x: Tensor, columns: Tensor) -> Tensor:
    """Return x[t, columns[t, k]] for all t and k, [T, K]; 0 for columns outside of the tile `x`."""
    inside = (columns >= 0) & (columns < x.shape[1])
    return torch.where(inside, x.gather(1, columns.clamp(0, x.shape[1] - 1)), 0)


def _add_at_targets(x: Tensor, columns: Tensor, values: Tensor) -> None:
    """Compute x[t, columns[t, k]] += values[t, k] for all columns inside the tile `x`."""
    inside = (columns >= 0) & (columns < x.shape[1])
    x.scatter_add_(1, columns.clamp(0, x.shape[1] - 1), torch.where(inside, values, 0))


class HeadGradients:
    """Accumulates the gradients of hidden states and LM head from gradients of tiles of logits.

    If the LM head has Megatron's `main_grad`, the head's gradient is added to `main_grad`, in that precision.
    """

    def __init__(self, tiles: Tiles, weight: Tensor, needs_hidden: bool, needs_weight: bool) -> None:
        self.tiles, self.weight = tiles, weight
        self._hidden = tiles.zeros_of_hidden() if needs_hidden else None
        self._main_grad: Tensor | None = getattr(weight, "main_grad", None) if needs_weight else None
        own = needs_weight and self._main_grad is None
        self._own = torch.zeros_like(weight, dtype=tiles.dtype) if own else None

    def add(self, rows: slice, columns: slice | Tensor, grad: Tensor) -> None:
        """Add the contribution of a tile of logits.

        Args:
            grad: gradient of the tile of hidden × weightᵀ.
        """
        tiles = self.tiles
        grad = tiles.factor(grad)
        if self._hidden is not None:
            tiles.add_product(self._hidden[rows], grad, tiles.weight(columns))
        of_weight = self._own if self._main_grad is None else self._main_grad
        if of_weight is None:
            return
        if isinstance(columns, slice):
            tiles.add_product(of_weight[columns], grad.T, tiles.hidden(rows))
        else:  # no row of the weight occurs twice in a tile, so the sum has one order
            of_weight.index_add_(0, columns, tiles.multiply(grad.T, tiles.hidden(rows)).to(of_weight.dtype))

    def results(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients for autograd, in the precision of hidden states and weight."""
        hidden = None if self._hidden is None else self._hidden.to(self.tiles.hidden_dtype)
        if self._main_grad is not None:
            return hidden, self._stand_in()
        return hidden, None if self._own is None else self._own.to(self.weight.dtype)

    def _stand_in(self) -> Tensor:
        """Return a gradient that takes no memory, for a weight whose real gradient is already in its `main_grad`.

        Autograd calls Megatron's hook only if there is a gradient. The hook does not read the gradient's values, so
        the weight itself is returned. But if autograd may add the values to another gradient, zeros are returned:
        for a weight that is also the embedding (`zero_out_wgrad`), and for a weight without a hook.
        """
        is_hooked = hasattr(self.weight, "grad_added_to_main_grad")
        if is_hooked:
            self.weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        if getattr(self.weight, "zero_out_wgrad", False) or not is_hooked:
            return self.weight.new_zeros(()).expand(self.weight.shape)
        return self.weight.detach()
