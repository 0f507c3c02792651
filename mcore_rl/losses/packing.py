"""A wrapper that computes any loss over a pack of sequences."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.distributed.collectives import group_rank, group_size
from mcore_rl.distributed.logprobs import next_token_logprobs_from_logits
from mcore_rl.distributed.packs import PackLayout, gather_context_parallel, slice_context_parallel
from mcore_rl.errors import ContractError
from mcore_rl.losses.common import LossFunction, reduce_metrics, reductions_of, takes_logprobs


class SequencePackingLossWrapper:
    """Applies `loss_fn` to a pack. The result is the sum of the losses of the pack's sequences (or pairs).

    A loss that `takes_logprobs` is called once for the whole pack. Its argument is the log-probabilities, unpacked into
    one row for each sequence. Any other loss (also a subclass that replaces `__call__`) is called once for each
    sequence, or for each pair (`loss_fn.rows_per_unit`), with the logits of that sequence or pair only. The metrics of
    these calls are combined as `loss_fn.metric_reductions` says.

    Under context parallelism every rank computes the loss of the whole pack, and gradients are summed over the
    ranks: divide the loss by the number of ranks (see `gather_context_parallel`).

    Args:
        loss_fn: the loss of unpacked rows.
        cu_seqlens_q: cumulative lengths [N + 1] of the sequences without padding; may equal `cu_seqlens_q_padded`.
        cu_seqlens_q_padded: cumulative lengths of the padded sequences; `cu_seqlens_q` if None.

    Raises:
        ContractError: the two tensors have different numbers of entries.
    """

    def __init__(self, loss_fn: LossFunction, cu_seqlens_q: Tensor, cu_seqlens_q_padded: Tensor | None = None) -> None:
        if cu_seqlens_q_padded is not None and cu_seqlens_q_padded.shape != cu_seqlens_q.shape:
            raise ContractError(
                f"cu_seqlens_q and cu_seqlens_q_padded must have the same shape, got {tuple(cu_seqlens_q.shape)} "
                f"and {tuple(cu_seqlens_q_padded.shape)}"
            )
        self.loss_fn = loss_fn
        self.cu_seqlens_q = cu_seqlens_q
        self.cu_seqlens_q_padded = cu_seqlens_q_padded

    def __call__(
        self,
        next_token_logits: Tensor,
        data: BatchedDataDict[Any],
        global_valid_seqs: Tensor | None,
        global_valid_toks: Tensor | None,
        vocab_parallel_rank: int | None = None,
        vocab_parallel_group: ProcessGroup | None = None,
        context_parallel_group: ProcessGroup | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return the loss and metrics of one pack. Logits are [1, T / CP, V / TP]; `data` has a row per sequence."""
        layout = self._layout(next_token_logits, data, context_parallel_group)
        counts = global_valid_seqs, global_valid_toks
        loss_fn: Any = self.loss_fn
        if takes_logprobs(loss_fn):
            logprobs, entropy = next_token_logprobs_from_logits(
                next_token_logits[0],
                data["input_ids"],
                layout,
                vocab_parallel_group,
                context_parallel_group,
                vocab_parallel_rank,
                with_entropy=loss_fn.needs_entropy,
            )
            loss_fn.refuse_nonfinite(logprobs, data)
            loss, metrics = loss_fn.from_logprobs(logprobs, data, *counts, entropy)
            return loss, metrics
        groups = accepted_groups(loss_fn, vocab_parallel_rank, vocab_parallel_group, context_parallel_group)
        return self._one_unit_at_a_time(next_token_logits[0], data, layout, counts, context_parallel_group, groups)

    def _layout(
        self, logits: Tensor, data: BatchedDataDict[Any], context_parallel_group: ProcessGroup | None
    ) -> PackLayout:
        cp_size = group_size(context_parallel_group)
        rows, width = data["input_ids"].shape
        if logits.ndim != 3 or logits.shape[0] != 1:
            raise ContractError(f"a pack's logits must be [1, T / CP, V / TP], got {tuple(logits.shape)}")
        if len(self.cu_seqlens_q) != rows + 1:
            raise ContractError(f"cu_seqlens_q has {len(self.cu_seqlens_q) - 1} sequences, but data has {rows} rows")
        layout = PackLayout.from_cu_seqlens(
            self.cu_seqlens_q, self.cu_seqlens_q_padded, logits.shape[1] * cp_size, cp_size
        )
        # The last sequence may include the pack's padding in both forms of the lengths; rows end at S.
        return PackLayout(tuple(min(n, width) for n in layout.lengths), layout.padded_lengths, layout.total, cp_size)

    def _one_unit_at_a_time(
        self,
        logits: Tensor,
        data: BatchedDataDict[Any],
        layout: PackLayout,
        counts: tuple[Tensor | None, Tensor | None],
        context_parallel_group: ProcessGroup | None,
        groups: dict[str, Any],
    ) -> tuple[Tensor, dict[str, Any]]:
        call: Callable[..., Any] = self.loss_fn
        size = getattr(self.loss_fn, "rows_per_unit", 1)
        if layout.num_sequences % size:
            raise ContractError(
                f"{type(self.loss_fn).__name__}: needs a multiple of {size} rows, but the pack has "
                f"{layout.num_sequences} rows"
            )
        total: Tensor = logits.new_zeros((), dtype=torch.float32)
        parts, samples = [], []
        for first in range(0, layout.num_sequences, size):
            rows = range(first, first + size)
            width = max(layout.padded_lengths[row] for row in rows)
            cut = [_logits_of_row(logits, layout, row, width, context_parallel_group) for row in rows]
            unit = rows_of_width(data.slice(first, first + size), [layout.lengths[row] for row in rows], width)
            loss, metrics = call(torch.stack(cut), unit, *counts, **groups)
            total = total + loss
            parts.append(metrics)
            samples.append(unit["sample_mask"].sum() if "sample_mask" in unit else size)
        return total, reduce_metrics(parts, samples, reductions_of(self.loss_fn))


