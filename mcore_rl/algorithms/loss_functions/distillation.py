"""Distillation from a teacher's top-k logits: forward, reverse or mixed KL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_rl.algorithms.interfaces import LossType
from mcore_rl.algorithms.loss_functions.common import (
    Configured,
    masked_mean,
    require_count,
    require_keys,
    require_shape,
    rows_layout,
    sample_mask_of,
    token_mask_of,
)
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.distributed.collectives import group_rank
from mcore_rl.distributed.context_parallel import gather_context_parallel, slice_context_parallel
from mcore_rl.distributed.parallel_logprobs import vocab_parallel_logprobs
from mcore_rl.errors import ContractError
from mcore_rl.loss_options import DistillationOptions, typed_dict

if TYPE_CHECKING:
    DistillationLossConfig = Mapping[str, Any]
else:
    DistillationLossConfig = typed_dict("DistillationLossConfig", DistillationOptions)

# Nats: the log-probability of a token of probability 0, so that divergences stay finite.
LOG_ZERO = -100.0


class DistillationLossDataDict(TypedDict):
    """`teacher_topk_logits`, `teacher_topk_indices` [B, S, k]: the teacher's at each *input* position."""

    input_ids: Tensor
    token_mask: Tensor
    sample_mask: Tensor
    teacher_topk_logits: Tensor
    teacher_topk_indices: Tensor


class DistillationLossFn(Configured):
    """KL between teacher and student over the teacher's k tokens, both renormalised over them.

    forward: KL(teacher ‖ student); reverse: KL(student ‖ teacher); mixed: their weighted mean. Token
    level. Needs logits; the vocabulary is not gathered. See `DistillationOptions`: with `zero_outside_topk` the
    student keeps its probabilities over the whole vocabulary, and the teacher's outside the k tokens are e⁻¹⁰⁰.
    """

    loss_type = LossType.TOKEN_LEVEL
    required_keys = tuple(DistillationLossDataDict.__annotations__)
    options: DistillationOptions

    def __init__(self, cfg: DistillationLossConfig | DistillationOptions) -> None:
        self.configure(DistillationOptions.from_config(cfg, type(self).__name__))

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
        require_keys(data, self.required_keys, self)
        layout = rows_layout(next_token_logits, data, context_parallel_group)
        indices, teacher = data["teacher_topk_indices"], data["teacher_topk_logits"]
        require_shape("teacher_topk_logits", teacher, tuple(indices.shape), self)
        if indices.ndim != 3 or indices.shape[2] == 0:
            raise ContractError(f"DistillationLossFn: teacher_topk_indices must be [B, S, k > 0], got {indices.shape}")
        packed = indices.new_zeros(layout.total, indices.shape[2])
        packed[layout.position_ids < indices.shape[1]] = indices.flatten(0, 1)
        local = slice_context_parallel(packed, layout, group_rank(context_parallel_group))
        student, entropy = vocab_parallel_logprobs(
            next_token_logits.flatten(0, 1),
            local,
            vocab_parallel_group,
            vocab_parallel_rank,
            with_entropy=self.options.zero_outside_topk,
        )
        columns = student if entropy is None else torch.cat((student, entropy[:, None]), dim=1)
        rows = gather_context_parallel(columns, layout, context_parallel_group).unflatten(0, (len(indices), -1))
        rows, k = rows[:, : indices.shape[1] - 1], indices.shape[2]
        forward, reverse = self._divergences(
            rows[..., :k], None if entropy is None else rows[..., k], teacher[:, :-1].to(rows)
        )
        mask = token_mask_of(data, forward)
        tokens = require_count("global_valid_toks", global_valid_toks, self)
        forward_kl, reverse_kl = (
            masked_mean(kl, mask, global_normalization_factor=tokens) for kl in (forward, reverse)
        )
        share = self.options.forward_share
        loss = forward_kl if share == 1 else reverse_kl if share == 0 else share * forward_kl + (1 - share) * reverse_kl
        return loss, {
            "loss": loss.detach(),
            "forward_kl": forward_kl.detach(),
            "reverse_kl": reverse_kl.detach(),
            "num_unmasked_tokens": mask.sum(),
            "num_valid_samples": sample_mask_of(data, mask).sum(),
        }

    def _divergences(
        self,
        student_logprobs: Float[Tensor, "batch predicted k"],
        entropy: Float[Tensor, "batch predicted"] | None,
        teacher_logits: Float[Tensor, "batch predicted k"],
    ) -> tuple[Float[Tensor, "batch predicted"], Float[Tensor, "batch predicted"]]:
        """Forward and reverse KL; `student_logprobs` and `entropy` (if needed) are of the whole vocabulary."""
        teacher = torch.log_softmax(teacher_logits, dim=-1)
        student = torch.log_softmax(student_logprobs, dim=-1) if entropy is None else student_logprobs
        teacher, student = teacher.clamp(min=LOG_ZERO), student.clamp(min=LOG_ZERO)  # 0 · (−inf) is NaN
        forward = (teacher.exp() * (teacher - student)).sum(-1)
        reverse = (student.exp() * (student - teacher)).sum(-1)
        if entropy is not None:  # Σ p·(log p − LOG_ZERO) over the other tokens, from the sums over all and over the k
            probability = student.exp()
            rest = -entropy - (probability * student).sum(-1)
            reverse = reverse + rest - LOG_ZERO * (1 - probability.sum(-1))
        return forward, reverse
