"""Clipped policy-gradient losses: PPO, GRPO, DAPO, GSPO, CISPO, Dr.GRPO, REINFORCE/RLOO."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor

from mcore_rl.algorithms.interfaces import LossType
from mcore_rl.algorithms.loss_functions.common import (
    LogprobLoss,
    masked_mean,
    require_config,
    require_count,
    require_shape,
    sample_mask_of,
    token_mask_of,
)
from mcore_rl.algorithms.loss_functions.importance import (
    TruncationType,
    finite_exp,
    importance_weights,
    truncate_importance_weights,
)
from mcore_rl.algorithms.loss_functions.kl import KLEstimator, calculate_kl
from mcore_rl.distributed.batched_data_dict import BatchedDataDict


class _RequiredConfig(TypedDict):
    reference_policy_kl_penalty: float
    ratio_clip_min: float
    ratio_clip_max: float
    ratio_clip_c: float | None
    use_on_policy_kl_approximation: bool
    use_importance_sampling_correction: bool
    token_level_loss: bool


class ClippedPGLossConfig(_RequiredConfig, total=False):
    """Keys of `ClippedPGLossFn`; what each does is written at `_Options`."""

    disable_ppo_ratio: bool
    force_on_policy_ratio: bool
    sequence_level_importance_ratios: bool
    clip_type: Literal["ppo", "cispo"]
    dr_grpo_max_tokens: int | None
    kl_estimator: KLEstimator
    kl_clamp: float | None
    kl_gradient: Literal["detached", "score"]
    importance_sampling_level: Literal["token", "sequence"] | None
    truncated_importance_sampling_type: TruncationType
    truncated_importance_sampling_ratio: float | None
    truncated_importance_sampling_ratio_min: float
    entropy_bonus: float


class ClippedPGLossDataDict(TypedDict):
    """What `ClippedPGLossFn` reads; all [B, S] aligned with `input_ids`, `sample_mask` [B].

    `reference_policy_logprobs` is needed only with a KL penalty, `prev_logprobs` only without
    `force_on_policy_ratio`.
    """

    input_ids: Tensor
    advantages: Tensor
    prev_logprobs: Tensor
    generation_logprobs: Tensor
    reference_policy_logprobs: Tensor
    token_mask: Tensor
    sample_mask: Tensor


@dataclass(frozen=True)
class _Options:
    reference_policy_kl_penalty: float
    ratio_clip_min: float
    ratio_clip_max: float
    ratio_clip_c: float | None
    """Dual clip: an upper bound on −A·ratio where A < 0 (arXiv:1912.09729); more than 1, or None."""
    use_on_policy_kl_approximation: bool
    """Weight the KL estimate by exp(current − generation): an off-policy sample, on-policy estimate."""
    use_importance_sampling_correction: bool
    """Multiply by exp(prev − generation): the sampler's numbers differ from the trainer's."""
    token_level_loss: bool
    """Mean over all tokens (DAPO, arXiv:2503.14476) rather than over sequences of their means (GRPO)."""
    disable_ppo_ratio: bool = False
    """REINFORCE / RLOO (arXiv:2402.14740): the log-probability itself in place of the ratio, no clip."""
    force_on_policy_ratio: bool = False
    """prev = current, so that the ratio is 1: right for the only update on the samples of these weights."""
    sequence_level_importance_ratios: bool = False
    """GSPO (arXiv:2507.18071): one ratio a sequence, exp(mean(current − prev))."""
    clip_type: Literal["ppo", "cispo"] = "ppo"
    """cispo: the clipped ratio, detached, weighs the log-probability (arXiv:2506.13585)."""
    dr_grpo_max_tokens: int | None = None
    """Dr.GRPO (arXiv:2503.20783): a sequence's sum over this constant, not its mean."""
    kl_estimator: KLEstimator = "k3"
    kl_clamp: float | None = 20.0
    kl_gradient: Literal["detached", "score"] = "detached"
    """score: the gradient also passes through the weight of `use_on_policy_kl_approximation`."""
    importance_sampling_level: Literal["token", "sequence"] | None = None
    """One weight a token or one a sequence; None for that of the ratios."""
    truncated_importance_sampling_type: TruncationType = "tis"
    truncated_importance_sampling_ratio: float | None = None
    """Upper bound of the importance weights; None leaves them as they are."""
    truncated_importance_sampling_ratio_min: float = 0.0
    entropy_bonus: float = 0.0
    """This times the mean entropy is subtracted from the loss."""

    def __post_init__(self) -> None:
        if self.ratio_clip_c is not None and self.ratio_clip_c <= 1:
            raise ValueError(f"ratio_clip_c must be greater than 1, got {self.ratio_clip_c}")
        if self.sequence_level_importance_ratios and self.token_level_loss:
            raise ValueError("sequence_level_importance_ratios needs a sequence-level loss: set token_level_loss=False")
        if self.dr_grpo_max_tokens is not None and (self.token_level_loss or self.dr_grpo_max_tokens < 1):
            raise ValueError("dr_grpo_max_tokens must be positive and needs token_level_loss=False")
        if self.disable_ppo_ratio and (self.clip_type == "cispo" or self.sequence_level_importance_ratios):
            raise ValueError("disable_ppo_ratio leaves no ratio for clip_type=cispo or sequence-level ratios")
        choices = {
            "clip_type": ("ppo", "cispo"),
            "kl_estimator": ("k1", "k2", "k3"),
            "kl_gradient": ("detached", "score"),
            "importance_sampling_level": (None, "token", "sequence"),
            "truncated_importance_sampling_type": ("tis", "icepop", "seq-mask-tis"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}, got {getattr(self, name)!r}")
        if self.truncated_importance_sampling_ratio is not None and not self.use_importance_sampling_correction:
            raise ValueError("truncated_importance_sampling_ratio needs use_importance_sampling_correction=True")
        if self.kl_gradient == "score" and not self.use_on_policy_kl_approximation:
            raise ValueError("kl_gradient=score needs use_on_policy_kl_approximation=True")

    @property
    def weighs_sequences(self) -> bool:
        """True where importance weights are one a sequence."""
        if self.importance_sampling_level is None:
            return self.sequence_level_importance_ratios
        return self.importance_sampling_level == "sequence"


class ClippedPGLossFn(LogprobLoss):
    """E[max(−A·r, −A·clamp(r, 1 − ε_min, 1 + ε_max))] + β·KL(π ‖ π_ref), r = π / π_prev.

    PPO (arXiv:1707.06347), GRPO (arXiv:2402.03300) and their kin: see the options of
    `ClippedPGLossConfig`. KL is reduced as the loss is.
    """

    def __init__(self, cfg: ClippedPGLossConfig) -> None:
        require_config(cfg, ClippedPGLossConfig, self)
        self.options = _Options(**cfg)
        self.loss_type = LossType.TOKEN_LEVEL if self.options.token_level_loss else LossType.SEQUENCE_LEVEL
        self.needs_entropy = self.options.entropy_bonus != 0
        self.required_keys = tuple(
            key
            for key in ClippedPGLossDataDict.__annotations__
            if not (key == "reference_policy_logprobs" and self.options.reference_policy_kl_penalty == 0)
            and not (key == "prev_logprobs" and self.options.force_on_policy_ratio)
        )

    def from_logprobs(
        self,
        next_token_logprobs: Tensor,
        data: BatchedDataDict[Any],
        global_valid_seqs: Tensor | None,
        global_valid_toks: Tensor | None,
        entropy: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        self.check(next_token_logprobs, data)
        options, batch = self.options, _Batch.of(data, next_token_logprobs, self)
        reduction = _Reduction(
            batch.token_mask,
            batch.sample_mask,
            require_count("global_valid_seqs", global_valid_seqs, self),
            require_count("global_valid_toks", global_valid_toks, self),
            options,
        )
        current = next_token_logprobs
        ratio, clamped = self._ratios(current, batch)
        weights = importance_weights(batch.prev, batch.generation, batch.token_mask, options.weighs_sequences)
        per_token = self._actor_loss(current, ratio, clamped, batch.advantages)
        loss = reduction.mean(self._correction(weights, batch) * per_token)
        kl = torch.zeros_like(loss)
        if options.reference_policy_kl_penalty != 0:
            kl = reduction.mean(self._kl(current, batch))
            loss = loss + options.reference_policy_kl_penalty * kl
        if self.needs_entropy:
            if entropy is None:
                raise ValueError("ClippedPGLossFn: entropy_bonus needs the entropies [B, S - 1]")
            loss = loss - options.entropy_bonus * reduction.mean(entropy)
        return loss, self._metrics(loss, kl, ratio, clamped, weights, current, batch, reduction)

    def _ratios(self, current: Tensor, batch: _Batch) -> tuple[Tensor, Tensor]:
        """The probability ratio and its clipped value, [B, S − 1] each."""
        options = self.options
        if options.disable_ppo_ratio:
            return current, current
        log_ratio = torch.where(batch.token_mask > 0, current - batch.prev, 0)
        if options.sequence_level_importance_ratios:
            log_ratio = masked_mean(log_ratio, batch.token_mask, dim=-1)[:, None].expand_as(current)
        ratio = torch.exp(log_ratio)
        return ratio, ratio.clamp(1 - options.ratio_clip_min, 1 + options.ratio_clip_max)

    def _actor_loss(self, current: Tensor, ratio: Tensor, clamped: Tensor, advantages: Tensor) -> Tensor:
        if self.options.clip_type == "cispo":
            return -advantages * clamped.detach() * current
        loss = torch.maximum(-advantages * ratio, -advantages * clamped)
        if self.options.ratio_clip_c is None:
            return loss
        bounded = torch.minimum(loss, -advantages * self.options.ratio_clip_c)
        return torch.where(advantages < 0, bounded, loss)

    def _correction(self, weights: Tensor, batch: _Batch) -> Tensor:
        options = self.options
        if not options.use_importance_sampling_correction:
            return torch.ones_like(weights)
        if options.truncated_importance_sampling_ratio is None:
            return weights
        return truncate_importance_weights(
            weights,
            batch.prev - batch.generation,
            batch.token_mask,
            options.truncated_importance_sampling_type,
            options.truncated_importance_sampling_ratio_min,
            options.truncated_importance_sampling_ratio,
        )

    def _kl(self, current: Tensor, batch: _Batch) -> Tensor:
        options = self.options
        assert batch.reference is not None
        kl = calculate_kl(current, batch.reference, options.kl_estimator, options.kl_clamp)
        if not options.use_on_policy_kl_approximation:
            return kl
        weight = finite_exp(current - batch.generation)
        return kl * (weight if options.kl_gradient == "score" else weight.detach())

    def _metrics(
        self,
        loss: Tensor,
        kl: Tensor,
        ratio: Tensor,
        clamped: Tensor,
        weights: Tensor,
        current: Tensor,
        batch: _Batch,
        reduction: _Reduction,
    ) -> dict[str, Any]:
        with torch.no_grad():
            mismatch = finite_exp((batch.generation - batch.prev).abs())
            entropy = -finite_exp(current - batch.generation) * current
            values = {
                "probs_ratio": reduction.token_mean(ratio),
                "probs_ratio_clamped": reduction.token_mean(clamped),
                "clip_fraction_low": reduction.token_mean((ratio < clamped).to(ratio)),
                "clip_fraction_high": reduction.token_mean((ratio > clamped).to(ratio)),
                "token_mult_prob_error": reduction.token_mean(mismatch),
                "sampling_importance_ratio": reduction.token_mean(weights.expand_as(current)),
                "approx_entropy": reduction.token_mean(entropy),
            }
        return {
            "loss": loss.detach(),
            "kl_penalty": kl.detach(),
            **values,
            "num_valid_samples": batch.sample_mask.sum(),
        }


@dataclass(frozen=True)
class _Batch:
    """The data of a microbatch at the predicted tokens: [B, S − 1] each, `sample_mask` [B]."""

    token_mask: Tensor
    sample_mask: Tensor
    advantages: Tensor
    prev: Tensor
    generation: Tensor
    reference: Tensor | None

    @classmethod
    def of(cls, data: BatchedDataDict[Any], like: Tensor, loss: ClippedPGLossFn) -> _Batch:
        def predicted(key: str) -> Tensor:
            require_shape(key, data[key], tuple(data["token_mask"].shape), loss)
            return data[key][:, 1:].to(like)

        return cls(
            token_mask=token_mask_of(data, like),
            sample_mask=sample_mask_of(data, like),
            advantages=predicted("advantages"),
            prev=like.detach() if loss.options.force_on_policy_ratio else predicted("prev_logprobs"),
            generation=predicted("generation_logprobs"),
            reference=predicted("reference_policy_logprobs") if "reference_policy_logprobs" in data else None,
        )


@dataclass(frozen=True)
class _Reduction:
    """How per-token values become one number that adds up over microbatches."""

    token_mask: Tensor
    sample_mask: Tensor
    global_valid_seqs: Tensor
    global_valid_toks: Tensor
    options: _Options

    def token_mean(self, values: Tensor) -> Tensor:
        return masked_mean(values, self.token_mask, global_normalization_factor=self.global_valid_toks)

    def mean(self, values: Tensor) -> Tensor:
        if self.options.token_level_loss:
            return self.token_mean(values)
        length = self.options.dr_grpo_max_tokens
        per_sequence = masked_mean(values, self.token_mask, dim=-1, global_normalization_factor=length)
        return masked_mean(per_sequence, self.sample_mask, global_normalization_factor=self.global_valid_seqs)


assert {field.name for field in fields(_Options)} == set(ClippedPGLossConfig.__annotations__)
