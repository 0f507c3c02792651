"""Log-probabilities straight from hidden states and the LM head: the logits never exist.

The product hidden × weightᵀ is computed in tiles of tokens × vocabulary, reduced to a few numbers
per token, and computed again in backward. Memory beyond inputs and gradients is a few tiles,
whatever the number of tokens and the size of the vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_rl.distributed.collectives import (
    all_gather_forward_reduce_scatter_backward,
    copy_forward_all_reduce_backward,
    group_rank,
)
from mcore_rl.distributed.parallel_logprobs import (
    CHUNK_BYTES,
    accumulation_dtype,
    check_topk,
    combine_over_vocabulary,
    combine_topk,
    finite_peak,
    logprob_gradient,
    shard_topk,
    slices,
    valid_columns,
    weighted_mean,
)
from mcore_rl.errors import ContractError

# (tokens, vocabulary columns) of a tile: what a CPU's cache holds; or what keeps a GPU busy, square because gradients
# are added to once for each row and each column of tiles.
TILE_SHAPE = {"cpu": (512, 4096), "cuda": (4096, 4096)}


def gather_hidden_states(
    hidden: Float[Tensor, "local_tokens hidden"], group: ProcessGroup | None, sequence_parallel: bool
) -> Float[Tensor, "tokens hidden"]:
    """Hidden states that every tensor-parallel rank may multiply with its shard of the LM head.

    [T / TP, H] (sequence parallelism: gathered, gradients reduce-scattered) or [T, H] (gradients
    summed over the group) → [T, H].
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
) -> tuple[Float[Tensor, tokens * k], Float[Tensor, " tokens"] | None]:
    """Log-probabilities of `targets` under softmax(hidden · weightᵀ / temperature), in nats.

    Dense equivalent: `log_softmax(hidden @ weight.T / temperature)` gathered at `targets`, with
    fp32 accumulation. Forward: one all-gather of K + 2 numbers per token. Backward: none here; the
    gradient of `hidden` is this shard's part (`gather_hidden_states` sums it). A Megatron
    `weight.main_grad` is added to directly, in its own precision.

    Args:
        hidden: [T, H], the same on all ranks of `group`; only rows that the loss uses.
        weight: [Vp, H], this rank's rows of the LM head.
        targets: [T] or [T, K] token ids in the whole vocabulary.
        vocab_size: real tokens in the vocabulary; rows of `weight` beyond are padding, left out.
        with_entropy: also return the entropy [T] of each distribution.
        normalize: if False, return the targets' logits divided by the temperature. Tokens that are no target then have
            a gradient of exactly 0.

    Returns:
        logprobs of `targets`' shape and entropy [T] or None, fp32 (fp64 for fp64 hidden states).

    Raises:
        ContractError: shapes that do not fit.
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
        hidden, weight, wide, group, columns, temperature, with_entropy, normalize
    )
    return logprobs if targets.ndim == 2 else logprobs[:, 0], entropy if with_entropy else None


@torch.no_grad()
def linear_topk(
    hidden: Float[Tensor, "tokens hidden"],
    weight: Float[Tensor, "vocab_shard hidden"],
    k: int,
    group: ProcessGroup | None = None,
    vocab_size: int | None = None,
    chunk_size: int | None = None,
) -> tuple[Float[Tensor, "tokens k"], Int[Tensor, "tokens k"]]:
    """The k largest logits of hidden · weightᵀ over the whole vocabulary, and their token ids; no gradient.

    Dense equivalent: `(hidden @ weight.T).topk(k)`, the product in the precision of its factors, the results fp32.
    Two all-gathers of k numbers per token.

    Args:
        hidden: [T, H], the same on all ranks of `group`.
        weight: [Vp, H], this rank's rows of the LM head.
        vocab_size: real tokens in the vocabulary; rows of `weight` beyond are padding, left out.
        chunk_size: tokens whose logits exist at a time; None for as many as `CHUNK_BYTES` allows.

    Raises:
        ContractError: k is not between 1 and the vocabulary's size.
    """
    check_topk(k, weight.shape[0], group, vocab_size)
    rows_of_vocabulary = weight[: valid_columns(weight.shape[0], group_rank(group), vocab_size)]
    if chunk_size is None:  # the logits, and a copy of them in the accumulation type
        row_bytes = max(len(rows_of_vocabulary), 1) * (hidden.itemsize + accumulation_dtype(hidden.dtype).itemsize)
        chunk_size = max(1, CHUNK_BYTES[hidden.device.type] // row_bytes)
    values = hidden.new_empty((len(hidden), k), dtype=accumulation_dtype(hidden.dtype))
    columns = hidden.new_empty((len(hidden), k), dtype=torch.long)
    for rows in slices(len(hidden), chunk_size):
        values[rows], columns[rows] = shard_topk(F.linear(hidden[rows], rows_of_vocabulary), k)
    return combine_topk(values, columns, k, weight.shape[0], group)


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
    ) -> tuple[Tensor, Tensor]:
        local = targets - group_rank(group) * weight.shape[0]
        tiles = Tiles(hidden, weight, columns, temperature)
        lse, target_logits, mean = shard_statistics(tiles, local, with_entropy)
        lse, picked, mean = combine_over_vocabulary(lse, target_logits.T, mean, group)
        ctx.save_for_backward(hidden, local, lse, mean)
        ctx.weight, ctx.columns, ctx.temperature = weight, columns, temperature
        ctx.with_entropy, ctx.normalize = with_entropy, normalize
        return picked.T - lse[:, None] if normalize else picked.T, lse - mean

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, local, lse, mean = ctx.saved_tensors
        tiles = Tiles(hidden, ctx.weight, ctx.columns, ctx.temperature)
        gradients = HeadGradients(tiles, ctx.weight, *ctx.needs_input_grad[:2])
        g, h = grads[0], grads[1] if ctx.with_entropy else None
        total = g.sum(dim=1) if ctx.normalize else g.new_zeros(len(g))
        for columns in tiles.column_tiles():
            for rows in tiles.row_tiles():
                x = tiles.product(rows, columns)
                grad = logprob_gradient(x, lse[rows], mean[rows], total[rows], None if h is None else h[rows], out=x)
                _add_at_targets(grad, local[rows] - columns.start, g[rows])
                gradients.add(rows, columns, grad)
        return (*gradients.results(), None, None, None, None, None, None)


WIDENING_PRODUCTS = "dtype" in torch.ops.aten.mm.overloads()
"""Whether this torch leaves a product of half-precision factors in fp32, as it was accumulated (since 2.8)."""


@functools.cache
def adds_widened(device: torch.device) -> bool:
    """Whether this torch adds products of half-precision factors to an fp32 sum where it is: asked of the operator,
    whose first versions wanted a sum in the factors' precision. A simulated device is taken to have a newer one."""
    if not WIDENING_PRODUCTS or device.type in ("cpu", "meta"):
        return WIDENING_PRODUCTS and device.type == "meta"
    total, factor = torch.zeros(16, 16, device=device), torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    try:
        torch.addmm(total, factor, factor, out_dtype=total.dtype, out=total)
    except (RuntimeError, TypeError):
        return False
    return True


