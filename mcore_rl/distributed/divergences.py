"""Divergences between two models' next-token distributions, over the whole vocabulary, without logits.

Both models' logits are computed from hidden states and LM heads in the same tiles of tokens × vocabulary. Each tile is
reduced to a few numbers per token, and computed again in the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_rl.distributed.collectives import all_reduce, group_rank
from mcore_rl.distributed.logprobs import (
    HeadGradients,
    Tiles,
    combine_over_vocabulary,
    linear_logprobs,
    shard_statistics,
    valid_columns,
)
from mcore_rl.distributed.packs import LossPositions
from mcore_rl.errors import ContractError


@dataclass(frozen=True)
class FinalHiddenStates:
    """The LM head, and those hidden states of a microbatch that predict the tokens with loss.

    The methods return values [N, S − 1, …] of whole rows, the same on every rank, with 0 for tokens that are not
    counted.

    microbatch: identity of the microbatch, which callers may use as a key of their data.
    logits: the two factors of the logits: the n hidden states on this context-parallel rank, and this tensor-parallel
        rank's rows of the LM head.
    inputs: for each of the n hidden states, the index of its input token in the flattened rows [N·S].
    vocab_size: size of the vocabulary without its padding.
    temperature: divides all logits, in addition to the temperature of a loss.
    """

    microbatch: Hashable
    logits: HiddenAndHead
    positions: LossPositions
    inputs: Int[Tensor, " n"]
    vocab_size: int
    temperature: float
    tensor_parallel_group: ProcessGroup | None
    context_parallel_group: ProcessGroup | None

    def logprobs_of(
        self, tokens: Int[Tensor, "rows seq k"], temperature: float, with_entropy: bool, normalize: bool = True
    ) -> tuple[Float[Tensor, "rows predicted k"], Float[Tensor, "rows predicted"] | None]:
        """Return the log-probabilities of `tokens`, and the entropies of the next-token distributions.

        `tokens` has K tokens for each *input* position. Without `with_entropy`, the entropies are None. Without
        `normalize`, return logits divided by the temperature in place of log-probabilities (see `linear_logprobs`).
        """
        logprobs, entropy = linear_logprobs(
            self.logits.hidden,
            self.logits.weight,
            tokens.flatten(0, 1)[self.inputs],
            self.tensor_parallel_group,
            self.vocab_size,
            temperature * self.temperature,
            with_entropy,
            normalize,
            softcap=self.logits.softcap,
        )
        return self._spread(logprobs), None if entropy is None else self._spread(entropy)

    def divergences(
        self, teacher: HiddenAndHead, vocab_size: int, temperature: float, js_beta: float | None
    ) -> Divergences:
        """Return the divergences between `teacher` and this model over the first `vocab_size` tokens."""
        forward_kl, reverse_kl, js = linear_divergences(
            self.logits, teacher, self.tensor_parallel_group, vocab_size, temperature * self.temperature, js_beta
        )
        return Divergences(self._spread(forward_kl), self._spread(reverse_kl), None if js is None else self._spread(js))

    def _spread(self, values: Tensor) -> Tensor:
        return self.positions.spread(values, self.context_parallel_group)


@dataclass(frozen=True)
class HiddenAndHead:
    """Logits as an unevaluated product: hidden [T, H] × weight [Vp, H]ᵀ.

    hidden: hidden states; all ranks that share the vocabulary have the same. weight: this rank's rows of the LM head.
    softcap: bound of the logits (see `linear_logprobs`); None for no bound.
    """

    hidden: Tensor
    weight: Tensor
    softcap: float | None = None

    def tiles(self, columns: int, temperature: float) -> Tiles:
        """Return the product of the first `columns` rows of the head, in tiles."""
        return Tiles(self.hidden, self.weight, columns, temperature, softcap=self.softcap)


class Divergences(NamedTuple):
    """Divergences between the teacher's distribution p and the student's q, in nats, [T] each."""

    forward_kl: Tensor
    """KL(p ‖ q)"""
    reverse_kl: Tensor
    """KL(q ‖ p)"""
    js: Tensor | None
    """Jensen–Shannon divergence of p and q: β·KL(p ‖ m) + (1 − β)·KL(q ‖ m), with m = β·p + (1 − β)·q."""


def linear_divergences(
    student: HiddenAndHead,
    teacher: HiddenAndHead,
    group: ProcessGroup | None = None,
    vocab_size: int | None = None,
    temperature: float = 1.0,
    js_beta: float | None = None,
) -> Divergences:
    """Compute divergences between softmax(student / temperature) and softmax(teacher / temperature) for each token.

    The Jensen–Shannon divergence is that of arXiv:2306.13649, eq. 1. Sums are computed in fp32 (fp64 for fp64 hidden
    states). The forward pass communicates a few numbers per token by an all-gather and an all-reduce; the backward pass
    does not communicate. Only the student has a gradient. The gradient of its hidden states covers only this shard of
    the vocabulary (`gather_hidden_states` sums it over the ranks). The weight's gradient is added directly to a
    Megatron `weight.main_grad`.

    Args:
        vocab_size: number of tokens to compare, from the start of the vocabulary; later rows of the heads are ignored.
        js_beta: β, between 0 and 1; if None, `js` is None.

    Raises:
        ContractError: shapes do not fit, or the temperature or β is out of range.
    """
    sizes = [(tuple(x.hidden.shape), tuple(x.weight.shape)) for x in (student, teacher)]
    (tokens, width), (rows, columns) = sizes[0]
    (teacher_tokens, teacher_width), (teacher_rows, teacher_columns) = sizes[1]
    if (tokens, rows, width, teacher_width) != (teacher_tokens, teacher_rows, columns, teacher_columns):
        raise ContractError(
            "hidden states must be [T, H] and LM heads [Vp, H], with the same T and Vp in student and teacher; "
            f"the student has {sizes[0]}, the teacher {sizes[1]}"
        )
    if temperature <= 0:
        raise ContractError(f"temperature must be positive, got {temperature}")
    if js_beta is not None and not 0 < js_beta < 1:
        raise ContractError(f"js_beta must be between 0 and 1, got {js_beta}")
    forward_kl, reverse_kl, js = _LinearDivergences.apply(
        student.hidden,
        student.weight,
        student.softcap,
        HiddenAndHead(teacher.hidden.detach(), teacher.weight.detach(), teacher.softcap),
        group,
        valid_columns(rows, group_rank(group), vocab_size),
        temperature,
        js_beta,
    )
    return Divergences(forward_kl, reverse_kl, None if js_beta is None else js)


class _LinearDivergences(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        softcap: float | None,
        teacher: HiddenAndHead,
        group: ProcessGroup | None,
        columns: int,
        temperature: float,
        js_beta: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        student = HiddenAndHead(hidden, weight, softcap)
        pair = _Pair(*(model.tiles(columns, temperature) for model in (student, teacher)))
        lse = pair.log_sum_exp(group)
        forward_kl, reverse_kl, p_to_m, q_to_m = sums = hidden.new_zeros(4, len(hidden), dtype=pair.dtype)
        for at in pair.column_tiles():
            for rows in pair.row_tiles():
                log_q, log_p = pair.logprobs(rows, at, lse)
                q, p = log_q.exp(), log_p.exp()
                if js_beta is not None:
                    log_m = _log_mixture(log_p, log_q, js_beta)
                    p_to_m[rows] += torch.linalg.vecdot(p, log_p - log_m)
                    q_to_m[rows] += torch.linalg.vecdot(q, log_q - log_m)
                log_ratio = log_p.sub_(log_q)
                forward_kl[rows] += torch.linalg.vecdot(p, log_ratio)
                reverse_kl[rows] -= torch.linalg.vecdot(q, log_ratio)
        forward_kl, reverse_kl, p_to_m, q_to_m = all_reduce(sums, group)
        ctx.save_for_backward(hidden, teacher.hidden, lse, reverse_kl, q_to_m)
        ctx.weight, ctx.softcap, ctx.teacher_weight, ctx.teacher_softcap = (
            weight,
            softcap,
            teacher.weight,
            teacher.softcap,
        )
        ctx.columns, ctx.temperature, ctx.js_beta = columns, temperature, js_beta
        beta = 0.0 if js_beta is None else js_beta
        return forward_kl, reverse_kl.clone(), beta * p_to_m + (1 - beta) * q_to_m

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient with respect to z = hidden · weightᵀ / temperature:

        q − p for the forward KL, q·(log q/p − KL(q ‖ p)) for the reverse KL,
        (1 − β)·q·(log q/m − KL(q ‖ m)) for the Jensen–Shannon divergence.

        p is the teacher's distribution, q the student's, and m = β·p + (1 − β)·q.
        """
        hidden, teacher_hidden, lse, reverse_kl, q_to_m = ctx.saved_tensors
        models = (
            HiddenAndHead(hidden, ctx.weight, ctx.softcap),
            HiddenAndHead(teacher_hidden, ctx.teacher_weight, ctx.teacher_softcap),
        )
        pair = _Pair(*(model.tiles(ctx.columns, ctx.temperature) for model in models))
        student = pair.student
        gradients = HeadGradients(student, ctx.weight, *ctx.needs_input_grad[:2])
        of_forward, of_reverse, of_js = (g[:, None] for g in grads)
        for at in pair.column_tiles():
            for rows in pair.row_tiles():
                log_q, log_p = pair.logprobs(rows, at, lse)
                slope = None
                if student.softcap is not None:  # the capped products
                    slope = student.slope((log_q + lse[0, rows, None]).mul_(ctx.temperature))
                factor = of_forward[rows] + of_reverse[rows] * (log_q - log_p - reverse_kl[rows, None])
                if ctx.js_beta is not None:
                    log_m = _log_mixture(log_p, log_q, ctx.js_beta)
                    factor += (1 - ctx.js_beta) * of_js[rows] * (log_q - log_m - q_to_m[rows, None])
                grad = factor.mul_(log_q.exp_()).sub_(log_p.exp_().mul_(of_forward[rows]))
                grad = student.tempered(grad)
                gradients.add(rows, at, grad if slope is None else grad.mul_(slope))
        return (*gradients.results(), *(None,) * 6)


