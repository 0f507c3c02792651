"""Distillation: forward, reverse or mixed KL, or Jensen–Shannon, with a teacher's top k or whole distribution."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NotRequired, Protocol, TypedDict, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.distributed.collectives import group_rank
from mcore_rl.distributed.divergences import Divergences, FinalHiddenStates, HiddenAndHead
from mcore_rl.distributed.logprobs import vocab_parallel_logprobs
from mcore_rl.distributed.packs import gather_context_parallel, slice_context_parallel
from mcore_rl.errors import ContractError
from mcore_rl.losses.common import (
    LogprobLoss,
    LossFunction,
    LossType,
    counts_of,
    masked_mean,
    reads_options,
    require_count,
    require_keys,
    require_shape,
    rows_layout,
    token_mask_of,
)
from mcore_rl.losses.options import DistillationOptions, typed_dict

if TYPE_CHECKING:
    DistillationLossConfig = Mapping[str, Any]
else:
    DistillationLossConfig = typed_dict("DistillationLossConfig", DistillationOptions)

# In nats: the log-probability for tokens of probability 0, so that divergences stay finite.
LOG_ZERO = -100.0


class DistillationLossDataDict(TypedDict):
    """Entries of the data that the loss reads.

    teacher_topk_logits, teacher_topk_indices: [B, S, k], the teacher's k largest logits and their token ids at each
        *input* position. For kl_type=reverse_unnormalized, log-probabilities at the loss's temperature stand in place
        of logits. With several teachers [B, S, M · k]: the top k of the row's first teacher, then of its second, …
    teacher_weights: [B, 1, M], the weights of each row's M teachers. Without this entry, there is a single teacher of
        weight 1.
    """

    input_ids: Tensor
    token_mask: Tensor
    sample_mask: Tensor
    teacher_topk_logits: Tensor
    teacher_topk_indices: Tensor
    teacher_weights: NotRequired[Tensor]


@reads_options(DistillationOptions)
class _Distillation(LossFunction):
    """Base class of both distillation losses: computes the loss from the divergences of each token."""

    loss_type = LossType.TOKEN_LEVEL
    required_keys: tuple[str, ...] = ("input_ids", "token_mask", "sample_mask")
    options: DistillationOptions

    def __init__(self, cfg: DistillationLossConfig | DistillationOptions) -> None:
        self.options = DistillationOptions.from_config(cfg, type(self).__name__)

    @property
    def _beta(self) -> float | None:
        return self.options.js_beta if self.options.kl_type == "js" else None

    def _loss(
        self, divergences: Divergences, data: BatchedDataDict[Any], global_valid_toks: Tensor | None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return the loss and metrics: means of `divergences` [B, S − 1] over the tokens that carry loss."""
        mask = token_mask_of(data, divergences.forward_kl)
        tokens = require_count("global_valid_toks", global_valid_toks, self)
        means = {
            name: masked_mean(values, mask, global_normalization_factor=tokens)
            for name, values in divergences._asdict().items()
            if values is not None
        }
        kind, share = self.options.kl_type, self.options.mixed_kl_weight
        if kind == "mixed":
            loss = share * means["forward_kl"] + (1 - share) * means["reverse_kl"]
        else:
            loss = means["js" if kind == "js" else "forward_kl" if kind == "forward" else "reverse_kl"]
        return loss, {
            "loss": loss.detach(),
            **{name: mean.detach() for name, mean in means.items()},
            **counts_of(data, mask),
        }