class Tiles:
    """hidden × weightᵀ / temperature, a tile at a time, in the accumulation type.

    On a GPU half-precision factors are multiplied as they are, and their products accumulated and left in fp32.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, columns: int, temperature: float) -> None:
        self._hidden, self._weight = hidden, weight.detach()
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

    def zeros_of_hidden(self) -> Tensor:
        return torch.zeros_like(self._hidden, dtype=self.dtype)

    def factor(self, x: Tensor) -> Tensor:
        """`x` as products take it."""
        return x.to(self.hidden_dtype if self.is_half else self.dtype)

    def hidden(self, rows: slice) -> Tensor:
        return self.factor(self._hidden[rows])

    def weight(self, columns: slice) -> Tensor:
        return self.factor(self._weight[columns])

    def product(self, rows: slice, columns: slice) -> Tensor:
        x = self.multiply(self.hidden(rows), self.weight(columns).T)
        return x if self.temperature == 1 else x.div_(self.temperature)

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        """a · b, of two factors."""
        return torch.mm(a, b, out_dtype=self.dtype) if self.is_half else a @ b

    def add_product(self, total: Tensor, a: Tensor, b: Tensor) -> None:
        """total += a · b"""
        if total.dtype == a.dtype:
            torch.addmm(total, a, b, out=total)  # torch's counter of operations does not know `addmm_`
        elif adds_widened(total.device):
            torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
        else:
            total += self.multiply(a, b)


def shard_statistics(tiles: Tiles, local: Tensor, with_mean: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Over the shard: log Σ exp x [T], the targets' logits (0 if another rank's) [T, K], Σ softmax(x)·x [T]."""
    count = local.shape[0]
    lse = torch.full((count,), -torch.inf, dtype=tiles.dtype, device=local.device)
    target_logits, mean = torch.zeros_like(local, dtype=tiles.dtype), torch.zeros_like(lse)
    for columns in tiles.column_tiles():
        for rows in tiles.row_tiles():
            x = tiles.product(rows, columns)
            target_logits[rows] += _at_targets(x, local[rows] - columns.start)
            peak = finite_peak(x)
            z = torch.exp(x - peak[:, None]) if with_mean else x.sub_(peak[:, None]).exp_()
            total = z.sum(dim=1)
            block_lse = peak + total.log()
            combined = torch.logaddexp(lse[rows], block_lse)
            if with_mean:
                whole = torch.where(combined == -torch.inf, 0, combined)  # nothing but −inf so far
                before, share = torch.exp(lse[rows] - whole), torch.exp(block_lse - whole)
                mean[rows] = mean[rows] * before + share * weighted_mean(z, x, total)
            lse[rows] = combined
    return lse, target_logits, mean


