"""Common code of all losses: interface, masks, masked means, log-probabilities, metrics; and the NLL loss."""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.distributed.collectives import group_size
from mcore_rl.distributed.logprobs import next_token_logprobs_from_logits
from mcore_rl.distributed.packs import PackLayout
from mcore_rl.errors import ContractError
from mcore_rl.losses.options import LossOptions


class LossType(enum.Enum):
    """The count by which a loss is divided: valid tokens or valid sequences of the global batch."""

    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


LossT = TypeVar("LossT")

Reduction = Literal["sum", "mean", "min", "max"]
"""How a metric's values from several calls of the loss are combined. A mean is weighted by each call's number of valid
samples."""


@runtime_checkable
class LossFunction(Protocol):
    """A function that computes the loss of one microbatch, divided by a count of the whole global batch.

    The policy counts valid tokens and sequences over the whole global batch (all microbatches, all data-parallel
    ranks) and passes both counts to the loss. The loss divides by the count that its `loss_type` names, so that the
    losses of the microbatches can be summed.

    A loss may have four more attributes:

    prepare: function that the policy calls with this rank's microbatches before the model computes them.
    metric_reductions: for each metric that must not be summed, its `Reduction`.
    rows_per_unit: number of neighbouring rows that packing must not separate (2 for pairs; default 1).
    reads_values: True if the loss reads a reward head's output at every token, [B, S], not only at the last token.
    """

    loss_type: LossType

    def __call__(
        self,
        next_token_logits: torch.Tensor,
        data: BatchedDataDict[Any],
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the scalar loss and metrics (numbers, or tensors of one element, with any names).

        Args:
            next_token_logits: [B, S, V]; entry (b, i) predicts token i + 1 of row b. Losses that can work on shards
                also take `vocab_parallel_rank`, `vocab_parallel_group` (logits contain this rank's columns) and
                `context_parallel_group` (logits contain this rank's zigzag tokens). For a loss without one of these
                groups, a policy gathers the logits over it and prints the memory that they need. Under context
                parallelism every rank computes the whole loss; `packs.gather_context_parallel` describes the
                consequence for gradients.
            data: whole rows: `input_ids`, `token_mask` [B, S], `sample_mask` [B], and the loss's own entries.
            global_valid_seqs: Σ sample_mask over the global batch; Σ sample_mask · sample_weights if there is a column
                `sample_weights` (see `sample_weights_of`).
            global_valid_toks: Σ token_mask[:, 1:] · sample_mask over the global batch.
        """
        ...


EPSILON = 1e-8
LARGEST_EXPONENT = 80.0
"""Upper bound of x before exp(x) is computed, so that the result is finite in fp32."""


def masked_sum(
    values: Float[Tensor, "*shape"], mask: Float[Tensor, "*shape"], dim: int | None = None
) -> Float[Tensor, "*rest"]:
    """Return Σ values · mask over `dim`, or over all dimensions. Values where the mask is 0 may be −inf or NaN."""
    total = torch.where(mask > 0, values * mask, 0)
    return total.sum() if dim is None else total.sum(dim)


def masked_mean(
    values: Float[Tensor, "*shape"],
    mask: Float[Tensor, "*shape"],
    dim: int | None = None,
    global_normalization_factor: Tensor | float | int | None = None,
) -> Float[Tensor, "*rest"]:
    """Return `masked_sum` / (n + 1e-8), where n is `global_normalization_factor` or, if that is None, Σ mask."""
    if global_normalization_factor is None:
        global_normalization_factor = mask.sum() if dim is None else mask.sum(dim)
    total = masked_sum(values, mask, dim)
    if isinstance(global_normalization_factor, Tensor):
        global_normalization_factor = global_normalization_factor.to(total.dtype)
    return total / (global_normalization_factor + EPSILON)


def sample_mask_of(data: Mapping[str, Any], like: Tensor) -> Float[Tensor, " batch"]:
    """Return the sample mask [B], in the precision of `like`."""
    return data["sample_mask"].to(like)


def sample_weights_of(data: Mapping[str, Any], like: Tensor) -> Float[Tensor, " batch"]:
    """Return the weight of each row [B] in means over samples, in the precision of `like`; 0 if `sample_mask` is 0.

    A sample may have several rows. Its rows then have weights that add up to 1 (the column `sample_weights`): the
    row's tokens that carry loss, divided by those of all rows of the sample. Without this column, each row is a sample.
    """
    mask = sample_mask_of(data, like)
    return mask * data["sample_weights"].to(like) if "sample_weights" in data else mask


def token_mask_of(data: Mapping[str, Any], like: Tensor) -> Float[Tensor, "batch predicted"]:
    """Return a mask [B, S − 1] of the predicted tokens that carry loss; it is 0 in rows whose `sample_mask` is 0."""
    return data["token_mask"][:, 1:].to(like) * sample_mask_of(data, like)[:, None]


def counts_of(data: Mapping[str, Any], mask: Tensor) -> dict[str, Tensor]:
    """Return two metrics: the number of tokens where `mask` is 1, and the number of valid samples."""
    return {"num_unmasked_tokens": mask.sum(), "num_valid_samples": sample_mask_of(data, mask).sum()}


def require_keys(data: Mapping[str, Any], keys: Iterable[str], loss: object) -> None:
    """Raise ContractError if `data` lacks one of the `keys`; the error lists every missing key."""
    if missing := [key for key in keys if key not in data]:
        raise ContractError(
            f"{type(loss).__name__}: data lacks {', '.join(missing)}; its keys are {', '.join(sorted(data))}"
        )


def require_shape(name: str, tensor: Tensor, shape: tuple[int, ...], loss: object) -> None:
    if tuple(tensor.shape) != shape:
        raise ContractError(f"{type(loss).__name__}: {name} must be {shape}, got {tuple(tensor.shape)}")


def require_count(name: str, count: Tensor | None, loss: object) -> Tensor:
    """Return `count` as a scalar tensor; raise ContractError if it is not a tensor of one element."""
    if count is None or not isinstance(count, Tensor) or count.numel() != 1:
        raise ContractError(f"{type(loss).__name__}: {name} must be a tensor of one element, got {count!r}")
    return count.reshape(())


def locate_nonfinite(
    logprobs: Float[Tensor, "batch predicted"], mask: Float[Tensor, "batch predicted"]
) -> tuple[int, int] | None:
    """Return the row and token position of the first unmasked log-probability that is not finite, or None.

    The host waits for the device.

    Args:
        logprobs: next-token log-probabilities [B, S − 1]; column t scores the token at position t + 1.
    """
    bad = (~torch.isfinite(logprobs) & (mask > 0)).nonzero()
    return None if len(bad) == 0 else (int(bad[0, 0]), int(bad[0, 1]) + 1)


class LogprobLoss(LossFunction):
    """A loss that is a function of next-token log-probabilities. Subclasses implement `from_logprobs`.

    If the loss is called with logits, it first computes the log-probabilities (over vocabulary and context shards).
    On the CPU, an unmasked log-probability that is not finite raises an error with its row and position. On a GPU this
    check is omitted, because it would wait for the device; the caller can use `locate_nonfinite`.

    A policy computes the log-probabilities itself: it checks `takes_logprobs` and then calls `from_logprobs`.
    """

    needs_entropy = False
    reads_counted_tokens_only = False
    """Whether `from_logprobs` reads only the tokens of `tokens_read`. A subclass does not inherit the value.

    If it is True, a policy passes 0 for the log-probabilities of all other tokens, and does not compute their logits.
    """
    required_keys: tuple[str, ...] = ("input_ids", "token_mask", "sample_mask")

    def __call__(
        self,
        next_token_logits: Any = None,
        data: Any = None,
        global_valid_seqs: Tensor | None = None,
        global_valid_toks: Tensor | None = None,
        vocab_parallel_rank: int | None = None,
        vocab_parallel_group: ProcessGroup | None = None,
        context_parallel_group: ProcessGroup | None = None,
        *options: Any,
        next_token_logprobs: Tensor | None = None,
        **named_options: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Compute the loss from logits [B, S / CP, V / TP], or from `next_token_logprobs` [B, S − 1].

        Under context parallelism every rank computes the whole loss, and gradients are summed over the ranks:
        divide the loss by the number of ranks (see `gather_context_parallel`).

        Args:
            options, named_options: further arguments, passed on to `from_logprobs`.

        Raises:
            ContractError: a key is missing, or a shape or count is wrong.
            ValueError: an unmasked log-probability is not finite (checked on the CPU only).
        """
        if data is None or isinstance(data, Tensor) or (next_token_logits is None) == (next_token_logprobs is None):
            raise ContractError(
                f"{type(self).__name__}: needs data, and either next_token_logits or next_token_logprobs"
            )
        entropy = None
        if next_token_logprobs is None:
            next_token_logprobs, entropy = self.next_token_logprobs(
                next_token_logits, data, vocab_parallel_rank, vocab_parallel_group, context_parallel_group
            )
        else:
            self.refuse_nonfinite(next_token_logprobs, data)
        return self.from_logprobs(
            next_token_logprobs, data, global_valid_seqs, global_valid_toks, entropy, *options, **named_options
        )

    def next_token_logprobs(
        self,
        next_token_logits: Tensor,
        data: BatchedDataDict[Any],
        vocab_parallel_rank: int | None = None,
        vocab_parallel_group: ProcessGroup | None = None,
        context_parallel_group: ProcessGroup | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return log-probabilities [B, S − 1] (and entropies, if this loss needs them) of unpacked logits."""
        require_keys(data, self.required_keys, self)
        layout = rows_layout(next_token_logits, data, context_parallel_group)
        logprobs, entropy = next_token_logprobs_from_logits(
            next_token_logits.flatten(0, 1),
            data["input_ids"],
            layout,
            vocab_parallel_group,
            context_parallel_group,
            vocab_parallel_rank,
            with_entropy=self.needs_entropy,
        )
        self.refuse_nonfinite(logprobs, data)
        return logprobs, entropy

    def from_logprobs(
        self,
        next_token_logprobs: Tensor,
        data: BatchedDataDict[Any],
        global_valid_seqs: Tensor | None,
        global_valid_toks: Tensor | None,
        entropy: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return the loss and metrics, given log-probabilities [B, S − 1]: entry (b, t) scores `input_ids[b, t + 1]`.

        `entropy` [B, S − 1] has the entropy of each next-token distribution; it is given if `needs_entropy` is True.
        """
        raise NotImplementedError

    def tokens_read(self, data: Mapping[str, Any]) -> Float[Tensor, "batch predicted"]:
        """Return a mask [B, S − 1] of the predicted tokens that the loss reads; default: the tokens that carry loss."""
        return token_mask_of(data, data["token_mask"])

    def check(self, logprobs: Tensor, data: BatchedDataDict[Any]) -> None:
        """Raise ContractError for missing keys and for masks that do not fit the log-probabilities."""
        require_keys(data, self.required_keys, self)
        rows, columns = logprobs.shape
        require_shape("token_mask", data["token_mask"], (rows, columns + 1), self)
        require_shape("sample_mask", data["sample_mask"], (rows,), self)

    def refuse_nonfinite(self, logprobs: Tensor, data: BatchedDataDict[Any]) -> None:
        if logprobs.is_cuda:
            return
        if where := locate_nonfinite(logprobs.detach(), token_mask_of(data, logprobs)):
            row, position = where
            raise ValueError(
                f"{type(self).__name__}: the log-probability of row {row}, position {position} must be finite, "
                f"got {logprobs[row, position - 1].item()}"
            )


def reads_options(options: type[LossOptions]) -> Callable[[type[LossT]], type[LossT]]:
    """Return a decorator that gives a loss class a read-only attribute for each option in `options`, and each alias.

    Code ported from NeMo RL can then read `loss_fn.ratio_clip_min` instead of `loss_fn.options.ratio_clip_min`.
    """
    names = {**options.aliases, **{field.name: field.name for field in fields(options)}}

    def with_attributes(kind: type[LossT]) -> type[LossT]:
        for name, option in names.items():
            setattr(kind, name, property(attrgetter(f"options.{option}")))
        return kind

    return with_attributes


def takes_logprobs(loss_fn: Any) -> bool:
    """Return whether a policy may call `from_logprobs` of `loss_fn` instead of calling `loss_fn` with logits.

    The result is False if the loss has its own `__call__` or `next_token_logprobs`, which may compute something else.
    """
    kind = type(loss_fn)
    return (
        isinstance(loss_fn, LogprobLoss)
        and kind.__call__ is LogprobLoss.__call__
        and kind.next_token_logprobs is LogprobLoss.next_token_logprobs
        and "next_token_logprobs" not in vars(loss_fn)
    )


def takes_hidden_states(loss_fn: Any) -> bool:
    """Return whether a policy may call `from_hidden_states` of `loss_fn` instead of calling `loss_fn` with logits.

    It may if the class of `loss_fn` itself sets `takes_hidden_states = True`; the value of a base class is ignored.
    """
    return bool(vars(type(loss_fn)).get("takes_hidden_states", False))


def reads_counted_tokens_only(loss_fn: Any) -> bool:
    """Return whether the loss states that it reads only the tokens in its mask `tokens_read`.

    The class of `loss_fn` states this by `reads_counted_tokens_only = True`; a value in a base class is ignored.
    """
    return bool(vars(type(loss_fn)).get("reads_counted_tokens_only", False))


def rows_layout(logits: Tensor, data: Mapping[str, Any], context_parallel_group: ProcessGroup | None) -> PackLayout:
    """Return the `PackLayout` of unpacked logits [B, S' / CP, Vp]: the rows of `input_ids` [B, S] are padded to S' ≥ S.

    Raises:
        ContractError: the logits do not have the shape that `input_ids` requires.
    """
    rows, width = data["input_ids"].shape
    cp_size = group_size(context_parallel_group)
    if logits.ndim != 3 or logits.shape[0] != rows or logits.shape[1] * cp_size < width:
        raise ContractError(
            f"next_token_logits {tuple(logits.shape)} must be [B, S / CP, V / TP] for input_ids [{rows}, {width}] "
            f"and context parallel size {cp_size}"
        )
    padded = logits.shape[1] * cp_size
    return PackLayout((width,) * rows, (padded,) * rows, rows * padded, cp_size)


def reductions_of(loss_fn: Any) -> Mapping[str, Reduction]:
    """Return the loss's `metric_reductions`: the reduction of each metric that must not be summed; {} for none."""
    declared: Mapping[str, Reduction] = getattr(loss_fn, "metric_reductions", {})
    if unknown := {name: kind for name, kind in declared.items() if kind not in _REDUCE}:
        raise ContractError(
            f"{type(loss_fn).__name__}.metric_reductions: {unknown} is not supported; supported are "
            f"{', '.join(map(repr, _REDUCE))}"
        )
    return declared


def reduce_metrics(
    parts: Sequence[Mapping[str, Any]], samples: Sequence[Any], reductions: Mapping[str, Reduction]
) -> dict[str, Any]:
    """Reduce the metrics of several calls of a loss to one dictionary.

    Args:
        parts: metrics of each call.
        samples: number of valid samples of each call. Means are weighted by these numbers.
        reductions: reduction of each metric that must not be summed.
    """
    names = dict.fromkeys(name for part in parts for name in part)
    return {
        name: _REDUCE[reductions.get(name, "sum")](
            [part[name] for part in parts if name in part],
            [count for part, count in zip(parts, samples, strict=True) if name in part],
        )
        for name in names
    }


def over_steps(steps: Sequence[Mapping[str, float]], reductions: Mapping[str, Reduction]) -> dict[str, float]:
    """Reduce each metric over `steps`: to its minimum or maximum if `reductions` says so, otherwise to its mean."""
    values: dict[str, list[float]] = {}
    for metrics in steps:
        for name, value in metrics.items():
            values.setdefault(name, []).append(value)
    return {
        name: min(found) if kind == "min" else max(found) if kind == "max" else sum(found) / len(found)
        for name, found in values.items()
        for kind in [reductions.get(name)]
    }


def over_updates(updates: Sequence[Mapping[str, float]], reductions: Mapping[str, Reduction]) -> dict[str, float]:
    """Return the metrics of a step: of its single update, or of its several `updates` combined by `over_steps`.

    The loss and gradient norm of each of several updates are added, as `loss/update_1`, `grad_norm/update_1` and so on.
    """
    if len(updates) == 1:
        return dict(updates[0])
    of_each = {f"{name}/update_{n}": one[name] for n, one in enumerate(updates, 1) for name in ("loss", "grad_norm")}
    return over_steps(updates, reductions) | of_each


def _sum(values: list[Any], samples: list[Any]) -> Any:
    return functools.reduce(operator.add, values)


def _mean(values: list[Any], samples: list[Any]) -> Any:
    """Return the mean of `values` weighted by `samples`; 0 if all weights are 0, even if a value is NaN."""
    counted = [(torch.as_tensor(v), torch.as_tensor(n)) for v, n in zip(values, samples, strict=True)]
    total = sum(torch.where(n > 0, v * n, 0) for v, n in counted)
    return total / sum(n for _, n in counted).clamp(min=torch.finfo(torch.float32).tiny)  # type: ignore[union-attr]


def _min(values: list[Any], samples: list[Any]) -> Tensor:
    return functools.reduce(torch.minimum, map(torch.as_tensor, values))


def _max(values: list[Any], samples: list[Any]) -> Tensor:
    return functools.reduce(torch.maximum, map(torch.as_tensor, values))


_REDUCE = {"sum": _sum, "mean": _mean, "min": _min, "max": _max}


class LossBySource(LogprobLoss):
    """The loss `loss_fn`, with additional metrics `SOURCE/…`: each covers only the samples of one source of a mixture.

    The data must have a column `source` [B] with the number of each row's source.

    Args:
        loss_fn: a loss for which the functions `takes_logprobs` and `reads_counted_tokens_only` return True.
        counts: map from each source's name to its numbers of valid sequences and valid tokens in the global batch. The
            n-th entry belongs to source number n. A source without valid sequences gets no metrics.
    """

    reads_counted_tokens_only = True

    def __init__(self, loss_fn: LogprobLoss, counts: Mapping[str, tuple[float, float]]) -> None:
        self.loss_fn, self.counts = loss_fn, counts
        self.loss_type, self.needs_entropy = loss_fn.loss_type, loss_fn.needs_entropy
        self.required_keys = (*loss_fn.required_keys, "source")
        self.rows_per_unit = getattr(loss_fn, "rows_per_unit", 1)
        known = reductions_of(loss_fn)
        self.metric_reductions = {
            **known,
            **{f"{source}/{name}": kind for source in counts for name, kind in known.items()},
        }

    def tokens_read(self, data: Mapping[str, Any]) -> Float[Tensor, "batch predicted"]:
        return self.loss_fn.tokens_read(data)

    def from_logprobs(
        self,
        next_token_logprobs: Float[Tensor, "batch predicted"],
        data: BatchedDataDict[Any],
        global_valid_seqs: Tensor | None,
        global_valid_toks: Tensor | None,
        entropy: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        whole = next_token_logprobs, data, global_valid_seqs, global_valid_toks, entropy
        loss, metrics = self.loss_fn.from_logprobs(*whole)
        metrics = dict(metrics)
        detached = next_token_logprobs.detach()
        with torch.no_grad():
            for number, (source, counts) in enumerate(self.counts.items()):
                # Its rows only: all sources together compute the loss once more, however many there are.
                rows = (data["source"] == number).nonzero()[:, 0].tolist()
                if counts[0] and rows:
                    seqs, toks = (detached.new_full((), count) for count in counts)
                    of_rows = None if entropy is None else entropy[rows]
                    own = data.select_indices(rows), seqs, toks, of_rows
                    _, of_source = self.loss_fn.from_logprobs(detached[rows], *own)
                    metrics |= {f"{source}/{name}": value for name, value in of_source.items()}
        return loss, metrics


class NLLLoss(LogprobLoss):
    """Negative log-likelihood: −Σ logprob / global_valid_toks over the tokens that carry loss."""

    reads_counted_tokens_only = True
    loss_type = LossType.TOKEN_LEVEL

    def from_logprobs(
        self,
        next_token_logprobs: Float[Tensor, "batch predicted"],
        data: BatchedDataDict[Any],
        global_valid_seqs: Tensor | None,
        global_valid_toks: Tensor | None,
        entropy: Tensor | None = None,
        dpo_loss: bool = False,
        dpo_average_log_probs: bool = False,
    ) -> tuple[Float[Tensor, "*batch"], dict[str, Any]]:
        """Return the mean NLL per token; with `dpo_loss`, the NLL of each sequence, [B], which is 0 for masked samples.

        The NLL of a sequence is the sum over its tokens; with `dpo_average_log_probs`, the mean.
        """
        self.check(next_token_logprobs, data)
        mask = token_mask_of(data, next_token_logprobs)
        if dpo_loss:
            loss = -masked_sum(next_token_logprobs, mask, dim=-1)
            if dpo_average_log_probs:
                loss = loss / mask.sum(-1).clamp(min=1)
        else:
            tokens = require_count("global_valid_toks", global_valid_toks, self)
            loss = masked_mean(-next_token_logprobs, mask, global_normalization_factor=tokens)
        return loss, {"loss": loss.detach(), **counts_of(data, mask)}


class DFTLoss(LogprobLoss):
    """Dynamic fine-tuning (arXiv:2508.05629): −Σ p·log p / global_valid_toks over the tokens that carry loss.

    The weight p, a token's probability, has no gradient. The metric `nll_loss` is the mean of −log p.
    """

    reads_counted_tokens_only = True
    loss_type = LossType.TOKEN_LEVEL

    def from_logprobs(
        self,
        next_token_logprobs: Float[Tensor, "batch predicted"],
        data: BatchedDataDict[Any],
        global_valid_seqs: Tensor | None,
        global_valid_toks: Tensor | None,
        entropy: Tensor | None = None,
    ) -> tuple[Float[Tensor, ""], dict[str, Any]]:
        nll, metrics = NLLLoss().from_logprobs(next_token_logprobs, data, global_valid_seqs, global_valid_toks)
        weighted = next_token_logprobs.detach().exp() * next_token_logprobs
        loss, _ = NLLLoss().from_logprobs(weighted, data, global_valid_seqs, global_valid_toks)
        return loss, {**metrics, "loss": loss.detach(), "nll_loss": nll.detach()}