class DistillationLossFn(_Distillation):
    """Divergence between teacher and student over the teacher's top k tokens.

    The loss is the mean over the tokens that carry loss.

    Both distributions are renormalised over the k tokens, except for kl_type=reverse_unnormalized. With
    `zero_outside_topk` in `DistillationOptions`, the student instead keeps its probabilities over the whole vocabulary,
    and the teacher's probabilities outside of the k tokens are e⁻¹⁰⁰.

    The loss can be called with logits that are sharded over the vocabulary; the shards are not gathered. A policy
    calls `from_hidden_states` instead, so that logits are never stored.
    """

    takes_hidden_states = True
    required_keys = (*_Distillation.required_keys, "teacher_topk_logits", "teacher_topk_indices")

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
        self._check(data)
        layout, indices = rows_layout(next_token_logits, data, context_parallel_group), data["teacher_topk_indices"]
        packed = indices.new_zeros(layout.total, indices.shape[2])
        packed[layout.position_ids < indices.shape[1]] = indices.flatten(0, 1)
        local = slice_context_parallel(packed, layout, group_rank(context_parallel_group))
        student, entropy = vocab_parallel_logprobs(
            next_token_logits.flatten(0, 1),
            local,
            vocab_parallel_group,
            vocab_parallel_rank,
            temperature=self.options.loss_temperature,
            with_entropy=self.options.zero_outside_topk,
            normalize=self._reads_whole_vocabulary,
        )
        columns = student if entropy is None else torch.cat((student, entropy[:, None]), dim=1)
        rows = gather_context_parallel(columns, layout, context_parallel_group).unflatten(0, (len(indices), -1))
        rows, k = rows[:, : indices.shape[1] - 1], indices.shape[2]
        return self._from_topk(rows[..., :k], None if entropy is None else rows[..., k], data, global_valid_toks)

    def from_hidden_states(
        self,
        states: FinalHiddenStates,
        data: BatchedDataDict[Any],
        global_valid_seqs: Tensor | None,
        global_valid_toks: Tensor | None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return the loss and metrics, computed from the student's hidden states and LM head."""
        self._check(data)
        student, entropy = states.logprobs_of(
            data["teacher_topk_indices"],
            self.options.loss_temperature,
            with_entropy=self.options.zero_outside_topk,
            normalize=self._reads_whole_vocabulary,
        )
        return self._from_topk(student, entropy, data, global_valid_toks)

    @property
    def _reads_whole_vocabulary(self) -> bool:
        """Whether the student's probabilities are normalised over the whole vocabulary, not over the k tokens."""
        return self.options.zero_outside_topk or self.options.kl_type == "reverse_unnormalized"

    def _check(self, data: BatchedDataDict[Any]) -> None:
        require_keys(data, self.required_keys, self)
        indices = data["teacher_topk_indices"]
        require_shape("teacher_topk_logits", data["teacher_topk_logits"], tuple(indices.shape), self)
        if indices.ndim != 3 or indices.shape[2] == 0:
            raise ContractError(f"DistillationLossFn: teacher_topk_indices must be [B, S, k > 0], got {indices.shape}")

    def _from_topk(
        self,
        student_logprobs: Float[Tensor, "batch predicted k"],
        entropy: Float[Tensor, "batch predicted"] | None,
        data: BatchedDataDict[Any],
        global_valid_toks: Tensor | None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Compute the loss and metrics from the student's log-probabilities of the teacher's top k tokens.

        Args:
            student_logprobs: may be logits if both distributions are renormalised over the k tokens. In this case, the
                logits of all other tokens have a gradient of exactly 0.
            entropy: entropy of the student's distribution over the whole vocabulary. None for losses that do not need
                it: those that renormalise both distributions over the k tokens, and kl_type=reverse_unnormalized.
        """
        teacher = data["teacher_topk_logits"][:, :-1].to(student_logprobs)
        if self.options.kl_type != "reverse_unnormalized":
            teacher = teacher / self.options.loss_temperature
        if "teacher_weights" not in data:
            return self._loss(self._divergences(student_logprobs, entropy, teacher), data, global_valid_toks)
        weights = data["teacher_weights"].to(student_logprobs)
        of_teachers = [x.unflatten(-1, (weights.shape[2], -1)) for x in (student_logprobs, teacher)]
        several = self._divergences(of_teachers[0], None if entropy is None else entropy[..., None], of_teachers[1])
        # A row without a second teacher has a weight of 0 and zeros for its tokens.
        forward_kl, reverse_kl, js = (x if x is None else (x * weights).sum(-1) for x in several)
        assert forward_kl is not None and reverse_kl is not None, "only js is optional"
        return self._loss(Divergences(forward_kl, reverse_kl, js), data, global_valid_toks)

    def _divergences(
        self,
        student_logprobs: Float[Tensor, "batch predicted *teachers k"],
        entropy: Float[Tensor, "batch predicted *teachers"] | None,
        teacher_logits: Float[Tensor, "batch predicted *teachers k"],
    ) -> Divergences:
        if self.options.kl_type == "reverse_unnormalized":
            return _unnormalized(teacher_logits, student_logprobs)
        teacher = torch.log_softmax(teacher_logits, dim=-1)
        student = torch.log_softmax(student_logprobs, dim=-1) if entropy is None else student_logprobs
        teacher, student = teacher.clamp(min=LOG_ZERO), student.clamp(min=LOG_ZERO)  # 0 · (−inf) is NaN
        forward = (teacher.exp() * (teacher - student)).sum(-1)
        reverse = (student.exp() * (student - teacher)).sum(-1)
        js, beta = None, self._beta
        outside = None if entropy is None else 1 - student.exp().sum(-1)  # the student's probability of other tokens
        if beta is not None:
            mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
            to_mixture = (student.exp() * (student - mixture)).sum(-1)
            if outside is not None:  # for these tokens the mixture is (1 − β) · student
                to_mixture = to_mixture - math.log1p(-beta) * outside
            js = beta * (teacher.exp() * (teacher - mixture)).sum(-1) + (1 - beta) * to_mixture
        if outside is not None and entropy is not None:
            # Σ p·(log p − LOG_ZERO) over the other tokens, from the sums over all tokens and over the k tokens
            rest = -entropy - (student.exp() * student).sum(-1)
            reverse = reverse + rest - LOG_ZERO * outside
        return Divergences(forward, reverse, js)


def _unnormalized(log_p: Float[Tensor, "... k"], log_q: Float[Tensor, "... k"]) -> Divergences:
    """Return the forward divergence Σ (p·log(p / q) − p + q), and the reverse, with p and q exchanged.

    Neither p nor q need sum to 1.
    """
    log_p, log_q = log_p.clamp(min=LOG_ZERO), log_q.clamp(min=LOG_ZERO)  # 0 · (−inf) is NaN
    p, q = log_p.exp(), log_q.exp()
    return Divergences((p * (log_p - log_q) - p + q).sum(-1), (q * (log_q - log_p) - q + p).sum(-1), None)


class SampledDistillationLossFn(LogprobLoss):
    """Reverse KL between student and teachers, estimated at the student's own samples by a policy gradient.

    The gradient is that of −w·A·log π, averaged over the sampled tokens; w and A have no gradient.
    A = Σ_m weight_m·(log π_m − log π), over the teachers m, is the advantage of the sampled token (arXiv:2601.02780).
    w = min(π / π_sampled, `max_importance_weight`) corrects a sampler that differs from the policy. Without this bound,
    the mean gradient at a position is that of Σ_m weight_m·KL(π ‖ π_m), for the given prefix.

    The loss reads these entries of the data:

    teacher_logprobs: [B, S], for each token, the sum of weight · log-probability over the teachers.
    teacher_weight: [B], the sum of the teachers' weights; 1 without this entry.
    generation_logprobs: [B, S], only if the rows were sampled.
    """

    reads_counted_tokens_only = True
    loss_type = LossType.TOKEN_LEVEL
    required_keys = ("input_ids", "token_mask", "sample_mask", "teacher_logprobs")

    def __init__(self, max_importance_weight: float = 2.0) -> None:
        self.max_importance_weight = max_importance_weight

    def from_logprobs(
        self,
        next_token_logprobs: Float[Tensor, "batch predicted"],
        data: BatchedDataDict[Any],
        global_valid_seqs: Tensor | None,
        global_valid_toks: Tensor | None,
        entropy: Tensor | None = None,
    ) -> tuple[Float[Tensor, ""], dict[str, Any]]:
        self.check(next_token_logprobs, data)
        logprobs, mask = next_token_logprobs, token_mask_of(data, next_token_logprobs)
        tokens = require_count("global_valid_toks", global_valid_toks, self)
        current, teacher = logprobs.detach(), data["teacher_logprobs"][:, 1:].to(logprobs)
        share = data["teacher_weight"].to(logprobs)[:, None] if "teacher_weight" in data else 1.0
        advantages, weights = teacher - share * current, torch.ones_like(current)
        if "generation_logprobs" in data:
            sampled = data["generation_logprobs"][:, 1:].to(logprobs)
            weights = (current - sampled).exp().clamp(max=self.max_importance_weight)
        mean = functools.partial(masked_mean, mask=mask, global_normalization_factor=tokens)
        loss = mean(-weights * advantages * (logprobs - current))
        return loss + mean(-weights * advantages), {
            "loss": mean(-weights * advantages),
            "reverse_kl": mean(-advantages),
            "importance_weight": mean(weights),
            **counts_of(data, mask),
        }


@runtime_checkable
class Teacher(Protocol):
    """A model whose next-token distributions the student learns."""

    @property
    def vocab_size(self) -> int: ...

    def counted_logits(self, microbatches: Sequence[Any]) -> Mapping[Hashable, HiddenAndHead]:
        """Return, for each microbatch, the hidden states of the tokens that carry loss, and the LM head.

        Their product is the tokens' logits. The result is {} on ranks without the LM head.
        """
        ...


class WholeVocabularyDistillationLossFn(_Distillation):
    """Divergence between teacher and student over the whole vocabulary, from the hidden states of both models.

    The loss is the mean over the tokens that carry loss. The policy must call `prepare` before it calls the loss. If
    the LM head of one model has more rows (tokens) than that of the other model, the additional rows are ignored.
    """

    takes_hidden_states = True

    def __init__(self, cfg: DistillationLossConfig | DistillationOptions, teacher: Teacher) -> None:
        super().__init__(cfg)
        self.teacher_model = teacher
        self.of_teacher: Mapping[Hashable, HiddenAndHead] = {}

    def prepare(self, microbatches: Sequence[Any]) -> None:
        """Run the teacher on `microbatches` and keep, for the loss, its hidden states of the tokens that carry loss."""
        self.of_teacher = self.teacher_model.counted_logits(microbatches)

    def __call__(self, *arguments: Any, **named: Any) -> tuple[Tensor, dict[str, Any]]:
        raise ContractError(
            f"{type(self).__name__} needs hidden states and cannot be called with logits; pass this loss to a policy"
        )

    def from_hidden_states(
        self,
        states: FinalHiddenStates,
        data: BatchedDataDict[Any],
        global_valid_seqs: Tensor | None,
        global_valid_toks: Tensor | None,
    ) -> tuple[Tensor, dict[str, Any]]:
        require_keys(data, self.required_keys, self)
        tokens = min(self.teacher_model.vocab_size, states.vocab_size)
        teacher = self.of_teacher[states.microbatch]
        return self._loss(
            states.divergences(teacher, tokens, self.options.loss_temperature, self._beta), data, global_valid_toks
        )