def _at_targets(x: Tensor, columns: Tensor) -> Tensor:
    """[T, K] x[t, columns[t, k]] where the tile holds that column, else 0."""
    inside = (columns >= 0) & (columns < x.shape[1])
    return torch.where(inside, x.gather(1, columns.clamp(0, x.shape[1] - 1)), 0)


def _add_at_targets(x: Tensor, columns: Tensor, values: Tensor) -> None:
    """x[t, columns[t, k]] += values[t, k] where the tile holds that column."""
    inside = (columns >= 0) & (columns < x.shape[1])
    x.scatter_add_(1, columns.clamp(0, x.shape[1] - 1), torch.where(inside, values, 0))


class HeadGradients:
    """Gradients of hidden states and of the LM head, summed up from those of tiles of logits.

    The LM head's goes to Megatron's `main_grad`, in its own precision, where there is one.
    """

    def __init__(self, tiles: Tiles, weight: Tensor, needs_hidden: bool, needs_weight: bool) -> None:
        self.tiles, self.weight = tiles, weight
        self._hidden = tiles.zeros_of_hidden() if needs_hidden else None
        self._main_grad: Tensor | None = getattr(weight, "main_grad", None) if needs_weight else None
        own = needs_weight and self._main_grad is None
        self._own = torch.zeros_like(weight, dtype=tiles.dtype) if own else None

    def add(self, rows: slice, columns: slice, grad: Tensor) -> None:
        """
        Args:
            grad: of this tile of hidden × weightᵀ / temperature; may be overwritten.
        """
        tiles = self.tiles
        grad = tiles.factor(grad if tiles.temperature == 1 else grad.mul_(1 / tiles.temperature))
        if self._hidden is not None:
            tiles.add_product(self._hidden[rows], grad, tiles.weight(columns))
        of_weight = self._own if self._main_grad is None else self._main_grad
        if of_weight is not None:
            tiles.add_product(of_weight[columns], grad.T, tiles.hidden(rows))

    def results(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients for autograd, in the precision of hidden states and weight."""
        hidden = None if self._hidden is None else self._hidden.to(self.tiles.hidden_dtype)
        if self._main_grad is not None:
            return hidden, self._stand_in()
        return hidden, None if self._own is None else self._own.to(self.weight.dtype)

    def _stand_in(self) -> Tensor:
        """A gradient of the weight's shape and no memory of its own, for a parameter whose `main_grad` has it already.

        Megatron's hook must fire, and then drops what it is given: so it is given the weight's own memory. Where the
        embedding is the same parameter (`zero_out_wgrad`), it adds what the two give: so these are zeros. As they are
        where there may be no such hook, and somebody might write to the gradient.
        """
        is_hooked = hasattr(self.weight, "grad_added_to_main_grad")
        if is_hooked:
            self.weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        if getattr(self.weight, "zero_out_wgrad", False) or not is_hooked:
            return self.weight.new_zeros(()).expand(self.weight.shape)
        return self.weight.detach()
