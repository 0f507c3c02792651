"""Distillation from a teacher's top-k logits: forward, reverse or mixed KL."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_rl.algorithms.interfaces import LossFunction, LossType
from mcore_rl.algorithms.loss_functions.common import (
    masked_mean,
    require_config,
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


class DistillationLossConfig(TypedDict):
    """`mixed_kl_weight` is the share of forward KL where kl_type is mixed."""

    kl_type: Literal["forward", "reverse", "mixed"]
    mixed_kl_weight: float


class DistillationLossDataDict(TypedDict):
    """`teacher_topk_logits`, `teacher_topk_indices` [B, S, k]: the teacher's at each *input* position."""

    input_ids: Tensor
    token_mask: Tensor
    sample_mask: Tensor
    teacher_topk_logits: Tensor
    teacher_topk_indices: Tensor


class DistillationLossFn(LossFunction):
    """KL between teacher and student over the teacher's k tokens, both renormalised over them.

    forward: KL(teacher ‖ student); reverse: KL(student ‖ teacher); mixed: their weighted mean. Token
    level. Needs logits; the vocabulary is not gathered.
    """

    loss_type = LossType.TOKEN_LEVEL
    required_keys = tuple(DistillationLossDataDict.__annotations__)

    def __init__(self, cfg: DistillationLossConfig) -> None:
        require_config(cfg, DistillationLossConfig, self)
        shares = {"forward": 1.0, "reverse": 0.0, "mixed": cfg["mixed_kl_weight"]}
        if cfg["kl_type"] not in shares:
            raise ValueError(f"kl_type must be forward, reverse or mixed, got {cfg['kl_type']!r}")
        self.forward_share = shares[cfg["kl_type"]]
        if not 0 <= self.forward_share <= 1:
            raise ValueError(f"mixed_kl_weight must be between 0 and 1, got {self.forward_share}")

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
        local = slice_context_parallel(indices.flatten(0, 1), layout, group_rank(context_parallel_group))
        student, _ = vocab_parallel_logprobs(
            next_token_logits.flatten(0, 1), local, vocab_parallel_group, vocab_parallel_rank
        )
        student = gather_context_parallel(student, layout, context_parallel_group).view(indices.shape)[:, :-1]
        student_logprobs = torch.log_softmax(student, dim=-1)
        teacher_logprobs = torch.log_softmax(teacher[:, :-1].to(student), dim=-1)
        forward = (teacher_logprobs.exp() * (teacher_logprobs - student_logprobs)).sum(-1)
        reverse = (student_logprobs.exp() * (student_logprobs - teacher_logprobs)).sum(-1)
        mask = token_mask_of(data, student)
        tokens = require_count("global_valid_toks", global_valid_toks, self)
        forward_kl, reverse_kl = (
            masked_mean(kl, mask, global_normalization_factor=tokens) for kl in (forward, reverse)
        )
        loss = self.forward_share * forward_kl + (1 - self.forward_share) * reverse_kl
        return loss, {
            "loss": loss.detach(),
            "forward_kl": forward_kl.detach(),
            "reverse_kl": reverse_kl.detach(),
            "num_unmasked_tokens": mask.sum(),
            "num_valid_samples": sample_mask_of(data, mask).sum(),
        }
