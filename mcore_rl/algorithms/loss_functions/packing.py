"""Any loss over a pack of sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_rl.algorithms.interfaces import LossFunction
from mcore_rl.algorithms.loss_functions.common import LogprobLoss
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.distributed.collectives import group_size
from mcore_rl.distributed.pack_layout import PackLayout
from mcore_rl.distributed.parallel_logprobs import next_token_logprobs_from_logits


class SequencePackingLossWrapper:
    """`loss_fn` on a pack; equal to its sum over the pack's sequences (or pairs), one at a time.

    Losses of log-probabilities get those of the whole pack at once, as rows. Any other loss is called
    once per sequence with the cut logits.

    Args:
        loss_fn: the loss of unpacked rows.
        cu_seqlens_q: cumulative true lengths [N + 1]. May equal the padded ones.
        cu_seqlens_q_padded: cumulative lengths in the pack; `cu_seqlens_q` if None.
    """

    def __init__(self, loss_fn: LossFunction, cu_seqlens_q: Tensor, cu_seqlens_q_padded: Tensor | None = None) -> None:
        if cu_seqlens_q_padded is not None and cu_seqlens_q_padded.shape != cu_seqlens_q.shape:
            raise ValueError(
                f"cu_seqlens_q {tuple(cu_seqlens_q.shape)} and cu_seqlens_q_padded "
                f"{tuple(cu_seqlens_q_padded.shape)} must have the same number of entries"
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
        """From the logits of one pack [1, T / CP, V / TP] and `data` with one row per sequence."""
        layout = self._layout(next_token_logits, data, context_parallel_group)
        if not isinstance(self.loss_fn, LogprobLoss):
            # A loss written for whole logits need not know of groups: they are named only where they matter.
            groups: dict[str, Any] = {}
            if group_size(vocab_parallel_group) > 1:
                groups.update(vocab_parallel_rank=vocab_parallel_rank, vocab_parallel_group=vocab_parallel_group)
            if group_size(context_parallel_group) > 1:
                groups.update(context_parallel_group=context_parallel_group)
            return self._one_at_a_time(next_token_logits, data, layout, global_valid_seqs, global_valid_toks, groups)
        logprobs, entropy = next_token_logprobs_from_logits(
            next_token_logits[0],
            data["input_ids"],
            layout,
            vocab_parallel_group,
            context_parallel_group,
            vocab_parallel_rank,
            with_entropy=self.loss_fn.needs_entropy,
        )
        self.loss_fn.refuse_nonfinite(logprobs, data)
        return self.loss_fn.from_logprobs(logprobs, data, global_valid_seqs, global_valid_toks, entropy=entropy)

    def _layout(
        self, logits: Tensor, data: BatchedDataDict[Any], context_parallel_group: ProcessGroup | None
    ) -> PackLayout:
        cp_size = group_size(context_parallel_group)
        rows, width = data["input_ids"].shape
        if logits.ndim != 3 or logits.shape[0] != 1:
            raise ValueError(f"a pack's logits must be [1, T / CP, V / TP], got {tuple(logits.shape)}")
        if len(self.cu_seqlens_q) != rows + 1:
            raise ValueError(f"cu_seqlens_q has {len(self.cu_seqlens_q) - 1} sequences, data has {rows} rows")
        layout = PackLayout.from_cu_seqlens(
            self.cu_seqlens_q, self.cu_seqlens_q_padded, logits.shape[1] * cp_size, cp_size
        )
        # The last sequence may carry the pack's padding in both forms of the lengths: rows end at S.
        return PackLayout(tuple(min(n, width) for n in layout.lengths), layout.padded_lengths, layout.total, cp_size)

    def _one_at_a_time(
        self,
        logits: Tensor,
        data: BatchedDataDict[Any],
        layout: PackLayout,
        global_valid_seqs: Tensor | None,
        global_valid_toks: Tensor | None,
        groups: dict[str, Any],
    ) -> tuple[Tensor, dict[str, Any]]:
        """Rows are cut to the padded length in the pack, so that a context-parallel cut stays whole."""
        total: Tensor = logits.new_zeros((), dtype=torch.float32)
        metrics: dict[str, Any] = {}
        starts = layout.cu_seqlens_padded.tolist()
        call: Callable[..., Any] = self.loss_fn  # the groups are optional in the protocol
        for row, padded in enumerate(layout.padded_lengths):
            start = starts[row] // layout.cp_size
            cut = logits[:, start : start + padded // layout.cp_size]
            loss, row_metrics = call(
                cut, _cut_row(data, row, layout.lengths[row], padded), global_valid_seqs, global_valid_toks, **groups
            )
            total = total + loss
            metrics = add_metrics(metrics, row_metrics)
        return total, metrics


def _cut_row(data: BatchedDataDict[Any], row: int, length: int, padded: int) -> BatchedDataDict[Any]:
    """Row `row` with its sequence dimension cut to `length` and zero-filled to `padded`."""
    width = data["input_ids"].shape[1]
    single = data.slice(row, row + 1)
    for key, value in single.items():
        if isinstance(value, Tensor) and value.ndim >= 2 and value.shape[1] == width:
            cut = value.new_zeros((1, padded, *value.shape[2:]))
            cut[:, :length] = value[:, :length]
            single[key] = cut
    return single


def add_metrics(total: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """Metrics of two microbatches as one: sums, or minima and maxima where the name ends so."""
    merged = dict(total)
    for name, value in part.items():
        if name not in merged:
            merged[name] = value
        elif name.endswith(("_min", "_max")):
            pick = torch.minimum if name.endswith("_min") else torch.maximum
            merged[name] = pick(torch.as_tensor(merged[name]), torch.as_tensor(value))
        else:
            merged[name] = merged[name] + value
    return merged
