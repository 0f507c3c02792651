"""A wrapper that computes any loss over a pack of sequences."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.distributed.collectives import all_gather_forward_split_backward, group_rank, group_size
from mcore_rl.distributed.logprobs import next_token_logprobs_from_logits
from mcore_rl.distributed.packs import PackLayout, gather_context_parallel, slice_context_parallel
from mcore_rl.errors import ContractError
from mcore_rl.losses.common import LossFunction, reduce_metrics, reductions_of, takes_logprobs


class SequencePackingLossWrapper:
    """Applies `loss_fn` to a pack. The result is the sum of the losses of the pack's sequences (or pairs).

    A loss that `takes_logprobs` is called once for the whole pack. Its argument is the log-probabilities, unpacked into
    one row for each sequence. Any other loss (also a subclass that replaces `__call__`) is called once for each
    sequence, or for each pair (`loss_fn.rows_per_unit`), with the logits of that sequence or pair only. The logits are
    gathered over each parallel group for which the loss has no parameter. The metrics of these calls are combined as
    `loss_fn.metric_reductions` says.

    Under context parallelism every rank computes the loss of the whole pack, and gradients are summed over the
    ranks: divide the loss by the number of ranks (see `gather_context_parallel`).

    Args:
        loss_fn: the loss of unpacked rows.
        cu_seqlens_q: cumulative lengths [N + 1] of the sequences without padding; may equal `cu_seqlens_q_padded`.
        cu_seqlens_q_padded: cumulative lengths of the padded sequences; `cu_seqlens_q` if None.
        vocab_size: number of columns of whole logits, V. If it is given, a loss that receives logits of the whole
            vocabulary does not receive the padding of the vocabulary.

    Raises:
        ContractError: the two tensors have different numbers of entries.
    """

    def __init__(
        self,
        loss_fn: LossFunction,
        cu_seqlens_q: Tensor,
        cu_seqlens_q_padded: Tensor | None = None,
        vocab_size: int | None = None,
    ) -> None:
        if cu_seqlens_q_padded is not None and cu_seqlens_q_padded.shape != cu_seqlens_q.shape:
            raise ContractError(
                f"cu_seqlens_q and cu_seqlens_q_padded must have the same shape, got {tuple(cu_seqlens_q.shape)} "
                f"and {tuple(cu_seqlens_q_padded.shape)}"
            )
        self.loss_fn = loss_fn
        self.cu_seqlens_q = cu_seqlens_q
        self.cu_seqlens_q_padded = cu_seqlens_q_padded
        self.vocab_size = vocab_size

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
        shards = LogitShards(vocab_parallel_rank, vocab_parallel_group, context_parallel_group, self.vocab_size)
        return self._one_unit_at_a_time(next_token_logits[0], data, layout, counts, shards)

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
        shards: LogitShards,
    ) -> tuple[Tensor, dict[str, Any]]:
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
            cut = [_logits_of_row(logits, layout, row, width, shards.context_group) for row in rows]
            unit = rows_of_width(data.slice(first, first + size), [layout.lengths[row] for row in rows], width)
            loss, metrics = shards.call(self.loss_fn, torch.stack(cut), unit, counts)
            total = total + loss
            parts.append(metrics)
            samples.append(unit["sample_mask"].sum() if "sample_mask" in unit else size)
        return total, reduce_metrics(parts, samples, reductions_of(self.loss_fn))


@dataclass(frozen=True)
class LogitShards:
    """How the logits that a policy has computed are split over ranks.

    rank, vocab_group: this rank's number in the group over which the vocabulary is split, and the group.
    context_group: the group over which the tokens are split.
    vocab_size: number of columns of whole logits; None if the last rank's shard contains no padding.
    """

    rank: int | None = None
    vocab_group: ProcessGroup | None = None
    context_group: ProcessGroup | None = None
    vocab_size: int | None = None

    def gathered_for(self, loss_fn: Any) -> tuple[str, ...]:
        """Return the names of the parameters that `loss_fn` lacks to work on shards. The logits are gathered instead.

        The result is empty if the logits are not split.
        """
        groups = {"vocab_parallel_group": self.vocab_group, "context_parallel_group": self.context_group}
        split = [name for name, group in groups.items() if group_size(group) > 1]
        return tuple(name for name in split if not _has_parameter(loss_fn, name))

    def call(
        self, loss_fn: Any, logits: Tensor, data: BatchedDataDict[Any], counts: tuple[Tensor | None, Tensor | None]
    ) -> tuple[Tensor, dict[str, Any]]:
        """Call `loss_fn` with the logits [n, S / CP, Vp] of rows; return its result.

        A loss receives the groups for which it has parameters. Over the other groups the logits are gathered. Every
        rank of a group then computes the same loss, as the wrapper's docstring requires.
        """
        gathered = self.gathered_for(loss_fn)
        vocab_group = None if "vocab_parallel_group" in gathered else self.vocab_group
        context_group = None if "context_parallel_group" in gathered else self.context_group
        if context_group is not self.context_group:
            logits = _gather_rows(logits, self.context_group)
        if vocab_group is not self.vocab_group:
            columns = logits.movedim(-1, 0).contiguous()
            logits = all_gather_forward_split_backward(columns, self.vocab_group).movedim(0, -1).contiguous()
        if group_size(vocab_group) == 1:
            logits = logits[..., : self.vocab_size]
        offered = {
            "vocab_parallel_rank": None if vocab_group is not self.vocab_group else self.rank,
            "vocab_parallel_group": vocab_group,
            "context_parallel_group": context_group,
        }
        taken = {name: value for name, value in offered.items() if _has_parameter(loss_fn, name)}
        result: tuple[Tensor, dict[str, Any]] = loss_fn(logits, data, *counts, **taken)
        return result


def _has_parameter(function: Any, name: str) -> bool:
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def _gather_rows(logits: Tensor, context_group: ProcessGroup | None) -> Tensor:
    """Gather the zigzag shares [n, S / CP, V] of rows from all context-parallel ranks; return [n, S, V]."""
    cp_size = group_size(context_group)
    rows, width = logits.shape[0], logits.shape[1] * cp_size
    layout = PackLayout((width,) * rows, (width,) * rows, rows * width, cp_size)
    return gather_context_parallel(logits.flatten(0, 1), layout, context_group).unflatten(0, (rows, width))


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