class _Pair:
    """The student's and the teacher's logits, computed in tiles of the same tokens and columns."""

    def __init__(self, student: Tiles, teacher: Tiles) -> None:
        self.student, self.teacher, self.dtype = student, teacher, student.dtype
        self.row_tiles, self.column_tiles = student.row_tiles, student.column_tiles

    def log_sum_exp(self, group: ProcessGroup | None) -> Tensor:
        """Return log Σ exp of the student's and of the teacher's logits over the whole vocabulary, [2, T]."""
        both = []
        for tiles in (self.student, self.teacher):
            nothing = torch.empty(tiles.count, 0, dtype=torch.long, device=tiles.device)
            both.append(shard_statistics(tiles, nothing, with_entropy=False)[0].to(self.dtype))
        lse = torch.cat(both)
        return combine_over_vocabulary(lse, lse.new_empty(0, len(lse)), torch.zeros_like(lse), group)[0].view(2, -1)

    def logprobs(self, rows: slice, columns: slice, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Return log q and log p of a tile, as two tensors that the caller may overwrite."""
        log_q = self.student.logits(rows, columns).sub_(lse[0, rows, None])
        log_p = self.teacher.logits(rows, columns).to(self.dtype).sub_(lse[1, rows, None])
        return log_q, log_p


def _log_mixture(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """Return log(β·p + (1 − β)·q), accurate even if exp(log p) or exp(log q) underflows."""
    return torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