def accepted_groups(
    loss_fn: Any, rank: int | None, vocab_group: ProcessGroup | None, context_group: ProcessGroup | None
) -> dict[str, Any]:
    """Return keyword arguments for `loss_fn`: the vocabulary rank and the groups, if it has parameters for them.

    Raises:
        ContractError: logits are split over a group for which `loss_fn` has no parameter.
    """
    parameters = inspect.signature(loss_fn).parameters.values()
    names = {parameter.name for parameter in parameters}
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    offered = {
        "vocab_parallel_rank": (rank, vocab_group),
        "vocab_parallel_group": (vocab_group, vocab_group),
        "context_parallel_group": (context_group, context_group),
    }
    taken = {name: value for name, (value, _) in offered.items() if takes_any or name in names}
    for name, (_, group) in offered.items():
        if name not in taken and group_size(group) > 1:
            raise ContractError(
                f"{type(loss_fn).__name__} must have a parameter {name}, because the logits are split over "
                f"{group_size(group)} ranks"
            )
    return taken


def _logits_of_row(
    logits: Tensor, layout: PackLayout, row: int, width: int, context_parallel_group: ProcessGroup | None
) -> Tensor:
    """Cut sequence number `row` out of a pack's logits [T / CP, Vp]; return [width / CP, Vp], padded with zeros."""
    cp_size, padded = layout.cp_size, layout.padded_lengths[row]
    start = int(layout.starts[row]) // cp_size
    cut = logits[start : start + padded // cp_size]
    if padded == width:
        return cut
    if cp_size == 1:
        return torch.nn.functional.pad(cut, (0, 0, 0, width - padded))
    # A zigzag layout of another width has its tokens on other ranks.
    whole = gather_context_parallel(cut, PackLayout((padded,), (padded,), padded, cp_size), context_parallel_group)
    whole = torch.nn.functional.pad(whole, (0, 0, 0, width - padded))
    return slice_context_parallel(
        whole, PackLayout((width,), (width,), width, cp_size), group_rank(context_parallel_group)
    )


def rows_of_width(data: BatchedDataDict[Any], lengths: list[int], width: int) -> BatchedDataDict[Any]:
    """Change every [n, S, …] entry to [n, width, …], in place, with zeros after each row's length."""
    full_width = data["input_ids"].shape[1]
    for key, value in data.items():
        if isinstance(value, Tensor) and value.ndim >= 2 and value.shape[1] == full_width:
            cut = value.new_zeros((len(lengths), width, *value.shape[2:]))
            for row, length in enumerate(lengths):
                cut[row, :length] = value[row, :length]
            data[key] = cut
    return data
