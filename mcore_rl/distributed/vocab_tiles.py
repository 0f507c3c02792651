"""Tiles of the products of hidden states and the LM head's shard, and what is summed over them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

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


# (tokens, vocabulary columns) of a tile that fits a CPU's cache, or keeps a GPU busy. On an H200, 4096 × 8192 is 3
# to 7 % faster and takes 100 MB more.
TILE_SHAPE = {"cpu": (512, 4096), "cuda": (4096, 4096)}


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

    Both functions divide the products by the temperature of the `Tiles`. `gradient` may overwrite the products. With a
    soft cap, these are the capped products; the caller multiplies the gradient by `Tiles.slope`.

    add: adds the tile's logits to the `SoftmaxSums` of its rows, in place. The field `moment` is updated only if the
        last argument of `add` is True.
    gradient: returns the loss's gradient with respect to the products, in the accumulation type or in
        `Tiles.factor_dtype`.
    add_overwrites: whether `add` overwrites the products.
    """

    add: Callable[[Tensor, SoftmaxSums, Tensor, int, Tiles, bool], None]
    gradient: Callable[[Tensor, TokenGradients, int, Tiles], Tensor]
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
        x = self.multiply(self.hidden(rows), self.weight(columns).T)
        return x if self.softcap is None else x.div_(self.softcap).tanh_().mul_(self.softcap)

    def slope(self, products: Tensor) -> Tensor | None:
        """Return the derivative of the soft cap, 1 − (y / softcap)² at capped products y; None without soft cap."""
        if self.softcap is None:
            return None
        # Tokens that are not kept have the product −inf. Their slope is 0, so that their gradient of 0 remains.
        return products.div(self.softcap).square_().neg_().add_(1).clamp_(min=0)

    def all_columns(self, rows: slice) -> Tensor:
        """Return the given rows of hidden × weightᵀ, all columns. A weight of another dtype is converted in tiles."""
        if self.factor_dtype == self._weight.dtype:
            return self.product(rows, slice(0, self.columns))
        return torch.cat([self.product(rows, columns) for columns in list(self.column_tiles()) or [slice(0)]], dim=1)

    def logits(self, rows: slice, columns: slice) -> Tensor:
        return self.tempered(self.product(rows, columns))

    def tempered(self, x: Tensor) -> Tensor:
        """Divide `x` (products, or gradients of logits) by the temperature, in place; return it."""
        return x if self.temperature == 1 else x.div_(self.temperature)

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
